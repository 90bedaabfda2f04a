"""Compares a private step (DP-SGD) of K lanes with our step without privacy and with Opacus, in one run of one process.

    python benchmarks/private_steps.py [--device cuda] [--backbone vit_small_patch4] [--adapter lora] [--out FILE.json]

Each way takes SGD steps on what an adapter trains, for K clients with a batch of B each; Poisson sampling is off, so
all see the same samples.

private         `privacy.Mechanism`: gradients per sample, clipping, noise; on a GPU in bfloat16 where ours is;
expanded        the same without records: every gradient is made (where `private` records any, lanes/records.py);
ours            `lanes.sgd` without privacy; on a GPU its steps are recorded;
opacus          `GradSampleModule` and `DPOptimizer` on one plain module, one client after another, float32;
opacus bf16     the same with the whole module in bfloat16 (GPU only);
opacus ghost    `GradSampleModuleFastGradientClipping`: norms without gradients, then a second backward pass.

Before the times, private gradients without noise must equal those of Opacus. Behind `--start` only what follows that
stage is computed, in every way. Memory is the peak that a way allocates on the GPU beyond what is there before it.
"""

from __future__ import annotations

import argparse
import gc
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import interleaved, machine, show, spread, sync, write
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # tests
from vit_lanes import Fixed

from perada.adapters import Adapter, Bottleneck, Lora, Residual, adapt
from perada.client.trainer import sample_loss
from perada.lanes import Batch, Features, Options, Samples, State, Way, gather, sgd, way_for
from perada.lanes.machine import arithmetic, keep_memory
from perada.lanes.ways import samples_at_once
from perada.models import backbone
from perada.privacy.mechanism import Mechanism
from perada.privacy.randomness import Secret

try:
    from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    from tests.privacy.twins import twin
except ImportError as error:
    print(f"without Opacus: {error}", file=sys.stderr)
    GradSampleModule = None

CLASSES, LR, CLIP, NOISE = 10, 0.01, 1.0, 1.0


class Every:
    """The same samples at every step, each as a lane of its own."""

    on_host = True

    def __init__(self, front: Tensor, digest: str, targets: Tensor) -> None:
        self.front, self.digest, self.targets = front, digest, targets  # [K, B, ...]

    def __call__(self, step: Any, lanes: Tensor) -> Samples:
        images, targets = self.front[: len(lanes)].flatten(0, 1), self.targets[: len(lanes)].reshape(-1, 1)
        keys = torch.arange(len(images), device=images.device)
        counts = (self.targets.shape[1],) * len(lanes)
        values = Features(images, self.digest) if self.digest else images
        return Samples(values, targets, None, keys, counts, tuple(lanes.tolist()), int(step))


class Kept(Fixed):
    """The same batch at every step, behind the front."""

    digest = ""

    def __call__(self, step: Any, lanes: Tensor) -> Batch:
        batch = super().__call__(step, lanes)
        assert isinstance(batch.images, Tensor)
        images = Features(batch.images, self.digest) if self.digest else batch.images
        return Batch(images, batch.targets, None, batch.keys)


