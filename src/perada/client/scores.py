"""Predictions of many lanes on many images, and their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.federation import Federation
from ..data.source import Indices, Pixels
from ..lanes import Front, LaneModel, State

CHUNK = {"cpu": 4096, "cuda": 32768}  # images × lanes in one forward pass; fewer where images are larger than 32×32
# A pass has a multiple of this many images, or a power of two: for a new number a library chooses its kernels again.
WHOLE = {"cuda": 512}


def _chunk(lanes: int, images: Tensor, device: torch.device) -> int:
    """Returns how many images per lane are in one forward pass."""
    pixels, most = images.shape[-2] * images.shape[-1], CHUNK.get(device.type, CHUNK["cpu"])
    return max(1, min(most, most * 1024 // pixels) // lanes)


def majority_scores(federation: Federation) -> dict[str, Scores]:
    """Returns what each client scores by always naming its most frequent training class: `local_test`, `global_test`.

    Nothing for multi-label data, where a constant has no AUC.
    """
    if federation.multilabel or not federation.clients:
        return {}
    counts, targets = federation.label_counts(), federation.targets.cpu().numpy()
    common = {c.name: int(row.argmax()) for c, row in zip(federation.clients, counts, strict=True)}

    def share(label: int, index: Indices) -> float | None:
        return 100.0 * float((targets[index] == label).mean()) if len(index) else None

    return {
        "local_test": Scores({c.name: share(common[c.name], c.test) for c in federation.clients}),
        "global_test": Scores({c.name: share(common[c.name], federation.test) for c in federation.clients}),
    }


@torch.no_grad()
def logits_of(model: LaneModel, lanes: State, federation: Federation, images: Tensor) -> Tensor:
    """Returns every lane's logits on every image (uint8 `[n, C, H, W]`), `[K, n, classes]`."""
    dtype = next(iter(lanes.tensors())).dtype
    return _in_parts(model, lanes, federation, images, lambda some: federation.prepare(some.to(model.device), dtype))


@torch.no_grad()
def logits_on(model: LaneModel, lanes: State, federation: Federation, index: Indices) -> Tensor:
    """Returns `logits_of` for images of the federation, by index."""
    dtype = next(iter(lanes.tensors())).dtype
    return _in_parts(model, lanes, federation, torch.from_numpy(index), lambda some: federation.inputs(some, dtype))


def _in_parts(
    model: LaneModel, lanes: State, federation: Federation, samples: Tensor, inputs: Callable[[Tensor], Front]
) -> Tensor:
    """Returns every lane's logits, some samples after the other. inputs: makes what the model takes of some."""
    if len(samples) == 0:
        return torch.zeros(lanes.lanes, 0, len(federation.classes), device=model.device)
    lanes, shape = model.rounded(lanes), samples if samples.dim() > 1 else federation.images
    size, out = _chunk(lanes.lanes, shape, model.device), []
    whole = min(WHOLE.get(model.device.type, 1), 1 << size.bit_length() - 1)
    for part in torch.split(samples, size - size % whole):
        more = -len(part) % min(whole, 1 << (len(part) - 1).bit_length())
        filled = torch.cat([part, part[:1].expand(more, *part.shape[1:])]) if more else part
        shared = inputs(filled)
        logits = model.on_all(lanes, model.front(shared) if isinstance(shared, Tensor) else shared)
        out.append(logits[:, : len(part)])
    return torch.cat(out, 1)


@torch.no_grad()
def own_logits(model: LaneModel, lanes: State, federation: Federation, indices: Sequence[Indices]) -> list[Tensor]:
    """Returns the logits of lane k on its own images `indices[k]`: K tensors `[n_k, classes]`."""
    if lanes.lanes == 1:
        return [logits_on(model, lanes, federation, i)[0] for i in indices]
    dtype = next(iter(lanes.tensors())).dtype
    longest = max(1, *map(len, indices))
    size = _chunk(lanes.lanes, federation.images, model.device)
    padded = np.stack([np.resize(i, longest) if len(i) else np.zeros(longest, np.int64) for i in indices])
    out = []
    for part in torch.split(torch.from_numpy(padded), size, 1):
        out.append(model(lanes, federation.inputs(part.flatten(), dtype)))
    logits = torch.cat(out, 1)
    return [logits[k, : len(i)] for k, i in enumerate(indices)]


