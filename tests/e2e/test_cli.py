"""The commands a user types, from training to export, and the Python calls behind them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lanes import oracle
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from sklearn.datasets import load_digits
from small import SMALL, adapters, flags

import perada
from perada import cli
from perada.methods import REGISTRY
from perada.models.resnet import resnet

COMMANDS = ["train", "evaluate", "predict", "export", "report", "partition", "params", "methods", "presets"]


def strict(text: str) -> Any:
    """Exactly one JSON document, of JSON's own values only."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints on standard output; it must succeed."""
    capsys.readouterr()
    assert cli.main(list(words)) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("cli") / "run"
    assert cli.main(["train", "digits", *flags(), "--out", str(out)]) == 0
    return out


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


# Training.


def test_train_writes_a_run_folder_and_prints_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    text = said(capsys, "train", "digits", *flags(), "--out", str(out))
    assert "perada" in text
    assert str(out) in text.replace("\n", "")
    names = {p.name for p in out.iterdir()}
    assert names == {"config.toml", "data.json", "metrics.jsonl", "summary.json", "checkpoints", "report.html"}
    assert [p.name for p in sorted((out / "checkpoints").iterdir())] == ["round-0001", "round-0002"]


def test_metrics_have_a_row_for_every_evaluated_round(run: Path) -> None:
    rows = [strict(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["round"] for r in rows] == [1, 2]
    for row in rows:
        for split in ("local_test", "local_val", "global_test"):
            assert row[split].keys() == {"mean", "std", "per_client"}
            assert list(row[split]["per_client"]) == [f"client-{m:02d}" for m in range(4)]
        assert row["bytes_up"] > 0
        assert row["bytes_down"] > 0
        assert row["seconds"] > 0
    assert rows[1]["bytes_up"] == 2 * rows[0]["bytes_up"]


def test_train_as_json_is_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    found = strict(said(capsys, "train", "digits", *flags(train__rounds=1), "--out", str(out), "--json"))
    assert found["run"] == str(out)
    assert found["round"] == 1
    assert found["method"] == "perada"
    assert Path(found["report"]).is_file()


def test_eval_every_spares_evaluations_but_not_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = flags(train__rounds=5, run__eval_every=2, method__name="perada-no-kd")
    assert cli.main(["train", "digits", *words, "--out", str(out)]) == 0
    assert [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [2, 4, 5]


@pytest.mark.parametrize("method", REGISTRY)
def test_every_method_trains(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = flags(train__rounds=1)
    found = strict(said(capsys, "train", "digits", "--method", method, *words, "--out", str(out), "--json"))
    assert found["method"] == method
    assert found["bytes_up"] == (0 if method == "standalone" else found["bytes_up"])
    whole = "full", "adapter"  # of the partial methods no whole model is at the server
    parts = REGISTRY[method]().parts
    assert (found["global_model"] is not None) == (parts.shares in whole and parts.withholds is None)
    assert perada.load(out).clients == tuple(f"client-{m:02d}" for m in range(4))


def test_shifted_test_sets_at_the_end_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    words = flags(train__rounds=1, run__shifts=True, method__name="perada-no-kd")
    found = strict(said(capsys, "train", "digits", *words, "--out", str(out), "--json"))
    assert 0 <= found["shifted"]["mean"] <= 100


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two sites of cats (bright) and dogs (dark)."""
    draw = np.random.default_rng(0)
    for site in ("north", "south"):
        for name, level in (("cat", 200), ("dog", 60)):
            for i in range(12):
                path = tmp_path / "photos" / site / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                noise = draw.integers(-40, 40, (10, 12, 3))
                Image.fromarray((level + noise).clip(0, 255).astype(np.uint8)).save(path)
    return tmp_path / "photos"


def test_your_own_folder_from_training_to_prediction(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, words = tmp_path / "run", ["--set", "data.size=8", "--set", "train.cohort=2", "--set", "train.batch=4"]
    words += ["--set", "model.backbone=resnet8", "--set", "model.pretrain_rounds=2", "--set", "train.rounds=2"]
    found = strict(said(capsys, "train", "folder", "--data", str(photos), *words, "--out", str(out), "--json"))
    assert list(found["local_test"]["per_client"]) == ["north", "south"]
    image = photos / "south" / "cat" / "3.png"
    predicted = strict(said(capsys, "predict", str(out), "--client", "south", str(image), "--json"))
    assert predicted[0]["probabilities"].keys() == {"cat", "dog"}
    assert strict(said(capsys, "partition", "folder", "--data", str(photos), "--json"))["classes"] == ["cat", "dog"]


# Using a run.


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
        about = f.metadata()
    assert about["client"] == "client-01"
    assert about["method"] == "perada"
    assert about["classes"] == "0,1,2,3,4,5,6,7,8,9"


def test_a_merged_export_loads_into_a_plain_module(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A network that knows nothing of this package's layers gives the same logits as run.model()."""
    out = tmp_path / "merged.safetensors"
    said(capsys, "export", str(run), "--client", "client-01", "--out", str(out), "--merged")
    net = oracle.with_adapters(resnet("resnet8", 10, seed=99))
    net.load_state_dict(load_file(out))
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


# Looking things up.


@pytest.mark.parametrize(
    ("backbone", "classes", "full", "adapter"),
    [
        ("resnet18", 10, 11_181_642, 1_413_258),
        ("resnet18", 65, 11_209_857, 1_441_473),
        ("resnet34", 65, 21_318_017, 2_578_625),
    ],
)
def test_params_are_the_papers(
    backbone: str, classes: int, full: int, adapter: int, capsys: pytest.CaptureFixture[str]
) -> None:
    found = strict(said(capsys, "params", backbone, "--classes", str(classes), "--json"))
    assert (found["full"], found["adapter"]) == (full, adapter)
    assert found["feature_extractor"] == full - found["output"]
    assert found["buffers"].keys() == found.keys() - {"backbone", "classes", "buffers"}


def test_params_of_the_groups_of_resnet18(capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "params", "resnet18", "--json"))
    wanted = {"input": 4_731_968, "output": 5_130, "batch_norm": 7_808, "adapter_modules": 1_400_320}
    assert {k: found[k] for k in wanted} == wanted
    assert found["full"] + found["adapter_modules"] == 12_581_962
    assert "11,181,642" in said(capsys, "params", "resnet18")


def test_methods_say_what_they_train_and_send(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one["name"]: one for one in strict(said(capsys, "methods", "--json"))}
    assert found.keys() == REGISTRY.keys()
    sizes = {name: (one["trained"], one["communicated"]) for name, one in found.items()}
    assert sizes["perada"] == sizes["perada-no-kd"] == (2 * 1_413_258, 1_413_258)
    assert sizes["standalone"] == (11_181_642, 0)
    assert sizes["fedavg"] == (11_181_642, 11_181_642)
    assert "perada-no-kd" in said(capsys, "methods")


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "presets", "--json"))
    assert {"digits", "folder"} <= {one["name"] for one in found}
    assert all(one["description"] for one in found)
    assert "digits" in said(capsys, "presets")


