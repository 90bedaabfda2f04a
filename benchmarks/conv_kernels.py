"""Compares three ways to compute K different convolutions over one folded batch, shape by shape.

    python benchmarks/conv_kernels.py [--device cuda] [--json FILE]

It times forward + backward of `Ops.conv` (gradients to the input and the weights; a stem's input is an
image and needs none), for the k×k convolutions of ResNet-18 with the ImageNet stem and of resnet8. The
table in `perada.lanes.conv.choose` comes from these numbers; "loses" is how much slower its choice is than the fastest.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict, dataclass
from typing import get_args
from unittest import mock

import numpy as np
import torch
from timing import interleaved, machine, quartiles, show, spread, write

from perada.lanes import conv, ops_for
from perada.lanes.conv import Kernel

KERNELS: tuple[Kernel, ...] = tuple(k for k in get_args(Kernel) if k != "columns" or torch.cuda.is_available())
NOISY = 0.25  # cores that other processes took


@dataclass(frozen=True)
class Shape:
    network: str
    inputs: int
    outputs: int
    kernel: int
    stride: int
    size: int  # of the input map: size × size

    @property
    def out_size(self) -> int:
        return (self.size - 1) // self.stride + 1

    @property
    def stem(self) -> bool:
        return self.inputs == 3

    def __str__(self) -> str:
        step = f"/{self.stride}" if self.stride > 1 else ""
        return f"{self.inputs}→{self.outputs} {self.kernel}×{self.kernel}{step} {self.size}→{self.out_size}"


def stages(network: str, widths: tuple[int, ...], size: int) -> list[Shape]:
    """The two kinds of 3×3 convolution of each stage: the one that halves the map, the ones that keep it."""
    shapes, before = [], widths[0]
    for width in widths:
        if width != before:
            shapes.append(Shape(network, before, width, 3, 2, size))
            size = (size - 1) // 2 + 1
        shapes.append(Shape(network, width, width, 3, 1, size))
        before = width
    return shapes


def all_shapes() -> list[Shape]:
    shapes = []
    for image in (32, 64):  # the stem and its pooling leave a quarter of the image's size
        name = f"resnet18@{image}"
        shapes += [Shape(name, 3, 64, 7, 2, image), *stages(name, (64, 128, 256, 512), image // 4)]
    return [*shapes, Shape("resnet8@8", 3, 16, 3, 1, 8), *stages("resnet8@8", (16, 32, 64), 8)]


class Case:
    """One shape with its tensors; `step(kernel)` is one forward and backward."""

    def __init__(self, shape: Shape, lanes: int, batch: int, device: str, channels_last: bool) -> None:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        s = shape
        draw = torch.Generator(device).manual_seed(0)
        images, size = lanes * batch, (s.size, s.size)
        x = torch.randn(images, s.inputs, *size, device=device, generator=draw).to(memory_format=layout)
        w = torch.randn(lanes, s.outputs, s.inputs, s.kernel, s.kernel, device=device, generator=draw)
        out = torch.randn(images, s.outputs, s.out_size, s.out_size, device=device, generator=draw)
        self.x, self.weight = x.requires_grad_(not s.stem), w.div_(s.inputs**0.5 * s.kernel).requires_grad_()
        self.stride, self.padding = (s.stride, s.stride), (s.kernel // 2, s.kernel // 2)
        self.incoming = out.to(memory_format=layout)

    def forward(self, kernel: Kernel | None) -> torch.Tensor:
        return ops_for(self.x.device).conv(self.x, self.weight, self.stride, self.padding, kernel=kernel)

    def step(self, kernel: Kernel | None) -> None:
        wanted = [t for t in (self.x, self.weight) if t.requires_grad]
        torch.autograd.grad(self.forward(kernel), wanted, self.incoming)

    def chosen(self) -> Kernel:
        """What the product picks: asked of the call itself, so that `choose` may take what it likes."""
        picked: list[Kernel] = []

        def listen(*args: object, **kwargs: object) -> Kernel:
            picked.append(choose(*args, **kwargs))  # type: ignore[arg-type]
            return picked[-1]

        choose = conv.choose
        with mock.patch.object(conv, "choose", listen):
            self.forward(None)
        return picked[0]


def measure(shape: Shape, lanes: int, batch: int, args: argparse.Namespace) -> dict[str, object]:
    case = Case(shape, lanes, batch, args.device, args.channels_last)
    jobs = {kernel: (lambda kernel=kernel: case.step(kernel)) for kernel in KERNELS}
    taken, noise = interleaved(jobs, args.device, args.repeats, args.at_least, args.patience)
    middle = {kernel: quartiles(taken[kernel])[0] for kernel in KERNELS}
    fastest = min(middle, key=middle.__getitem__)
    return {
        **asdict(shape),
        "lanes": lanes,
        "batch": batch,
        "ms": {kernel: [1e3 * t for t in taken[kernel]] for kernel in KERNELS},
        "fastest": fastest,
        "chosen": case.chosen(),
        "noise": noise,
        "loses": middle[case.chosen()] / middle[fastest] - 1,
    }


def row(shape: Shape, found: dict[str, object]) -> list[str]:
    ms: dict[str, list[float]] = found["ms"]  # type: ignore[assignment]
    marks = [("fastest", "*"), ("chosen", "<")]
    cells = [f"{spread(ms[k], 3)} {''.join(mark for what, mark in marks if found[what] == k):2}" for k in KERNELS]
    counts = [str(found["lanes"]), str(found["batch"])]
    return [shape.network, str(shape), *counts, *cells, f"{found['loses']:.0%}", f"{found['noise']:.1f}"]


def summary(found: list[dict[str, object]]) -> dict[str, float]:
    """Geometric-mean loss against the fastest, of the choice and of each kernel used everywhere.

    Rows measured while others were busy are left out, unless all were.
    """
    found = [f for f in found if f["noise"] < NOISY] or found  # type: ignore[operator]
    middle = [{k: quartiles(f["ms"][k])[0] for k in KERNELS} for f in found]  # type: ignore[index]
    picks = {"chosen": [f["chosen"] for f in found], **{k: [k] * len(found) for k in KERNELS}}

    def loss(pick: list[Kernel]) -> float:
        ratios = [m[k] / min(m.values()) for m, k in zip(middle, pick, strict=True)]
        return float(np.exp(np.mean(np.log(ratios)))) - 1

    return {name: loss(pick) for name, pick in picks.items()}  # type: ignore[arg-type]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lanes", default="2,8,16")
    parser.add_argument("--batch", help="images a lane; default 16, and 64 on cuda too")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--at-least", type=float, default=0.01, help="seconds of one measurement")
    parser.add_argument("--patience", type=float, default=3.0, help="seconds to wait for quiet, a row")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--tf32", action="store_true", help="cuda: tf32 in convolutions and products")
    parser.add_argument("--only", default="", help='a regular expression for rows, such as "512→512 3×3 2"')
    parser.add_argument("--json", help="write the numbers here")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.tf32
    lanes = [int(n) for n in args.lanes.split(",")]
    batches = [int(n) for n in (args.batch or ("16,64" if args.device == "cuda" else "16")).split(",")]
    shapes = [s for s in all_shapes() if re.search(args.only, f"{s.network} {s}")]
    found, rows = [], []
    for shape in shapes:
        for batch in batches:
            for count in lanes:
                found.append(measure(shape, count, batch, args))
                rows.append(row(shape, found[-1]))
                print("measured:", *rows[-1], sep="  ", file=sys.stderr)  # a run cut short has shown something
    place = {**machine(args.device), "channels_last": args.channels_last, "tf32": args.tf32}
    print(", ".join(f"{k} {v}" for k, v in place.items()))
    title = "forward+backward, ms, median [quartiles]; * fastest, < chosen"
    show(title, ["network", "convolution", "lanes", "batch", *KERNELS, "loses", "noise"], rows)
    losses = summary(found)
    print("loss against the fastest, geometric mean: " + ", ".join(f"{k} {v:.1%}" for k, v in losses.items()))
    write(args.json, {**place, "geometric_mean_loss": losses, "measurements": found})


if __name__ == "__main__":
    main()
