"""Experiments made from Python objects are stopped, resumed, and refused in one line where they cannot be made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perada
from perada.adapters import Residual
from perada.callbacks import Callback, EarlyStopping
from perada.data import Federation
from perada.errors import InputError
from perada.experiment import Experiment
from perada.methods import Ditto, FedAvg, FedAvgFT, PerAda, Scaffold
from perada.report.facts import gather_facts
from perada.runs.moment import Progress

TRAIN = perada.Train(rounds=4, cohort=0, epochs=1, batch=8)


def federation() -> Federation:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 255, (2, 40, 3, 8, 8), generator=draw, dtype=torch.uint8), torch.arange(40) % 3
    return Federation.from_arrays({"north": (x[0], y), "south": (x[1], y)})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


def experiment(method: Any = Ditto(), rounds: int = 4, **how: Any) -> Experiment:
    return Experiment(net(), federation(), method, train=replace(TRAIN, rounds=rounds), **how)


class StopAt(Callback):
    def __init__(self, round: int) -> None:
        self.at = round

    def start(self, experiment: Experiment) -> None:
        self.experiment = experiment

    def round(self, progress: Progress) -> None:
        if progress.round == self.at:
            self.experiment.stop()


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


def weights(run: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in (run / "checkpoints" / "round-0004").glob("*.safetensors")}


@pytest.mark.parametrize("same_object", [True, False])
@pytest.mark.parametrize("method", [Ditto(), FedAvgFT(), Scaffold()], ids=lambda m: type(m).__name__)
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(method: Any, same_object: bool, tmp_path: Path) -> None:
    experiment(method).run(tmp_path / "whole")
    stopped = experiment(method)
    run = stopped.run(tmp_path / "run", [StopAt(1)])
    assert (stopped.now.round, run.summary["round"], run.config.train.rounds) == (2, 2, 4)
    again = stopped if same_object else experiment(method)
    assert again.run(tmp_path / "run", resume=True).summary["round"] == 4
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_loop_goes_on_after_a_stop() -> None:
    exp = experiment(FedAvgFT())
    for _ in exp.rounds():
        exp.stop()
    assert exp.now.round == 2
    assert [row.round for row in exp.rounds()][-1] == 4


def test_an_interrupted_summary_is_not_that_of_fewer_rounds(tmp_path: Path) -> None:
    class Fail(StopAt):
        def round(self, progress: Progress) -> None:
            if progress.round == self.at:
                raise RuntimeError("boom")

    experiment(rounds=2).run(tmp_path / "run")
    with pytest.raises(RuntimeError, match="boom"):
        experiment().run(tmp_path / "run", [Fail(3)], resume=True)
    assert not (tmp_path / "run" / "summary.json").exists()


def test_fewer_rounds_than_there_are_is_refused(tmp_path: Path) -> None:
    experiment().run(tmp_path / "run")
    with pytest.raises(InputError, match="has 4 rounds already"):
        experiment(rounds=2).run(tmp_path / "run", resume=True)
    with pytest.raises(InputError, match=r"another method\.name"):
        experiment(FedAvgFT()).run(tmp_path / "run", resume=True)


def test_an_experiment_that_is_trained_already_is_saved_all_the_same(tmp_path: Path) -> None:
    exp = experiment()
    list(exp.rounds())
    exp.run(tmp_path / "run")
    loaded = perada.load(tmp_path / "run", model=net(), federation=federation())
    assert loaded.experiment.now.round == 4


def test_patience_begins_anew_with_every_run() -> None:
    listener = EarlyStopping(1)
    for _ in range(2):
        listener.start(experiment())
        assert (listener.best, listener.waited) == (-1.0, 0)


def test_a_method_that_a_folder_cannot_name_is_refused_before_training(tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Local(Ditto):
        pass

    with pytest.raises(InputError, match="cannot name the method"):
        experiment(Local()).run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: experiment(PerAda), "method must be an object, such as .*, not the class PerAda"),
        (lambda: experiment("perada"), "method must be an object, such as .*, not str"),
        (lambda: Experiment(net(), {}, Ditto()), "federation must be a Federation, not dict"),  # type: ignore[arg-type]
        (lambda: Experiment(net(), federation(), Ditto(), train={}), "train must be a Train"),  # type: ignore[arg-type]
        (lambda: Experiment(net(), federation(), Ditto(), distill=1), "distill must be a"),  # type: ignore[arg-type]
        (lambda: experiment(sed=1), "unknown option 'sed': did you mean 'seed'"),
        (lambda: experiment(PerAda(distils=False), adapter=Residual), "adapter must be an object"),
        (lambda: experiment().run("never", EarlyStopping()), "callbacks must be a list"),  # type: ignore[arg-type]
        (lambda: experiment().run("never", [EarlyStopping]), "callbacks must be a list"),  # type: ignore[list-item]
    ],
)
def test_wrong_arguments_are_one_line(make: Callable[[], object], line: str) -> None:
    with pytest.raises(InputError, match=line):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: perada.Train(weighting="size"),  # type: ignore[arg-type]
        lambda: perada.Distill(guard="client"),  # type: ignore[arg-type]
        lambda: experiment(device="tpu"),
        lambda: experiment(precision="fp16"),
    ],
)
def test_a_word_that_is_no_choice_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InputError, match="must be one of"):
        make()


def test_load_refuses_other_things(tmp_path: Path) -> None:
    experiment(rounds=1).run(tmp_path / "run")
    with pytest.raises(InputError, match=r"model must be a torch\.nn\.Module, not str"):
        perada.load(tmp_path / "run", model="resnet8")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="federation must be a Federation, not int"):
        perada.load(tmp_path / "run", federation=3)  # type: ignore[arg-type]


def test_lanes_at_once_are_those_asked_for() -> None:
    assert experiment(lanes=1).lanes == 1
    assert experiment().lanes == 0


def test_a_stopped_run_is_finished_in_its_report(tmp_path: Path) -> None:
    first = experiment().run(tmp_path / "first", [StopAt(1)])
    x, y = torch.zeros(30, 3, 8, 8, dtype=torch.uint8), torch.arange(30) % 3
    other = Federation.from_arrays(dict.fromkeys(("east", "west"), (x, y)))
    second = Experiment(net(), other, Ditto(), train=replace(TRAIN, rounds=1)).run(tmp_path / "second")
    facts = gather_facts([first, second])
    assert [f.state for f in facts] == ["", ""]
    assert [f.clients for f in facts] == [("north", "south"), ("east", "west")]


class Twice(nn.Module):
    """A layer under two names, and a weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(3, 3, 3, padding=1)
        self.b, self.c, self.head = self.a, nn.Conv2d(3, 3, 3, padding=1), nn.Linear(3, 3)
        self.c.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.c(self.b(self.a(x)).relu()).mean((2, 3)))  # type: ignore[no-any-return]


