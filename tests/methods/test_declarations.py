"""What methods declare: sizes, what leaves a client, settings, and that each of them is a method of its own."""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from small import SMALL, adapters, flags, small
from torch import Tensor

import perada
import perada.methods
from perada.callbacks import OnRound
from perada.cli import main as cli
from perada.client.scores import logits_on
from perada.client.trainer import Train, Trainer
from perada.config import build
from perada.data import Client, Federation
from perada.errors import InputError
from perada.experiment import Experiment, lanes_of
from perada.lanes import State, gather
from perada.methods import REGISTRY, method_sizes
from perada.methods.fedavg_ft import FedAvgFT
from perada.models.resnet import ResNet, resnet
from perada.runs.options import RunOptions

from .tiny import simulation

# INTERFACE's names; trained and communicated in millions as SPEC, section 5, has them; then communicated exactly,
# parameters and buffers. ResNet-18 and 10 classes: 11,181,642 in all, of them 5,130 in the head, 7,808 in the
# batch norms but the downsample ones, 4,731,968 in the input group; adapters add 1,400,320. Running statistics:
# 9,600 numbers (2 · 4,800 channels), of them 3,968 in the input group; 7,680 more in adapters.
FULL, HEAD, NORMS, INPUT, ADDED = 11_181_642, 5_130, 7_808, 4_731_968, 1_400_320
TABLE: dict[str, tuple[float, float, int, int]] = {
    "perada": (2.82, 1.41, ADDED + NORMS + HEAD, 17_280),
    "perada-no-kd": (2.82, 1.41, 1_413_258, 17_280),
    "standalone": (11.18, 0.0, 0, 0),
    "mtl": (11.18, 11.18, FULL, 9_600),
    "fedavg-ft": (11.18, 11.18, FULL, 9_600),
    "pfedme": (22.36, 11.18, FULL, 9_600),
    "apfl": (22.36, 11.18, FULL, 9_600),
    "ditto": (22.36, 11.18, FULL, 9_600),
    "fedbn": (11.18, 11.17, 11_173_834, 0),
    "lg-fedavg": (11.18, 0.005, HEAD, 0),
    "fedrep": (11.18, 11.17, FULL - HEAD, 9_600),
    "fedalt-input": (11.18, 6.45, 6_449_674, 9_600 - 3_968),
    "fedalt-output": (11.18, 11.17, 11_176_512, 9_600),
    "fedalt-adapter": (12.59, 11.18, FULL, 9_600),
    "fedsim-input": (11.18, 6.45, FULL - INPUT, 9_600 - 3_968),
    "fedsim-output": (11.18, 11.17, FULL - HEAD, 9_600),
    "fedsim-adapter": (12.59, 11.18, FULL, 9_600),
    "fedavg": (11.18, 11.18, FULL, 9_600),
    "fedprox": (11.18, 11.18, FULL, 9_600),
    "feddyn": (11.18, 11.18, FULL, 9_600),
    "feddf": (11.18, 11.18, FULL, 9_600),
    "scaffold": (11.18, 22.36, 2 * FULL, 9_600),  # the model and its control variate, which has no statistics
}
TRAINED = {11.18: FULL, 22.36: 2 * FULL, 2.82: 2 * 1_413_258, 12.59: FULL + ADDED}


def test_methods_prints_the_names_and_the_papers_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert len(printed) == 22
    found = {row["name"]: row for row in printed}
    assert found.keys() == TABLE.keys()
    for name, (trained, sent, exactly, buffers) in TABLE.items():
        row = found[name]
        assert abs(row["trained"] / 1e6 - trained) < 0.01, name
        assert abs(row["communicated"] / 1e6 - sent) < (0.01 if sent > 0.01 else 0.0005), name
        assert (row["trained"], row["communicated"], row["communicated_buffers"]) == (
            TRAINED[trained],
            exactly,
            buffers,
        )


@lru_cache
def resnet18() -> ResNet:
    return resnet("resnet18", 10)


@pytest.mark.parametrize("name", REGISTRY)
def test_an_upload_of_a_real_resnet18_has_the_declared_size(name: str) -> None:
    """One client, one step on two noise images: tensors counted, and their bytes as safetensors."""
    images = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    none = np.zeros(0, np.int64)
    client = Client("client-00", np.arange(2), none, none)
    names = tuple("abcdefghij")
    federation = Federation("noise", images, torch.tensor([3, 7]), names, (client,), (0.5,), (0.25,))
    method = REGISTRY[name]()
    model = lanes_of(resnet18(), method, "residual", None, RunOptions(device="cpu", precision="fp32"))
    _, broadcast, kept = method.init(model)
    trainer = Trainer(model, federation, [0], 0, 0, Train(epochs=1, batch=2, lr=0.01))
    upload, _ = method.client_update(trainer, broadcast, kept)
    assert trainer.outcome(upload)[1] == [True]
    _, _, params, buffers = TABLE[name]
    assert sum(t[0].numel() for t in upload.params.values()) == params
    assert sum(t[0].numel() for t in upload.buffers.values()) == buffers
    data = save({n: t[0].contiguous() for n, t in {**upload.params, **upload.buffers}.items()})
    assert len(data) - 8 - int.from_bytes(data[:8], "little") == 4 * (params + buffers)
    sizes = method_sizes(name)
    assert (sizes["communicated"], sizes["communicated_buffers"]) == (params, buffers)


