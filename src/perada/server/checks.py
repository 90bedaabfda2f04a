"""Checks of an upload's values: by themselves, and beside those of the other clients.

The same checks serve a network and a simulation of attacks. They look at values only: names, shapes and types are
checked where a message is read.
"""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from ..lanes import State, gather

RUNNING_MEAN, RUNNING_VAR = "running_mean", "running_var"  # the last parts of the names of a lane's buffers
MIN_OTHERS = 3  # uploads; of fewer a median says little, and they are compared with the broadcast instead
# How many standard deviations statistics may differ: a mean by these, a variance by their square. Honest clients of the
# digits (Dirichlet 0.05 and 0.1, several methods and rates) had means within 1.1, and variances of at most 44 times
# the cohort's median and 140 times the broadcast's: those of adapters in their first round.
OTHERS, BROADCAST = 20.0, 60.0
EPSILON = 1e-5  # of a batch norm


class Refused(Exception):
    """An upload or a message that is not accepted. The text says why, in words that anybody may read."""


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
        for key, names in by_key(old).items():
            distance = _norm(new[n].double() - old[n].double() for n in names)
            size = max(1.0, _norm(old[n].double() for n in names))
            if not distance <= bound * size:
                raise Refused(
                    f"its {f'{kind} {key}'.rstrip()} are {distance:.3g} from their reference, whose norm is {size:.3g} "
                    "(Rounds.norm_bound)"
                )


def unlike_others(uploads: State, reference: State) -> dict[int, str]:
    """Returns the lanes whose running statistics cannot be those of similar images, and why.

    Each channel is compared with the median of all lanes. A channel may be dead at most clients and not at one, so its
    unit is at least its layer's mean variance. No variance is too small: the norm adds its epsilon.
    """
    few = uploads.lanes < MIN_OTHERS
    like, whose, bound = (reference, "the broadcast's", BROADCAST) if few else (uploads, "the sites' median", OTHERS)
    refused: dict[int, str] = {}
    for name in variances(uploads):
        centre = name.removesuffix(RUNNING_VAR) + RUNNING_MEAN
        if centre not in uploads.buffers:
            continue
        variance, mean = (like.buffers[n].double().median(0).values for n in (name, centre))
        scale = variance.maximum(variance.mean()) + EPSILON
        wide = (uploads.buffers[name].double() / scale).flatten(1).amax(1).tolist()
        away = ((uploads.buffers[centre].double() - mean).abs() / scale.sqrt()).flatten(1).amax(1).tolist()
        for lane in range(uploads.lanes):
            if wide[lane] > bound**2:
                refused.setdefault(lane, f"its statistics {name} are {wide[lane]:.3g} times {whose}")
            elif away[lane] > bound:
                refused.setdefault(lane, f"its statistics {centre} are {away[lane]:.3g} deviations from {whose}")
    return refused


def refused_lanes(uploads: State, reference: State, bound: float) -> dict[int, str]:
    """Returns the lanes that a network refuses, and why: each by itself, then the rest beside each other."""
    refused: dict[int, str] = {}
    for lane in range(uploads.lanes):
        try:
            check_upload_values(gather(uploads, [lane]), reference, bound)
        except Refused as error:
            refused[lane] = str(error)
    rest = [lane for lane in range(uploads.lanes) if lane not in refused]
    beside = unlike_others(gather(uploads, rest), reference) if rest else {}
    return refused | {rest[k]: why for k, why in beside.items()}


def variances(state: State) -> list[str]:
    """Returns the names of running variances. What a method joins under a key has a meaning of its own."""
    return [n for n in state.buffers if "/" not in n and n.rpartition(".")[2] == RUNNING_VAR]


def by_key(tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Returns the names of a state's tensors by the key under which the method joins them; empty for the model's."""
    names: dict[str, list[str]] = {}
    for name in tensors:
        names.setdefault(name.rpartition("/")[0], []).append(name)
    return names


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in tensors))
