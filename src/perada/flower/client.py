"""What a site does when the server asks: it is the local cohort of an experiment with one client.

`handle` takes the content of a message and returns the content of its reply; no network is needed to call it. What a
method keeps is read from and written to the site's own disk (`site_state.SiteState`) and is in no message.
"""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict
from safetensors.torch import save
from torch import nn

from ..client.cohort import LocalCohort, Report
from ..client.interval import wilson
from ..client.scores import personal_scores
from ..config import Config, build, in_keys
from ..data import Federation
from ..errors import InputError
from ..experiment import Experiment
from ..inputs import printable
from ..lanes import State
from ..lanes.machine import device_of
from ..methods import Finisher, Judge
from ..models import Backbone, backbone
from ..runs.files import write_atomic
from ..server.checks import Refused
from .messages import UNDONE, Numbers, Reply, Request, digest, message, read_request, unpack
from .settings import MAX_ROUND, Plan, SiteSettings, is_run_id
from .site_data import public_test, site_federation
from .site_state import Entry, SiteState
from .spending import SiteSpending, check_plan


class NeedsWeights(Exception):
    """The server's backbone has to be sent first."""


@dataclass
class Work:
    """What a plan makes of a site: its data and an experiment on them, loaded once."""

    site: Site
    plan: Plan

    @cached_property
    def config(self) -> Config:
        config = self.plan.config
        return replace(config, run=replace(config.run, device=self.site.settings.device))

    @cached_property
    def federation(self) -> Federation:
        return site_federation(self.site.settings, self.plan, device_of(self.config.run.device))

    @cached_property
    def test(self) -> Federation | None:
        path = self.site.settings.test
        return public_test(path, self.plan, device_of(self.config.run.device)) if path else None

    @cached_property
    def network(self) -> Backbone:
        """The server's frozen network. Its weights are made here where the plan says how, else they were sent."""
        sent = self.site.state.backbone_file(self.plan.backbone)
        for weights in (self.config.model.weights, *([str(sent)] if sent.is_file() else [])):
            network = planned_network(self.config, len(self.plan.classes))
            try:
                network.load(weights)
            except InputError as error:
                if weights != "package":
                    raise
                self.site.log(f"{error}; until then the server sends them")
                continue
            if weights_digest(network.net) == self.plan.backbone:
                return network
        if sent.is_file():
            raise InputError(f"{sent} is not what the server sent: remove it, and it is sent again")
        raise NeedsWeights

    @cached_property
    def experiment(self) -> Experiment:
        _ = self.network  # before the data: it may have to be sent
        experiment = self.experiment_on(self.federation)
        experiment.keep_features()
        return experiment

    def experiment_on(self, federation: Federation) -> Experiment:
        """Returns an experiment that has not trained. Its `now` has the first broadcast and the first kept state."""
        return build(self.config, net=self.network, federation=federation, to_train=False)

    @cached_property
    def spending(self) -> SiteSpending:
        """What a round costs this site, and what it has spent."""
        return SiteSpending.of(self)

    @property
    def discreet(self) -> bool:
        """Whether no number of the site's own leaves it, because differential privacy does not account for one."""
        return self.config.privacy.of_samples

    @property
    def cohort(self) -> LocalCohort:
        cohort = self.experiment.cohort
        assert isinstance(cohort, LocalCohort)
        cohort.lanes = self.config.run.lanes
        return cohort


def planned_network(config: Config, classes: int) -> Backbone:
    """Returns the network of a plan, before its weights are loaded: the server and the sites make the same one."""
    return backbone(config.model.backbone, classes, config.run.seed, config.model.head, config.data.size)


def backbone_state(net: nn.Module) -> State:
    """Returns the frozen network as a state of one lane, to be sent."""
    tensors = {n: t for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}
    return State({n: t.detach().unsqueeze(0) for n, t in tensors.items()})


def weights_digest(net: nn.Module) -> str:
    return digest(backbone_state(net))


