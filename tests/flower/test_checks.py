"""What the server believes of an upload's values."""

from __future__ import annotations

import pytest
import torch

from perada.lanes import State
from perada.server.checks import Refused, check_upload_values


def state_of(mean: list[float], var: list[float], weight: float = 1.0) -> State:
    buffers = {"bn.running_mean": torch.tensor([mean]), "bn.running_var": torch.tensor([var])}
    return State({"w": torch.full((1, 4), weight)}, buffers)


REFERENCE = state_of([0.0, 1.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("upload", "line"),
    [
        (state_of([0.0, 1.0], [1.0, float("nan")]), "buffers/bn.running_var holds values that are not finite"),
        (state_of([0.0, 1.0], [-30.0, 2.0]), "its statistics bn.running_var hold a negative variance"),
        (state_of([0.0, 1.0], [1.0, 2.0], weight=300.0), "its parameters are 598 from their reference"),
        (state_of([500.0, 1.0], [1.0, 2.0]), "its statistics are 500 from their reference"),
    ],
)
def test_values_that_make_no_sense_are_refused(upload: State, line: str) -> None:
    with pytest.raises(Refused, match=line):
        check_upload_values(upload, REFERENCE, 100.0)


def test_values_that_an_honest_site_may_send() -> None:
    """A variance that has decayed to zero in a dead channel, and a negative mean."""
    check_upload_values(state_of([-3.0, 1.0], [0.0, 2.0]), REFERENCE, 100.0)
