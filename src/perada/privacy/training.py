"""SGD with private gradients on the lanes of many clients."""

from __future__ import annotations

from collections.abc import Sequence

from ..data.federation import Federation
from ..errors import InputError
from ..lanes import Group, LaneModel, Loss, Options, Pull, Result, State, sgd, way_for
from .apart import check_apart
from .draws import PoissonBatches
from .mechanism import Mechanism
from .options import Privacy
from .randomness import Key, randomness_of
from .sampling import plan


def private_sgd(
    model: LaneModel,
    federation: Federation,
    start: State,
    loss: Loss,
    owners: Sequence[int],
    lr: Sequence[float],
    epochs: Sequence[int],
    batch: int,
    privacy: Privacy,
    keys: Sequence[Key],
    pull: Pull | None = None,
    options: Options = Options(norm="running"),
    of: Group | None = None,
    slots: int = 0,
) -> Result:
    """Trains lane k on the data of client `owners[k]`, for the steps that `plan` says.

    The pull does not depend on the step's data, so it is added behind the noise. keys: of the lanes; they count only
    where draws are deterministic, and then no two trainings may have the same.
    """
    if not privacy.noise:
        raise InputError("Privacy.target is not solved: set Privacy.noise")
    randomness = randomness_of(privacy, model.device, keys)
    plans = [plan(len(federation.clients[c].train), batch, e, privacy) for c, e in zip(owners, epochs, strict=True)]
    dtype = next(iter(start.params.values())).dtype
    batches = PoissonBatches(federation, owners, plans, randomness, dtype)
    height, width = map(int, federation.images.shape[-2:])
    check_apart(model, (height, width))
    slopes = Mechanism(privacy.noise, privacy.clip, batch, randomness, way_for(model, (height, width)))
    steps = [p.steps for p in plans]
    return sgd(model, start, batches, loss, lr, steps, pull, options, of, slots, slopes)
