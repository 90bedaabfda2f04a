"""A site's own model, taken out of its state folder: no server, no network, no data needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import InputError, unknown
from ..lanes import State
from ..predict.export import about, check_out, weights_of, write_program, write_weights
from ..predict.pictures import predictions
from .client import NeedsWeights, Site, Work
from .holdings import empty_federation
from .messages import Refused
from .settings import SiteSettings


@dataclass(frozen=True)
class Personal:
    """What a site predicts with, one lane, and what it is to be put into."""

    work: Work
    run: str
    round: int | None  # the last one that this site trained in
    state: State

    def module(self) -> nn.Module:
        """A plain torch module in eval mode, the personal part in place."""
        return self.work.model.plain(self.state).cpu()


def personal(settings: SiteSettings, run: str = "") -> Personal:
    """The site's model of a run (by its name or id; else the newest), with the newest broadcast it has seen."""
    site = Site(settings)
    runs = site.state.runs()
    if not runs:
        raise InputError(f"{site.state.path} holds no run of this site yet")
    chosen = [r for r in runs if run in ("", r, r.rpartition("-")[0])]
    if not chosen:
        raise unknown("run", run, runs)
    plan, start, start_round, received = site.state.told(chosen[-1])
    try:
        work = site.work(plan)
        model = work.model
        kept = site.state.newest(chosen[-1])
        if kept is None and start:  # not sampled yet in a run that goes on from another
            kept = site.state.before(start, start_round)
    except NeedsWeights as error:
        raise InputError(f"{site.state.path}: the server's weights are not here: take part in a run first") from error
    except Refused as error:  # what a server would be told
        raise InputError(f"{site.state.path}: {error}") from error
    first = work.method.init(model)[2]
    state = work.method.personal(work.here(received), first if kept is None else work.here(kept))
    rounds = site.state.rounds(chosen[-1])
    return Personal(work, chosen[-1], rounds[-1] if rounds else None, state)


def predict(settings: SiteSettings, images: Sequence[Path], run: str = "") -> list[dict[str, Any]]:
    """What the site's model sees in pictures, as `perada.Run.predict` has it."""
    found = personal(settings, run)
    module, held = found.module(), empty_federation(found.work.plan, torch.device("cpu"))
    return predictions(module, held, next(module.parameters()).dtype, settings.name, images)


def export(settings: SiteSettings, out: Path, merged: bool = False, run: str = "") -> None:
    """As `perada.Run.export` does: FILE.safetensors with the personal part or, with `merged`, the whole network;
    FILE.pt2 and FILE.onnx are the whole network as a program."""
    check_out(out)
    found = personal(settings, run)
    config, plan = found.work.config, found.work.plan
    (mean, std), size = plan.normalisation, [config.data.size] * 2
    said = about(config, settings.name, plan.classes, mean=mean, std=std, size=size, multilabel=plan.multilabel)
    if out.suffix == ".safetensors":
        write_weights(out, found.module().state_dict() if merged else weights_of(found.state), said)
    else:
        write_program(out, found.module(), size, said)
