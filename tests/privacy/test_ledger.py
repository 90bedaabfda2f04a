"""What clients have spent, and what that costs them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from perada.privacy import Privacy
from perada.privacy.accountant import Step, Steps, epsilon
from perada.privacy.ledger import Ledger
from perada.privacy.spending import SPENT, Spending

pytest.importorskip("dp_accounting")
PRIVACY = Privacy(noise=1.5)
SIZES = {"north": 60, "south": 200}


def spending(**options: Any) -> Spending:
    """Two clients, batches of 16, and two copies of two epochs in a round."""
    return Spending(Privacy(**{"noise": 1.5, **options}), SIZES, 16, (2, 2))


def bills(rounds: int = 1, **options: Any) -> dict[str, Steps]:
    return spending(**options).bills(rounds)


def test_a_bill_has_every_copy_epoch_and_round() -> None:
    (step, count), *more = bills(rounds=3)["south"].items()
    assert not more
    assert step == Step(200, 16 / 200, 32, 1.5)
    assert count == 3 * 2 * 2 * 13  # rounds, copies, epochs, ceil(200/16)


def test_only_those_with_a_bill_pay() -> None:
    ledger = Ledger().charged({"north": bills()["north"]})
    assert ledger.epsilon("south", PRIVACY) == 0 < ledger.epsilon("north", PRIVACY)
    assert list(ledger) == ["north"]


def test_rounds_add_up_and_a_charge_changes_nothing_else() -> None:
    first = Ledger().charged(bills())
    second = first.charged(bills())
    assert second.of("north") == bills(rounds=2)["north"]
    assert first.of("north") == bills()["north"]
    assert first.epsilon("north", PRIVACY, bills()["north"]) == second.epsilon("north", PRIVACY)


def test_rounds_with_another_noise_are_composed() -> None:
    both = Ledger().charged(bills()).charged(bills(noise=3.0))
    assert len(both.of("north")) == 2
    alone = [Ledger().charged(bills(noise=s)).epsilon("north", PRIVACY) for s in (1.5, 3.0)]
    assert max(alone) < both.epsilon("north", PRIVACY) < sum(alone) + 1


def test_of_two_moments_the_later_one_counts() -> None:
    """In whatever order they are given; a step that only one of them has stays."""
    early, late = Ledger().charged(bills()), Ledger().charged(bills(rounds=3)).charged(bills(noise=3.0))
    assert early.joined(late) == late.joined(early) == late
    assert Ledger().joined(early) == early.joined(Ledger()) == early.joined(early) == early


def test_a_written_ledger_is_the_same_when_it_is_read() -> None:
    ledger = Ledger().charged(bills(rounds=3)).charged(bills(noise=0.7))
    assert Ledger.read(json.loads(json.dumps(ledger.as_note()))) == ledger


@pytest.mark.parametrize(
    "row", [[60, 0.2, 32, 1.5, 0], [60, 0.2, 32, 1.5, 2.5], [60, 1.2, 32, 1.5, 3], [60, 0.2, 32, "1", 3], [1, 2], 7]
)
def test_a_ledger_that_was_not_written_so_is_refused(row: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        Ledger.read({"north": [row]})


def test_copies_of_different_lengths_are_one_bill() -> None:
    assert replace(spending(), epochs=(1, 3)).bill == bills()


def test_at_level_client_everybody_pays_for_the_draw_of_the_cohort() -> None:
    of = Spending(Privacy(noise=2.0, level="client"), {f"c{i}": 10 for i in range(20)}, 16, (5, 5), cohort=8)
    assert of.bills(30)["c0"] == of.bills(30)["c19"] == {Step(20, 0.4, 20, 2.0): 30}
    memory = of.charged({}, ["c3"])
    assert len(memory[SPENT]) == 20
    assert len(set(of.epsilons(memory).values())) == 1


def test_a_client_is_exhausted_just_before_it_would_pass_the_budget() -> None:
    of, memory, rounds = spending(budget=6.0), dict[str, Any](), 0
    while "north" not in of.exhausted(memory):
        memory, rounds = of.charged(memory, ["north"]), rounds + 1
        assert of.epsilons(memory)["north"] <= 6.0
    assert rounds == 2
    assert of.epsilons(of.charged(memory, ["north"]))["north"] > 6.0
    assert "south" not in of.exhausted(memory)


def test_the_noise_of_a_target_keeps_the_client_with_the_least_samples_below_it() -> None:
    solved = replace(spending(noise=0.0, target=4.0)).solved(rounds=2)
    assert solved.target == 0
    spent = {n: epsilon(steps, 1e-5) for n, steps in bills(rounds=2, noise=solved.noise).items()}
    assert max(spent.values()) == spent["north"] == pytest.approx(4.0, abs=0.01)
    assert spent["south"] < spent["north"] <= 4.0


def test_without_privacy_nothing_is_spent() -> None:
    of = Spending(Privacy(), SIZES, 16, (2,))
    assert of.charged({}, ["north"]) == {} == of.epsilons({})
    assert of.exhausted({}) == ()
