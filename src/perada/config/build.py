"""From a configuration to an experiment: the only reader of keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from ..client.cohort import Cohort
from ..data import GIVEN, VALIDATION, Federation, build_federation, public_images
from ..errors import InputError
from ..experiment import Experiment, Say, check_fit
from ..lanes import fast_kernels, key_of
from ..machine import device_of
from ..methods import name_of
from ..models import build_backbone, load_into
from .keys import Config, ModelOptions


def in_memory(experiment: Experiment) -> None:
    """Pretrains without a folder."""
    for _ in range(experiment.train.rounds):
        experiment.round()


def build(
    config: Config,
    backbone: Path | None = None,
    say: Say = lambda text: None,
    federation: Federation | None = None,
    pretrain: Callable[[Experiment], None] = in_memory,
    to_train: bool = True,
    net: nn.Module | None = None,
    cohort: Callable[[Experiment], Cohort] | None = None,
) -> Experiment:
    """Returns the experiment that a configuration describes; without public images if not `to_train`.

    backbone: the copy of the weights that a run folder keeps. federation: saves loading the data again.
    net: a network given from Python. pretrain: runs FedAvg where the weights come from it.
    cohort: who trains, if not the federation's clients on this machine.
    """
    device = device_of(config.run.device)
    federation = federation or build_federation(config.data, device)
    method = config.make_method()
    distils = to_train and method.parts.distils and config.distill.steps > 0
    if distils:
        _refuse_own(config)
    images = _public(config, federation) if distils else None
    made = net if net is not None else _network(config, federation, backbone, say, pretrain)
    experiment = Experiment(
        made,
        federation,
        method,
        adapter=config.model.strategy(),
        public=images,
        train=config.train,
        distill=config.distill,
        cohort=cohort,
        to_train=to_train,
        options=config.run,
    )
    experiment.config = config
    if to_train and cohort is None:
        lines = (*about_data(federation), *about_settings(config), experiment.fit_lanes(), federation.about_images())
        for line in lines:
            say(line)
    if device.type == "cuda" and fast_kernels(device) is None:
        say("warning: Triton is missing, so there are no kernels for lanes: the same results, slower")
    return experiment


def check(config: Config, federation: Federation) -> None:
    """Refuses settings that do not fit the data or the method, without building anything."""
    method = config.make_method()
    check_fit(federation, method, config.train, config.distill)
    if method.parts.distils and config.distill.steps > 0:
        _refuse_own(config)


def _refuse_own(config: Config) -> None:
    if config.distill.data in (config.data.name, config.data.root):
        raise InputError(f"Distill.data={config.distill.data} holds the clients' own images: choose other public data")


def _public(config: Config, federation: Federation) -> Tensor | None:
    if config.distill.data == VALIDATION:
        return federation.take(federation.val)
    return public_images(config.distill.data, federation.images.shape[-1], config.data.root)


def _network(
    config: Config, federation: Federation, saved: Path | None, say: Say, pretrain: Callable[[Experiment], None]
) -> nn.Module:
    """Returns the network with its weights, and says what the weights gave."""
    source = str(saved) if saved else config.model.weights
    if config.model.backbone == GIVEN:
        raise InputError("the network was given from Python: give it again, as model=")
    if source == "fedavg":
        return _pretrained(config, federation, say, pretrain)
    net, report = build_backbone(config.model.backbone, len(federation.classes), source, config.run.seed)
    for line in report.lines() if report and not saved else []:
        say(line)
    return net


def _pretrained(config: Config, federation: Federation, say: Say, pretrain: Callable[[Experiment], None]) -> nn.Module:
    """FedAvg from scratch on the clients' own data, with random streams of its own."""
    start = pretraining(config)
    say(f"pretraining {config.model.backbone} with {start.train.rounds} rounds of FedAvg on the clients' data")
    experiment = build(start, federation=federation)
    pretrain(experiment)
    net, _ = build_backbone(config.model.backbone, len(federation.classes), "random", config.run.seed)
    broadcast = experiment.now.broadcast
    tensors = {n: t[0].cpu().float() for part in (broadcast.params, broadcast.buffers) for n, t in part.items()}
    load_into(net, tensors, "fedavg")
    return net


def pretraining(config: Config) -> Config:
    """Returns the FedAvg run that a run with weights from FedAvg starts from.

    It does not depend on the run's own method and learning rate, so that the methods of a comparison start alike.
    """
    rounds = config.model.pretrain_rounds
    seed = key_of(config.run.seed, "pretrain") & (2**63 - 1)
    return replace(
        config,
        model=replace(config.model, weights="random"),
        method={"name": "fedavg"},
        train=replace(config.train, rounds=rounds, lr=config.model.pretrain_lr),
        run=replace(config.run, seed=seed, eval_every=rounds),
    )


def describe(experiment: Experiment) -> Config:
    """Returns the configuration of an experiment made from objects: what a folder cannot hold is called `given`."""
    if experiment.config is not None:
        return experiment.config  # type: ignore[no-any-return]
    adapter, method = experiment.adapter, experiment.method
    fields = {f.name: getattr(adapter, f.name) for f in dataclasses.fields(adapter)} if adapter is not None else {}
    known = {f.name for f in dataclasses.fields(ModelOptions)}
    names = {"dropout": "dropout", "std": "adapter_std"}
    options = {names.get(k, k): v for k, v in fields.items() if names.get(k, k) in known}
    return Config(
        data=experiment.federation.options,
        model=ModelOptions(backbone=GIVEN, weights=GIVEN, **options),
        train=experiment.train,
        method=name_of(method),
        distill=replace(experiment.distill, data=GIVEN) if experiment.public else experiment.distill,
        run=experiment.options,
    )


def about_data(federation: Federation) -> list[str]:
    """Returns a warning for whatever the data lack."""
    lines = [f"warning: cannot read {path}: skipped (DataOptions.skip_bad)" for path in federation.skipped]
    if not federation.tested:
        lines.append("warning: no client has test images, so test scores are n/a: raise DataOptions.test")
    if not federation.multilabel and bool((federation.targets == federation.targets[0]).all()):
        name = federation.classes[int(federation.targets[0])]
        lines.append(f"warning: every image is of class {name!r}: any model is right, there is nothing to learn")
    return lines


def about_settings(config: Config) -> list[str]:
    """Returns a warning for settings that change nothing."""
    distill = config.distill
    if not config.make_method().parts.distils or distill.steps or distill.data == "none":
        return []
    return [f"warning: Distill.steps is 0: nothing is distilled, and Distill.data={distill.data} is not used"]
