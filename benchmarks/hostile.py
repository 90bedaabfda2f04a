"""Hostile sites in a federation: what six attacks do to the honest clients and to the server's model.

    python benchmarks/hostile.py --out hostile.json             # every attack on PerAda and FedAvg; half an hour
    python benchmarks/hostile.py --methods fedavg --attacks alie,label-flip --seeds 0 --aggregates mean,norm_clip

Ten clients of the `digits` preset (Dirichlet partition with alpha 1, one local epoch, a short distillation) take part
in every round. Two of them are hostile: for the first half of the rounds (then they stay away) or for all of them. They
know the honest clients' updates:

- x1000: each sends its own update, a thousand times as long
- bound: it sends the honest mean's opposite, at 0.99 of the largest distance that a network accepts
- sign-flip: it sends its own update, times minus five
- negative-variance: its running variances are minus thirty times their values
- alie: "a little is enough" (Baruch et al., NeurIPS 2019), the honest mean less 1.5 standard deviations
- label-flip: it trains on labels 9 − y, and judges the guard's candidates by them

Under the first five the guard's judges at the hostile clients report the opposite of their losses. An upload passes the
network's checks (`server.checks`) or is left out of its round. A row is compared with two runs without an attack, both
by the plain mean: one of all ten clients, and one of the eight honest clients alone, which is all that a perfect
defence could keep. Scores are the honest clients' mean Local, and the server model (PerAda's distilled adapter,
FedAvg's average) on the honest clients' test images. Some classes are almost only at the hostile clients, and nobody
honest can defend those; `server_all` in the rows is on all test images. With --validation the scores are those on
validation images, on which a rule is to be chosen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from perada.client.cohort import LocalCohort, Report, Uploads
from perada.client.scores import logits_on, score
from perada.config import build, parse_setting, resolve
from perada.data.federation import Federation
from perada.experiment import Experiment
from perada.lanes import State, gather, stack
from perada.methods import expected_upload
from perada.runs.moment import Moment
from perada.server.checks import refused_lanes

CLIENTS, BOUND = 10, 100.0  # the bound is the default of a network's norm_bound
SETTINGS: dict[str, Any] = {
    "data.clients": CLIENTS,
    "data.alpha": 1.0,
    "data.server_val": 0.0,
    "train.cohort": 0,
    "train.epochs": 1,
    "distill.size": 256,  # of the preset's 1024, and half its steps: the study has to end
    "distill.steps": 15,
    "distill.candidates": [5, 10],
    "run.shifts": False,
}
Tensors = dict[str, Tensor]


def x1000(own: State, honest: State, reference: State) -> State:
    return moved(reference, own, 1000.0)


def bound(own: State, honest: State, reference: State) -> State:
    """Both parts as far away as a network accepts: the parameters against the honest, the statistics all larger."""
    against = {n: reference.params[n] - t.mean(0, keepdim=True) for n, t in honest.params.items()}
    larger = {n: torch.ones_like(t) for n, t in reference.buffers.items()}
    return State(at_bound(reference.params, against), at_bound(reference.buffers, larger))


def sign_flip(own: State, honest: State, reference: State) -> State:
    return moved(reference, own, -5.0)


def negative_variance(own: State, honest: State, reference: State) -> State:
    turned = {n: -30 * t.abs() if n.endswith("running_var") else t for n, t in own.buffers.items()}
    return State(own.params, turned)


def alie(own: State, honest: State, reference: State) -> State:
    def less(tensors: Mapping[str, Tensor]) -> Tensors:
        return {n: t.mean(0, keepdim=True) - 1.5 * t.std(0, keepdim=True) for n, t in tensors.items()}

    moved = State(less(honest.params), less(honest.buffers))
    positive = {n: t.clamp(min=1e-6) if n.endswith("running_var") else t for n, t in moved.buffers.items()}
    return State(moved.params, positive)


def label_flip(own: State, honest: State, reference: State) -> State:
    return own  # its labels are turned instead


ATTACKS: dict[str, Callable[[State, State, State], State]] = {
    "x1000": x1000,
    "bound": bound,
    "sign-flip": sign_flip,
    "negative-variance": negative_variance,
    "alie": alie,
    "label-flip": label_flip,
}


def moved(reference: State, own: State, times: float) -> State:
    """Returns the parameters at `times` the client's own update, with its honest statistics, which pass every check."""
    return State({n: r + times * (own.params[n] - r) for n, r in reference.params.items()}, own.buffers)


