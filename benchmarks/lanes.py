"""Compares K lanes in one step with K clients one after another, in one run.

    python benchmarks/lanes.py [--device cuda] [--lanes 1,2,4] [--json FILE]

ResNet-18 with the ImageNet stem and residual adapters, 32×32 images, 16 per lane. Three ways to do
the same K × S steps of training:

folded      one call of `perada.lanes.sgd` with K lanes;
sequential  an ordinary PyTorch loop over K clients: plain modules, frozen weights, torch.optim.SGD;
one lane    `perada.lanes.sgd` with one lane, K times: what the lanes code costs when nothing is folded.

Every way takes each client's tensors out of a store and puts the trained ones back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from timing import Job, interleaved, machine, show, spread, sync, write
from torch import Tensor, nn

from perada import adapt
from perada.adapters import Residual
from perada.lanes import Batch, LaneModel, State, gather, sgd, stack
from perada.lanes.machine import keep_memory
from perada.models.resnet import resnet

CLASSES, SIZE, LR = 10, 32, 0.01
WAYS = ("folded", "sequential", "one lane")


class Adapter(nn.Module):
    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = nn.Dropout(dropout)
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(self.dropout(self.norm(x)))


class AdaptedConv(nn.Conv2d):
    """A convolution with an adapter behind it. The names are those of the lanes code, so weights load."""

    def __init__(self, conv: nn.Conv2d, dropout: float) -> None:
        super().__init__(conv.in_channels, conv.out_channels, 3, conv.stride, 1, bias=False)
        self.adapter = Adapter(conv.out_channels, dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(super().forward(x))


def plain_model(lanes: LaneModel, dropout: float) -> nn.Module:
    """The same network as ordinary modules: same names, same values, same parameters trained."""
    net = resnet("resnet18", CLASSES)
    for name, layer in list(net.named_modules()):
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
            path, _, last = name.rpartition(".")
            setattr(net.get_submodule(path), last, AdaptedConv(layer, dropout))
    missing = net.load_state_dict(lanes.module.state_dict(), strict=False).missing_keys
    assert all(name.endswith("num_batches_tracked") for name in missing), missing
    trained = lanes.initial().params.keys() - lanes.inert
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in trained)
    return net.to(lanes.device).train()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)


class Bench:
    """K clients' tensors and data, and the three ways to train them `steps` steps."""

    def __init__(self, lanes: int, args: argparse.Namespace, dropout: float = 0.3) -> None:
        self.lanes, self.steps = lanes, args.steps
        self.model = adapt(resnet("resnet18", CLASSES), adapter=Residual(dropout))
        self.model.to(args.device, torch.float32)
        self.state = self.model.initial(lanes)
        draw = torch.Generator().manual_seed(0)
        images = torch.randn(lanes, args.batch, 3, SIZE, SIZE, generator=draw).to(args.device)
        self.images = images.to(memory_format=torch.channels_last) if args.channels_last else images
        self.targets = torch.randint(CLASSES, (lanes, args.batch), generator=draw).to(args.device)
        self.weights = torch.ones(lanes, args.batch, device=args.device)
        self.keys = torch.arange(lanes, device=args.device)
        self.net: nn.Module | None = None
        self.dropout = dropout

    def folded(self) -> State:
        def batches(step: int, lanes: Tensor) -> Batch:
            # Equal steps: always all lanes, in their order.
            return Batch(self.images.flatten(0, 1), self.targets, self.weights, self.keys + step)

        lr, steps = [LR] * self.lanes, [self.steps] * self.lanes
        return sgd(self.model, self.state, batches, loss_of, lr, steps).state

    def one_lane(self) -> State:
        done = []
        for k in range(self.lanes):
            own = slice(k, k + 1)

            def batches(step: int, lanes: Tensor, own: slice = own) -> Batch:
                return Batch(self.images[own][0], self.targets[own], self.weights[own], self.keys[own] + step)

            done.append(sgd(self.model, gather(self.state, [k]), batches, loss_of, [LR], [self.steps]).state)
        return stack(*done)

    def sequential(self) -> State:
        if self.net is None:
            self.net = plain_model(self.model, self.dropout)
        held = dict(self.net.named_parameters()) | dict(self.net.named_buffers())
        done = self.state.map(torch.empty_like)
        for k in range(self.lanes):
            _copy(self.state, k, held, into_model=True)
            optimiser = torch.optim.SGD([p for p in self.net.parameters() if p.requires_grad], lr=LR)
            for _ in range(self.steps):
                optimiser.zero_grad()
                F.cross_entropy(self.net(self.images[k]), self.targets[k]).backward()
                optimiser.step()
            _copy(done, k, held, into_model=False)
        return done

    def jobs(self) -> dict[str, Job]:
        return dict(zip(WAYS, (self.folded, self.sequential, self.one_lane), strict=True))


