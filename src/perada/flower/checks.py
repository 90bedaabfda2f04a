"""The checks of what a site reports: its upload and its numbers."""

import math
from collections.abc import Iterable

from flwr.app import RecordDict

from ..config import in_keys
from ..lanes import State
from ..server.aggregate import ABSURD
from ..server.checks import Refused, check_upload_values
from .messages import unpack

Number = float | list[float] | None
MAX_LOSS = ABSURD


def why_not(error: Exception) -> str:
    """Returns why a reply is refused. A reply that breaks its reader is the site's fault, and does not end the run."""
    return in_keys(str(error)) if isinstance(error, Refused) else f"it cannot be read ({type(error).__name__})"


def checked_upload(content: RecordDict, reference: State, bound: float, statistics: bool = True) -> State:
    """Returns a site's upload if it is what the method declares and its values can be believed.

    statistics: whether its running statistics are used; the reference's replace them otherwise.
    """
    upload = unpack(content, reference, finite=False)
    upload = upload if statistics else State(upload.params, dict(reference.buffers))
    check_upload_values(upload, reference, bound)
    return upload


def sample_count(value: Number, limit: int) -> float:
    """Returns the number of samples that a site reports; it becomes the site's weight in the mean."""
    if not isinstance(value, float) or not value >= 1 or not math.isfinite(value) or value != int(value):
        raise Refused("it did not say how many samples it has (Train.weighting=samples)")
    if value > limit:
        raise Refused(f"it says it has {value:.6g} samples, more than {limit} (Rounds.max_samples)")
    return value


def guard_losses(value: Number, candidates: int) -> list[float]:
    """Returns a site's losses of the guard's candidates.

    A site has an opinion on all candidates or on none: with a NaN among its losses all are NaN. A loss above
    `MAX_LOSS` says that a candidate is useless, and no number says more.
    """
    if not isinstance(value, list) or len(value) != candidates:
        raise Refused(f"{candidates} losses were asked for")
    if any(x < 0 or math.isinf(x) for x in value):
        raise Refused("a loss is negative or infinite")
    if any(math.isnan(x) for x in value):
        return [math.nan] * candidates
    return [min(x, MAX_LOSS) for x in value]


def mean_loss(values: Iterable[Number]) -> float | None:
    """Returns the mean of the losses that a model can have, or None if there is none: they are for the table only."""
    losses = [x for x in values if isinstance(x, float) and abs(x) <= MAX_LOSS]
    return math.fsum(x / len(losses) for x in losses) if losses else None