def test_partition_says_who_holds_what(capsys: pytest.CaptureFixture[str]) -> None:
    found = strict(said(capsys, "partition", "digits", "--json", "--set", "data.clients=5"))
    assert len(found["clients"]) == 5
    for client in found["clients"]:
        assert sum(client["counts"]) == client["train"]
    total = sum(c["train"] + c["val"] + c["test"] for c in found["clients"])
    assert total == 1797
    assert 0 < found["unlikeness"] <= 1
    text = said(capsys, "partition")
    assert "client-19" in text


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "--version") == f"perada {perada.__version__}\n"
    text = said(capsys, "--help")
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, command, "--help")
    assert "Usage" in text
    assert command in text


def test_no_command_at_all_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main([])
    found = capsys.readouterr()
    assert code in (0, 2)
    assert "Usage" in found.out + found.err
    assert "Traceback" not in found.err


# As a process: what the shell sees.


def shell(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "perada", *words],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_process_prints_json_on_standard_output_and_progress_on_standard_error(tmp_path: Path, run: Path) -> None:
    found = shell("train", "digits", *flags(), "--json", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert strict(found.stdout)["run"] == "runs/digits-perada-0"
    assert "rounds" in found.stderr
    assert adapters(tmp_path / "runs" / "digits-perada-0") == adapters(run), "the same bytes as in this process"


def test_a_process_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    found = shell("train", "digits", "--method", "perda", cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr == "error: unknown method 'perda': did you mean 'perada'?\n"
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """`perada params resnet18 --json | head -1`."""
    words = [sys.executable, "-m", "perada", "partition", "digits", "--json"]
    child = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    stderr = child.stderr.read()
    child.stderr.close()
    child.wait(60)
    assert "Traceback" not in stderr
    assert "Exception" not in stderr


# The Python interface.


def test_train_and_load_from_python(tmp_path: Path) -> None:
    seen: list[int] = []
    run = perada.train(
        "digits", method="perada", set=SMALL, seed=3, out=tmp_path / "run", on_round=lambda p: seen.append(p.round)
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


def test_the_beginning_of_a_name_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--method", "fedalt"]) == 2
    assert capsys.readouterr().err == "error: unknown method 'fedalt': did you mean 'fedalt-adapter'?\n"


@pytest.mark.parametrize("lanes", ["0", "-1", "many", "1.5", ""])
def test_lanes_are_a_number_or_auto(lanes: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["train", "digits", "--lanes", lanes, "--out", str(tmp_path / "r")]) == 2
    assert "auto, or a number from 1" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


def test_lanes_may_be_given_anew_when_a_run_is_resumed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Another machine has another memory."""
    words = ["train", "digits", *flags(train__rounds=1), "--out", str(tmp_path / "r")]
    assert cli.main([*words, "--lanes", "1"]) == 0
    assert "1 lane at once" in (found := capsys.readouterr().err)
    assert "4 lanes take turns" in found
    more = ["train", "--resume", "--set", "train.rounds=2", "--lanes", "auto", "--out", str(tmp_path / "r")]
    assert cli.main(more) == 0
    assert "4 lanes at once" in capsys.readouterr().err