# What a client keeps stays with it.

FAST: dict[str, Any] = {"data__server_val": 0.955, "data__val": 0.02, "data__test": 0.02, "run__precision": "fp64"}


def secrets_of(name: str, kept: State) -> dict[str, Tensor]:
    """Of what a client keeps, all that may not be sent.

    apfl keeps w_m beside v_m, to predict with the mixture: w_m is what it sends. pfedme's w_m has the running
    statistics of its θ, being never run itself.
    """
    found = dict(kept.params) if name == "pfedme" else {**kept.params, **kept.buffers}
    return {n: t for n, t in found.items() if not (name == "apfl" and n.startswith("w/"))}


KEEP = [n for n in REGISTRY if n not in ("fedavg", "fedprox", "feddf", "fedavg-ft", "mtl", "scaffold")]


@pytest.mark.parametrize("name", KEEP)
def test_nothing_a_client_keeps_is_in_its_upload(name: str) -> None:
    """Neither the memory nor, byte for byte, a tensor of any client's, under whatever name.

    mtl sends its personal models, by definition. scaffold sends every change of its control variate, which starts at
    zero. The other methods that are left out keep nothing.
    """
    sim = build(small(method__name=name, train__cohort=3, distill__steps=0, **FAST))
    sim.round()
    clients = sim.sampled(0)
    upload, kept = sim.method.client_update(sim.trainer(clients), sim.now.broadcast, gather(sim.now.kept, clients))
    secrets = secrets_of(name, kept)
    assert secrets
    memory = {t.untyped_storage().data_ptr() for t in upload.tensors()}
    assert not memory & {t.untyped_storage().data_ptr() for t in secrets.values()}
    sent = {n: t.contiguous() for n, t in {**upload.params, **upload.buffers}.items()}
    data = save(sent)
    assert all(t[0].numpy().tobytes() in data for t in sent.values())
    idle = {n for n in secrets if n.removeprefix("v/") in sim.model.inert}  # never trained: zero everywhere
    for n in secrets.keys() - idle:
        for k in range(len(clients)):
            assert secrets[n][k].numpy().tobytes() not in data, f"{n} of client {clients[k]} is sent"


@pytest.mark.parametrize("name", ["ditto", "apfl", "pfedme"])
def test_an_upload_does_not_depend_on_the_personal_model(name: str) -> None:
    sim = build(small(method__name=name, **FAST))
    other = State({n: p if n.startswith(("w/", "own/")) else p * 1.5 + 0.1 for n, p in sim.now.kept.params.items()})
    other = State(other.params, {n: b if n.startswith("w/") else b * 1.5 for n, b in sim.now.kept.buffers.items()})
    sent = []
    for kept in (sim.now.kept, other):
        upload, _ = sim.method.client_update(sim.trainer([0, 1]), sim.now.broadcast, gather(kept, [0, 1]))
        sent.append({**upload.params, **upload.buffers})
    assert [n for n in sent[0] if not torch.equal(sent[0][n], sent[1][n])] == []


# Every method is one of its own.

GLOBAL_AS_FEDAVG = {
    "fedavg-ft": "its rounds are FedAvg's, it fine-tunes afterwards",
    "ditto": "its personal models are trained beside FedAvg",
    "apfl": "its local version of the global model is trained as FedAvg's",
}


def test_no_two_methods_do_the_same() -> None:
    """Two rounds, two epochs (with one, fedrep is fedalt-output), the last stage: by the personal models' logits
    on the test images every pair differs, and the global models are equal where that is the method alone."""
    logits: dict[str, Tensor] = {}
    broadcast: dict[str, State] = {}
    for name in REGISTRY:
        sim = build(small(method__name=name, distill__guard="none", distill__steps=1, train__epochs=2, **FAST))
        for _ in range(2):
            sim.round()
        sim.finish()
        found = logits_on(sim.model, sim.personal(), sim.federation, sim.federation.test)
        logits[name] = found.expand(4, *found.shape[1:])
        broadcast[name] = sim.now.broadcast
        assert logits[name].isfinite().all()
    assert len(logits) == 22
    same = [(a, b) for a, b in itertools.combinations(REGISTRY, 2) if (logits[a] - logits[b]).abs().max() < 1e-8]
    assert same == []
    wanted = {frozenset(pair) for pair in itertools.combinations(["fedavg", *GLOBAL_AS_FEDAVG], 2)}
    assert {frozenset((a, b)) for a, b in itertools.combinations(REGISTRY, 2) if agree(broadcast[a], broadcast[b])} == (
        wanted
    )


