"""The report's pictures that are not over rounds: costs against scores, heat maps, and curves in a unit square."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from .svg import WIDTH, Frame, colour, dash, element, line, number, picture, shorten, text, ticks

CELL = 20.0  # height of a row of a heat map
DECADES = (1, 2, 5)  # ticks of a logarithmic axis


@dataclass(frozen=True)
class Spot:
    """A method in a picture of cost against score. half: of the score's interval."""

    label: str
    index: int
    x: float
    y: float
    half: float | None = None


def scatter(label: str, title: str, spots: Sequence[Spot], show: Callable[[float], str]) -> str:
    """Draws scores against a cost on a logarithmic axis. title: of that axis; show: how a cost is written."""
    lows, highs = [s.y - (s.half or 0) for s in spots], [s.y + (s.half or 0) for s in spots]
    margin = max(1.0, 0.12 * (max(highs) - min(lows)))
    costs = [math.log10(s.x) for s in spots]
    aside = max(0.12, 0.12 * (max(costs) - min(costs)))
    frame = Frame(
        min(costs) - aside,
        max(costs) + aside,
        max(0.0, min(lows) - margin),
        min(100.0, max(highs) + margin),
        right=WIDTH - 12,
    )
    parts = _grid(frame, number) + _costs(frame, show)
    parts.append(text((frame.left + frame.right) / 2, frame.bottom + 33, title, "faint", "middle"))
    for spot in reversed(spots):
        parts += _spot(frame, spot, show)
    parts += _names(frame, spots) if len(spots) <= 8 else []
    return picture(WIDTH, 214, f"{label}: {'; '.join(f'{s.label} {show(s.x)}, {s.y:.2f}' for s in spots)}", *parts)


def _grid(f: Frame, tick: Callable[[float], str]) -> list[str]:
    parts = []
    for value in ticks(f.low, f.high):
        parts += [line(f.left, f.y(value), f.right, f.y(value), "grid")]
        parts += [text(f.left - 6, f.y(value) + 4, tick(value), "faint", "end")]
    return [*parts, line(f.left, f.bottom, f.right, f.bottom, "axis")]


def _costs(f: Frame, show: Callable[[float], str]) -> list[str]:
    """Draws the ticks of the logarithmic axis: at most five."""
    first, last = math.floor(f.first), math.ceil(f.last)
    values = [math.log10(digit) + power for power in range(first, last + 1) for digit in DECADES]
    within = [v for v in values if f.first <= v <= f.last]
    wide = [v for v in within if abs(v - round(v)) < 1e-9]
    chosen = wide if len(wide) >= 2 else within
    parts = []
    for value in chosen[:: math.ceil(len(chosen) / 5)] if chosen else []:
        parts += [line(f.x(value), f.bottom, f.x(value), f.bottom + 4, "axis")]
        parts += [text(f.x(value), f.bottom + 17, show(10**value), "faint", "middle")]
    return parts


def _spot(f: Frame, spot: Spot, show: Callable[[float], str]) -> list[str]:
    x, kind = f.x(math.log10(spot.x)), colour(spot.index)
    spread = f" ± {spot.half:.2f}" if spot.half is not None else ""
    hover = element("title", escape(f"{spot.label}: {show(spot.x)}, {spot.y:.2f}{spread}"))
    parts = [element("circle", hover, cx=x, cy=f.y(spot.y), r=4.2, class_=f"dot {kind}")]
    if spot.half is not None:
        ends = [f.y(max(f.low, min(f.high, spot.y + sign * spot.half))) for sign in (1, -1)]
        parts.insert(0, line(x, ends[0], x, ends[1], f"curve {kind}"))
    return parts


