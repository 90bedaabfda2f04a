"""Differential privacy: what is added to a training, what it costs, and how it is checked."""

from .options import Privacy

__all__ = ["Privacy"]
