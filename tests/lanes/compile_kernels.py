"""Compiles the kernels that a step needs for a GPU that is not here: the interpreter, which the other tests use, takes
more than the compiler does. Run by test_compiling.py in a process of its own; prints how many of them were not found
where the processes that compile had left them, and the kernels' names."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

from perada.lanes import Stem
from perada.lanes.context import Slots
from perada.lanes.ops import Statistics
from perada.lanes.ops.triton import adapter, compile_pool, conv, flat, images, launch, loss, norm, stem, tiles

TYPES = {
    torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64", torch.int32: "i32",
    torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip
TARGET = GPUTarget("cuda", 90, 32)
seen: set[str] = set()
here: list[str] = []


def compile_only(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    options = {n: meta.pop(n) for n in ("num_warps", "num_stages") if n in meta}
    given = dict(zip(kernel.arg_names, args, strict=False))
    signature, attrs = dict.fromkeys(meta, "constexpr"), {}
    for name, value in given.items():
        wide = isinstance(value, int) and not -(2**31) <= value < 2**31
        signature[name] = f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i64" if wide else "i32"
        if isinstance(value, torch.Tensor) or value % 16 == 0:
            attrs[(kernel.arg_names.index(name),)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, {n: signature[n] for n in kernel.arg_names}, meta, attrs)
    if kernel.__name__ not in seen:  # as if there were a GPU: that is where Triton sets it
        kernel.device_caches, kernel.compile = {0: None}, triton.compile
    compile_pool.asking(kernel, 0)
    kernel.compile(source, target=TARGET, options=make_backend(TARGET).parse_options(options).__dict__)
    seen.add(kernel.__name__)


def everything(dtype: torch.dtype, lanes: int, batch: int) -> None:
    def affine(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(lanes, n, dtype=dtype, requires_grad=trained), torch.zeros(lanes, n, dtype=dtype)

    def statistics(how: str) -> Statistics:
        return Statistics(torch.zeros(lanes, 64), torch.ones(lanes, 64), how, 0.1, 1e-5)

    keys = torch.arange(lanes)
    for how in ("train", "running"):
        trained = how == "train"
        with torch.set_grad_enabled(how == "train"):
            wide = torch.randn(lanes * batch, 64, 16, 16).to(dtype)
            x = stem.norm_and_pool(wide, affine(64), statistics(how), Slots())
            kept = Stem.of(wide[:batch], torch.nn.MaxPool2d(3, 2, 1)).by(lanes)
            x = x + stem.stem_norm(kept, affine(64), statistics(how), Slots())
            matrix = torch.zeros(lanes, 64, 64, 1, 1, dtype=dtype, requires_grad=trained)
            drop = norm.Drop(keys, 3, 0.1) if how == "train" else None
            x = adapter.lane_adapter(x, affine(64), statistics(how), matrix, drop, Slots())
            x = norm.lane_norm(x, affine(64), statistics(how), Slots(), add=x, relu=True)
        if how == "train":
            x.sum().backward()


def counted(source: Any, *args: Any, make_ir: Any = ASTSource.make_ir) -> Any:
    here.append(source.name)
    return make_ir(source, *args)


def main() -> None:
    ASTSource.make_ir = counted
    compile_pool.start((9, 0))
    for module in (adapter, conv, flat, images, loss, norm, stem, tiles):
        if hasattr(module, "launch"):
            module.launch = compile_only
    launch.launch = compile_only
    everything(torch.bfloat16, 2, 64)  # rows in parts
    everything(torch.float32, 2, 1)  # one program has all rows
    p, some = torch.zeros(2, 64), torch.ones(2, 1)
    moves = torch.ones(2, dtype=torch.bool)
    flat.length(p, some, None)
    flat.length(p.bfloat16(), some, (p, some, p[0]))
    flat.sgd_step(p, p, some, None, moves)
    flat.sgd_step(p, p.bfloat16(), some, (p, some, p[0]), moves)
    flat.adam_step(p, p, p, p, some.double(), p, (0.9, 0.999), 1e-8)
    whole, row = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    loss.cross_entropy(p, whole)
    loss.divergence(p, p, 2.0)
    weight = torch.zeros(2, 64, 64, 3, 3, dtype=torch.bfloat16, requires_grad=True)
    maps = torch.zeros(4, 64, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    conv.lane_conv(maps, weight, 1, (1, 1)).sum().backward()
    images.chunk(whole[:1], whole[:1], whole[:1], p)
    images.picked(row[None], whole, whole, whole, whole, whole)
    pool, values = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.ones(3, 1, 1)
    images.views(pool, row, whole, 7, 3, 1, values, values, torch.bfloat16)
    images.blocks(torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16))
    flat.keep(p, p, flat.settle(whole, whole, moves, p[:, 0], p[:, 0], p))
    compile_pool.remember()
    assert compile_pool._stamp((9, 0)).exists()
    print(len(here), *sorted(seen))


if __name__ == "__main__":
    main()
