"""What is chosen, and that no test label has a say in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import results
from experiments.running import run_experiment
from experiments.study import (
    Scores,
    Validation,
    elected,
    noise_of,
    scores_of,
    settings_of,
    settled,
    validation_of,
    winner,
)
from experiments.trials import Choice
from perada.config import build, resolve
from perada.data import Federation, build_federation

from .tiny import TINY, place, settling, staged

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
    assert run_experiment(staged(), place(home)).left == []
    return home


def test_poisoned_test_labels_change_no_choice(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole study, to the run that is tested: the same numbers to choose by, the same choice, the same settings;
    and that run's test score shows that the poison was poison."""
    monkeypatch.setattr("perada.config.objects.build_federation", changed("test"))
    assert run_experiment(staged(), place(tmp_path)).left == []
    assert numbers(tmp_path) == numbers(whole)
    clean, poisoned = (results.read(home / "results", "digits")["end"] for home in (whole, tmp_path))
    assert clean["last"]["local_test"] != poisoned["last"]["local_test"]
    assert clean["settings"] == poisoned["settings"]


@pytest.mark.parametrize("part", ["val", "server"])
def test_poisoned_validation_labels_are_seen(
    part: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this the test above could not fail."""
    monkeypatch.setattr("perada.config.objects.build_federation", changed(part))
    first = replace(staged(), trials=staged().trials[:3])
    run_experiment(first, place(tmp_path))
    for name, (seen, _) in numbers(tmp_path).items():
        wanted = numbers(whole)[name][0]
        assert (seen.local != wanted.local) == (part == "val"), name
        assert (seen.server != wanted.server) == (part == "server"), name


def test_the_server_score_is_each_personal_models_accuracy_on_the_servers_images() -> None:
    sim = build(resolve("digits", TINY))
    sim.round()
    row = sim.evaluate(("server",))
    assert row is not None
    found = row.scores["server_val"].per_client
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

    monkeypatch.setattr("perada.config.objects.build_federation", build)
    study = replace(staged(), trials=staged().trials[:-1])
    assert run_experiment(study, place(tmp_path)).left == []
    with pytest.raises(AssertionError, match="touched"):  # the run that is tested does touch them
        run_experiment(staged(), place(tmp_path))


def test_a_choice_sees_nothing_but_validation(whole: Path) -> None:
    """A result with everything else taken away gives the same."""
    for result in results.read(whole / "results", "digits").values():
        rows = [{k: row[k] for k in ("round", "local_val", "server_val") if k in row} for row in result["rows"]]
        bare = {"validation": result["validation"], "guard": {"kind": result["guard"]["kind"]}}
        bare |= {"rows": rows, "rounds": result["rounds"]}
        assert validation_of(bare) == validation_of(result)


def seen(local: float, server: float, guard: str | None = "none") -> Validation:
    """A run of the rule `settle`, by its second half; its last round says something else."""
    return Validation(0.0, 99.0, guard, local, server)


def contest() -> dict[str, Validation]:
    """Equal runs differ by 0.5 with seed 0, so that the noise is 0.5; the reference has 40.0 and 42.0."""
    same = {"no-kd-0": seen(80.0, 39.5), "no-kd-0b": seen(80.0, 40.0), "no-kd-0c": seen(80.0, 40.5)}
    return {**same, "no-kd-1": seen(80.0, 42.0)}


def both(name: str, *scores: Validation) -> dict[str, Validation]:
    return {f"{name}-{seed}": one for seed, one in enumerate(scores)}


def test_the_noise_is_what_equal_runs_differ_by() -> None:
    study = settling()
    found = contest()
    assert noise_of(study, found) == Scores(0.0, 0.5)
    assert scores_of(study, "no-kd", found) == Scores(80.0, 41.0), "equal runs first, then the seeds"
    assert noise_of(study, {"no-kd-0": found["no-kd-0"], "no-kd-1": found["no-kd-1"]}) is None
    assert scores_of(study, "hard", both("hard", seen(80.0, 50.0))) is None, "a seed is missing"


def test_a_gain_within_twice_the_noise_does_not_count() -> None:
    study, found = settling(), contest()
    slow, hard = both("slow", seen(80.0, 41.0), seen(80.0, 43.0)), both("hard", seen(79.7, 41.1), seen(79.7, 43.1))
    assert winner(study, "which", {**found, **slow}) is None, "a candidate is not done"
    assert winner(study, "which", {**found, **slow, **both("hard", seen(79.69, 50.0), seen(79.69, 50.0))}) == "no-kd"
    assert winner(study, "which", {**found, **slow, **hard}) == "hard", "1.1 above, where twice the noise is 1.0"
    assert winner(study, "which", {**found, **slow, **both("hard", seen(80, 41.0), seen(80, 43.0))}) == "no-kd"
    own = {k: v for k, v in study.settings.items() if k.startswith("distill.")}
    assert settled(study, {**found, **slow, **hard}) == {**own, "distill.lr": 0.05}
    assert settled(study, {**found, **slow, **both("hard", seen(80, 41.0), seen(80, 43.0))}) is None


def test_labels_at_the_server_and_controls_are_not_chosen() -> None:
    study, found = settling(), contest()
    slow, hard = both("slow", seen(80, 42.0), seen(80, 44.0)), both("hard", *[seen(90.0, 90.0, "server")] * 2)
    assert winner(study, "which", {**found, **slow, **hard, **both("wide", seen(99, 99), seen(99, 99))}) == "slow"


def test_poisoned_test_labels_change_nothing_of_the_rule_settle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scores(home: Path) -> dict[str, Any]:
        held = results.read(home / "results", "digits")
        found = {n: validation_of(r) for n, r in held.items()}
        assert all(v.later_server is not None and v.later_local is not None for v in found.values())
        return {**found, "won": winner(settling(), "which", found), "noise": noise_of(settling(), found)}

    assert run_experiment(settling(), place(tmp_path / "clean")).left == []
    clean = scores(tmp_path / "clean")
    assert clean["won"] is not None
    assert clean["noise"] == Scores(0.0, 0.0), "on a CPU equal runs are equal"
    for part in ("test", "server"):
        monkeypatch.setattr("perada.config.objects.build_federation", changed(part))
        assert run_experiment(settling(), place(tmp_path / part)).left == []
    assert scores(tmp_path / "test") == clean
    assert scores(tmp_path / "server") != clean, "poisoned validation labels are seen"