def agree(a: State, b: State) -> bool:
    """Whether two broadcasts are the same model; one that sends nothing has none."""
    if not a.lanes or a.params.keys() != b.params.keys():
        return False
    return all(torch.allclose(p, b.params[n], rtol=0, atol=1e-8) for n, p in a.params.items())


FILES = sorted(set(Path(perada.methods.__file__).parent.glob("*.py")) - {Path(perada.methods.__file__)})
METHODS = [f for f in FILES if f.name != "contract.py"]
PREPRINTS = {"apfl", "lg_fedavg", "fedavg_ft"}  # a title and a year; they have no venue
VENUE = r"(ICML|ICLR|NeurIPS|CVPR|KDD|AISTATS|MLSys) (19|20)\d\d\b"


@pytest.mark.parametrize("path", METHODS, ids=lambda p: p.stem)
def test_a_method_is_one_short_file_with_its_paper_and_stands_on_its_own(path: Path) -> None:
    text = path.read_text("utf8")
    assert len(text.splitlines()) <= 100
    tree = ast.parse(text)
    (found,) = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert found.bases == []
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    assert imported == ["contract"]  # of this folder
    about = " ".join((ast.get_docstring(tree) or "").split())
    if path.stem != "standalone":
        assert re.search(r'et al\., ".+?", .*?\b(19|20)\d\d\b|& \w+, ".+?", .*?\b(19|20)\d\d\b', about)
        assert path.stem in PREPRINTS or re.search(VENUE, about)


def test_every_method_file_is_in_the_registry() -> None:
    made = {type(make()).__module__.rpartition(".")[2] for make in REGISTRY.values()}
    assert made == {f.stem for f in METHODS}
    kinds = {type(make()) for make in REGISTRY.values()}
    assert len(kinds) == len(METHODS) == 17
    assert all(kind.__mro__ == (kind, object) for kind in kinds)


# Settings.


@pytest.mark.parametrize("name", REGISTRY)
def test_momentum_is_refused_where_a_method_has_a_step_of_its_own(name: str) -> None:
    config = small(method__name=name, train__momentum=0.9, distill__steps=0)
    if name in ("pfedme", "apfl", "scaffold"):
        with pytest.raises(InputError, match=r"set Train\.momentum to 0"):
            build(config)
    else:
        assert build(config).train.momentum == 0.9


BAD = [
    *((m, "lam", "-0.1") for m in ("perada", "perada-no-kd", "mtl", "ditto", "pfedme")),
    *((m, "personal_epochs", "-1") for m in ("perada", "ditto", "fedalt-input", "fedrep", "fedavg-ft")),
    *((m, "personal_lr", "-0.5") for m in ("perada", "ditto", "fedalt-adapter", "fedrep", "fedavg-ft", "pfedme")),
    *(("pfedme", key, "-1") for key in ("eta", "beta", "inner_steps")),
    ("pfedme", "inner_steps", "0"),
    ("pfedme", "inner_steps", "1.5"),
    ("pfedme", "lam", "nan"),
    ("apfl", "alpha", "-0.1"),
    ("apfl", "alpha", "1.01"),
    ("apfl", "adaptive", "1"),
    ("fedprox", "mu", "-1"),
    ("fedprox", "mu", "inf"),
    ("feddyn", "alpha", "0"),
    ("feddyn", "alpha", "-1"),
    ("fedrep", "shared_epochs", "0"),
    ("fedalt-input", "own", "output"),  # the registry's choice
    ("fedsim-output", "own", "input"),
    ("perada-no-kd", "distils", "true"),
    ("fedsim-output", "personal_lr", "0.1"),  # trained at once: there is one rate
    ("scaffold", "server_lr", "-1"),
    ("fedavg", "lam", "1"),
    ("standalone", "mu", "1"),
]


@pytest.mark.parametrize(("name", "key", "value"), BAD)
def test_a_bad_setting_is_one_line_and_no_folder(
    name: str, key: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(["train", "digits", *flags(train__rounds=1), "--method", name, "--set", f"method.{key}={value}"]) == 2
    )
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert f"method.{key}" in said.err
    assert list(tmp_path.iterdir()) == []


