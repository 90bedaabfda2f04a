"""What the server believes of an upload: its values by themselves, and beside those of the other clients.

The same checks serve a network and a simulation of attacks. They look at values only: names, shapes and types are
checked where a message is read.
"""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..lanes import State

VARIANCE = "running_var"  # the last part of its name; a lane's other buffers are means


class Refused(Exception):
    """An upload or a message that is not believed. The text says why, in words that anybody may read."""


def check_finite(state: State) -> None:
    """Refuses values that are not finite."""
    for kind, tensors in (("params", state.params), ("buffers", state.buffers)):
        for name, tensor in tensors.items():
            if not tensor.isfinite().all():
                raise Refused(f"{kind}/{name} holds values that are not finite")


def check_upload_values(upload: State, reference: State, bound: float) -> None:
    """Refuses one lane that is not finite, has a negative variance, or is absurdly far from the reference.

    Each part has a bound of its own: ‖upload − reference‖ ≤ bound · max(1, ‖reference‖). Parts are the parameters, the
    running statistics, and whatever the method joins to them under a key. SCAFFOLD's control variates (`dc/...`) are
    such a part. The broadcast has none of that name, so they are compared with the values that the method declares,
    which are zeros: their norm may be up to `bound`, whatever the norm of the model.
    """
    check_finite(upload)
    for name in variances(upload):
        if (upload.buffers[name] < 0).any():
            raise Refused(f"its statistics {name} hold a negative variance")
    for kind, new, old in (
        ("parameters", upload.params, reference.params),
        ("statistics", upload.buffers, reference.buffers),
    ):
        for key, names in _by_key(old).items():
            distance = _norm(new[n].double() - old[n].double() for n in names)
            size = max(1.0, _norm(old[n].double() for n in names))
            if not distance <= bound * size:
                raise Refused(
                    f"its {f'{kind} {key}'.rstrip()} are {distance:.3g} from their reference, whose norm is {size:.3g} "
                    "(Rounds.norm_bound)"
                )


def variances(state: State) -> list[str]:
    """Returns the names of running variances. What a method joins under a key has a meaning of its own."""
    return [n for n in state.buffers if "/" not in n and n.rpartition(".")[2] == VARIANCE]


def _by_key(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Returns the names of a state's tensors by the key under which the method joins them; empty for the model's."""
    parts: dict[str, list[str]] = {}
    for name in tensors:
        parts.setdefault(name.rpartition("/")[0], []).append(name)
    return parts


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in tensors))
