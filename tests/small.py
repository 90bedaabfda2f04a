"""Problems small enough to solve by hand, and runs small enough to repeat."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perada.adapters import adapt
from perada.config import Config, build, resolve
from perada.data import Client, Federation
from perada.experiment import Experiment
from perada.lanes import LaneModel, State
from perada.methods import Method

# The digits preset cut down to about 0.2 s a round: the server holds back most of the training data.
SMALL: dict[str, Any] = {
    "data.clients": 4,
    "data.alpha": 0.1,
    "data.val": 0.05,
    "data.test": 0.05,
    "data.server_val": 0.85,
    "train.rounds": 2,
    "train.cohort": 2,
    "train.epochs": 1,
    "train.batch": 8,
    "train.lr": 0.02,
    "distill.data": "glyphs",
    "distill.size": 32,
    "distill.batch": 16,
    "distill.steps": 4,
    "distill.lr": 1e-3,
    "distill.guard": "clients",
    "distill.candidates": [2],
    "run.eval_every": 1,
    "run.shifts": False,
}


def small(**set: Any) -> Config:
    """The small digits run; `train__lr=1` is train.lr = 1."""
    return resolve("digits", {**SMALL, **{k.replace("__", "."): v for k, v in set.items()}})


def flags(**set: Any) -> list[str]:
    """The same as command-line words."""
    both = {**SMALL, **{k.replace("__", "."): v for k, v in set.items()}}
    return [word for k, v in both.items() for word in ("--set", f"{k}={v if isinstance(v, str) else json.dumps(v)}")]


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The same as settings for `perada.train`."""
    return {**SMALL, **{k.replace("__", "."): v for k, v in settings.items()}}


def after(rounds: int, **set: Any) -> Experiment:
    """The small run after so many rounds."""
    sim = build(small(**set))
    for _ in range(rounds):
        sim.round()
    return sim


def experiment(
    net: nn.Module,
    federation: Federation,
    config: Config,
    method: Method | None = None,
    adapter: Any = None,
    public: Tensor | None = None,
) -> Experiment:
    """An experiment on a network and data of a test's own; the rest is what the configuration says.

    public: uint8 images `[n, C, H, W]`.
    """
    return Experiment(
        net,
        federation,
        method or config.make_method(),
        adapter=adapter,
        public=public,
        train=config.train,
        distill=config.distill,
        options=config.run,
    )


class Pixel(nn.Module):
    """logits_j = (weight_j · x)^power for an image of one pixel: as many parameters as classes.

    With power 2 the mean of several models' logits is not the logits of their mean, as in a real network.
    """

    def __init__(self, weights: Sequence[float], power: int) -> None:
        super().__init__()
        self.power = power
        self.fc = nn.Linear(1, len(weights), bias=False)
        self.fc.weight = nn.Parameter(torch.tensor(weights, dtype=torch.float64).view(-1, 1))

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(images[:, 0].flatten(1)) ** self.power


def pixel_model(*weights: float, power: int = 1) -> LaneModel:
    return adapt(Pixel(weights, power), adapter=None, trained="full").to("cpu", torch.float64)


def lanes_of(*lanes: Sequence[float]) -> State:
    """Lanes of a pixel model."""
    return State({"fc.weight": torch.tensor(lanes, dtype=torch.float64).unsqueeze(-1)}, {})


def weights_of(state: State) -> list[list[float]]:
    """The inverse of `lanes_of`."""
    return state.params["fc.weight"].squeeze(-1).tolist()


ONE = torch.ones(
    4, 3, 1, 1, dtype=torch.float64
)  # four images of one pixel, x = 1: a pixel model's logits are its weights


def double(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def adam_by_hand(
    w: list[float], teacher: list[float], rates: list[float], pull: float = 0.0, decay: float = 0.0
) -> list[list[float]]:
    """Adam on KL(teacher ‖ softmax(w)) for x = 1, where the gradient is softmax(w) − softmax(teacher), and on
    pull/2 ‖w − start‖² + decay/2 ‖w‖²."""
    p, start = double(teacher).softmax(-1)[0].tolist(), w
    m, s, out = [0.0] * len(w), [0.0] * len(w), []
    for r, rate in enumerate(rates, 1):
        q = double(w).softmax(-1)[0].tolist()
        for j in range(len(w)):
            g = q[j] - p[j] + pull * (w[j] - start[j]) + decay * w[j]
            m[j], s[j] = 0.9 * m[j] + 0.1 * g, 0.999 * s[j] + 0.001 * g * g
            w = [*w[:j], w[j] - rate * (m[j] / (1 - 0.9**r)) / (math.sqrt(s[j] / (1 - 0.999**r)) + 1e-8), *w[j + 1 :]]
        out.append(w)
    return out


def pixels(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)


def pixel_federation(*clients: Sequence[tuple[int, int]]) -> Federation:
    """Clients as lists of (pixel, label). A pixel of 255 is x = 2, one of 51 is x = 0.4, one of 0 is x = 0."""
    every = [sample for client in clients for sample in client]
    ends = np.cumsum([len(client) for client in clients])
    none = np.zeros(0, np.int64)
    return Federation(
        name="pixels",
        images=pixels(*(p for p, _ in every)),
        targets=torch.tensor([y for _, y in every]),
        classes=("zero", "one"),
        clients=tuple(
            Client(f"client-{m:02d}", np.arange(end - len(c), end), none, none)
            for m, (c, end) in enumerate(zip(clients, ends, strict=True))
        ),
        mean=(0.0,),
        std=(0.5,),
    )


def everything(sim: Experiment) -> dict[str, Tensor]:
    """All that an experiment holds between two rounds, by name."""
    now = {"server": sim.now.server, "broadcast": sim.now.broadcast, "kept": sim.now.kept}
    return {f"{who}/{n}": t for who, s in now.items() for n, t in {**s.params, **s.buffers}.items()}


def adapters(run: Path) -> dict[str, bytes]:
    """The weights in a run's newest checkpoint, byte for byte."""
    newest = max((run / "checkpoints").glob("round-*"), key=lambda p: int(p.name.removeprefix("round-")))
    return {f"{newest.name}/{p.name}": p.read_bytes() for p in sorted(newest.glob("*.safetensors"))}


def tree(root: Path) -> dict[str, bytes | None]:
    """Every file below `root` with its content, and every folder."""
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.unlink()  # not in place: an unchanged client's file is shared with the checkpoint before
    if how == "cut":
        path.write_bytes(data[:-10])
    elif how == "one bit":
        at = len(data) - 3 if path.suffix == ".safetensors" else data.index(b'"round"') + 3
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    elif how == "empty":
        path.write_bytes(b"")


def as_older(run: Path) -> None:
    """Rewrites a run folder as versions before format 2 wrote it: no manifest, clients by position."""
    (run / "manifest.json").unlink()
    for path in run.glob("checkpoints/*/state.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({key: content[key] for key in ("round", "sha256", "note")}, indent=1))
