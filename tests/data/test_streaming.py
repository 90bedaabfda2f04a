"""Where images live (on the device, or streamed one step ahead), the random views made of them, and their numbers."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_close_norm, assert_same_tensors
from PIL import Image
from small import everything, flags, small
from torch import Tensor

from perada import data
from perada.cli import main as cli
from perada.config import build
from perada.data import DataOptions, Federation, Source, build_federation
from perada.data import federation as module
from perada.data.augment import AUGMENT
from perada.data.batches import ClientBatches
from perada.data.digits import digits
from perada.errors import InputError
from perada.experiment import Experiment

CPU = torch.device("cpu")


def trained(**set: Any) -> Experiment:
    """One round of three clients in four, without evaluation and distillation."""
    sim = build(small(**{"train__cohort": 3, "distill__steps": 0, **set}))
    sim.round()
    return sim


# Streamed or not.

KINDS: dict[str, dict[str, Any]] = {
    "perada": {},
    "augmented": {"data__augment": "crop"},
    "momentum": {"train__momentum": 0.9, "train__weight_decay": 1e-3, "train__clip": 1.0, "data__augment": "flip"},
    "personal epochs": {"method__personal_epochs": 3, "run__lanes": 2},
    "own step": {"method__name": "pfedme", "data__augment": "resized-crop"},
    "full model": {"method__name": "fedrep"},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_streaming_changes_nothing(kind: dict[str, Any]) -> None:
    """Bit for bit, every tensor, with clients that drop off at different steps."""
    here, there = (trained(data__resident=way, **kind) for way in ("yes", "no"))
    assert there.federation.stream
    assert not here.federation.stream
    steps = {len(here.federation.clients[c].train) // 8 for c in here.sampled(0)}
    assert len(steps) > 1, "ragged"
    assert_same_tensors(everything(here), everything(there))
    assert here.now.last == there.now.last
    now, start = everything(here), everything(build(small(**kind)))
    assert any(not torch.equal(now[n], start[n]) for n in now if n.startswith("broadcast/"))


@pytest.mark.parametrize(("resident", "stream"), [("auto", False), ("yes", False), ("no", True)])
def test_who_is_streamed(resident: Any, stream: bool) -> None:
    assert build_federation(DataOptions(resident=resident), CPU).stream is stream


@pytest.mark.parametrize(("share", "fits"), [(0.39, True), (0.41, False)])
def test_images_that_would_fill_a_gpu_are_streamed(share: float, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.zeros(1000, dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(1000 / share), 0))
    assert module._fits(images, torch.device("cuda")) is fits
    assert module._fits(images, CPU)


def test_a_run_says_where_its_images_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = {}
    for way in ("yes", "no"):
        words = flags(train__rounds=1, data__resident=way, method__name="perada-no-kd")
        assert cli.main(["train", "digits", *words, "--out", str(tmp_path / way)]) == 0
        said[way] = capsys.readouterr().err
    about = "1,797 images of 1×8×8: 0.1 MB as bytes"
    assert f"{about}, on cpu\n" in said["yes"]
    assert f"{about}, streamed from memory\n" in said["no"]
    big = dataclasses.replace(build_federation(DataOptions(), CPU), images=torch.zeros(2, 3, 1000, 1500).byte())
    assert big.about_images() == "2 images of 3×1000×1500: 9.0 MB as bytes, on cpu"


def streamed(steps: tuple[int, ...] = (5, 3, 5)) -> tuple[ClientBatches, ClientBatches]:
    """The same batches, from memory and streamed."""
    f = build_federation(DataOptions(clients=3, server_val=0.5), CPU)
    both = [dataclasses.replace(f, stream=way) for way in (False, True)]
    made = [ClientBatches(one, [0, 1, 2], list(steps), 4, seed=1, round=2, dtype=torch.float32) for one in both]
    return made[0], made[1]


ORDER = torch.tensor([0, 2, 1])  # the longest lanes first, as `lanes.loop` asks for them


def test_the_next_steps_images_are_read_while_this_step_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ahead = streamed()
    reads: list[tuple[int, int, str]] = []
    read_step = [threading.Event() for _ in range(5)]
    read = ClientBatches._read

    def spy(self: ClientBatches, step: int, rows: list[int]) -> Tensor:
        found = read(self, step, rows)
        reads.append((step, len(rows), threading.current_thread().name.partition("_")[0]))
        read_step[step].set()
        return found

    monkeypatch.setattr(ClientBatches, "_read", spy)
    for step, width in enumerate((3, 3, 3, 2, 2)):
        found, wanted = (make(step, ORDER[:width]) for make in (ahead, plain))
        assert torch.equal(found.images, wanted.images)
        assert torch.equal(found.targets, wanted.targets)
        assert torch.equal(found.keys, wanted.keys)
        if step < 4:
            assert read_step[step + 1].wait(20), "nobody has asked for that step yet, and it is there"
    main = threading.current_thread().name
    assert reads[0] == (0, 3, main), "the first step's cannot have been asked for before"
    assert reads[1:] == [(s, n, "perada-images") for s, n in ((1, 3), (2, 3), (3, 3), (4, 2))], "once each, elsewhere"


def test_steps_asked_for_out_of_order_are_read_all_the_same() -> None:
    plain, ahead = streamed()
    for step, lanes in ((3, [0, 2]), (0, [1]), (1, [0, 1, 2]), (1, [2]), (2, [2, 1]), (4, [0])):
        at = torch.tensor(lanes)
        assert torch.equal(ahead(step, at).images, plain(step, at).images), (step, lanes)


def unreadable(at: int) -> Callable[[ClientBatches, int, list[int]], Tensor]:
    read = ClientBatches._read

    def broken(self: ClientBatches, step: int, rows: list[int]) -> Tensor:
        if step == at:
            raise OSError("the disk is gone")
        return read(self, step, rows)

    return broken


@pytest.mark.parametrize("at", [0, 2])
def test_an_error_in_the_reader_surfaces_at_its_step(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ahead = streamed()
    monkeypatch.setattr(ClientBatches, "_read", unreadable(at))
    for step in range(at):
        ahead(step, ORDER)
    with pytest.raises(OSError, match="the disk is gone"):
        ahead(at, ORDER)


def test_a_run_whose_images_cannot_be_read_ends_with_one_line_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "digits", *flags(data__resident="no", train__rounds=1), "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(ClientBatches, "_read", unreadable(1))
        assert cli.main(words) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: the disk is gone")
    assert "--resume" in last
    assert cli.main([*words, "--resume"]) == 0


# Mapped files.


def test_a_read_only_mapped_source_is_neither_copied_nor_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch warns about read-only arrays, and here every warning is an error."""
    source = digits()
    np.save(tmp_path / "images.npy", source.images)
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r")
    assert not mapped.flags.writeable
    monkeypatch.setitem(data.SOURCES, "digits", lambda options: dataclasses.replace(source, images=mapped))
    set: dict[str, Any] = {"method__name": "perada-no-kd", "train__rounds": 1, "data__augment": "crop"}
    there = trained(data__resident="no", **set)
    made = module.writable(mapped)
    assert isinstance(made, np.memmap)
    assert made.flags.writeable
    made[0] = 9  # in memory only
    assert np.array_equal(np.load(tmp_path / "images.npy"), source.images)
    monkeypatch.setitem(data.SOURCES, "digits", lambda options: source)
    assert_same_tensors(everything(there), everything(trained(data__resident="yes", **set)))


