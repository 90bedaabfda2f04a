"""Pretrained weights: what fits is loaded, what does not is reported, what is unsafe is refused."""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import random
from pathlib import Path

import pytest
import torch
from helpers import assert_same_tensors, build_backbone
from safetensors.torch import save_file
from torch import Tensor

from perada.errors import InputError
from perada.models import load_into, read_weights
from perada.models.resnet import ResNet, resnet


def held(net: ResNet) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}


@pytest.fixture
def given() -> dict[str, Tensor]:
    """A checkpoint that differs from a new network in every tensor."""
    return {n: t + 0.5 for n, t in held(resnet("resnet8", 4, seed=9)).items()}


def test_a_whole_checkpoint(given: dict[str, Tensor]) -> None:
    net = resnet("resnet8", 4)
    report = load_into(net, given, "here")
    assert_same_tensors(held(net), given)
    assert (report.loaded, report.missing, report.unexpected) == (len(given), (), ())
    assert report.lines() == [f"weights: {len(given)} tensors from here; head loaded"]


def test_torchs_counters_are_passed_over(given: dict[str, Tensor]) -> None:
    # Older checkpoints lack num_batches_tracked; nothing here reads it, so neither is worth a report.
    with_counters = {**given, "bn1.num_batches_tracked": torch.tensor(7)}
    for found in (given, with_counters):
        report = load_into(resnet("resnet8", 4), found, "here")
        assert (report.missing, report.unexpected) == ((), ())


def test_missing_and_unexpected_keys_are_reported(given: dict[str, Tensor]) -> None:
    del given["bn1.weight"]
    given["extra.weight"] = torch.ones(2)
    net = resnet("resnet8", 4)
    report = load_into(net, given, "here")
    assert report.missing == ("bn1.weight",)
    assert report.unexpected == ("extra.weight",)
    assert "bn1.weight" in report.lines()[1]
    assert "extra.weight" in report.lines()[2]
    assert bool((net.bn1.weight == 1.0).all()), "left as initialised"


def test_a_head_for_other_classes_is_replaced(given: dict[str, Tensor]) -> None:
    net = resnet("resnet8", 7, seed=2)
    report = load_into(net, given, "here")
    assert report.head == "new (the file's is for other classes)"
    assert (report.missing, report.unexpected) == ((), ())
    assert report.loaded == len(given) - 2
    assert torch.equal(net.fc.weight, resnet("resnet8", 7, seed=2).fc.weight)
    assert torch.equal(net.conv1.weight, given["conv1.weight"])


def test_a_checkpoint_without_a_head(given: dict[str, Tensor]) -> None:
    del given["fc.weight"], given["fc.bias"]
    report = load_into(resnet("resnet8", 4), given, "here")
    assert report.head == "new (the file has none)"
    assert report.missing == ()


def test_half_a_head_is_reported(given: dict[str, Tensor]) -> None:
    del given["fc.bias"]
    report = load_into(resnet("resnet8", 4), given, "here")
    assert report.head != "loaded" or "fc.bias" in report.missing


def test_a_wrong_shape_is_an_error_that_names_the_key(given: dict[str, Tensor]) -> None:
    given["layer2.0.conv1.weight"] = torch.zeros(32, 16, 5, 5)
    net = resnet("resnet8", 4)
    before = held(net)
    with pytest.raises(InputError, match=r"layer2\.0\.conv1\.weight has shape \[32, 16, 5, 5\].*\[32, 16, 3, 3\]"):
        load_into(net, given, "here")
    assert_same_tensors(held(net), before)  # nothing is half-loaded


def test_another_networks_checkpoint() -> None:
    with pytest.raises(InputError, match="no key of here fits this network"):
        load_into(resnet("resnet8", 4), {"encoder.weight": torch.ones(3)}, "here")


def test_safetensors_and_pth_hold_the_same(given: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(given, tmp_path / "w.safetensors")
    torch.save(given, tmp_path / "w.pth")
    torch.save({"state_dict": {f"module.{n}": t for n, t in given.items()}, "epoch": 3}, tmp_path / "trained.pth")
    torch.save({n: t.half() for n, t in given.items()}, tmp_path / "half.pth")
    for name in ("w.safetensors", "w.pth", "trained.pth"):
        assert_same_tensors(read_weights(str(tmp_path / name), "resnet8"), given)
    assert {t.dtype for t in read_weights(str(tmp_path / "half.pth"), "resnet8").values()} == {torch.float32}
    net, report = build_backbone("resnet8", 4, str(tmp_path / "w.pth"), seed=0)
    assert_same_tensors(held(net), given)
    assert report is not None
    assert report.source.endswith("w.pth")


class Surprise:
    """Unpickling this would run code of the file's choosing."""

    def __reduce__(self) -> tuple:
        return (exec, ("raise SystemExit('code from a checkpoint was run')",))


def test_a_pickled_object_is_refused(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Surprise()}, tmp_path / "a.pth")
    (tmp_path / "b.pth").write_bytes(pickle.dumps(Surprise(), protocol=2))
    torch.save(resnet("resnet8", 4), tmp_path / "module.pth")
    for name in ("a.pth", "b.pth", "module.pth"):
        with pytest.raises(InputError, match=f"cannot read .*{name}"):
            read_weights(str(tmp_path / name), "resnet8")


