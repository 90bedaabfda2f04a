"""The seeds of a method as one line of the report: their mean, and how sure it is."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .facts import Facts, mean_and_std, over_whom
from .figures import Point

SURE = 0.95
Score = tuple[float | None, float | None]  # a mean, and what stands behind ±


def interval(values: Sequence[float | None]) -> Score:
    """Returns the mean over seeds and half its 95% interval, by Student's t.

    (None, None) if a seed has no value, since a mean of fewer seeds would not compare. No interval for a single seed.
    """
    known = [v for v in values if v is not None]
    if not known or len(known) < len(values):
        return None, None
    if len(known) == 1:
        return known[0], None
    from scipy.stats import t as student  # slow to import, and only several seeds need it

    factor = float(student.ppf((1 + SURE) / 2, len(known) - 1))
    return float(np.mean(known)), factor * float(np.std(known, ddof=1)) / math.sqrt(len(known))


@dataclass(frozen=True)
class Group:
    """Runs that differ in the seed alone; often a single one."""

    label: str
    members: tuple[Facts, ...]

    @property
    def seeds(self) -> int:
        return len(self.members)

    @property
    def first(self) -> Facts:
        return self.members[0]

    @property
    def finished(self) -> bool:
        return all(m.finished for m in self.members)

    @property
    def state(self) -> str:
        """Returns how far an unfinished run is, or how many seeds are; empty if all are finished."""
        if self.seeds == 1 or self.finished:
            return self.first.state
        return f"{sum(not m.finished for m in self.members)} of {self.seeds} seeds unfinished"

    @property
    def clients(self) -> tuple[str, ...]:
        return self.first.clients

    def score(self, split: str) -> Score:
        """Returns the mean, and its deviation over clients; of several seeds the mean over them, and its interval."""
        if self.seeds == 1:
            return self.first.score(split)
        return interval([m.score(split)[0] for m in self.members])

    def over(self, split: str) -> str:
        """Returns over how many clients a mean is; empty if it is over all."""
        return next((over for m in self.members if (over := m.over(split))), "")

    def per_client(self, split: str) -> dict[str, float | None]:
        """Returns each client's score, the mean over seeds."""
        each = [m.per_client(split) for m in self.members]
        return {name: interval([of.get(name) for of in each])[0] for name in each[0]}

    def points(self, split: str) -> list[Point]:
        """Returns the scores by round, with their deviation: over clients, or of several seeds over those."""
        each = [[(row.round, *mean_and_std(row, split)) for row in m.rows] for m in self.members]
        return each[0] if self.seeds == 1 else over_seeds(each)

    def partial(self, split: str) -> dict[int, str]:
        """Returns the rounds whose mean is not over all clients, and over whom it is."""
        rows = [row for m in self.members for row in m.rows]
        return {row.round: over for row in rows if (over := over_whom(row.scores.get(split)))}

    def mean(self, of: Callable[[Facts], float | None]) -> float | None:
        """Returns the mean over the seeds of a number of a run."""
        return interval([of(m) for m in self.members])[0]

    @cached_property
    def shifts(self) -> list[tuple[str, tuple[int, ...], dict[str, list[float | None]]]]:
        """Returns per model its name, the severities, and the scores by kind: the mean over seeds."""
        found = [m.shifts for m in self.members if m.shifts is not None]
        if len(found) < self.seeds or len({s.severities for s in found}) > 1:
            return []
        tables = [("personal models", [s.personal for s in found]), ("global model", [s.server for s in found])]
        shown = [(name, found[0].severities, _mean_table(of)) for name, of in tables if all(of)]
        same = len(shown) == 2 and shown[0][2] == shown[1][2]  # a method whose personal model is the global one
        return shown[1:] if same else shown


def _mean_table(tables: Sequence[Mapping[str, Sequence[float | None]]]) -> dict[str, list[float | None]]:
    kinds = [kind for kind in tables[0] if all(kind in table for table in tables)]
    return {kind: [interval(cells)[0] for cells in zip(*(t[kind] for t in tables), strict=True)] for kind in kinds}


def over_seeds(each: Sequence[Sequence[Point]]) -> list[Point]:
    """Returns the mean and the standard deviation over seeds, in the rounds that all of them have."""
    by_round = [{r: value for r, value, _ in points} for points in each]
    points: list[Point] = []
    for r in [r for r in by_round[0] if all(r in of for of in by_round)]:
        values = [v for of in by_round if (v := of[r]) is not None]
        whole = len(values) == len(by_round)
        points.append((r, float(np.mean(values)), float(np.std(values, ddof=1))) if whole else (r, None, None))
    return points


def groups_of(facts: Sequence[Facts]) -> list[Group]:
    """Returns the runs in groups whose members differ in the seed alone, in the order of their first runs."""
    groups: list[list[Facts]] = []
    for one in facts:
        alike = (g for g in groups if g[0].kind == one.kind and one.seed not in {m.seed for m in g})
        group = next(alike, None)
        if group is None:
            groups.append([one])
        else:
            group.append(one)
    times = Counter(g[0].method for g in groups)
    return [Group(_label(g, times), tuple(g)) for g in groups]


def _label(group: Sequence[Facts], times: Mapping[str, int]) -> str:
    first = group[0]
    if times[first.method] == 1:
        return first.method
    return first.label if len(group) == 1 else f"{first.label} and {len(group) - 1} more"
