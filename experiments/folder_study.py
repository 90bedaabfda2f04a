"""Chooses the settings of the `folder` preset on validation data, by the rule in docs/folder.md.

python -m experiments.folder_study sites SHARED SITES     # SHARED has the npz files of the X-rays and PACS
python -m experiments.folder_study choose SITES LOG       # writes a line per setting and each step's winner

A setting whose line is in the log is not run again.
"""

from __future__ import annotations

import io
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageFilter
from sklearn.datasets import load_digits

import perada
from perada.adapters import Residual
from perada.client.scores import logits_on, own_logits, score
from perada.data import Federation
from perada.errors import InputError
from perada.lanes.machine import keep_memory
from perada.models import backbone

SITES, EACH = ("north", "south", "west"), 180  # images per site
SHARES = (0.2, 0.5, 0.8)  # of a site's X-rays that show a finding
DOMAINS = ("art_painting", "cartoon", "photo")
SETS = ("xrays", "pacs", "digits")
Sample = tuple[str, str, Image.Image]  # site, class, image


def xrays(shared: Path) -> Iterator[Sample]:
    """Yields X-rays with and without a finding; a patient is at one site, with one image."""
    file = np.load(shared / "nih_cxr14_part001_64.npz")
    images, finding, patient = file["x"], file["y"].any(1), file["patient"]
    order = np.random.default_rng(0).permutation(len(images))
    first = {int(patient[i]): i for i in order}  # one image of each patient
    pools = {flag: iter([i for i in first.values() if finding[i] == flag]) for flag in (False, True)}
    for site, share in zip(SITES, SHARES, strict=True):
        for flag, name, count in ((True, "finding", share), (False, "none", 1 - share)):
            for i in itertools.islice(pools[flag], round(EACH * count)):
                yield site, name, Image.fromarray(images[i])


def pacs(shared: Path) -> Iterator[Sample]:
    """Yields paintings, cartoons and photographs of seven classes, a domain per site."""
    file = np.load(shared / "pacs_64.npz")
    data, ends, domains = file["jpeg"].tobytes(), file["offset"], file["domains"].tolist()
    for site in DOMAINS:
        index = np.flatnonzero(file["domain"] == domains.index(site))
        for i in np.random.default_rng(0).permutation(index)[:EACH]:
            yield site, str(file["classes"][file["y"][i]]), Image.open(io.BytesIO(data[ends[i] : ends[i + 1]]))


def digits(shared: Path) -> Iterator[Sample]:
    """Yields digits of 32 pixels: scanned plainly, in white on black, or dark and blurred."""
    data = load_digits()
    for label in range(10):
        those = data.images[data.target == label]
        for i, site in enumerate(SITES):
            for digit in those[18 * i : 18 * (i + 1)]:
                image = Image.fromarray(np.rint(255 - digit * (255 / 16)).astype(np.uint8))
                image = image.resize((32, 32), Image.Resampling.BICUBIC)
                if site == "south":
                    image = image.point(lambda p: 255 - p)
                elif site == "west":
                    image = image.filter(ImageFilter.GaussianBlur(1.5)).point(lambda p: p // 2)
                yield site, str(label), image


def write_sites(shared: Path, out: Path) -> None:
    """Writes all sets as SITES/SET/site/class/image.png."""
    for name, samples in (("xrays", xrays(shared)), ("pacs", pacs(shared)), ("digits", digits(shared))):
        count = 0
        for site, label, image in samples:
            path = out / name / site / label / f"{count:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
            count += 1
        print(f"{name}: {count} images")


def trained(sites: Path, name: str, s: Mapping[str, Any]) -> tuple[float, float, int]:
    """Returns Local and Global on validation data after the training, and the bytes that a client sends per round."""
    fed = Federation.from_folder(sites / name, size=s["size"], val=0.3, test=0.0)
    made = backbone("efficientnet_lite0", len(fed.classes))
    made.load("package")
    assert made.mean is not None
    assert made.std is not None
    fed = replace(fed, mean=made.mean, std=made.std)
    exp = perada.Experiment(
        made.net,
        fed,
        perada.methods.PerAda(),
        adapter=Residual(where=f"{s['place']}_conv$"),
        adapt_from=f"stage{s['stage']}",
        head="fc",
        train=perada.Train(rounds=s["rounds"], epochs=2, batch=s["batch"], lr=s["lr"]),
        distill=perada.Distill(steps=0),
    )
    for _ in range(s["rounds"]):
        exp.round()
    fed, lanes = exp.federation, exp.personal()
    own = own_logits(exp.model, lanes, fed, [c.val for c in fed.clients])
    local = [score(logits, fed.labels(c.val)) for logits, c in zip(own, fed.clients, strict=True)]
    everybody = [score(logits, fed.labels(fed.val)) for logits in logits_on(exp.model, lanes, fed, fed.val)]
    means = [float(np.mean([value for value in values if value is not None])) for values in (local, everybody)]
    return means[0], means[1], exp.now.broadcast.bytes_per_lane()


START = {"place": "project", "stage": 6, "lr": 0.03, "size": 96, "batch": 16, "rounds": 5}
PLACES: list[dict[str, Any]] = [
    {"place": "project", "stage": 6},
    {"place": "project", "stage": 7},
    {"place": "depthwise", "stage": 7},
]
STEPS: list[list[dict[str, Any]]] = [
    [{**where, "lr": lr} for where in PLACES for lr in (0.03, 0.1)],
    [{"size": size} for size in (64, 96, 128)],
    [{"rounds": rounds} for rounds in (5, 10)],
]
NEAR = 2.0  # points: settings so near to the best one count as equal


def measured(sites: Path, setting: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a setting on all sets; returns its line of the log."""
    began = time.monotonic()
    each = {name: trained(sites, name, setting) for name in SETS}
    return {
        "setting": setting,
        "score": round(float(np.mean([run[:2] for run in each.values()])), 2),
        "bytes": max(run[2] for run in each.values()),
        "local, global": {name: [round(value, 1) for value in run[:2]] for name, run in each.items()},
        "seconds": round(time.monotonic() - began),
    }


def choose(sites: Path, log: Path) -> None:
    """Runs the steps; writes every setting's scores and each step's winner."""
    best: dict[str, Any] = dict(START)
    known = [json.loads(line) for line in log.read_text().splitlines()] if log.is_file() else []

    def write(line: dict[str, Any]) -> None:
        if line not in known:
            known.append(line)
            with log.open("a") as file:
                file.write(json.dumps(line) + "\n")

    for step in STEPS:
        rows = []
        for change in step:
            setting = {**best, **change}
            line = next((row for row in known if row.get("setting") == setting), None) or measured(sites, setting)
            write(line)
            rows.append(line)
        near = [row for row in rows if row["score"] >= max(r["score"] for r in rows) - NEAR]
        first = min(near, key=lambda r: (r["bytes"], r["setting"]["size"], r["setting"]["rounds"], -r["score"]))
        best = first["setting"]
        write({"winner": best})


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["sites"] and len(arguments) == 3:
        write_sites(Path(arguments[1]), Path(arguments[2]))
    elif arguments[:1] == ["choose"] and len(arguments) == 3:
        choose(Path(arguments[1]), Path(arguments[2]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    keep_memory()
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"error: {error}")
