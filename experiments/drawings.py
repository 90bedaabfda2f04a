"""The document's figures, as files that a browser or a code host shows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from importlib import resources

import numpy as np

from perada.methods import REGISTRY, Finisher
from perada.report.figures import Series, curves, dots
from perada.report.svg import colour, dash, element, number, text

from .results import METRICS, Result, value

LETTER = 6.2  # pixels per letter of a title


def standalone(drawing: str, title: str, legend: Sequence[str]) -> str:
    """Returns a picture of the report with its colours, a title and a legend as one file."""
    found = re.match(r'<svg viewBox="0 0 ([\d.]+) ([\d.]+)"', drawing)
    assert found is not None
    width, height = float(found[1]), float(found[2])
    words = textwrap.wrap(title, int(width / LETTER))
    parts = [text(4, 14 + 15 * i, line) for i, line in enumerate(words)]
    for i, name in enumerate(legend):
        x, y = 4 + (i % 2) * width / 2, 17 + 15 * (len(words) + i // 2)
        style = f"stroke-dasharray:{dash(i)}" if dash(i) else None
        parts.append(element("line", x1=x, y1=y - 4, x2=x + 20, y2=y - 4, class_=f"curve {colour(i)}", style=style))
        parts.append(text(x + 26, y, name))
    top = 9 + 15 * (len(words) + (len(legend) + 1) // 2)
    inner = drawing.replace("<svg ", f'<svg y="{number(top)}" width="{number(width)}" height="{number(height)}" ', 1)
    box = f"0 0 {number(width)} {number(height + top)}"
    size = {"width": number(width * 1.5), "height": number((height + top) * 1.5)}
    paper = element("rect", width="100%", height="100%", style="fill:var(--card)")
    whole = [element("style", _style()), paper, *parts, inner]
    return element("svg", *whole, xmlns="http://www.w3.org/2000/svg", viewBox=box, **size) + "\n"


def _style() -> str:
    """Returns the report's colours and lines."""
    whole = (resources.files("perada") / "report" / "style.css").read_text("utf8")
    colours = whole[: whole.index("* {")]
    lines = [line for line in whole.splitlines() if re.match(r"(svg \.|svg \[|\.k\d)", line)]
    return colours + "\n".join(lines) + "\nsvg { font: 11px system-ui, sans-serif; fill: var(--ink); }"


def late(result: Result) -> bool:
    """Returns whether a result has personal models only after its last stage; before it, they are the global model."""
    return isinstance(REGISTRY[result["method"]](), Finisher)


def over_rounds(runs: Mapping[str, Sequence[Result]], section: str, key: str = "mean") -> list[Series]:
    """Returns one line per method: the mean over its runs at the rounds that all of them have."""
    found = []
    for i, (name, several) in enumerate(runs.items()):
        rows = [{r["round"]: (r.get(section) or {}).get(key) for r in one["rows"]} for one in several]
        shared = [n for n in rows[0] if all(row.get(n) is not None for row in rows)] if rows else []
        if section != "global_model" and any(map(late, several)):
            shared = shared[-1:]
        points = [(n, float(np.mean([row[n] for row in rows])), None) for n in shared]
        found.append(Series(name, i, points))
    return found


def convergence(runs: Mapping[str, Sequence[Result]], title: str, section: str, key: str = "mean") -> str:
    return standalone(curves(title, over_rounds(runs, section, key)), title, list(runs))


def variants(runs: Mapping[str, Result], metrics: Sequence[str], title: str) -> str:
    """Returns a figure with one row per variant and one dot per metric."""
    assert all(m in METRICS for m in metrics)
    found = [(m, {name: value(r, m) for name, r in runs.items()}) for m in metrics]
    known = "; ".join(f"{name}: " + ", ".join(f"{m} {_shown(v.get(name))}" for m, v in found) for name in runs)
    return standalone(dots(title, list(runs), found, f"{title}. {known}"), title, list(metrics))


def _shown(found: float | None) -> str:
    return "n/a" if found is None else f"{found:.2f}"
