"""The parts of the page that are measured for it: the theory, and what joining is worth to each site."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import in_keys
from ..errors import InputError
from ..runs.run import Run
from ..theory import Bound, bounds
from .joining import Difference, Site, joining, same_split

OTHERS = {"common": "the common model", "alone": "a model trained alone"}


@dataclass(frozen=True)
class TheoryPanel:
    """What the page says of one run's bounds."""

    label: str
    sentences: tuple[tuple[str, bool], ...]  # and whether each warns
    theorems: tuple[Bound, ...]
    problem: str = ""  # why nothing was measured


def panels_of(runs: Sequence[Run], labels: Sequence[str]) -> list[TheoryPanel]:
    """Returns a panel per run, or why a run has none."""
    panels = []
    for run, label in zip(runs, labels, strict=True):
        try:
            measured = bounds(run)
        except InputError as error:
            panels.append(TheoryPanel(label, (), (), in_keys(str(error))))
            continue
        theorems = tuple(b for b in (measured.theorem1, measured.theorem2) if b is not None)
        panels.append(TheoryPanel(label, tuple((in_keys(s.text), s.warns) for s in measured.sentences), theorems))
    return panels


@dataclass(frozen=True)
class SitesPanel:
    """What the page says of one run's sites."""

    label: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]  # a site's name, and its differences as text
    sentences: tuple[str, ...]
    note: str


def sites_of(runs: Sequence[Run], labels: Sequence[str]) -> list[SitesPanel]:
    """Returns a panel for each run that can be compared with a common model, or with a Standalone run among these."""
    panels = []
    for run, label in zip(runs, labels, strict=True):
        alone = same_split(runs, run)
        found = joining(run, alone)
        if found:
            panels.append(_panel(label, found, alone is not None))
    return panels


def _panel(label: str, sites: Sequence[Site], alone: bool) -> SitesPanel:
    others = list(sites[0].own)
    head = [f"{where}, against {OTHERS[o]}" for o in others for where in ("Own images", "Everybody's")]
    rows = [(s.name, tuple(_shown(part.get(o)) for o in others for part in (s.own, s.everybody))) for s in sites]
    note = "" if alone else "Add a Standalone run on the same split to see what joining itself is worth."
    return SitesPanel(label, ("Site", *head), tuple(rows), tuple(s.sentence for s in sites), note)


def _shown(of: Difference | None) -> str:
    return "n/a" if of is None else str(of)
