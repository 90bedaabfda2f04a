"""evaluations.json: scores on further test sets, which `perada evaluate` measured after a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..client.scores import Scores
from ..errors import Damaged
from .files import is_number, is_whole, read_object, sealed, write_atomic

FILE = "evaluations.json"


@dataclass(frozen=True)
class Measured:
    """The scores on a test set, and after which round they were measured."""

    round: int
    scores: Scores


def further_scores(run: Path) -> dict[str, Measured]:
    """Returns the scores in a run folder's file by the test set's name; nothing without the file."""
    path, advice = run / FILE, "delete it; perada evaluate writes it again"
    if not path.exists():
        return {}
    content = read_object(path, {"sets": dict}, advice)
    try:
        if not is_whole(content) or not all(is_number(one["round"], int) for one in content["sets"].values()):
            raise ValueError
        return {name: Measured(one["round"], Scores.read(one)) for name, one in content["sets"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{path} is damaged: {advice}") from error


def add_scores(run: Path, round: int, scores: Mapping[str, Scores]) -> Path:
    """Notes scores in a run folder's file, beside those on other test sets; returns the file."""
    every = {**further_scores(run), **{name: Measured(round, of) for name, of in scores.items()}}
    sets = {name: {"round": one.round, **one.scores.as_dict()} for name, one in every.items()}
    write_atomic(run / FILE, sealed({"sets": sets}))
    return run / FILE
