"""What a new user does from Python: own arrays, own network, own loop, callbacks, stopping, resuming and opening."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same_tensors
from PIL import Image
from safetensors.torch import load_file
from small import SMALL, adapters, as_older, everything
from torch import Tensor, nn

import perada
from perada.callbacks import Callback, EarlyStopping, OnRound, TensorBoard
from perada.client.scores import Scores
from perada.errors import InputError
from perada.experiment import Experiment
from perada.methods import Ditto, FedAvg, FedAvgFT, Method, PerAda
from perada.runs.moment import Evaluation, Progress
from perada.runs.options import RunOptions

DRAW = np.random.default_rng(0)
CLASSES = 3
PATTERNS = DRAW.normal(size=(CLASSES, 1, 8, 8))


def pictures(labels: np.ndarray) -> np.ndarray:
    """Grey images of 8×8 pixels: noise around a pattern per class."""
    noise = np.random.default_rng(len(labels)).normal(size=(len(labels), 1, 8, 8))
    return (120 + 50 * PATTERNS[labels] + 30 * noise).clip(0, 255).astype(np.uint8)


def labels(count: int, *shares: float) -> np.ndarray:
    return np.random.default_rng(count).choice(CLASSES, count, p=shares)


NORTH, SOUTH = labels(70, 0.7, 0.2, 0.1), labels(50, 0.1, 0.3, 0.6)
ARRAYS = {"north": (pictures(NORTH), NORTH), "south": (pictures(SOUTH), SOUTH)}
PUBLIC = torch.from_numpy(pictures(labels(32, 0.3, 0.3, 0.4)))


class Net(nn.Module):
    """A user's network: convolutions without batch norm, and a head `classify` that is not its last linear layer."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.features = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, padding=1))
            self.classify = nn.Linear(8, CLASSES)
            self.squeeze = nn.Linear(8, 8)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.classify(torch.relu(self.squeeze(self.features(images).mean((2, 3)))))
        return found


@pytest.fixture(scope="module")
def fed() -> perada.Federation:
    return perada.Federation.from_arrays(ARRAYS, val=0.15, test=0.2)


def made(
    fed: perada.Federation, method: Method | None = None, rounds: int = 3, public: Tensor = PUBLIC, **more: Any
) -> Experiment:
    return perada.Experiment(
        Net(),
        fed,
        method or PerAda(lam=0.5),
        adapter=perada.adapters.Residual(dropout=0.1),
        head="classify",
        public=public,
        train=perada.Train(rounds=rounds, cohort=2, epochs=1, batch=8, lr=0.05),
        distill=perada.Distill(steps=3, batch=16, candidates=(1,)),
        device="cpu",
        **more,
    )


def rows_of(run: perada.Run) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k != "seconds"} for row in run.metrics]


@pytest.fixture(scope="module")
def whole(fed: perada.Federation, tmp_path_factory: pytest.TempPathFactory) -> perada.Run:
    """Three rounds without a stop."""
    return made(fed).run(tmp_path_factory.mktemp("whole") / "run")


# A loop of one's own.


def test_own_arrays_and_an_own_network_train_in_an_own_loop(fed: perada.Federation, whole: perada.Run) -> None:
    exp = made(fed)
    net = {n: t.clone() for n, t in exp.net.state_dict().items()}
    found = list(exp.rounds())
    assert [row.round for row in found] == [1, 2, 3]
    assert all(isinstance(row, Evaluation) for row in found)
    assert exp.clients == ("north", "south")
    assert found[-1].distilled == 3
    last = {k: v for k, v in found[-1].as_dict().items() if k != "seconds"}
    assert last == rows_of(whole)[-1], "as in a run folder"
    assert_same_tensors(dict(exp.net.state_dict()), net)
    personal = exp.personal()
    assert not any(n.startswith(("squeeze", "features.0.weight")) for n in personal.params), "frozen"
    assert {"classify.weight", "features.0.adapter.conv.weight"} <= personal.params.keys()
    assert not torch.equal(personal.params["classify.weight"][0], personal.params["classify.weight"][1])


