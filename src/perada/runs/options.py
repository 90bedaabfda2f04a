"""How a run is carried out, and whether its parts fit together."""

from dataclasses import dataclass
from typing import Literal

from ..client.trainer import Train
from ..data import VALIDATION, Federation
from ..errors import InputError
from ..fields import check_fields
from ..methods import Finisher, Method
from ..predict.drift import Drift
from ..privacy import Privacy
from ..server.distill import Distill


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out: the `[run]` section."""

    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"  # auto: bf16 on a GPU, else fp32
    eval_every: int = 1
    checkpoint_every: int = 1
    lanes: int = 0  # most lanes trained at once; 0 is all of a cohort's, or as many as there is memory for
    shifts: bool = False  # at the end, test on corrupted copies of the test images too
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)  # of those

    def __post_init__(self) -> None:
        check_fields(self, {"seed": 0, "eval_every": 1, "checkpoint_every": 1, "lanes": 0})
        if not self.severities or not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise InputError(f"RunOptions.severities must be numbers from 1 to 5, not {list(self.severities)}")
        if self.seed >= 2**63:
            raise InputError(f"RunOptions.seed must be below 2^63, not {self.seed}")


def check_kinds(
    federation: Federation, method: Method, train: Train, distill: Distill, drift: Drift, privacy: Privacy
) -> None:
    """Refuses arguments of the wrong type."""
    for name, value, kind in (
        ("federation", federation, Federation),
        ("train", train, Train),
        ("distill", distill, Distill),
        ("drift", drift, Drift),
        ("privacy", privacy, Privacy),
    ):
        if not isinstance(value, kind):
            raise InputError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
    if isinstance(method, type) or not isinstance(method, Method):
        given = f"the class {method.__name__}" if isinstance(method, type) else type(method).__name__
        raise InputError(f"method must be an object, such as methods.PerAda(), not {given}")


def check_private(method: Method, train: Train, distill: Distill, drift: Drift, privacy: Privacy) -> None:
    """Refuses what would tell more of the clients' data than differential privacy accounts for."""
    name, parts, samples = type(method).__name__, method.parts, privacy.of_samples
    first = "with differential privacy, "
    if not parts.private or (parts.shares is None and not samples):
        what = "Privacy.level=client" if parts.private else "differential privacy"
        raise InputError(f"{name} has no {what}: use perada, perada-no-kd, ditto or fedavg, or set Privacy.noise to 0")
    if isinstance(method, Finisher):
        raise InputError(f"{first}{name} has no last stage, because it is not accounted for: set Privacy.noise to 0")
    if parts.distils and distill.steps and distill.guard == "clients":
        raise InputError(f"{first}clients send no validation scores: set Distill.guard to none or server")
    if parts.distils and distill.steps and distill.data == VALIDATION:
        raise InputError(f"{first}the server has no images of clients: set Distill.data to public images")
    if train.weighting == "samples":
        raise InputError(f"{first}clients do not tell how many samples they have: set Train.weighting to uniform")
    if drift.prior == "shared":
        raise InputError(f"{first}clients do not share label counts: set Drift.prior to uniform or public")
    if samples and train.clip:
        raise InputError(f"{first}Privacy.clip bounds the gradient of every sample: set Train.clip to 0")
    if not samples and train.aggregate != "mean":
        raise InputError(
            f"Privacy.level=client clips and averages by itself, not by {train.aggregate}: set Train.aggregate to mean"
        )


def check_fit(
    federation: Federation,
    method: Method,
    train: Train,
    distill: Distill,
    local: bool = True,
    drift: Drift = Drift(),
    privacy: Privacy = Privacy(),
) -> None:
    """Refuses settings that do not fit the data or the method. local: whether the clients are on this machine."""
    if privacy.on:
        check_private(method, train, distill, drift, privacy)
    parts, clients = method.parts, len(federation.clients)
    if parts.own_step and train.momentum:
        raise InputError(f"{type(method).__name__} has its own step, without momentum: set Train.momentum to 0")
    if not local:
        return
    if train.cohort > clients:
        raise InputError(f"Train.cohort={train.cohort} but there are {clients} clients: lower it")
    if not parts.distils or not distill.steps:
        return
    if distill.guard == "clients" and not any(len(c.val) for c in federation.clients):
        raise InputError(
            "Distill.guard=clients needs validation data at a client: raise DataOptions.val, or use guard=none"
        )
    if distill.guard == "server" and not len(federation.server_val):
        raise InputError(
            "Distill.guard=server needs labelled data at the server: set DataOptions.server_val, such as 0.05"
        )
