"""What a report says about a run, read from its folder once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from ..client.scores import Scores
from ..data import Federation
from ..errors import Damaged, InputError
from ..methods import method_sizes
from ..models import network_of
from ..predict.scores import DriftScores
from ..privacy.guarantee import Guarantee
from ..runs.folder import RunFolder
from ..runs.further import further_scores
from ..runs.moment import Evaluation
from ..runs.run import Run
from ..runs.shifts import Shifts
from .worth import Worth

PERSONAL = {
    "local_test": ("Local-test", "each client's personal model on that client's own test images"),
    "global_test": ("Global-test", "each client's personal model on all clients' test images"),
    "shifted": ("Shifted", "the mean over the Global-test images corrupted in 19 ways (noise, blur, fog, ...)"),
}
JOINED = {"personal": "personal", "standalone": "trained alone", "global": "global"}  # models of a client that joined
SERVER = {"global_model": ("Global model", "the one model that the server sends out, on all clients' test images")}


def unlikeness(counts: np.ndarray[Any, Any]) -> float:
    """Returns the mean total-variation distance between two clients' labels; counts `[clients, labels]`."""
    shares = np.sort(counts / np.maximum(counts.sum(1, keepdims=True), 1), axis=0)
    many = len(shares)
    # In sorted order, value k of n is added k times and subtracted n-1-k times: all pairs without a table of them.
    apart = (2 * np.arange(many) - (many - 1)) @ shares
    return float(0.5 * apart.sum() / (many * (many - 1) / 2)) if many > 1 else 0.0


@dataclass(frozen=True)
class Holdings:
    """How many samples of which class each client has."""

    classes: tuple[str, ...]
    clients: tuple[str, ...]
    counts: list[list[int]]  # training samples, [clients][classes]
    sizes: list[tuple[int, int, int]]  # train, val, test

    @classmethod
    def of(cls, federation: Federation) -> Self:
        sizes = [(len(c.train), len(c.val), len(c.test)) for c in federation.clients]
        names = tuple(c.name for c in federation.clients)
        return cls(tuple(federation.classes), names, federation.label_counts().tolist(), sizes)


def mean_and_std(row: Evaluation | None, split: str) -> tuple[float | None, float | None]:
    """Returns the mean score and its deviation over clients; None where not measured.

    split: of the personal models, or `global_model`, which is one model and has no deviation.
    """
    if row is None or split == "global_model":
        return (row.global_model if row else None), None
    scores = row.scores.get(split)
    return (scores.mean, scores.std) if scores else (None, None)


def _diverged(rows: Sequence[Evaluation]) -> int:
    return sum(bool((row.distill or {}).get("diverged")) for row in rows)


def distillations(last: Evaluation | None, rows: Sequence[Evaluation]) -> tuple[int, int]:
    """Returns in how many rounds a student was made, and in how many it did not diverge."""
    if last is None:
        return 0, 0
    diverged = _diverged(rows)
    if last.distilled + diverged > last.round:  # an older version counted those that diverged
        return last.distilled, last.distilled - diverged
    return last.distilled + diverged, last.distilled


def drift_of(summary: Mapping[str, Any]) -> DriftScores | None:
    """Returns the scores of a summary's predictions that notice drift; None without any."""
    written = summary.get("drift")
    return None if written is None else DriftScores.read(written)


def mishaps(rows: Sequence[Evaluation]) -> list[str]:
    """Returns a sentence about each kind of thing that went wrong in the evaluated rounds, with who and how often."""
    lines, of = [], f"of {len(rows)} evaluated rounds"
    if diverged := _diverged(rows):
        lines.append(f"The distilled student diverged and was discarded in {diverged} {of}.")
    for what, who in (
        ("Training stopped being finite at", [row.failed for row in rows]),
        ("Nothing came from", [row.absent for row in rows]),
        ("Uploads were refused from", [tuple(row.refused) for row in rows]),
    ):
        times = Counter(name for names in who for name in names)
        if times:
            named = ", ".join(f"{name} (in {n})" for name, n in sorted(times.items()))
            lines.append(f"{what} {named} {of}.")
    return lines