@pytest.mark.parametrize("method", [FedAvg(), Ditto(lam=0.3)], ids=repr)
def test_methods_of_whole_models_take_the_same_arguments(fed: perada.Federation, method: Method) -> None:
    (row,) = made(fed, method, rounds=1).rounds()
    assert row.has_global_model
    assert row.bytes_up == 2 * 4 * sum(p.numel() for p in Net().parameters())


def test_a_loop_of_rounds_without_evaluations(fed: perada.Federation) -> None:
    """`round()` and `evaluate()` are all there is below `rounds()`."""
    exp, other = made(fed), made(fed)
    for _ in range(3):
        exp.round()
    list(other.rounds())
    assert_same_tensors(everything(exp), everything(other))
    assert exp.evaluate(["local"]) is not None


def test_a_loop_that_is_stopped_goes_on_when_it_is_asked_again(fed: perada.Federation, whole: perada.Run) -> None:
    exp, seen = made(fed, rounds=3), []
    for row in exp.rounds():
        seen.append(row.round)
        if row.round == 1:
            exp.stop()
    assert seen == [1, 2]
    assert [row.round for row in exp.rounds()] == [2, 3], "round 2 is where it is, so it is measured again"
    assert_same_tensors(everything(exp), everything(whole.experiment))


def test_a_last_stage_follows_the_last_round_of_a_loop(fed: perada.Federation) -> None:
    exp = made(fed, FedAvgFT(), rounds=2)
    list(exp.rounds())
    assert exp.now.finished
    with pytest.raises(ValueError, match="last stage is done"):
        exp.round()


# Callbacks.


class Log(Callback):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def start(self, experiment: Experiment) -> None:
        self.events.append(("start", experiment.now.round))

    def round(self, progress: Progress) -> None:
        self.events.append(("round", progress.round, progress.row is not None))

    def evaluation(self, row: Evaluation) -> None:
        self.events.append(("evaluation", row.round))

    def end(self, experiment: Experiment) -> None:
        self.events.append(("end", experiment.now.round))


def test_a_callback_sees_start_round_evaluation_and_end(fed: perada.Federation, tmp_path: Path) -> None:
    log, rounds = Log(), list[int]()
    exp = made(fed, eval_every=2)
    exp.run(tmp_path / "run", callbacks=[log, OnRound(lambda p: rounds.append(p.round))])
    assert log.events == [
        ("start", 0),
        ("round", 0, False),
        ("round", 1, False),
        ("evaluation", 2),
        ("round", 2, True),
        ("evaluation", 3),
        ("round", 3, True),
        ("end", 3),
    ]
    assert rounds == [0, 1, 2, 3]


def test_callbacks_never_change_the_numbers(fed: perada.Federation, whole: perada.Run, tmp_path: Path) -> None:
    """With callbacks that evaluate, read and keep all they can get: the same bytes, the same rows."""

    class Curious(Log):
        def start(self, experiment: Experiment) -> None:
            super().start(experiment)
            self.experiment = experiment

        def round(self, progress: Progress) -> None:
            super().round(progress)
            torch.rand(3)
            self.experiment.evaluate(["local"])
            self.events.append(self.experiment.personal())

    run = made(fed).run(tmp_path / "run", [Curious(), EarlyStopping(patience=100), TensorBoard(tmp_path / "board")])
    assert adapters(run.path) == adapters(whole.path)
    assert rows_of(run) == rows_of(whole)