def shapes_of(state: State) -> dict[str, tuple[int, ...]]:
    return {n: tuple(t.shape) for tensors in (state.params, state.buffers) for n, t in tensors.items()}


@dataclass
class Site:
    """A site, ready to answer. One process may answer many messages; Flower's answers one."""

    settings: SiteSettings
    trained: int = 0  # rounds really trained, not answered from the disk
    _work: dict[str, Work] = field(default_factory=dict)

    @property
    def state(self) -> SiteState:
        s = self.settings
        return SiteState(Path(s.state), s.federation, s.name, s.keep)

    def work(self, plan: str) -> Work:
        if plan not in self._work:
            if self.settings.threads:
                torch.set_num_threads(self.settings.threads)
            try:
                self._work = {plan: Work(self, Plan.parse(plan))}
            except InputError as error:  # it speaks of the server's own words, so the server may read it
                raise Refused(str(error)) from error
        return self._work[plan]

    def log(self, text: str) -> None:
        text = "\n".join(map(printable, text.splitlines()))  # it may repeat words of the server
        print(f"site {self.settings.name}: {text}", file=sys.stderr, flush=True)

    def reply(
        self, request: Request, state: State | None = None, numbers: Numbers | None = None, **words: Any
    ) -> RecordDict:
        """Returns the content of a reply. words: the rest of a `Reply`."""
        return message(Reply(*request.subject, self.settings.name, **words), state, numbers or {})


def handle(site: Site, content: RecordDict) -> RecordDict:
    """Returns the reply to a message.

    Whatever is wrong is said in one line that names no file of the site. The site's own log has the details.
    """
    request = Request("", "", 0, "")
    try:
        request = read_request(content)
        return _handle(site, request, content)
    except NeedsWeights:
        return site.reply(request, needs="weights")
    except Refused as error:
        reason = str(error)
    except InputError as error:
        site.log(f"error: {error}")
        reason = "bad input at the site, see its log"
    except Exception as error:  # the site must answer, or the round waits for its deadline
        site.log(f"error: {traceback.format_exc()}")
        reason = f"failed at the site ({type(error).__name__}), see its log"
    return site.reply(request, error=reason)


def _check_words(request: Request) -> None:
    """Refuses a run or round that could lead out of the site's folder: they become names of folders there."""
    if not is_run_id(request.run):
        raise Refused("run is not the id of a run")
    if request.start and not is_run_id(request.start):
        raise Refused("start is not the id of a run")
    for what, round in (("round", request.round), ("start_round", request.start_round)):
        if not 0 <= round < MAX_ROUND:
            raise Refused(f"{what} must be from 0 to {MAX_ROUND - 1}")
    if not 0 <= request.within < math.inf:
        raise Refused("within is not a number of seconds")
    if not UNDONE.fullmatch(request.undone):
        raise Refused("undone is not a list of rounds")


def _handle(site: Site, request: Request, content: RecordDict) -> RecordDict:
    _check_words(request)
    if request.federation != site.settings.federation:
        raise Refused(f"it belongs to federation {site.settings.federation!r}, not {request.federation!r}")
    work = site.work(request.plan)
    if work.plan.federation != request.federation:
        raise Refused("the plan is another federation's")
    if site.settings.methods and work.config.method_name not in site.settings.methods:
        raise Refused(f"it does not take part in method {work.config.method_name!r}")
    check_plan(work.config, site.settings.budget)
    if request.kind == "hello":
        return _hello(work, request)
    if request.kind == "score":
        return _score(work, request, content)
    with site.state.locked(max(1.0, 0.9 * request.within)):  # in time to say that it is busy
        if request.kind == "weights":
            return _weights(work, request, content)
        received = unpack(content, work.experiment.now.broadcast)
        site.state.check_history(request.run, request.undone)
        words = (request.plan, request.start, request.start_round, request.undone)
        site.state.save_broadcast(request.run, *words, received)
        if request.kind == "train":
            return _train(work, request, received)
        if request.kind == "evaluate":
            return site.reply(request, numbers=_scores(work, request, received, _kept(work, request)))
        if request.kind == "finish":
            return _finish(work, request, received)
    raise Refused(f"it knows no {request.kind!r}: do server and site run one version?")


