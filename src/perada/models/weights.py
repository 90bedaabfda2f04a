"""Pretrained weights from a file, torchvision, timm or transformers; what did not fit is always reported."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from ..errors import InputError
from ..inputs import user_path
from .efficientnet import SCALES, own_names, weights_file
from .vit import resampled

# What ModelOptions.weights may be besides a file.
WEIGHTS = ("package", "embedded", "torchvision", "timm", "transformers", "fedavg", "random")
LITES = ", ".join(SCALES)


@dataclass(frozen=True)
class WeightReport:
    """What a checkpoint gave to a network, by key."""

    source: str
    loaded: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    head: str  # what became of the prediction layer

    def lines(self) -> list[str]:
        out = [f"weights: {self.loaded} tensors from {self.source}; head {self.head}"]
        if self.missing:
            out.append(f"not in the file, left as initialised: {', '.join(self.missing)}")
        if self.unexpected:
            out.append(f"in the file, not in the network: {', '.join(self.unexpected)}")
        return out


def read_weights(source: str, backbone: str) -> dict[str, Tensor]:
    """Returns tensors by name (float32), of a `.safetensors` or `.pth` file, `package`, `embedded` or a library."""
    if source == "package":
        if backbone not in SCALES:
            raise InputError(
                f"no package has weights of {backbone!r}, only of {LITES}: set ModelOptions.weights to a file, or to "
                "fedavg, as the preset folder-fedavg does"
            )
        return own_names(_read_file(weights_file(backbone)), backbone)
    if source == "embedded":
        asset = resources.files("perada") / "data" / "assets" / f"{backbone}.safetensors"
        with resources.as_file(asset) as path:
            if not path.is_file():
                raise InputError(
                    f"no embedded weights for {backbone!r}: set ModelOptions.weights to a file or 'random'"
                )
            return _read_file(path)
    if source in LIBRARIES:
        return _from_library(source, backbone)
    path = user_path(source)
    if not path.is_file():
        raise InputError(
            f"ModelOptions.weights: no file {source!r}; give a .safetensors or .pth file, or one of "
            + ", ".join(map(repr, WEIGHTS))
        )
    return _read_file(path)


def _read_file(path: Path) -> dict[str, Tensor]:
    content: object
    length = path.stat().st_size
    try:
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
            content = content.get("state_dict", content) if isinstance(content, dict) else content
    except Exception as error:  # a damaged file can break a reader in any way
        raise InputError(
            f"ModelOptions.weights: cannot read {path}: it is damaged, or holds more than tensors"
        ) from error
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(t, Tensor) for k, t in content.items()
    ):
        raise InputError(f"ModelOptions.weights: {path} holds no flat dictionary of tensors (a state_dict)")
    for name, tensor in content.items():
        if why := _unusable(tensor, length):
            raise InputError(f"ModelOptions.weights: {path}: {name} {why}")
    return {n.removeprefix("module."): t.float() if t.is_floating_point() else t for n, t in content.items()}


def _unusable(tensor: Tensor, length: int) -> str:
    """Returns why a tensor of a file of `length` bytes cannot be a weight; empty if it can."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_complex() or tensor.is_meta:
        return "is not a plain tensor of real numbers"
    if tensor.numel() * tensor.element_size() > length:  # one number can stand for many
        return f"has shape {list(tensor.shape)}, which is more than the file has"
    return "" if not tensor.is_floating_point() or tensor.float().isfinite().all() else "has values that are not finite"


def package(name: str, module: str) -> Any:
    """Returns a module of an optional package, or says in one line why there is none."""
    try:
        return import_module(module)
    except (ImportError, RuntimeError) as error:  # a CUDA build next to a CPU torch raises RuntimeError
        extra = "vision" if name == "torchvision" else "transformers"
        install = f"pip install 'perada[{extra}]'"
        first = next(iter(str(error).splitlines()), "")
        raise InputError(f"{name} cannot be imported ({first}): {install}") from error


def _torchvision(name: str) -> nn.Module | None:
    models = package("torchvision", "torchvision.models")
    known = name in models.list_models(module=models)
    return models.get_model(name, weights="DEFAULT") if known else None


def _timm(name: str) -> nn.Module | None:
    models = package("timm", "timm")
    return models.create_model(name, pretrained=True) if models.is_model(name) else None


def _transformers(name: str) -> nn.Module | None:
    auto = package("transformers", "transformers")
    return auto.AutoModelForImageClassification.from_pretrained(name, local_files_only=True)  # type: ignore[no-any-return]


LIBRARIES: dict[str, Callable[[str], nn.Module | None]] = {
    "torchvision": _torchvision,
    "timm": _timm,
    "transformers": _transformers,
}


def _from_library(library: str, backbone: str) -> dict[str, Tensor]:
    try:
        net = LIBRARIES[library](backbone.removeprefix(f"{library}:"))
    except (OSError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"ModelOptions.weights={library}: the weights of {backbone!r} cannot be loaded: {first}"
        ) from error
    if net is None:
        raise InputError(f"{library} has no weights for {backbone!r}")
    return dict(net.state_dict())


def load_into(net: nn.Module, tensors: dict[str, Tensor], source: str, head: str = "fc") -> WeightReport:
    """Copies what fits and reports it. A head for other classes is left out; any other wrong shape is an error."""
    own = {k: t for k, t in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    loaded = {k: t for k, t in tensors.items() if not k.endswith("num_batches_tracked")}
    fits = "loaded"
    if any(k.startswith(f"{head}.") and (k not in own or own[k].shape != t.shape) for k, t in loaded.items()):
        loaded = {k: t for k, t in loaded.items() if not k.startswith(f"{head}.")}
        fits = "new (the file's is for other classes)"
    elif not any(k.startswith(f"{head}.") for k in loaded):
        fits = "new (the file has none)"
    loaded = {k: resampled(k, t, own[k]) if k in own else t for k, t in loaded.items()}
    wrong = [k for k in own.keys() & loaded.keys() if own[k].shape != loaded[k].shape]
    if wrong:
        k = min(wrong)
        raise InputError(
            f"ModelOptions.weights: {source}: {k} has shape {list(loaded[k].shape)} but the network needs "
            f"{list(own[k].shape)}: is ModelOptions.backbone the one these weights were made for?"
        )
    shared = own.keys() & loaded.keys()
    if not shared:
        raise InputError(
            f"ModelOptions.weights: no key of {source} fits this network: is it a checkpoint of another one?"
        )
    for k in shared:
        own[k].copy_(loaded[k])
    missing = tuple(sorted(k for k in own.keys() - loaded.keys() if fits == "loaded" or not k.startswith(f"{head}.")))
    return WeightReport(source, len(shared), missing, tuple(sorted(loaded.keys() - own.keys())), fits)
