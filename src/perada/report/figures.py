"""The report's pictures: curves over rounds, scores per client, and who holds what."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal, Self

from rich.cells import cell_len

from .facts import Holdings
from .svg import WIDTH, Frame, colour, dash, element, human_bytes, line, number, picture, shorten, text, ticks

Point = tuple[int, float | None, float | None]  # round, value, standard deviation
Unit = Literal["percent", "bytes", "loss", "epsilon"]
MOST_HOVERS = 3000  # with more bubbles than that, none shows a text on hover
SIDE = 210.0  # width of the bars to the right of the bubbles


@dataclass(frozen=True)
class Series:
    """A line over rounds, in colour number `index`."""

    label: str
    index: int
    points: Sequence[Point]
    partial: Mapping[int, str] = field(default_factory=dict)  # rounds whose mean is not over all clients: over whom

    @property
    def known(self) -> list[tuple[int, float, float | None]]:
        return [(r, v, s) for r, v, s in self.points if v is not None]

    @property
    def pieces(self) -> list[list[tuple[int, float, float | None]]]:
        """Returns the points of each line: it breaks at a missing value, and where the mean is over other clients."""
        pieces: list[list[tuple[int, float, float | None]]] = [[]]
        before: int | None = None
        for r, v, s in self.points:
            if v is None or (before is not None and self.partial.get(r) != self.partial.get(before)):
                pieces.append([])
            if v is not None:
                pieces[-1].append((r, v, s))
            before = r
        return [piece for piece in pieces if piece]


def curves(label: str, series: Sequence[Series], unit: Unit = "percent", band: bool | None = None) -> str:
    """Draws lines over rounds. band: their standard deviation, too; by default that of a single line in percent."""
    in_bytes = unit == "bytes"
    show: Callable[[float], str] = human_bytes if in_bytes else "{:.2f}".format
    band = unit == "percent" and len(series) == 1 if band is None else band
    frame = _frame(series, band, unit, max([len(show(s.known[-1][1])) for s in series if s.known] or [0]))
    if frame is None:
        nothing = text(WIDTH / 2, 60, "nothing measured", "faint", "middle")
        return picture(WIDTH, 120, f"{label}: nothing measured", nothing)
    parts = _axes(frame, human_bytes if in_bytes else number if unit == "percent" else "{:g}".format)
    for one in reversed(series):  # the first one on top
        parts += _curve(frame, one, show, band)
    parts += _ends(frame, [s for s in series if s.known], show) if len(series) < 4 else []
    ends = "; ".join(f"{s.label} {show(s.known[-1][1])}" for s in series if s.known)
    return picture(WIDTH, 214, f"{label} over rounds, at the end: {ends}", *parts)


def _frame(series: Sequence[Series], band: bool, unit: Unit, letters: int) -> Frame | None:
    """Returns the panel that holds all values, with space for the `letters` of the last ones; None without values."""
    known = [p for s in series for p in s.known]
    if not known:
        return None
    edges = [v + sign * ((s or 0.0) if band else 0.0) for _, v, s in known for sign in (-1, 1)]
    low, high = min(edges), max(edges)
    if unit != "percent":
        low, high = 0.0, max(high * 1.08, 1.0 if unit == "bytes" else 1e-3)
    else:
        margin = max(1.0, 0.08 * (high - low))
        low, high = max(0.0, low - margin), min(100.0, high + margin)
    rounds = [r for r, _, _ in known]
    return Frame(min(rounds), max(rounds), low, high, right=WIDTH - 8 - 7.2 * letters)


def _axes(f: Frame, tick: Callable[[float], str]) -> list[str]:
    parts = []
    for value in ticks(f.low, f.high):
        parts += [line(f.left, f.y(value), f.right, f.y(value), "grid")]
        parts += [text(f.left - 6, f.y(value) + 4, tick(value), "faint", "end")]
    for value in ticks(f.first, f.last, whole=True):
        parts += [line(f.x(value), f.bottom, f.x(value), f.bottom + 4, "axis")]
        parts += [text(f.x(value), f.bottom + 17, number(value), "faint", "middle")]
    parts += [line(f.left, f.bottom, f.right, f.bottom, "axis")]
    return [*parts, text((f.left + f.right) / 2, f.bottom + 33, "round", "faint", "middle")]


def _curve(f: Frame, one: Series, show: Callable[[float], str], band: bool) -> list[str]:
    """Draws lines, and a dot for each value: hollow where the mean is not over all clients."""
    parts, kind = [], colour(one.index)
    for piece in one.pieces:
        if band:
            known = [(r, v, s) for r, v, s in piece if s is not None]
            edge = [(r, min(f.high, v + s)) for r, v, s in known] + [(r, max(f.low, v - s)) for r, v, s in known[::-1]]
            corners = " ".join(f"{number(f.x(r))},{number(f.y(v))}" for r, v in edge)
            parts += [element("polygon", points=corners, class_=f"band {kind}")] if corners else []
        style = f"stroke-dasharray:{dash(one.index)}" if dash(one.index) else None
        places = " ".join(f"{number(f.x(r))},{number(f.y(v))}" for r, v, _ in piece)
        parts.append(element("polyline", points=places, class_=f"curve {kind}", style=style))
    last, crowded = one.known[-1:], len(one.known) > 60
    for r, v, s in [p for p in one.known if not crowded or p in last or p[0] in one.partial]:
        hover = f"{one.label}, round {r}: {show(v)}" + ("" if s is None else f" ± {s:.2f}")
        over = one.partial.get(r, "")
        hover += f", over {over}" if over else ""
        look = f"hollow {kind}" if over else kind
        parts.append(element("circle", element("title", escape(hover)), cx=f.x(r), cy=f.y(v), r=2.8, class_=look))
    return parts


def _ends(f: Frame, series: Sequence[Series], show: Callable[[float], str]) -> list[str]:
    """Writes the last values at the ends of the lines, moved apart where they would overlap."""
    parts, free = [], f.top
    for one in sorted(series, key=lambda s: -s.known[-1][1]):
        last, value, _ = one.known[-1]
        y = max(f.y(value) + 4, free)
        free = y + 12
        parts.append(text(f.x(last) + 6, y, show(value), f"value {colour(one.index)}"))
    return parts


# one row per client


@dataclass(frozen=True)
class Rows:
    """Positions of names and rows."""

    names: Sequence[str]
    step: int
    left: float

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        longest = max([min(cell_len(n), 16) for n in names] or [0])
        return cls(names, 19 if len(names) <= 60 else 14, 12 + 6.6 * longest)

    def y(self, row: int) -> float:
        return 10 + (row + 0.5) * self.step

    @property
    def bottom(self) -> float:
        return 10 + len(self.names) * self.step + 4

    def labels(self) -> list[str]:
        rows = enumerate(self.names)
        return [text(self.left - 8, self.y(i) + 4, shorten(n, 16), "", "end", full=n) for i, n in rows]


def bars(label: str, values: Mapping[str, float | None], mean: float | None, index: int) -> str:
    """Draws one bar per client, from 0 to 100, and the mean as a line."""
    rows = Rows.of(list(values))
    f = Frame(0, 100, 0, 1, left=rows.left, right=WIDTH - 44)
    parts = rows.labels()
    for i, (name, value) in enumerate(values.items()):
        y, thick = rows.y(i), rows.step - 7
        parts.append(element("rect", x=f.left, y=y - thick / 2, width=f.right - f.left, height=thick, class_="track"))
        if value is not None:
            hover = element("title", f"{escape(name)}: {value:.2f}")
            size = {"width": f.x(value) - f.left, "height": float(thick), "rx": 1.5}
            parts.append(element("rect", hover, x=f.left, y=y - thick / 2, class_=colour(index), **size))
        parts.append(text(f.right + 6, y + 4, "n/a" if value is None else f"{value:.1f}", "faint"))
    if mean is not None:
        parts.append(line(f.x(mean), 6, f.x(mean), rows.bottom, "mean"))
    parts += _percent_axis(f, rows.bottom, [0, 25, 50, 75, 100])
    shown = "n/a" if mean is None else f"{mean:.2f}"
    return picture(WIDTH, rows.bottom + 24, f"{label} of {len(values)} clients, mean {shown}", *parts)


def dots(
    label: str,
    names: Sequence[str],
    runs: Sequence[tuple[str, Mapping[str, float | None]]],
    spoken: str = "",
    top: float | None = 100.0,
) -> str:
    """Draws one row per client and one dot per run. `spoken` replaces the label for screen readers.

    top: the largest possible value; None if values have no limit.
    """
    known = [v for _, values in runs for v in values.values() if v is not None]
    low, high = (min(known), max(known)) if known else (0.0, 100.0)
    rows, margin = Rows.of(names), max(1.0, 0.04 * (high - low))
    end = high + margin if top is None else min(top, high + margin)
    f = Frame(max(0.0, low - margin), end, 0, 1, left=rows.left, right=WIDTH - 12)
    parts, apart = rows.labels(), min(2.5, 9 / len(runs))  # so that equal values of two runs both show
    for i, name in enumerate(names):
        parts.append(line(f.left, rows.y(i), f.right, rows.y(i), "grid"))
        for k, (run, values) in reversed(list(enumerate(runs))):
            value = values.get(name)
            if value is not None:
                hover = element("title", escape(f"{name}, {run}: {value:.2f}"))
                y = rows.y(i) + (k - (len(runs) - 1) / 2) * apart
                parts.append(element("circle", hover, cx=f.x(value), cy=y, r=3.8, class_=f"dot {colour(k)}"))
    parts += _percent_axis(f, rows.bottom, ticks(f.first, f.last))
    spoken = spoken or f"{label} of {len(names)} clients in {len(runs)} runs"
    return picture(WIDTH, rows.bottom + 24, spoken, *parts)


def _percent_axis(f: Frame, bottom: float, values: Sequence[float]) -> list[str]:
    parts = [line(f.left, bottom, f.right, bottom, "axis")]
    for value in values:
        parts += [line(f.x(value), bottom, f.x(value), bottom + 4, "axis")]
        parts += [text(f.x(value), bottom + 17, number(value), "faint", "middle")]
    return parts


def likenesses(label: str, picture_of: Mapping[str, Sequence[int]], edges: tuple[float, float]) -> str:
    """Draws how alike images are to home: one line per kind of images, as shares of them."""
    shares = {kind: [n / max(1, sum(counts)) for n in counts] for kind, counts in picture_of.items()}
    top = max([v for values in shares.values() for v in values] or [0.0]) or 1.0
    f = Frame(*edges, 0.0, 1.08 * top, right=WIDTH - 12)
    parts = [line(f.left, f.bottom, f.right, f.bottom, "axis"), line(f.x(0), f.top, f.x(0), f.bottom, "mean")]
    for value in ticks(*edges, whole=True):
        parts += [line(f.x(value), f.bottom, f.x(value), f.bottom + 4, "axis")]
        parts += [text(f.x(value), f.bottom + 17, number(value), "faint", "middle")]
    for k, (kind, values) in enumerate(shares.items()):
        width = (edges[1] - edges[0]) / max(1, len(values))
        corners = [(edges[0] + (i + side) * width, v) for i, v in enumerate(values) for side in (0, 1)]
        points = " ".join(f"{number(f.x(x))},{number(f.y(y))}" for x, y in corners)
        parts.append(element("polyline", points=points, class_=f"curve {colour(k)}"))
        parts.append(text(f.left + 8, f.top + 14 * (k + 1), kind, f"value {colour(k)}"))
    parts.append(text((f.left + f.right) / 2, f.bottom + 33, "standard deviations from home", "faint", "middle"))
    return picture(WIDTH, 214, label, *parts)


# accuracy against ε


@dataclass(frozen=True)
class Trade:
    """What privacy costs one method: (ε, score) of every run, and the line through their means."""

    label: str
    dots: Sequence[tuple[float, float]]
    line: Sequence[tuple[float, float]]


def trade(label: str, methods: Sequence[Trade]) -> str:
    """Draws scores in percent against ε."""
    known = [point for one in methods for point in one.dots]
    budgets, scores = [e for e, _ in known], [s for _, s in known]
    margin = max(1.0, 0.08 * (max(scores) - min(scores)))
    low, high = max(0.0, min(scores) - margin), min(100.0, max(scores) + margin)
    f = Frame(0.0, 1.05 * max(budgets) or 1.0, low, high, right=WIDTH - 12)
    parts = []
    for value in ticks(f.low, f.high):
        parts += [line(f.left, f.y(value), f.right, f.y(value), "grid")]
        parts += [text(f.left - 6, f.y(value) + 4, number(value), "faint", "end")]
    for value in ticks(f.first, f.last):
        parts += [line(f.x(value), f.bottom, f.x(value), f.bottom + 4, "axis")]
        parts += [text(f.x(value), f.bottom + 17, number(value), "faint", "middle")]
    parts += [line(f.left, f.bottom, f.right, f.bottom, "axis")]
    parts += [text((f.left + f.right) / 2, f.bottom + 33, "ε, mean over clients", "faint", "middle")]
    for k, one in enumerate(methods):
        places = " ".join(f"{number(f.x(e))},{number(f.y(s))}" for e, s in one.line)
        parts.append(element("polyline", points=places, class_=f"curve {colour(k)}"))
        for e, s in one.dots:
            hover = element("title", escape(f"{one.label}, ε {e:.2f}: {s:.2f}"))
            parts.append(element("circle", hover, cx=f.x(e), cy=f.y(s), r=2.8, class_=colour(k)))
        parts.append(
            text(f.right - 4, f.bottom - 8 - 14 * (len(methods) - 1 - k), one.label, f"value {colour(k)}", "end")
        )
    return picture(WIDTH, 214, label, *parts)


# who holds what


def bubbles(holdings: Holdings) -> str:
    """Draws clients × classes; the area of a bubble is the number of training samples."""
    cell = min(64.0, max(14.0, 680 / max(1, len(holdings.classes))))
    rows = Rows.of(holdings.clients)
    rows = Rows(rows.names, rows.step if len(rows.names) > 40 else max(rows.step, min(27, int(cell))), rows.left)
    longest = max(map(cell_len, holdings.classes), default=0)
    tilted = longest * 7 > cell - 4
    head = 18 + (min(16, longest) * 5.2 if tilted else 0)
    parts = [element("g", *_grid(rows, cell, holdings), transform=f"translate(0 {number(head - 10)})")]
    for j, name in enumerate(holdings.classes):
        x, turn = rows.left + (j + 0.5) * cell, ""
        if tilted:
            turn = f"rotate(-50 {number(x)} {number(head - 6)})"
        parts.append(text(x, head - 6, shorten(name, 16), "", "start" if tilted else "middle", name, turn))
    full = rows.left + cell * len(holdings.classes) + SIDE
    label = f"training samples of {len(holdings.classes)} classes at {len(holdings.clients)} clients"
    return picture(full, head + rows.bottom, label, *parts, least=full * (0.75 if full < 1000 else 0.9))


def _grid(rows: Rows, cell: float, holdings: Holdings) -> list[str]:
    top = max([n for row in holdings.counts for n in row] or [0]) or 1
    most = max([train for train, _, _ in holdings.sizes] or [0]) or 1
    largest = 0.5 * min(cell, rows.step) * 0.94
    hovers = sum(n > 0 for row in holdings.counts for n in row) <= MOST_HOVERS
    right, parts = rows.left + cell * len(holdings.classes), rows.labels()
    for i, (client, row) in enumerate(zip(holdings.clients, holdings.counts, strict=True)):
        y, train = rows.y(i), holdings.sizes[i][0]
        bar = (SIDE - 60) * train / most
        parts.append(line(rows.left, y, right, y, "grid"))
        parts.append(element("rect", x=right + 12, y=y - 5, width=bar, height=10, rx=1.5, class_="bubble k5"))
        parts.append(text(right + 18 + bar, y + 4, f"{train:,}", "faint"))
        for j, count in enumerate(row):
            if count:
                hover = element("title", escape(f"{client}, {holdings.classes[j]}: {count:,}")) if hovers else ""
                size = max(1.0, largest * math.sqrt(count / top))
                x = rows.left + (j + 0.5) * cell
                parts.append(element("circle", hover, cx=x, cy=y, r=size, class_="bubble k0"))
    return parts
