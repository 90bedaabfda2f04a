"""Noticing drift in run folders and on the command line: the same numbers lazily, from files, and from Python."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import said, strict
from helpers import assert_close_norm
from PIL import Image
from small import adapters, as_older, damage, plain

import perada
from perada.cli import main as cli
from perada.client.scores import logits_on
from perada.errors import Damaged, InputError
from perada.lanes import rng_of
from perada.predict.drift import answer
from perada.predict.predictor import Check
from perada.runs.run import Run

FAST: dict[str, Any] = {"data__server_val": 0.5, "data__val": 0.2, "data__test": 0.15, "drift__window": 8}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drift") / "run"
    perada.train("digits", set=plain(FAST), out=path, device="cpu")
    return path


@pytest.fixture
def copy(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home, tmp_path / "run"))


@pytest.fixture(scope="module")
def pictures(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with one client's own test images, and with everybody's."""
    run, folders = perada.load(home, device="cpu"), {}
    own = run.federation.clients[0].test
    for name, index in (("home", own), ("abroad", run.federation.test[::3])):
        folder = tmp_path_factory.mktemp(name)
        for i in index:
            Image.fromarray(run.federation.images[i, 0].numpy()).save(folder / f"{i:04d}.png")
        folders[name] = folder
    return folders


def opened(path: Path) -> Run:
    return perada.load(path, device="cpu")


def forget(path: Path) -> None:
    """As an older version left the folder: without drift.json, and without a word about it."""
    (path / "drift.json").unlink()
    opened(path).folder.manifest.drop("drift.json")


def test_calibrations_are_written_at_the_end_and_come_out_the_same_later(copy: Path) -> None:
    written = json.loads((copy / "drift.json").read_text())
    run = opened(copy)
    assert {n: c.as_dict() for n, c in run.calibrations.items()} == {
        n: {**c, "own": tuple(c["own"]), "everyone": tuple(c["everyone"])} for n, c in written["clients"].items()
    }
    scores = opened(copy).drift_scores().as_dict()
    assert run.summary["drift"]["aware"].keys() == {"local_test", "global_test", "mixed"}
    for part in ("alone", "aware", "picture", "alarms"):
        assert scores[part] == run.summary["drift"][part]
    forget(copy)
    assert opened(copy).calibrations == run.calibrations
    assert not (copy / "drift.json").exists()  # readers write nothing
    as_older(copy)
    assert opened(copy).calibrations == run.calibrations


def test_predictions_need_no_data_once_they_are_calibrated(home: Path, pictures: dict[str, Path]) -> None:
    run = opened(home)
    run.config = dataclasses.replace(
        run.config, data=dataclasses.replace(run.config.data, name="cifar10", root="/none")
    )
    predictions = run.predict("client-00", sorted(pictures["home"].iterdir())[:3], drift=True)
    assert [set(p) for p in predictions] == [
        {"image", "client", "multilabel", "probabilities", "drift", "z", "home_share"}
    ] * 3


def test_scores_alone_are_those_of_an_evaluation(home: Path) -> None:
    run = opened(home)
    found, plain_scores = run.drift_scores(["local", "global", "fog:3"]), run.evaluate(["local", "global", "fog:3"])
    assert {n: s.per_client for n, s in found.alone.items()} == {n: s.per_client for n, s in plain_scores.items()}


def test_images_sorted_by_class_are_judged_in_windows_of_all_classes(home: Path) -> None:
    """As if they were shuffled; and the answers are in the order of the images."""
    run = opened(home)
    predictor = dataclasses.replace(run.predictor("client-00"), options=dataclasses.replace(run.config.drift, window=8))
    client = run.federation.clients[0]
    index = np.concatenate([client.train, client.test])
    index = index[np.argsort(run.federation.targets[index].numpy(), kind="stable")]
    images = run.federation.images[index]
    said_, in_order = predictor.predict(images), predictor.stream().push(images)
    assert len(index) > 16
    assert in_order.z.max() > said_.z.max(), "windows of one class look farther from home"
    order = torch.from_numpy(rng_of(0, "drift", "predict").permutation(len(index)))
    shuffled = predictor.stream().push(images[order])
    for name in ("probabilities", "z", "share", "drifted"):
        assert torch.allclose(getattr(said_, name)[order].double(), getattr(shuffled, name).double(), atol=1e-6)