def names_of(names: Sequence[str]) -> str:
    """Returns at most three names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def over_whom(scores: Scores | None) -> str:
    """Returns over whom a mean is, such as `2 of 3 clients, without west`; empty if it is over all."""
    return f"{scores.over} clients, without {names_of(scores.missing)}" if scores and scores.over else ""


def partial_means(row: Evaluation | None) -> list[str]:
    """Returns a sentence about the means of an evaluation that are not over all clients."""
    titles: dict[str, list[str]] = {}
    for split, (title, _) in PERSONAL.items():
        if row is not None and (over := over_whom(row.scores.get(split))):
            titles.setdefault(over, []).append(title)
    return [f"{' and '.join(names)}: a mean over {over}." for over, names in titles.items()]


@dataclass(frozen=True)
class Traffic:
    """The bytes that crossed the network."""

    up: int
    down: int
    rounds: int


def pretraining_of(run: Run, summary: Mapping[str, Any]) -> Traffic | None:
    """Returns what the FedAvg pretraining of the backbone sent: whole models, both ways. None without one."""
    told = summary.get("pretrain")
    if told is None and (rows := RunFolder(run.path / "pretrain").evaluations()):
        told = {"bytes_up": rows[-1].bytes_up, "bytes_down": rows[-1].bytes_down, "round": rows[-1].round}
    return Traffic(told["bytes_up"], told["bytes_down"], told["round"]) if told else None


def worth_of(run: Run) -> Worth:
    """Returns what the scores of a finished run are worth."""
    return Worth(_summary(run), run.folder.about().get("clients", {}))


class Facts:
    """What a report says about one run."""

    def __init__(self, run: Run, label: str, holdings: Holdings | None, problem: str) -> None:
        self.label, self.folder, self.config = label, run.path.name, run.config
        self.method, self.seed = run.config.method_name, run.config.run.seed
        settings = {section: of for section, of in run.config.as_dict().items() if section != "run"}
        self.kind = settings, run.folder.about().get("split")  # what the seeds of a method have in common
        self.holdings, self.problem = holdings, problem  # which client has which data, or why that is not known
        self.rows, summary = run.folder.evaluations(), _summary(run)
        # A stopped run has fewer rounds than planned. A summary that is older than the last row is of an earlier end.
        self.finished = bool(summary) and summary["round"] >= (self.rows[-1].round if self.rows else 0)
        newest = self.rows[-1] if self.rows else None
        self.last = Evaluation.read(summary) if self.finished else newest
        self.mishaps, self.worth = [*partial_means(self.last), *mishaps(self.rows)], worth_of(run)
        self.data = str(summary.get("data") or run.config.data.name)
        auc = summary["metric"] == "auc" if "metric" in summary else holdings and run.federation.multilabel
        self.unit = "AUC" if auc else "accuracy"
        self.guarantee = Guarantee.read(summary) if self.finished else None
        self.drift = drift_of(summary) if self.finished else None
        self.shifts = Shifts.read(summary["shifts"]) if self.finished and "shifts" in summary else None
        self.sizes = _sizes(run, dict(summary.get("parameters", {})), holdings)
        self.further = further_scores(run.path)
        environment = {f"{k} version": str(v) for k, v in summary.get("versions", {}).items()}
        environment |= {k: str(summary[k]) for k in ("device", "threads") if k in summary}
        self.pretrain = pretraining_of(run, summary)
        self.joined: dict[str, Any] = summary.get("joined", {})  # the scores of a client that joined a run
        self.environment: dict[str, str] = environment if self.finished else {}

    @property
    def clients(self) -> tuple[str, ...]:
        return self.holdings.clients if self.holdings else tuple(self.per_client("local_test"))

    @property
    def share(self) -> float | None:
        """Returns the percentage of the full model that a client sends per round."""
        sent, full = self.sizes.get("communicated"), self.sizes.get("full")
        return None if sent is None or not full else 100 * sent / full

    @property
    def planned(self) -> int:
        """Returns how often a client was asked to take part: clients per round, over all rounds."""
        return (self.last.round if self.last else 0) * (self.config.train.cohort or len(self.clients))

    @property
    def took_part(self) -> int:
        """Returns how often a client took part; an older version did not count it."""
        return (self.last.took_part if self.last else 0) or self.planned

    @property
    def upload(self) -> float | None:
        """Returns the measured bytes that a client sends per round in which it takes part."""
        return self.last.bytes_up / self.took_part if self.last and self.took_part else None

    def score(self, split: str) -> tuple[float | None, float | None]:
        if split == "global_model":
            return mean_and_std(self.last, split)
        scores = self._scores(split)
        return (scores.mean, scores.std) if scores else (None, None)

    def over(self, split: str) -> str:
        """Returns over how many clients the mean is; empty if it is over all."""
        scores = self.last.scores.get(split) if self.last else None
        return scores.over if scores else ""

    def per_client(self, split: str) -> dict[str, float | None]:
        scores = self._scores(split)
        return scores.per_client if scores else {}

    def _scores(self, split: str) -> Scores | None:
        """Returns the scores of the last evaluation, or those measured later of the same round."""
        later = self.further.get(split)
        if self.last is None or split in self.last.scores:
            return self.last.scores[split] if self.last else None
        return later.scores if later and later.round == self.last.round else None

    @property
    def state(self) -> str:
        """Returns how far an unfinished run is; empty for a finished one."""
        if self.finished:
            return ""
        return f"unfinished: {self.last.round if self.last else 0} of {self.config.train.rounds} rounds"

    @property
    def guard(self) -> str:
        """Returns a sentence about the rounds in which the guard accepted the distilled adapter."""
        tried, used = distillations(self.last, self.rows)
        if self.last is None or not tried:
            return "No distillation."
        if self.config.distill.guard == "none":
            often = f"{tried}" if used == tried else f"{used} of {tried}"
            return f"Distilled in {often} rounds, without a guard."
        accepted = self.last.accepted
        share = f"{100 * accepted / tried:.0f} %"
        return f"The guard accepted the distilled adapter in {accepted} of {tried} rounds ({share})."


def gather_facts(runs: Sequence[Run]) -> list[Facts]:
    """Returns the facts of each run. Runs on the same data share one reading of it."""
    known: list[tuple[object, tuple[Holdings | None, str]]] = []
    facts = []
    for run, label in zip(runs, _labels(runs), strict=True):
        data = run.config.data, run.folder.about().get("split")  # runs on data from Python have equal settings
        shared = next((holdings for other, holdings in known if other == data), None)
        if shared is None or shared[0] is None:
            shared = _holdings(run)
            known.append((data, shared))
        facts.append(Facts(run, label, *shared))
    return facts


def _labels(runs: Sequence[Run]) -> list[str]:
    """Returns the method's name; with the folder's where a method comes twice; then with a number."""
    times = Counter(r.config.method_name for r in runs)
    names = [r.config.method_name for r in runs]
    names = [n if times[n] == 1 else f"{n} ({r.path.name})" for n, r in zip(names, runs, strict=True)]
    again = Counter(names)
    return [n if again[n] == 1 else f"{n} #{i}" for i, n in enumerate(names, 1)]


def _holdings(run: Run) -> tuple[Holdings | None, str]:
    try:
        return Holdings.of(run.federation), ""
    except InputError as error:
        return None, str(error)


def _summary(run: Run) -> dict[str, Any]:
    """Returns the run's summary, or nothing if it has none yet."""
    try:
        return run.summary
    except Damaged:
        raise
    except InputError:
        return {}


def _sizes(run: Run, known: dict[str, int], holdings: Holdings | None) -> dict[str, int]:
    """Returns `trained`, `communicated`, `communicated_buffers` and `full`: what is known or can be counted."""
    if holdings is None or {"full", "trained"} <= known.keys():
        return known
    model, classes = run.config.model, len(holdings.classes)
    size = run.federation.images.shape[-1]
    try:
        counted = method_sizes(
            run.config.method_name, model.backbone, classes, size, model.strategy(), model.adapt_from
        )
        full = sum(p.numel() for p in network_of(model.backbone, classes, size).net.parameters())
        return {**counted, "full": full, **known}
    except InputError:
        return known  # of a network or method from Python, which is not here
