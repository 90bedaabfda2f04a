"""Compares K lanes of LoRA on a vision transformer with K clients one after another, and with torch.func.vmap.

    python benchmarks/vit_lanes.py [--device cuda] [--lanes 16] [--batch 64] [--rank 8] [--out FILE.json]

ViT-S at 32 pixels with patches of 4 and at 96 pixels with patches of 8: 64 and 144 patches. Four ways to take the same
SGD steps on LoRA, the affines of the layer norms and the head of K clients, in one run of one process:

folded     `perada.lanes.sgd` with K lanes; on a GPU in bfloat16, its steps recorded;
loop       an eager PyTorch loop over K clients: plain modules, frozen weights, `torch.optim.SGD`, float32;
loop bf16  the same under `torch.autocast` to bfloat16 (GPU only);
vmap       `torch.func.vmap` of `grad` over the clients' stacked tensors, eager, in the folded way's precision.

Before the times the ways must train the same parameters. Memory is the peak that a way allocates on the GPU beyond the
frozen network and the images, in a fresh state; on a CPU it is not measured.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from timing import interleaved, machine, show, spread, sync, write
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from perada import adapt
from perada.adapters import Lora
from perada.client.trainer import sample_loss
from perada.lanes import Batch, State, gather, sgd
from perada.lanes.machine import arithmetic, keep_memory
from perada.models import backbone

CLASSES, LR = 10, 0.01
SHAPES = {"32/4": ("vit_small_patch4", 32), "96/8": ("vit_small_patch8", 96)}


@dataclass
class Fixed:
    """The same batch at every step, in tensors that a recorded step can read (`perada.lanes.replay.Static`)."""

    images: Tensor  # [K, B, 3, H, W]
    targets: Tensor  # [K, B]
    keys: Tensor  # [K]
    capacity: int

    def shape(self) -> Hashable:
        return tuple(self.images.shape), self.images.dtype

    def copy_(self, other: Self) -> None:
        self.images.copy_(other.images)
        self.targets.copy_(other.targets)

    def twin(self) -> Fixed:
        return Fixed(self.images.clone(), self.targets.clone(), self.keys.clone(), self.capacity)

    def __call__(self, step: Any, lanes: Tensor) -> Batch:
        if len(lanes) == len(self.images):  # equal steps: always all lanes, in their order
            return Batch(self.images.flatten(0, 1), self.targets, None, self.keys)
        return Batch(self.images[lanes].flatten(0, 1), self.targets[lanes], None, self.keys[lanes])


class Bench:
    """K clients' tensors and batches, and the ways to train them `steps` steps."""

    def __init__(self, name: str, size: int, args: argparse.Namespace, exact: bool = False) -> None:
        cuda = args.device == "cuda"
        self.lanes, self.steps, self.device = args.lanes, args.steps, args.device
        self.compute = torch.bfloat16 if cuda and not exact else torch.float32
        net = backbone(name, CLASSES, size=size).net
        self.model = adapt(net, adapter=Lora(rank=args.rank), head="head")
        self.model.to(args.device, torch.float32, self.compute)
        draw = torch.Generator().manual_seed(0)
        first = self.model.initial(self.lanes)
        noise = {n: 0.02 * torch.randn(p.shape, generator=draw).to(p) for n, p in first.params.items()}
        self.state = State({n: p + noise[n] for n, p in first.params.items()})
        images = torch.randn(self.lanes, args.batch, 3, size, size, generator=draw).to(args.device)
        targets = torch.randint(CLASSES, (self.lanes, args.batch), generator=draw).to(args.device)
        keys = torch.arange(self.lanes, device=args.device)
        self.batches = Fixed(images, targets, keys, self.steps)
        self.net: nn.Module = adapt(net, adapter=Lora(rank=args.rank), head="head").plain(first_lane(self.state))
        self.net.to(args.device)

    def folded(self) -> State:
        rates, steps = [LR] * self.lanes, [self.steps] * self.lanes
        return sgd(self.model, self.state, self.batches, sample_loss, rates, steps).state

    def loop(self, autocast: bool = False) -> State:
        done = self.state.map(torch.empty_like)
        held = {n: p for n, p in self.net.named_parameters() if n in self.state.params}
        for p in held.values():
            p.requires_grad_()
        half = torch.autocast(self.device, torch.bfloat16) if autocast else nullcontext()
        for k in range(self.lanes):
            copied(self.state, k, held, into_model=True)
            optimiser = torch.optim.SGD(list(held.values()), lr=LR)
            for _ in range(self.steps):
                optimiser.zero_grad()
                with half:
                    loss = F.cross_entropy(self.net(self.batches.images[k]), self.batches.targets[k])
                loss.backward()
                optimiser.step()
            copied(done, k, held, into_model=False)
        return done

    def vmapped(self) -> State:
        net = self.net.to(self.compute)
        frozen = {n: p.detach() for n, p in net.named_parameters() if n not in self.state.params}

        def loss(params: dict[str, Tensor], images: Tensor, targets: Tensor) -> Tensor:
            logits = functional_call(net, {**frozen, **params}, (images,))
            return F.cross_entropy(logits.float(), targets)

        each = vmap(grad(loss))
        params, images = dict(self.state.params), self.batches.images.to(self.compute)
        for _ in range(self.steps):
            slopes = each({n: p.to(self.compute) for n, p in params.items()}, images, self.batches.targets)
            params = {n: p - LR * slopes[n].to(p.dtype) for n, p in params.items()}
        self.net.float()
        return State(params)

    def ways(self) -> dict[str, Callable[[], State]]:
        made: dict[str, Callable[[], State]] = {"folded": self.folded, "loop": self.loop}
        if self.device == "cuda":
            made["loop bf16"] = lambda: self.loop(autocast=True)
        return {**made, "vmap": self.vmapped}


