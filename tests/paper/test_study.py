"""What is chosen, and that no test label has a say in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import results
from experiments.plans import Choice
from experiments.running import reproduce
from experiments.study import Validation, elected, settings_of, settled, validation_of, winner
from perada.config import build, resolve
from perada.data import Federation, build_federation

from .tiny import TINY, place, staged

STUDY = Choice("s", ("a", "b", "c"), "study", "", "no-kd")
REFERENCE = Validation(80.0, 40.0)


def of(**scores: tuple[float | None, float | None, str | None]) -> dict[str, Validation]:
    return {name: Validation(*three) for name, three in scores.items()}


def test_the_best_on_the_servers_data_wins_among_those_that_keep_local() -> None:
    standing = of(a=(80.0, 41.0, "clients"), b=(79.71, 44.0, "clients"), c=(79.69, 60.0, "none"))
    assert elected(STUDY, standing, REFERENCE) == "b"
    assert elected(STUDY, {**standing, "c": Validation(79.7, 60.0, "none")}, REFERENCE) == "c", "0.3 is allowed"


def test_a_guard_by_the_labels_that_score_is_not_elected() -> None:
    standing = of(a=(80.0, 41.0, "clients"), b=(85.0, 90.0, "server"))
    assert elected(STUDY, standing, REFERENCE) == "a"


def test_of_equals_the_first_and_if_nobody_qualifies_too() -> None:
    assert elected(STUDY, of(a=(80.0, 41.0, None), b=(90.0, 41.0, None)), REFERENCE) == "a"
    assert elected(STUDY, of(a=(10.0, 41.0, None), b=(20.0, 99.0, None), c=(None, None, None)), REFERENCE) == "a"


def test_tuning_takes_the_best_local_and_passes_over_what_has_none() -> None:
    choice = Choice("t", ("a", "b", "c"))
    assert elected(choice, of(a=(None, 9.0, None), b=(5.0, 1.0, None), c=(5.0, 8.0, None)), None) == "b"


def test_a_stage_hands_on_its_winner_and_waits_for_all_of_its_runs() -> None:
    study = staged()
    found = of(**{"no-kd": (80.0, 40.0, None), "slow": (80.0, 50.0, "none")})
    assert winner(study, "first", found) is None
    assert settings_of(study, study.trial("long"), found) is None
    found |= of(fast=(80.0, 60.0, "none"))
    assert winner(study, "first", found) == "fast"
    long = settings_of(study, study.trial("long"), found)
    assert long is not None
    assert (long["distill.lr"], long["distill.steps"]) == (0.05, 12)
    found |= of(long=(80.0, 59.0, "none"), pulled=(80.0, 58.0, "none"))
    assert winner(study, "second", found) == "fast", "nobody beat the one before"
    own = {k: v for k, v in study.settings.items() if k.startswith("distill.")}
    assert settled(study, found) == {**own, "distill.lr": 0.05}
    end = settings_of(study, study.trial("end"), found)
    assert end is not None
    assert (end["train.rounds"], end["distill.lr"], end["distill.steps"]) == (3, 0.05, 4)
    found |= of(pulled=(80.0, 61.0, "none"))
    assert settled(study, found) == {**own, "distill.lr": 0.05, "distill.pull": 10.0}


def changed(part: str) -> Callable[..., Federation]:
    """`build_federation` with every label of one part of the data made wrong."""

    def build(*args: Any) -> Federation:
        found = build_federation(*args)
        targets = found.targets.clone()
        held = [found.server_val] if part == "server" else [getattr(c, part) for c in found.clients]
        for index in map(torch.from_numpy, held):
            targets[index] = (targets[index] + 1 + index % 8) % 10
        assert not torch.equal(targets, found.targets)
        return replace(found, targets=targets)

    return build


def numbers(home: Path) -> dict[str, Any]:
    """What the choices see, and what they came to."""
    held = results.read(home / "results", "digits")
    return {n: (validation_of(r), r["digest"]) for n, r in held.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("study")
    assert reproduce(staged(), place(home)).left == []
    return home


def test_poisoned_test_labels_change_no_choice(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole study, to the run that is tested: the same numbers to choose by, the same choice, the same settings;
    and that run's test score shows that the poison was poison."""
    monkeypatch.setattr("perada.config.build.build_federation", changed("test"))
    assert reproduce(staged(), place(tmp_path)).left == []
    assert numbers(tmp_path) == numbers(whole)
    clean, poisoned = (results.read(home / "results", "digits")["end"] for home in (whole, tmp_path))
    assert clean["last"]["local_test"] != poisoned["last"]["local_test"]
    assert clean["settings"] == poisoned["settings"]


@pytest.mark.parametrize("part", ["val", "server"])
def test_poisoned_validation_labels_are_seen(
    part: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the test above could not fail."""
    monkeypatch.setattr("perada.config.build.build_federation", changed(part))
    first = replace(staged(), trials=staged().trials[:3])
    reproduce(first, place(tmp_path))
    for name, (seen, _) in numbers(tmp_path).items():
        wanted = numbers(whole)[name][0]
        assert (seen.local != wanted.local) == (part == "val"), name
        assert (seen.server != wanted.server) == (part == "server"), name


def test_the_server_score_is_each_personal_models_accuracy_on_the_servers_images() -> None:
    sim = build(resolve("digits", TINY))
    sim.round()
    found = sim.evaluate(("server",))["server_val"]["per_client"]
    held, lanes = sim.federation.server_val, sim.personal()
    images = sim.federation.prepare(sim.federation.take(held), torch.float32)
    for m, client in enumerate(sim.federation.clients):
        plain = sim.model.plain(lanes.map(lambda t, m=m: t[m : m + 1]))  # type: ignore[misc]
        with torch.no_grad():
            right = plain(images).argmax(-1) == sim.federation.labels(held)
        assert found[client.name] == pytest.approx(100 * float(right.double().mean()))
    assert len(set(found.values())) > 1


class Untouchable:
    """In the place of test data: whatever is asked of it fails."""

    def refuse(self, *args: object, **kwargs: object) -> Any:
        raise AssertionError("test data were touched")

    __len__ = __iter__ = __getitem__ = __array__ = __getattr__ = __bool__ = refuse


def test_what_stands_for_election_touches_no_test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*args: Any) -> Federation:
        found = build_federation(*args)
        return replace(found, clients=tuple(replace(c, test=Untouchable()) for c in found.clients))

    monkeypatch.setattr("perada.config.build.build_federation", build)
    study = replace(staged(), trials=staged().trials[:-1])
    assert reproduce(study, place(tmp_path)).left == []
    with pytest.raises(AssertionError, match="touched"):  # the run that is tested does touch them
        reproduce(staged(), place(tmp_path))


def test_a_choice_sees_nothing_but_validation(whole: Path) -> None:
    """A result with everything else taken away gives the same."""
    for result in results.read(whole / "results", "digits").values():
        bare = {"validation": result["validation"], "guard": {"kind": result["guard"]["kind"]}}
        assert validation_of(bare) == validation_of(result)