class Bench:
    """K clients' tensors and batches, and the ways to train them `steps` steps."""

    def __init__(self, args: argparse.Namespace, exact: bool = False) -> None:
        cuda = args.device == "cuda"
        self.args, self.device, self.lanes, self.steps = args, args.device, args.lanes, args.steps
        self.compute = torch.bfloat16 if cuda and not exact else torch.float32
        made = backbone(args.backbone, CLASSES, size=args.size)
        adapter: Adapter | None = {
            "none": lambda: None,
            "lora": lambda: Lora(rank=args.rank),
            "bottleneck": Bottleneck,
            "residual": lambda: Residual(dropout=0.0),
        }[args.adapter]()
        trained = "adapter" if adapter else "full"
        self.model = adapt(made.net, adapter=adapter, trained=trained, head=made.head, start=args.start)
        self.model.to(args.device, torch.float32, self.compute)
        draw = torch.Generator().manual_seed(0)
        first = self.model.initial(self.lanes)
        noise = {n: 0.02 * torch.randn(p.shape, generator=draw).to(p) for n, p in first.params.items()}
        self.state = State({n: p + noise[n] for n, p in first.params.items()}, first.buffers)
        images = torch.randn(self.lanes, args.batch, 3, args.size, args.size, generator=draw).to(args.device)
        targets = torch.randint(CLASSES, (self.lanes, args.batch), generator=draw).to(args.device)
        front, digest = images, ""
        if self.model.prefix is not None:
            values = [self.model.prefix(self.model.computed(part)) for part in images]
            front, digest = torch.stack([v.values for v in values]), values[0].digest
        self.front, self.targets = front, targets
        self.every = Every(front, digest, targets)
        self.kept = Kept(front, targets, torch.arange(self.lanes, device=args.device), self.steps)
        self.kept.digest = digest
        self.way = way_for(self.model, (args.size, args.size))
        if args.most:
            self.way = replace(self.way, most=args.most)
        self.expanded = Way(args.most or samples_at_once(self.model, (args.size, args.size)))
        self.modules: dict[str, tuple[nn.Module, Any]] = {}

    def private(self, noise: float = NOISE, clip: float = CLIP, expanded: bool = False) -> State:
        device = (
            torch.device(self.device, torch.cuda.current_device()) if self.device == "cuda" else torch.device("cpu")
        )
        slopes = Mechanism(noise, clip, self.args.batch, Secret(device), self.expanded if expanded else self.way)
        rates, steps, options = [LR] * self.lanes, [self.steps] * self.lanes, Options(norm="running")
        return sgd(
            self.model, self.state, self.every, sample_loss, rates, steps, options=options, slopes_of=slopes
        ).state

    def ours(self) -> State:
        rates, steps = [LR] * self.lanes, [self.steps] * self.lanes
        options = Options(norm="running")
        return sgd(self.model, self.state, self.kept, sample_loss, rates, steps, options=options).state

    def opacus(self, dtype: torch.dtype = torch.float32, noise: float = NOISE, clip: float = CLIP) -> State:
        net, optimiser = self.opacus_module(f"opacus {dtype}", dtype, noise, clip, ghost=False)
        for k in range(self.args.clients):
            images = self.front[k].to(dtype)
            for _ in range(self.steps):
                optimiser.zero_grad()
                F.cross_entropy(net(images).float(), self.targets[k]).backward()
                optimiser.step()
        return State({n: p.detach()[None].clone() for n, p in net._module.named_parameters() if p.requires_grad})  # type: ignore[operator, union-attr]

    def ghost(self, dtype: torch.dtype = torch.float32) -> None:
        net, optimiser = self.opacus_module(f"ghost {dtype}", dtype, NOISE, CLIP, ghost=True)
        criterion = DPLossFastGradientClipping(net, optimiser, nn.CrossEntropyLoss(reduction="mean"), "mean")
        for k in range(self.args.clients):
            images = self.front[k].to(dtype)
            for _ in range(self.steps):
                optimiser.zero_grad()
                criterion(net(images).float(), self.targets[k]).backward()
                optimiser.step()

    def opacus_module(self, name: str, dtype: torch.dtype, noise: float, clip: float, ghost: bool) -> tuple[Any, Any]:
        """A module with Opacus's hooks, made once, and its optimiser; the weights go on from where they are."""
        if name not in self.modules:
            plain = twin(self.model, gather(self.state, [0])).to(self.device, dtype)
            if ghost:
                net: Any = GradSampleModuleFastGradientClipping(
                    plain, strict=False, max_grad_norm=clip, use_ghost_clipping=True
                )
            else:
                net = GradSampleModule(plain, strict=False)
            self.modules[name] = net, None
        net, _ = self.modules[name]
        inner = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LR)
        kind = DPOptimizerFastGradientClipping if ghost else DPOptimizer
        return net, kind(inner, noise_multiplier=noise, max_grad_norm=clip, expected_batch_size=self.args.batch)

    def ways(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Each way, and how many lanes it trains in one call."""
        few = self.args.clients
        made: dict[str, tuple[Callable[[], object], int]] = {
            "private": (self.private, self.lanes),
            **({"expanded": (lambda: self.private(expanded=True), self.lanes)} if self.way.recorded else {}),
            "ours": (self.ours, self.lanes),
        }
        if not self.args.opacus:
            return made
        made["opacus"] = self.opacus, few
        if self.device == "cuda":
            made["opacus bf16"] = lambda: self.opacus(torch.bfloat16), few
        made["opacus ghost"] = self.ghost, few
        for name in [n for n in made if "ghost" in n or "bf16" in n]:
            try:
                made[name][0]()
            except Exception as error:  # a form that Opacus does not have for this network
                print(f"{name}: left out: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
                del made[name]
        return made


def check(args: argparse.Namespace) -> None:
    """Clipped steps without noise must equal those of Opacus, in float32: else the times compare nothing."""
    small = argparse.Namespace(**{**vars(args), "lanes": 2, "clients": 1, "batch": 4, "steps": 2})
    bench = Bench(small, exact=True)
    mine, theirs = bench.private(noise=0.0, clip=0.1), bench.opacus(noise=0.0, clip=0.1)
    for name, tensor in theirs.params.items():
        torch.testing.assert_close(
            mine.params[name][:1], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


def peak(device: str, way: Callable[[], object]) -> float | None:
    """MiB that a way allocates beyond what is there before it, on a GPU."""
    if device != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    sync(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    way()
    sync(device)
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(args: argparse.Namespace) -> dict[str, Any]:
    args.opacus = args.opacus and GradSampleModule is not None
    if args.opacus:
        check(args)
    bench = Bench(args)
    ways = bench.ways()
    taken, noise = interleaved({n: w for n, (w, _) in ways.items()}, args.device, args.repeats, patience=args.patience)
    ms = {way: [1e3 * t / ways[way][1] / args.steps for t in times] for way, times in taken.items()}
    bench.model.replays.clear()
    memory = {way: peak(args.device, job) for way, (job, _) in ways.items()}
    return {
        "ms_per_lane_step": ms,
        "peak_mib": memory,
        "noise": noise,
        "samples_at_once": bench.way.most,
        "recorded": len(bench.way.recorded),
    }


def rows(found: dict[str, Any]) -> list[list[str]]:
    ms, out = found["ms_per_lane_step"], []
    for way, times in ms.items():
        ratio = sorted(t / f for t, f in zip(times, ms["private"], strict=True))
        memory = found["peak_mib"][way]
        out.append([way, spread(times, 3), f"{ratio[len(ratio) // 2]:.2f}×", "" if memory is None else f"{memory:.0f}"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backbone", default="vit_small_patch4")
    parser.add_argument("--adapter", choices=("lora", "bottleneck", "residual", "none"), default="lora")
    parser.add_argument("--start", default="", help="the first adapted stage; those before are computed once")
    parser.add_argument("--size", type=int, default=32, help="pixels per side")
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--clients", type=int, default=2, help="of those, how many Opacus trains in one measurement")
    parser.add_argument("--batch", type=int, default=64, help="samples per lane")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--most", type=int, default=0, help="samples at once; 0: as many as fit")
    parser.add_argument("--steps", type=int, default=5, help="steps of a lane in one call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to wait for a quiet machine")
    parser.add_argument(
        "--without-opacus", dest="opacus", action="store_false", help="such as for a full ViT, which it does not have"
    )
    parser.add_argument("--out", help="write the numbers here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    keep_memory()
    arithmetic("auto", torch.device(args.device))
    found = measure(args)
    settings = {
        k: getattr(args, k) for k in ("backbone", "adapter", "start", "size", "lanes", "batch", "rank", "steps")
    }
    place = {**machine(args.device), **settings, **{k: found[k] for k in ("samples_at_once", "recorded")}}
    print(", ".join(f"{k} {v}" for k, v in place.items()))
    show("ms per lane-step, median [quartiles]", ["way", "ms per lane-step", "over private", "peak MiB"], rows(found))
    write(args.out, {**place, "measurements": found})


if __name__ == "__main__":
    main()
