"""What the rounds of a training cost its clients, who may still take part, and how much noise a target needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from .accountant import Step, Steps, check_installed, solve
from .ledger import Ledger, together
from .options import Privacy
from .sampling import cohort_plan, plan

SPENT = "privacy"  # in the memory of a Moment: the ledger


@dataclass(frozen=True)
class Spending:
    """What the clients of a training spend.

    sizes: training samples per client; a client without any has nothing to lose. epochs: of each copy that a client
    trains in a round. cohort: clients per round, 0 for all.
    """

    privacy: Privacy
    sizes: Mapping[str, int]
    batch: int
    epochs: Sequence[int]
    cohort: int = 0

    def bills(self, rounds: int = 1) -> dict[str, Steps]:
        """Returns what each client spends in so many rounds in which it takes part.

        At level `client` all pay in every round, drawn or not: the draw is part of the mechanism.
        """
        privacy, noise = self.privacy, self.privacy.noise
        if privacy.of_clients:
            of_all = cohort_plan(len(self.sizes), self.cohort, rounds, privacy)
            return {name: {Step.of(of_all, noise): of_all.steps} for name in self.sizes}
        return {name: self._bill(samples, rounds) for name, samples in self.sizes.items() if samples}

    def _bill(self, samples: int, rounds: int) -> Steps:
        bill: Steps = {}
        for epochs in self.epochs:
            one = plan(samples, self.batch, epochs, self.privacy)
            bill = together(bill, {Step.of(one, self.privacy.noise): one.steps * rounds})
        return bill

    @cached_property
    def bill(self) -> dict[str, Steps]:
        """What each client pays for one round."""
        return self.bills()

    def charged(self, memory: Mapping[str, Any], trained: Sequence[str]) -> dict[str, Any]:
        """Returns the entry of the memory after these clients trained a round."""
        if not self.privacy.on or not self.bill:
            return {}
        paying = self.sizes if self.privacy.of_clients else trained
        bills = {name: self.bill[name] for name in paying if name in self.bill}
        return {SPENT: ledger_in(memory).charged(bills).as_note()}

    def epsilons(self, memory: Mapping[str, Any]) -> dict[str, float]:
        """Returns the ε so far of each client; empty without privacy, or where only the clients know."""
        if not self.privacy.on:
            return {}
        ledger = ledger_in(memory)
        return {name: ledger.epsilon(name, self.privacy) for name in self.bill}

    def exhausted(self, memory: Mapping[str, Any]) -> tuple[str, ...]:
        """Returns the clients that another round would take beyond `Privacy.budget`."""
        if not self.privacy.on or not self.privacy.budget:
            return ()
        ledger, most = ledger_in(memory), self.privacy.budget
        return tuple(n for n, bill in self.bill.items() if ledger.epsilon(n, self.privacy, bill) > most)

    def over(self, memory: Mapping[str, Any]) -> bool:
        """Returns whether the budget allows nobody another round."""
        return bool(self.bill) and len(self.exhausted(memory)) == len(self.bill)

    def solved(self, rounds: int) -> Privacy:
        """Returns the options with the least noise for which no client passes `Privacy.target` in so many rounds.

        Every client is taken to train in every round. That is exact with full participation, and safe otherwise. The
        target becomes the budget, if there is none, so that a run that is prolonged keeps it, too.
        """
        check_installed()

        def bills(noise: float) -> list[Steps]:
            return list(replace(self, privacy=replace(self.privacy, noise=noise, target=0.0)).bills(rounds).values())

        noise = solve(bills, self.privacy.target, self.privacy.delta, self.privacy.accountant)
        return replace(self.privacy, noise=noise, target=0.0, budget=self.privacy.budget or self.privacy.target)


def ledger_in(memory: Mapping[str, Any]) -> Ledger:
    """Returns the ledger that the memory of a Moment holds; raises ValueError or TypeError for a damaged one."""
    return Ledger.read(memory.get(SPENT, {}))
