"""Small pieces of HTML. Arguments are text and are escaped, unless they are said to be markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from .svg import colour, dash


def common(values: Iterable[Any]) -> str:
    """What all runs have, or each of the values they have."""
    return " / ".join(dict.fromkeys(str(v) for v in values))


def score(mean: float | None, std: float | None = None, bold: str = "") -> str:
    if mean is None:
        return '<small class="na">n/a</small>'
    value = f"{mean:.2f}"
    value = f"<{bold}>{value}</{bold}>" if bold else value
    return value if std is None else f"{value} <small>± {std:.2f}</small>"


def figure(title: str, about: str, drawing: str, kind: str = "") -> str:
    held = f'<div class="{kind}">{drawing}</div>' if kind else drawing
    name = f"<strong>{escape(title)}</strong>" if title else ""
    return f"<figure><figcaption>{name}{'<br>' if title and about else ''}{escape(about)}</figcaption>{held}</figure>"


def section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n" + "\n".join(parts) + "\n</section>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], about: str) -> str:
    """`rows` are markup; the first cell of a row heads it."""
    top = "".join(f'<th scope="col">{escape(h)}</th>' for h in head)
    body = "\n".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>" for row in rows
    )
    held = f"<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>"
    return f'<div class="scroll"><table aria-label="{escape(about)}">{held}</table></div>'


def key(index: int) -> str:
    """A line as it is drawn in the curves."""
    style = f' style="stroke-dasharray:{dash(index)}"' if dash(index) else ""
    drawn = f'<line x1="1" y1="5" x2="25" y2="5" class="curve {colour(index)}"{style}></line>'
    return f'<svg class="key" viewBox="0 0 26 10" aria-hidden="true">{drawn}</svg>'
