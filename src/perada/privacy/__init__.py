"""Differential privacy: what is added to a training, what it costs, and how it is checked."""

from .options import UNSAFE, Privacy
from .sampling import Sampling, cohort_plan, plan

__all__ = ["UNSAFE", "Privacy", "Sampling", "cohort_plan", "plan"]
