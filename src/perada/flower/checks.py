"""The checks of what a site reports: its upload and its numbers."""

import math
from collections.abc import Iterable, Mapping
from statistics import median

from flwr.app import RecordDict

from ..config import in_keys
from ..lanes import LaneModel, State
from ..methods import Method, declared_upload
from ..server.checks import MIN_OTHERS, check_upload_values
from .messages import Refused, flat, unflat, unpack

Number = float | list[float] | None
SHARE = 5.0  # a site weighs at most this many times as much as the median of a round's sites
MAX_LOSS = 1e6


def why_not(error: Exception) -> str:
    """Returns why a reply is refused. A reply that breaks its reader is the site's fault, and does not end the run."""
    return in_keys(str(error)) if isinstance(error, Refused) else f"it cannot be read ({type(error).__name__})"


def expected_upload(method: Method, model: LaneModel, broadcast: State) -> State:
    """Returns the reference for an upload: the broadcast's values where it has the name, else the declared values."""
    declared, known = flat(declared_upload(method, model)), flat(broadcast)
    return unflat({name: known.get(name, tensor) for name, tensor in declared.items()})


def checked_upload(content: RecordDict, reference: State, bound: float) -> State:
    """Returns a site's upload if it is what the method declares and its values can be believed."""
    upload = unpack(content, reference, finite=False)
    check_upload_values(upload, reference, bound)
    return upload


def sample_count(value: Number, limit: int) -> float:
    """Returns the number of samples that a site reports; it becomes the site's weight in the mean."""
    if not isinstance(value, float) or not value >= 1 or not math.isfinite(value) or value != int(value):
        raise Refused("it did not say how many samples it has (Train.weighting=samples)")
    if value > limit:
        raise Refused(f"it says it has {value:.6g} samples, more than {limit} (Rounds.max_samples)")
    return value


def clipped_samples(claims: Mapping[str, float]) -> dict[str, float]:
    """Returns the claims that are above `SHARE` times the median of all, and what is believed instead.

    Fewer than three claims say nothing about each other: `Rounds.max_samples` is their only bound.
    """
    most = SHARE * median(claims.values()) if len(claims) >= MIN_OTHERS else math.inf
    return {site: most for site, claim in claims.items() if claim > most}


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
    """Returns the mean of the finite losses, or None if there is none."""
    finite = [x for x in values if isinstance(x, float) and math.isfinite(x)]
    return math.fsum(x / len(finite) for x in finite) if finite else None
