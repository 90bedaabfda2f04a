"""The page's figures as files for papers: SVG, PDF and PNG, drawn by matplotlib from the page's own pictures."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from ..errors import InputError
from .panels import Figure
from .svg import colour, dash

KINDS = ("svg", "pdf", "png")
ROW = 16.0  # height of a line of a legend
DOTS = 300  # per inch, of the PNG
WITH_LEGEND = ("over_rounds", "by_client", "communication")
POINTS = 0.75  # per pixel
FIXED = {"Creator": None, "Date": None}  # what matplotlib writes into SVG files; None leaves it out
METADATA = {"svg": FIXED, "pdf": {"CreationDate": None, "Producer": None, "Creator": None}, "png": {"Software": None}}


def write_figures(figures: Sequence[tuple[str, Figure]], folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """Writes each figure in three formats to a folder; returns the files. Equal figures give equal files.

    figures: the part of the page, and a figure. names: of the colours in those parts that have a legend on the page.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("--figures needs matplotlib: pip install 'perada[figures]'") from error
    written, taken = [], set[str]()
    with matplotlib.rc_context({"svg.hashsalt": "perada", "svg.fonttype": "path", "pdf.fonttype": 42}):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for part, figure in figures:
                name = _free(_slug(f"{part} {figure.title}"), taken)
                drawn = draw(figure.drawing, names if part in WITH_LEGEND else ())
                for kind in KINDS:
                    path = folder / f"{name}.{kind}"
                    drawn.savefig(path, dpi=DOTS, metadata=METADATA[kind])
                    written.append(path)
        except OSError as error:
            raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return written


def _slug(text: str) -> str:
    plain = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:80] or "figure"


