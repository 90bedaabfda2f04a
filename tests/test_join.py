"""A new client joins a finished run: it gets a personal model, and nobody else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small import SMALL, tree

import perada
from perada.cli import main as cli
from perada.client.interval import interval, wilson
from perada.client.scores import personal_thresholds
from perada.data.digits import digits
from perada.errors import InputError, RunError
from perada.lanes import repeat
from perada.methods import REGISTRY
from perada.runs.join import default_rounds

SITES = ("east", "north", "west")
SETTINGS: dict[str, Any] = {
    **{k: v for k, v in SMALL.items() if not k.startswith("data.")},
    "data.name": "folder",
    "data.partition": "site",
    "data.size": 8,
    "data.val": 0.2,
    "data.test": 0.3,
    "run.device": "cpu",
}


def write(path: Path, name: str, at: np.ndarray, site: np.ndarray | None = None) -> Path:
    data = digits()
    more = {} if site is None else {"site": site}
    names = np.array(data.classes)
    np.savez(path / name, images=data.images[at, 0], labels=data.targets[at], classes=names, **more)
    return path / name


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits of three sites in `others.npz`, and of a fourth with fewer classes in `new.npz`."""
    home = tmp_path_factory.mktemp("world")
    order = np.random.default_rng(0).permutation(len(digits().targets))
    owner = np.repeat(np.array(SITES), 40)
    write(home, "others.npz", order[:120], owner)
    few = order[120:][np.isin(digits().targets[order[120:]], [1, 3, 5])]
    write(home, "new.npz", few[:60])
    return home


def trained(world: Path, method: str, **set: Any) -> perada.Run:
    out = world / "runs" / "-".join([method, *map(str, set.values())])
    if not out.exists():
        more = {k.replace("__", "."): v for k, v in set.items()}
        settings = {**SETTINGS, "data.root": str(world / "others.npz"), **more}
        perada.train("digits", method=method, set=settings, out=out)
    return perada.load(out)


@pytest.fixture(scope="module")
def joined(world: Path) -> tuple[perada.Run, perada.Run, dict[str, Any], dict[str, Any]]:
    """Returns the old run, the new client's, and all files of the old one before and after."""
    old = trained(world, "perada")
    before = tree(old.path)
    new = perada.join(old.path, data=world / "new.npz", name="south", rounds=3, out=world / "joined", say=print)
    return old, new, before, tree(old.path)


def test_nobody_else_changes(joined: Any) -> None:
    _, _, before, after = joined
    assert before == after
    assert any("client" in name or "checkpoints" in name for name in before)


def test_the_new_client_gets_the_methods_own_update_from_the_global_adapter(joined: Any) -> None:
    """Three calls of PerAda's client_update by hand, always from the old run's last broadcast."""
    old, new, _, _ = joined
    experiment, sent = new.experiment, old.experiment.now.broadcast
    kept = experiment.model.part_of(sent)
    for round in range(3):
        trainer = experiment.cohort.trainer_of([0], round)
        _, kept = experiment.method.client_update(trainer, sent, kept)
    again = perada.load(new.path)
    state = again.state("south")
    assert state.params.keys() == kept.params.keys()
    assert all(torch.equal(state.params[n], kept.params[n]) for n in kept.params)
    assert all(torch.equal(state.buffers[n], kept.buffers[n]) for n in kept.buffers)
    assert not torch.equal(*(s.params[next(iter(kept.params))] for s in (state, sent))), "it was trained"
    broadcast = again.experiment.now.broadcast
    assert all(torch.equal(broadcast.params[n], sent.params[n]) for n in sent.params)


