"""Labels that are not known: masked in losses, scores and thresholds, and without a say in anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_images import picture, refused, table, words

import perada
from perada.cli import main as cli
from perada.client.scores import best_thresholds, label_areas, score
from perada.client.trainer import sample_loss
from perada.data import Federation, build_federation
from perada.data.federation import targets_of
from perada.data.manifest import manifest
from perada.data.named import DataOptions
from perada.data.source import UNKNOWN, Source
from perada.data.split import categories
from perada.errors import InputError

NAN = float("nan")
RNG = np.random.default_rng(11)


def test_the_loss_is_the_hand_written_one() -> None:
    """Two labels of three are known in the first sample, one in the second, none in the third."""
    logits = torch.tensor(
        [[0.5, -1.0, 2.0], [1.5, 0.0, -0.5], [1.0, 1.0, 1.0]], dtype=torch.float64, requires_grad=True
    )
    targets = torch.tensor([[1, NAN, 0], [NAN, NAN, 1], [NAN] * 3])
    p = 1 / (1 + np.exp(-logits.detach().numpy()))
    wanted = [-(np.log(p[0, 0]) + np.log(1 - p[0, 2])) / 3, -np.log(p[1, 2]) / 3, 0.0]
    found = sample_loss(logits, targets)
    assert found.tolist() == pytest.approx(wanted, rel=1e-12)
    found.sum().backward()
    slope = torch.tensor([[p[0, 0] - 1, 0, p[0, 2]], [0, 0, p[1, 2] - 1], [0, 0, 0]]) / 3
    assert torch.allclose(logits.grad, slope, atol=1e-12)  # type: ignore[arg-type]


def test_where_all_is_known_the_loss_is_the_same_bit_for_bit() -> None:
    logits, targets = torch.randn(4, 9, 5), (torch.rand(4, 9, 5) > 0.5).float()
    one, two = (logits.clone().requires_grad_() for _ in range(2))
    plain = F.binary_cross_entropy_with_logits(one, targets, reduction="none").mean(-1)
    masked = sample_loss(two, targets)
    assert torch.equal(plain, masked)
    plain.sum().backward()
    masked.sum().backward()
    assert torch.equal(one.grad, two.grad)  # type: ignore[arg-type]


def test_the_area_is_that_of_the_samples_that_are_known() -> None:
    logits = torch.from_numpy(RNG.normal(size=(40, 3)))
    truth = torch.from_numpy((RNG.random((40, 3)) > 0.5).astype(np.float32))
    hidden = torch.from_numpy(RNG.random((40, 3)) > 0.6)
    hidden[:, 2] = truth[:, 2] == 1  # no sample with this label is known
    targets = truth.masked_fill(hidden, NAN)
    wanted = [label_areas(logits[~hidden[:, j], j : j + 1], truth[~hidden[:, j], j : j + 1])[0] for j in range(3)]
    assert label_areas(logits, targets) == wanted
    assert wanted[0] != label_areas(logits, truth)[0]
    assert wanted[2] is None
    assert score(logits, targets) == pytest.approx(50 * (wanted[0] + wanted[1]))  # type: ignore[operator]
    assert score(logits, torch.full_like(targets, NAN)) is None


def test_a_threshold_is_the_best_one_by_trying_all() -> None:
    logits = torch.from_numpy(RNG.normal(size=(60, 4)))
    targets = ((logits + torch.from_numpy(RNG.normal(size=(60, 4)))) > 0.3).float()
    targets[RNG.random((60, 4)) > 0.7] = NAN
    targets[:, 3] = 1
    found = best_thresholds(logits, targets)
    assert found[3] is None, "one class only"

    def gain(j: int, threshold: float) -> float:
        known = ~targets[:, j].isnan()
        said, truth = logits[known, j].sigmoid() >= threshold, targets[known, j] == 1
        return float((said & truth).sum() / truth.sum() - (said & ~truth).sum() / (~truth).sum())

    for j in range(3):
        best = max(gain(j, float(t)) for t in np.linspace(0, 1, 5001))
        assert gain(j, found[j]) == pytest.approx(best)  # type: ignore[arg-type]
    assert best_thresholds(torch.tensor([[2.0], [1.0]]), torch.tensor([[0.0], [1.0]])) == [None], "worse than chance"
    (middle,) = best_thresholds(torch.tensor([[0.0], [2.0]]), torch.tensor([[0.0], [1.0]]))
    assert middle == pytest.approx((0.5 + 1 / (1 + np.exp(-2))) / 2)


def test_meta_categories_take_what_is_not_known_as_absent() -> None:
    targets = np.array([[0, 1], [UNKNOWN, 1], [1, 1], [1, UNKNOWN], [1, 0]], np.uint8)
    source = Source("x", np.zeros((5, 1, 8, 8), np.uint8), targets, ("a", "b"))
    assert categories(source, np.arange(5), 2).tolist() == [0, 0, 2, 1, 1]


def test_arrays_say_it_by_nan() -> None:
    x = RNG.integers(0, 256, (30, 8, 8), np.uint8)
    y = (RNG.random((30, 2)) > 0.5).astype(np.float32)
    y[:4, 0] = NAN
    fed = Federation.from_arrays({"a": (x, y), "b": (x[::-1], y[::-1])})
    assert int(fed.targets.isnan().sum()) == 8
    assert fed.label_counts()[:, 0].sum() <= 2 * np.nansum(y[:, 0])
    with pytest.raises(InputError, match="0 or 1 everywhere, or NaN where not known"):
        Federation.from_arrays({"a": (x, y + 0.5)})


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Three sites with two findings: one is the picture's brightness, the other is known at the first site only."""
    rows: list[list[Any]] = [["path", "site", "bright", "odd"]]
    for i in range(90):
        picture(tmp_path / f"{i}.png", 150 * (i % 2))
        rows.append([f"{i}.png", "abc"[i % 3], "" if i % 7 == 0 else i % 2, i // 2 % 2 if i % 3 == 0 else ""])
    return table(tmp_path / "scans.csv", rows)


def test_blank_cells_of_a_manifest(scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = manifest(str(scans), 8)
    assert source.classes == ("bright", "odd")
    assert (source.targets[:, 0] == UNKNOWN).sum() == 13
    assert (source.targets[:, 1] == UNKNOWN).sum() == 60
    targets = targets_of(source)
    assert torch.equal(targets.isnan(), torch.from_numpy(source.targets == UNKNOWN))
    assert torch.equal(targets.nan_to_num(9), torch.from_numpy(np.where(source.targets > 1, 9, source.targets)).float())
    text = scans.read_text().replace("odd", "odd,note").replace("\n", ",\n").replace("note,", "note")
    scans.write_text(text)
    assert "column note is blank" in refused(capsys, "train", "folder", "--data", str(scans), *words())


def test_a_run_with_unknown_labels(scans: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains, is scored where labels are known, and its thresholds reach predictions and exported files."""
    # fmt: off
    settings = words(train__rounds=3, train__batch=8, train__lr=0.1, train__epochs=3, data__val=0.3, data__test=0.3,
                     model__pretrain_rounds=1)
    # fmt: on
    assert cli.main(["train", "folder", "--data", str(scans), *settings, "--out", str(tmp_path / "run")]) == 0
    run = perada.load(tmp_path / "run", device="cpu", say=lambda line: None)
    summary = run.summary
    assert summary["metric"] == "auc"
    assert all(np.isfinite(row["train_loss"]) for row in run.metrics)
    assert summary["local_test"]["per_label"]["odd"] is not None, "the first site knows it"
    chosen = summary["thresholds"]
    assert chosen.keys() == {"a", "b", "c"}
    assert chosen["b"]["odd"] is None
    data, state = run.federation, run.state("a")
    val = data.clients[0].val
    with torch.no_grad():
        logits = run.model("a")(run.normalise(data.images[val]))
    assert state.lanes == 1
    found = dict(zip(data.classes, best_thresholds(logits, data.targets[val]), strict=True))
    assert [found[k] for k in found] == [v if v is None else pytest.approx(v, rel=1e-4) for v in chosen["a"].values()]
    assert found["bright"] is not None
    (one,) = run.predict("b", scans.parent / "3.png")
    assert one["thresholds"] == {"bright": chosen["b"]["bright"] or 0.5, "odd": 0.5}
    capsys.readouterr()
    assert cli.main(["predict", str(run.path), "--client", "b", str(scans.parent / "3.png")]) == 0
    table = capsys.readouterr().out
    present = [name for name, p in one["probabilities"].items() if p >= one["thresholds"][name]]
    assert table.count("(present)") == len(present)
    run.export("b", tmp_path / "b.pt2")
    files = {"perada.json": ""}
    torch.export.load(tmp_path / "b.pt2", extra_files=files)
    assert json.loads(files["perada.json"])["thresholds"] == one["thresholds"]


def test_what_is_unknown_has_no_influence(scans: Path) -> None:
    """Pictures of which no label is known, one more or less, leave the others' loss as it is."""
    fed = build_federation(DataOptions(name="folder", root=str(scans), size=8, partition="site"))
    logits, targets = torch.randn(len(fed.targets), 2), fed.targets
    blank = torch.cat([targets, torch.full((7, 2), NAN)])
    more = sample_loss(torch.cat([logits, torch.randn(7, 2)]), blank)
    assert torch.equal(more[:-7], sample_loss(logits, targets))
    assert not more[-7:].any()