# FedAvg+FT through perada.train: a stage after the last round.

SHORT = {**SMALL, "data.server_val": 0.955, "data.val": 0.02, "data.test": 0.02, "run.device": "cpu"}


def train(
    out: Path, method: str = "fedavg-ft", resume: bool = False, rounds: int = 2, **more: Any
) -> perada.runs.run.Run:
    return perada.train("digits", method=method, set={**SHORT, "train.rounds": rounds}, out=out, resume=resume, **more)


def rows(run: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("ft") / "whole").path


@pytest.fixture
def finishes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The round of every fine-tuning."""
    rounds: list[int] = []
    plain = FedAvgFT.finish

    def finish(self: FedAvgFT, trainer: Trainer, w: State, kept: State) -> State:
        rounds.append(trainer.round)
        return plain(self, trainer, w, kept)

    monkeypatch.setattr(FedAvgFT, "finish", finish)
    return rounds


def test_fine_tuning_is_done_once_and_the_last_evaluation_follows_it(tmp_path: Path, finishes: list[int]) -> None:
    run, fedavg = train(tmp_path / "ft"), train(tmp_path / "fedavg", "fedavg")
    assert finishes == [2]
    first, last = rows(run.path)
    assert first == rows(fedavg.path)[0]  # before the end: FedAvg's model
    wanted = rows(fedavg.path)[1]
    assert last["global_model"] == wanted["global_model"]
    assert last["local_test"] != wanted["local_test"]
    again = perada.load(run.path, device="cpu")
    assert again.evaluate(["local"])["local_test"].as_dict() == last["local_test"] == again.summary["local_test"]
    w = run.experiment.now.broadcast
    assert last["bytes_down"] - wanted["bytes_down"] == 4 * w.bytes_per_lane()  # w goes to every client once more
    assert last["bytes_up"] == wanted["bytes_up"]
    tuned = [again.state(c).params["fc.weight"] for c in again.clients]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations([*tuned, w.params["fc.weight"]], 2))
    assert len(adapters(run.path)) == len(adapters(fedavg.path)) + 4
    assert torch.equal(w.params["fc.weight"], fedavg.experiment.now.broadcast.params["fc.weight"])


def interrupt_in(name: str) -> Callable[..., Any]:
    """`Experiment.name` that stops the run when it is called after the last round."""
    plain = getattr(Experiment, name)

    def stop(self: Experiment, *args: Any, **kwargs: Any) -> Any:
        if self.now.round == 2:
            raise KeyboardInterrupt
        return plain(self, *args, **kwargs)

    return stop


@pytest.mark.parametrize("where", ["finish", "evaluate", "report"])
def test_stopped_around_the_fine_tuning_a_run_ends_in_the_same_bytes(
    where: str, tmp_path: Path, whole: Path, finishes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last round and before the stage, after it and before its evaluation, and after both."""

    def report(progress: Any) -> None:
        if where == "report" and progress.round == 2:
            raise KeyboardInterrupt

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        if where != "report":
            patch.setattr(Experiment, where, interrupt_in(where))
        with pytest.raises(KeyboardInterrupt):
            train(out, callbacks=[OnRound(report)])
    assert len(rows(out)) == (2 if where == "report" else 1)
    train(out, resume=True)
    assert finishes == [2]
    assert adapters(out) == adapters(whole)
    assert rows(out) == rows(whole)
    train(out, resume=True)  # nothing left to do
    assert finishes == [2]
    assert rows(out) == rows(whole)


def test_more_rounds_after_fine_tuning_go_on_from_w_and_fine_tune_again(
    tmp_path: Path, whole: Path, finishes: list[int]
) -> None:
    """Round 3 is not the last, so it shows FedAvg's model again."""
    out = tmp_path / "longer"
    train(out)
    train(out, resume=True, rounds=4)
    assert finishes == [2, 4]
    wanted = train(tmp_path / "four", rounds=4).path
    assert adapters(out) == adapters(wanted)
    assert adapters(out).keys() != adapters(whole).keys()
    assert [row["round"] for row in rows(out)] == [1, 2, 3, 4]
    assert rows(out) == rows(wanted)


def test_who_has_a_global_model() -> None:
    """Those of the paper's Table 2, and FedAvg+FT, which is FedAvg until its end. MTL's mean is a centre, no model that
    was trained; who shares a part of a model has none."""
    found = {name for name in REGISTRY if simulation(name).global_model is not None}
    generic = {"fedavg", "fedprox", "feddyn", "feddf", "scaffold"}
    assert found == generic | {"fedavg-ft", "pfedme", "apfl", "ditto", "perada", "perada-no-kd"}
