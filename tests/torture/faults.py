"""Random faults in the files of a run folder, and what the commands then do."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from commands import train
from PIL import Image
from safetensors.numpy import load_file
from safetensors.torch import save_file
from small import adapters, as_older

from perada.cli import main as cli
from perada.models.resnet import resnet

PATIENCE = 20  # seconds after which a command hangs
CLIENT = "client-01"
EDITABLE = {"config.toml"}  # text that a person may edit, and that is believed
UNCHECKED = {"data.json", "metrics.jsonl", "summary.json", "backbone.safetensors", "state.json"}  # before format 2
Fault = Callable[[Path, Path, np.random.Generator], None]  # changes one file of a folder
FAULTS: dict[str, Fault] = {}


def fault(make: Fault) -> Fault:
    """Registers a kind of fault."""
    FAULTS[make.__name__.replace("_", " ")] = make
    return make


@fault
def bit_flipped(file: Path, run: Path, rng: np.random.Generator) -> None:
    data = bytearray(file.read_bytes())
    if data:
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    file.write_bytes(data)


@fault
def cut(file: Path, run: Path, rng: np.random.Generator) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(rng.integers(len(data) + 1))])


@fault
def bytes_added(file: Path, run: Path, rng: np.random.Generator) -> None:
    file.write_bytes(file.read_bytes() + rng.bytes(int(rng.integers(1, 50))))


@fault
def deleted(file: Path, run: Path, rng: np.random.Generator) -> None:
    file.unlink()


@fault
def folder_deleted(file: Path, run: Path, rng: np.random.Generator) -> None:
    shutil.rmtree(file.parent if file.parent != run else run / "checkpoints")


@fault
def exchanged(file: Path, run: Path, rng: np.random.Generator) -> None:
    other, aside = _other(file, run, rng), file.with_name("aside")
    file.rename(aside)
    other.rename(file)
    aside.rename(other)


@fault
def replaced_by_a_copy_of_another(file: Path, run: Path, rng: np.random.Generator) -> None:
    data = _other(file, run, rng).read_bytes()
    file.write_bytes(data)


@fault
def copied(file: Path, run: Path, rng: np.random.Generator) -> None:
    """Under another name that means something, with its folder if that is a checkpoint."""
    if file.parent == run:
        names = ("backbone.safetensors", "summary.json", "data.json", "global.safetensors", "metrics.jsonl")
        to = run / names[int(rng.integers(len(names)))]
        if to != file:
            shutil.copyfile(file, to)
        return
    name = ("round-0003", "round-0001", ".round-0002.old", ".round-0003.part")[int(rng.integers(4))]
    if name != file.parent.name:
        shutil.copytree(file.parent, file.parent.with_name(name), dirs_exist_ok=True)


@fault
def a_number_edited(file: Path, run: Path, rng: np.random.Generator) -> None:
    text = file.read_bytes()
    places = list(re.finditer(rb"\d+", text))
    if places:
        one = places[int(rng.integers(len(places)))]
        wrong = (b"0", b"-1", b"7", b"1e999", b'"text"', b"null", b"9" * 30)[int(rng.integers(7))]
        file.write_bytes(text[: one.start()] + wrong + text[one.end() :])


@fault
def a_key_removed(file: Path, run: Path, rng: np.random.Generator) -> None:
    _edit(file, rng, lambda at, key: at.pop(key))


@fault
def a_value_replaced(file: Path, run: Path, rng: np.random.Generator) -> None:
    values = ("text", 3, [], {}, None, -1, True, [1, 2], {"a": 1})
    value = values[int(rng.integers(len(values)))]
    _edit(file, rng, lambda at, key: at.update({key: value}))


@fault
def keys_reordered(file: Path, run: Path, rng: np.random.Generator) -> None:
    def reorder(at: dict[str, Any], key: str) -> None:
        items = list(at.items())
        at.clear()
        at.update(reversed(items))

    _edit(file, rng, reorder)


@fault
def became_a_folder(file: Path, run: Path, rng: np.random.Generator) -> None:
    file.unlink()
    file.mkdir()


@fault
def became_a_pipe(file: Path, run: Path, rng: np.random.Generator) -> None:
    file.unlink()
    os.mkfifo(file)


@fault
def became_a_link(file: Path, run: Path, rng: np.random.Generator) -> None:
    to = (Path("/dev/zero"), Path("/nowhere"), file, _other(file, run, rng))[int(rng.integers(4))]
    file.unlink()
    file.symlink_to(to)


def _other(file: Path, run: Path, rng: np.random.Generator) -> Path:
    more = [p for p in files_of(run) if p != file]
    others = [p for p in more if p.suffix == file.suffix] or more
    return others[int(rng.integers(len(others)))]


def _edit(file: Path, rng: np.random.Generator, change: Callable[[dict[str, Any], str], object]) -> None:
    """Changes one object of a JSON file, or of a line of one."""
    if file.suffix not in (".json", ".jsonl"):
        bit_flipped(file, file.parent, rng)
        return
    lines = file.read_text().splitlines() if file.suffix == ".jsonl" else [file.read_text()]
    at = int(rng.integers(len(lines)))
    content = json.loads(lines[at])
    objects = [o for o in _objects(content) if o]
    one = objects[int(rng.integers(len(objects)))]
    change(one, list(one)[int(rng.integers(len(one)))])
    lines[at] = json.dumps(content)
    file.write_text("\n".join(lines) + "\n")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for one in value.values():
            yield from _objects(one)


def files_of(run: Path) -> list[Path]:
    """Returns what a fault may change: the report is a result, not something that is read."""
    return [p for p in sorted(run.rglob("*")) if p.is_file() and p.name != "report.html"]


# The commands


@dataclass(frozen=True)
class Answer:
    """What one command did."""

    code: int | str  # or what it raised
    result: Any
    lines: tuple[str, ...]  # on standard error


class Bench:
    """A small finished run, and the five commands on copies of it.

    older: the folder is as versions before format 2 wrote it, and most of its files are believed.
    """

    def __init__(self, home: Path, older: bool = False, **settings: Any) -> None:
        self.whole, self.run, self.out = home / "whole", home / "run", home / "out"
        self.image = home / "image.png"
        self.believed = EDITABLE | UNCHECKED if older else EDITABLE
        weights = home / "mine.safetensors"
        home.mkdir()
        save_file(resnet("resnet8", 10, seed=5).state_dict(), weights)
        settings |= {"method__name": "perada-no-kd", "data__clients": 3, "model__weights": str(weights)}
        assert train(self.run, **settings) == 0
        self.run.rename(self.whole)
        if older:
            as_older(self.whole)
        self.out.mkdir()
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (8, 8), dtype=np.uint8)).save(self.image)
        self.copy()
        self.wanted = self.answers()

    def copy(self) -> None:
        """Makes the folder new."""
        for folder in (self.run, self.out):
            shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.whole, self.run)
        self.out.mkdir()

    def changes(self) -> set[Path]:
        """Returns the files that are not what they were, by their paths in the folder."""
        before, after = _contents(self.whole), _contents(self.run)
        return {path for path in before | after if before.get(path) != after.get(path)}

    def answers(self) -> dict[str, Answer]:
        """Returns what each command does with the folder. The one that writes to it comes last."""
        run = str(self.run)
        return {
            "evaluate": self._answer(["evaluate", run, "--json"], lambda text: text),
            "predict": self._answer(["predict", run, str(self.image), "--client", CLIENT, "--json"], lambda text: text),
            "export": self._answer(
                ["export", run, "--client", CLIENT, "--out", str(self.out / "one.safetensors")],
                lambda text: {n: t.tobytes() for n, t in load_file(self.out / "one.safetensors").items()},
            ),
            "report": self._answer(
                ["report", run, "--out", str(self.out / "page.html")],
                lambda text: (self.out / "page.html").read_bytes(),
            ),
            "train": self._answer(["train", "--out", run, "--resume"], lambda text: self._trained()),
        }

    def _trained(self) -> Any:
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((self.run / "summary.json").read_text())
        return adapters(self.run), [{**row, "seconds": 0} for row in rows], summary["local_test"]

    def _answer(self, words: list[str], result: Callable[[str], Any]) -> Answer:
        output, errors = io.StringIO(), io.StringIO()
        code: int | str
        with redirect_stdout(output), redirect_stderr(errors):
            try:
                with _patience():
                    code = cli.main(words)
            except _Hangs:
                code = "hangs"
            except Exception:
                code = traceback.format_exc()
        lines = tuple(line for line in errors.getvalue().splitlines() if "━" not in line)
        return Answer(code, result(output.getvalue()) if code == 0 else None, lines)

    def outcome(self, name: str, answer: Answer, changes: set[Path]) -> str:
        """Returns what came of a command: same, reported, refused or edited are fine, anything else is not.

        changes: the files that had changed. A line is a report of them if it names one, or the checkpoint it is of.
        """
        wanted = self.wanted[name]
        if isinstance(answer.code, str):
            return answer.code
        if answer.code in (1, 2):
            errors = [line for line in answer.lines if line.startswith("error: ")]
            return "refused" if len(errors) == 1 else f"exit {answer.code} without one line: {answer.lines}"
        if answer.code != 0:
            return f"exit {answer.code}"
        if answer.result == wanted.result:
            return "same"
        known = {_without_numbers(line) for line in wanted.lines}
        lines = [line for line in answer.lines if _without_numbers(line) not in known]
        if any(name in line for line in lines for path in changes for name in _names(path)):
            return "reported"
        if any(path.name in self.believed for path in changes):
            return "edited"
        return f"changed and not reported: {lines}"


def _contents(run: Path) -> dict[Path, object]:
    """Returns the bytes of each file; what else is there in place of one by its kind."""
    paths = [p for p in run.rglob("*") if p.name != "report.html"]
    return {
        p.relative_to(run): (os.readlink(p) if p.is_symlink() else p.read_bytes() if p.is_file() else p.lstat().st_mode)
        for p in paths
    }


def _names(path: Path) -> list[str]:
    """Returns how a line can name a file of a run: by its name, or by its checkpoint and round."""
    checkpoint = next((part for part in path.parts if "round-" in part), "")
    if not checkpoint:
        return [path.name]
    number = int(re.sub(r"\D", "", checkpoint))
    return [path.name, f"round-{number:04d}", f"round {number} "]


def _without_numbers(line: str) -> str:
    return re.sub(r"\d[\d.,:]*", "#", line)


class _Hangs(BaseException):
    pass


@contextmanager
def _patience() -> Iterator[None]:
    def stop(*args: object) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
