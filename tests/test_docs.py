"""What the documents say is so: their programs run, their tables are the code's."""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small import SMALL

import perada
from perada.cli import main as cli
from perada.data import Federation
from perada.data.digits import digits
from perada.methods import REGISTRY, grids, method_sizes

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def blocks(document: str, language: str) -> list[str]:
    """Returns the code blocks of a document in one language."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / document).read_text("utf8"), re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another package, installed: the file of docs/new-method.md, and the entry point that it declares."""
    home = tmp_path_factory.mktemp("package")
    (file,) = blocks("new-method.md", "python")
    (declared,) = blocks("new-method.md", "toml")
    (home / "mymethods.py").write_text(file)
    points = tomllib.loads(declared)["project"]["entry-points"]
    told = home / "mymethods-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: mymethods\nVersion: 1.0\n")
    lines = [f"[{group}]\n" + "".join(f"{n} = {v}\n" for n, v in found.items()) for group, found in points.items()]
    (told / "entry_points.txt").write_text("\n".join(lines))
    return home


def python(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python where the other package is installed."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *sys.path]), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=package, env=env, capture_output=True, text=True, timeout=300)


def run(package: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python(package, "-m", "perada", *words)


def words(**extra: object) -> list[str]:
    both = {**SMALL, **{k.replace("__", "."): v for k, v in extra.items()}}
    return [w for k, v in both.items() for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


def test_the_example_method_trains_counts_and_compares(package: Path) -> None:
    done = run(package, "compare", "digits", "--methods", "fedavg,fedavgm", "--out", "both", "--json", *words())
    assert done.returncode == 0, done.stderr
    found = {m["name"]: m for m in json.loads(done.stdout)["methods"]}
    assert found["fedavgm"]["trained"] == found["fedavg"]["trained"]
    assert found["fedavgm"]["global_test"] != found["fedavg"]["global_test"]


def test_the_commands_find_the_example_by_its_place(package: Path) -> None:
    out = ("--out", "by-place")
    done = run(package, "train", "digits", "--method", "mymethods:FedAvgM", *out, *words(train__rounds=1))
    assert done.returncode == 0, done.stderr
    again = run(package, "report", "by-place")
    assert again.returncode == 0, again.stderr


def test_the_example_method_is_what_it_says(package: Path) -> None:
    """β = 0 is FedAvg; otherwise three rounds of s ← β s + w − mean θ, w ← w − s on FedAvg's own uploads."""
    code = f"""
import json, torch
from perada.config import resolve
from perada.lanes import gather, mean
from perada.config import build

settings = {{**{SMALL!r}, "run.precision": "fp64"}}
sims = [build(resolve("digits", {{**settings, **more}})) for more in (
    {{"method.name": "fedavg"}}, {{"method.name": "fedavgm", "method.beta": 0.0}},
    {{"method.name": "fedavgm", "method.beta": 0.7}})]
for _ in range(3):
    sims[0].round(), sims[1].round()
name = "layer2.0.conv1.weight"
zero = float((sims[0].now.broadcast.params[name] - sims[1].now.broadcast.params[name]).norm())
sim, speed = sims[2], 0.0
for _ in range(3):
    w = sim.now.broadcast
    upload, _ = sim.method.client_update(sim.trainer(sim.sampled(sim.now.round)), w, sim.now.kept)
    speed = 0.7 * speed + w.params[name] - mean(upload).params[name]
    wanted = w.params[name] - speed
    sim.round()
print(json.dumps([zero, float((sim.now.broadcast.params[name] - wanted).norm()), float(wanted.norm())]))
"""
    done = python(package, "-c", code)
    assert done.returncode == 0, done.stderr
    zero, off, size = json.loads(done.stdout)
    assert zero < 1e-9 * size
    assert off < 1e-9 * size


def test_a_bad_value_of_the_example_is_one_line(package: Path) -> None:
    done = run(package, "train", "digits", "--method", "fedavgm", "--set", "method.beta=2", "--out", "never")
    assert done.returncode == 2
    assert done.stderr == "error: method.beta must be in [0, 1), not 2.0\n"
    assert not (package / "never").exists()


class Wandb(ModuleType):
    """Stands in for the package wandb, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.told: list[tuple[str, Any]] = []

    def init(self, **settings: Any) -> Wandb:
        self.told.append(("init", settings))
        return self

    def log(self, values: dict[str, Any], step: int) -> None:
        self.told.append((f"log {step}", values))

    def finish(self) -> None:
        self.told.append(("finish", None))


@pytest.mark.skipif(not hasattr(Federation, "from_arrays"), reason="Federation.from_arrays is not merged yet")
def test_the_program_of_the_python_document_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All its blocks, one after the other, as one program."""
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "mine"}
    for block in blocks("python.md", "python"):
        exec(compile(block, "docs/python.md", "exec"), names)
    said = capsys.readouterr().out
    assert "torch.Size([1, 10])" in said, "a personal model of the own network predicts"
    assert re.findall(r"^(\d+) [\d.]+ \d+$", said, re.MULTILINE) == ["1", "2", "3", "4"], "stopped after round 3"
    assert [what for what, _ in wandb.told] == ["init", "log 1", "log 2", "finish"]
    assert wandb.told[0][1]["config"] == {"method": "FedAvg"}
    assert wandb.told[1][1].keys() >= {"loss", "bytes_up", "local_test", "global_test"}


def test_the_table_of_methods_has_every_method_with_its_numbers() -> None:
    text = (DOCS / "methods.md").read_text()
    table = text.partition("\n## ")[0]  # the first of the document
    rows = [[c.strip() for c in line.strip("|\n").split("|")] for line in table.splitlines() if line.startswith("| `")]
    assert [r[0].strip("`") for r in rows] == list(REGISTRY)
    for row in rows:
        sizes = method_sizes(row[0].strip("`"))
        assert (row[3], row[4]) == (f"{sizes['trained']:,}", f"{sizes['communicated']:,}"), row[0]


def test_the_grids_are_the_papers() -> None:
    lam = {name for name in REGISTRY if "lam" in grids(name)}
    assert lam == {"perada", "perada-no-kd", "ditto", "pfedme", "mtl"}
    assert {grids(n)["lam"] for n in lam} == {(0.1, 1.0)}
    assert grids("fedprox") == {"mu": (0.1, 1.0)}
    assert np.allclose(grids("apfl")["alpha"], (0.1, 0.3, 0.5, 0.7))
    assert {n for n in REGISTRY if grids(n)} == lam | {"fedprox", "apfl"}


def selected(command: str) -> list[str]:
    """Returns the test functions that a pytest command of the documents names, by their files and `-k`."""
    paths, _, words = command.removeprefix("pytest ").partition(" -k ")
    files = [f for p in paths.split() for f in ([ROOT / p] if (ROOT / p).is_file() else (ROOT / p).rglob("test_*.py"))]
    wanted = [w for w in words.strip('"').split() if w != "or"] or [""]
    tests = [n for f in files for n in re.findall(r"^def (test_\w+)", f.read_text("utf8"), re.MULTILINE)]
    assert all(any(w in name for name in tests) for w in wanted), f"{command}: a word of -k names no test"
    return [n for n in tests if any(w in n for w in wanted)]


def test_every_command_of_the_reliability_table_names_tests_that_exist() -> None:
    rows = [line for line in (DOCS / "reliability.md").read_text("utf8").splitlines() if line.startswith("| ")][2:]
    commands = [re.findall(r"`([^`]+)`", row)[-1] for row in rows]
    assert len(commands) > 30
    targets = (ROOT / "Makefile").read_text("utf8")
    for command in commands:
        kind, _, what = command.partition(" ")
        if kind == "pytest":
            assert selected(command), command
        elif kind == "make":
            assert f"\n{what}:" in targets, command
        else:
            assert (ROOT / what.split()[0]).is_file(), command


# The commands in the code blocks

MARKED = re.compile(r"#.*\b(GPU|network)\b")  # `# ... (network)`: not run here
OURS = re.compile(r"(perada [a-z]|make |pip |python3? )")  # a line that begins with `$ ` is a transcript
FEW = [
    w
    for k, v in SMALL.items()
    if not k.endswith(".lr")
    for w in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")
]
DRIFTED = 3  # the exit code of `perada drift`
QUICK = {  # added where a command would train for long: the form of the command is tested, not its numbers
    "train": ["--set", "train.rounds=1", "--set", "train.epochs=1", "--set", "model.pretrain_rounds=1"],
    "compare": ["--seeds", "1", "--methods", "ditto,perada", *words(train__rounds=1)],
    "tune": ["--grid", "train.lr=0.01", "--grid", "method.lam=1", "--grid", "distill.lr=0.001", *FEW],
    "join": ["--rounds", "1"],
}


def lines_of(document: Path) -> list[str]:
    """Returns the commands in the code blocks that have no language, with their comments."""
    lines = []
    for block in re.findall(r"```\n(.*?)```", document.read_text("utf8"), re.DOTALL):
        lines += [line for line in block.replace("\\\n", " ").splitlines() if OURS.match(line)]
    return lines


def command_of(line: str) -> list[list[str]]:
    """Returns the words of each command in a line, without its comment."""
    return [shlex.split(part) for part in re.split(r"\s#", line)[0].split(" && ")]


def to_run(document: Path) -> list[list[str]]:
    """Returns the commands of a document that are whole, are not marked, and are ours."""
    whole = [line for line in lines_of(document) if not MARKED.search(line) and " ... " not in line]
    return [c for line in whole for c in command_of(line) if c[0] in ("perada", "python")]


def pictures(home: Path) -> None:
    """Makes scan.png, and more like it in new-scans."""
    (home / "new-scans").mkdir()
    for number, image in enumerate(digits().images[:4, 0]):
        Image.fromarray(image).save(home / "new-scans" / f"{number}.png")
    shutil.copy(home / "new-scans" / "0.png", home / "scan.png")


def digits_run(home: Path) -> None:
    """Makes RUN and runs/digits-perada-0, of the embedded digits."""
    pictures(home)
    for name in ("RUN", "runs/digits-perada-0"):
        assert cli.main(["train", "digits", *words(train__rounds=1), "--out", str(home / name)]) == 0


def three_sites(home: Path) -> None:
    """Makes what the documents call RUN, RUN2, hospital-a and scan.png; the site `south` is in no run."""
    done = subprocess.run([sys.executable, str(ROOT / "examples" / "three_sites.py"), "made"], cwd=home, check=False)
    assert done.returncode == 0
    (home / "made" / "north").rename(home / "made" / "hospital-a")
    (home / "made" / "south").rename(home / "south")  # joins later
    more = [
        "--set",
        "data.size=16",
        "--set",
        "model.backbone=resnet8",
        "--set",
        "model.weights=random",
        *QUICK["train"],
    ]
    for name in ("RUN", "RUN2"):
        assert cli.main(["train", "folder-fedavg", "--data", "made", *more, "--out", name]) == 0
    pictures(home)


def hospitals(home: Path) -> None:
    """Makes the folders of deploy.md after step 4: the server's `xray` and the site's own, with a finished run."""
    from flower.wire import make_world, run

    from perada.flower.settings import SiteSettings

    world = make_world(home / "xray", train__cohort=0, train__rounds=1)
    run(world, "run-1")
    site = SiteSettings.read(home / "xray" / "north" / "site.toml")
    site.flower.mkdir(parents=True)
    (site.flower / "site.toml").write_text(site.toml())
    shutil.copy(home / "xray" / "north" / "site.toml", home / "site.toml")  # the commands at a site run in its folder
    shutil.copytree(home / "xray" / "north" / "state", home / "state")
    pictures(home)


MADE = {"/data/xray": "xray/west/data.npz", "west": "new-site"}  # what a document names, and what the test has for it
PREPARE = {
    "data.md": three_sites,
    "joining.md": three_sites,
    "deploy.md": hospitals,
    "drift.md": digits_run,
    "theory.md": digits_run,
}
ELSEWHERE = {  # commands of deploy.md that need another place than the world after step 4, and the test that runs each
    ("flower", "init"): "tests/flower/test_project.py",
    ("flower", "certs"): "tests/flower/test_certs.py",
}


@pytest.mark.parametrize("document", sorted(d.name for d in DOCS.glob("*.md") if d.name != "results.md" and to_run(d)))
def test_commands_in_code_blocks_run(
    document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each in the order of the document; QUICK shortens trainings."""
    commands = to_run(DOCS / document)
    monkeypatch.chdir(tmp_path)
    PREPARE.get(document, lambda home: None)(tmp_path)
    for program, *rest in commands:
        if program == "python":
            inside = rest[0].startswith("-")
            place = [*rest[:2]] if inside else [str(ROOT / rest[0])]
            done = subprocess.run(
                [sys.executable, *place, *rest[len(place) :]],
                cwd=ROOT if inside else tmp_path,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, (rest, done.stderr)
        elif tuple(rest[:2]) not in ELSEWHERE:
            code = cli.main([*(MADE.get(word, word) for word in rest), *QUICK.get(rest[0], [])])
            fine = (0, DRIFTED) if "drift" in rest else (0,)
            assert code in fine, (rest, capsys.readouterr().err)
    for name, test in ELSEWHERE.items():
        assert (ROOT / test).is_file(), name


@pytest.mark.parametrize(
    "document", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))], ids=lambda d: d.name
)
def test_every_command_is_run_or_marked(document: Path) -> None:
    """What installs packages, needs a server or a download says so in its comment; all else is run above."""
    for line in lines_of(document):
        first = command_of(line)[0]
        if MARKED.search(line) or " ... " in line:
            continue
        assert first[0] in ("perada", "python"), f"{document.name}: {line}: run it in a test, or mark it with (network)"
        assert document.parent == DOCS, f"{document.name}: {line}"


def test_the_api_reference_names_what_is_there() -> None:
    for name in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text("utf8"), re.MULTILINE):
        module, _, last = name.rpartition(".")
        found = (
            importlib.import_module(name) if name == "perada.errors" else getattr(importlib.import_module(module), last)
        )
        assert found.__doc__, name


def test_every_document_is_on_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf8")
    assert {d.name for d in DOCS.glob("*.md")} <= set(re.findall(r"[\w-]+\.md", text))


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]["version"]
    assert perada.__version__ == version
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text("utf8")
    assert f"## [{version}] - " in (ROOT / "CHANGELOG.md").read_text("utf8")
    assert f'"pkg:pypi/perada@{version}"' in (ROOT / "sbom.cdx.json").read_text("utf8")