@pytest.mark.parametrize("view", [lambda x: x[5:], lambda x: x[::2], lambda x: x.transpose(0, 1, 3, 2)])
def test_a_part_of_a_mapped_source_keeps_its_pixels(view: Callable[[Any], Any], tmp_path: Path) -> None:
    images = digits().images
    np.save(tmp_path / "images.npy", images)
    assert np.array_equal(module.writable(view(np.load(tmp_path / "images.npy", mmap_mode="r"))), view(images))


def test_many_image_files_are_streamed_from_the_file_that_keeps_their_pixels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERADA_CACHE", str(tmp_path / "cache"))
    rng = np.random.default_rng(0)
    for i in range(256):
        path = tmp_path / "data" / "ab"[i % 2] / f"{i:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8)).save(path)
    options = DataOptions(name="folder", root=str(tmp_path / "data"), clients=2, size=8, resident="no")
    found: list[Source] = []
    load = data.SOURCES["folder"]
    monkeypatch.setitem(data.SOURCES, "folder", lambda options: found.append(load(options)) or found[-1])
    f = build_federation(options, CPU)
    (kept,) = (tmp_path / "cache").iterdir()
    pixels = found[0].images
    assert isinstance(pixels, np.memmap)
    assert Path(str(pixels.filename)) == kept
    assert f.images.data_ptr() == pixels.ctypes.data, "the tensor is the mapped file, no copy of it"
    first = np.asarray(Image.open(tmp_path / "data" / "a" / "000.png")).transpose(2, 0, 1)
    assert np.array_equal(f.take(np.array([0]))[0].numpy(), first)


# Random views.


