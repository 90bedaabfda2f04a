"""The checks of what a site reports: its upload and its numbers."""

import math
from collections.abc import Iterable

from flwr.app import RecordDict
from torch import Tensor

from ..config import in_keys
from ..lanes import LaneModel, State
from ..methods import Method, declared_upload
from .messages import Refused, flat, unflat, unpack

Number = float | list[float] | None
PARTS = {"params": "parameters", "buffers": "statistics"}


def why_not(error: Exception) -> str:
    """Returns why a reply is refused. A reply that breaks its reader is the site's fault, and does not end the run."""
    return in_keys(str(error)) if isinstance(error, Refused) else f"it cannot be read ({type(error).__name__})"


def expected_upload(method: Method, model: LaneModel, broadcast: State) -> State:
    """Returns the reference for an upload: the broadcast's values where it has the name, else the declared values."""
    declared, known = flat(declared_upload(method, model)), flat(broadcast)
    return unflat({name: known.get(name, tensor) for name, tensor in declared.items()})


def checked_upload(content: RecordDict, reference: State, bound: float) -> State:
    """Returns a site's upload if it is what the method declares and not absurdly far from the reference.

    Each part has a bound of its own: ‖upload − reference‖ ≤ bound · max(1, ‖reference‖). Parts are the parameters, the
    running statistics, and whatever the method joins to them under a key. SCAFFOLD's control variates (`dc/...`) are
    such a part. The broadcast has none of that name, so they are compared with the values that the method declares,
    which are zeros: their norm may be up to `bound`, whatever the norm of the model.
    """
    upload = unpack(content, reference)
    new, old = flat(upload), flat(reference)
    parts: dict[str, list[str]] = {}
    for name in old:
        parts.setdefault(name.rpartition("/")[0], []).append(name)
    for part, names in parts.items():
        distance = _norm(new[n].double() - old[n].double() for n in names)
        size = max(1.0, _norm(old[n].double() for n in names))
        if not distance <= bound * size:
            kind, _, key = part.partition("/")
            what = f"{PARTS[kind]} {key}".rstrip()
            raise Refused(
                f"its {what} are {distance:.3g} from their reference, whose norm is {size:.3g} (Rounds.norm_bound)"
            )
    return upload


def _norm(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float((t * t).sum()) for t in tensors))


def sample_count(value: Number, limit: int) -> float:
    """Returns the number of samples that a site reports; it becomes the site's weight in the mean."""
    if not isinstance(value, float) or not value >= 1 or not math.isfinite(value) or value != int(value):
        raise Refused("it did not say how many samples it has (Train.weighting=samples)")
    if value > limit:
        raise Refused(f"it says it has {value:.6g} samples, more than {limit} (Rounds.max_samples)")
    return value


def guard_losses(value: Number, candidates: int) -> list[float]:
    """Returns a site's losses of the guard's candidates; NaN is an abstention."""
    if not isinstance(value, list) or len(value) != candidates:
        raise Refused(f"{candidates} losses were asked for")
    if any(x < 0 or math.isinf(x) for x in value):
        raise Refused("a loss is negative or infinite")
    return value


def mean_loss(values: Iterable[Number]) -> float | None:
    """Returns the mean of the finite losses, or None if there is none."""
    finite = [x for x in values if isinstance(x, float) and math.isfinite(x)]
    return math.fsum(x / len(finite) for x in finite) if finite else None
