"""Measures how long the data take, and whether a client's test data follow its training data.

    python benchmarks/data.py                      # corruptions on 1,000 crops of scikit-learn's photographs
    python benchmarks/data.py --cifar10 FOLDER     # the same on CIFAR-10, and the `cifar10` preset's split

Prints a table and, with --out, writes JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from perada.config import resolve
from perada.data import Federation, build_federation
from perada.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt, corrupted
from perada.data.partition import largest_remainder
from perada.lanes.machine import cores


def crops(count: int, size: int = 32) -> np.ndarray:
    from sklearn.datasets import load_sample_images

    photos, rng = load_sample_images().images, np.random.default_rng(0)
    out = np.empty((count, 3, size, size), np.uint8)
    for i in range(count):
        photo = photos[i % len(photos)]
        top, left = rng.integers(0, photo.shape[0] - size), rng.integers(0, photo.shape[1] - size)
        out[i] = photo[top : top + size, left : left + size].transpose(2, 0, 1)
    return out


def split_facts(federation: Federation) -> dict[str, Any]:
    """Sizes, and how far test counts are from the training proportions."""
    labels, classes = federation.targets.numpy(), len(federation.classes)
    off, apart = 0, []
    for c in federation.clients:
        train, test = (np.bincount(labels[part], minlength=classes) for part in (c.train, c.test))
        off = max(off, int(np.abs(test - largest_remainder(train.astype(float), len(c.test))).max()))
        if len(c.test) >= 200:
            apart.append(0.5 * float(np.abs(test / test.sum() - train / train.sum()).sum()))
    sizes = {name: sum(len(getattr(c, name)) for c in federation.clients) for name in ("train", "test", "val")}
    return {**sizes, "clients": len(federation.clients), "most_off": off, "worst_tv": max(apart), "tv_of": len(apart)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cifar10", type=Path, help="a folder with CIFAR-10")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    args = parser.parse_args()
    found: dict[str, Any] = {"cores": cores(), "torch": torch.__version__}
    images = crops(1000)
    if args.cifar10:
        config = resolve("cifar10", {"data.root": str(args.cifar10)})
        start = time.perf_counter()
        federation = build_federation(config.data, torch.device("cpu"))
        found["cifar10"] = {"seconds": time.perf_counter() - start, **split_facts(federation)}
        print(json.dumps(found["cifar10"]))
        images = federation.take(np.sort(federation.test)[:1000]).numpy()
    start = time.perf_counter()
    for _ in corrupted(images, list(CORRUPTIONS), SEVERITIES):
        pass
    found["all_95_seconds"] = time.perf_counter() - start
    print(f"19 × 5 corruptions of 1,000 images on {cores()} cores: {found['all_95_seconds']:.1f} s")
    found["mean_squared_difference"] = {
        name: [float(np.square(corrupt(images[:250], name, s).astype(float) - images[:250]).mean()) for s in SEVERITIES]
        for name in CORRUPTIONS
    }
    for name, row in found["mean_squared_difference"].items():
        print(f"{name:18}" + "".join(f"{value:9.1f}" for value in row))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
