"""The paper's experiments: what is run, what is chosen by validation data, what is kept, and the document of it."""

from __future__ import annotations

from .plans import NAMES, Choice, Experiment, Trial, experiments
from .running import Clock, Place, reproduce, state_of

__all__ = ["NAMES", "Choice", "Clock", "Experiment", "Place", "Trial", "experiments", "reproduce", "state_of"]
