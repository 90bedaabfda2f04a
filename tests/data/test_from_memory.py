"""Federations made in Python: from arrays, folders, manifests and names; moved, noted and made blank again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import CPU, build_backbone
from PIL import Image
from small import as_older

import perada
from perada.adapters import Residual
from perada.data import DataOptions, Federation, as_public, blank, build_federation
from perada.errors import InputError
from perada.methods.perada import PerAda

RNG = np.random.default_rng(0)
X = RNG.integers(0, 256, (50, 3, 8, 9), np.uint8)
Y = np.arange(50) % 3


def two(x: Any = X, y: Any = Y) -> dict[str, Any]:
    return {"north": (x[:30], y[:30]), "south": (x[30:], y[30:])}


def parts(f: Federation) -> dict[str, list[list[int]]]:
    return {c.name: [c.train.tolist(), c.val.tolist(), c.test.tolist()] for c in f.clients}


def refused(says: str, sites: Any, **more: Any) -> None:
    with pytest.raises(InputError) as error:
        Federation.from_arrays(sites, **more)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.transpose(0, 2, 3, 1),
        torch.from_numpy(X),
        torch.from_numpy(X).float() / 255,
        X.transpose(0, 2, 3, 1) / 255,
        (X / 255).astype(np.float32),
    ],
    ids=["CHW", "HWC", "torch", "torch float", "HWC float64", "float32"],
)
def test_every_layout_and_type_gives_the_same_bytes(x: Any) -> None:
    f = Federation.from_arrays(two(x))
    assert f.images.dtype == torch.uint8
    assert np.array_equal(f.images.numpy(), X)
    assert f.targets.tolist() == Y.tolist()
    assert (f.classes, f.mean, f.stream) == (("0", "1", "2"), (0.485, 0.456, 0.406), False)


def test_grey_images_and_rounded_floats() -> None:
    f = Federation.from_arrays(two(X[:, 0]))
    assert (tuple(f.images.shape), f.mean, f.std) == ((50, 1, 8, 9), (0.5,), (0.25,))
    half = Federation.from_arrays({"a": (np.full((4, 8, 8), 0.5), [0, 1, 0, 1])}, val=0.0, test=0.0)
    assert half.images.unique().tolist() == [128], "the nearest byte"
    brain = Federation.from_arrays(two(torch.from_numpy(X / 255).bfloat16()))
    assert (brain.images.int() - torch.from_numpy(X).int()).abs().max() <= 1


def test_sites_are_split_as_the_same_data_in_a_file(tmp_path: Path) -> None:
    """As partition=site does: by the site's name, whatever the order and the other sites."""
    file = tmp_path / "mine.npz"
    np.savez(file, images=X, labels=Y, site=["north"] * 30 + ["south"] * 20)
    f = Federation.from_arrays(two(), val=0.2, test=0.1, seed=3)
    options = {"partition": "site", "val": 0.2, "test": 0.1, "seed": 3}
    stored = build_federation(DataOptions(name="folder", root=str(file), **options), CPU)  # type: ignore[arg-type]
    assert parts(f) == parts(stored)
    assert f.facts() == stored.facts()
    assert (f.options.name, f.options.val, f.seed) == ("given", 0.2, 3), "what a run folder says of them"
    assert [len(p) for p in parts(f)["north"]] == [21, 6, 3]
    turned = Federation.from_arrays(dict(reversed(two().items())), val=0.2, test=0.1, seed=3)
    assert (parts(turned), turned.fingerprint) == (parts(f), f.fingerprint)
    assert parts(Federation.from_arrays(two(), val=0.2, test=0.1, seed=4)) != parts(f)
    alone = Federation.from_arrays({"north": two()["north"]}, val=0.2, test=0.1, seed=3)
    assert parts(alone)["north"] == parts(f)["north"]


