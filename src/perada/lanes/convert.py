"""Any torch module -> a `LaneModel`, by replacing only what is trained or mixes samples."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ..errors import InputError
from .front import Prefix
from .layers import LaneBatchNorm, LaneConv2d, LaneDropout, LaneGroupNorm, LaneLayerNorm, LaneLinear, recast
from .model import Group, LaneModel, per_sample
from .transformer import LaneAttention


def convert(
    module: nn.Module,
    trained: str | Iterable[str],
    groups: Mapping[str, Group],
    inert: frozenset[str],
    prefix: Prefix | None = None,
) -> LaneModel:
    """Makes what is trained lane-aware, in `module` itself. Returns its lanes. prefix: what was cut off its front."""
    groups = Groups(groups)
    if isinstance(trained, str):
        names = groups[trained].params
    else:
        names = frozenset(trained)
        missing = names - {n for n, _ in module.named_parameters()}
        if missing:
            raise InputError(f"no such parameters: {', '.join(sorted(missing))}")
    _replace(module, names)
    return LaneModel(module, names, inert, groups, prefix)


class Groups(dict[str, Group]):
    """Parameter groups by name."""

    def __missing__(self, name: str) -> Group:
        raise InputError(f"this network has no parameter group {name!r}; it has {', '.join(self)}")


def last_linear(module: nn.Module) -> str:
    """Returns the name of the last linear layer, which is the prediction layer unless another is named."""
    names: list[str] = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
    if not names:
        raise InputError("this network has no linear layer that could be its head: name the prediction layer (head=)")
    return names[-1]


def parent_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that holds `name`, and the last part of that name."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def _replace(module: nn.Module, trained: frozenset[str]) -> None:
    made: dict[nn.Module, nn.Module | None] = {}
    for name, layer in list(module.named_modules(remove_duplicate=False)):
        if isinstance(layer, LANE_AWARE):
            continue
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # refuses torch's fast path, which reads weights and calls no submodule
        if layer not in made:  # a layer may be used under several names
            within = isinstance(layer, nn.MultiheadAttention)  # which never calls the layer that it has
            own = {n: p for n, p in layer.named_parameters(name, recurse=within) if n in trained}
            try:
                made[layer] = _lane_aware(layer, name, own)
            except ValueError as error:
                raise InputError(f"{name or type(layer).__name__}: {error}") from error
        new = made[layer]
        if new is not None:
            parent, last = parent_of(module, name)
            setattr(parent, last, new)


class LaneNormAct(LaneBatchNorm):
    """timm's BatchNormAct2d: a batch norm that applies dropout and an activation, too."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor, add: Tensor | None = None, relu: bool = False) -> Tensor:
        return self.act(self.drop(super().forward(x, add, relu)))  # type: ignore[no-any-return]


def _lane_norm(layer: _BatchNorm) -> LaneBatchNorm:
    if type(layer).forward is _BatchNorm.forward:
        return LaneBatchNorm.of(layer)
    if type(layer).__name__ != "BatchNormAct2d":
        raise ValueError(f"{type(layer).__name__} has no lane-aware form; use nn.BatchNorm2d")
    new = LaneNormAct.of(layer)
    new.drop, new.act = layer.drop, layer.act  # type: ignore[assignment]
    return new


def _lane_aware(layer: nn.Module, name: str, trained: Mapping[str, nn.Parameter]) -> nn.Module | None:
    """Returns the lane-aware form of a layer, or None for a layer that can stay.

    A frozen layer can stay that treats samples one by one, and a module of its own kind whose trained parameters all
    meet a batch of samples (`model.per_sample`).
    """
    if isinstance(layer, _BatchNorm):
        return _lane_norm(layer)
    if isinstance(layer, nn.Dropout):
        return LaneDropout(layer.p, name)
    if isinstance(layer, _DropoutNd) and layer.p > 0:
        raise ValueError(f"{type(layer).__name__} has no lane-aware form; use nn.Dropout or p=0")
    if not trained:  # a convolution has better forms on a GPU (`conv.best_form`)
        usual = type(layer) is nn.Conv2d and layer.groups == 1 and layer.padding_mode == "zeros"
        return LaneConv2d.of(layer) if usual and layer.bias is None and not isinstance(layer.padding, str) else None
    if type(layer) is nn.Conv2d:
        return LaneConv2d.of(layer)
    if type(layer) is nn.MultiheadAttention:
        return LaneAttention.of(layer)
    for kind, form in KINDS.items():
        if type(layer) is kind or (kind is nn.LayerNorm and _of_timm(layer)):
            return recast(layer, form)
    if all(per_sample(layer, p) for p in trained.values()):
        return None
    raise ValueError(f"a trained {type(layer).__name__} has no lane-aware form; keep it frozen")


