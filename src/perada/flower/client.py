"""What a site does when the server asks: the very same method functions as in a simulation, with one client.

`handle` takes the content of a message and gives the content of its reply; no network is needed to call it. What a
method keeps is read from and written to the site's own disk (`site.SiteState`) and is in no message.
"""

from __future__ import annotations

import math
import sys
import traceback
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from flwr.app import RecordDict
from safetensors.torch import save
from torch import nn

from ..client.scores import personal_scores
from ..client.trainer import Trainer
from ..config import Config, in_keys
from ..data import Federation
from ..errors import InputError
from ..experiment import DTYPES, lanes_of
from ..lanes import LaneModel, State
from ..lanes.machine import arithmetic, device_of
from ..methods import Finisher, Judge, Method, check_upload
from ..models import Backbone, backbone
from .messages import About, Refused, Reply, answer, digest, read_about, unpack
from .settings import MAX_ROUND, Plan, SiteSettings, is_run_id
from .site_data import public_test, site_federation
from .site_state import Entry, SiteState


class NeedsWeights(Exception):
    """The server's backbone has to be sent first."""


@dataclass
class Work:
    """What a plan makes of a site: its data, the model and the method, loaded once."""

    settings: SiteSettings
    plan: Plan
    state: SiteState

    @cached_property
    def config(self) -> Config:
        config = self.plan.config
        return replace(config, run=replace(config.run, device=self.settings.device))

    @cached_property
    def device(self) -> torch.device:
        device = device_of(self.config.run.device)
        arithmetic(self.config.run.precision, device)
        return device

    @cached_property
    def federation(self) -> Federation:
        return site_federation(self.settings, self.plan, self.device)

    @cached_property
    def test(self) -> Federation | None:
        return public_test(self.settings.test, self.plan, self.device) if self.settings.test else None

    @cached_property
    def method(self) -> Method:
        return self.config.make_method()

    @cached_property
    def backbone(self) -> Backbone:
        """The server's frozen network: its weights are made here where the plan says how, else as they were sent."""
        held = self.state.backbone(self.plan.backbone)
        for weights in (self.config.model.weights, *([str(held)] if held else [])):
            made = planned_network(self.config, len(self.plan.classes))
            made.load(weights)
            if weights_digest(made.net) == self.plan.backbone:
                return made
        if held:
            raise InputError(f"{held} is not what the server sent: remove it, and it is sent again")
        raise NeedsWeights

    @cached_property
    def model(self) -> LaneModel:
        made, adapter = self.backbone, self.config.model.strategy()
        return lanes_of(made.net, self.method, adapter, made.head, self.config.run)

    def here(self, state: State) -> State:
        dtype = DTYPES[self.config.run.precision]
        return state.map(lambda t: t.to(self.device, dtype if t.is_floating_point() else t.dtype))

    def trainer(self, round: int) -> Trainer:
        run = self.config.run
        return Trainer(self.model, self.federation, [0], round, run.seed, self.config.train, run.lanes)


def planned_network(config: Config, classes: int) -> Backbone:
    """Returns the network of a plan, before its weights are loaded: the server and the sites make the same one."""
    return backbone(config.model.backbone, classes, config.run.seed, config.model.head)


