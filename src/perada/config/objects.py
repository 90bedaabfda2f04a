"""From a configuration to an experiment: the only reader of keys."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from ..client.cohort import Cohort
from ..data import GIVEN, VALIDATION, Federation, build_federation, public_images
from ..errors import InputError
from ..experiment import Experiment, Say
from ..lanes import key_of, ops_for
from ..lanes.machine import device_of
from ..methods import name_of
from ..models import Backbone, load_into, own_normalisation
from ..models import backbone as named_backbone
from ..privacy import UNSAFE
from ..runs.options import check_fit
from .keys import Config, ModelOptions


def in_memory(experiment: Experiment) -> None:
    """Pretrains without a run folder."""
    for _ in range(experiment.train.rounds):
        experiment.round()


def build(
    config: Config,
    backbone: Path | None = None,
    say: Say = lambda text: None,
    federation: Federation | None = None,
    pretrain: Callable[[Experiment], None] = in_memory,
    to_train: bool = True,
    net: nn.Module | Backbone | None = None,
    cohort: Callable[[Experiment], Cohort] | None = None,
) -> Experiment:
    """Returns the experiment that a configuration describes; without public images if not `to_train`.

    backbone: the copy of the weights in a run folder. federation: saves loading the data again.
    pretrain: runs FedAvg if the weights come from it. net: a network given from Python.
    cohort: who trains, if not the federation's clients on this machine.
    """
    device = device_of(config.run.device)
    federation = federation or federation_of(config)
    method = config.make_method()
    if to_train:
        check(config, federation, local=cohort is None)
    local = to_train and cohort is None
    for line in (*about_data(federation), *about_settings(config)) if local else ():
        say(line)
    distils = to_train and method.parts.distils and config.distill.steps > 0
    images = public_of(config, federation) if distils else None
    if isinstance(net, nn.Module):
        net = Backbone(net, config.model.head)
    made = net or _network(config, federation, backbone, say, pretrain)
    if local and config.privacy.on and config.privacy.deterministic:
        say(f"warning: {UNSAFE}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", UNSAFE[:20])  # it has been said
        experiment = Experiment(
            made.net,
            federation,
            method,
            adapter=config.model.strategy(),
            head=made.head,
            adapt_from=made.first_adapted(config.model.adapt_from),
            public=images,
            train=config.train,
            distill=config.distill,
            drift=config.drift,
            privacy=config.privacy,
            cohort=cohort,
            to_train=to_train,
            options=config.run,
        )
    experiment.config = replace(config, privacy=experiment.privacy)  # with the noise that was solved
    if local:
        for line in about_parts(experiment):
            say(line)
        say(experiment.about_lanes)
        for line in about_prefix(experiment):
            say(line)
        say(federation.about_images())  # last, so that an error is the only line
    if device.type == "cuda" and not ops_for(device).fast:
        say("warning: Triton is missing: results are the same, but training is slower")
    return experiment


def federation_of(config: Config) -> Federation:
    """Returns the federation of a configuration, on its device."""
    federation = build_federation(config.data, device_of(config.run.device))
    own = own_normalisation(config.model.backbone, len(federation.classes), config.data.normalise)
    return replace(federation, mean=own[0], std=own[1]) if own else federation


def check(config: Config, federation: Federation, local: bool = True) -> None:
    """Refuses settings that do not fit the data or the method, without building anything."""
    method = config.make_method()
    check_fit(federation, method, config.train, config.distill, local, config.drift, config.privacy)
    if config.privacy.on and config.model.weights == "fedavg":
        raise InputError(
            "pretraining with FedAvg on the clients' data is not private: choose other ModelOptions.weights"
        )
    if not method.parts.distils or config.distill.steps == 0:
        return
    if config.distill.data == "none":
        raise InputError("distillation needs public images: set Distill.data, or Distill.steps=0")
    if config.distill.data in (config.data.name, config.data.root):
        raise InputError(f"Distill.data={config.distill.data} holds the clients' own images: choose other public data")


def public_of(config: Config, federation: Federation) -> Tensor | None:
    """Returns the server's public images; None without any."""
    if config.distill.data == VALIDATION:
        return federation.take(federation.val)
    return public_images(config.distill.data, federation.images.shape[-1], config.data.root, config.data.fit)