def score(logits: Tensor, targets: Tensor) -> float | None:
    """Returns accuracy, or macro AUC for multi-label targets, in percent; None where it is undefined.

    logits: `[n, classes]`. A label with one class only has no AUC and is left out of the mean.
    """
    if len(targets) == 0:
        return None
    if not targets.is_floating_point():  # a prediction that is not finite is wrong
        right = (logits.argmax(-1) == targets) & logits.isfinite().all(-1)
        return 100.0 * float(right.double().mean())
    return _percent(label_areas(logits, targets))


def label_areas(logits: Tensor, targets: Tensor) -> list[float | None]:
    """Returns each label's area under the ROC curve, on the samples where it is known.

    None with one class only, or where a logit is not finite.
    """
    from sklearn.metrics import roc_auc_score  # slow to import, and only AUC needs it

    columns = known_columns(logits, targets)
    return [None if column is None else float(roc_auc_score(*column)) for column in columns]


Column = tuple[NDArray[np.float64], NDArray[np.float64]]  # of one label: the truth, 0 or 1, and the logits


def known_columns(logits: Tensor, targets: Tensor) -> list[Column | None]:
    """Returns each label's samples where it is known; None with one class only, or where a logit is not finite."""
    predicted, truth = logits.double().cpu().numpy(), targets.double().cpu().numpy()
    columns: list[Column | None] = []
    for guess, label in zip(predicted.T, truth.T, strict=True):
        known = ~np.isnan(label)
        both = 0 < label[known].sum() < known.sum()
        columns.append((label[known], guess[known]) if both and np.isfinite(guess).all() else None)
    return columns


def best_thresholds(logits: Tensor, targets: Tensor) -> list[float | None]:
    """Returns per label the probability from which it counts as present: sensitivity + specificity are largest there.

    It lies halfway between two samples' probabilities. None where no threshold is better than chance.
    """
    return [None if column is None else _best_threshold(*column) for column in known_columns(logits, targets)]


def _best_threshold(truth: NDArray[np.float64], logits: NDArray[np.float64]) -> float | None:
    shares = 1 / (1 + np.exp(-logits.clip(-700, 700)))
    levels = np.unique(shares)
    between = (levels[1:] + levels[:-1]) / 2
    present, absent = np.sort(shares[truth == 1]), np.sort(shares[truth == 0])
    missed = np.searchsorted(present, between) / len(present)  # the share of the present that lies below
    right = np.searchsorted(absent, between) / len(absent)
    gain = right - missed
    return float(between[gain.argmax()]) if len(gain) and gain.max() > 0 else None


@dataclass(frozen=True)
class Scores:
    """One score per client, with their mean and standard deviation over clients, in percent.

    per_label: for multi-label data, each label's mean AUC over the clients where it is defined.
    """

    per_client: dict[str, float | None]
    per_label: dict[str, float | None] | None = None

    @property
    def values(self) -> NDArray[np.float64]:
        return np.array([v for v in self.per_client.values() if v is not None], np.float64)

    @property
    def mean(self) -> float | None:
        return float(self.values.mean()) if len(self.values) else None

    @property
    def std(self) -> float | None:
        return float(self.values.std()) if len(self.values) else None

    @property
    def missing(self) -> tuple[str, ...]:
        """Returns the clients that have no score, so that the mean is not over them."""
        return tuple(name for name, value in self.per_client.items() if value is None)

    @property
    def over(self) -> str:
        """Returns over how many clients the mean is, such as `2 of 3`; empty if it is over all, or there is none."""
        known, clients = len(self.values), len(self.per_client)
        return f"{known} of {clients}" if 0 < known < clients else ""

    @classmethod
    def read(cls, written: Mapping[str, Any]) -> Scores:
        """Returns the scores that `as_dict` wrote."""
        return cls(dict(written["per_client"]), written.get("per_label"))

    def as_dict(self) -> dict[str, object]:
        per_label = {} if self.per_label is None else {"per_label": self.per_label}
        missing = {"missing": list(self.missing)} if self.over else {}
        return {"mean": self.mean, "std": self.std, **missing, "per_client": self.per_client, **per_label}


def scores_of(federation: Federation, logits: Sequence[Tensor], targets: Sequence[Tensor]) -> Scores:
    """Returns a score per client, from its model's logits `[n, classes]` on images with these targets."""
    names = [c.name for c in federation.clients]
    if not federation.multilabel:
        return Scores({n: score(a, t) for n, a, t in zip(names, logits, targets, strict=True)})
    areas = [label_areas(a, t) for a, t in zip(logits, targets, strict=True)]
    per_client = {name: _percent(row) for name, row in zip(names, areas, strict=True)}
    columns = zip(federation.classes, zip(*areas, strict=True), strict=True)
    return Scores(per_client, {label: _percent(column) for label, column in columns})