def test_its_scores_stand_beside_a_lone_models_and_the_global_models(joined: Any) -> None:
    """Counted again from the models themselves."""
    old, new, _, _ = joined
    told, fed = new.summary["joined"], new.federation
    test = fed.clients[0].test
    images, labels = fed.images[test], fed.targets[test]
    assert told["test_images"] == len(test) > 5

    def right(module: torch.nn.Module) -> int:
        with torch.no_grad():
            return int((module(new.normalise(images)).argmax(-1) == labels).sum())

    again = perada.load(new.path)
    of_global = old.experiment.model.plain(old.experiment.now.broadcast)
    for kind, module in (("personal", again.model("south")), ("global", of_global)):
        assert told[kind]["score"] == pytest.approx(100 * right(module) / len(test)), kind
        assert told[kind]["interval"] == pytest.approx(wilson(right(module), len(test)))
    assert new.summary["local_test"]["per_client"] == {"south": told["personal"]["score"]}
    assert 0 <= told["standalone"]["score"] <= 100


def test_the_lone_model_is_standalone_for_as_many_rounds(joined: Any, world: Path) -> None:
    _, new, _, _ = joined
    settings = {**SETTINGS, "data.root": str(world / "new.npz"), "train.rounds": 3, "train.cohort": 0}
    federation = new.federation
    alone = perada.train("digits", method="standalone", set=settings, out=world / "alone", federation=federation)
    assert alone.summary["local_test"]["mean"] == new.summary["joined"]["standalone"]["score"]


def test_the_new_client_adapts_the_stages_that_the_run_adapts(world: Path) -> None:
    """Where the backbone itself says which stages those are, as in the preset `folder`."""
    small = {"train.rounds": 1, "train.cohort": 0, "distill.steps": 0}
    auto = {"model.backbone": "efficientnet_lite0", "model.weights": "random", "model.adapt_from": "auto"}
    settings = {**SETTINGS, "data.root": str(world / "others.npz"), **small, **auto}
    old = perada.train("digits", set=settings, out=world / "runs" / "stage7")
    new = perada.join(old, data=world / "new.npz", name="south", out=world / "joined-stage7")
    assert new.experiment.adapt_from == old.experiment.adapt_from == "stage7"
    told, personal = new.summary["joined"], perada.load(new.path).state("south")
    sent = old.experiment.now.broadcast
    assert personal.params.keys() == sent.params.keys()
    assert personal.buffers.keys() == sent.buffers.keys()
    assert new.summary["parameters"]["trained"] == old.summary["parameters"]["trained"]
    assert set(told) >= {"personal", "standalone", "global"}


