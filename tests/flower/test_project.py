"""`perada flower init`: its project can be read, built and run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from flwr.cli.build import build_fab_from_disk

from flower.wire import make_world, run
from perada.cli import main as cli
from perada.errors import InputError
from perada.flower import project as projects
from perada.flower.guards import problem_of
from perada.flower.project import Project
from perada.flower.settings import SiteSettings
from perada.runs.folder import RunFolder


def test_a_project_is_ready_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flower", "init", str(tmp_path / "p")]) == 0
    files = {str(p.relative_to(tmp_path / "p")) for p in (tmp_path / "p").rglob("*") if p.is_file()}
    assert files == {"app/pyproject.toml", "server.toml", "site.toml", "certs.sh"}
    settings = Project.open(tmp_path / "p").settings()
    assert settings.federation.sites == ("north", "south", "west")
    assert len(settings.federation.classes) == 10
    assert settings.config.method_name == "perada"
    assert settings.config.train.cohort == 0
    assert Project.open(tmp_path / "p").port() == 9092


def test_what_is_asked_for_is_in_it(tmp_path: Path) -> None:
    words = ["--sites", "b,a", "--method", "ditto", "--preset", "folder", "--classes", "cat,dog"]
    words += ["--set", "train.rounds=3", "--set", "method.lam=0.5", "--server", "fl.example.org:7000", "--name", "two"]
    assert cli.main(["flower", "init", str(tmp_path / "p"), *words]) == 0
    project = Project.open(tmp_path / "p")
    settings = project.settings()
    assert settings.federation.sites == ("a", "b")
    assert settings.federation.classes == ("cat", "dog")
    assert settings.config.method == {"name": "ditto", "lam": 0.5} | settings.config.method
    assert settings.config.train.rounds == 3
    assert project.port() == 7000
    assert '--server-name fl.example.org "$@"' in (project.folder / "certs.sh").read_text()  # no keys of sites


def test_a_random_backbone_gets_a_hint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "folder-fedavg", "--classes", "cat,dog", "--server", "fl.example.org"]
    assert cli.main(["flower", "init", str(tmp_path / "p"), *words]) == 0
    said = capsys.readouterr().err
    assert f"{tmp_path / 'p' / 'certs.sh'}, each site's own key by perada flower certs certs --keys-only" in said
    assert '[model]\nweights = "random"  # better a pretrained file' in (tmp_path / "p" / "server.toml").read_text()
    assert Project.open(tmp_path / "p").settings().random_backbone
    for method in ("fedavg", "fedalt-adapter"):
        assert cli.main(["flower", "init", str(tmp_path / method), *words, "--method", method]) == 0
        assert not Project.open(tmp_path / method).settings().random_backbone, "it trains all of it"
    assert cli.main(["flower", "init", str(tmp_path / "r")]) == 0
    assert not Project.open(tmp_path / "r").settings().random_backbone, "the digits have weights"
    assert f"{tmp_path / 'r' / 'certs.sh'}, each site's own key by perada" in capsys.readouterr().err, "loopback, too"


@pytest.mark.parametrize(("sites", "least"), [("a", 1), ("a,b", 1), ("a,b,c", 2), ("a,b,c,d", 2)])
def test_one_site_may_be_away(tmp_path: Path, sites: str, least: int) -> None:
    assert cli.main(["flower", "init", str(tmp_path / "p"), "--sites", sites]) == 0
    assert Project.open(tmp_path / "p").settings().rounds.min_sites == least


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # flwr's own
def test_the_app_is_a_small_one_without_code(tmp_path: Path) -> None:
    assert cli.main(["flower", "init", str(tmp_path / "p"), "--name", "St. Mary's"]) == 2  # no name for a folder
    assert cli.main(["flower", "init", str(tmp_path / "p"), "--name", "st.mary_s"]) == 0
    (tmp_path / "p" / "certs").mkdir()
    (tmp_path / "p" / "certs" / "secret.toml").write_text("")  # the app has no file from outside app/
    fab = build_fab_from_disk(Project.open(tmp_path / "p").app)
    assert len(fab) < 2000
    assert problem_of(fab) is None


def words_of(script: str) -> list[str]:
    """Returns the command that the script advises for a site's key, without its options."""
    (line,) = [line for line in Path(script).read_text().splitlines() if "--keys-only" in line]
    return line.removeprefix("#").split("--keys-only")[0].split()


