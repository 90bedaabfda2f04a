"""Hostile sites among very unlike ones: do rules that need more than the uploads' lengths help FedAvg there?

    python benchmarks/unlike_sites.py --out benchmarks/unlike_sites.json

As benchmarks/hostile.py, with Dirichlet alpha 0.1: 2 of 10 clients send ALIE or flip their labels in all 20 rounds.
Every rule works on the uploads after `norm_clip`.

- clip: their mean, which is what `train.aggregate=norm_clip` does
- judged: the clients score the mean, and the mean without each upload, on their validation data. A judge says nothing
  of its own upload, and none counts more than the median judge. The two uploads without which the mean is best are left
  out where that is a gain. Under ALIE hostile judges say the opposite
- buckets: the median of the means of random pairs (Karimireddy et al., ICLR 2022)
- centred: centred clipping of each client's momentum, 0.9 (Karimireddy et al., ICML 2021)

Two runs without an attack, by the plain mean, stand beside them: `ten` has all clients, and `eight` the honest ones
alone, which is all that a perfect defence could keep. `scores` of a row are the mean gains without each client, as a
share of the loss, over the rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hostile import CLIENTS, Case, Siege, measure
from torch import Tensor

from perada.client.cohort import Uploads
from perada.client.scores import logits_on
from perada.lanes import State, gather, mean, repeat, stack
from perada.methods import expected_upload
from perada.runs.moment import Moment
from perada.server.aggregate import Norms, Rule, shrink, trimmed_mean

MOST = 2  # uploads that are left out
MOMENTUM, STEPS = 0.9, 3
SETTINGS = {"data.alpha": 0.1}
ROUNDS = 20


class Ruled(Siege):
    """A siege whose uploads are replaced by what a rule makes of them, so that any mean of them is that."""

    rule = "clip"
    norms: Norms
    momentum: dict[int, State]
    scores: list[list[float]]

    def train(self, now: Moment, sampled: Sequence[int]) -> Uploads:
        uploads = super().train(now, sampled)
        assert self.trainer is not None
        if now.round == 0:
            self.norms, self.momentum, self.scores = {}, {}, []
        reference = expected_upload(self.method, self.model, now.broadcast)
        admission = Rule("norm_clip").admit(uploads.states, reference, self.norms)
        self.norms = admission.norms
        clients = [c for k, c in enumerate(self.trainer.clients) if k not in admission.left_out]
        made = RULES[self.rule](self, admission.states, clients, reference, now.round)
        return replace(uploads, states=repeat(made, uploads.states.lanes))

    def gains(self, states: State, clients: Sequence[int]) -> Tensor:
        """Returns how much lower the loss is without each upload, as a share of the median judge's loss."""
        lanes = range(states.lanes)
        without = [mean(gather(states, [i for i in lanes if i != k])) for k in lanes]
        candidates, columns = stack(mean(states), *without), []
        for c in clients:
            index = self.federation.clients[c].val
            targets = self.federation.labels(index)
            logits = logits_on(self.model, candidates, self.federation, index)
            column = torch.stack([F.cross_entropy(one, targets) for one in logits])
            if self.attacking and c in self.hostile and self.attack != "label-flip":
                column = column.max() + column.min() - column
            columns.append(column)
        losses = torch.stack(columns, 1)
        gains = (losses[0] - losses[1:]).masked_fill(torch.eye(len(clients), dtype=torch.bool), 0)
        spread = gains.abs().amax(0)
        share = (gains * shrink(spread, spread.median())).sum(1) / (len(clients) - 1) / losses[0].median()
        row = [float("nan")] * CLIENTS
        for c, value in zip(clients, share.tolist(), strict=True):
            row[c] = value
        self.scores.append(row)
        return share


def clip(siege: Ruled, states: State, clients: Sequence[int], reference: State, round: int) -> State:
    siege.gains(states, clients)  # observed only
    return mean(states)


def judged(siege: Ruled, states: State, clients: Sequence[int], reference: State, round: int) -> State:
    gains = siege.gains(states, clients)
    out = [k for k in gains.argsort(descending=True)[:MOST].tolist() if gains[k] > 0]
    return mean(gather(states, [k for k in range(states.lanes) if k not in out]))


def buckets(siege: Ruled, states: State, clients: Sequence[int], reference: State, round: int) -> State:
    order = np.random.default_rng([round, 7]).permutation(states.lanes).tolist()
    means = stack(*(mean(gather(states, order[i : i + 2])) for i in range(0, len(order), 2)))
    return means.map(lambda t: trimmed_mean(t, (t.shape[0] - 1) // 2))


def centred(siege: Ruled, states: State, clients: Sequence[int], reference: State, round: int) -> State:
    """Returns the broadcast plus the aggregate, which is kept under the number of no client."""
    moves = {n: t - reference.params[n] for n, t in states.params.items()}
    for k, c in enumerate(clients):
        new = State({n: t[k : k + 1] for n, t in moves.items()}, {})
        old = siege.momentum.get(c, new)
        kept = {n: MOMENTUM * t + (1 - MOMENTUM) * new.params[n] for n, t in old.params.items()}
        siege.momentum[c] = State(kept, {})
    each = stack(*(siege.momentum[c] for c in clients)).params
    centre = siege.momentum.get(-1, State({n: torch.zeros_like(t[:1]) for n, t in each.items()}, {})).params
    for _ in range(STEPS):
        apart = {n: t - centre[n] for n, t in each.items()}
        norms = torch.stack([t.double().flatten(1).square().sum(1) for t in apart.values()]).sum(0).sqrt()
        by = shrink(norms, norms.median()).to(next(iter(apart.values())).dtype)
        steps = {n: (t * by.view(-1, *[1] * (t.dim() - 1))).mean(0, keepdim=True) for n, t in apart.items()}
        centre = {n: t + steps[n] for n, t in centre.items()}
    siege.momentum[-1] = State(centre, {})
    return State({n: reference.params[n] + t for n, t in centre.items()}, mean(states).buffers)


ALONE = {"ten": CLIENTS, "eight": CLIENTS - 2}
RULES = {"clip": clip, "judged": judged, "buckets": buckets, "centred": centred}


def maker(rule: str, made: list[Ruled]) -> Callable[..., Ruled]:
    """Returns what makes a siege with a rule and adds it to a list."""

    def make(*words: Any) -> Ruled:
        made.append(Ruled(*words))
        made[-1].rule = rule
        return made[-1]

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", default=",".join([*ALONE, *RULES]))
    parser.add_argument("--attacks", default="none,alie,label-flip")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows; those in it are not measured again")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.out.read_text()) if options.out and options.out.exists() else []
    for seed, attack, rule in itertools.product(
        *(getattr(options, n).split(",") for n in ("seeds", "attacks", "rules"))
    ):
        if any((row["rule"], row["attack"], row["seed"]) == (rule, attack, int(seed)) for row in rows):
            continue
        if rule in ALONE and attack != "none":
            continue
        made: list[Ruled] = []
        case = Case("fedavg", int(seed), "mean", *((attack, ROUNDS) if attack != "none" else ()))
        case = replace(case, clients=ALONE.get(rule, CLIENTS))
        siege = Siege if rule in ALONE else maker(rule, made)
        row = {"rule": rule, **measure(case, ROUNDS, SETTINGS, siege), "attack": attack}
        if made and made[0].scores:
            row |= {"hostile": made[0].hostile, "scores": np.nanmean(made[0].scores, 0).round(4).tolist()}
        rows.append(row)
        print(f"seed {seed}, {attack}, {rule}: local {row['local']:.1f}, server {row['server']:.1f}", file=sys.stderr)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