def _network(
    config: Config, federation: Federation, saved: Path | None, say: Say, pretrain: Callable[[Experiment], None]
) -> Backbone:
    """Returns the network with its weights; says which weights were loaded."""
    source = str(saved) if saved else config.model.weights
    if config.model.backbone == GIVEN:
        raise InputError("the network was given from Python: give it again, as model=")
    if source == "fedavg":
        return _pretrained(config, federation, say, pretrain)
    made = _named(config, federation)
    report = made.load(source)
    for line in report.lines() if report and not saved else []:
        say(line)
    return made


def _named(config: Config, federation: Federation) -> Backbone:
    """Returns the network of the configuration's name, with random weights."""
    model, size = config.model, federation.images.shape[-1]
    return named_backbone(model.backbone, len(federation.classes), config.run.seed, model.head, size)


def _pretrained(config: Config, federation: Federation, say: Say, pretrain: Callable[[Experiment], None]) -> Backbone:
    """Returns the network after FedAvg from scratch on the clients' data, with random streams of its own."""
    start = pretraining(config)
    say(f"pretraining {config.model.backbone} with {start.train.rounds} rounds of FedAvg on the clients' data")
    experiment = build(start, federation=federation)
    pretrain(experiment)
    made = _named(config, federation)
    broadcast = experiment.now.broadcast
    tensors = {n: t[0].cpu().float() for part in (broadcast.params, broadcast.buffers) for n, t in part.items()}
    load_into(made.net, tensors, "fedavg", made.head)
    return made


def pretraining(config: Config) -> Config:
    """Returns the FedAvg run that a run with weights from FedAvg starts from.

    It does not depend on the run's own method and learning rate, so that the methods of a comparison start alike.
    """
    rounds = config.model.pretrain_rounds
    seed = key_of(config.run.seed, "pretrain") & (2**63 - 1)
    return replace(
        config,
        model=replace(config.model, weights="random", adapt_from=""),
        method={"name": "fedavg"},
        train=replace(config.train, rounds=rounds, lr=config.model.pretrain_lr),
        run=replace(config.run, seed=seed, eval_every=rounds),
    )


def describe(experiment: Experiment) -> Config:
    """Returns the configuration of an experiment; what a folder cannot hold is called `given`."""
    if experiment.config is not None:
        return experiment.config  # type: ignore[no-any-return]
    method = experiment.method
    options = {
        "head": experiment.head or "",
        "adapt_from": experiment.adapt_from,
        **ModelOptions.of(experiment.adapter),
    }
    return Config(
        data=experiment.federation.options,
        model=ModelOptions(backbone=GIVEN, weights=GIVEN, **options),
        train=experiment.train,
        method=name_of(method),
        distill=replace(experiment.distill, data=GIVEN) if experiment.public else experiment.distill,
        drift=experiment.drift,
        privacy=experiment.privacy,
        run=experiment.options,
    )


def about_data(federation: Federation) -> list[str]:
    """Returns a warning for everything that the data lack."""
    lines = [f"warning: cannot read {path}: skipped (DataOptions.skip_bad)" for path in federation.skipped]
    lines += [f"warning: {remark}" for remark in federation.remarks]
    if not federation.tested:
        lines.append("warning: no client has test images, so test scores are n/a: raise DataOptions.test")
    if not federation.multilabel and bool((federation.targets == federation.targets[0]).all()):
        name = federation.classes[int(federation.targets[0])]
        lines.append(f"warning: every image is of class {name!r}: any model is right, there is nothing to learn")
    return lines


def about_prefix(experiment: Experiment) -> list[str]:
    """Returns a line that says whether the outputs of the frozen stages are kept, if there are such stages."""
    federation, start = experiment.federation, experiment.adapt_from
    if not start:
        return []
    if federation.augment is not None:
        why = "is not kept: DataOptions.augment makes new images at every step"
    elif federation.features is None:
        why = "is not kept: it fits neither into the memory nor into the cache on the disk"
    else:
        why = f"is kept: {federation.features.bytes / 1e6:,.1f} MB"
    return [f"what the frozen stages before {start} make of each image {why}"]


def about_parts(experiment: Experiment) -> list[str]:
    """Returns a warning where the part of a network that a method keeps personal is empty."""
    group = experiment.method.parts.withholds
    if group is None or experiment.model.group(group).params:
        return []
    return [f"warning: this network has no {group.replace('_', ' ')} parameters: no part of it is personal"]


def about_settings(config: Config) -> list[str]:
    """Returns a warning for settings that change nothing."""
    distill = config.distill
    if not config.make_method().parts.distils or distill.steps or distill.data == "none":
        return []
    return [f"warning: Distill.steps is 0: nothing is distilled, and Distill.data={distill.data} is not used"]
