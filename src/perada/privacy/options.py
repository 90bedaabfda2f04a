"""The `[privacy]` section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..errors import InputError
from ..fields import check_fields

UNSAFE = (
    "Privacy.deterministic: UNSAFE: the noise follows from RunOptions.seed, so whoever knows the seed can "
    "remove it; this is for tests alone"
)


@dataclass(frozen=True)
class Privacy:
    """The `[privacy]` section: off unless `noise` or `target` is above 0.

    At level `sample` every gradient of a sample is clipped and noise is added at the client (DP-SGD): what a client
    sends says little about any one of its samples. At level `client` the server clips every upload's change and adds
    noise to their sum: the global model says little about any one client, if the server is trusted.
    """

    level: Literal["sample", "client"] = "sample"
    noise: float = 0.0  # σ: the noise's standard deviation, in units of `clip`
    clip: float = 1.0  # C: the bound on the norm of a sample's gradient, or of a client's change
    delta: float = 1e-5  # δ of (ε, δ)
    budget: float = 0.0  # ε that no client may pass: it stops taking part before; 0 is none
    target: float = 0.0  # ε at the planned end, from which `noise` is solved; 0: `noise` is given
    most: int = 0  # samples of a batch that count, at most (level sample); 0: B + 4 √B
    accountant: Literal["pld", "rdp"] = "pld"
    deterministic: bool = False  # UNSAFE: noise that follows from run.seed, for tests alone

    def __post_init__(self) -> None:
        check_fields(self, {"noise": 0, "budget": 0, "target": 0, "most": 0}, positive=("clip", "delta"))
        if self.delta >= 1:
            raise InputError(f"Privacy.delta must be below 1, not {self.delta}")
        if self.noise and self.target:
            raise InputError("Privacy.noise and Privacy.target exclude each other: set one, the other follows")
        if self.budget and not self.on:
            raise InputError("Privacy.budget needs noise: set Privacy.noise or Privacy.target")

    @property
    def on(self) -> bool:
        return self.noise > 0 or self.target > 0

    @property
    def of_samples(self) -> bool:
        """Whether clients train with DP-SGD."""
        return self.on and self.level == "sample"

    @property
    def of_clients(self) -> bool:
        """Whether the server adds noise to the clients' sum."""
        return self.on and self.level == "client"

    def capacity(self, batch: int) -> int:
        """Returns the fixed number of places in a batch whose expected size is `batch`."""
        return self.most or batch + math.ceil(4 * math.sqrt(batch))