def test_one_pass_of_two_lanes_is_two_plain_modules(home: Path) -> None:
    run = opened(home)
    predictor, images = run.predictor("client-01"), run.federation.images[:9]
    v, w = predictor.logits(images)
    seen = run.normalise(images)
    whole = run.experiment.model.plain(run.experiment.global_model)
    with torch.no_grad():
        assert_close_norm(v, run.model("client-01")(seen), 1e-5)
        assert_close_norm(w, whole(seen), 1e-5)
    said_ = answer(run.calibrations["client-01"], v, w, run.config.drift)
    assert_close_norm(predictor.predict(images).probabilities, said_.probabilities, 1e-9)


def test_evaluation_predicts_windows_of_a_random_order(home: Path) -> None:
    """Every image of Local-test and Global-test once; the mixed set is half own images, half of everybody's."""
    run = opened(home)
    from perada.runs.calibration import scorer

    data = run.federation
    judge = scorer(run.experiment, data, run.calibrations)
    ends = np.cumsum([0, *(len(c.test) for c in data.clients)])
    rows = {name: judge.rows(name) for name in ("local", "global", "mixed")}
    for k in range(len(data.clients)):
        own = np.arange(ends[k], ends[k + 1])
        assert sorted(rows["local"][k]) == own.tolist()
        assert sorted(rows["global"][k]) == list(range(ends[-1]))
        assert rows["global"][k].tolist() != sorted(rows["global"][k])
        assert len(rows["mixed"][k]) == 2 * len(own)
        assert np.isin(rows["mixed"][k], own).sum() >= len(own)
    k, (personal, whole) = 2, run.experiment.both_models()
    v, w = (logits_on(run.experiment.model, lanes, data, data.test[rows["global"][2]]) for lanes in (personal, whole))
    right = answer(judge.by[k], v[k], w[0], run.config.drift).probabilities.argmax(-1)
    truth = data.labels(data.test[rows["global"][2]])
    expected = 100 * float((right == truth).double().mean())
    assert run.drift_scores("global").aware["global_test"].per_client["client-02"] == pytest.approx(expected)


def test_poisoned_test_labels_change_no_prediction_and_no_constant(copy: Path, pictures: dict[str, Path]) -> None:
    files = sorted(pictures["abroad"].iterdir())
    clean = opened(copy)
    expected, numbers = clean.predict("client-00", files, drift=True), clean.calibrations
    forget(copy)
    poisoned = opened(copy)
    targets = poisoned.federation.targets.clone()
    targets[poisoned.federation.test] = (targets[poisoned.federation.test] + 1) % 10
    data = dataclasses.replace(poisoned.federation, targets=targets)
    poisoned.__dict__["federation"] = data
    assert poisoned.calibrations == numbers
    assert poisoned.predict("client-00", files, drift=True) == expected
    assert poisoned.drift_scores("local").aware != clean.drift_scores("local").aware  # the poison is there


def test_drift_settings_change_no_training(copy: Path, tmp_path: Path) -> None:
    other = {**FAST, "drift__window": 3, "drift__threshold": 1.0, "drift__mix": 0.1, "drift__strength": 9.0}
    run = perada.train("digits", set=plain(other), out=tmp_path / "other", device="cpu")
    assert adapters(run.path) == adapters(copy)
    for row, known in zip(run.metrics, opened(copy).metrics, strict=True):
        assert {**row, "seconds": 0} == {**known, "seconds": 0}
    assert "drift" not in run.metrics[-1]


def test_settings_that_calibrations_depend_on_make_them_again(home: Path) -> None:
    usual = opened(home)
    assert perada.load(home, device="cpu", set={"drift.window": 2}).calibrations == usual.calibrations
    other = perada.load(home, device="cpu", set={"drift.mix": 0.0, "drift.strength": 1e6}).calibrations
    assert {c.mix for c in other.values()} == {0.0}
    assert {c.mix for c in usual.calibrations.values()} != {0.0}


