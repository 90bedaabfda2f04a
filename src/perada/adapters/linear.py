"""Linear layers that take an adapter, also those within torch's attention."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import InputError
from ..lanes import AdaptedLinear, LaneAttention, parent_of

KINDS = (nn.Linear, NonDynamicallyQuantizableLinear)  # no other subclass: its own forward would be lost


def linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that take an adapter and have none, by name: linear layers, and every `nn.MultiheadAttention`
    for its product for queries, keys and values."""
    layers = {n: m for n, m in module.named_modules() if ".adapter." not in n}
    free = {
        n for n, m in layers.items() if isinstance(m, nn.MultiheadAttention) and getattr(m, "adapter", None) is None
    }
    return {n: m for n, m in layers.items() if type(m) in KINDS or n in free}


def adapt_at(module: nn.Module, name: str, make: Callable[[str, Tensor], nn.Module]) -> None:
    """Puts the adapter that `make(name, weight)` returns behind a linear layer, or into an attention behind its product
    for queries, keys and values."""
    layer = module.get_submodule(name)
    if isinstance(layer, nn.MultiheadAttention):
        attention = _opened(module, name)
        attention.adapter = make(name, attention.in_proj_weight)
        return
    parent, last = parent_of(module, name)
    if isinstance(parent, nn.MultiheadAttention):
        parent = _opened(module, name.rpartition(".")[0])
    assert isinstance(layer, nn.Linear)
    setattr(parent, last, AdaptedLinear.of(layer, make(name, layer.weight)))


def _opened(module: nn.Module, name: str) -> LaneAttention:
    """Returns an attention in the form that calls its layers; puts it in the place of torch's own."""
    layer = module.get_submodule(name)
    if not isinstance(layer, LaneAttention):
        assert isinstance(layer, nn.MultiheadAttention)
        try:
            layer = LaneAttention.of(layer)
        except ValueError as error:
            raise InputError(f"{name}: {error}") from error
        parent, last = parent_of(module, name)
        setattr(parent, last, layer)
    return layer
