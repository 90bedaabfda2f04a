"""A site's page about its own model: rounds, scores, mistakes, examples. One file, from the site's own disk."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..client.interval import interval
from ..client.scores import label_areas, logits_on, score
from ..config import Config
from ..data import Federation
from ..lanes import LaneModel, State
from .figures import Series, curves
from .page import write_page
from .panels import Figure

HALF = 0.5  # the threshold of a label for which none was chosen
MOST_CLASSES = 40  # in a confusion matrix
MISTAKES, EXAMPLES = 8, 12  # shown images: at most so many mistakes, and so many in all
Numbers = NDArray[Any]


@dataclass(frozen=True)
class Measured:
    """A score in percent with its 95% interval; None where it is undefined."""

    score: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True)
class Example:
    """A test image with what the model says about it."""

    number: int  # in the site's test data
    image: str  # a data URI
    said: str
    truth: str
    probability: float

    @property
    def right(self) -> bool:
        return self.said == self.truth


@dataclass(frozen=True)
class Label:
    """How well one label of multi-label data is found."""

    name: str
    auc: float | None
    positive: int
    found: int  # of the positive images
    wrong: int  # negative images that were found
    least: float  # the probability from which it counts as found


class SitePage:
    """What the page says."""

    def __init__(
        self,
        site: str,
        federation: str,
        config: Config,
        data: Federation,
        model: LaneModel,
        own: State,
        shared: State | None,
        notes: Sequence[Mapping[str, Any]],
        thresholds: Mapping[str, float | None] | None = None,
    ) -> None:
        client, self.site, self.federation = data.clients[0], site, federation
        self.sizes = (len(client.train), len(client.val), len(client.test))
        self.unit, self.classes, self.config = (
            "AUC" if data.multilabel else "accuracy",
            list(data.classes),
            config.toml(),
        )
        logits, targets = logits_on(model, own, data, client.test)[0], data.labels(client.test)
        self.own = Measured(score(logits, targets), interval(logits, targets))
        self.shared = None
        if shared is not None:
            other = logits_on(model, shared, data, client.test)[0]
            self.shared = Measured(score(other, targets), interval(other, targets))
        shares = (logits.sigmoid() if data.multilabel else logits.softmax(-1)).double().cpu().numpy()
        truth = targets.cpu().numpy()
        small = not data.multilabel and len(truth) > 0 and len(data.classes) <= MOST_CLASSES
        self.confusion = confusion(truth, shares.argmax(1), len(data.classes)).tolist() if small else []
        least = [HALF if value is None else value for value in map((thresholds or {}).get, data.classes)]
        areas = label_areas(logits, targets) if data.multilabel else []
        self.labels = labels(data.classes, truth, shares, areas, least) if data.multilabel else []
        pixels = data.take(client.test).cpu().numpy()
        self.examples = [] if data.multilabel else examples(pixels, truth, shares, data.classes)
        done = [int(row["round"]) for row in notes if row.get("loss") is not None]
        self.trained, self.newest, self.planned = len(done), max(done, default=0), config.train.rounds
        self.without = spans(sorted(set(range(min(done, default=1), self.newest)) - set(done)))
        self.figures = over_rounds(notes, self.unit, config.run.eval_every)
        sizes = "{} training, {} validation and {} test images".format(*self.sizes)
        self.setup = [config.method_name, config.model.backbone, sizes, f"{len(self.classes)} classes"]

    def write(self, out: Path) -> None:
        """Writes the page as one file."""
        write_page(out, "site.html", of=self)


def confusion(truth: Numbers, said: Numbers, classes: int) -> Numbers:
    """Returns how many images of each class are taken for which, `[classes, classes]`."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (truth, said), 1)
    return counts


def labels(
    names: Sequence[str], truth: Numbers, shares: Numbers, areas: Sequence[float | None], least: Sequence[float]
) -> list[Label]:
    """Returns how well each label is found. least: the probability per label from which it counts as found."""
    found, positive, negative = shares >= np.array(least), truth == 1, truth == 0  # neither where it is not known
    return [
        Label(
            name,
            None if areas[j] is None else 100.0 * float(areas[j] or 0.0),
            int(positive[:, j].sum()),
            int((found & positive)[:, j].sum()),
            int((found & negative)[:, j].sum()),
            least[j],
        )
        for j, name in enumerate(names)
    ]


def examples(pixels: Numbers, truth: Numbers, shares: Numbers, names: Sequence[str]) -> list[Example]:
    """Returns the mistakes of which the model is surest, then images evenly taken from those where it is right."""
    said, sure = shares.argmax(1), shares.max(1)
    wrong, right = np.flatnonzero(said != truth), np.flatnonzero(said == truth)
    chosen = wrong[np.argsort(-sure[wrong], kind="stable")][:MISTAKES].tolist()
    rest = EXAMPLES - len(chosen)
    chosen += right[np.linspace(0, len(right) - 1, min(rest, len(right)), dtype=int)].tolist() if len(right) else []
    return [Example(i, data_uri(pixels[i]), names[said[i]], names[truth[i]], float(sure[i])) for i in chosen]


def data_uri(pixels: Numbers) -> str:
    """Returns an image, uint8 `[1 or 3, H, W]`, as PNG in a data URI."""
    file = io.BytesIO()
    shown = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    Image.fromarray(shown).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def spans(rounds: Sequence[int]) -> str:
    """Returns rounds in words: `2, 4 to 10`."""
    firsts = [r for r in rounds if r - 1 not in rounds]
    lasts = [r for r in rounds if r + 1 not in rounds]
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in zip(firsts, lasts, strict=True))


def over_rounds(notes: Sequence[Mapping[str, Any]], unit: str, every: int = 1) -> list[Figure]:
    """Returns the pictures of the site's losses and scores by round; a round that is missing is a gap.

    every: the rounds between two evaluations.
    """
    scores = [_line("test", 0, "local_test", notes, every), _line("validation", 1, "local_val", notes, every)]
    losses, figures = _line("training loss", 4, "loss", notes, 1), []
    if losses.known:
        drawing = curves("Training loss", [losses], "loss")
        figures.append(Figure("Training loss", "the mean over a round's steps", drawing))
    if any(s.known for s in scores):
        about = f"{unit} in % of the site's own model on its test images (blue) and its validation images (orange)"
        title = f"Own {unit}"
        figures.append(Figure(title, about, curves(title, [s for s in scores if s.known])))
    spent = _line("ε", 2, "epsilon", notes, 1)
    if spent.known:
        about = "what this site's uploads may tell about any one image, in all runs of the federation so far"
        figures.append(Figure("ε", about, curves("ε", [spent], "epsilon")))
    return figures


def _line(label: str, index: int, key: str, notes: Sequence[Mapping[str, Any]], every: int) -> Series:
    """Returns the values of a key by round, with a gap where the site was not asked for more than `every` rounds."""
    known = [(int(row["round"]), float(row[key])) for row in notes if row.get(key) is not None]
    points: list[tuple[int, float | None, float | None]] = []
    for number, value in known:
        if points and number - points[-1][0] > every:
            points.append((number - 1, None, None))
        points.append((number, value, None))
    return Series(label, index, points)
