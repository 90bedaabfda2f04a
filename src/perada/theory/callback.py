"""A callback that measures the global model's gradient after every round: what a folder cannot tell afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..callbacks import Callback
from ..errors import InputError
from .descent import BATCHES, Descent
from .gradients import running_mean, slope

if TYPE_CHECKING:
    from ..experiment import Experiment
    from ..runs.moment import Progress


class GradientNorms(Callback):
    """Keeps ‖∇L(w)‖² before the first round and after every one, on mini-batches of the clients' training images.

    `rounds` and `norms` are what was measured. `steepness` is the slope of the running mean over rounds on log scales.
    """

    def __init__(self, batches: int = BATCHES) -> None:
        if batches < 2:
            raise InputError(f"GradientNorms needs at least 2 mini-batches, not {batches}")
        self.batches = batches
        self._measured: dict[int, float] = {}

    def start(self, experiment: Experiment) -> None:
        """Draws the mini-batches, which stay the same in all rounds."""
        if experiment.global_model is None:
            raise InputError(f"{type(experiment.method).__name__} has no global model whose gradient could be measured")
        self.experiment = experiment
        self.descent = Descent(experiment, experiment.federation, self.batches)

    def round(self, progress: Progress) -> None:
        """Measures the gradient at the global model as it is now."""
        model = self.experiment.global_model
        assert model is not None
        self._measured[progress.round] = self.descent.at(progress.round, model).squared_norm

    @property
    def rounds(self) -> list[int]:
        """The rounds after which the gradient was measured; 0 is before the first."""
        return sorted(self._measured)

    @property
    def norms(self) -> list[float]:
        """‖∇L(w)‖² there."""
        return [self._measured[r] for r in self.rounds]

    def steepness(self) -> float | None:
        """Returns the slope of log(mean of the norms so far) over log(number of rounds)."""
        return slope([r + 1.0 for r in self.rounds], running_mean(self.norms))