@pytest.mark.parametrize(
    "content",
    [torch.ones(3), [torch.ones(3)], {"epoch": 3}, {"model": {"a": torch.ones(1)}}, {0: torch.ones(1)}],
    ids=str,
)
def test_a_file_that_is_no_state_dict(content: object, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pth")
    with pytest.raises(InputError, match="no flat dictionary of tensors"):
        read_weights(str(tmp_path / "w.pth"), "resnet8")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("kept", [0, 1, 7, 100, 4000, -10])
def test_a_truncated_file(suffix: str, kept: int, given: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / f"w.{suffix}"
    if suffix == "pth":
        torch.save(given, path)
    else:
        save_file(given, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match=f"cannot read .*w.{suffix}"):
        read_weights(str(path), "resnet8")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize("content", [b"not a checkpoint", b"\x80\x02", b"<html>\n404\n</html>", bytes(200)], ids=str)
def test_a_file_that_is_no_checkpoint(suffix: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / f"w.{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match="cannot read"):
        read_weights(str(path), "resnet8")


def test_a_file_of_torchs_old_format_cut_short(given: dict[str, Tensor], tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    torch.save(given, path, _use_new_zipfile_serialization=False)
    assert_same_tensors(read_weights(str(path), "resnet8"), given)
    whole = path.read_bytes()
    for kept in (10, 30, 200, 2000, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:kept])
        with pytest.raises(InputError, match="cannot read"):
            read_weights(str(path), "resnet8")


@pytest.mark.filterwarnings("ignore")  # torch warns of a pickle protocol that a flipped byte invented
@pytest.mark.parametrize("modern", [True, False])
def test_a_corrupted_file_is_the_users_problem_not_a_traceback(
    modern: bool, given: dict[str, Tensor], tmp_path: Path
) -> None:
    path, draw = tmp_path / "w.pth", random.Random(0)
    torch.save({n: given[n] for n in list(given)[:5]}, path, _use_new_zipfile_serialization=modern)
    whole = path.read_bytes()
    for _ in range(100):
        broken = bytearray(whole)
        for _ in range(10):
            broken[draw.randrange(1500)] = draw.randrange(256)
        path.write_bytes(broken)
        with contextlib.suppress(InputError):  # a flipped byte of a number may well go unnoticed
            read_weights(str(path), "resnet8")


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.tensor([1.0, float("nan")]), "has values that are not finite"),
        (torch.tensor([1.0, float("-inf")]).half(), "has values that are not finite"),
    ],
    ids=["nan", "inf"],
)
def test_numbers_that_are_no_weights(suffix: str, tensor: Tensor, says: str, tmp_path: Path) -> None:
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)({"conv1.weight": tensor, "b": torch.ones(3)}, path)
    with pytest.raises(InputError, match=f"w.{suffix}: conv1.weight {says}"):
        read_weights(str(path), "resnet8")


def test_complex_numbers_are_no_weights(tmp_path: Path) -> None:
    """Written by hand: older versions of safetensors cannot save such a file, and refuse to read it."""
    path, dtype = tmp_path / "w.pth", torch.complex64
    torch.save({"conv1.weight": torch.zeros(2, dtype=dtype)}, path)
    with pytest.raises(InputError, match=r"w\.pth: conv1\.weight is not a plain tensor of real numbers"):
        read_weights(str(path), "resnet8")
    header = json.dumps({"conv1.weight": {"dtype": "C64", "shape": [2], "data_offsets": [0, 16]}}).encode()
    path = path.with_suffix(".safetensors")
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(InputError, match=r"conv1\.weight is not a plain|cannot read .*w\.safetensors"):
        read_weights(str(path), "resnet8")


def test_tensors_that_are_more_than_their_file(tmp_path: Path) -> None:
    """One number that stands for 4 TB, which a copy would write out; and no numbers but places."""
    for tensor in (torch.ones(1).half().expand(1 << 40), torch.eye(3).to_sparse(), torch.ones(9, device="meta")):
        torch.save({"conv1.weight": tensor}, tmp_path / "w.pth")
        with pytest.raises(InputError, match=r"w\.pth"):
            read_weights(str(tmp_path / "w.pth"), "resnet8")


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    for length in (90_000_000, 2**63, 8):
        (tmp_path / "w.safetensors").write_bytes(length.to_bytes(8, "little") + b"[" * 100)
        with pytest.raises(InputError, match="cannot read"):
            read_weights(str(tmp_path / "w.safetensors"), "resnet8")


def test_no_file(tmp_path: Path) -> None:
    for source in (str(tmp_path / "nothing.pth"), str(tmp_path), "torchvison"):
        with pytest.raises(InputError, match=r"no file .*'embedded', 'torchvision'"):
            read_weights(source, "resnet8")


def test_no_embedded_weights_for_this_backbone() -> None:
    with pytest.raises(InputError, match="no embedded weights for 'resnet34'"):
        read_weights("embedded", "resnet34")


def test_reading_does_not_share_memory_with_the_network(given: dict[str, Tensor]) -> None:
    net, before = resnet("resnet8", 4), copy.deepcopy(given)
    load_into(net, given, "here")
    with torch.no_grad():
        net.conv1.weight.zero_()
    assert_same_tensors(given, before)
