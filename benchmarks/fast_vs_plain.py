"""The fast path against the plain one on a GPU: one round of several methods in float64, 20 steps' losses in float32.

    python benchmarks/fast_vs_plain.py [--data FOLDER --weights FILE.safetensors]

The last line is what to hold the losses against: the plain path, started a ten-millionth apart. With random weights and
images of noise the two part as far as that; real CIFAR-10 (FOLDER/cifar10.npz or the official files) and a pretrained
ResNet-18 make a problem that is not chaotic. Without a GPU only that line is printed. CI has no GPU; there the kernels
run in Triton's interpreter and the recorded loop without recording (tests/lanes/test_kernels.py, test_replay.py).
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from rounds import made_up

import perada.data
from perada.config import resolve
from perada.data.batches import ClientBatches
from perada.lanes import layers, replay, sgd, train
from perada.simulate import Simulation, prepare
from perada.trainer import sample_loss

KERNELS, DEVICE = layers.fast_kernels, "cuda" if torch.cuda.is_available() else "cpu"
METHODS = ("perada-no-kd", "ditto", "fedbn", "fedrep", "pfedme", "apfl", "feddyn", "fedalt-adapter")
SMALL = {"data.clients": 60, "train.cohort": 3, "train.epochs": 1, "train.batch": 32, "distill.steps": 0}
FEDERATION: dict[Any, Any] = {}
GIVEN = {"model.weights": "random"}


def made(method: str, precision: str, fast: bool) -> Simulation:
    chosen = KERNELS if fast else lambda device: None
    layers.fast_kernels = train.fast_kernels = chosen  # type: ignore[assignment]
    replay.DEVICES = ("cuda",) if fast else ()
    settings = {"method.name": method, "run.device": DEVICE, "run.precision": precision}
    config = resolve("cifar10", {**SMALL, **GIVEN, **settings})
    sim = prepare(config, federation=FEDERATION.get(config.data))
    FEDERATION[config.data] = sim.federation
    return sim


def apart(a: Simulation, b: Simulation) -> float:
    """The largest norm-relative difference of any tensor between the two."""
    states = [(a.now.broadcast, b.now.broadcast), (a.now.kept, b.now.kept)]
    pairs = [(x[n], y[n]) for s, t in states for x, y in ((s.params, t.params), (s.buffers, t.buffers)) for n in x]
    return max(float((x - y).norm() / x.norm().clamp_min(1e-12)) for x, y in pairs)


def losses(fast: bool, nudge: float = 0.0) -> torch.Tensor:
    """The traces of 20 steps in float32, from a start that is moved by a relative `nudge`."""
    sim = made("perada-no-kd", "fp32", fast)
    clients, steps = sim.cohort(0), 20
    batches = ClientBatches(sim.federation, clients, [steps] * len(clients), 32, 0, 0, torch.float32)
    draw = torch.Generator().manual_seed(1)
    start = sim.model.initial(len(clients))
    start = start.map(lambda t: t * (1 + nudge * torch.randn(t.shape, generator=draw).to(t)))
    return sgd(sim.model, start, batches, sample_loss, [0.01] * len(clients), [steps] * len(clients)).trace.cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FOLDER")
    parser.add_argument("--weights", metavar="FILE")
    args = parser.parse_args()
    GIVEN.update({"data.root": args.data} if args.data else {})
    GIVEN.update({"model.weights": args.weights} if args.weights else {})
    if not args.data:
        perada.data.SOURCES["cifar10"] = made_up
    for method in METHODS if DEVICE == "cuda" else ():
        both = [made(method, "fp64", fast) for fast in (False, True)]
        for fast, sim in zip((False, True), both, strict=True):
            made(method, "fp64", fast)  # sets the path that is taken
            sim.step()
        print(f"{method:15} one round in float64: {apart(*both):.1e}", flush=True)
    plain = losses(False)
    if DEVICE == "cuda":
        print(
            f"losses of 20 steps in float32: at most {float((plain - losses(True)).abs().max()):.1e} apart", flush=True
        )
    moved = losses(False, 1e-7)
    print(f"the plain path, started 1e-7 apart: {float((plain - moved).abs().max()):.1e}", flush=True)


if __name__ == "__main__":
    main()
