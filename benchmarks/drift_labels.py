"""Measures predictions that notice drift on multi-label data: five labels of the handwritten digits, 10 skewed sites.

    python benchmarks/drift_labels.py [--seeds 3] [--rounds 15]

Prints the macro AUC in %, means over clients, of the personal models alone and when they notice drift.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

import perada
from perada.data import Federation
from perada.data.digits import digits, glyphs
from perada.models import backbone

LABELS = {
    "even": (0, 2, 4, 6, 8),
    "above 4": (5, 6, 7, 8, 9),
    "loop": (0, 6, 8, 9),
    "line": (1, 4, 7),
    "prime": (2, 3, 5, 7),
}


def federation(seed: int) -> Federation:
    """Returns 10 sites whose digits are skewed by Dirichlet(0.3)."""
    data, draw = digits(), np.random.default_rng(seed)
    targets = np.stack([np.isin(data.targets, digit) for digit in LABELS.values()], 1).astype(np.uint8)
    owner = np.empty(len(targets), np.int64)
    for digit in range(10):
        at = draw.permutation(np.flatnonzero(data.targets == digit))
        ends = (np.cumsum(draw.dirichlet([0.3] * 10)) * len(at)).astype(np.int64)
        owner[at] = np.searchsorted(ends[:-1], np.arange(len(at)), side="right")
    sites = {f"site-{k}": (data.images[owner == k], targets[owner == k]) for k in range(10) if (owner == k).sum() >= 30}
    return Federation.from_arrays(sites, classes=list(LABELS), val=0.2, test=0.3, seed=seed, meta_min=1)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--rounds", type=int, default=15)
    given = words.parse_args()
    import torch

    rows: dict[str, list[tuple[float, float]]] = {}
    for seed in range(given.seeds):
        made = backbone("resnet8", len(LABELS), seed)
        made.load("embedded")
        experiment = perada.Experiment(
            made.net,
            federation(seed),
            perada.methods.PerAda(),
            head=made.head,
            public=torch.from_numpy(glyphs()[:1024]),
            train=perada.Train(rounds=given.rounds, cohort=5, epochs=5, batch=16, lr=0.02),
            distill=perada.Distill(steps=30, batch=128, candidates=(5, 10, 20)),
            drift=perada.Drift(multilabel=True),
            seed=seed,
            device="cpu",
            eval_every=given.rounds,
        )
        with tempfile.TemporaryDirectory() as folder:
            run = experiment.run(Path(folder) / "run")
        found = run.drift_scores()
        for name in found.alone:
            alone, aware = found.alone[name].mean, found.aware[name].mean
            assert alone is not None
            assert aware is not None
            rows.setdefault(f"{name}, windows of {found.window}", []).append((alone, aware))
    for name, pairs in rows.items():
        alone, aware = np.array(pairs).T
        print(f"{name:32} {alone.mean():6.2f} -> {aware.mean():6.2f}   per seed {np.round(aware - alone, 2).tolist()}")


if __name__ == "__main__":
    main()