def test_tensorboard_gets_every_evaluation(fed: perada.Federation, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = made(fed, rounds=2).run(tmp_path / "run", callbacks=[TensorBoard(tmp_path / "board")])
    (file,) = [p for p in (tmp_path / "board").rglob("*") if p.is_file()]
    events = EventAccumulator(str(file.parent)).Reload()
    tags = events.Tags()["scalars"]
    tag = next(t for t in tags if "local_test" in t)
    found = [(e.step, e.value) for e in events.Scalars(tag)]
    assert [step for step, _ in found] == [1, 2]
    assert [v for _, v in found] == pytest.approx([row["local_test"]["mean"] for row in run.metrics], rel=1e-5)


def test_a_callback_stops_a_run_and_it_is_resumed(fed: perada.Federation, whole: perada.Run, tmp_path: Path) -> None:
    class Stop(Callback):
        def start(self, experiment: Experiment) -> None:
            self.experiment = experiment

        def evaluation(self, row: Evaluation) -> None:
            if row.round == 1:
                self.experiment.stop()

    exp = made(fed)
    stopped = exp.run(tmp_path / "run", callbacks=[Stop()])
    assert stopped.summary["round"] == 2, "the round after the call is the last"
    assert (stopped.path / "report.html").is_file()
    log = Log()
    resumed = made(fed).run(tmp_path / "run", callbacks=[log], resume=True)
    assert log.events[0] == ("start", 2)
    assert resumed.summary["round"] == 3
    assert adapters(resumed.path) == adapters(whole.path)
    assert rows_of(resumed) == rows_of(whole)


def test_the_stopped_experiment_itself_goes_on(fed: perada.Federation, whole: perada.Run, tmp_path: Path) -> None:
    exp = made(fed)
    exp.run(tmp_path / "run", callbacks=[OnRound(lambda p: exp.stop() if p.round == 0 else None)])
    assert exp.now.round == 1
    again = exp.run(tmp_path / "run", resume=True)
    assert adapters(again.path) == adapters(whole.path)


def test_an_interrupted_run_is_resumed(fed: perada.Federation, whole: perada.Run, tmp_path: Path) -> None:
    def interrupt(progress: Progress) -> None:
        if progress.round == 2:
            raise KeyboardInterrupt

    log = Log()
    with pytest.raises(KeyboardInterrupt):
        made(fed).run(tmp_path / "run", callbacks=[log, OnRound(interrupt)])
    assert log.events[-1] == ("round", 2, True), "there is no end of what was interrupted"
    resumed = made(fed).run(tmp_path / "run", resume=True)
    assert adapters(resumed.path) == adapters(whole.path)
    assert rows_of(resumed) == rows_of(whole)


@pytest.mark.parametrize("name", ["on_round", "rounds", "on_train_end", "evaluated", "started", "end_run"])
def test_a_misspelled_hook_is_refused_where_the_class_is_written(name: str) -> None:
    with pytest.raises(InputError, match=f"Mine.{name} is never called: the hooks are start, round, evaluation"):
        type("Mine", (Callback,), {name: lambda self, progress: None})


def test_a_callback_may_have_methods_and_values_of_its_own() -> None:
    type("Mine", (Callback,), {"rounds": 3, "write": lambda self: None, "_on_round": lambda self: None})


def row(round: int, value: float | None) -> Evaluation:
    return Evaluation(round, {"local_val": Scores({"north": value})})


@pytest.mark.parametrize(
    ("values", "stopped_at"),
    [
        ([50, 60, 60, 59, 70], 4),  # the best is of round 2; rounds 3 and 4 are no better
        ([50, 60, 59, 61, 60, 60], 6),
        ([50, 51, 52, 53], None),
        ([None, None, None], None),
        ([60, None, 59, 59], 4),
    ],
)
def test_early_stopping_waits_for_its_patience(values: list[float | None], stopped_at: int | None) -> None:
    class Stub:
        stopped: int | None = None

        def stop(self) -> None:
            if self.stopped is None:
                self.stopped = at

    stub, stopping = Stub(), EarlyStopping(patience=2)
    stopping.start(stub)  # type: ignore[arg-type]
    for at, value in enumerate(values, 1):
        stopping.evaluation(row(at, value))
    assert stub.stopped == stopped_at


def test_early_stopping_ends_a_run(fed: perada.Federation, tmp_path: Path) -> None:
    """A learning rate of nothing: no score ever rises."""
    still = perada.Train(rounds=20, cohort=2, epochs=1, batch=8, lr=1e-12)
    exp = perada.Experiment(Net(), fed, FedAvg(), head="classify", train=still, device="cpu")
    run = exp.run(tmp_path / "run", callbacks=[EarlyStopping(patience=2)])
    assert run.summary["round"] == 4, "rounds 2 and 3 are no better than 1, the next is the last"


# Opening what was trained.


def test_a_run_is_opened_with_what_its_folder_cannot_hold(
    fed: perada.Federation, whole: perada.Run, tmp_path: Path
) -> None:
    run = perada.load(whole.path, model=Net(), federation=fed)
    assert run.clients == ("north", "south")
    own = run.model("south")
    assert type(own) is Net
    assert not own.training
    assert_same_tensors(dict(own.state_dict()), dict(whole.model("south").state_dict()))
    assert run.evaluate("local")["local_test"].as_dict() == run.summary["local_test"]
    client = fed.clients[1]
    logits = own(run.normalise(fed.images[client.test]))
    right = 100 * float((logits.argmax(-1) == fed.targets[client.test]).double().mean())
    assert right == pytest.approx(run.summary["local_test"]["per_client"]["south"])
    Image.fromarray(ARRAYS["south"][0][0, 0]).save(tmp_path / "one.png")
    (said,) = run.predict("south", tmp_path / "one.png")
    wanted = own(run.normalise(torch.from_numpy(ARRAYS["south"][0][:1]))).softmax(-1)[0]
    assert said["probabilities"] == pytest.approx({name: float(wanted[int(name)]) for name in fed.classes}, rel=1e-5)
    run.export("south", tmp_path / "part.safetensors")
    run.export("south", tmp_path / "model.safetensors", merged=True)
    net = Net()
    net.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    images = run.normalise(fed.images[:3])
    assert torch.allclose(net.eval()(images), own(images), atol=1e-5)
    assert load_file(tmp_path / "part.safetensors").keys() == set(run.state("south").params) | set(
        run.state("south").buffers
    )
    run.export("south", tmp_path / "model.pt2")
    program = torch.export.load(tmp_path / "model.pt2").module()
    pictures = fed.images[:3].permute(0, 2, 3, 1).expand(-1, -1, -1, 3)
    assert torch.allclose(program(pictures), own(images).softmax(-1), atol=1e-5)


def test_the_networks_weights_come_from_the_folder(whole: perada.Run, fed: perada.Federation) -> None:
    """Other weights in the network that is given do not matter, and it is not changed."""
    given = Net()
    with torch.no_grad():
        for p in given.parameters():
            p.zero_()
    own = perada.load(whole.path, model=given, federation=fed).model("north")
    assert_same_tensors(dict(own.state_dict()), dict(whole.model("north").state_dict()))
    assert not any(p.any() for p in given.parameters())


def test_what_the_folder_cannot_hold_is_asked_for_by_name(whole: perada.Run, fed: perada.Federation) -> None:
    run = perada.load(whole.path)
    assert run.clients == ("north", "south"), "noted in the folder"
    assert run.summary == whole.summary
    for ask in (lambda: run.model("north"), lambda: run.state("north")):
        with pytest.raises(InputError, match=r"a network from Python: perada\.load\('.*', model=\.\.\.\)"):
            ask()
    with pytest.raises(InputError, match=r"data from Python: perada\.load\('.*', federation=\.\.\.\)"):
        perada.load(whole.path, model=Net()).evaluate("local")
    model = perada.load(whole.path, model=Net()).model("north")
    assert_same_tensors(dict(model.state_dict()), dict(whole.model("north").state_dict()))


def test_another_network_or_other_data_are_refused(whole: perada.Run, fed: perada.Federation) -> None:
    other = perada.Federation.from_arrays({**ARRAYS, "south": (ARRAYS["south"][0], SOUTH[::-1])}, val=0.15, test=0.2)
    less = perada.Federation.from_arrays({"north": ARRAYS["north"]}, val=0.15, test=0.2)
    for wrong in (other, less):
        with pytest.raises(InputError) as error:
            perada.load(whole.path, model=Net(), federation=wrong)
        assert "\n" not in str(error.value)
    wide = Net()
    wide.squeeze = nn.Linear(8, 9)
    wide.classify = nn.Linear(9, CLASSES)
    with pytest.raises(InputError) as error:
        perada.load(whole.path, model=wide, federation=fed).model("north")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"method": PerAda(lam=0.6)}, "another method.lam"),
        ({"seed": 3}, "another run.seed"),
        ({"method": Ditto()}, "another method"),
    ],
    ids=["lam", "seed", "method"],
)
def test_a_run_is_not_resumed_with_other_settings(
    change: dict[str, Any], says: str, fed: perada.Federation, whole: perada.Run
) -> None:
    before = adapters(whole.path)
    with pytest.raises(InputError, match=f"was made with {says}"):
        made(fed, **change).run(whole.path, resume=True)
    with pytest.raises(InputError):
        made(fed).run(whole.path)
    assert adapters(whole.path) == before