def test_sets_of_their_own_are_used_whole() -> None:
    more = RNG.integers(0, 256, (9, 3, 8, 9), np.uint8)
    sets = {"south": (more[:5], [0, 1, 2, 0, 1]), "north": (more[5:], [2, 2, 0, 1])}
    f = Federation.from_arrays(two(), test=sets, val=0.0)
    assert {c.name: (len(c.train), len(c.val), len(c.test)) for c in f.clients} == {
        "north": (30, 0, 4),
        "south": (20, 0, 5),
    }
    assert np.array_equal(f.images[f.clients[1].test].numpy(), more[:5])
    assert f.targets[f.clients[0].test].tolist() == [2, 2, 0, 1]
    both = Federation.from_arrays(two(), test=sets, val=sets)
    assert [len(c.train) for c in both.clients] == [30, 20]
    assert parts(both)["north"][0] == parts(f)["north"][0], "further sets do not move training images"
    refused("unknown site of test data 'nort': did you mean 'north'?", two(), test={"nort": sets["north"]})
    refused("no test data of site 'south': give every site a set", two(), test={"north": sets["north"]})


def test_names_numbers_and_several_labels() -> None:
    names = np.array(["cat", "dog", "emu"])[Y]
    for y in (names, names.astype(object), names.tolist()):
        f = Federation.from_arrays(two(y=y))
        assert (f.classes, f.targets.tolist()) == (("cat", "dog", "emu"), Y.tolist())
    f = Federation.from_arrays(two(y=names), classes=["emu", "dog", "cat"])
    assert (f.classes, f.targets.tolist()) == (("emu", "dog", "cat"), (2 - Y).tolist())
    f = Federation.from_arrays(two(y=torch.from_numpy(Y)), classes=["a", "b", "c", "d"])
    assert (f.classes, f.targets.dtype) == (("a", "b", "c", "d"), torch.int64)
    one = {"north": (X[:30], np.zeros(30, int)), "south": (X[30:], np.full(20, 4))}
    assert Federation.from_arrays(one).classes == ("0", "1", "2", "3", "4"), "classes of all sites together"
    marks = RNG.integers(0, 2, (50, 4))
    for y in (marks, marks.astype(bool), torch.from_numpy(marks).float()):
        f = Federation.from_arrays(two(y=y), classes=list("abcd"))
        assert f.multilabel
        assert f.targets.tolist() == marks.tolist()
    chosen = Federation.from_arrays(two(y=marks), labels=("label-3", "label-1"))
    assert chosen.targets.tolist() == marks[:, [3, 1]].tolist()


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        ({}, "no sites"),
        (two(X.astype(np.int64)), "site 'north': images of type int64: expected uint8, 0 to 255, or float in [0, 1]"),
        (two(X.astype(np.float32)), "site 'north': float images must lie in [0, 1], not [0, 255]"),
        (two((X / 255 - 0.5) / 0.25), "give pixels that are not normalised"),
        (two(np.full((50, 8, 8), np.nan)), "float images must lie in [0, 1]"),
        (two(X[:, :2]), "images [30, 2, 8, 9]: expected [n, H, W]"),
        (two(X.reshape(50, -1)), "images [30, 216]: expected"),
        (two([[1, 2], [3]] * 25), "site 'north': the rows have different lengths"),
        (two(y=Y - 1), "site 'north': label -1 of image 0 is out of range"),
        (two(y=Y / 2), "labels of type float64"),
        (two(y=np.stack([Y, Y], 1)), "must be 0 or 1"),
        ({"a": (X, Y[:-1])}, "site 'a': labels [49] for 50 images"),
        ({"a": (X[:0], Y[:0])}, "site 'a': no images"),
        ({"a": (X[:1], Y[:1])}, "each site needs 2 training images, but a has 1"),
        ({"a": X}, "site 'a': give a pair (images, labels)"),
        ({"a": None}, "site 'a': give a pair (images, labels)"),
        ({"a": (X, Y), "b": (X[..., :8], Y)}, "site 'b': images [3, 8, 8], but site 'a' has [3, 8, 9]"),
        ({"a": (X, Y), "b": (X, Y.astype(str))}, "site 'b': labels of another kind than those of site 'a'"),
        ({"a": (X, Y), "b": (X, np.eye(3, dtype=int)[Y])}, "site 'b': labels of another kind"),
        ({"a": (X, np.eye(3)[Y]), "b": (X, np.eye(4)[Y])}, "site 'b': labels of another kind"),
    ],
)
def test_wrong_arrays_are_one_line(sites: Any, says: str) -> None:
    refused(says, sites)