def _hello(work: Work, request: Request) -> RecordDict:
    """Refuses all that can be refused before the first round."""
    experiment, client = work.experiment, work.federation.clients[0]
    judges = experiment.distill.guard == "clients" and isinstance(experiment.method, Judge)
    if judges and experiment.method.parts.distils and not len(client.val):
        work.site.log(in_keys("no validation data here: this site has no say in the guard (DataOptions.val)"))
    if not len(client.test):
        work.site.log(in_keys("no test data here: its scores are n/a (DataOptions.test)"))
    for path in work.federation.skipped:
        work.site.log(f"cannot read {path}: skipped (skip_bad)")
    for remark in work.federation.remarks:
        work.site.log(in_keys(remark))
    _ = work.test
    return work.site.reply(request)


def _weights(work: Work, request: Request, content: RecordDict) -> RecordDict:
    """Keeps the server's backbone, if it is what the plan names."""
    sent = unpack(content, backbone_state(planned_network(work.config, len(work.plan.classes)).net))
    if digest(sent) != work.plan.backbone:
        raise Refused("the weights are not those of the plan")
    data = save({n: t[0].contiguous() for n, t in sent.params.items()})
    write_atomic(work.site.state.backbone_file(work.plan.backbone), data)
    return work.site.reply(request)


def _kept(work: Work, request: Request) -> State:
    """Returns what the site keeps when the round begins: from its disk, or the method's first state."""
    experiment, state = work.experiment, work.site.state
    first = experiment.now.kept
    if isinstance(experiment.method, Finisher):
        return first  # before the last stage clients keep nothing
    base = state.base(request.run, request.round)
    if base is not None and base >= request.round:
        work.site.log(f"its state before round {request.round} is gone: it goes on from its oldest, of round {base}")
    kept = state.before(request.run, request.round)
    if kept is None and request.start:
        kept = state.before(request.start, request.start_round)
    if kept is None:
        return first
    kept = experiment.here(kept)
    if shapes_of(kept) != shapes_of(first):
        raise Refused("what it keeps is another method's or model's: start a new run")
    return kept


def _train(work: Work, request: Request, received: State) -> RecordDict:
    """Trains a round; one that was trained before is answered from the disk."""
    seen = digest(received, request.plan, request.start)
    entry = work.site.state.answered(request.run, request.round, seen)
    kept = _kept(work, request) if entry is None or request.evaluate else State()
    numbers = _scores(work, request, received, kept) if request.evaluate else {}
    known = entry is not None
    if entry is None:
        work.spending.check()
        now = replace(work.experiment.now, round=request.round, broadcast=received, kept=kept)
        uploads = work.cohort.train(now, [0])
        work.spending.pay()
        entry = _saved(work, request, seen, uploads.kept or State(), uploads.states, uploads.report)
    if entry.said["loss"] is not None and not work.discreet:
        numbers["loss"] = float(entry.said["loss"])
    _tell_round(work, request, entry, known)
    if work.config.train.weighting == "samples" and not work.discreet:
        numbers["samples"] = float(len(work.federation.clients[0].train))
    failed = bool(entry.said["failed"])
    return work.site.reply(request, None if failed else entry.upload, numbers, failed=failed)


def _finish(work: Work, request: Request, received: State) -> RecordDict:
    """Runs the method's last stage; sends the scores after it."""
    if not isinstance(work.experiment.method, Finisher):
        raise Refused(f"{work.config.method_name} has no last stage")
    seen = digest(received, request.plan, request.start, "finish")
    entry = work.site.state.answered(request.run, request.round, seen)
    if entry is None:
        work.spending.check()
        kept, report = work.cohort.finish(replace(work.experiment.now, round=request.round, broadcast=received))
        work.spending.pay()
        entry = _saved(work, request, seen, kept, State(), report)
    numbers = _scores(work, request, received, work.experiment.here(entry.kept)) if request.evaluate else {}
    return work.site.reply(request, numbers=numbers, failed=bool(entry.said["failed"]))