def test_other_weights_are_refused_on_a_resume(fed: perada.Federation, whole: perada.Run) -> None:
    exp = made(fed, rounds=4)
    with torch.no_grad():
        exp.net.squeeze.weight.add_(1.0)  # type: ignore[union-attr]
    with pytest.raises(InputError, match="the network's weights are not those of"):
        exp.run(whole.path, resume=True)


def test_other_public_images_are_refused_on_a_resume(fed: perada.Federation, whole: perada.Run, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(whole.path, path)
    with pytest.raises(InputError, match="the public images are not those that"):
        made(fed, rounds=4, public=PUBLIC.flip(-1)).run(path, resume=True)
    assert adapters(path) == adapters(whole.path)
    about = json.loads((path / "data.json").read_text())
    assert len(about.pop("public")) == 64
    as_older(path)
    (path / "data.json").write_text(json.dumps(about))  # as an older version wrote it
    made(fed, rounds=4, public=PUBLIC.flip(-1)).run(path, resume=True)


class Bare:
    """A method that is not a dataclass."""

    parts, init, personal = FedAvg.parts, FedAvg.init, FedAvg.personal
    client_update, server_update = FedAvg.client_update, FedAvg.server_update


class Plain(Bare):
    """It has an argument, which nobody can ask it for."""

    def __init__(self, strength: float) -> None:
        self.strength = strength


class Extended(FedAvg):
    """A subclass of a dataclass that is not one itself."""

    def __init__(self, strength: float) -> None:
        object.__setattr__(self, "strength", strength)


@pytest.mark.parametrize("method", [Plain(3.0), Extended(3.0)], ids=lambda m: type(m).__name__)
def test_a_method_whose_arguments_a_folder_would_lose_is_not_saved(
    method: Method, fed: perada.Federation, tmp_path: Path
) -> None:
    exp = made(fed, method=method)
    exp.round()
    with pytest.raises(InputError, match=f"cannot keep the arguments of {type(method).__name__}: make it a frozen"):
        exp.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    made(fed, method=Bare(), rounds=1).run(tmp_path / "run")  # type: ignore[arg-type]


# What a user gets wrong.


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: perada.Train(rounds="3"), "Train.rounds must be a whole number, not '3'"),  # type: ignore[arg-type]
        (lambda: perada.Train(rounds=2.5), "Train.rounds must be a whole number, not 2.5"),  # type: ignore[arg-type]
        (lambda: perada.Train(rounds=True), "Train.rounds must be a whole number, not True"),
        (lambda: perada.Train(lr=float("nan")), "Train.lr must be a finite number, not nan"),
        (lambda: perada.Train(lr=None), "Train.lr must be a number, not None"),  # type: ignore[arg-type]
        (lambda: perada.Distill(data=3), "Distill.data must be text, not 3"),  # type: ignore[arg-type]
        (lambda: perada.Distill(candidates=20), "Distill.candidates must be a list"),  # type: ignore[arg-type]
        (lambda: RunOptions(shifts="no"), "RunOptions.shifts must be true or false"),  # type: ignore[arg-type]
    ],
)
def test_an_option_of_another_type_is_refused_in_one_line(make: Callable[[], object], says: str) -> None:
    with pytest.raises(InputError) as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_options_take_numbers_of_arrays_and_whole_numbers_for_floats() -> None:
    train = perada.Train(rounds=np.int64(3), lr=1)  # type: ignore[arg-type]
    assert (train.rounds, train.lr) == (3, 1.0)
    assert isinstance(train.rounds, int)
    assert isinstance(train.lr, float)
    assert perada.Distill(candidates=[1, 2]).candidates == (1, 2)  # type: ignore[arg-type]