@torch.no_grad()
def _copy(state: State, lane: int, held: dict[str, Tensor], into_model: bool) -> None:
    for name, tensor in (state.params | state.buffers).items():
        pair = (held[name], tensor[lane]) if into_model else (tensor[lane], held[name])
        pair[0].copy_(pair[1])


def check(args: argparse.Namespace) -> None:
    """Without dropout the three ways must train the same parameters: else the times compare nothing."""
    bench = Bench(2, args, dropout=0.0)
    folded, *others = (job() for job in bench.jobs().values())
    for other in others:
        for name, tensor in folded.params.items():  # type: ignore[attr-defined]
            torch.testing.assert_close(other.params[name], tensor, rtol=1e-2, atol=2e-3)  # type: ignore[attr-defined]


def probe(way: str, lanes: int, args: argparse.Namespace) -> float:
    """Peak memory in MiB that this way adds to a process (or a GPU) with torch loaded and nothing else."""
    torch.ones(64, 64).matmul(torch.ones(64, 64))
    before = 0 if args.device == "cuda" else _resident()
    bench = Bench(lanes, args)
    if way == "sequential":  # it needs the plain network alone
        bench.net = plain_model(bench.model, bench.dropout)
        del bench.model
    bench.jobs()[way]()
    sync(args.device)
    return (torch.cuda.max_memory_allocated() if args.device == "cuda" else _resident() - before) / 2**20


def _resident() -> int:
    """The process's peak resident bytes. VmHWM, as ru_maxrss starts at the parent's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak(way: str, lanes: int) -> float:
    """`probe` in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--probe", way, str(lanes)]
    return float(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))


def measure(lanes: int, args: argparse.Namespace) -> dict[str, object]:
    taken, noise = interleaved(Bench(lanes, args).jobs(), args.device, args.repeats, patience=args.patience)
    ms = {way: [1e3 * t / lanes / args.steps for t in times] for way, times in taken.items()}
    ratios = [s / f for s, f in zip(ms["sequential"], ms["folded"], strict=True)]
    memory = {way: peak(way, lanes) for way in WAYS}
    return {
        "lanes": lanes,
        "ms_per_lane_step": ms,
        "sequential_over_folded": ratios,
        "peak_mib": memory,
        "noise": noise,
    }


def row(found: dict[str, object]) -> list[str]:
    ms: dict[str, list[float]] = found["ms_per_lane_step"]  # type: ignore[assignment]
    memory: dict[str, float] = found["peak_mib"]  # type: ignore[assignment]
    ratio = spread(found["sequential_over_folded"])  # type: ignore[arg-type]
    times = [spread(ms[way]) for way in WAYS]
    return [str(found["lanes"]), *times, f"{ratio}×", *(f"{memory[way]:.0f}" for way in WAYS)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lanes", default="1,2,4,8,16,32")
    parser.add_argument("--batch", type=int, default=16, help="images a lane")
    parser.add_argument("--steps", type=int, default=2, help="steps of a lane in one call")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to wait for quiet, a row")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="cuda: tf32 in convolutions and products")
    parser.add_argument("--json", help="write the numbers here")
    parser.add_argument("--probe", nargs=2, metavar=("WAY", "LANES"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    keep_memory()  # as the `perada` command does; it serves all three ways
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    if args.probe:
        print(json.dumps(probe(args.probe[0], int(args.probe[1]), args)))
        return
    check(args)
    found, rows = [], []
    for lanes in map(int, args.lanes.split(",")):
        found.append(measure(lanes, args))
        rows.append(row(found[-1]))
        print("measured:", *rows[-1], sep="  ", file=sys.stderr)  # a long run that breaks has shown something
    settings = {"batch": args.batch, "channels_last": args.channels_last, "tf32": args.tf32}
    place = {**machine(args.device), **settings}
    print(", ".join(f"{k} {v}" for k, v in place.items()))
    head = ["lanes", *(f"{way} ms" for way in WAYS), "sequential/folded", *(f"{way} MiB" for way in WAYS)]
    show("ResNet-18 + adapters, 32×32: ms a lane-step, median [quartiles], and peak memory", head, rows)
    write(args.json, {**place, "steps": args.steps, "measurements": found})


if __name__ == "__main__":
    main()
