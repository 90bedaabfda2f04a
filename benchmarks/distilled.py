"""Measures what one distillation does to the averaged adapter's weights, and to its running statistics.

    python benchmarks/distilled.py --data FOLDER --weights FILE [--rounds 4] [--epochs 1] [--set KEY=VALUE] [--out FILE]

It trains the `cifar10` preset without distillation for some rounds, then distils the last round's uploads once per
rate. It scores the plain average and the students on validation data only, each with the averaged running statistics
and with those of the public images. Scores are the clients' mean loss and accuracy (each on its own validation images),
and the same on images that the server holds back. A GPU is not needed: by default a round has one local epoch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from perada.client.scores import logits_on
from perada.client.trainer import sample_loss
from perada.config import build, parse_setting, resolve
from perada.data.federation import Indices
from perada.errors import InputError
from perada.experiment import Experiment
from perada.lanes import State, gather, mean
from perada.server.distill import Distill, distill

SETTINGS = {"data.min_per_class": 2, "data.server_val": 0.02, "method.name": "perada", "distill.steps": 60}
SETTINGS |= {"distill.candidates": [20], "distill.keep_stats": "student", "distill.size": 4096, "distill.batch": 512}


def scored(sim: Experiment, lanes: State, images: Indices) -> np.ndarray:
    """Loss and accuracy in percent of every lane, `[lanes, 2]`."""
    logits, targets = logits_on(sim.model, lanes, sim.federation, images), sim.federation.labels(images)
    losses = sample_loss(logits, targets.expand(lanes.lanes, *targets.shape)).mean(1)
    right = 100 * (logits.argmax(-1) == targets).double().mean(1)
    return torch.stack([losses.double(), right], 1).cpu().numpy()


def rows(sim: Experiment, lanes: State, clients: Sequence[int]) -> np.ndarray:
    """`[lanes, 4]`: at the clients, then at the server."""
    own = [scored(sim, lanes, val) for c in clients if len(val := sim.federation.clients[c].val)]
    return np.concatenate([np.mean(own, 0), scored(sim, lanes, sim.federation.server_val)], 1)


def trained(sim: Experiment, rounds: int) -> tuple[State, Sequence[int]]:
    """The last round's uploads, and whose they are."""
    for _ in range(rounds - 1):
        sim.round()
    clients = sim.sampled(sim.now.round)
    uploads, _ = sim.method.client_update(sim.trainer(clients), sim.now.broadcast, gather(sim.now.kept, clients))
    return uploads, clients


def measured(sim: Experiment, options: Distill, rounds: int, rates: Sequence[float]) -> list[dict[str, Any]]:
    uploads, clients = trained(sim, rounds)
    average, found = mean(uploads), []
    for rate in rates:
        chosen = replace(options, lr=rate)
        lanes, trace = distill(sim.model, average, uploads, sim.public, chosen, False, 0)
        lanes = gather(lanes, range(1, lanes.lanes))  # the first is the average with its own statistics
        kept = State(lanes.params, {n: b.expand(lanes.lanes, *b.shape[1:]) for n, b in average.buffers.items()})
        for statistics, some in (("average", kept), ("public", lanes)):
            for steps, row in zip(chosen.judged()[1:], rows(sim, some, clients).tolist(), strict=True):
                if steps or rate == rates[0]:
                    found.append({"lr": rate if steps else None, "steps": steps, "statistics": statistics, "row": row})
        print(f"lr {rate:g}: KL {float(trace[0]):.4f} at first, {float(trace[-1]):.4f} at last", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, metavar="FOLDER", help="with CIFAR-10 and CIFAR-100")
    parser.add_argument("--weights", required=True, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--rates", type=lambda text: [float(t) for t in text.split(",")], default=[1e-3, 1e-4])
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    given = {"data.root": args.data, "model.weights": args.weights, "train.epochs": args.epochs}
    config = resolve("cifar10", {**SETTINGS, **given, **dict(parse_setting(s) for s in args.set)})
    sim = build(config)
    sim.method = replace(sim.method, distils=False)  # until it is asked for
    found = measured(sim, config.distill, args.rounds, args.rates)
    table = Table("lr", "steps", "statistics", "clients' loss", "accuracy", "server's loss", "accuracy")
    for one in found:
        lr = "–" if one["lr"] is None else f"{one['lr']:g}"
        table.add_row(lr, str(one["steps"]), one["statistics"], *(f"{x:.2f}" for x in one["row"]))
    Console().print(table)
    if args.out:
        about = {"device": str(sim.model.device), "torch": torch.__version__, "rounds": args.rounds}
        args.out.write_text(json.dumps({**about, "epochs": args.epochs, "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
