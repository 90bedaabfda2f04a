"""Compares the fast path with the plain one on a GPU. In float64: one step's gradients, and one round of several
methods. In float32: the losses of 20 steps.

    python benchmarks/fast_vs_plain.py [--data FOLDER --weights FILE.safetensors]

The last line says how far the plain path is from itself when it starts a ten-millionth apart: compare the losses with
that. Without a GPU only that line is printed. CI has no GPU; there the kernels run in Triton's interpreter, and the
recorded loop without recording (tests/lanes/test_triton.py, test_replay.py).
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rounds import made_up

import perada.data
from perada.client.trainer import sample_loss
from perada.config import build, resolve
from perada.data.batches import ClientBatches
from perada.data.public import Chunks
from perada.experiment import Experiment
from perada.lanes import Gradient, Options, ops, replay, sgd
from perada.lanes.state import flattened

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
METHODS = ("perada", "perada-no-kd", "ditto", "fedbn", "fedrep", "pfedme", "apfl", "feddyn", "fedalt-adapter")
SMALL = {"data.clients": 60, "train.cohort": 3, "train.epochs": 1, "train.batch": 32}
SMALL |= {"distill.steps": 6, "distill.batch": 256, "distill.guard": "none"}
FEDERATION: dict[Any, Any] = {}
GIVEN = {"model.weights": "random"}


def path(fast_one: bool) -> None:
    ops.DEVICES = replay.DEVICES = ("cuda",) if fast_one else ()


def made(method: str, precision: str, fast_one: bool) -> Experiment:
    path(fast_one)
    settings = {"method.name": method, "run.device": DEVICE, "run.precision": precision}
    config = resolve("cifar10", {**SMALL, **GIVEN, **settings})
    sim = build(config, federation=FEDERATION.get(config.data))
    FEDERATION[config.data] = sim.federation
    if not fast_one and isinstance(sim.public, Chunks):
        sim.public.stems = None
    return sim


def apart(a: Experiment, b: Experiment) -> float:
    """The largest norm-relative difference of any tensor between the two."""
    states = [(a.now.broadcast, b.now.broadcast), (a.now.kept, b.now.kept)]
    pairs = [(x[n], y[n]) for s, t in states for x, y in ((s.params, t.params), (s.buffers, t.buffers)) for n in x]
    return max(float((x - y).norm() / x.norm().clamp_min(1e-12)) for x, y in pairs)


def batches_of(sim: Experiment, steps: int, dtype: torch.dtype) -> ClientBatches:
    clients = sim.sampled(0)
    return ClientBatches(sim.federation, clients, [steps] * len(clients), 32, 0, 0, dtype)


def gradients(fast_one: bool) -> dict[str, torch.Tensor]:
    """Of one step of three lanes, dropout on, in float64."""
    sim = made("perada-no-kd", "fp64", fast_one)
    lanes = torch.arange(3, device=DEVICE)
    batch = batches_of(sim, 1, torch.float64)(torch.zeros_like(lanes), lanes)
    start = flattened(sim.model.initial(3)) if fast_one else sim.model.initial(3)
    found, _ = Gradient(sim.model, batch, sample_loss, lanes, Options())(start)
    return found


def losses(fast_one: bool, nudge: float = 0.0) -> torch.Tensor:
    """The traces of 20 steps in float32, from a start that is moved by a relative `nudge`."""
    sim = made("perada-no-kd", "fp32", fast_one)
    draw, start = torch.Generator().manual_seed(1), sim.model.initial(3)
    start = start.map(lambda t: t * (1 + nudge * torch.randn(t.shape, generator=draw).to(t)))
    return sgd(sim.model, start, batches_of(sim, 20, torch.float32), sample_loss, [0.01] * 3, [20] * 3).trace.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--weights", metavar="FILE")
    args = parser.parse_args()
    GIVEN.update({"data.root": args.data} if args.data else {})
    GIVEN.update({"model.weights": args.weights} if args.weights else {})
    with tempfile.TemporaryDirectory() as folder:
        public = Path(folder) / "public.npz"
        images = np.random.default_rng(1).integers(0, 256, (2048, 32, 32, 3), dtype=np.uint8)
        np.savez(public, images=images, labels=np.zeros(len(images), np.int64))
        GIVEN["distill.data"] = str(public)
        if not args.data:
            perada.data.SOURCES["cifar10"] = made_up
        compare()


def compare() -> None:
    if DEVICE == "cuda":
        plain, quick = gradients(False), gradients(True)
        worst = max(float((quick[n] - g).norm() / g.norm().clamp_min(1e-12)) for n, g in plain.items())
        print(f"one step's gradients in float64: {worst:.1e}", flush=True)
        for method in METHODS:
            both = []
            for fast_one in (False, True):
                both.append(made(method, "fp64", fast_one))
                both[-1].round()
            print(f"{method:15} one round in float64: {apart(*both):.1e}", flush=True)
    before = losses(False)
    if DEVICE == "cuda":
        worst = float((before - losses(True)).abs().max())
        print(f"losses of 20 steps in float32: at most {worst:.1e} apart", flush=True)
    moved = float((before - losses(False, 1e-7)).abs().max())
    print(f"the plain path, started 1e-7 apart: {moved:.1e}", flush=True)


if __name__ == "__main__":
    main()