def test_wrong_options_are_one_line() -> None:
    refused("unknown option 'sede': did you mean 'seed'?", two(), sede=1)
    refused("DataOptions.val must be in [0, 1), not 2", two(), val=2)
    refused("DataOptions.augment must be one of none, flip, crop, resized-crop, not 'flop'", two(), augment="flop")
    refused("DataOptions.partition must be one of dirichlet", two(), partition="dirchlet")
    refused("DataOptions.val must be a number, not 'a tenth'", two(), val="a tenth")
    refused("label 'd' is not one of its classes", two(y=np.array(list("abd"))[Y]), classes=["a", "b", "c"])
    refused("label 2 of image 2 is out of range (0 to 1)", two(), classes=["a", "b"])
    refused("2 class names for 3 labels", two(y=np.eye(3, dtype=int)[Y]), classes=["a", "b"])


def test_arrays_may_be_pooled_and_dealt_to_simulated_clients() -> None:
    f = Federation.from_arrays({"all": (X, Y)}, partition="iid", clients=5)
    assert [c.name for c in f.clients] == [f"client-0{i}" for i in range(5)]
    assert len(f.test) == 10


def test_the_callers_arrays_stay_as_they_are() -> None:
    x = X.copy()
    f = Federation.from_arrays({"a": (x, Y)})
    f.images[0] = 7
    assert np.array_equal(x, X)


# From files and names.


@pytest.fixture
def files(tmp_path: Path) -> Path:
    rows = ["path,owner,label"]
    for i in range(40):
        path = tmp_path / "data" / "ab"[i % 2] / "xyz"[i % 3] / f"{i:02}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(X[i].transpose(1, 2, 0)).save(path)
        rows.append(f"{path},{'ab'[i % 2]},{'xyz'[i % 3]}")
    (tmp_path / "list.csv").write_text("\n".join(rows))
    return tmp_path


def same(a: Federation, b: Federation) -> None:
    assert torch.equal(a.images, b.images)
    assert torch.equal(a.targets, b.targets)
    assert (parts(a), a.facts()) == (parts(b), b.facts())


def test_folders_and_manifests_give_what_their_options_give(files: Path) -> None:
    more: dict[str, Any] = {"size": 8, "val": 0.2, "seed": 1}
    root = files / "data"
    wanted = build_federation(DataOptions(name="folder", root=str(root), partition="site", **more), CPU)
    same(Federation.from_folder(root, **more), wanted)
    flat = Federation.from_folder(root / "a", partition="iid", clients=3, **more)
    assert len(flat.clients) == 3
    table = files / "list.csv"
    wanted = build_federation(DataOptions(name="folder", root=str(table), partition="site", site="owner", **more), CPU)
    made = Federation.from_manifest(table, site="owner", **more)
    same(made, wanted)
    assert [c.name for c in wanted.clients] == ["a", "b"]
    with pytest.raises(InputError, match=r"no folder '.*/gone'"):
        Federation.from_folder(files / "gone")
    with pytest.raises(InputError, match="is a file: give a folder"):
        Federation.from_folder(table)
    with pytest.raises(InputError, match=r"data is not a manifest: give a \.csv or \.tsv file"):
        Federation.from_manifest(root)
    assert made.options == wanted.options
    with pytest.raises(InputError, match="no such manifest"):
        Federation.from_manifest(files / "gone.csv")
    with pytest.raises(InputError, match="unknown option 'clint'"):
        Federation.from_folder(root, clint=3)


def test_a_known_data_set_by_its_name() -> None:
    same(Federation.named("digits", clients=7, seed=2), build_federation(DataOptions(clients=7, seed=2), CPU))
    with pytest.raises(InputError, match="unknown data set 'digit': did you mean 'digits'"):
        Federation.named("digit")


# Devices and facts.


def test_moving_to_where_it_is_changes_nothing_and_keeps_streaming() -> None:
    f = Federation.named("digits")
    assert f.device == CPU
    again = f.to("cpu")
    assert again.images is f.images
    assert again.targets is f.targets
    assert not again.stream
    streamed = Federation.named("digits", resident="no")
    assert streamed.stream
    assert streamed.to("cpu").stream