KINDS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: LaneLinear,
    NonDynamicallyQuantizableLinear: LaneLinear,
    nn.LayerNorm: LaneLayerNorm,
    nn.GroupNorm: LaneGroupNorm,
}
LANE_AWARE = (LaneLinear, LaneConv2d, LaneBatchNorm, LaneLayerNorm, LaneGroupNorm, LaneDropout, LaneAttention)


def _of_timm(layer: nn.Module) -> bool:
    """Returns whether this is timm's layer norm, which computes what torch's does."""
    kind = type(layer)
    return isinstance(layer, nn.LayerNorm) and kind.__name__ == "LayerNorm" and kind.__module__.startswith("timm.")


SHORTCUT = re.compile(r"\.(downsample|shortcut)\.")  # the shortcut of a block of a ResNet
RESNET = {"conv1.weight", "bn1.weight", "layer1.0.conv1.weight", "layer1.0.bn1.weight"}
FIRST_NORM = re.compile(r"layer\d\.0\.bn1\.weight")


EMBEDDINGS = re.compile(  # in front of a vision transformer's blocks: timm's names, transformers' and torchvision's
    r"(cls_token|reg_token|pos_embed)$|patch_embed\.|(\w+\.)?embeddings\.|class_token$|conv_proj\.|encoder\.pos_embedding$"
)


def is_resnet(params: Iterable[str]) -> bool:
    """Returns whether these are the parameters of a ResNet in torchvision's layout, or of one without its front."""
    names = set(params)
    cut = not any(n.startswith(("conv1.", "bn1.")) for n in names)
    return names >= RESNET or (cut and any(FIRST_NORM.fullmatch(n) for n in names))


def default_groups(module: nn.Module, head: str) -> Groups:
    """Returns the groups of a network: full, adapter, adapter_modules, output, batch_norm, feature_extractor and
    everything.

    A ResNet in torchvision's layout also has `input`: the stem and the FIRST convolution of every block, with their
    norms. The affines of its shortcuts' norms belong to neither batch_norm nor adapter. In a vision transformer `input`
    is what makes tokens of an image: patches, class token and position embeddings. Another network has `input` if it
    names these tensors itself: `inputs_at`, a regular expression. With LoRA there is `lora_b`: the second matrices.
    """
    params = [n for n, _ in module.named_parameters()]
    buffers = [n for n, _ in module.named_buffers() if n.endswith(("running_mean", "running_var"))]
    batch_norms = _BatchNorm, LaneBatchNorm
    kinds = {n: m for n, m in module.named_modules() if isinstance(m, (*batch_norms, nn.LayerNorm, nn.GroupNorm))}

    def owner(name: str) -> str:
        return name.rpartition(".")[0]

    inputs = getattr(module, "inputs_at", r"(^|\.)(conv1|bn1)\.\w+$")

    def first(name: str) -> bool:
        return re.search(inputs, name) is not None and ".adapter." not in name

    resnet = is_resnet(params)
    added = frozenset(n for n in params if ".adapter." in n)
    everything = Group(frozenset(params), frozenset(buffers))
    modules = Group(added, frozenset(n for n in buffers if ".adapter." in n))
    full = everything - modules
    output = Group(frozenset(n for n in params if owner(n) == head), frozenset())
    norms = frozenset(n for n in full.params if owner(n) in kinds and not (resnet and SHORTCUT.search(n)))
    # Where batch norms are personal, so are the statistics of every norm, also of those left out here.
    other_norms = frozenset(n for n in norms if not isinstance(kinds[owner(n)], batch_norms))
    groups = Groups(
        {
            "full": full,
            "adapter": Group(added | norms | output.params, everything.buffers),
            "adapter_modules": modules,
            "output": output,
            "batch_norm": Group(norms - other_norms, full.buffers),
            "feature_extractor": full - output,
            "everything": everything,
        }
    )
    if resnet or hasattr(module, "inputs_at"):
        groups["input"] = Group(frozenset(filter(first, full.params)), frozenset(filter(first, full.buffers)))
    elif embeddings := frozenset(n for n in full.params if EMBEDDINGS.match(n)):
        groups["input"] = Group(embeddings, frozenset())
    if second := frozenset(n for n in added if n.endswith(".adapter.lora_B.weight")):
        groups["lora_b"] = Group(second, frozenset())
    return groups
