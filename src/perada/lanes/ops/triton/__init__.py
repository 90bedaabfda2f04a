"""The operations of a GPU, as kernels in Triton.

A small network on a GPU spends its time on starting kernels and on reading and writing activations, so each kernel here
does the work of several. Each operation takes its kernel where that fits, and plain torch otherwise.
"""

from ..plain import Ops
from . import adapter, columns, compile_pool, flat, images, launch, loss, norm, stem


class Triton(Ops):
    """`Ops` in kernels; each line names the file of one."""

    fast = True

    norm = norm.norm
    norm_and_pool = stem.norm_and_pool
    stem_norm = stem.stem_norm
    adapter = adapter.adapter
    conv = columns.conv
    frozen_conv = columns.frozen_conv
    blocks = images.blocks
    side_by_side = launch.side_by_side
    join = launch.join

    cross_entropy = loss.cross_entropy
    divergence = loss.divergence

    views = images.views
    client_batch = images.client_batch
    chunk = images.chunk

    sgd = flat.sgd
    adam = flat.adam
    write = flat.write
    settle = flat.settle

    get_ready = compile_pool.get_ready
    compile = launch.compile_all