def _names(f: Frame, spots: Sequence[Spot]) -> list[str]:
    """Writes the names beside the spots: to the left where there is no space, and moved apart where they overlap."""
    parts: list[str] = []
    taken: list[tuple[float, float, float]] = []  # from, to, baseline
    for spot in sorted(spots, key=lambda s: -s.y):
        name, x, y = shorten(spot.label, 18), f.x(math.log10(spot.x)), f.y(spot.y) + 4
        wide = 7.0 * len(name)
        left = x + 8 + wide > f.right
        start = x - 8 - wide if left else x + 8
        while any(abs(y - other) < 11 and start < end and begin < start + wide for begin, end, other in taken):
            y += 3
        taken.append((start, start + wide, y))
        parts.append(text(x - 8 if left else x + 8, y, name, f"value {colour(spot.index)}", "end" if left else ""))
    return parts


def heat(
    label: str, columns: Sequence[str], rows: Mapping[str, Sequence[float | None]], ends: tuple[float, float]
) -> str:
    """Draws a table of scores whose shade is the score: none at the lower end, darkest at the upper one."""
    left = 12 + 6.4 * min(18, max(map(len, rows), default=0))
    width, low, high = (WIDTH - left - 6) / max(1, len(columns)), *ends
    parts = [text(left + (j + 0.5) * width, 12, name, "faint", "middle") for j, name in enumerate(columns)]
    for i, (name, values) in enumerate(rows.items()):
        y = 18 + i * CELL
        parts.append(text(left - 6, y + 14, shorten(name, 18), "", "end", full=name))
        for j, value in enumerate(values):
            at, known = left + j * width, value if value is not None else low
            share = 0.06 + 0.54 * max(0.0, min(1.0, (known - low) / (high - low if high > low else 1.0)))
            size = {"width": width - 2, "height": CELL - 2, "rx": 2.0}
            style = f"fill-opacity:{0 if value is None else share:.2f}"
            parts.append(element("rect", x=at, y=y, class_="k0", style=style, **size))
            parts.append(text(at + (width - 2) / 2, y + 13.5, "n/a" if value is None else f"{value:.1f}", "", "middle"))
    return picture(WIDTH, 22 + len(rows) * CELL, label, *parts)


@dataclass(frozen=True)
class Path:
    """A curve in a unit square; with a dot at each point if `dots`."""

    label: str
    index: int
    points: Sequence[tuple[float, float]]
    dots: bool = False


def square(label: str, across: str, up: str, paths: Sequence[Path], bars: Sequence[float] = ()) -> str:
    """Draws curves over shares from 0 to 1, with the diagonal, and the names of several.

    bars: shares in bins, drawn faintly from the bottom.
    """
    f = Frame(0.0, 1.0, 0.0, 1.0, right=WIDTH - 70, bottom=236.0)
    parts = _grid(f, "{:g}".format)
    for value in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        parts.append(text(f.x(value), f.bottom + 17, f"{value:g}", "faint", "middle"))
    for k, share in enumerate(bars):
        x, y = f.x(k / len(bars)), f.y(share)
        parts.append(element("rect", x=x, y=y, width=f.x(1 / len(bars)) - f.left, height=f.bottom - y, class_="track"))
    parts.append(line(f.left, f.bottom, f.right, f.top, "mean"))
    for path in reversed(paths):
        corners = " ".join(f"{number(f.x(x))},{number(f.y(y))}" for x, y in path.points)
        style = f"stroke-dasharray:{dash(path.index)}" if dash(path.index) else None
        parts.append(element("polyline", points=corners, class_=f"curve {colour(path.index)}", style=style))
        for x, y in path.points if path.dots else ():
            hover = element("title", escape(f"{path.label}: {x:.3f}, {y:.3f}"))
            parts.append(element("circle", hover, cx=f.x(x), cy=f.y(y), r=2.8, class_=colour(path.index)))
    for k, path in enumerate(paths if len(paths) > 1 else ()):
        y = f.bottom - 8 - 13 * (len(paths) - 1 - k)
        parts.append(text(f.right - 6, y, shorten(path.label, 18), f"value {colour(path.index)}", "end"))
    parts.append(text((f.left + f.right) / 2, f.bottom + 33, across, "faint", "middle"))
    middle = (f.top + f.bottom) / 2
    parts.append(text(12, middle, up, "faint", "middle", turn=f"rotate(-90 12 {number(middle)})"))
    return picture(WIDTH, 274, label, *parts)