def _free(name: str, taken: set[str]) -> str:
    number = 1
    while (free := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    taken.add(free)
    return free


def draw(markup: str, names: Sequence[str] = ()) -> Any:
    """Returns a matplotlib figure of a picture that `svg.picture` made, with a legend below it for these names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    root = ElementTree.fromstring(markup)
    width, height = (float(v) for v in root.attrib["viewBox"].split()[2:])
    root.extend(_legend(names, height))
    height += ROW * len(names)
    canvas = Canvas(figsize=(width * POINTS / 72, height * POINTS / 72))
    FigureCanvasAgg(canvas)
    axes = canvas.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    _Pen(axes, light_colours()).draw(root, 0.0, 0.0)
    return canvas


def _legend(names: Sequence[str], top: float) -> Iterator[ElementTree.Element]:
    """Yields a line and a name per colour."""
    for k, name in enumerate(names):
        y = top + ROW * k + 6
        look = {"class": colour(k), "style": f"stroke-dasharray:{dash(k)}" if dash(k) else ""}
        yield ElementTree.Element("polyline", {"points": f"46,{y} 72,{y}", **look})
        label = ElementTree.Element("text", {"x": "80", "y": str(y + 4)})
        label.text = name
        yield label


def light_colours() -> dict[str, str]:
    """Returns the variables of the page's style, as they are in a light room and on white paper."""
    style = (resources.files(__package__) / "style.css").read_text("utf8")
    return {**dict(re.findall(r"--(\w+): (#\w+);", style.partition("@media")[0])), "card": "#ffffff"}


class _Pen:
    """Draws the elements that `svg.py` makes, by the rules of style.css."""

    def __init__(self, axes: Any, colours: Mapping[str, str]) -> None:
        self.axes, self.colours = axes, colours

    def draw(self, parent: ElementTree.Element, dx: float, dy: float) -> None:
        """Draws the children of an element, in their order."""
        kinds: dict[str, Callable[[ElementTree.Element, set[str], dict[str, float]], None]] = {
            "line": self._line,
            "rect": self._rect,
            "circle": self._circle,
            "polyline": self._curve,
            "polygon": self._band,
            "text": self._text,
        }
        for order, one in enumerate(parent):
            name = one.tag
            if name == "g":
                move = re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", one.get("transform", ""))
                self.draw(one, *((float(v) for v in move.groups()) if move else (0.0, 0.0)))
            elif name in kinds:
                numbers = {k: float(v) for k, v in one.attrib.items() if re.fullmatch(r"-?[\d.]+", v)}
                numbers |= {"dx": dx, "dy": dy, "order": float(order)}
                kinds[name](one, set(one.get("class", "").split()), numbers)

    def _colour(self, classes: set[str], default: str = "ink") -> str:
        series = next((name for name in classes if re.fullmatch(r"k\d", name)), "")
        named = {"faint": "soft", "grid": "rule", "axis": "soft", "track": "track", "mean": "ink"}
        plain = next((named[name] for name in named if name in classes), default)
        return self.colours[f"c{series[1:]}" if series else plain]

    def _line(self, one: ElementTree.Element, classes: set[str], n: dict[str, float]) -> None:
        dashes = (0, (4, 3)) if "mean" in classes else "-"
        width = 1.5 if "curve" in classes else 0.7
        xs, ys = [n["x1"] + n["dx"], n["x2"] + n["dx"]], [n["y1"] + n["dy"], n["y2"] + n["dy"]]
        self.axes.plot(xs, ys, color=self._colour(classes), linewidth=width, linestyle=dashes, zorder=n["order"])

    def _rect(self, one: ElementTree.Element, classes: set[str], n: dict[str, float]) -> None:
        from matplotlib.patches import Rectangle

        corner, opacity = (n["x"] + n["dx"], n["y"] + n["dy"]), _opacity(one, classes)
        look = {"facecolor": self._colour(classes), "alpha": opacity, "linewidth": 0, "zorder": n["order"]}
        self.axes.add_patch(Rectangle(corner, n["width"], n["height"])).set(**look)

    def _circle(self, one: ElementTree.Element, classes: set[str], n: dict[str, float]) -> None:
        from matplotlib.patches import Circle

        colour, hollow = self._colour(classes), "hollow" in classes
        edge = colour if hollow else self.colours["card"] if "dot" in classes else "none"
        look = {"facecolor": self.colours["card"] if hollow else colour, "edgecolor": edge, "linewidth": 0.8}
        at = n["cx"] + n["dx"], n["cy"] + n["dy"]
        self.axes.add_patch(Circle(at, n["r"], **look, alpha=_opacity(one, classes), zorder=n["order"]))

    def _curve(self, one: ElementTree.Element, classes: set[str], n: dict[str, float]) -> None:
        xs, ys = _corners(one, n)
        pattern = re.search(r"stroke-dasharray:([\d ]+)", one.get("style", ""))
        dashes: Any = (0, tuple(float(v) / 2 for v in pattern.group(1).split())) if pattern else "-"
        look = {"color": self._colour(classes), "linewidth": 1.5, "linestyle": dashes, "solid_capstyle": "round"}
        self.axes.plot(xs, ys, **look, zorder=n["order"])

    def _band(self, one: ElementTree.Element, classes: set[str], n: dict[str, float]) -> None:
        look = {"color": self._colour(classes), "alpha": _opacity(one, classes), "linewidth": 0}
        self.axes.fill(*_corners(one, n), **look, zorder=n["order"])

    def _text(self, one: ElementTree.Element, classes: set[str], n: dict[str, float]) -> None:
        words = "".join(part for part in [one.text or "", *(child.tail or "" for child in one)])
        turn = re.search(r"rotate\((-?[\d.]+)", one.get("transform", ""))
        side = {"middle": "center", "end": "right"}.get(one.get("text-anchor", ""), "left")
        look = {"ha": side, "va": "baseline", "rotation_mode": "anchor", "parse_math": False, "zorder": n["order"]}
        look |= {"color": self._colour(classes), "fontsize": 11 * POINTS}
        look |= {"rotation": -float(turn.group(1)) if turn else 0, "weight": 700 if "value" in classes else 400}
        self.axes.text(n["x"] + n["dx"], n["y"] + n["dy"], words, **look)


def _corners(one: ElementTree.Element, n: Mapping[str, float]) -> tuple[list[float], list[float]]:
    pairs = [corner.split(",") for corner in one.attrib["points"].split()]
    return [float(x) + n["dx"] for x, _ in pairs], [float(y) + n["dy"] for _, y in pairs]


def _opacity(one: ElementTree.Element, classes: set[str]) -> float:
    given = re.search(r"fill-opacity:([\d.]+)", one.get("style", ""))
    return float(given.group(1)) if given else 0.14 if "band" in classes else 0.78 if "bubble" in classes else 1.0
