"""Test sets by name (`--on fog:3`): which images and labels they are, what is refused, and how models score on them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score
from small import SMALL, lanes_of, pixel_model, pixels

import perada
from perada.cli import main as cli
from perada.client.scores import scores_on
from perada.data import Client, Federation, named_sets, testsets
from perada.data.cache import cache_folder
from perada.data.corruptions import CORRUPTIONS, corrupt
from perada.errors import InputError
from perada.lanes import State

NONE = np.zeros(0, np.int64)


def federation(n: int = 12, size: int = 32, classes: int = 10, multilabel: bool = False) -> Federation:
    """Two clients whose test data are not in the order of the images: the evens, then the odds from the back."""
    rng = np.random.default_rng(0)
    images = torch.from_numpy(rng.integers(0, 256, (n, 3, size, size), np.uint8))
    targets: torch.Tensor = torch.from_numpy(rng.integers(0, classes, n))
    if multilabel:
        targets = torch.from_numpy(rng.integers(0, 2, (n, classes))).float()
    index = np.arange(n)
    clients = (Client("a", NONE, NONE, index[::2]), Client("b", NONE, NONE, index[1::2][::-1].copy()))
    names = tuple(f"class-{i}" for i in range(classes))
    return Federation("test", images, targets, names, clients, (0.5,) * 3, (0.25,) * 3)


POOL = [0, 2, 4, 6, 8, 10, 11, 9, 7, 5, 3, 1]  # Global-test of `federation()`


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """CIFAR-10.1 and two corruptions of CIFAR-10-C, laid out as published, three images each."""
    rng = np.random.default_rng(1)
    new, c = tmp_path / "CIFAR-10.1", tmp_path / "CIFAR-10-C"
    new.mkdir()
    c.mkdir()
    np.save(new / "cifar10.1_v6_data.npy", rng.integers(0, 256, (3, 32, 32, 3), np.uint8))
    np.save(new / "cifar10.1_v6_labels.npy", np.array([7, 0, 9], np.int32))
    for name in CORRUPTIONS:
        np.save(c / f"{name}.npy", rng.integers(0, 256, (15, 32, 32, 3), np.uint8))
    np.save(c / "labels.npy", np.tile(np.array([4, 8, 2], np.uint8), 5))
    return tmp_path


# What a name stands for.


@pytest.mark.parametrize(
    ("name", "severities", "wanted"),
    [
        ("fog:3", (1, 2, 3, 4, 5), [("fog", 3)]),
        ("fog", (1, 2, 3, 4, 5), [("fog", s) for s in (1, 2, 3, 4, 5)]),
        ("fog", (5, 2), [("fog", 5), ("fog", 2)]),
        ("fog:1", (4,), [("fog", 1)]),  # what is written behind the colon goes first
        ("shifted:3", (1, 2, 3, 4, 5), [(k, 3) for k in CORRUPTIONS]),
        ("shifted", (2, 4), [(k, s) for k in CORRUPTIONS for s in (2, 4)]),
    ],
)
def test_corruptions_of_global_test(name: str, severities: Sequence[int], wanted: list[tuple[str, int]]) -> None:
    f = federation(size=8)
    order = np.sort(POOL)  # an image is corrupted by its place in the whole set, whoever holds it
    clean, back = f.images.numpy()[order], np.searchsorted(order, POOL)
    found = list(named_sets(f, name, severities=severities))
    assert len(found) == len(wanted)
    for (images, targets), (kind, severity) in zip(found, wanted, strict=True):
        assert np.array_equal(images, corrupt(clean, kind, severity)[back]), (kind, severity)
        assert targets.tolist() == f.targets[POOL].tolist()


def test_shifted_is_19_corruptions_at_5_severities() -> None:
    found = list(named_sets(federation(n=2, size=8), "shifted"))
    assert len(found) == 19 * 5
    assert len({images.tobytes() for images, _ in found}) > 90


def test_the_published_sets(official: Path) -> None:
    f, root = federation(), str(official)
    ((images, targets),) = named_sets(f, "cifar10.1", root)
    raw = np.load(official / "CIFAR-10.1" / "cifar10.1_v6_data.npy")
    assert np.array_equal(images, raw.transpose(0, 3, 1, 2))
    assert targets.tolist() == [7, 0, 9]
    assert targets.dtype == torch.int64
    raw = np.load(official / "CIFAR-10-C" / "fog.npy").transpose(0, 3, 1, 2)
    ((images, targets),) = named_sets(f, "cifar10-c:fog:3", root)
    assert np.array_equal(images, raw[6:9])
    assert targets.tolist() == [4, 8, 2]
    every = list(named_sets(f, "cifar10-c:fog", root))
    assert np.array_equal(np.concatenate([images for images, _ in every]), raw)
    some = list(named_sets(f, "cifar10-c:fog", root, severities=(5, 1)))
    assert np.array_equal(np.concatenate([images for images, _ in some]), raw[[12, 13, 14, 0, 1, 2]])
    assert sum(1 for _ in named_sets(f, "cifar10-c", root)) == 19 * 5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fogg", "did you mean 'fog'"),
        ("fogg:3", "did you mean"),
        ("shiftd", "did you mean 'shifted'"),
        ("cifar10.2", "did you mean 'cifar10.1'"),
        ("locl", "did you mean 'local'"),
        ("", "known:"),
        (":3", "unknown test set"),
        ("fog:6", "1 to 5"),
        ("fog:0", "1 to 5"),
        ("fog:-1", "1 to 5"),
        ("fog:", "1 to 5"),
        ("fog:3.0", "1 to 5"),
        ("shifted:fog", "1 to 5"),
        ("fog:3:4", "'4'"),
        ("fog:3:", "has no meaning there"),
        ("shifted:3:fog", "'fog'"),
        ("cifar10.1:fog", "'fog'"),
        ("cifar10-c:fogg", "did you mean 'fog'"),
        ("cifar10-c:3", "unknown corruption"),
        ("cifar10-c:fog:9", "1 to 5"),
        ("cifar10-c:fog:3:4", "'4'"),
    ],
)
def test_names_that_are_refused(name: str, says: str, official: Path) -> None:
    """When the name is given, not when its first image is asked for."""
    with pytest.raises(InputError, match=says):
        named_sets(federation(), name, str(official))


@pytest.mark.parametrize("name", ["cifar10.1", "cifar10-c:fog:1", "cifar10-c"])
@pytest.mark.parametrize("other", [{"classes": 9}, {"classes": 100}, {"size": 16}, {"multilabel": True}])
def test_the_published_sets_need_cifar10s_classes_and_size(name: str, other: dict[str, Any], official: Path) -> None:
    with pytest.raises(InputError, match="10 classes and 32×32"):
        list(named_sets(federation(**other), name, str(official)))


@pytest.mark.parametrize(("name", "get"), [("cifar10.1", "cifar10.1"), ("cifar10-c:fog", "cifar10-c")])
def test_published_sets_that_are_not_there(name: str, get: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{tmp_path}.*perada data get {get}"):
        list(named_sets(federation(), name, str(tmp_path)))


# The cache.


def test_only_large_test_sets_are_kept_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache"
    below, above = federation(n=1365), federation(n=1366)  # 3,072 bytes an image; from 4 MiB on
    assert testsets._CACHED == 4 * 2**20
    list(named_sets(below, "brightness:1"))
    assert list((tmp_path / "cache").rglob("*")) == []
    ((made, _),) = named_sets(above, "brightness:1")
    (kept,) = (tmp_path / "cache" / "corruptions").glob("*/*.npy")
    assert kept.name == "brightness-1.npy"
    assert np.array_equal(np.load(kept), made[np.argsort(above.test)])
    np.save(kept, np.full_like(made, 9))
    ((again, _),) = named_sets(above, "brightness:1")
    assert (again == 9).all(), "it is read from there"


def test_where_nothing_can_be_kept_it_is_made_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(testsets, "_CACHED", 1)
    f = federation(size=8)
    ((made, _),) = named_sets(f, "contrast:5")
    order = np.sort(POOL)
    assert np.array_equal(made, corrupt(f.images.numpy()[order], "contrast", 5)[np.searchsorted(order, POOL)])


# Scores on them.


def labelled(*rows: Sequence[float]) -> Federation:
    """Two clients, three labels; what they hold does not matter to `scores_on`."""
    clients = (Client("a", NONE, NONE, NONE), Client("b", NONE, NONE, NONE))
    return Federation("x", pixels(0), torch.tensor(rows), ("bright", "dark", "never"), clients, (0.0,), (0.5,))


def test_scores_are_means_over_the_sets_label_by_label() -> None:
    """Client a scores a label by the pixel, b by its negative: their AUCs add up to 100."""
    f = labelled([0.0, 0.0, 0.0])
    model, lanes = pixel_model(0.0, 0.0, 0.0), lanes_of([1.0, 1.0, 1.0], [-1.0, -1.0, -1.0])
    images = pixels(10, 20, 30, 40).numpy()
    first = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    second = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    found = scores_on(model, lanes, f, [(images, first), (images, second)])
    # bright: 4 of 4 pairs in order, then 3 of 4; dark: 0 of 3, then 2 of 4; never: one class only.
    assert found.per_client == pytest.approx({"a": (50.0 + 62.5) / 2, "b": (50.0 + 37.5) / 2})
    assert found.per_label == pytest.approx({"bright": 50.0, "dark": 50.0, "never": None})
    alone = scores_on(model, lanes, f, [(images, first)])
    assert alone.per_client == {"a": 50.0, "b": 50.0}
    one = scores_on(model, lanes_of([1.0, 1.0, 1.0]), f, [(images, first)])
    assert one.per_label == {"bright": 100.0, "dark": 0.0, "never": None}
    assert one.per_client == {"a": 50.0, "b": 50.0}, "a lane that all share"


def test_a_label_undefined_in_one_of_the_sets_has_no_mean() -> None:
    f = labelled([0.0, 0.0, 0.0])
    images = pixels(10, 20).numpy()
    both, one = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    found = scores_on(pixel_model(0.0, 0.0, 0.0), lanes_of([1.0, 1.0, 1.0]), f, [(images, both), (images, one)])
    assert found.per_label == {"bright": 100.0, "dark": None, "never": None}


# In a run.


def accuracy(net: torch.nn.Module, images: np.ndarray, targets: torch.Tensor) -> float:
    with torch.no_grad():
        logits = net(((torch.from_numpy(images).float() / 255 - 0.3) / 0.35).repeat(1, 3, 1, 1))
    return 100 * float((logits.argmax(-1) == targets).double().mean())


def test_a_runs_summary_has_the_shifted_scores_of_personal_and_global_models(tmp_path: Path) -> None:
    """19 corruptions at run.severities, by plain modules one at a time."""
    more = {"run.shifts": True, "run.severities": [2, 5], "method.name": "perada-no-kd", "train.rounds": 1}
    more["data.test"] = 0.02
    run = perada.train("digits", set={**SMALL, **more}, out=tmp_path / "run")
    f = run.federation
    order = np.sort(f.test)
    clean, targets = f.images[order].numpy(), f.targets[order]
    copies = [corrupt(clean, kind, s) for kind in CORRUPTIONS for s in (2, 5)]
    nets = {c: run.model(c) for c in run.clients}
    wanted = {c: np.mean([accuracy(nets[c], x, targets) for x in copies]) for c in nets}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["shifted"]["per_client"] == pytest.approx(wanted)
    assert summary["shifted"]["mean"] == pytest.approx(np.mean(list(wanted.values())))
    broadcast: State = run.experiment.now.broadcast
    net = run.experiment.model.plain(broadcast)
    shared = np.mean([accuracy(net, x, targets) for x in copies])
    assert summary["global_model"]["shifted"] == pytest.approx(shared)
    assert len({*wanted.values(), shared}) > 1
    found = run.evaluate(["shifted:2", "shifted:5"])
    both = [np.mean([s.per_client[c] for s in found.values()]) for c in run.clients]
    assert both == pytest.approx(list(wanted.values())), "evaluate gives the same"


@pytest.fixture(scope="module")
def labels_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sites, three labels: bright follows the pixels, odd is noise and, at west, never in the test data, and
    never is in nobody's test data."""
    rng, n = np.random.default_rng(0), 80
    images = rng.integers(0, 256, (n, 8, 8, 3), np.uint8)
    images[::2] //= 3
    site = np.where(np.arange(n) < 40, "east", "west")
    split = np.where(np.arange(n) % 4 == 3, "test", np.where(np.arange(n) % 4 == 2, "val", "train"))
    labels = np.stack([np.arange(n) % 2, rng.integers(0, 2, n), rng.integers(0, 2, n)], 1)
    labels[split == "test", 0] = np.arange(20) % 2
    labels[(split == "test") & (site == "west"), 1] = 0
    labels[split == "test", 2] = 0
    home = tmp_path_factory.mktemp("labels")
    names = np.array(["bright", "odd", "never"])
    np.savez(home / "scans.npz", images=images, labels=labels, classes=names, site=site, split=split)
    words = ["train", "--data", str(home / "scans.npz"), "--out", str(home / "run")]
    small = ["model.backbone=resnet8", "model.weights=random", "train.rounds=1", "train.epochs=1", "train.batch=8"]
    small.append("run.precision=fp64")  # no two scores so near that rounding would put them in another order
    assert cli.main([*words, *(w for s in small for w in ("--set", s))]) == 0
    return home


