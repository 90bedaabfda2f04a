"""Bad input: exit code 2, one line `error: …` that says what to do, and nothing written or overwritten."""

from __future__ import annotations

import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from small import flags, tree

from perada.cli import main as cli
from perada.models.resnet import resnet

SMALL_RUN = flags(method__name="perada-no-kd", train__rounds=1)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder to misuse."""
    out = tmp_path_factory.mktemp("bad") / "run"
    assert cli.main(["train", "digits", *SMALL_RUN, "--out", str(out)]) == 0
    return out


def picture(path: Path, value: int = 100) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(path)


def bomb(path: Path) -> None:
    """A PNG of 60,000 × 60,000 pixels in a few bytes: what a reader refuses as a decompression bomb."""
    header = struct.pack(">IIBBBBB", 60000, 60000, 1, 0, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    packed = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(packed))


class Code:
    """Pickled, it runs a function on loading: what a .pth from a stranger may hold."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str]]:
        return (os.mkdir, ("owned",))


def fill(here: Path) -> None:
    """Everything the cases refer to."""
    Path(here / "notes.txt").write_text("mine\n")
    Path(here / "broken.toml").write_text("[train\nrounds = 3")
    Path(here / "binary.toml").write_bytes(b"\xff\xfe\x00rounds")
    Path(here / "section.toml").write_text("[trian]\nrounds = 3\n")
    Path(here / "scalar.toml").write_text("train = 3\n")
    Path(here / "method.toml").write_text('method = "perada"\n')
    for n in range(4):
        for site in ("north", "south"):
            picture(here / "sites" / site / ("cat" if n % 2 else "dog") / f"{n}.png")
            picture(here / "damaged" / site / ("cat" if n % 2 else "dog") / f"{n}.png")
            picture(here / "bombed" / site / ("cat" if n % 2 else "dog") / f"{n}.png")
    (here / "damaged" / "south" / "cat" / "9.png").write_bytes(b"not an image")
    bomb(here / "bombed" / "south" / "cat" / "9.png")
    bomb(here / "bomb.png")
    (here / "empty").mkdir()
    picture(here / "mixed" / "cat" / "1.png")
    picture(here / "mixed" / "north" / "cat" / "1.png")
    picture(here / "flat" / "cat" / "1.png")
    picture(here / "flat" / "dog" / "1.png")
    picture(here / "digit.png")
    (here / "not-an-image.png").write_bytes(b"\x89PNG\r\n")
    wrong = {k: t for k, t in resnet("resnet18", 10).state_dict().items() if k.startswith("layer1.0")}
    save_file({k: t.contiguous() for k, t in wrong.items()}, here / "resnet18.safetensors")
    save_file({"something": torch.zeros(3)}, here / "foreign.safetensors")
    (here / "cut.safetensors").write_bytes((here / "resnet18.safetensors").read_bytes()[:200])
    torch.save({"layer1.0.conv1.weight": Code()}, here / "pickle.pth")
    (here / "existing").mkdir()
    (here / "existing" / "precious").write_text("mine\n")


TRAIN = ["train", "digits", *SMALL_RUN, "--out", "new"]
FOLDER = ["train", "folder-fedavg", "--out", "new", "--set", "data.size=8", "--set", "model.backbone=resnet8"]


def setting(value: str, *words: str) -> list[str]:
    return [*TRAIN, "--set", value, *words]


LONG = "a" * 300

