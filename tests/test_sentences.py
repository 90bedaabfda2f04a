"""Commands inside the sentences of the documents: each is run here, or it needs what CONTRIBUTING.md names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer
from own_images import TINY
from test_docs import DRIFTED, FEW, QUICK, pictures
from test_documents import ROOT, WRITTEN, words_of

from perada.cli import main as cli
from perada.cli.main import app

MARKS = (  # of commands that need a GPU, a network, data that are not here, or many minutes
    "perada flower",
    "perada data get",
    "cifar10",
    "--device cuda",
    "--out cut",
    "python -m experiments",
    "python benchmarks/",
    "python tools/",
)
ELSEWHERE = {  # commands that need more than a run of the digits, and the test that runs each
    "perada train folder-fedavg": "tests/test_docs.py",
    "perada compare digits --methods all": "tests/test_docs.py",
    "perada methods --cost": "tests/test_cost.py",
    "perada train digits --method mymethods:FedAvgM": "tests/test_docs.py",
    "perada train digits --method fedavgm": "tests/test_docs.py",
    "perada train digits --method fedavgm --set method.beta=0.9": "tests/test_docs.py",
    "perada tune --methods fedavgm": "tests/test_docs.py",
    "perada compare --methods fedavg,fedavgm": "tests/test_docs.py",
    "perada train digits --set model.backbone=mynets:separable --set model.weights=random": "tests/models/test_training"
    ".py",
    "perada export RUN --client NAME --out FOLDER": "tests/adapters/test_lora.py",
}
VALUES = {  # what a word of the documents stands for here; of a command, or of all
    "RUN...": ("RUN", "RUN2"),
    "FILE": ("x.safetensors",),
    "FOLDER": ("board",),
    "N": ("1",),
    "mine.toml": ("mine.toml",),
    "SITES/pacs": ("sites",),
    "runs/sites": ("RUN",),
    "north": ("client-00",),
    "new-images": ("new-scans",),
    "data.seed=S": ("data.seed=1",),
    "run.seed=S": ("run.seed=1",),
}
NAMES = {"params": "resnet8", "methods": "resnet8", "export": "client-00"}


def sentences() -> list[str]:
    """Returns the commands in the sentences of all documents, each once."""
    found: dict[str, None] = {}
    for document in WRITTEN:
        text = re.sub(r"```.*?```", "", document.read_text("utf8"), flags=re.DOTALL).replace("\n", " ")
        found |= dict.fromkeys(re.findall(r"`((?:perada [a-z]|python |make )[^`]*)`", text))
    return list(found)


def whole(command: str) -> bool:
    """Returns whether a command of ours can be typed as it is. `perada train` alone or without its RUN is a name."""
    group: click.Command = typer.main.get_command(app)
    words = words_of(command)
    while isinstance(group, click.Group) and words:
        group = group.commands[words.pop(0)]
    if not words or "--help" in words:
        return False
    try:
        group.make_context("perada", list(words))
    except click.UsageError:
        return False
    return True


def to_run() -> list[str]:
    ours = [c for c in sentences() if c.startswith("perada") and whole(c)]
    return [c for c in ours if c not in ELSEWHERE and not any(mark in c for mark in MARKS)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the digits, pictures, sites, and settings in a file."""
    home = tmp_path_factory.mktemp("sentences")
    pictures(home)
    for name in ("RUN", "RUN2"):
        assert cli.main(["train", "digits", *FEW, *QUICK["train"], "--out", str(home / name)]) == 0
    example = ROOT / "examples" / "three_sites.py"
    assert subprocess.run([sys.executable, str(example), str(home / "sites")], check=False).returncode == 0
    (home / "mine.toml").write_text('preset = "digits"\n')
    return home


@pytest.mark.parametrize("command", to_run())
def test_commands_in_sentences_run(
    command: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    words = [value for word in words_of(command) for value in VALUES.get(word, (word,))]
    words = [NAMES[words[0]] if word == "NAME" else word for word in words]
    more = list(QUICK.get(words[0], []))
    if "sites" in words:
        more += [w for key, value in TINY.items() for w in ("--set", f"{key}={value}")]
    elif words[0] in ("train", "compare") and "--resume" not in words:
        more += FEW
    if "digits-dp" in words:
        more += ["--set", "distill.guard=none"]  # clients send no scores
    if words[0] == "train":
        more += ["--out", "out", "--overwrite"] if "--resume" not in words else []
    code = cli.main([*words, *more])
    assert code in ((0, DRIFTED) if "drift" in words[:1] else (0,)), (command, capsys.readouterr().err)


def test_what_is_not_run_says_why() -> None:
    rule = " ".join((ROOT / "CONTRIBUTING.md").read_text("utf8").split())
    assert all(f"`{mark}`" in rule for mark in MARKS)
    written = sentences()
    for command, test in ELSEWHERE.items():
        assert command in written, f"no document has {command}"
        assert (ROOT / test).is_file(), test
    targets = (ROOT / "Makefile").read_text("utf8")
    for command in written:
        program, *rest = command.split()
        if program == "make":
            assert all(f"\n{target}:" in targets for target in rest), command
        elif program == "python":
            ours = rest[:2] == ["-m", "build"] or rest[0].startswith(
                "with_"
            )  # of the release; test_outside.py has them
            assert ours or any(mark in command for mark in MARKS), command
            if rest[0].endswith(".py") and not ours:
                assert (ROOT / rest[0]).is_file(), command
