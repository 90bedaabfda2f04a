"""The cohort behind a network: messages to sites, deadlines, and checks of everything that comes back.

A round is sampled, sent, gathered until its deadline and checked here; what a round is, `experiment.py` says. The
scores of a round ride in the messages of the next: a message costs seconds, so there are few.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from flwr.app import RecordDict
from torch import Tensor

from ..client.cohort import Report, Uploads
from ..client.scores import Scores
from ..errors import InputError, RunError
from ..experiment import Experiment
from ..lanes import State, stack
from ..methods import Judge
from ..runs.moment import Moment
from .checks import Clock, Gathered, Number, guard_losses, mean_loss, sample_count, why_not
from .link import Link
from .messages import (
    About,
    Refused,
    checked_upload,
    expected_upload,
    one_line,
    read_numbers,
    read_reply,
    request,
)
from .records import Diary
from .settings import Plan, ServerSettings

SCORES = ("local_test", "local_val", "global_test")
GUARD = 0.2  # the part of a round's time that is kept for the guard, where there is one
Step = Callable[[str, int], None]


class FlowerCohort:
    """The declared sites of a federation; `experiment.Cohort` over a Flower grid."""

    def __init__(self, experiment: Experiment, settings: ServerSettings, plan: Plan, backbone: State, diary: Diary):
        self.experiment, self.settings, self.diary = experiment, settings, diary
        self.limits, self.sites = settings.rounds, settings.federation.sites
        self.plan, self.backbone = plan, backbone
        self.link: Link  # set before the first round
        self.clock = Clock.start(self.limits.deadline_s)  # each try of a round starts its own
        self.found = Gathered()  # of the last round
        self.due = False  # whether the next round's messages ask for scores

    @property
    def names(self) -> tuple[str, ...]:
        return self.sites

    # What the experiment asks for

    def train(self, now: Moment, sampled: Sequence[int]) -> Uploads:
        evaluate, self.due = self.due, False
        cohort = [self.sites[m] for m in sampled]
        found = self.found = self._gather(now, cohort, evaluate)
        sites = sorted(found.uploads)
        weights = None
        if self.experiment.train.weighting == "samples":
            weights = [sample_count(found.numbers[s]["samples"], self.limits.max_samples) for s in sites]
        report = Report(
            mean_loss(found.numbers[s].get("loss") for s in sites),
            tuple(sorted(found.failed)),
            tuple(s for s in cohort if s not in found.uploads),
            {s: why for s, why in found.refused.items() if s not in found.uploads},
        )
        states = stack(*(found.uploads[s] for s in sites))
        scores = self._scores(found.numbers) if evaluate else None
        return Uploads(states, len(sites), lambda: report, weights, scores=scores)

    def score(self, now: Moment, candidates: State) -> Tensor:
        """The guard's losses from the sites that uploaded; NaN where no good answer came in time."""
        if not isinstance(self.experiment.method, Judge):
            raise InputError(f"{self.plan.config.method_name} has no client_score: set Distill.guard to none")
        sites = sorted(self.found.uploads)
        out = torch.full((candidates.lanes, len(sites)), torch.nan, dtype=torch.float64)
        limit = self.clock.left()
        content = request(self._about(now, "score", within=limit), candidates)
        self.experiment.mark("scoring", now.round)
        for site, reply in self.link.exchange(dict.fromkeys(sites, content), limit).items():
            if numbers := self._believed(now, site, reply, "score", candidates.lanes):
                out[:, sites.index(site)] = torch.tensor(numbers["losses"], dtype=torch.float64)
        return out

    def evaluate(self, now: Moment, splits: Sequence[str], last: bool) -> Mapping[str, Scores] | None:
        self.due = not last
        if not last:
            return None
        return self._scores(self._ended(now, "finish" if self.experiment.has_last_stage else "evaluate")[0])

    def finish(self, now: Moment) -> tuple[State, Report]:
        numbers, replies = self._ended(now, "finish")
        failed = tuple(s for s, r in replies.items() if s in numbers and read_reply(r).failed)
        return State(), Report(failed=failed)

    # Who is there

    def _about(self, now: Moment, kind: str, evaluate: bool = False, within: float = 0.0) -> About:
        d = self.diary
        text, begun = self.plan.text(), (d.start, d.start_round)
        return About(d.federation, d.run, now.round, kind, text, *begun, evaluate, within)

    def find_all(self, now: Moment) -> None:
        """Waits until every declared site is known, or `hello_s` is over."""
        self.link.find(self._hello(now), self.limits.hello_s)

    def _hello(self, now: Moment) -> RecordDict:
        return request(self._about(now, "hello", within=self.limits.hello_s))

    def _reach(self, now: Moment, needed: int, cohort: Sequence[str]) -> None:
        """Looks who is there and starts the round's clock; waits only if too few are, and at most half the round."""
        self.link.find(self._hello(now), 0.0)
        self.clock = Clock.start(self.limits.deadline_s)
        if len([s for s in cohort if s in self.link.nodes]) < needed:
            self.link.find(self._hello(now), min(self.limits.hello_s, self.clock.left(0.5)))
        if len([s for s in cohort if self._ready(s)]) < needed:
            limit = self.clock.left(0.5)
            for site, reply in self.link.exchange(self._weights(now, limit), limit).items():
                self._equipped(now, site, reply)

    def _weights(self, now: Moment, within: float) -> dict[str, RecordDict]:
        """The backbone, for the sites that have said they need it."""
        content = request(self._about(now, "weights", within=within), self.backbone)
        return dict.fromkeys(sorted(self.link.needs & set(self.link.nodes)), content)

    def _equipped(self, now: Moment, site: str, reply: RecordDict) -> None:
        if self._believed(now, site, reply, "weights") is not None:
            self.link.needs.discard(site)

    def _ready(self, site: str) -> bool:
        return site in self.link.nodes and site not in self.link.needs

    def _kept_for_guard(self, now: Moment) -> float:
        """The part of a round that is kept for the guard's question."""
        o, method = self.experiment.distill, self.experiment.method
        asked = isinstance(method, Judge) and method.parts.distils and o.guard == "clients" and o.steps > 0
        return GUARD if asked and not (o.rounds and now.round >= o.rounds) else 0.0

    # A round's uploads

    def _gather(self, now: Moment, cohort: Sequence[str], evaluate: bool) -> Gathered:
        """Uploads of the cohort. A round with too few good ones is tried again; sites then answer from their disks."""
        found, needed = Gathered(), min(self.limits.min_sites, len(cohort))
        for attempt in range(self.limits.retries + 1):
            self._reach(now, needed, cohort)
            limit = self.clock.left(self._kept_for_guard(now))
            train = request(self._about(now, "train", evaluate, limit), now.broadcast)
            contents = {s: train for s in cohort if s not in found.uploads and self._ready(s)}
            if evaluate and attempt == 0:
                others = request(self._about(now, "evaluate", True, limit), now.broadcast)
                contents |= {s: others for s in self.sites if s not in cohort and self._ready(s)}
            weights = self._weights(now, limit)  # a newcomer gets them beside the others' round and joins the next
            self.experiment.mark("sending", now.round)
            for site, content in sorted(self.link.exchange({**contents, **weights}, limit).items()):
                if site in weights:
                    self._equipped(now, site, content)
                else:
                    self._take(now, site, content, "train" if site in cohort else "evaluate", found)
            if len(found.uploads) >= needed:
                return found
            self.diary.tell("", "short", f"{len(found.uploads)} of at least {needed} uploads, attempt {attempt + 1}")
        away = [s for s in cohort if s not in found.uploads]
        raise RunError(
            f"round {now.round}: {len(found.uploads)} good uploads, {needed} needed (Rounds.min_sites); without "
            f"one: {', '.join(away)}; the round before is saved: run it again with resume=true"
        )

    def _take(self, now: Moment, site: str, content: RecordDict, kind: str, found: Gathered) -> None:
        """Keeps a reply that holds what it should; says why another is refused."""
        try:
            numbers = self._numbers(now, site, content, kind)
            if read_reply(content).needs == "weights":  # it came back without its disk
                self.link.needs.add(site)
                raise Refused("it needs the weights again")
            if kind == "train":
                like = expected_upload(self.experiment.method, self.experiment.model, now.broadcast)
                upload = checked_upload(content, like, self.limits.norm_bound)
                if self.experiment.train.weighting == "samples":
                    sample_count(numbers.get("samples"), self.limits.max_samples)
                found.uploads[site] = upload
                if read_reply(content).failed:
                    found.failed.add(site)
            found.numbers[site] = numbers
        except Exception as error:
            found.refused[site] = why = why_not(error)
            self.diary.tell(site, "refused", f"{kind}: {why}")

    def _numbers(self, now: Moment, site: str, content: RecordDict, kind: str) -> dict[str, Number]:
        """The numbers of a reply, if it is this site's to this message."""
        reply = read_reply(content)
        if reply.error:
            raise Refused(one_line(reply.error))
        if reply.site != site:
            raise Refused(f"the reply says it is {reply.site[:64]!r}")
        if not (a := reply.about).answers(self._about(now, kind)):
            raise Refused(f"late: of run {a.run[:64]!r}, round {a.round}, {a.kind[:16]!r}")
        return dict(read_numbers(content))

    def _believed(
        self, now: Moment, site: str, content: RecordDict, kind: str, losses: int = 0
    ) -> dict[str, Number] | None:
        """The same, with so many `losses`; None, and a line in the diary, where a reply is refused."""
        try:
            numbers = self._numbers(now, site, content, kind)
            return {"losses": guard_losses(numbers.get("losses"), losses)} if losses else numbers
        except Exception as error:
            self.diary.tell(site, "refused", f"{kind}: {why_not(error)}")
            return None

    # Scores and the last stage

    def _scores(self, numbers: Mapping[str, Mapping[str, Number]]) -> dict[str, Scores]:
        """Every declared site's scores; what a site did not send, or is not a percentage, is None."""
        sent = {key: {s: numbers.get(s, {}).get(key) for s in self.sites} for key in SCORES}
        return {
            key: Scores({s: v if isinstance(v, float) and 0 <= v <= 100 else None for s, v in values.items()})
            for key, values in sent.items()
        }

    def _ended(self, now: Moment, kind: str) -> tuple[dict[str, dict[str, Number]], dict[str, RecordDict]]:
        """What the sites answer at the end. Scores may be missing; a last stage that too few did is tried again."""
        if kind == "finish" and self._last is not None and self._last[0] == now.round:
            return self._last[1:]
        scores, replies = dict[str, dict[str, Number]](), dict[str, RecordDict]()
        needed = min(self.limits.min_sites, len(self.sites)) if kind == "finish" else 0
        for attempt in range(self.limits.retries + 1):
            self._reach(now, len(self.sites) if attempt == 0 else needed, self.sites)
            limit = self.clock.left()
            content = request(self._about(now, kind, True, limit), now.broadcast)
            self.experiment.mark("finishing", now.round)
            asked = [s for s in self.sites if s not in scores and self._ready(s)]
            for site, reply in sorted(self.link.exchange(dict.fromkeys(asked, content), limit).items()):
                if (numbers := self._believed(now, site, reply, kind)) is not None:
                    scores[site], replies[site] = numbers, reply
            if len(replies) >= needed:
                self._last = (now.round, scores, replies)
                return scores, replies
            self.diary.tell("", "short", f"{len(replies)} of at least {needed} sites, attempt {attempt + 1}")
        raise RunError(
            f"the last stage: {len(replies)} sites did it, {needed} needed (Rounds.min_sites); the last round is "
            "saved: run it again with resume=true"
        )

    _last: tuple[int, dict[str, dict[str, Number]], dict[str, RecordDict]] | None = None
