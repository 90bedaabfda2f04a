"""A network with merged adapters, under the names and shapes that it had without them."""

import copy

import torch
from torch import Tensor, nn

from ..errors import InputError
from .residual import norm_behind

TOLERANCE = 1e-9  # of the largest logit, in float64


@torch.no_grad()
def merged_state(module: nn.Module, merged: nn.Module, image: tuple[int, ...]) -> dict[str, Tensor]:
    """Returns a state_dict for the network as it was before adapters were inserted; InputError if there is none.

    module: the network with adapters, in eval mode. merged: what `Adapter.merge` made of it. image: the shape of one.
    A merged convolution has a bias. Where the network has none, the batch norm behind the convolution subtracts it: its
    running mean becomes smaller. What the network then computes is compared with `module`.
    """
    shapes = {n: t.shape for n, t in module.state_dict().items() if ".adapter." not in f".{n}"}
    merged = copy.deepcopy(merged)
    for name, layer in list(merged.named_modules()):
        if isinstance(layer, nn.Conv2d) and layer.bias is not None and f"{name}.bias" not in shapes:
            norm = norm_behind(merged, name, layer)
            if norm is None:
                raise _refusal(name, "it has no bias, and no batch norm behind it that could take one")
            norm.running_mean -= layer.bias  # type: ignore[operator]
            layer.bias = None
    state = merged.state_dict()
    for name in sorted(state.keys() ^ shapes.keys()):
        raise _refusal(name, "the merged network has other tensors")
    for name, tensor in state.items():
        if tensor.shape != shapes[name]:
            raise _refusal(name, f"it would have the shape {list(tensor.shape)}, not {list(shapes[name])}")
    images = torch.rand(2, *image, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted, found = (copy.deepcopy(net).double()(images) for net in (module, merged))
    if not (found - wanted).abs().max() <= TOLERANCE * wanted.abs().max():
        raise _refusal("the network", "its layers are not called in the order in which they are declared")
    return state


def _refusal(what: str, why: str) -> InputError:
    return InputError(
        f"adapters cannot be merged into this network: {what}: {why}. Export a .pt2 or .onnx file, or the adapter alone"
    )
