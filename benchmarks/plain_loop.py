"""Compares one step of 16 lanes with a plain PyTorch loop over one client at a time, on one GPU, in one run.

    python benchmarks/plain_loop.py [--precision bf16] [--repeats 5] [--reference FILE.py] [--out FILE.json]

The plain loop is written the usual way: modules, `loss.backward()`, `torch.optim.SGD`, a proximal term over
`parameters()`; eager, float32 with PyTorch's defaults, no data loading (one batch on the device is used again and
again). PerAda: the mean of a local and a personal step. Ditto: the same with the full model. The floating-point
operations are counted on the plain step (`torch.utils.flop_counter`), the ceiling is a measured matrix product.

--reference names a Python file with a function `steps(batch, device)` that returns named functions, each of which does
one training step of one client: wrap a checkout of another implementation in it to see it beside these.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rounds import made_up, step_times
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import perada.data
from perada.config import build, resolve
from perada.experiment import Experiment
from perada.models.resnet import resnet

BATCH = 64


class Adapter(nn.Module):
    """x + Conv1x1(Dropout(BN(x))), the plain way."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm2d(channels), nn.Dropout(0.3)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)
        nn.init.normal_(self.conv.weight, std=1e-4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.dropout(self.norm(x)))  # type: ignore[no-any-return]


def network(adapters: bool) -> nn.Module:
    net: nn.Module = resnet("resnet18", 10)
    if adapters:
        net.requires_grad_(False)
        for block in [m for m in net.modules() if hasattr(m, "downsample")]:
            for name in ("conv1", "conv2"):
                conv = getattr(block, name)
                setattr(block, name, nn.Sequential(conv, Adapter(conv.out_channels)))
            for norm in (block.bn1, block.bn2):
                norm.requires_grad_(True)
        net.bn1.requires_grad_(True)
        net.fc.requires_grad_(True)
    return net.cuda().train()


def plain_steps(adapters: bool) -> dict[str, Callable[[], None]]:
    """A local step, and a personal one with its pull towards the global model."""
    images, labels = torch.randn(BATCH, 3, 32, 32, device="cuda"), torch.randint(0, 10, (BATCH,), device="cuda")
    made = {}
    for kind in ("local", "personal"):
        net = network(adapters)
        trained = [p for p in net.parameters() if p.requires_grad]
        centre = [p.detach().clone() for p in trained]
        sgd = torch.optim.SGD(trained, lr=0.01)

        def step(net=net, trained=trained, centre=centre, sgd=sgd, pulled=kind == "personal") -> None:  # type: ignore[no-untyped-def]
            sgd.zero_grad()
            loss = F.cross_entropy(net(images), labels)
            if pulled:
                loss = loss + 0.5 * sum(((p - c) ** 2).sum() for p, c in zip(trained, centre, strict=True))
            loss.backward()
            sgd.step()

        made[kind] = step
    return made


def referenced(path: Path) -> dict[str, Callable[[], None]]:
    found = importlib.util.spec_from_file_location("reference", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    steps: dict[str, Callable[[], None]] = module.steps(BATCH, "cuda")
    return steps


def spread(step: Callable[[], None], repeats: int, each: int = 30) -> list[float]:
    """Milliseconds of one step: `repeats` means of `each`, sorted."""
    for _ in range(10):
        step()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(each):
            step()
        torch.cuda.synchronize()
        found.append((time.perf_counter() - start) / each * 1e3)
    return sorted(found)


def operations(step: Callable[[], None]) -> float:
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


def ceiling(repeats: int) -> float:
    """TFLOP/s of a large bfloat16 product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / spread(lambda: torch.mm(a, b), repeats)[0] / 1e9  # type: ignore[arg-type,return-value]


def trained(method: str, precision: str) -> Experiment:
    """A simulation whose step of 16 lanes is recorded."""
    settings = {"method.name": method, "model.weights": "random", "distill.steps": 0, "run.device": "cuda"}
    sim = build(resolve("cifar10", {**settings, "run.precision": precision, "train.epochs": 1}))
    sim.round()
    return sim


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--reference", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    perada.data.SOURCES["cifar10"] = made_up
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found |= {"precision": args.precision, "ceiling_tflops": ceiling(args.repeats)}
    print(
        f"{found['device']}, torch {found['torch']}; bfloat16 product {found['ceiling_tflops']:.0f} TFLOP/s", flush=True
    )
    for method, adapters in (("perada-no-kd", True), ("ditto", False)):
        plain = {kind: spread(step, args.repeats) for kind, step in plain_steps(adapters).items()}
        flops = operations(plain_steps(adapters)["local"])
        lanes = step_times(trained(method, args.precision), args.repeats)[16]
        middle = {kind: times[len(times) // 2] for kind, times in plain.items()}
        mean, ours = sum(middle.values()) / 2, lanes[len(lanes) // 2] / 16
        worst = (
            sum(t[0] for t in plain.values()) / 2 / (lanes[-1] / 16),
            sum(t[-1] for t in plain.values()) / 2 / (lanes[0] / 16),
        )
        rate = flops / ours / 1e9
        print(f"{method}: one client, plain: local {middle['local']:.2f} ms, personal {middle['personal']:.2f} ms; "
              f"16 lanes {lanes[len(lanes) // 2]:.2f} ms, {ours:.3f} ms a lane: {mean / ours:.0f} times faster "
              f"[{worst[0]:.0f}–{worst[1]:.0f}], {rate:.1f} TFLOP/s", flush=True)  # fmt: skip
        found[method] = {
            "plain_ms": plain,
            "lanes16_ms": lanes,
            "times_faster": mean / ours,
            "flops": flops,
            "tflops": rate,
        }
    for kind, step in (referenced(args.reference) if args.reference else {}).items():
        times = spread(step, args.repeats)
        found.setdefault("reference_ms", {})[kind] = times
        print(f"reference, {kind}: {times[len(times) // 2]:.2f} ms [{times[0]:.2f}–{times[-1]:.2f}]", flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