def backbone_state(net: nn.Module) -> State:
    """The frozen network as a state of one lane, to be sent."""
    held = {n: t for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    return State({n: t.detach().unsqueeze(0) for n, t in held.items()})


def weights_digest(net: nn.Module) -> str:
    return digest(backbone_state(net))


@dataclass
class Site:
    """A site, ready to answer. One process may answer many messages; Flower's answers one."""

    settings: SiteSettings
    trained: int = 0  # rounds really trained, not answered from the disk
    _work: dict[str, Work] = field(default_factory=dict)

    @property
    def state(self) -> SiteState:
        return SiteState(Path(self.settings.state), self.settings.federation, self.settings.name)

    def work(self, plan: str) -> Work:
        if plan not in self._work:
            if self.settings.threads:
                torch.set_num_threads(self.settings.threads)
            try:
                self._work = {plan: Work(self.settings, Plan.parse(plan), self.state)}
            except InputError as error:  # the server's own words: it may be told
                raise Refused(str(error)) from error
        return self._work[plan]


def handle(site: Site, content: RecordDict) -> RecordDict:
    """The reply to a message. Whatever is wrong is said in one line that names no file of the site's: what there is to
    say about those goes to the site's own log."""
    about = About("", "", 0, "")
    try:
        about = read_about(content)
        return _handle(site, about, content)
    except NeedsWeights:
        return answer(Reply(about, site.settings.name, needs="weights"))
    except Refused as error:
        reason = str(error)
    except InputError as error:
        _log(site, str(error))
        reason = "bad input at the site, see its log"
    except Exception as error:  # the site must answer, or the round waits for its deadline
        _log(site, traceback.format_exc())
        reason = f"failed at the site ({type(error).__name__}), see its log"
    return answer(Reply(about, site.settings.name, error=reason))


def _log(site: Site, text: str) -> None:
    print(f"site {site.settings.name}: error: {text}", file=sys.stderr, flush=True)


def _check_words(about: About) -> None:
    """A run's id becomes a folder here and a round a part of its name: the server has no say in where they lie."""
    if not is_run_id(about.run):
        raise Refused("run is not the id of a run")
    if about.start and not is_run_id(about.start):
        raise Refused("start is not the id of a run")
    for what, round in (("round", about.round), ("start_round", about.start_round)):
        if not 0 <= round < MAX_ROUND:
            raise Refused(f"{what} must be from 0 to {MAX_ROUND - 1}")
    if not 0 <= about.within < math.inf:
        raise Refused("within is not a number of seconds")


def _handle(site: Site, about: About, content: RecordDict) -> RecordDict:
    _check_words(about)
    if about.federation != site.settings.federation:
        raise Refused(f"it belongs to federation {site.settings.federation!r}, not {about.federation!r}")
    work = site.work(about.plan)
    if work.plan.federation != about.federation:
        raise Refused("the plan is another federation's")
    if site.settings.methods and work.config.method_name not in site.settings.methods:
        raise Refused(f"it does not take part in method {work.config.method_name!r}")
    if about.kind == "hello":
        _check(work)
        return answer(Reply(about, site.settings.name))
    if about.kind == "score":
        return _score(work, about, content)
    with site.state.locked(max(1.0, 0.9 * about.within)):  # in time to say that it is busy
        if about.kind == "weights":
            return _weights(work, about, content)
        model, method = work.model, work.method
        received = unpack(content, method.init(model)[1])
        work.state.save_broadcast(about.run, about.plan, about.start, about.start_round, received)
        if about.kind == "train":
            return _train(site, work, about, received)
        if about.kind == "evaluate":
            kept = _kept(work, about)
            return answer(Reply(about, site.settings.name), None, _scores(work, received, kept))
        if about.kind == "finish":
            return _finish(site, work, about, received)
    raise Refused(f"it knows no {about.kind!r}: do server and site run one version?")


def _check(work: Work) -> None:
    """All that can be refused before the first round; the weights before the data, they may have to be sent."""
    _ = work.model
    judges = work.config.distill.guard == "clients" and isinstance(work.method, Judge) and work.method.parts.distils
    if judges and not len(work.federation.clients[0].val):
        _log_note(work, "no validation data here: this site has no say in the guard (DataOptions.val)")
    if not len(work.federation.clients[0].test):
        _log_note(work, "no test data here: its scores are n/a (DataOptions.test)")
    for path in work.federation.skipped:
        _log_note(work, f"cannot read {path}: skipped (skip_bad)")
    _ = work.test


def _log_note(work: Work, text: str) -> None:
    print(f"site {work.settings.name}: {in_keys(text)}", file=sys.stderr, flush=True)


def _weights(work: Work, about: About, content: RecordDict) -> RecordDict:
    """Keep the server's backbone, if it is what the plan names."""
    sent = unpack(content, backbone_state(planned_network(work.config, len(work.plan.classes)).net))
    if digest(sent) != work.plan.backbone:
        raise Refused("the weights are not those of the plan")
    work.state.save_backbone(work.plan.backbone, save({n: t[0].contiguous() for n, t in sent.params.items()}))
    return answer(Reply(about, work.settings.name))


def _kept(work: Work, about: About) -> State:
    """What the site keeps when the round begins: from its disk, or the method's first state."""
    first = work.method.init(work.model)[2]
    if isinstance(work.method, Finisher):
        return first  # before the last stage clients keep nothing
    kept = work.state.before(about.run, about.round)
    if kept is None and about.start:
        kept = work.state.before(about.start, about.start_round)
    if kept is None:
        return first
    kept = work.here(kept)
    if shapes_of(kept) != shapes_of(first):
        raise Refused("what it keeps is another method's or model's: start a new run")
    return kept


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for held in (state.params, state.buffers) for n, t in held.items()}


