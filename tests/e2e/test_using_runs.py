"""What is done with a run: evaluated, predicted with, exported, reported; and the Python calls behind that."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from commands import said, strict
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from small import SMALL, damage, flags

import perada
from perada.callbacks import OnRound
from perada.cli import main as cli
from perada.config import resolve
from perada.models.resnet import resnet


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FedAvg: one model that all share, and no adapters."""
    out = tmp_path_factory.mktemp("cli") / "fedavg"
    assert cli.main(["train", "digits", "--method", "fedavg", *flags(), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def pngs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten digits as a user may have them: larger, in grey or colour."""
    folder = tmp_path_factory.mktemp("pngs")
    paths = []
    for i, image in enumerate(load_digits().images[:10]):
        grey = Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8))
        paths.append(folder / f"{i}.png")
        (grey if i % 2 else grey.convert("RGBA")).save(paths[-1])
    return paths


# From the command line.


def test_evaluate_as_json_is_one_document(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "evaluate", str(run), "--on", "local,global,fog:3,shifted:3", "--json")
    found = strict(text)
    assert found.keys() == {"run", "local_test", "global_test", "fog:3", "shifted:3"}
    summary = json.loads((run / "summary.json").read_text())
    assert found["local_test"] == summary["local_test"], "a run is evaluated again to the same numbers"
    assert found["global_test"] == summary["global_test"]
    assert len(found["shifted:3"]["per_client"]) == 4


def test_evaluate_prints_a_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "evaluate", str(run), "--on", "val, local")
    assert "client-03" in text
    assert "mean" in text


def test_a_run_keeps_its_numbers_wherever_it_is_moved(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    subprocess.run(["cp", "-r", str(run), str(moved)], check=True)
    found = strict(said(capsys, "evaluate", str(moved), "--json"))
    assert found["local_test"] == json.loads((run / "summary.json").read_text())["local_test"]


def test_predict_names_classes_with_probabilities(
    run: Path, pngs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = strict(said(capsys, "predict", str(run), "--client", "client-02", *map(str, pngs), "--json"))
    assert [one["image"] for one in found] == [str(p) for p in pngs]
    for one in found:
        values = list(one["probabilities"].values())
        assert sum(values) == pytest.approx(1.0, abs=1e-5)
        assert values == sorted(values, reverse=True)
        assert set(one["probabilities"]) == set("0123456789")
    model = perada.load(run).model("client-02")
    pixels = torch.from_numpy(np.rint(load_digits().images[:10] * (255 / 16)))[:, None]
    logits = model((((pixels / 255) - 0.3) / 0.35).float().expand(-1, 3, -1, -1))
    assert [next(iter(one["probabilities"])) for one in found] == [str(i) for i in logits.argmax(-1).tolist()]


def test_predict_prints_a_table(run: Path, pngs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert "%" in said(capsys, "predict", str(run), "--client", "client-00", str(pngs[0]))


def test_predict_with_a_model_that_all_share(
    shared: Path, pngs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        strict(said(capsys, "predict", str(shared), "--client", c, str(pngs[0]), "--json"))[0]
        for c in ("client-00", "client-03")
    ]
    assert words[0]["probabilities"] == words[1]["probabilities"]


def digits_ready() -> torch.Tensor:
    pixels = torch.from_numpy(np.rint(load_digits().images[:50] * (255 / 16)))[:, None]
    return ((pixels / 255 - 0.3) / 0.35).float().repeat(1, 3, 1, 1)


def test_an_exported_adapter_is_the_one_in_the_checkpoint(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "adapter.safetensors"
    assert "wrote" in said(capsys, "export", str(run), "--client", "client-01", "--out", str(out))
    found = load_file(out)
    held = load_file(run / "checkpoints" / "round-0002" / "kept-0001.safetensors")
    assert found.keys() == {k.partition("/")[2] for k in held}
    for name, tensor in held.items():
        assert torch.equal(found[name.partition("/")[2]], tensor)
    with safe_open(out, "pt") as f:
        about = json.loads(f.metadata()["perada"])
    assert about["client"] == "client-01"
    assert about["method"] == "perada"
    assert about["classes"] == list("0123456789")
    assert (about["size"], about["fit"], about["interpolation"]) == ([8, 8], "crop", "bicubic")
    assert (about["mean"], about["std"], about["grey"]) == ([0.3], [0.35], True)
    assert about["thresholds"] is None


def test_a_merged_export_loads_into_a_plain_module(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that knows nothing of this package's layers gives the same logits as run.model()."""
    out = tmp_path / "merged.safetensors"
    said(capsys, "export", str(run), "--client", "client-01", "--out", str(out), "--merged")
    net = resnet("resnet8", 10, seed=99)
    net.load_state_dict(load_file(out), strict=True)
    with torch.no_grad():
        found, wanted = net.eval()(digits_ready()), perada.load(run).model("client-01")(digits_ready())
    assert torch.allclose(found, wanted, atol=1e-5)
    assert found.argmax(-1).unique().numel() > 1


def test_a_merged_full_model_loads_into_an_ordinary_resnet(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged.safetensors"
    said(capsys, "export", str(shared), "--client", "client-00", "--out", str(out), "--merged")
    net = resnet("resnet8", 10, seed=99)
    net.load_state_dict(load_file(out))
    with torch.no_grad():
        assert torch.allclose(
            net.eval()(digits_ready()), perada.load(shared).model("client-00")(digits_ready()), atol=1e-5
        )


def test_report_writes_a_self_contained_page(
    run: Path, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert "page.html" in said(capsys, "report", str(run), str(shared), "--out", str(out)).replace("\n", "")
    page = out.read_text()
    assert page.lstrip().lower().startswith("<!doctype html")
    assert "perada" in page
    assert "fedavg" in page
    for outside in ('src="http', 'href="http', "@import", "<script src"):
        assert outside not in page
    before = (run / "report.html").read_bytes()
    said(capsys, "report", str(run))
    assert len((run / "report.html").read_bytes()) > 0.5 * len(before) > 0


# A newest checkpoint that is damaged: an older round is used, and that is said.


@pytest.fixture
def damaged(run: Path, tmp_path: Path) -> Path:
    out = tmp_path / "damaged"
    shutil.copytree(run, out)
    damage(out / "checkpoints" / "round-0002" / "server.safetensors", "one bit")
    return out


def test_every_use_of_a_damaged_checkpoint_says_so(
    damaged: Path, pngs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    for words in (
        ["evaluate", str(damaged), "--json"],
        ["predict", str(damaged), str(pngs[0]), "--client", "client-00", "--json"],
        ["export", str(damaged), "--client", "client-00", "--out", str(tmp_path / "x.safetensors")],
    ):
        assert cli.main(words) == 0
        found = capsys.readouterr()
        assert "round-0002 is damaged and skipped" in found.err
        if "--json" in words:
            strict(found.out)


def test_a_damaged_checkpoint_is_a_warning_in_python(damaged: Path) -> None:
    with pytest.warns(UserWarning, match="round-0002 is damaged and skipped"):
        perada.load(damaged).model("client-00")


# The Python interface.


def test_train_and_load_from_python(tmp_path: Path) -> None:
    seen: list[int] = []
    run = perada.train(
        "digits",
        method="perada",
        set=SMALL,
        seed=3,
        out=tmp_path / "run",
        callbacks=[OnRound(lambda p: seen.append(p.round))],
    )
    assert seen == [0, 1, 2]
    again = perada.load(tmp_path / "run")
    assert again.summary == run.summary
    assert again.config == run.config
    assert again.config.run.seed == 3
    assert again.clients == run.clients == tuple(f"client-{m:02d}" for m in range(4))
    assert [r["round"] for r in again.metrics] == [1, 2]


def test_the_table_of_a_run_has_a_row_for_each_client(run: Path) -> None:
    opened = perada.load(run)
    table = opened.table()
    assert [row["client"] for row in table] == list(opened.clients)
    assert [row["train"] for row in table] == [len(c.train) for c in opened.federation.clients]
    for row in table:
        assert row["local_test"] == opened.summary["local_test"]["per_client"][row["client"]]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_a_model_is_a_plain_module_that_takes_normalised_images(precision: str, tmp_path: Path) -> None:
    settings = {**SMALL, "train.rounds": 1, "method.name": "perada-no-kd", "run.precision": precision}
    run = perada.train("digits", set=settings, out=tmp_path / "run")
    model = run.model("client-03")
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    client = run.federation.clients[3]
    images = run.federation.images[client.test]
    with torch.no_grad():
        logits = model(run.normalise(images))
        one_by_one = torch.cat([model(run.normalise(images[i : i + 1])) for i in range(len(images))])
    assert torch.allclose(logits, one_by_one, atol=1e-4)
    accuracy = 100 * (logits.argmax(-1) == run.federation.targets[client.test]).double().mean()
    assert float(accuracy) == pytest.approx(run.summary["local_test"]["per_client"]["client-03"])


def test_a_model_is_a_copy(run: Path) -> None:
    opened = perada.load(run)
    first = opened.model("client-00")
    with torch.no_grad():
        for p in first.parameters():
            p.zero_()
    assert float(opened.model("client-00").state_dict()["fc.weight"].abs().sum()) > 0


def test_a_model_can_be_trained_further(run: Path) -> None:
    """A researcher's next step: a few steps of ordinary torch."""
    model = perada.load(run).model("client-00").train().requires_grad_()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.functional.cross_entropy(model(digits_ready()), torch.from_numpy(load_digits().target[:50]))
    loss.backward()
    optimiser.step()
    assert all(p.grad is not None for n, p in model.named_parameters() if "adapter.norm.bias" not in n)


def test_personal_models_differ(run: Path) -> None:
    opened = perada.load(run)
    outputs = [opened.model(c)(digits_ready()).detach() for c in opened.clients]
    assert len({o.numpy().tobytes() for o in outputs}) > 1


def test_python_raises_what_the_command_line_prints(tmp_path: Path) -> None:
    with pytest.raises(perada.errors.InputError, match="did you mean 'perada'"):
        perada.train("digits", method="perda", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(perada.errors.InputError, match="not a run folder"):
        perada.load(tmp_path)


def test_from_python_a_name_may_be_text(run: Path, pngs: list[Path], tmp_path: Path) -> None:
    """One test set, one image, a path as text, a number of numpy's: what a person types first."""
    opened = perada.load(str(run))
    assert list(opened.evaluate("local")) == ["local_test"]
    assert list(opened.evaluate(["global", "fog:3", "local"])) == ["global_test", "fog:3", "local_test"], "as asked"
    assert opened.predict("client-01", str(pngs[0])) == opened.predict("client-01", [pngs[0]])
    opened.export("client-01", str(tmp_path / "x.safetensors"))
    assert (tmp_path / "x.safetensors").is_file()
    assert resolve("digits", {"train.rounds": np.int64(3), "train.lr": np.float32(0.5)}).train.rounds == 3


def test_shifted_is_the_same_in_a_summary_and_when_it_is_asked_for(tmp_path: Path) -> None:
    """A run has its severities; a name without one means those."""
    settings = {**SMALL, "run.shifts": True, "run.severities": [2]}
    made = perada.train("digits", set={**settings, "train.rounds": 1}, out=tmp_path / "run")
    found = perada.load(tmp_path / "run").evaluate(["shifted", "shifted:2"])
    assert found["shifted"].as_dict() == found["shifted:2"].as_dict() == made.summary["shifted"]


def test_a_terminal_that_cannot_write_everything_gets_a_question_mark(run: Path) -> None:
    typed = [sys.executable, "-m", "perada", "evaluate", str(run), "--on", "local"]
    done = subprocess.run(typed, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0, done.stderr
    assert b"mean ? std" in done.stdout


def test_a_table_in_a_pipe_is_not_cut() -> None:
    typed = [sys.executable, "-m", "perada", "partition", "digits", "--set", "data.clients=3"]
    env = {k: v for k, v in os.environ.items() if k != "COLUMNS"}
    done = subprocess.run([*typed, "--set", "data.partition=shards"], capture_output=True, env=env, check=True)
    assert "…" not in done.stdout.decode()


@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_an_exported_program_says_what_the_model_says(
    ending: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For any number of images of any shape, in a runtime that knows nothing of this project."""
    out = tmp_path / f"client.{ending}"
    assert "wrote" in said(capsys, "export", str(run), "--client", "client-01", "--out", str(out))
    opened = perada.load(run)
    pixels = torch.randint(0, 256, (5, 1, 8, 8), dtype=torch.uint8)
    with torch.no_grad():
        wanted = opened.model("client-01")(opened.normalise(pixels)).softmax(-1)
    images = pixels.permute(0, 2, 3, 1).repeat(1, 1, 1, 3)  # of their own size, and in colours without a colour
    for n in (5, 1):
        if ending == "pt2":
            more = {"perada.json": ""}
            found = torch.export.load(out, extra_files=more).module()(images[:n])
            about = json.loads(more["perada.json"])
        else:
            session = onnxruntime.InferenceSession(out, providers=["CPUExecutionProvider"])
            found = torch.from_numpy(session.run(["probabilities"], {"images": images[:n].numpy()})[0])
            about = json.loads(session.get_modelmeta().custom_metadata_map["perada"])
            assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
            assert session.get_outputs()[0].shape == ["batch", 10]
        assert torch.allclose(found, wanted[:n], atol=1e-5)
    assert about["client"] == "client-01"
    assert about["classes"] == list("0123456789")
    assert about == opened.personal("client-01").notes()


def test_an_onnx_file_needs_its_extra(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("perada.predict.personal.find_spec", lambda name: None)
    out = tmp_path / "x.onnx"
    assert cli.main(["export", str(run), "--client", "client-01", "--out", str(out)]) == 2
    assert "pip install 'perada[onnx]'" in capsys.readouterr().err
    assert not out.exists()
