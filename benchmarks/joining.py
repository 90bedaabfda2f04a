"""Holds sites out of a training, lets each join the finished run, and compares the models that it can have.

    python benchmarks/joining.py digits [--seeds 3] [--held 4]
    python benchmarks/joining.py pacs --data pacs_64.npz --weights resnet18.safetensors [--seeds 3] [--images 400]

digits: the preset's 20 clients, of which the last `held` stay out of the training. pacs: four domains, each held out
in turn; images scaled to 32 pixels, a ResNet-18 with the weights of a file, no distillation. A seed changes the split,
too. A site's models: `personal` (joined: the method's own client update from the global adapter), `alone` (Standalone:
a whole model from the same weights, for as many rounds), and `global` (the global adapter as it is). Scores are
accuracies on the site's own test images; it also checks that no file of the run changed. Prints a Markdown table.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import perada
from perada.client.interval import wilson

SHARED = {"data.name": "folder", "data.partition": "site", "run.shifts": False, "run.eval_every": 30}
PACS = {"model.backbone": "resnet18", "data.normalise": "imagenet", "train.rounds": 10, "train.epochs": 1}
PACS |= {"train.batch": 32, "train.lr": 0.05, "method.lam": 0.1, "data.val": 0.1, "data.test": 0.2}
KINDS = {"personal": "personal", "standalone": "alone", "global": "global"}
Arrays = Mapping[str, np.ndarray[Any, Any]]  # images, labels, classes, site


def digits(seed: int, held: int) -> tuple[Arrays, list[list[str]]]:
    """Returns the digits with their owners, and the groups of clients to hold out together."""
    fed = perada.Federation.named("digits", seed=seed, alpha=0.1, clients=20, val=0.15, test=0.25)
    owners = np.full(len(fed.targets), "", dtype="<U9")
    for client in fed.clients:
        owners[np.concatenate([client.train, client.val, client.test])] = client.name
    own = owners != ""
    arrays = {"images": fed.images.numpy()[own, 0], "labels": fed.targets.numpy()[own], "site": owners[own]}
    return {**arrays, "classes": np.array(fed.classes)}, [[c.name for c in fed.clients[-held:]]]


def pacs(seed: int, file: Path, images: int) -> tuple[Arrays, list[list[str]]]:
    """Returns so many images of each domain at 32 pixels, and the domains, each to be held out alone."""
    z = np.load(file)
    data, ends, domain = z["jpeg"].tobytes(), z["offset"], z["domain"]
    rng = np.random.default_rng(seed)
    chosen = np.concatenate([np.sort(rng.permutation(np.flatnonzero(domain == d))[:images]) for d in range(4)])
    opened = [Image.open(io.BytesIO(data[ends[i] : ends[i + 1]])) for i in chosen]
    pixels = [image.resize((32, 32), Image.Resampling.BICUBIC) for image in opened]
    names = z["domains"]
    arrays = {"images": np.stack([np.asarray(p) for p in pixels]), "labels": z["y"][chosen].astype(np.int64)}
    return {**arrays, "site": names[domain[chosen]], "classes": z["classes"]}, [[str(n)] for n in names]


def digests(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def joins(kind: str, arrays: Arrays, groups: list[list[str]], seed: int, weights: str, home: Path) -> Iterator[Any]:
    """Trains without each group of sites, and yields the scores of each of its sites after joining."""
    for number, held in enumerate(groups):
        stays = ~np.isin(arrays["site"], held)
        rest = {k: v if k == "classes" else v[stays] for k, v in arrays.items()}
        np.savez(home / "others.npz", **rest)
        np.savez(home / "all.npz", **arrays)
        settings: dict[str, Any] = {**SHARED, "data.root": str(home / "others.npz"), "data.seed": seed}
        settings |= {**PACS, "model.weights": weights} if kind == "pacs" else {"data.val": 0.15, "data.test": 0.25}
        preset = "folder" if kind == "pacs" else "digits"
        run = perada.train(preset, set=settings, seed=seed, out=home / f"run-{number}", overwrite=True)
        before = digests(run.path)
        for name in held:
            new = perada.join(run.path, data=home / "all.npz", name=name, out=home / f"{name}-{number}", overwrite=True)
            yield {"seed": seed, "site": name, **new.summary["joined"]}
        assert digests(run.path) == before, "the others' files changed"


def table(rows: list[dict[str, Any]], by: str) -> Iterator[str]:
    """Yields a row per value of a key, and one of all: accuracies over all test images, with 95% intervals."""
    yield f"| {by} | test images | " + " | ".join(KINDS.values()) + " |"
    yield "| --- | ---: |" + " ---: |" * len(KINDS)
    groups = list(dict.fromkeys(row[by] for row in rows))
    for title, of in [*((str(g), [r for r in rows if r[by] == g]) for g in groups), ("all", rows)]:
        images, cells = sum(r["test_images"] for r in of), []
        for kind in KINDS:
            right = round(sum(r[kind]["score"] * r["test_images"] for r in of) / 100)
            low, high = wilson(right, images) or (0.0, 0.0)
            cells.append(f"{100 * right / images:.1f} ({low:.1f} to {high:.1f})")
        yield f"| {title} | {images} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("kind", choices=["digits", "pacs"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held", type=int, default=4)
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--out", type=Path, help="also all numbers, as JSON")
    words = parser.parse_args()
    if words.kind == "pacs" and not (words.data and words.weights):
        parser.error("pacs needs --data and --weights")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for seed in range(words.seeds):
            made = digits(seed, words.held) if words.kind == "digits" else pacs(seed, words.data, words.images)
            weights = str(words.weights.absolute()) if words.weights else ""
            for row in joins(words.kind, *made, seed, weights, Path(home)):
                rows.append(row)
                print(json.dumps(row), flush=True)
    print("\n".join(table(rows, "site" if words.kind == "pacs" else "seed")))
    if words.out:
        words.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