def test_evaluate_gives_the_auc_of_each_label_and_null_where_there_is_none(
    labels_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held = np.load(labels_run / "scans.npz")
    run = perada.load(labels_run / "run")
    nets = {c: run.model(c) for c in ("east", "west")}
    mean, std = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64).view(2, 3, 1, 1)

    def areas(client: str, at: np.ndarray, kind: str | None = None) -> list[float | None]:
        clean = held["images"][at].transpose(0, 3, 1, 2)
        x = torch.from_numpy(clean.copy() if kind is None else corrupt(np.ascontiguousarray(clean), kind, 3))
        with torch.no_grad():
            p = nets[client]((x.double() / 255 - mean) / std).sigmoid().numpy()
        y = held["labels"][at]
        return [100 * roc_auc_score(y[:, j], p[:, j]) if len(set(y[:, j])) > 1 else None for j in range(3)]

    test = held["split"] == "test"
    local = {c: areas(c, np.flatnonzero(test & (held["site"] == c))) for c in nets}
    assert [v is None for v in local["east"]] == [False, False, True]
    assert [v is None for v in local["west"]] == [False, True, True]
    capsys.readouterr()
    assert cli.main(["evaluate", str(labels_run / "run"), "--on", "local,global,fog:3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)

    def macro(rows: dict[str, list[float | None]]) -> dict[str, float]:
        return {c: float(np.mean([v for v in row if v is not None])) for c, row in rows.items()}

    def each(rows: dict[str, list[float | None]]) -> dict[str, float | None]:
        columns = [[v for v in column if v is not None] for column in zip(*rows.values(), strict=True)]
        return {n: float(np.mean(v)) if v else None for n, v in zip(("bright", "odd", "never"), columns, strict=True)}

    assert found["local_test"]["per_client"] == pytest.approx(macro(local))
    assert found["local_test"]["per_label"] == pytest.approx(each(local))
    assert found["local_test"]["per_label"]["never"] is None
    index = np.concatenate([np.flatnonzero(test & (held["site"] == c)) for c in nets])  # Global-test: client by client
    for name, kind in (("global_test", None), ("fog:3", "fog")):
        rows = {c: areas(c, index, kind) for c in nets}
        assert found[name]["per_client"] == pytest.approx(macro(rows)), name
        assert found[name]["per_label"] == pytest.approx(each(rows)), name
        assert found[name]["mean"] == pytest.approx(np.mean(list(macro(rows).values())))
    summary = json.loads((labels_run / "run" / "summary.json").read_text())
    assert summary["metric"] == "auc"
    assert summary["local_test"] == found["local_test"]


def test_evaluate_prints_undefined_where_a_label_has_one_class(
    labels_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(labels_run / "run"), "--on", "local,global"]) == 0
    rows = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["AUC of never"].split()[3:] == ["undefined", "undefined"]
    assert "undefined" not in rows["AUC of odd"]