def test_the_certificate_script_works(tmp_path: Path) -> None:
    assert cli.main(["flower", "init", str(tmp_path / "p"), "--sites", "a,b"]) == 0
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = str(tmp_path / "p" / "certs.sh")
    assert subprocess.run([script], env=env, check=False, capture_output=True).returncode == 0
    assert not list((tmp_path / "p" / "certs" / "sites").glob("*")), "each site makes its own key"
    keys = [*words_of(script), "--keys-only", "--sites", "b"]
    assert subprocess.run(keys, env=env, cwd=tmp_path / "p", check=False, capture_output=True).returncode == 0
    assert (tmp_path / "p" / "certs" / "sites" / "b.key").is_file()
    again = subprocess.run([script], env=env, check=False, capture_output=True, text=True)
    assert again.returncode == 2
    assert "not overwritten" in again.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--preset", "digit"], "did you mean 'digits'?"),
        (["--preset", "folder"], "--classes"),
        (["--method", "perda"], "did you mean 'perada'?"),
        (["--set", "train.round=3"], "did you mean 'train.rounds'?"),
        (["--set", "train.rounds=many"], "a whole number"),
        (["--sites", ""], "site"),
        (["--sites", "a,a"], "twice"),
        (["--sites", "a,server"], "site name 'server'"),
        (["--name", "flower"], "'flower' is the name of a folder"),
        (["--name", "Runs"], "'Runs' is the name of a folder"),
        (["--server", "a:b:c"], "host:port"),
        (["--server", "host:99999"], "host:port"),
        (["--set", "data.alpha=0.5"], "alpha has no meaning at a server"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flower", "init", str(tmp_path / "p"), *words]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert ".part" not in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "p").exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("precious")
    assert cli.main(["flower", "init", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_the_site_file_names_how_much_scores_tell(tmp_path: Path) -> None:
    assert cli.main(["flower", "init", str(tmp_path / "p")]) == 0
    table = tomllib.loads((tmp_path / "p" / "site.toml").read_text())["site"]
    assert table["score_digits"] == SiteSettings.score_digits == 1
    assert table.keys() - {"server"} <= {f.name for f in fields(SiteSettings)}


def test_the_examples_in_the_documents_are_in_the_source_distribution() -> None:
    root = Path(__file__).parents[2]
    targets = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert "examples" in targets["sdist"]["include"]
    for file in (root / "docs" / "deploy.md", root / "Makefile"):
        for name in re.findall(r"\b(?:examples|tools|tests)/[\w/]+\.py", file.read_text()):
            assert (root / name).is_file(), name


def test_a_run_that_trains_is_copied_as_it_is_at_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint goes away while it is copied; then there are fewer rows than the newest checkpoint knows."""
    run(make_world(tmp_path, train__rounds=2, distill__steps=0))
    project, real, tried = Project.open(tmp_path), shutil.copytree, list[Path]()
    monkeypatch.setattr(projects.time, "sleep", lambda seconds: None)

    def moving(source: Path, part: Path, *words: Any, **more: Any) -> None:
        real(source, part, *words, **more)
        if Path(source).name != "run":  # a folder of it
            return
        tried.append(part)
        if len(tried) == 1 or out.name == "never":
            raise shutil.Error([(str(source), str(part), "No such file: round-0001")])
        if len(tried) == 2:
            (part / "metrics.jsonl").write_text("")

    monkeypatch.setattr(shutil, "copytree", moving)
    out = tmp_path / "out"
    project.collect(None, out)
    assert len(tried) == 3
    assert [row["round"] for row in RunFolder.open(out).metrics()] == [1, 2]
    assert (out / "global.safetensors").is_file()
    out = tmp_path / "never"
    with pytest.raises(
        InputError, match=r"cannot copy .*/run to .*/never: No such file: round-0001; if it is training"
    ):
        project.collect(None, out)
    assert not out.exists()


def test_what_is_no_plain_file_is_not_read(tmp_path: Path) -> None:
    """A pipe would be waited for, and brackets without end end the reader."""
    assert cli.main(["flower", "init", str(tmp_path / "p")]) == 0
    project = Project.open(tmp_path / "p")
    for make in (lambda f: os.mkfifo(f), lambda f: f.write_text("a = " + "[" * 100_000)):
        (project.folder / "site.toml").unlink()
        make(project.folder / "site.toml")
        assert project.port() == 9092
