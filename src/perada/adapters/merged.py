"""A network with merged adapters, under the names and shapes that it had without them.

Where an adapter does not fit into its convolution, it becomes an extra 1×1 convolution behind it: `NAME.extra`.
"""

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..lanes import LaneConv2d, ResidualAdapter
from .residual import norm_behind, one_by_one

if TYPE_CHECKING:
    from . import Adapter

TOLERANCE = 1e-9  # of the largest logit, in float64


class NotMergeable(InputError):
    """Adapters that cannot go into the layers of their network."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(
            f"adapters cannot be merged into this network: {what}: {why}. Export a .pt2 or .onnx file, or the adapter "
            "alone"
        )


def merged_network(
    module: nn.Module, adapter: "Adapter", image: tuple[int, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the state_dict of a merged network, and the convolutions that have an extra 1×1 convolution behind them.

    module: the network with adapters, in eval mode and float64. adapter: their kind. image: the shape of one.
    """
    places = [n for n, m in module.named_modules() if _adapted(m)]
    extra = [n for n in places if not _folds(module, n)]
    try:
        return merged_state(module, adapter.merge(_beside(module, extra)), image, extra), extra
    except NotMergeable:
        if set(extra) == set(places):
            raise
        return merged_state(module, _beside(module, places), image, places), places


@torch.no_grad()
def merged_state(
    module: nn.Module, merged: nn.Module, image: tuple[int, ...], extra: Sequence[str] = ()
) -> dict[str, Tensor]:
    """Returns a state_dict for the network as it was before adapters were inserted; InputError if there is none.

    module: the network with adapters, in eval mode. merged: what `Adapter.merge` made of it. image: the shape of one.
    extra: the convolutions of `merged` that have a 1×1 convolution as their `adapter`.
    A merged convolution has a bias. Where the network has none, the batch norm behind the convolution subtracts it: its
    running mean becomes smaller. What the network then computes is compared with `module`.
    """
    shapes = {n: t.shape for n, t in module.state_dict().items() if ".adapter." not in f".{n}"}
    merged = copy.deepcopy(merged)
    added = {f"{name}.adapter" for name in extra}
    for name, layer in list(merged.named_modules()):
        if (
            isinstance(layer, nn.Conv2d)
            and layer.bias is not None
            and f"{name}.bias" not in shapes
            and name not in added
        ):
            norm = norm_behind(merged, name, layer)
            if norm is None:
                raise NotMergeable(name, "it has no bias, and no batch norm behind it that could take one")
            norm.running_mean -= layer.bias  # type: ignore[operator]
            layer.bias = None
    state = merged.state_dict()
    own = {n: t for n, t in state.items() if n.rpartition(".")[0] not in added}
    for name in sorted(own.keys() ^ shapes.keys()):
        raise NotMergeable(name, "the merged network has other tensors")
    for name, tensor in own.items():
        if tensor.shape != shapes[name]:
            raise NotMergeable(name, f"it would have the shape {list(tensor.shape)}, not {list(shapes[name])}")
    images = torch.rand(2, *image, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted, found = (copy.deepcopy(net).double()(images) for net in (module, merged))
    if not (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
        raise NotMergeable("the network", "its layers are not called in the order in which they are declared")
    return own | {n.replace(".adapter.", ".extra."): t for n, t in state.items() if n not in own}


def _adapted(layer: nn.Module) -> bool:
    return isinstance(layer, LaneConv2d) and isinstance(layer.adapter, ResidualAdapter)


def _folds(module: nn.Module, name: str) -> bool:
    """Returns whether an adapter fits into its convolution, which then keeps its shape."""
    conv: nn.Conv2d = module.get_submodule(name)  # type: ignore[assignment]
    return conv.groups == 1 and (conv.bias is not None or norm_behind(module, name, conv) is not None)


def _beside(module: nn.Module, names: Iterable[str]) -> nn.Module:
    """Returns a copy in which the adapters of these convolutions are 1×1 convolutions."""
    module = copy.deepcopy(module)
    for name in names:
        layer = module.get_submodule(name)
        layer.adapter = one_by_one(layer.adapter)  # type: ignore[arg-type]
    return module