def at_bound(reference: Mapping[str, Tensor], direction: Mapping[str, Tensor]) -> Tensors:
    """Returns the tensors at 0.99 of the accepted distance from the reference, in this direction."""

    def norm(tensors: Mapping[str, Tensor]) -> float:
        return float(torch.stack([t.double().square().sum() for t in tensors.values()]).sum().sqrt())

    step = 0.99 * BOUND * max(1.0, norm(reference)) / max(norm(direction), 1e-12) if reference else 0.0
    return {n: r + step * direction[n] for n, r in reference.items()}


class Siege(LocalCohort):
    """All clients here, some of them hostile until a round, behind the checks of a network.

    stay: whether the hostile clients take part at all; after their last round they do not.
    """

    def __init__(self, experiment: Experiment, hostile: Sequence[int], attack: str, until: int, stay: bool) -> None:
        e = experiment
        super().__init__(e.model, e.federation, e.method, e.train, e.options.seed)
        self.hostile, self.attack, self.until, self.stay = hostile, attack, until, stay
        self.attacking = False

    def train(self, now: Moment, sampled: Sequence[int]) -> Uploads:
        self.attacking = bool(self.attack) and now.round < self.until
        if not self.stay and not self.attacking:
            sampled = [c for c in sampled if c not in self.hostile]
        uploads = super().train(now, sampled)
        assert self.trainer is not None
        clients, reference = list(self.trainer.clients), expected_upload(self.method, self.model, now.broadcast)
        lanes = [gather(uploads.states, [k]) for k in range(len(clients))]
        if self.attacking:
            honest = gather(uploads.states, [k for k, c in enumerate(clients) if c not in self.hostile])
            for k in (k for k, c in enumerate(clients) if c in self.hostile):
                lanes[k] = ATTACKS[self.attack](lanes[k], honest, reference)
        states = stack(*lanes)
        bad = refused_lanes(states, reference, BOUND)
        good, refused = [k for k in range(len(lanes)) if k not in bad], {self.names[clients[k]]: bad[k] for k in bad}
        self.trainer = self.trainer_of([clients[k] for k in good], now.round)
        report = Report(uploads.report.loss, uploads.report.failed, refused=refused)
        return replace(
            uploads,
            states=gather(states, good),
            names=[self.names[clients[k]] for k in good],
            report=report,
        )

    def score(self, now: Moment, candidates: State) -> Tensor:
        losses = super().score(now, candidates)
        assert self.trainer is not None
        wrong = [k for k, c in enumerate(self.trainer.clients) if c in self.hostile]
        if self.attacking and self.attack != "label-flip":
            losses[:, wrong] = (losses.max(0).values + losses.min(0).values - losses)[:, wrong]
        return losses


def flipped(federation: Federation, hostile: Sequence[int]) -> Federation:
    """Returns the federation with the hostile clients' own labels turned round."""
    targets = federation.targets.clone()
    for c in hostile:
        for index in (federation.clients[c].train, federation.clients[c].val):
            targets[index] = len(federation.classes) - 1 - targets[index]
    return replace(federation, targets=targets)


@dataclass(frozen=True)
class Case:
    method: str
    seed: int
    aggregate: str
    attack: str = ""  # empty: nobody attacks
    until: int = 0  # the first round without the attack
    clients: int = CLIENTS  # without an attack: all, or the honest ones alone

    def name(self) -> str:
        who = f"{self.attack} until {self.until}" if self.attack else f"clean, {self.clients} clients"
        return f"{self.method} {who}, {self.aggregate}, seed {self.seed}"