def test_a_clients_personal_and_local_lanes_see_the_same_views() -> None:
    f = build_federation(DataOptions(clients=2, augment="crop"), CPU)
    make = ClientBatches(f, [0, 1, 0, 1], [2, 2, 2, 2], 8, seed=0, round=0, dtype=torch.float32)
    bare = ClientBatches(dataclasses.replace(f, augment=None), [0, 1], [2, 2], 8, 0, 0, torch.float32)
    seen = [make(step, torch.arange(4)).images.view(4, 8, 3, 8, 8) for step in range(2)]
    for view in seen:
        assert torch.equal(view[:2], view[2:])
        assert not torch.equal(view[0], view[1])
    as_they_are = [bare(step, torch.arange(2)).images.view(2, 8, 3, 8, 8) for step in range(2)]
    for k in range(2):
        for view, plain in zip(seen, as_they_are, strict=True):
            assert not torch.equal(view[k], plain[k])
    alone = ClientBatches(f, [1], [2], 8, seed=0, round=0, dtype=torch.float32)
    assert torch.equal(alone(1, torch.tensor([0])).images.view(8, 3, 8, 8), seen[1][1]), "whoever trains beside it"
    later = ClientBatches(f, [1], [2], 8, seed=0, round=1, dtype=torch.float32)
    assert not torch.equal(later(1, torch.tensor([0])).images.view(8, 3, 8, 8), seen[1][1])


def test_the_grouping_of_lanes_does_not_change_what_is_learnt() -> None:
    set: dict[str, Any] = {"run__precision": "fp64", "data__augment": "crop"}
    wanted = everything(trained(**set))
    for lanes, resident in ((1, "yes"), (4, "no")):
        found = everything(trained(run__lanes=lanes, data__resident=resident, **set))
        assert found.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert_close_norm(found[name], tensor, 1e-9, f"{lanes} lanes: {name}")


def test_only_training_images_are_augmented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the guard's validation data, the public images, the test images, or what is predicted."""
    seen: list[int] = []

    def spy(images: Tensor, keys: Tensor) -> Tensor:
        seen.append(len(images))
        return 255 - images

    monkeypatch.setitem(AUGMENT, "flip", spy)
    asked: list[int] = []
    call = ClientBatches.__call__

    def count(self: ClientBatches, step: int, lanes: Tensor) -> Any:
        asked.append(len(lanes) * self.host.shape[2])
        return call(self, step, lanes)

    monkeypatch.setattr(ClientBatches, "__call__", count)
    sim, plain = (build(small(data__augment=kind)) for kind in ("flip", "none"))
    assert sim.evaluate().scores["local_test"] == plain.evaluate().scores["local_test"]
    assert all(torch.equal(a, b) for a, b in zip(sim.public, plain.public, strict=True))
    assert seen == []
    sim.round()
    sim.evaluate()
    assert sim.now.last["distill"]["guard_steps"]
    assert seen == asked
    assert sum(seen) > 0
    plain.round()
    assert not torch.equal(everything(sim)["broadcast/fc.weight"], everything(plain)["broadcast/fc.weight"])


# Normalisation and labels.


def federation(source: Source, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Federation:
    monkeypatch.setitem(data.SOURCES, "digits", lambda options: source)
    return build_federation(DataOptions(clients=2, meta_min=4, **options), CPU)


def some(channels: int = 3, labels: int = 0) -> Source:
    rng = np.random.default_rng(0)
    targets: Any = rng.integers(0, 2, (60, labels)).astype(np.uint8) if labels else np.arange(60) % 3
    classes = ("oedema", "effusion", "fracture", "cyst")[: labels or 3]
    images = rng.integers(0, 256, (60, channels, 8, 8), np.uint8)
    return Source("some", images, targets, classes, (0.4,) * channels, (0.2,) * channels)


@pytest.mark.parametrize(
    ("channels", "mean", "std"), [(3, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), (1, (0.449,), (0.226,))]
)
def test_normalisation_by_the_data_or_by_imagenet(
    channels: int, mean: tuple[float, ...], std: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = federation(some(channels), monkeypatch)
    other = federation(some(channels), monkeypatch, normalise="imagenet")
    assert (own.mean, own.std) == ((0.4,) * channels, (0.2,) * channels)
    assert (other.mean, other.std) == (mean, std)
    white = torch.full((1, channels, 8, 8), 255, dtype=torch.uint8)
    found = other.prepare(white, torch.float64)[0, :, 0, 0].tolist()
    assert found == pytest.approx([(1 - m) / s for m, s in zip(mean, std, strict=True)] * (3 // channels))


def test_labels_may_be_chosen_and_are_refused_where_they_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    source = some(labels=4)
    f = federation(source, monkeypatch, labels=("cyst", "oedema"))
    assert f.classes == ("cyst", "oedema")
    assert f.multilabel
    assert np.array_equal(f.targets.numpy(), source.targets[:, [3, 0]])
    assert f.label_counts().shape == (2, 2)
    one = federation(source, monkeypatch, labels=("effusion",))
    assert one.targets.shape == (60, 1)
    with pytest.raises(InputError, match="unknown label 'edema': did you mean 'oedema'"):
        federation(source, monkeypatch, labels=("cyst", "edema"))
    with pytest.raises(InputError, match=r"DataOptions\.labels is for multi-label data"):
        federation(some(), monkeypatch, labels=("oedema",))