def _train(site: Site, work: Work, about: About, received: State) -> RecordDict:
    """One round, unless it was trained before: then what was answered then."""
    seen = digest(received, about.plan, about.start)
    entry = work.state.answered(about.run, about.round, seen)
    kept = _kept(work, about) if entry is None or about.evaluate else State()
    numbers = _scores(work, received, kept) if about.evaluate else {}
    if entry is None:
        trainer = work.trainer(about.round)
        upload, kept = work.method.client_update(trainer, received, kept)
        check_upload(work.method, work.model, upload)
        entry = _saved(work, about, seen, kept, upload, trainer)
        site.trained += 1
    return _entry_reply(work, about, entry, numbers)


def _finish(site: Site, work: Work, about: About, received: State) -> RecordDict:
    """The method's last stage, and the scores after it."""
    if not isinstance(work.method, Finisher):
        raise Refused(f"{work.config.method_name} has no last stage")
    seen = digest(received, about.plan, about.start, "finish")
    entry = work.state.answered(about.run, about.round, seen)
    if entry is None:
        trainer = work.trainer(about.round)
        kept = work.method.finish(trainer, received, State())  # before it, clients keep nothing
        entry = _saved(work, about, seen, kept, State(), trainer)
        site.trained += 1
    numbers = _scores(work, received, work.here(entry.kept)) if about.evaluate else {}
    return _entry_reply(work, about, entry, numbers, upload=False)


def _saved(work: Work, about: About, seen: str, kept: State, upload: State, trainer: Trainer) -> Entry:
    """On the disk before anybody hears of it."""
    said = {"loss": trainer.losses[0] if trainer.losses else math.nan, "failed": bool(trainer.failed)}
    earlier = [r for r in work.state.rounds(about.run) if r < about.round]
    entry = Entry(about.round, earlier[-1] if earlier else None, seen, kept, upload, said)
    work.state.save(about.run, entry)
    return entry


def _entry_reply(work: Work, about: About, entry: Entry, numbers: dict[str, float], upload: bool = True) -> RecordDict:
    numbers = {**numbers, "loss": float(entry.said["loss"])}
    if work.config.train.weighting == "samples":
        numbers["samples"] = float(len(work.federation.clients[0].train))
    reply = Reply(about, work.settings.name, failed=bool(entry.said["failed"]))
    return answer(reply, entry.upload if upload else None, dict(numbers))


def _score(work: Work, about: About, content: RecordDict) -> RecordDict:
    """The guard's candidates on this site's validation data: a loss each; NaN where it has none."""
    if not isinstance(work.method, Judge):
        raise Refused(f"{work.config.method_name} has no guard")
    like, judged = work.method.init(work.model)[1], len(work.config.distill.judged())
    candidates = unpack(content, like, judged, finite=False)  # a student may have diverged: its loss will say so
    losses = work.method.client_score(work.trainer(about.round), candidates)[:, 0]
    losses = losses.nan_to_num(nan=math.nan, posinf=torch.finfo(losses.dtype).max)  # the server believes no infinity
    return answer(Reply(about, work.settings.name), None, {"losses": losses.tolist()})


def _scores(work: Work, received: State, kept: State) -> dict[str, float]:
    """The site's own model on its own data (and the shared test set): one number each, none where undefined. Rounded:
    an exact share of n images would tell n."""
    lanes = work.method.personal(received, kept)
    found = personal_scores(work.model, lanes, work.federation, ("local", "val"))
    if work.test is not None:
        found["global_test"] = personal_scores(work.model, lanes, work.test, ("local",))["local_test"]
    values = {key: next(iter(scores.per_client.values())) for key, scores in found.items()}
    return {key: round(value, work.settings.score_digits) for key, value in values.items() if value is not None}
