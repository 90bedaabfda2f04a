"""README and docs: links lead somewhere, commands and settings exist, numbers that are in two places agree."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from perada.cli.main import app
from perada.config import parse_setting, presets, resolve
from perada.errors import InputError
from perada.methods import REGISTRY

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
OTHERS = [ROOT / name for name in ("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md")]
DOCUMENTS = [README, *OTHERS, *sorted((ROOT / "docs").glob("*.md"))]
WRITTEN = [d for d in DOCUMENTS if d.name != "results.md"]  # `python -m experiments document` makes that one
SETTING = re.compile(r"--set\s+'?([a-z]+\.[a-z_]+=[^\s'`]+)")


def anchors(document: Path) -> set[str]:
    """Returns the anchors of a document's headings, as they are made when it is shown."""
    heads = re.findall(r"^#+ (.*)$", document.read_text("utf8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def commands(text: str) -> list[str]:
    """Returns the `perada` commands of a text: lines of code blocks, and code in sentences."""
    found = []
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        found += [line for line in block.replace("\\\n", " ").splitlines() if re.match(r"perada [a-z]", line)]
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return found + re.findall(r"`(perada [^`]*)`", text.replace("\n", " "))


def words_of(command: str) -> list[str]:
    """Returns a command's words up to the comment, or up to what the document leaves out."""
    for end in ("  #", " &&", " ..."):
        command = command.split(end)[0]
    return shlex.split(command)[1:]


def test_the_readme_fits_on_two_screens() -> None:
    assert len(README.read_text("utf8").splitlines()) <= 80
    assert re.findall(r"^(\d)\. \*\*", README.read_text("utf8"), re.MULTILINE) == list("12345")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.name)
def test_links_lead_somewhere(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text("utf8")):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        assert target.is_file(), f"{document.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{document.name}: {link}"


def test_the_readme_leads_to_every_document() -> None:
    text = "\n".join(d.read_text("utf8") for d in DOCUMENTS)
    lost = [d.name for d in DOCUMENTS[1:] if f"({d.name}" not in text and f"(docs/{d.name}" not in text]
    assert lost == []


@pytest.mark.parametrize("document", WRITTEN, ids=lambda d: d.name)
def test_commands_exist_with_their_options(document: Path) -> None:
    for line in commands(document.read_text("utf8")):
        found: click.Command = typer.main.get_command(app)
        words = words_of(line)
        while isinstance(found, click.Group) and words and not words[0].startswith("-"):
            name = words.pop(0)
            assert name in found.commands, f"{document.name}: {line}"
            found = found.commands[name]
        known = {option for p in found.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        assert options <= known, f"{document.name}: {line}"
        if found.name in ("train", "compare", "tune", "partition") and words and not words[0].startswith("-"):
            assert words[0] in presets() or words[0].endswith(".toml") or words[0].isupper(), f"{document.name}: {line}"


@pytest.mark.parametrize("document", WRITTEN, ids=lambda d: d.name)
def test_settings_exist(document: Path) -> None:
    """A value may be a placeholder, such as FOLDER; a key is known to at least one method."""
    for setting in SETTING.findall(document.read_text("utf8")):
        key, _ = parse_setting(setting)
        if key == "method.beta":  # of the method that docs/new-method.md adds
            continue
        assert any(knows(method, *parse_setting(setting)) for method in REGISTRY), f"{document.name}: {setting}"


def knows(method: str, key: str, value: object) -> bool:
    try:
        resolve("digits", {"method.name": method, key: value})
    except InputError as error:
        return "unknown key" not in str(error) and "means nothing" not in str(error)
    return True


def test_the_number_of_methods_is_said_right() -> None:
    for name, words in (
        ("README.md", "Here now: {} methods"),
        ("docs/methods.md", "# The {} methods"),
        ("docs/runs.md", "# {} of them: what is trained"),
    ):
        assert words.format(len(REGISTRY)) in (ROOT / name).read_text("utf8"), name


def test_the_demos_table_is_the_same_everywhere() -> None:
    rows = [line for line in README.read_text("utf8").splitlines() if line.startswith("perada  ")]
    assert len(rows) == 1
    assert rows[0] in (ROOT / "docs" / "digits.md").read_text("utf8")
