"""Who has spent what: per client, the noisy steps of all rounds so far. It only ever grows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .accountant import Step, Steps, epsilon
from .options import Privacy

Row = list[Any]  # samples, probability, most, noise, steps: as a ledger is written


def together(one: Steps, other: Steps) -> Steps:
    """Returns the steps of both."""
    return {step: one.get(step, 0) + other.get(step, 0) for step in (*one, *(s for s in other if s not in one))}


@dataclass(frozen=True)
class Ledger:
    """The steps that each client has spent, by name. A ledger does not change: `charged` returns another one."""

    spent: Mapping[str, Steps] = field(default_factory=dict)

    def of(self, client: str) -> Steps:
        return self.spent.get(client, {})

    def charged(self, bills: Mapping[str, Steps]) -> Ledger:
        """Returns the ledger after these clients have spent these steps, too."""
        return Ledger({**self.spent, **{name: together(self.of(name), steps) for name, steps in bills.items()}})

    def joined(self, other: Ledger) -> Ledger:
        """Returns the greater count of every step: of two ledgers of one training, that of its later moment."""
        names = dict.fromkeys((*self, *other))
        return Ledger({n: _greater(self.of(n), other.of(n)) for n in names})

    def epsilon(self, client: str, privacy: Privacy, bill: Steps | None = None) -> float:
        """Returns a client's ε so far; with a bill, what it would be after paying that."""
        return epsilon(together(self.of(client), bill or {}), privacy.delta, privacy.accountant)

    def __iter__(self) -> Iterator[str]:
        return iter(self.spent)

    def as_note(self) -> dict[str, list[Row]]:
        """Returns the ledger as JSON has it; `read` returns the very same one."""
        return {
            name: [[s.samples, s.probability, s.most, s.noise, count] for s, count in steps.items()]
            for name, steps in self.spent.items()
        }

    @classmethod
    def read(cls, note: Mapping[str, Iterable[Row]]) -> Ledger:
        """Returns the ledger that `as_note` wrote.

        Raises ValueError, TypeError or AttributeError for what it does not write.
        """
        return cls({str(name): dict(_entry(*row) for row in rows) for name, rows in note.items()})


def _greater(one: Steps, other: Steps) -> Steps:
    return {step: max(one.get(step, 0), other.get(step, 0)) for step in dict.fromkeys((*one, *other))}


def _entry(samples: Any, probability: Any, most: Any, noise: Any, count: Any) -> tuple[Step, int]:
    """Returns one row of a ledger, checked."""
    whole, numbers = (samples, most, count), (probability, noise)
    if not all(type(n) is int and n > 0 for n in whole) or not all(type(n) in (int, float) for n in numbers):
        raise ValueError("a row of a ledger must be three counts, a probability and a noise")
    if not 0 < probability <= 1 or not noise >= 0:
        raise ValueError("a row of a ledger has no such probability or noise")
    return Step(samples, float(probability), most, float(noise)), count
