"""Whole training rounds, and one recorded step by its number of lanes, on one GPU.

    python benchmarks/rounds.py --method perada-no-kd --precision bf16 --rounds 4 [--out FILE.json]

The `cifar10` preset (20 clients, Dir(0.1), 8 a round, 10 local epochs, batch 64, ResNet-18) on made-up images of
CIFAR-10's number and size, so that nothing has to be fetched: times do not depend on what the images show.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perada.data
from perada.config import resolve
from perada.data.federation import Source
from perada.simulate import Simulation, prepare


def made_up(options: object) -> Source:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 6000)
    rng.shuffle(labels)
    images = rng.integers(0, 256, (60000, 3, 32, 32), dtype=np.uint8)
    test = np.arange(60000) >= 50000
    return Source("made up", images, labels.astype(np.int64), tuple("0123456789"), (0.5,) * 3, (0.25,) * 3, test=test)


def timed(work: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def step_times(sim: Simulation, repeats: int = 5) -> dict[int, list[float]]:
    """Milliseconds of one recorded step, by lanes; `repeats` means of 20 steps."""
    loop = next(iter(sim.model.__dict__["replays"].values()))

    def some(width: int) -> None:
        loop.run.at.zero_()
        for _ in range(20):
            loop.step(width)

    widths = [w for w in (1, 2, 4, 8, 16, 32, 64) if w <= len(loop.run.finite)]
    loop.run.counts.fill_(1 << 30)
    loop.run.order.copy_(torch.arange(len(loop.run.order)))
    loop.batches.index.zero_()
    for width in widths:
        some(width)
    return {w: sorted(timed(lambda w=w: some(w)) / 20 * 1e3 for _ in range(repeats)) for w in widths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="perada-no-kd")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from perada.config import parse_setting

    perada.data.SOURCES["cifar10"] = made_up
    settings = {"method.name": args.method, "model.weights": "random", "distill.steps": 0, "run.device": "cuda"}
    settings |= {"run.precision": args.precision, **dict(parse_setting(s) for s in args.set)}
    sim = prepare(resolve("cifar10", settings))
    rounds = []
    for at in range(args.rounds):
        clients = sim.cohort(at)
        rounds.append(timed(sim.step))
        samples = [len(sim.federation.clients[c].train) for c in clients]
        print(f"round {at}: {rounds[-1]:.2f} s, training samples {sorted(samples)}", flush=True)
    evaluation = timed(sim.evaluate)
    print(f"evaluation: {evaluation:.2f} s", flush=True)
    steps = step_times(sim) if sim.model.__dict__.get("replays") else {}
    for width, found in steps.items():
        print(f"{width:3} lanes: {found[len(found) // 2]:.3f} ms [{found[0]:.3f}–{found[-1]:.3f}]", flush=True)
    if args.out:
        about = {"method": args.method, "precision": args.precision, "device": torch.cuda.get_device_name()}
        about |= {"torch": torch.__version__, "peak_gib": torch.cuda.max_memory_allocated() / 2**30}
        found_all = {**about, "rounds_s": rounds, "evaluation_s": evaluation, "step_ms": steps}
        args.out.write_text(json.dumps(found_all, indent=1) + "\n")


if __name__ == "__main__":
    main()
