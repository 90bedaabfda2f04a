"""A site's own model, read from its state folder. Needs no server, no network and no data."""

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
from .messages import Refused
from .settings import SiteSettings
from .site_data import empty_federation


@dataclass(frozen=True)
class Personal:
    """A site's model: the state that it predicts with (one lane), and the network around it."""

    work: Work
    state: State

    def module(self) -> nn.Module:
        """Returns a plain torch module in eval mode."""
        return self.work.model.plain(self.state).cpu()


def personal(settings: SiteSettings, run: str = "") -> Personal:
    """Returns the site's model of a run (by name or id; default the newest), with the last broadcast it received."""
    site = Site(settings)
    runs = site.state.runs()
    if not runs:
        raise InputError(f"{site.state.path} holds no run of this site yet")
    matching = [r for r in runs if run in ("", r, r.rpartition("-")[0])]
    if not matching:
        raise unknown("run", run, runs)
    plan, start, start_round, broadcast = site.state.load_broadcast(matching[-1])
    try:
        work = site.work(plan)
        kept = site.state.newest(matching[-1])
        if kept is None and start:  # a run that continues another, in which the site was not sampled yet
            kept = site.state.before(start, start_round)
        first = work.method.init(work.model)[2]
    except NeedsWeights as error:
        raise InputError(f"{site.state.path}: the server's weights are missing: take part in a run first") from error
    except Refused as error:
        raise InputError(f"{site.state.path}: {error}") from error
    state = work.method.personal(work.here(broadcast), first if kept is None else work.here(kept))
    return Personal(work, state)


def predict(settings: SiteSettings, images: Sequence[Path], run: str = "") -> list[dict[str, Any]]:
    """Returns the predictions of the site's model for image files, as `perada.Run.predict` does."""
    model = personal(settings, run)
    module, federation = model.module(), empty_federation(model.work.plan, torch.device("cpu"))
    return predictions(module, federation, next(module.parameters()).dtype, settings.name, images)


def export(settings: SiteSettings, out: Path, merged: bool = False, run: str = "") -> None:
    """Writes the site's model as `perada.Run.export` does: FILE.safetensors with the personal part or, with `merged`,
    the whole network; FILE.pt2 and FILE.onnx with the whole network as a program."""
    check_out(out)
    model = personal(settings, run)
    config, plan = model.work.config, model.work.plan
    (mean, std), size = plan.normalisation, [config.data.size] * 2
    notes = about(config, settings.name, plan.classes, mean=mean, std=std, size=size, multilabel=plan.multilabel)
    if out.suffix == ".safetensors":
        write_weights(out, model.module().state_dict() if merged else weights_of(model.state), notes)
    else:
        write_program(out, model.module(), size, notes)
