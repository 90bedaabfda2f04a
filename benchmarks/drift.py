"""What noticing drift costs: a prediction with two lanes of one backbone, against the personal model alone.

    python benchmarks/drift.py [--backbone resnet18] [--size 32] [--batch 32]

Prints medians and quartiles of milliseconds per batch, and the median ratio to the personal model alone. "kept" are
both lanes behind a first layer whose output is kept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from perada import adapt
from perada.lanes import stack
from perada.models import backbone
from perada.predict.drift import Calibration, Drift, answer


def timed(ways: Mapping[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Returns milliseconds of each way; they take turns, so that other work on the machine slows all of them."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(repeats + 3):
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            if turn >= 3:
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


@torch.no_grad()
def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("--backbone", default="resnet18")
    words.add_argument("--size", type=int, default=32)
    words.add_argument("--batch", type=int, default=32)
    words.add_argument("--repeats", type=int, default=30)
    given = words.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    made = backbone(given.backbone, 10, 0)
    model = adapt(made.net, adapter="residual", trained="adapter", head=made.head)
    model.to(device, torch.float32, torch.bfloat16 if device.type == "cuda" else None)
    one = model.rounded(model.initial())
    two = model.rounded(stack(model.initial(), model.initial()))
    images = torch.randn(given.batch, 3, given.size, given.size, device=device)
    by = Calibration((0.1,) * 10, (0.1,) * 10, 0.6, 1.0, 0.1, 0.5, 100)
    kept = model.stem(images)

    def aware(seen: object) -> object:
        logits = model.on_all(two, seen)  # type: ignore[arg-type]
        return answer(by, logits[0], logits[1], Drift()).probabilities

    ways: dict[str, Callable[[], object]] = {
        "personal": lambda: model.on_all(one, model.stem(images)),
        "two lanes": lambda: model.on_all(two, model.stem(images)),
        "noticing drift": lambda: aware(model.stem(images)),
        "kept": lambda: aware(kept),
    }
    times = timed(ways, device, given.repeats)
    for name, found in times.items():
        low, middle, high = statistics.quantiles(found, n=4)
        ratio = statistics.median(a / b for a, b in zip(found, times["personal"], strict=True))
        print(f"{name:15} {middle:8.2f} ms [{low:.2f}, {high:.2f}]  {ratio:.2f}x")
    print(
        f"{given.backbone}, {given.size}x{given.size}, batch {given.batch}, {device}, {torch.get_num_threads()} threads"
    )


if __name__ == "__main__":
    main()