@pytest.mark.parametrize("prior", ["public", "shared"])
def test_other_priors(home: Path, prior: str) -> None:
    run = perada.load(home, device="cpu", set={"drift.prior": prior})
    everyone = {c.everyone for c in run.calibrations.values()}
    assert len(everyone) == 1
    found = next(iter(everyone))
    assert sum(found) == pytest.approx(1)
    if prior == "shared":
        counts = run.federation.label_counts().sum(0) + 1
        assert found == pytest.approx((counts / counts.sum()).tolist())
    else:
        w = run.experiment.model.plain(run.experiment.global_model)
        from perada.config.objects import public_of

        images = public_of(run.config, run.federation)
        assert images is not None
        with torch.no_grad():
            expected = w(run.normalise(images)).softmax(-1).mean(0)
        assert found == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("fedavg", "has no personal models"),
        ("feddyn", "has no personal models"),
        ("standalone", "has no global model"),
        ("fedrep", "has no global model"),
    ],
)
def test_methods_without_one_of_the_models_say_so(method: str, why: str, tmp_path: Path) -> None:
    run = perada.train("digits", method=method, set=plain({"train__rounds": 1}), out=tmp_path / "run", device="cpu")
    assert "drift" not in run.summary
    assert not (tmp_path / "run" / "drift.json").exists()
    with pytest.raises(InputError, match=why):
        run.drift_scores()


@pytest.mark.parametrize("method", ["ditto", "apfl", "pfedme", "fedavg-ft", "perada-no-kd"])
def test_methods_with_both_models_have_scores(method: str, tmp_path: Path) -> None:
    run = perada.train("digits", method=method, set=plain({"train__rounds": 1}), out=tmp_path / "run", device="cpu")
    assert run.summary["drift"]["aware"]["local_test"]["per_client"].keys() == set(run.clients)
    assert opened(run.path).calibrations.keys() == set(run.clients)


# damage


@pytest.mark.parametrize("how", ["cut", "one bit", "empty"])
def test_a_damaged_file_is_refused(copy: Path, how: str) -> None:
    damage(copy / "drift.json", how)
    with pytest.raises(Damaged, match=r"drift.json is damaged: delete it"):
        _ = opened(copy).calibrations
    (copy / "drift.json").unlink()
    assert opened(copy).calibrations


def test_calibrations_of_another_checkpoint_are_not_used(copy: Path) -> None:
    before = opened(copy).calibrations
    content = json.loads((copy / "drift.json").read_text())
    folder = opened(copy).folder
    wrong = {name: {**one, "mean": 77.0} for name, one in content["clients"].items()}
    folder.write_json("drift.json", {**content, "clients": wrong})
    assert {c.mean for c in opened(copy).calibrations.values()} == {77.0}
    folder.write_json("drift.json", {**content, "clients": wrong, "checkpoint": "0" * 64})
    assert opened(copy).calibrations == before


def test_more_rounds_replace_the_calibrations(copy: Path) -> None:
    before = json.loads((copy / "drift.json").read_text())
    perada.train(out=copy, resume=True, set={"train.rounds": 3}, device="cpu")
    after = json.loads((copy / "drift.json").read_text())
    assert (before["round"], after["round"]) == (2, 3)
    assert before["checkpoint"] != after["checkpoint"]
    assert opened(copy).calibrations


# commands


def test_drift_ends_with_0_at_home_and_3_abroad(
    home: Path, pictures: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["drift", str(home), "--client", "client-00", "--device", "cpu"]
    codes = {where: cli.main([*words, str(pictures[where]), "--set", "drift.threshold=0.5"]) for where in pictures}
    assert codes == {"home": 0, "abroad": 3}
    out = capsys.readouterr().out
    assert "look like those of client-00. Nothing needs to be done." in out
    assert "do not look like those of client-00" in out
    assert cli.main([*words, str(pictures["abroad"]), "--set", "drift.threshold=0.5", "--json"]) == 3
    found = strict(capsys.readouterr().out)
    assert found["drift"] is True
    assert found["z"] > found["threshold"] == 0.5
    assert sum(found["mix"].values()) == pytest.approx(1)
    assert found["images"] == len(list(pictures["abroad"].iterdir()))


def test_evaluate_and_predict_take_drift(
    home: Path, pictures: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = strict(said(capsys, "evaluate", str(home), "--drift", "--device", "cpu", "--json"))
    assert list(found["aware"]) == ["local_test", "global_test", "mixed"]
    assert found["window"] == 8
    shown = said(capsys, "evaluate", str(home), "--drift", "--device", "cpu", "--set", "drift.window=4")
    assert "windows of 4 images" in shown
    file = str(sorted(pictures["abroad"].iterdir())[0])
    one = strict(said(capsys, "predict", str(home), file, "--client", "client-00", "--drift", "--json"))
    assert one[0]["probabilities"].keys() == set("0123456789")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--set", "train.lr=1"], "a trained run takes settings of [drift] only"),
        (["--set", "drift.windows=3"], "did you mean 'drift.window'"),
        (["--set", "drift.window=0"], "drift.window must be at least 1"),
    ],
)
def test_wrong_settings_are_one_line(
    home: Path, words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(home), "--drift", *words]) == 2
    assert why in capsys.readouterr().err