def test_everything_that_opens_a_run_opens_it(joined: Any, world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, new, _, _ = joined
    from PIL import Image

    picture = world / "scan.png"
    Image.fromarray(digits().images[0, 0]).save(picture)
    run = str(new.path)
    assert cli.main(["predict", run, "--client", "south", str(picture), "--json"]) == 0
    (seen,) = json.loads(capsys.readouterr().out)
    assert sum(seen["probabilities"].values()) == pytest.approx(1)
    assert cli.main(["evaluate", run, "--on", "local", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["local_test"]["per_client"]
    assert found == {"south": new.summary["joined"]["personal"]["score"]}
    assert cli.main(["export", run, "--client", "south", "--out", str(world / "south.safetensors")]) == 0
    assert cli.main(["report", run]) == 0
    page = (new.path / "report.html").read_text("utf8")
    assert new.summary["bytes_up"] == new.summary["parameters"]["communicated"] == 0, "it sends nothing"
    assert ">0 <small>(0.0 %)</small>" in page
    assert "A new client" in page
    assert f"{new.summary['joined']['personal']['score']:.2f}" in page
    capsys.readouterr()
    assert cli.main(["train", "--out", run, "--resume"]) == 2
    assert "is of a client that joined a run" in capsys.readouterr().err


def test_the_command_prints_one_document(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = trained(world, "perada")
    words = ["join", str(old.path), "--data", str(world / "new.npz"), "--name", "far", "--rounds", "1"]
    assert cli.main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == f"{old.path}-far"
    assert told.keys() >= {"personal", "standalone", "global", "test_images", "client", "rounds"}
    assert cli.main([*words, "--out", str(world / "again")]) == 0
    text = capsys.readouterr().out
    for title in ("personal", "trained alone", "global"):
        assert title in text
    assert cli.main([*words, "--out", str(world / "again")]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert cli.main([*words, "--out", str(world / "again"), "--overwrite"]) == 0


def test_it_trains_as_often_as_a_client_took_part(world: Path) -> None:
    assert default_rounds(trained(world, "perada")) == 1, "2 rounds of 2 clients of 3"
    assert default_rounds(trained(world, "fedavg-ft", train__rounds=6)) == 4


LONE = ["standalone", "mtl", "fedbn", "lg-fedavg", "fedrep", "fedalt-output", "fedsim-adapter"]
SHARED = ["fedavg", "fedprox", "feddyn", "feddf", "scaffold"]
PERSONAL = ["perada", "perada-no-kd", "ditto", "apfl", "pfedme", "fedavg-ft"]


@pytest.mark.parametrize("method", [*LONE, *SHARED])
def test_a_method_without_a_global_model_or_a_personal_one_says_so(world: Path, method: str) -> None:
    old = trained(world, method, train__rounds=1)
    wanted = "has no global model" if method in LONE else "keeps nothing personal"
    with pytest.raises(InputError, match=f"^{method} {wanted}") as refused:
        perada.join(old, data=world / "new.npz", name="south", out=world / "never", say=print)
    assert "\n" not in str(refused.value)
    assert not (world / "never").exists()


def test_every_method_is_of_one_kind() -> None:
    groups = {"fedalt-output": "fedalt-", "fedsim-adapter": "fedsim-"}
    known = {*LONE, *SHARED, *PERSONAL}
    others = [n for n in REGISTRY if n not in known and not n.startswith(tuple(groups.values()))]
    assert others == []


@pytest.mark.parametrize("method", PERSONAL[1:])
def test_every_method_with_both_can_be_joined(world: Path, method: str) -> None:
    """The first personal model is the global one: nothing is trained with a learning rate near zero."""
    old = trained(world, method, train__rounds=1)
    new = perada.join(old, data=world / "new.npz", name="south", rounds=2, out=world / f"j-{method}", say=print)
    state, sent = perada.load(new.path).state("south"), old.experiment.global_model
    moved = {n: float((state.params[n] - sent.params[n]).abs().max()) for n in sent.params}
    assert 0 < max(moved.values()) < 1, "near the global model, and trained"
    first = new.experiment.method.personal(
        old.experiment.now.broadcast, repeat(new.experiment.method.init(new.experiment.model)[2], 1)
    )
    assert all(torch.allclose(first.params[n], sent.params[n]) for n in sent.params)


def test_a_network_that_says_itself_which_stages_are_adapted(world: Path) -> None:
    """The folder preset's adapt_from=auto: the new client's frozen stages are those of the old run."""
    settings = {"model__backbone": "efficientnet_lite0", "model__weights": "random", "model__adapt_from": "auto"}
    old = trained(world, "perada", train__rounds=1, data__normalise="auto", **settings)
    assert old.experiment.adapt_from
    new = perada.join(old, data=world / "new.npz", name="south", rounds=1, out=world / "stages", say=print)
    assert new.experiment.adapt_from == old.experiment.adapt_from
    assert new.experiment.federation.features is not None, "the frozen stages are computed once"
    assert new.summary["parameters"]["trained"] == old.summary["parameters"]["trained"]
    assert new.summary["joined"].keys() >= {"personal", "standalone", "global"}
    again = perada.load(new.path)
    assert again.evaluate("local")["local_test"].mean == new.summary["joined"]["personal"]["score"]


def test_it_notices_drift_by_its_own_data_alone(world: Path) -> None:
    """The old run took g from all clients' label counts. From its own alone, nothing would ever be drift."""
    old = trained(world, "perada", train__rounds=1, drift__prior="shared")
    new = perada.join(old, data=world / "new.npz", name="south", rounds=1, out=world / "aware", say=print)
    by = perada.load(new.path).calibrations["south"]
    assert by.everyone == pytest.approx([0.1] * 10)
    assert by.deviation > 0


def test_thresholds_of_labels_are_chosen_for_it(tmp_path: Path) -> None:
    data, sites = digits(), ("east", "north", "west")
    y = np.stack([data.targets % 2, data.targets > 4], 1).astype(np.uint8)
    for file, rows in (("others", slice(0, 180)), ("new", slice(180, 260))):
        more = {"site": np.repeat(np.array(sites), 60)} if file == "others" else {}
        names = np.array(["odd", "large"])
        np.savez(tmp_path / file, images=data.images[rows, 0], labels=y[rows], classes=names, **more)
    settings = {**SETTINGS, "data.root": str(tmp_path / "others.npz"), "distill.steps": 0, "train.rounds": 1}
    old = perada.train("digits", set=settings, out=tmp_path / "run")
    new = perada.join(old, data=tmp_path / "new.npz", name="south", rounds=2, out=tmp_path / "joined", say=print)
    (wanted,) = personal_thresholds(new.experiment.model, new.experiment.personal(), new.federation).values()
    assert perada.load(new.path).personal("south").thresholds == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ({"name": "east"}, "'east' is a client of"),
        ({"name": "a/b"}, "cannot be a client's name"),
        ({"rounds": 0}, "at least one round"),
        ({"data": "nowhere"}, "nowhere"),
    ],
)
def test_bad_input_is_one_line(world: Path, words: dict[str, Any], wrong: str) -> None:
    old = trained(world, "perada")
    given = {"name": "south", "data": world / "new.npz", "out": world / "never", **words}
    with pytest.raises(InputError, match=wrong):
        perada.join(old, say=print, **given)
    assert not (world / "never").exists()


@pytest.mark.parametrize("inside", ["", "new"])
def test_the_old_folder_is_never_written_to(world: Path, inside: str) -> None:
    old = trained(world, "perada")
    before = tree(old.path)
    with pytest.raises(InputError, match="stays as it is"):
        perada.join(old, data=world / "new.npz", name="south", out=old.path / inside, overwrite=True)
    assert tree(old.path) == before


def test_a_full_disk_is_one_line(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("perada.runs.folder.RunFolder.save", full)
    with pytest.raises(RunError, match=r"full: No space left on device.*join again"):
        perada.join(trained(world, "perada"), data=world / "new.npz", name="south", rounds=1, out=world / "full")


def test_intervals_by_hand() -> None:
    """Wilson's interval of 8 of 10 and of 0 of 10, as in Wilson (1927) and any table of it."""
    assert wilson(8, 10) == pytest.approx((49.02, 94.33), abs=0.01)
    assert wilson(0, 10) == pytest.approx((0, 27.75), abs=0.01)
    assert wilson(10, 10) == pytest.approx((72.25, 100), abs=0.01)
    assert wilson(0, 0) is None
    logits = torch.tensor([[2.0, 0.0]] * 8 + [[0.0, 2.0]] * 2)
    assert interval(logits, torch.zeros(10, dtype=torch.int64)) == wilson(8, 10)
    assert interval(logits[:0], torch.zeros(0, dtype=torch.int64)) is None


def test_the_interval_of_an_auc_holds_it_and_gets_narrower() -> None:
    rng = np.random.default_rng(1)
    widths = []
    for images in (40, 640):
        targets = torch.from_numpy(rng.integers(0, 2, (images, 1))).float()
        logits = targets + torch.from_numpy(rng.normal(size=(images, 1)))
        low, high = interval(logits, targets) or (0, 0)
        assert low < 76 < high, "P(x + 1 > y) of two normals is 76%"
        widths.append(high - low)
    assert 2 < widths[0] / widths[1] < 8, "16 times the images: about a quarter of the width"
