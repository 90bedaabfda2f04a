"""Times whole training rounds, their parts, and one recorded step by its number of lanes.

    python benchmarks/rounds.py --method perada --precision bf16 --rounds 4 [--size 64] [--set KEY=VALUE] [--out FILE]

The `cifar10` preset (20 clients, Dir(0.1), 8 per round, 10 local epochs, batch 64, ResNet-18) trains on generated
images of CIFAR-10's number and size, with 50,000 public ones. Nothing has to be fetched, and times do not depend on
what images show. Each part is measured with a wait for the GPU at either end, so it is a little longer than without.

Recorded steps are timed on the GPU, one by one. The time of a round outside of them belongs to the host, the teachers
and the guard. It is more than the share in which the GPU waits for the host.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import perada.client.trainer
import perada.data
import perada.server.distill
from perada.config import build, parse_setting, resolve
from perada.data.federation import Source
from perada.experiment import Experiment

PARTS = {  # what is timed -> where it is called from
    "training": (perada.client.trainer, "sgd"),
    "teachers": (perada.server.distill, "teacher_logits"),
    "distillation steps": (perada.server.distill, "loop"),
    "guard": (perada.client.trainer.Trainer, "validation_losses"),
}


def made_up(options: object, size: int = 32) -> Source:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 6000)
    rng.shuffle(labels)
    images = rng.integers(0, 256, (60000, 3, size, size), dtype=np.uint8)
    test = np.arange(60000) >= 50000
    return Source("made up", images, labels.astype(np.int64), tuple("0123456789"), (0.5,) * 3, (0.25,) * 3, test=test)


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Any) -> float:
    wait()
    start = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - start


def listen() -> dict[str, float]:
    """Seconds of each part, from now on."""
    spent: dict[str, float] = defaultdict(float)

    def wrapped(part: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            found: list[Any] = []
            spent[part] += timed(lambda: found.append(real(*args, **kwargs)))
            return found[0]

        return call

    for part, (where, name) in PARTS.items():
        setattr(where, name, wrapped(part, getattr(where, name)))
    return spent


@contextmanager
def replayed() -> Iterator[Callable[[], float]]:
    """To be asked after a round: the seconds that the GPU spent in recorded steps since it was asked last."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    real = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        real(graph)
        after.record()
        marks.append((before, after))

    def since() -> float:
        wait()
        found = sum(before.elapsed_time(after) for before, after in marks) / 1e3
        marks.clear()
        return found

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    try:
        yield since
    finally:
        torch.cuda.CUDAGraph.replay = real  # type: ignore[method-assign]


def step_times(sim: Experiment, repeats: int = 5) -> dict[int, list[float]]:
    """Milliseconds of one recorded step, by lanes; `repeats` means of 20 steps."""
    loop = next(iter(sim.model.replays.values()))

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


def one_round(sim: Experiment, spent: dict[str, float], since: Callable[[], float] | None) -> dict[str, float]:
    at, clients = sim.now.round, sim.sampled(sim.now.round)
    spent.clear()
    whole = timed(sim.round)
    found = {"whole": whole, **spent, "rest": whole - sum(spent.values())}
    shown = ", ".join(f"{part} {seconds:.2f}" for part, seconds in found.items()) + " s"
    if since is not None:
        found["recorded"] = since()
        shown += f"; {1 - found['recorded'] / whole:.0%} outside of recorded steps"
    samples = sorted(len(sim.federation.clients[c].train) for c in clients)
    print(f"round {at}: {shown}; training samples {samples}", flush=True)
    return found


def measured(args: argparse.Namespace, public: Path) -> dict[str, Any]:
    settings: dict[str, Any] = {"method.name": args.method, "model.weights": "random", "distill.data": str(public)}
    settings |= {"run.precision": args.precision, **dict(parse_setting(s) for s in args.set)}
    sim, spent = build(resolve("cifar10", settings)), listen()
    with replayed() if torch.cuda.is_available() else nullcontext() as since:
        rounds = [one_round(sim, spent, since) for _ in range(args.rounds)]
    evaluations = [timed(sim.evaluate) for _ in range(2)]
    print(f"evaluation: {evaluations[0]:.2f} s, then {evaluations[1]:.2f} s", flush=True)
    steps = step_times(sim) if sim.model.replays else {}
    for width, found in steps.items():
        print(f"{width:3} lanes: {found[len(found) // 2]:.3f} ms [{found[0]:.3f}–{found[-1]:.3f}]", flush=True)
    return {"rounds_s": rounds, "evaluation_s": evaluations, "step_ms": steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="perada-no-kd")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--size", type=int, default=32, help="pixels of an image's side")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    perada.data.SOURCES["cifar10"] = lambda options: made_up(options, args.size)
    with tempfile.TemporaryDirectory() as folder:
        public, rng = Path(folder) / "public.npz", np.random.default_rng(1)
        images = rng.integers(0, 256, (50000, args.size, args.size, 3), dtype=np.uint8)
        np.savez(public, images=images, labels=np.zeros(50000, np.int64))
        found = measured(args, public)
    if args.out:
        gpu = torch.cuda.is_available()
        about = {"method": args.method, "precision": args.precision, "size": args.size, "set": args.set}
        about |= {"device": torch.cuda.get_device_name() if gpu else "cpu", "torch": torch.__version__}
        about |= {"peak_gib": torch.cuda.max_memory_allocated() / 2**30 if gpu else None}
        args.out.write_text(json.dumps({**about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