def test_a_folder_without_images_is_one_line(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert cli.main(["drift", str(home), "--client", "client-00", str(tmp_path / "empty")]) == 2
    assert "no images in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("images", "z", "share", "says"),
    [
        (1, 0.1, 1.0, "This image looks like those of x. Nothing needs to be done."),
        (9, 2.9, 0.5, "These 9 images look like those of x. Nothing needs to be done."),
        (9, 2.9, 0.0, "These 9 images may not look like those of x: about 0% are as at home, but that may be chance."),
        (1, 3.1, 0.0, "This image does not look like those of x: about 0% are as at home; 'b' is 60% of them"),
        (9, 3.1, 0.0, "These 9 images do not look like those of x"),
    ],
)
def test_the_sentence_claims_no_more_than_the_numbers(images: int, z: float, share: float, says: str) -> None:
    found = Check("x", images, z, 3.0, share, {"a": 0.4, "b": 0.6}, {"a": 0.9, "b": 0.1})
    assert found.sentence.startswith(says)
    assert found.drifted == (z > 3)


def test_what_cannot_be_compared_is_an_error_and_not_an_all_clear(home: Path) -> None:
    run = opened(home)
    predictor, images = run.predictor("client-00"), run.federation.images[:5]
    none = dataclasses.replace(predictor, calibration=dataclasses.replace(predictor.calibration, images=0))
    with pytest.raises(InputError, match="no validation images"):
        none.check(images)
    flat = dataclasses.replace(predictor, calibration=dataclasses.replace(predictor.calibration, deviation=0.0))
    with pytest.raises(InputError, match="equally often"):
        flat.check(images)
    by = dataclasses.replace(predictor.calibration, mean=0.0, deviation=1.0, images=4)
    rare = dataclasses.replace(by, own=(0.91, *[0.01] * 9), everyone=(0.1,) * 10)  # s is at least log 0.1: z to 4.6
    few = dataclasses.replace(predictor, calibration=rare)
    with pytest.raises(InputError, match="1 image is too few to notice drift"):
        few.check(images[:1])
    even = dataclasses.replace(rare, own=(0.145, *[0.095] * 9))  # at least log 0.95: z to 0.1, with any images
    with pytest.raises(InputError, match=r"nearly equally often, or too few validation images \(4\)"):
        dataclasses.replace(predictor, calibration=even).check(images)
    with pytest.raises(InputError, match="uint8"):
        predictor.predict(images.float())


def test_multilabel_data_are_left_alone_unless_asked_for(tmp_path: Path) -> None:
    from perada.data.digits import digits

    data = digits()
    y = np.stack([data.targets % 2, data.targets > 4, np.isin(data.targets, (0, 6, 8, 9))], 1).astype(np.uint8)
    sites = {f"s{k}": (data.images[k * 100 : k * 100 + 100], y[k * 100 : k * 100 + 100]) for k in range(3)}
    fed = perada.Federation.from_arrays(sites, val=0.2, test=0.2)
    net = perada.models.backbone("resnet8", 3).net
    train = perada.Train(rounds=1, epochs=1, batch=8)
    run = perada.Experiment(net, fed, perada.methods.Ditto(), train=train, device="cpu").run(tmp_path / "a")
    assert "drift" not in run.summary
    with pytest.raises(InputError, match=r"off for multi-label data"):
        run.drift_scores()
    asked = perada.Drift(multilabel=True)
    run = perada.Experiment(net, fed, perada.methods.Ditto(), train=train, drift=asked, device="cpu").run(
        tmp_path / "b"
    )
    assert run.summary["drift"]["aware"]["local_test"]["mean"] is not None