def _percent(areas: Iterable[float | None]) -> float | None:
    """Returns the mean of the defined areas in percent."""
    defined = [a for a in areas if a is not None]
    return 100.0 * float(np.mean(defined)) if defined else None


def personal_thresholds(model: LaneModel, lanes: State, federation: Federation) -> dict[str, dict[str, float | None]]:
    """Returns the clients' thresholds of all labels, chosen on their own validation data."""
    indices = [c.val for c in federation.clients]
    logits = own_logits(model, lanes, federation, indices)
    return {
        c.name: dict(zip(federation.classes, best_thresholds(own, federation.labels(c.val)), strict=True))
        for c, own in zip(federation.clients, logits, strict=True)
    }


def personal_scores(
    model: LaneModel, lanes: State, federation: Federation, splits: Sequence[str] = ("local", "val", "global")
) -> dict[str, Scores]:
    """Returns the scores of the clients' own models: `local_test` and `local_val` (own data), `global_test` (all
    clients' test data), and `server_val` (split "server": the labelled data that the server holds back).

    `lanes` has one lane per client, or one lane that all share.
    """
    clients, out = federation.clients, dict[str, Scores]()

    def on_own(indices: list[Indices]) -> Scores:
        logits = own_logits(model, lanes, federation, indices)
        return scores_of(federation, logits, [federation.labels(i) for i in indices])

    def on_all(index: Indices) -> tuple[list[Tensor], Tensor]:
        logits = logits_on(model, lanes, federation, index).expand(len(clients), -1, -1)
        return list(logits), federation.labels(index)

    if "val" in splits:
        out["local_val"] = on_own([c.val for c in clients])
    if "server" in splits:
        logits, targets = on_all(federation.server_val)
        out["server_val"] = scores_of(federation, logits, [targets] * len(clients))
    if "global" in splits:
        logits, targets = on_all(federation.test)
        out["global_test"] = scores_of(federation, logits, [targets] * len(clients))
        if "local" in splits:  # a client's own test data are a slice of all clients'
            ends = np.cumsum([len(c.test) for c in clients])
            slices = [slice(int(e) - len(c.test), int(e)) for e, c in zip(ends, clients, strict=True)]
            own = [logits[k][s] for k, s in enumerate(slices)]
            out["local_test"] = scores_of(federation, own, [targets[s] for s in slices])
    elif "local" in splits:
        out["local_test"] = on_own([c.test for c in clients])
    return out


def scores_on(model: LaneModel, lanes: State, federation: Federation, sets: Iterable[tuple[Pixels, Tensor]]) -> Scores:
    """Returns the scores of every client's model on other test sets (`data.named_sets`), as the mean over them."""
    return mean_scores(federation, all_scores_on(model, [lanes], federation, sets)[0])


def all_scores_on(
    model: LaneModel,
    several: Sequence[State],
    federation: Federation,
    sets: Iterable[tuple[Pixels, Tensor]],
    also: Callable[[Sequence[Tensor], Tensor], None] = lambda logits, targets: None,
) -> list[list[Scores]]:
    """Returns the scores on each test set for several states of lanes; makes each test set once.

    also: is shown the logits `[K, n, classes]` of each state on each test set, and the targets.
    """
    results: list[list[Scores]] = [[] for _ in several]
    for images, targets in sets:
        seen = [logits_of(model, lanes, federation, torch.from_numpy(images)) for lanes in several]
        for logits, scores in zip(seen, results, strict=True):
            every = logits.expand(len(federation.clients), -1, -1)
            scores.append(scores_of(federation, list(every), [targets] * len(every)))
        also(seen, targets)
    return results


def mean_scores(federation: Federation, sets: Sequence[Scores]) -> Scores:
    """Returns the mean of the scores on several test sets."""
    per_label = {n: _mean([s.per_label[n] for s in sets if s.per_label]) for n in sets[0].per_label or {}}
    per_client = {c.name: _mean([s.per_client[c.name] for s in sets]) for c in federation.clients}
    return Scores(per_client, per_label if federation.multilabel else None)


def _mean(values: Sequence[float | None]) -> float | None:
    """Returns the mean, or None if a value is undefined: a mean of fewer values cannot be compared."""
    known = [v for v in values if v is not None]
    return float(np.mean(known)) if len(known) == len(values) else None