def test_mistakes_are_one_clear_line(fed: perada.Federation) -> None:
    with pytest.raises(InputError, match="no layer 'fc' that could be its head"):
        perada.Experiment(Net(), fed, FedAvg(), head="fc", train=perada.Train(cohort=2), device="cpu")
    with pytest.raises(InputError, match=r"Train\.cohort=8 but there are 2 clients"):
        perada.Experiment(Net(), fed, FedAvg(), head="classify", train=perada.Train(cohort=8), device="cpu")
    perada.Experiment(Net(), fed, FedAvg(), head="classify", device="cpu")  # by default all of them
    with pytest.raises(InputError, match="distillation needs public images"):
        perada.Experiment(Net(), fed, PerAda(), head="classify", train=perada.Train(cohort=2), device="cpu")
    four = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 7))
    with pytest.raises(InputError, match=r"must give logits \[2, 3\] for two images, not \[2, 7\]"):
        perada.Experiment(four, fed, FedAvg(), train=perada.Train(cohort=2), device="cpu")


# The commands from Python.


def test_compare_and_tune_are_callable(tmp_path: Path) -> None:
    settings = {**SMALL, "train.rounds": 1, "run.device": "cpu"}
    both = perada.compare("digits", methods=["fedavg", "scaffold"], set=settings, out=tmp_path / "both", baseline=False)
    assert [row["name"] for row in both.table()] == ["fedavg", "scaffold"]
    assert [run.config.method_name for run in both.runs] == ["fedavg", "scaffold"]
    del settings["train.lr"]
    rates = {"train.lr": [0.01, 0.03]}
    search = perada.tune("digits", methods="scaffold", set=settings, grid=rates, out=tmp_path / "search")
    assert (search.path / "tuned.toml").is_file()
    again = perada.train(str(search.path / "tuned.toml"), method="scaffold", out=tmp_path / "run")
    assert again.config.train.lr in (0.01, 0.03)
    with pytest.raises(InputError, match="did you mean 'scaffold'"):
        perada.compare("digits", methods=["scafold"], set=settings, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("call", [perada.train, perada.compare, perada.tune, lambda data: perada.load("x", data=data)])
def test_arrays_as_data_are_told_where_to_go(call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.toml").touch()
    x, y = np.zeros((200, 64, 64), np.uint8), np.zeros(200, np.int64)
    for data, kind in (((x, y), "tuple"), (x, "ndarray")):
        with pytest.raises(
            InputError, match=rf"not a {kind}: for arrays make perada.Federation.from_arrays\("
        ) as error:
            call(data=data)
        assert len(str(error.value)) < 300
