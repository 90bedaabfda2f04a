"""Small pieces of SVG. Colours are classes and variables of the page's CSS, so pictures follow its colour scheme."""

import math
from dataclasses import dataclass
from html import escape

from rich.cells import cell_len, set_cell_size

WIDTH = 360  # of a panel: as wide as a phone, so that text has the same size everywhere
COLOURS, DASHES = 8, ("", "6 3", "2 3")  # a ninth line has the first one's colour, dashed


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def element(name: str, *children: str, **attributes: str | float | None) -> str:
    """Returns markup. `children` are markup, attribute values are text; `text_anchor` becomes text-anchor."""
    shown = ""
    for key, value in attributes.items():
        if value is not None and value != "":
            word = escape(value) if isinstance(value, str) else number(value)
            shown += f' {key.rstrip("_").replace("_", "-")}="{word}"'
    return f"<{name}{shown}>{''.join(children)}</{name}>"


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "", full: str = "", turn: str = "") -> str:
    """Returns a text; `full` is shown on hover if `words` is its short form."""
    hover = element("title", escape(full)) if full and full != words else ""
    at = {"text_anchor": anchor, "transform": turn}
    return element("text", hover, escape(words), x=x, y=y, class_=kind, **at)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def picture(width: float, height: float, label: str, *children: str, least: float = 0) -> str:
    """Returns a whole picture; below a width of `least` pixels it is scrolled instead of made smaller."""
    style = f"max-width:{number(width * (1.05 if least else 1.2))}px"
    style += f";min-width:{number(least)}px" if least else ""
    box = f"0 0 {number(width)} {number(height)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label, style=style)


def colour(index: int) -> str:
    return f"k{index % COLOURS}"


def dash(index: int) -> str:
    return DASHES[index // COLOURS % len(DASHES)]


def shorten(words: str, most: int) -> str:
    """Returns at most `most` cells of text; an East Asian letter has two."""
    return words if cell_len(words) <= most else set_cell_size(words, most - 1) + "…"


def ticks(low: float, high: float, most: int = 6, whole: bool = False) -> list[float]:
    """Returns at most `most` round numbers within [low, high]."""
    if high <= low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    size = max(1.0, size) if whole else size
    for step in (size, 2 * size, 5 * size, 10 * size, 20 * size):
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            break
    return [i * step for i in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """Turns numbers into positions in a panel: x in [first, last], y in [low, high]."""

    first: float
    last: float
    low: float
    high: float
    left: float = 46
    right: float = 320
    top: float = 10
    bottom: float = 178

    def x(self, value: float) -> float:
        if self.last == self.first:
            return (self.left + self.right) / 2
        return self.left + (value - self.first) / (self.last - self.first) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * (self.bottom - self.top)


def millions(count: int) -> str:
    """Returns a number of parameters, such as `24,660` or `11.18M`."""
    return f"{count / 1e6:.2f}M" if count >= 10**5 else f"{count:,}"


def human_bytes(value: float) -> str:
    """Returns a size in decimal units, such as `12.9 MB`."""
    power = min(4, max(0, int(math.log10(value) / 3))) if value >= 1 else 0
    value, unit = value / 1000**power, ("B", "kB", "MB", "GB", "TB")[power]
    digits = 0 if power == 0 or value >= 100 else 1
    return f"{value:.{digits}f}".removesuffix(".0") + f" {unit}"
