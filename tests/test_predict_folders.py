"""`perada predict RUN FOLDER`: all images below it, and a line about everything else."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import said, strict, train
from own_images import picture, refused
from PIL import Image

import perada
from perada.cli import main as cli
from perada.data.images import about_lost


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("predict") / "run"
    assert train(out) == 0
    return out


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Three images at two depths, beside files that are not images, and hidden ones."""
    for name in ("b.png", "a.PNG", "deep/er/c.jpg", ".hidden/d.png", ".e.png"):
        pixels = np.random.default_rng(len(name)).integers(0, 256, (20, 20, 3), np.uint8)
        (tmp_path / "scans" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "scans" / name)
    for name in ("notes.txt", "deep/list.csv", "deep/more.txt", "README"):
        (tmp_path / "scans" / name).write_text("not an image")
    return tmp_path / "scans"


def test_a_folder_is_its_images(run: Path, scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [scans / name for name in ("a.PNG", "b.png", "deep/er/c.jpg")]
    one_by_one = strict(said(capsys, "predict", str(run), "--client", "client-01", *map(str, files), "--json"))
    found = strict(said(capsys, "predict", str(run), "--client", "client-01", str(scans), "--json"))
    assert found == one_by_one
    assert [one["image"] for one in found] == list(map(str, files))
    both = strict(said(capsys, "predict", str(run), "--client", "client-01", str(files[1]), str(scans), "--json"))
    assert [one["image"] for one in both] == list(map(str, [files[1], *files]))


def test_one_line_counts_the_rest(run: Path, scans: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["predict", str(run), "--client", "client-01", str(scans)]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == ["4 files skipped, by the ending not images: 2 .txt, 1 no ending, 1 .csv"]


def test_a_folder_without_images_is_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    typed = ["predict", str(run), "--client", "client-01", str(tmp_path / "empty")]
    assert "no images in" in refused(capsys, *typed)
    (tmp_path / "empty" / "scan.nii").write_text("another format")
    assert "1 file skipped, by the ending not images: 1 .nii" in refused(capsys, *typed)
    assert "no such image" in refused(capsys, "predict", str(run), "--client", "client-01", str(tmp_path / "gone"))


def test_lost_sides_are_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = picture(tmp_path / "wide.png")  # 10 rows of 12
    capsys.readouterr()
    assert cli.main(["predict", str(run), "--client", "client-01", str(wide)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("1 of 1 image has another shape than the network's: it loses 17% of the pixels at the sides")
    with pytest.warns(UserWarning, match="it loses 17%"):
        perada.load(run).predict("client-01", wide)
    assert about_lost([0.0, 0.009], "crop") == ""
    assert "2 of 3 images have another shape: they lose 20% of their pixels on average and at most 30%" in about_lost(
        [0.1, 0.3, 0.0], "crop"
    )


def test_many_pictures_are_predicted_in_parts(run: Path, scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = perada.load(run, say=lambda line: None)
    wanted = opened.predict("client-02", scans)
    monkeypatch.setattr("perada.predict.pictures.TOGETHER", 128)  # two pictures of 8×8
    for found, one in zip(opened.predict("client-02", scans), wanted, strict=True):
        assert found["probabilities"] == pytest.approx(one["probabilities"], abs=1e-6)


def test_the_fit_is_the_runs_and_an_older_folder_means_crop(run: Path, tmp_path: Path) -> None:
    wide = picture(tmp_path / "wide.png")
    old = Path(shutil.copytree(run, tmp_path / "old"))
    text = (run / "config.toml").read_text()
    assert 'fit = "crop"\n' in text
    shares = []
    for line in ('fit = "crop"\n', "", 'fit = "pad"\n'):
        (old / "config.toml").write_text(text.replace('fit = "crop"\n', line))
        (one,) = perada.load(old, say=lambda line: None).predict("client-01", wide)
        shares.append(one["probabilities"])
    assert shares[0] == shares[1]
    assert shares[0] != shares[2]