def _saved(work: Work, request: Request, seen: str, kept: State, upload: State, report: Report) -> Entry:
    """Writes the site's work to its disk, before anybody hears of it."""
    said = {"loss": report.loss, "failed": bool(report.failed)}
    base = work.site.state.base(request.run, request.round)
    entry = Entry(request.round, base, seen, kept, upload, said, request.undone)
    work.site.state.save(request.run, entry)
    work.site.trained += 1
    return entry


def _score(work: Work, request: Request, content: RecordDict) -> RecordDict:
    """Sends the loss of each of the guard's candidates on this site's validation data; NaN where it has none."""
    experiment = work.experiment
    if not isinstance(experiment.method, Judge):
        raise Refused(f"{work.config.method_name} has no guard")
    if work.discreet:
        raise Refused("with differential privacy it sends no validation losses")
    judged = len(experiment.distill.judged())
    candidates = unpack(content, experiment.now.broadcast, judged, finite=False)  # one that diverged loses by its loss
    work.site.log(f"round {request.round + 1}: scored {judged} candidates of the server on its validation data")
    losses = work.cohort.losses(work.cohort.trainer_of([0], request.round), candidates)[:, 0]
    return work.site.reply(request, numbers={"losses": losses.tolist()})


def _tell_round(work: Work, request: Request, entry: Entry, known: bool) -> None:
    """Writes in the site's log how the training of a round went; notes it on the disk if it was trained just now."""
    loss, number = entry.said["loss"], request.round + 1
    how = "n/a" if loss is None else f"{loss:.4f}"
    if entry.said["failed"]:
        how += "; it stopped being finite, so nothing is sent"
    how += work.spending.told()
    where = " (trained before, answered from the disk)" if known else ""
    work.site.log(f"round {number} of {work.config.train.rounds}: training loss {how}{where}")
    if not known:
        spent = {"epsilon": e} if work.spending.counts and math.isfinite(e := work.spending.epsilon) else {}
        work.site.state.note(request.run, {"round": number, "loss": loss, **spent, "undone": request.undone})


def _tell_scores(work: Work, request: Request, scores: Mapping[str, float | None]) -> None:
    """Writes in the site's log, and on its disk, how good its own model is. Nothing of this is sent."""
    test, value, done = len(work.federation.clients[0].test), scores["local_test"], request.round
    if value is None:
        how = "n/a (no test images)"
    elif work.federation.multilabel:
        how = f"AUC {value:.1f} on {test} own test images"
    else:
        low, high = wilson(round(value * test / 100), test) or (0.0, 100.0)
        how = f"{value:.1f}% of {test} own test images right (95%: {low:.1f} to {high:.1f})"
    what = "before training" if done == 0 else f"after round {done} of {work.config.train.rounds}"
    work.site.log(f"{what}: {how}")
    note = {"round": done, "local_test": value, "local_val": scores["local_val"], "undone": request.undone}
    work.site.state.note(request.run, note)


def _scores(work: Work, request: Request, received: State, kept: State) -> dict[str, float | list[float]]:
    """Returns the scores of the site's own model on its own data and the shared test set; none where undefined.

    They are rounded: an exact share of n images would tell n. With differential privacy of samples, only the site's own
    log has them.
    """
    experiment = work.experiment
    lanes = experiment.method.personal(received, kept)
    scores = personal_scores(experiment.model, lanes, experiment.federation, ("local", "val"))
    if work.test is not None:
        scores["global_test"] = personal_scores(experiment.model, lanes, work.test, ("local",))["local_test"]
    values = {key: next(iter(by_client.per_client.values())) for key, by_client in scores.items()}
    _tell_scores(work, request, values)
    if work.discreet:
        return {}
    return {key: round(value, work.site.settings.score_digits) for key, value in values.items() if value is not None}
