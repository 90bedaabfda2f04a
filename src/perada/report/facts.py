"""What a report says about a run, read from its folder once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import Damaged, InputError
from ..methods import method_sizes
from ..models import count_groups

if TYPE_CHECKING:
    from ..config import Config
    from ..data import Federation
    from ..runs.run import Run

SCORES = {
    "local_test": ("Local-test", "each client's personal model on that client's own test images"),
    "global_test": ("Global-test", "each client's personal model on everybody's test images"),
    "shifted": ("Shifted", "the Global-test images corrupted in 19 ways (noise, blur, fog, ...), the mean"),
}
SERVER = ("Global model", "the one model the server sends out, on everybody's test images")


@dataclass(frozen=True)
class Holdings:
    """Who holds what."""

    classes: tuple[str, ...]
    clients: tuple[str, ...]
    counts: list[list[int]]  # training samples, [clients][classes]
    sizes: list[tuple[int, int, int]]  # train, val, test
    multilabel: bool


@dataclass(frozen=True)
class Facts:
    """One run. `last` is its newest evaluation, empty where there is none."""

    label: str
    folder: str
    config: Config
    data: str
    metric: str
    rows: list[dict[str, Any]]
    last: dict[str, Any]
    finished: bool
    sizes: dict[str, int]  # trained, communicated, communicated_buffers, full; empty where unknown
    holdings: Holdings | None
    problem: str  # why there are no holdings

    @property
    def unit(self) -> str:
        return "AUC" if self.metric == "auc" else "accuracy"

    @property
    def clients(self) -> tuple[str, ...]:
        if self.holdings:
            return self.holdings.clients
        return tuple((self.last.get("local_test") or {}).get("per_client", {}))

    @property
    def share(self) -> float | None:
        """Percent of the full model that a client sends a round."""
        sent, full = self.sizes.get("communicated"), self.sizes.get("full")
        return None if sent is None or not full else 100 * sent / full

    def mean(self, key: str) -> float | None:
        return finite(of(self.last, key, "mean"))

    def std(self, key: str) -> float | None:
        return finite(of(self.last, key, "std"))

    def per_client(self, key: str) -> dict[str, float | None]:
        found = of(self.last, key, "per_client") or {}
        return {name: finite(value) for name, value in found.items()}

    @property
    def server(self) -> float | None:
        return finite(of(self.last, "global_model", "global_test"))

    @property
    def state(self) -> str:
        """Empty for a finished run."""
        if self.finished:
            return ""
        return f"unfinished: {self.last.get('round', 0)} of {self.config.train.rounds} rounds"


def of(row: Mapping[str, Any], key: str, name: str) -> Any:
    return (row.get(key) or {}).get(name)


def finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def gather_facts(runs: Sequence[Run]) -> list[Facts]:
    """Runs on the same data share one reading of it."""
    known: list[tuple[object, tuple[Holdings | None, str]]] = []
    out = []
    for run, label in zip(runs, _labels(runs), strict=True):
        found = next((held for data, held in known if data == run.config.data), None)
        if found is None or found[0] is None:
            found = _holdings(run)
            known.append((run.config.data, found))
        out.append(_facts(run, label, *found))
    return out


def _labels(runs: Sequence[Run]) -> list[str]:
    """The method's name; where a method comes twice, the folder's too; then a number."""
    times = Counter(r.config.method_name for r in runs)
    names = [r.config.method_name for r in runs]
    names = [n if times[n] == 1 else f"{n} ({r.path.name})" for n, r in zip(names, runs, strict=True)]
    again = Counter(names)
    return [n if again[n] == 1 else f"{n} #{i}" for i, n in enumerate(names, 1)]


def _holdings(run: Run) -> tuple[Holdings | None, str]:
    try:
        held = run.federation
    except InputError as error:
        return None, str(error)
    return holdings_of(held), ""


def holdings_of(held: Federation) -> Holdings:
    sizes = [(len(c.train), len(c.val), len(c.test)) for c in held.clients]
    names = tuple(c.name for c in held.clients)
    return Holdings(tuple(held.classes), names, held.label_counts().tolist(), sizes, held.multilabel)


def _facts(run: Run, label: str, holdings: Holdings | None, problem: str) -> Facts:
    rows, last, finished = run.metrics, {}, False
    try:
        last = run.summary
        finished = last["round"] >= run.config.train.rounds
    except Damaged:
        raise
    except InputError:  # there is none yet
        pass
    metric = last.get("metric") or ("auc" if holdings and holdings.multilabel else "accuracy")
    return Facts(
        label=label,
        folder=run.path.name,
        config=run.config,
        data=str(last.get("data") or run.config.data.name),
        metric=metric,
        rows=rows,
        last=last if finished else (rows[-1] if rows else {}),  # a resumed run's summary is an old one
        finished=finished,
        sizes=_sizes(run, dict(last.get("parameters") or {}), holdings),
        holdings=holdings,
        problem=problem,
    )


def _sizes(run: Run, known: dict[str, int], holdings: Holdings | None) -> dict[str, int]:
    if holdings is None:
        return known
    backbone, classes = run.config.model.backbone, len(holdings.classes)
    if "full" not in known:
        known["full"] = count_groups(backbone, classes)["full"]["parameters"]
    return {**({} if "trained" in known else method_sizes(run.config.method_name, backbone, classes)), **known}