# What is typed -> words the error line must have.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "unknown command": (["trian"], ["trian"]),
    "unknown option": (["train", "--sed", "3"], ["--sed", "--seed"]),
    "an unknown option that is a setting": (["train", "digits", "--rounds", "3"], ["given by --set train.rounds=3"]),
    "the same with =": (["compare", "--pretrain-rounds=3"], ["given by --set model.pretrain_rounds=3"]),
    "the same without a value": (["tune", "--epochs"], ["given by --set train.epochs=VALUE"]),
    "an unknown option of a command without settings": (["evaluate", "run", "--rounds", "3"], ["--rounds"]),
    "an option without its value": (["train", "--seed"], ["--seed"]),
    "a seed that is no number": (["train", "--seed", "x"], ["--seed"]),
    "a negative seed": ([*TRAIN, "--seed", "-1"], ["run.seed"]),
    "a seed beyond 64 bits": ([*TRAIN, "--seed", str(2**64)], ["seed"]),
    "unknown preset": (["train", "digit"], ["unknown preset 'digit'", "did you mean 'digits'?"]),
    "unknown method": (["train", "--method", "perda"], ["unknown method 'perda'", "did you mean 'perada'?"]),
    "unknown method, nothing near": (["train", "--method", "zzz"], ["known:", "fedavg"]),
    "unknown key": (setting("train.round=3"), ["unknown key 'train.round'", "did you mean 'train.rounds'?"]),
    "unknown method key": (setting("method.lamb=3"), ["'method.lamb'", "did you mean 'method.lam'?"]),
    "unknown section": (setting("trian.rounds=3"), ["'trian", "train"]),
    "a key without a section": (setting("rounds=3"), ["'rounds'", "did you mean 'train.rounds'?"]),
    "a key that is a section": (setting("method=perada"), ["method"]),
    "a setting without a value": (setting("train.rounds"), ["section.key=value"]),
    "a setting with an empty value": (setting("train.lr="), ["train.lr", "a number"]),
    "missing config file": (["train", "missing.toml"], ["no such file: missing.toml"]),
    "broken config file": (["train", "broken.toml"], ["broken.toml", "not valid TOML"]),
    "binary config file": (["train", "binary.toml"], ["binary.toml"]),
    "config file with an unknown section": (["train", "section.toml"], ["'trian'", "did you mean 'train'?"]),
    "config file with a number for a section": (["train", "scalar.toml"], ["train"]),
    "config file with text for the method": (["train", "method.toml"], ["method"]),
    "a number for a section and a key in it": (["train", "scalar.toml", "--set", "train.lr=1"], ["train"]),
    "existing run folder": ([*TRAIN[:-1], "run"], ["run exists", "--resume", "--overwrite"]),
    "overwriting what is not a run": ([*TRAIN[:-1], "existing", "--overwrite"], ["existing", "not overwritten"]),
    "--out is a file": ([*TRAIN[:-1], "notes.txt"], ["notes.txt is a file"]),
    "--out is a file, overwriting": ([*TRAIN[:-1], "notes.txt", "--overwrite"], ["notes.txt is a file"]),
    "--out below a file": ([*TRAIN[:-1], "notes.txt/run"], ["notes.txt/run"]),
    "--out with a name too long": ([*TRAIN[:-1], LONG], [LONG[:50]]),
    "--resume with nothing": (["train", "digits", "--resume"], ["nothing to resume", "--out"]),
    "--resume of what is not a run": ([*TRAIN[:-1], "existing", "--resume"], ["existing is not a run folder"]),
    "--resume and --overwrite": ([*TRAIN[:-1], "run", "--resume", "--overwrite"], ["choose one"]),
    "--resume with another setting": ([*TRAIN[:-1], "run", "--resume", "--set", "train.lr=9"], ["train.lr"]),
    "--resume with another method": ([*TRAIN[:-1], "run", "--resume", "--method", "fedavg"], ["method.name"]),
    "zero clients": (setting("data.clients=0"), ["data.clients", "at least 1"]),
    "more clients than samples": (setting("data.clients=5000"), ["5000 clients", "data.clients"]),
    "alpha zero": (setting("data.alpha=0"), ["data.alpha", "above 0"]),
    "alpha negative": (setting("data.alpha=-0.5"), ["data.alpha", "above 0"]),
    "alpha infinite": (setting("data.alpha=inf"), ["data.alpha"]),
    "batch zero": (setting("train.batch=0"), ["train.batch"]),
    "batch of one": (setting("train.batch=1"), ["train.batch", "batch norm"]),
    "negative lambda": (setting("method.lam=-1"), ["method.lam", "negative"]),
    "lambda not a number": (setting("method.lam=nan"), ["method.lam"]),
    "lambda infinite": (setting("method.lam=inf"), ["method.lam"]),
    "rate zero": (setting("train.lr=0"), ["train.lr", "above 0"]),
    "rate not a number": (setting("train.lr=nan"), ["train.lr", "nan"]),
    "rate infinite": (setting("train.lr=inf"), ["train.lr"]),
    "momentum negative": (setting("train.momentum=-0.1"), ["train.momentum"]),
    "no rounds": (setting("train.rounds=0"), ["train.rounds"]),
    "no epochs": (setting("train.epochs=0"), ["train.epochs"]),
    "a negative cohort": (setting("train.cohort=-1"), ["train.cohort"]),
    "a cohort larger than the federation": (setting("train.cohort=9"), ["train.cohort=9", "4 clients"]),
    "text for a whole number": (setting("train.rounds=ten"), ["train.rounds", "a whole number", "'ten'"]),
    "a fraction for a whole number": (setting("train.rounds=1.5"), ["train.rounds", "a whole number"]),
    "true for a whole number": (setting("train.rounds=true"), ["train.rounds", "a whole number"]),
    "text for a number": (setting("train.lr=fast"), ["train.lr", "a number"]),
    "a number for true or false": (setting("run.shifts=1"), ["run.shifts", "true or false"]),
    "a number for text": (setting("model.weights=5"), ["model.weights", "text"]),
    "a number for a list": (setting("distill.candidates=5"), ["distill.candidates", "a list"]),
    "text in a list of numbers": (setting('distill.candidates=["a"]'), ["distill.candidates", "a whole number"]),
    "a list for a choice": (setting("distill.guard=[1]"), ["distill.guard", "clients"]),
    "a table for a number": (setting("train.lr={a=1}"), ["train.lr", "a number"]),
    "unknown choice": (setting("distill.guard=client"), ["distill.guard", "none, server, clients"]),
    "candidates below one": (setting("distill.candidates=[0]"), ["distill.candidates"]),
    "distillation steps negative": (setting("distill.steps=-1"), ["distill.steps"]),
    "distillation batch of one": (setting("distill.batch=1"), ["distill.batch"]),
    "distillation without data": (
        setting("distill.data=none", "--method", "perada"),
        ["distillation needs public images", "distill.data"],
    ),
    "distillation with unknown data": (
        setting("distill.data=glyph", "--method", "perada"),
        ["distill.data", "glyph'", "glyphs"],
    ),
    "distillation with a damaged image": (
        setting("distill.data=damaged", "--set", "data.size=8", "--method", "perada"),
        ["south/cat/9.png"],
    ),
    "a guard at a server without data": (
        setting("distill.guard=server", "--set", "data.server_val=0", "--method", "perada"),
        ["distill.guard=server", "data.server_val"],
    ),
    "val and test leave nothing": (setting("data.val=0.9", "--set", "data.test=0.2"), ["data.val", "data.test"]),
    "val of one": (setting("data.val=1.0"), ["data.val"]),
    "dropout of one": (setting("model.dropout=1.0"), ["model.dropout"]),
    "unknown backbone": (setting("model.backbone=resnet81"), ["'resnet81'", "did you mean 'resnet8'?"]),
    "unknown data source": (setting("data.name=digit"), ["'digit'", "did you mean 'digits'?"]),
    "unknown device": ([*TRAIN, "--device", "tpu"], ["run.device", "cpu"]),
    "no GPU": ([*TRAIN, "--device", "cuda"], ["no CUDA device", "--device cpu"]),
    "weights file missing": (setting("model.weights=gone.safetensors"), ["model.weights", "gone.safetensors"]),
    "weights of another shape": (setting("model.weights=resnet18.safetensors"), ["resnet18.safetensors", "shape"]),
    "weights of another network": (setting("model.weights=foreign.safetensors"), ["foreign.safetensors", "no key"]),
    "weights cut off": (setting("model.weights=cut.safetensors"), ["cannot read", "cut.safetensors"]),
    "weights that are a picture": (setting("model.weights=digit.png"), ["cannot read", "digit.png"]),
    "weights that are code": (setting("model.weights=pickle.pth"), ["cannot read", "pickle.pth"]),
    "weights that are a folder": (setting("model.weights=sites"), ["model.weights", "sites"]),
    "embedded weights that there are not": (
        setting("model.weights=embedded", "--set", "model.backbone=resnet34"),
        ["embedded", "resnet34"],
    ),
    "an empty preset": (["train", ""], ["PRESET is empty"]),
    "an empty path to data": (["train", "digits", "--data", ""], ["--data is empty"]),
    "an empty path to data and no preset": (["train", "--data", ""], ["--data is empty"]),
    "compare an empty preset": (["compare", ""], ["PRESET is empty"]),
    "tune on an empty path": (["tune", "digits", "--data", ""], ["--data is empty"]),
    "partition of an empty preset": (["partition", ""], ["PRESET is empty"]),
    "partition of an empty path": (["partition", "digits", "--data", " "], ["--data is empty"]),
    "evaluate on an empty path": (["evaluate", "run", "--data", ""], ["--data is empty"]),
    "a path for the embedded digits": ([*TRAIN, "--data", "sites"], ["digits", "folder"]),
    "data folder missing": ([*FOLDER, "--data", "gone"], ["no folder", "gone'", "--data"]),
    "data folder is a file": ([*FOLDER, "--data", "notes.txt"], ["notes.txt", "is a file: give a folder"]),
    "data folder empty": ([*FOLDER, "--data", "empty"], ["empty", "no images", "site/class/image"]),
    "data folder of two depths": ([*FOLDER, "--data", "mixed"], ["different depths"]),
    "sites where there are none": (
        [*FOLDER, "--data", "flat"],
        ["data.partition=site", "data.partition=dirichlet"],
    ),
    "too few images": (
        [*FOLDER, "--data", "flat", "--set", "data.partition=dirichlet", "--set", "data.clients=4"],
        ["4 clients", "data.clients"],
    ),
    "more clients a round than sites": ([*FOLDER, "--data", "sites", "--set", "train.cohort=3"], ["train.cohort=3"]),
    "unreadable image": ([*FOLDER, "--data", "damaged"], ["south/cat/9.png", "data.skip_bad=true"]),
    "a decompression bomb among the images": ([*FOLDER, "--data", "bombed"], ["south/cat/9.png"]),
    "no data folder for the folder preset": (["train", "folder"], ["--data"]),
    "image size of zero": ([*FOLDER, "--data", "sites", "--set", "data.size=0"], ["data.size"]),
    "evaluate what is not a run": (["evaluate", "existing"], ["existing is not a run folder"]),
    "evaluate what is not there": (["evaluate", "gone"], ["gone is not a run folder"]),
    "evaluate on an unknown set": (["evaluate", "run", "--on", "locl"], ["'locl'", "did you mean 'local'?"]),
    "evaluate on an unknown shift": (["evaluate", "run", "--on", "fogg:3"], ["fogg", "fog"]),
    "evaluate on nothing": (["evaluate", "run", "--on", ","], ["local"]),
    "severity zero": (["evaluate", "run", "--on", "fog:0"], ["1 to 5"]),
    "severity six": (["evaluate", "run", "--on", "fog:6"], ["1 to 5"]),
    "severity without a number": (["evaluate", "run", "--on", "fog:"], ["fog:", "1 to 5"]),
    "severity in words": (["evaluate", "run", "--on", "fog:high"], ["fog:high", "1 to 5"]),
    "severity in superscript": (["evaluate", "run", "--on", "fog:³"], ["1 to 5"]),
    "evaluate with damaged checkpoints": (["evaluate", "damaged-run"], ["no checkpoint is whole"]),
    "evaluate with a checkpoint that is missing": (["evaluate", "unfinished"], ["no checkpoint"]),
    "predict for an unknown client": (
        ["predict", "run", "--client", "client-99", "digit.png"],
        ["'client-99'", "client-0"],
    ),
    "predict without a client": (["predict", "run", "digit.png"], ["--client"]),
    "predict without an image": (["predict", "run", "--client", "client-00"], ["IMAGE"]),
    "predict a missing image": (["predict", "run", "--client", "client-00", "gone.png"], ["gone.png"]),
    "predict what is no image": (["predict", "run", "--client", "client-00", "not-an-image.png"], ["not-an-image.png"]),
    "predict a folder without images": (
        ["predict", "run", "--client", "client-00", "run/checkpoints"],
        ["no images in run/checkpoints"],
    ),
    "predict a decompression bomb": (["predict", "run", "--client", "client-00", "bomb.png"], ["bomb.png"]),
    "export for an unknown client": (["export", "run", "--client", "x", "--out", "x.safetensors"], ["'x'"]),
    "export to another format": (
        ["export", "run", "--client", "client-00", "--out", "x.pt"],
        [".safetensors, .pt2 or .onnx"],
    ),
    "export into a folder that is not there": (
        ["export", "run", "--client", "client-00", "--out", "gone/x.safetensors"],
        ["gone/x.safetensors"],
    ),
    "report of what is not a run": (["report", "existing"], ["existing is not a run folder"]),
    "report without a run": (["report"], ["RUN"]),
    "partition of an unknown preset": (["partition", "digitz"], ["'digitz'", "digits"]),
    "partition with a bad setting": (["partition", "--set", "data.alpha=0"], ["data.alpha"]),
    "parameters of an unknown backbone": (["params", "resnet51"], ["'resnet51'", "resnet50"]),
    "parameters for no classes": (["params", "resnet18", "--classes", "0"], ["--classes"]),
    "methods with an argument": (["methods", "extra"], ["extra"]),
}