def measure(
    case: Case, rounds: int, settings: Mapping[str, Any], siege: Callable[..., Siege] = Siege
) -> dict[str, Any]:
    """Trains a case and returns its scores in percent."""
    torch.set_num_threads(1)
    keys = {**SETTINGS, "method.name": case.method, "train.aggregate": case.aggregate, "train.rounds": rounds}
    config = resolve("digits", {**keys, "run.seed": case.seed, "data.seed": case.seed, **settings})
    hostile = np.random.default_rng(case.seed).choice(CLIENTS, 2, replace=False).tolist()

    def cohort(experiment: Experiment) -> Siege:
        return siege(experiment, hostile, case.attack, case.until, not case.attack and case.clients == CLIENTS)

    sim = build(config, cohort=cohort)
    real = sim.federation
    assert isinstance(sim.cohort, Siege)
    refused = 0
    for number in range(rounds):
        flips = case.attack == "label-flip" and number < case.until
        sim.cohort.federation = flipped(real, hostile) if flips else real
        sim.round()
        refused += len(sim.now.last.get("refused", {}))
    sim.cohort.federation = real
    row = sim.evaluate(("local", "val", "global"))
    assert row is not None
    honest = [c for c in range(CLIENTS) if c not in hostile]
    model = sim.global_model
    assert model is not None

    def server(split: str) -> float | None:
        index = np.concatenate([getattr(real.clients[c], split) for c in honest])
        return score(logits_on(sim.model, model, real, index)[0], real.labels(index))

    def local(split: str) -> float:
        scores = row.scores[split].per_client
        return float(np.mean([scores[real.clients[c].name] for c in honest]))

    return {
        **vars(case),
        "local": local("local_test"),
        "server": server("test"),
        "server_all": row.global_model,
        "val_local": local("local_val"),
        "val_server": server("val"),
        "refused": refused,
        "accepted": sim.now.counters["accepted"],
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """Returns the runs without an attack, and those with one."""
    out = []
    ends = [int(n) for n in options.until.split(",")] if options.until else [options.rounds // 2, options.rounds]
    for method, seed in itertools.product(options.methods.split(","), map(int, options.seeds.split(","))):
        out += [Case(method, seed, "mean"), Case(method, seed, "mean", clients=CLIENTS - 2)]
        out += [Case(method, seed, a) for a in options.aggregates.split(",") if a != "mean"]
        for rule, attack in itertools.product(options.aggregates.split(","), options.attacks.split(",")):
            out += [Case(method, seed, rule, attack, until) for until in ends]
    return out


def table(rows: Sequence[Mapping[str, Any]], validation: bool) -> Table:
    """Returns the means over seeds, with the difference to the run of all clients and to that of the honest ones."""
    local, server = ("val_local", "val_server") if validation else ("local", "server")
    out = Table("method", "attack", "until", "aggregate")
    for name in ("honest Local", "− ten", "− eight", "server", "− ten", "− eight"):
        out.add_column(name, justify="right")
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("method", "attack", "until", "aggregate", "clients"))
        groups.setdefault(key, []).append(row)

    def mean(key: tuple[Any, ...], of: str) -> float:
        return float(np.mean([row[of] for row in groups[key]])) if key in groups else float("nan")

    for key in groups:
        method, attack, until, aggregate, clients = key
        ten, eight = ((method, "", 0, "mean", n) for n in (CLIENTS, CLIENTS - 2))
        cells = []
        for of in (local, server):
            value = mean(key, of)
            cells += [f"{value:.1f}", f"{value - mean(ten, of):+.1f}", f"{value - mean(eight, of):+.1f}"]
        out.add_row(method, attack or f"none, {clients} clients", str(until or ""), aggregate, *cells)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default="perada,fedavg")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--aggregates", default="norm_clip", help="rules under attack (default: norm_clip)")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--until", help="rounds after which the attack ends (default: half of all, and all)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of every run")
    parser.add_argument("--validation", action="store_true", help="show scores on validation images instead of test")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, each with one thread")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows; those in it are not measured again")
    options = parser.parse_args()
    settings = dict(parse_setting(text) for text in options.set)
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    known = [{k: row[k] for k in vars(Case("", 0, ""))} for row in rows]
    left = [case for case in cases(options) if vars(case) not in known]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        done = pool.map(partial(measure, rounds=options.rounds, settings=settings), left)
        for case, row in zip(left, done, strict=True):
            print(f"{case.name()}: local {row['local']:.1f}, server {row['server']:.1f}", file=sys.stderr, flush=True)
            rows.append(row)
            if options.out:
                options.out.write_text(json.dumps(rows, indent=1) + "\n")
    Console(width=140).print(table(rows, options.validation))


if __name__ == "__main__":
    main()