@pytest.mark.parametrize(
    ("resident", "share", "stream"), [("auto", 0.9, True), ("auto", 0.1, False), ("yes", 0.9, False), ("no", 0.1, True)]
)
def test_only_what_fits_is_moved_to_a_gpu(
    resident: Any, share: float, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the meta device, which takes the GPU's part here."""
    f = Federation.named("digits", resident=resident)
    monkeypatch.setattr("perada.data.federation._fits", lambda images, device: share < 0.4)
    moved = f.to("meta")
    assert moved.stream is stream
    assert moved.images.device.type == ("cpu" if stream else "meta")
    assert moved.device.type == "meta"


def test_facts_make_a_blank_federation() -> None:
    f = Federation.from_arrays(two(y=np.eye(3, dtype=int)[Y]))
    facts = f.facts()
    assert facts == {
        "classes": ["label-0", "label-1", "label-2"],
        "image": [3, 8, 9],
        "multilabel": True,
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
        "clients": {"north": [21, 3, 6], "south": [14, 2, 4]},
        "split": f.fingerprint,
        "pixels": f.pixels,
    }
    made = blank(facts, CPU)
    assert made is not None
    assert (made.classes, made.multilabel, made.mean) == (f.classes, True, f.mean)
    assert [c.name for c in made.clients] == ["north", "south"]
    assert tuple(made.images.shape) == (0, 3, 8, 9)
    assert blank({"split": "x"}, CPU) is None


# Public images from memory.


def test_public_images_from_memory() -> None:
    f = Federation.from_arrays(two())
    for images in (X, torch.from_numpy(X), X.transpose(0, 2, 3, 1), X / 255):
        found = as_public(images, f)
        assert found.dtype == torch.uint8
        assert np.array_equal(found.numpy(), X)
    assert tuple(as_public(X[:, 0], f).shape) == (50, 1, 8, 9), "grey ones are prepared like colour ones"
    ready = torch.from_numpy(X)
    assert as_public(ready, f) is ready
    for images, says in (
        (X[..., :8], r"public images are \(8, 8\) pixels and the clients' \(8, 9\)"),
        (X[:1], "at least two public images"),
        (X.astype(np.int32), "public images: images of type int32"),
        ("glyphs", "public images: images of type <U6"),
    ):
        with pytest.raises(InputError, match=says):
            as_public(images, f)


# In a run.


def test_a_run_on_arrays_is_loaded_with_the_same_arrays_only(tmp_path: Path) -> None:
    x = (X[:, :, :8, :8] // 4 + 60 * Y[:, None, None, None]).astype(np.uint8)
    f = Federation.from_arrays(two(x))
    net, _ = build_backbone("resnet8", 3, "random", 0)
    options: dict[str, Any] = {"train": perada.Train(rounds=1, epochs=1, batch=8, cohort=0), "public": x / 255}
    distill = perada.Distill(steps=2, batch=8, guard="none")
    options |= {"adapter": Residual(dropout=0.1), "distill": distill, "device": "cpu"}
    trained = perada.Experiment(net, f, PerAda(), **options).run(tmp_path / "run")
    with pytest.raises(InputError, match="data from Python"):
        perada.load(tmp_path / "run", device="cpu").evaluate()
    again = perada.load(tmp_path / "run", model=net, federation=Federation.from_arrays(two(x)), device="cpu")
    assert again.clients == ("north", "south")
    assert again.evaluate() == trained.evaluate()
    other = Federation.from_arrays(two(x[::-1], Y[::-1]))
    with pytest.raises(InputError, match="the data are not those"):
        perada.load(tmp_path / "run", model=net, federation=other, device="cpu").evaluate()
    changed = x.copy()
    changed[7, 2, 3, 4] ^= 1
    same_labels = Federation.from_arrays(two(changed))
    with pytest.raises(InputError, match=r"the data are not those .* \(other images\)"):
        perada.load(tmp_path / "run", model=net, federation=same_labels, device="cpu")
    with pytest.raises(InputError, match="other images"):
        perada.Experiment(net, same_labels, PerAda(), **options).run(tmp_path / "run", resume=True)
    about = tmp_path / "run" / "data.json"
    facts = json.loads(about.read_text())
    assert facts.pop("pixels") == f.pixels
    as_older(tmp_path / "run")
    about.write_text(json.dumps(facts))  # as an older version wrote it
    old = perada.load(tmp_path / "run", model=net, federation=Federation.from_arrays(two(x)), device="cpu")
    assert old.evaluate() == trained.evaluate()