def test_labels_that_are_not_known_do_not_count_as_absent(tmp_path: Path) -> None:
    """Half of one label is unknown: its prior is a share of the known ones, in P and in the shared g."""
    from perada.data.digits import digits

    data, rng = digits(), np.random.default_rng(0)
    y = np.stack([data.targets % 2, data.targets > 4], 1).astype(np.float32)
    y[rng.permutation(len(y))[: len(y) // 2], 0] = np.nan
    sites = {f"s{k}": (data.images[k * 100 : k * 100 + 100], y[k * 100 : k * 100 + 100]) for k in range(2)}
    fed = perada.Federation.from_arrays(sites, val=0.2, test=0.2)
    experiment = perada.Experiment(
        perada.models.backbone("resnet8", 2).net,
        fed,
        perada.methods.Ditto(),
        train=perada.Train(rounds=1, epochs=1, batch=8),
        drift=perada.Drift(multilabel=True, prior="shared"),
        device="cpu",
    )
    found, parts = experiment.run(tmp_path / "run").calibrations, []
    for client in fed.clients:
        labels = fed.targets[client.train, 0].numpy()
        known = labels[~np.isnan(labels)]
        assert found[client.name].own[0] == pytest.approx((known.sum() + 1) / (len(known) + 2))
        parts.append(known)
    every = np.concatenate(parts)
    assert found["s0"].everyone[0] == pytest.approx((every.sum() + 1) / (len(every) + 2))


def test_the_report_shows_drift_per_client(home: Path, tmp_path: Path) -> None:
    """Local, Global and mixed with and without, for every client; and s at home and abroad."""
    cli.main(["report", str(home), "--out", str(tmp_path / "page.html")])
    page, summary = (tmp_path / "page.html").read_text("utf8"), opened(home).summary["drift"]
    section = page.split("<h2>Noticing drift</h2>")[1].split("</section>")[0]
    for title in ("Local-test", "Global-test", "Mixed", "own test images", "standard deviations from home"):
        assert title in section
    for part in ("alone", "aware"):
        for split in ("local_test", "global_test", "mixed"):
            for client, value in summary[part][split]["per_client"].items():
                row = section.split(f'<th scope="row">{client}</th>')[1].split("</tr>")[0]
                assert ("n/a" if value is None else f"{value:.2f}") in row
    assert sum(summary["picture"]["home"]) == sum(len(c.test) for c in opened(home).federation.clients)
    assert str(home) not in page


def test_the_table_has_a_row_that_notices_drift(home: Path) -> None:
    from rich.console import Console

    from perada.cli import tables

    run = opened(home)
    console = Console(width=160, record=True)
    console.print(tables.results([run]))
    text = console.export_text()
    row = next(line for line in text.splitlines() if line.startswith("  + drift"))
    for split in ("local_test", "global_test"):
        assert f"{run.summary['drift']['aware'][split]['mean']:.2f}" in row
    assert "windows of 8 images" in text


@pytest.mark.parametrize(
    "edit",
    [
        {"window": "many"},
        {"picture": {"home": [1e999]}},
        {"picture": {"home": [-1]}},
        {"aware": {}},
        {"alone": None},
        {"alarms": 3},
    ],
)
def test_scores_that_were_not_written_are_refused(home: Path, edit: dict[str, Any]) -> None:
    from perada.predict.scores import DriftScores

    written = opened(home).summary["drift"]
    assert DriftScores.read(written).as_dict() == written
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        DriftScores.read({**written, **edit})
    wrong = {**written["alone"]["mixed"], "per_client": {"client-00": math.inf}}
    with pytest.raises(ValueError, match="not a share"):
        DriftScores.read({**written, "alone": {**written["alone"], "mixed": wrong}})


def test_drift_is_not_tested_on_what_it_was_calibrated_on(home: Path) -> None:
    with pytest.raises(InputError, match="leave out val"):
        opened(home).drift_scores(["local", "val"])