def first_lane(state: State) -> State:
    return gather(state, [0]).map(Tensor.cpu)


@torch.no_grad()
def copied(state: State, lane: int, held: dict[str, Tensor], into_model: bool) -> None:
    for name, tensor in state.params.items():
        pair = (held[name], tensor[lane]) if into_model else (tensor[lane], held[name])
        pair[0].copy_(pair[1])


def check(name: str, size: int, args: argparse.Namespace) -> None:
    """Two lanes in float32 must train to the same parameters in every way: else the times compare nothing."""
    small = argparse.Namespace(**{**vars(args), "lanes": 2, "batch": 4, "steps": 3})
    bench = Bench(name, size, small, exact=True)
    folded, *others = (way() for n, way in bench.ways().items() if n != "loop bf16")
    for other in others:
        for n, tensor in folded.params.items():
            torch.testing.assert_close(other.params[n], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=n: f"{n}: {m}")


def peak(bench: Bench, way: str) -> float | None:
    """MiB that a way allocates beyond what is there before it, on a GPU."""
    if bench.device != "cuda":
        return None
    bench.model.replays.clear()
    gc.collect()
    torch.cuda.empty_cache()
    sync(bench.device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    bench.ways()[way]()
    sync(bench.device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(shape: str, args: argparse.Namespace) -> dict[str, Any]:
    name, size = SHAPES[shape]
    check(name, size, args)
    bench = Bench(name, size, args)
    taken, noise = interleaved(bench.ways(), args.device, args.repeats, patience=args.patience)
    ms = {way: [1e3 * t / args.lanes / args.steps for t in times] for way, times in taken.items()}
    memory = {way: peak(bench, way) for way in bench.ways()}
    return {"shape": shape, "backbone": name, "size": size, "ms_per_lane_step": ms, "peak_mib": memory, "noise": noise}


def rows(found: dict[str, Any]) -> list[list[str]]:
    ms = found["ms_per_lane_step"]
    out = []
    for way, times in ms.items():
        ratio = sorted(t / f for t, f in zip(times, ms["folded"], strict=True))
        memory = found["peak_mib"][way]
        shown = "" if memory is None else f"{memory:.0f}"
        out.append([found["shape"], way, spread(times, 3), f"{ratio[len(ratio) // 2]:.2f}×", shown])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of " + ", ".join(SHAPES))
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64, help="images per lane")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="steps of a lane in one call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to wait for a quiet machine per shape")
    parser.add_argument("--out", help="write the numbers here")
    args = parser.parse_args()
    keep_memory()
    arithmetic("fp32", torch.device(args.device))
    found, table = [], []
    for shape in args.shapes.split(","):
        found.append(measure(shape, args))
        table += rows(found[-1])
        print("measured:", *rows(found[-1]), sep="\n  ", file=sys.stderr)
    settings = {k: getattr(args, k) for k in ("lanes", "batch", "rank", "steps")}
    place = {**machine(args.device), **settings}
    print(", ".join(f"{k} {v}" for k, v in place.items()))
    head = ["pixels/patch", "way", "ms per lane-step", "over folded", "peak MiB"]
    show("ViT-S with LoRA: ms per lane-step, median [quartiles]", head, table)
    write(args.out, {**place, "measurements": found})


if __name__ == "__main__":
    main()