def test_a_layer_that_is_used_twice_trains_and_is_given_back() -> None:
    exp = Experiment(Twice(), federation(), FedAvg(), train=TRAIN)
    before = {n: t.clone() for n, t in exp.model.module.state_dict().items()}
    exp.round()
    for name, tensor in exp.model.module.state_dict().items():
        assert torch.equal(tensor, before[name])
    trained = exp.model.plain(exp.now.broadcast)
    values, own = trained.state_dict(), exp.now.broadcast.params["a.weight"][0]
    assert all(torch.equal(values[f"{layer}.weight"], own) for layer in "abc")
    images = torch.rand(2, 3, 8, 8)
    torch.testing.assert_close(exp.model.on_all(exp.now.broadcast, images)[0], trained(images))


@pytest.mark.parametrize("adapter", [None, Residual(where="^0$"), Residual()], ids=repr)
def test_the_summary_counts_the_adapters_there_are(adapter: Any, tmp_path: Path) -> None:
    deep = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), *list(net())[2:4], nn.Linear(5, 3))
    exp = Experiment(deep, federation(), PerAda(distils=False), adapter=adapter, train=replace(TRAIN, rounds=1))
    summary = exp.run(tmp_path / "run").summary
    sizes = summary["parameters"]
    assert summary["bytes_up"] == 4 * 2 * (sizes["communicated"] + sizes["communicated_buffers"])
