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

from perada.lanes import LaneBatchNorm, LaneConv2d, Norm, ResidualAdapter, Stem
from perada.lanes.layers import Context
from perada.lanes.ops import AdamPlan, Pulled
from perada.lanes.ops.triton import (
    Triton,
    adapter,
    columns,
    compile_pool,
    flat,
    images,
    launch,
    loss,
    norm,
    stem,
    tiles,
)

TRITON = Triton()
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


def layer(kind: Any, lanes: int, trained: bool, dtype: torch.dtype, mode: Norm, **shape: Any) -> Any:
    """A layer that holds lanes itself."""
    new = kind(64, **shape).to(dtype)
    for name, p in list(new.named_parameters()) + list(new.named_buffers()):
        path, _, last = name.rpartition(".")
        owner, held = new.get_submodule(path), p.detach().expand(lanes, *p.shape).contiguous()
        if isinstance(p, torch.nn.Parameter):
            setattr(owner, last, torch.nn.Parameter(held, requires_grad=trained))
        else:
            setattr(owner, last, held.to(p.dtype if last == "key" else torch.float32))
    for module in new.modules():
        if hasattr(module, "context"):
            module.context = Context(TRITON, mode)
    return new


def everything(dtype: torch.dtype, lanes: int, batch: int) -> None:
    for mode in ("train", "running"):
        trained = mode == "train"
        given = lanes, trained, dtype, mode
        with torch.set_grad_enabled(trained):
            maps, pool = torch.randn(lanes * batch, 64, 16, 16).to(dtype), torch.nn.MaxPool2d(3, 2, 1)
            norm = layer(LaneBatchNorm, *given)
            x = norm.and_pool(maps, pool) + norm.and_pool(Stem.of(maps[:batch], pool).by(lanes), pool)
            x = layer(ResidualAdapter, *given, dropout=0.1 if trained else 0.0, name="a")(x)
            x = norm(x, x, relu=True)
        if trained:
            x.sum().backward()


def counted(source: Any, *args: Any, make_ir: Any = ASTSource.make_ir) -> Any:
    here.append(source.name)
    return make_ir(source, *args)


def main() -> None:
    ASTSource.make_ir = counted
    compile_pool.start((9, 0))
    for module in (adapter, columns, flat, images, loss, norm, stem, tiles):
        if hasattr(module, "launch"):
            module.launch = compile_only
    launch.launch = compile_only
    everything(torch.bfloat16, 2, 64)  # rows in parts
    everything(torch.float32, 2, 1)  # one program has all rows
    p, some, moves = torch.zeros(2, 64), torch.ones(2, 1), torch.ones(2, dtype=torch.bool)
    for g, pull in ((p, None), (p.bfloat16(), Pulled([p], some, p[0]))):
        for change in TRITON.sgd([p], [g], some, pull, 0.0, []):
            change.write(moves)
    for change in TRITON.adam([p], [p], [p], [p], some.double(), AdamPlan(p, (0.9, 0.999), 1e-8)):
        change.write(moves)
    whole, row = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.int64)
    TRITON.settle(whole, whole, moves, p[:, 0], p[:, 0], p)
    TRITON.cross_entropy(p, whole)
    TRITON.divergence(p, p, 2.0)
    conv = LaneConv2d.of(torch.nn.Conv2d(64, 64, 3, padding=1, bias=False))
    trained = layer(lambda channels: conv, 2, True, torch.bfloat16, "train")
    maps = torch.zeros(4, 64, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    TRITON.conv(maps, trained, "columns").sum().backward()
    TRITON.chunk(whole[:1], whole[:1], whole[:1], p)
    TRITON.client_batch(row[None], whole, whole, whole, whole, whole)
    raw, values = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.ones(3, 1, 1).bfloat16()
    TRITON.views(raw, row, whole, None, (7, 3, 1), (values, values))
    TRITON.blocks(torch.zeros(2, 3, 8, 8, dtype=torch.bfloat16))
    compile_pool.remember()
    assert compile_pool._stamp((9, 0)).exists()
    print(len(here), *sorted(seen))


if __name__ == "__main__":
    main()