@pytest.mark.parametrize(("words", "says"), CASES.values(), ids=CASES)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    says: list[str],
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = tree(here)
    code = cli.main(words)
    found = capsys.readouterr()
    assert code == 2, found
    assert found.out == ""
    assert found.err.endswith("\n")
    assert len(found.err.splitlines()) == 1, found.err
    assert found.err.startswith("error: ")
    assert "Traceback" not in found.err
    for word in says:
        assert word in found.err
    after = tree(here)
    assert sorted(after) == sorted(before), "files came or went"
    assert after == before, "a file was changed"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    root = tmp_path_factory.mktemp("here")
    fill(root)
    for name in ("run", "damaged-run", "unfinished"):
        shutil.copytree(finished, root / name)
    for file in (root / "damaged-run" / "checkpoints").rglob("server.safetensors"):
        file.write_bytes(file.read_bytes()[:-4])
    shutil.rmtree(root / "unfinished" / "checkpoints")
    return root


@pytest.fixture
def here(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """One folder for all cases; what a failing case leaves behind is cleared away, so that it fails alone."""
    monkeypatch.chdir(filled)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # one of the cases asks for a GPU
    known = {p.name for p in filled.iterdir()}
    yield filled
    for path in filled.iterdir():
        if path.name not in known:
            shutil.rmtree(path)


def test_the_cases_of_the_issue_are_all_there() -> None:
    wanted = [
        *("unknown preset", "unknown method", "unknown key", "missing config file", "existing run folder"),
        *("zero clients", "more clients than samples", "alpha zero", "alpha negative", "batch zero"),
        *("negative lambda", "unreadable image", "weights of another shape"),
    ]
    assert set(wanted) <= CASES.keys()


def test_code_in_a_weights_file_is_not_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TRAIN, "--set", "model.weights=pickle.pth"]) == 2
    assert not (here / "owned").exists()
    # torch's own message goes on to say how to run the code all the same
    assert "weights_only" not in capsys.readouterr().err
