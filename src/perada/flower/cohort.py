"""The cohort behind a network: messages to sites, deadlines, and checks of everything that comes back.

A round is sampled, sent, gathered until its deadline and checked here; `experiment.py` says what a round is. The scores
of a round ride in the messages of the next: a message costs seconds, so there are few.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import RecordDict
from torch import Tensor

from ..client.cohort import Report, Uploads
from ..client.scores import Scores
from ..errors import InputError, RunError
from ..experiment import Experiment
from ..inputs import one_line
from ..lanes import State, stack
from ..methods import Judge, expected_upload
from ..runs.moment import Moment
from ..server.checks import Refused, unlike_others
from .checks import checked_upload, guard_losses, mean_loss, sample_count, why_not
from .link import RESUME, Clock, Link
from .messages import PRIVACY_SPENT, Numbers, Request, message, most_bytes, read_numbers, read_reply, read_request
from .quarantine import PAUSE
from .records import Diary
from .settings import Plan

SCORES = ("local_test", "local_val", "global_test")
GUARD = 0.2  # the share of a round's time that is kept for the guard


@dataclass
class Answer:
    """What a site answered, checked."""

    kind: str  # of the request
    numbers: Numbers
    failed: bool  # its training diverged: it has no upload
    upload: State = field(default_factory=State)
    samples: float = 0.0  # where the mean is weighted by them
    losses: Sequence[float] = ()  # of the guard's candidates

    @property
    def uploaded(self) -> bool:
        return self.kind == "train" and not self.failed


Answers = dict[str, Answer]  # by site


class Declined(Refused):
    """A site says that it has no answer. That is no reason to distrust it."""


class FlowerCohort:
    """The declared sites of a federation; `experiment.Cohort` over a Flower grid."""

    def __init__(self, experiment: Experiment, plan: Plan, backbone: State, diary: Diary, link: Link) -> None:
        self.experiment, self.plan, self.backbone, self.diary, self.link = (
            experiment,
            plan.text(),
            backbone,
            diary,
            link,
        )
        self.limits, self.sites = diary.settings.rounds, diary.settings.federation.sites
        self.by_samples = experiment.train.weighting == "samples"
        self.patience = self.limits.hello_s  # how long to wait for all sites; at the start only
        self.clock = Clock.start(self.limits.deadline_s)  # each try of a round starts its own
        self.uploaded: list[str] = []  # the sites of the last round
        self.final: Answers | None = None  # of the last stage
        self.distrusted: set[str] = set()  # whose uploads were refused in this round: they would send the same again
        self.told: set[tuple[str, float]] = set()  # claims of samples that were cut
        self.spent: set[str] = set()  # sites whose privacy budget allows no further round
        self.due = False  # whether the next round's messages ask for scores

    @property
    def names(self) -> tuple[str, ...]:
        return self.sites

    @property
    def apart(self) -> bool:
        """Whether nothing that a site uploads may decide what becomes of another's upload.

        With differential privacy of clients one site moves the noisy sum by at most `Privacy.clip`. That bound would
        not hold if a site could bring another one in or out. So an upload is compared with the broadcast alone, and a
        refused one is a site without a part in the sum.
        """
        return self.experiment.privacy.of_clients

    # What the experiment asks for

    def train(self, now: Moment, sampled: Sequence[int]) -> Uploads:
        evaluate, self.due = self.due, False
        cohort = [self.sites[m] for m in sampled]
        answers, refused = self._collect(now, "train", cohort, evaluate)
        if self.spent.issuperset(self.sites):
            self.diary.tell("", "ended", "every site's privacy budget is spent: nothing more is trained")
            self.experiment.stop()
        trained = [s for s in cohort if s in answers and answers[s].kind == "train"]
        self.uploaded = [s for s in trained if answers[s].uploaded]
        uploads = [answers[s] for s in self.uploaded]
        report = Report(
            mean_loss(a.numbers.get("loss") for a in uploads),
            tuple(s for s in trained if answers[s].failed),
            tuple(s for s in cohort if s not in trained),
            {s: why for s, why in refused.items() if s not in answers},
        )
        weights = self._weighed({s: answers[s].samples for s in self.uploaded}) if self.by_samples else None
        scores = self._scores(answers) if evaluate else None
        states = stack(*(a.upload for a in uploads)) if uploads else State()
        spent = self.spent.issuperset(cohort)
        return Uploads(states, self.uploaded, report, weights, scores=scores, spent=spent)

    def _weighed(self, claims: dict[str, float]) -> list[float]:
        """Returns the samples of each site that uploaded. A claim that the rule cuts is reported once."""
        samples = list(claims.values())
        for site, most in zip(claims, self.experiment.rule.weights(samples) or samples, strict=True):
            if most < claims[site] and (site, claims[site]) not in self.told:
                self.told.add((site, claims[site]))
                self.diary.tell(site, "cut", f"it says it has {claims[site]:.6g} samples: counted as {most:.6g}")
        return samples

    def score(self, now: Moment, candidates: State) -> Tensor:
        """Returns the guard's losses of the sites that uploaded; NaN where no good answer came in time."""
        if not isinstance(self.experiment.method, Judge):
            raise InputError(f"{type(self.experiment.method).__name__} has no client_score: set Distill.guard to none")
        limit = self.clock.left()
        question = message(self._request(now, "score", limit), candidates)
        self.experiment.mark("scoring", now.round)
        answers, _ = self._ask(now, dict.fromkeys(self.uploaded, question), limit)
        silence = [math.nan] * candidates.lanes
        losses = [answers[s].losses if s in answers else silence for s in self.uploaded]
        return torch.tensor(losses, dtype=torch.float64).T.contiguous()

    def left_out(self, why: Mapping[str, str]) -> None:
        """Reports the sites whose uploads have no part in the mean, by the rule; they have no say in the guard.

        It does not count for quarantine: a site with far more data than the others may be left out now and then.
        """
        for site, reason in why.items():
            self.diary.tell(site, "left out", reason)
        self.uploaded = [s for s in self.uploaded if s not in why]

    def evaluate(self, now: Moment, splits: Sequence[str], last: bool) -> Mapping[str, Scores] | None:
        self.due = not last
        if not last:
            return None
        kind = "finish" if self.experiment.has_last_stage else "evaluate"
        return self._scores(self.final or self._collect(now, kind, self.sites, True)[0])

    def finish(self, now: Moment) -> tuple[State, Report]:
        self.final, _ = self._collect(now, "finish", self.sites, True)
        return State(), Report(failed=tuple(s for s, a in self.final.items() if a.failed))

    def _scores(self, answers: Answers) -> dict[str, Scores]:
        """Returns every declared site's scores. What a site did not send, or is not a percentage, is None."""

        def percentage(site: str, key: str) -> float | None:
            value = answers[site].numbers.get(key) if site in answers else None
            return value if isinstance(value, float) and 0 <= value <= 100 else None

        return {key: Scores({s: percentage(s, key) for s in self.sites}) for key in SCORES}

    # Who is there

    def _request(self, now: Moment, kind: str, within: float = 0.0, evaluate: bool = False) -> Request:
        d = self.diary
        name = d.settings.federation.name
        return Request(name, d.run, now.round, kind, self.plan, d.start, d.start_round, evaluate, within, d.history)

    def _reach(self, now: Moment, wanted: int, cohort: Sequence[str]) -> None:
        """Looks who is there and starts the round's clock; waits only if too few are, and at most half the round."""
        hello = message(self._request(now, "hello", self.limits.hello_s))
        self.link.find(hello, self.patience)
        self.patience = 0.0
        self.clock = Clock.start(self.limits.deadline_s)
        if len([s for s in cohort if s in self.link.nodes]) < wanted:
            self.link.find(hello, min(self.limits.hello_s, self.clock.left(0.5)))
        if len([s for s in cohort if self._ready(s)]) < wanted:
            limit = self.clock.left(0.5)
            self._ask(now, self._weights(now, limit), limit)

    def _ready(self, site: str) -> bool:
        return site in self.link.nodes and site not in self.link.needs

    def _weights(self, now: Moment, within: float) -> dict[str, RecordDict]:
        """Returns the messages with the backbone, for the sites that have said they need it."""
        content = message(self._request(now, "weights", within), self.backbone)
        return dict.fromkeys(sorted(self.link.needs & set(self.link.nodes)), content)

    def _kept_for_guard(self, now: Moment) -> float:
        """Returns the share of a round that is kept for the guard's question."""
        o, method = self.experiment.distill, self.experiment.method
        asks = isinstance(method, Judge) and method.parts.distils and o.guard == "clients" and o.steps > 0
        return GUARD if asks and not (o.rounds and now.round >= o.rounds) else 0.0

    # Questions and answers

    def _collect(self, now: Moment, kind: str, cohort: Sequence[str], evaluate: bool) -> tuple[Answers, dict[str, str]]:
        """Returns the answers of the cohort (and the other sites' scores), and why others were refused.

        If too few sites did their work, the rest is asked again, but for those whose upload was refused; scores alone
        may be missing. A site in quarantine is not asked to train, and does not count as missing.
        """
        answers, refused = Answers(), dict[str, str]()
        self.distrusted.clear()
        train = kind == "train"
        stage, what = (f"round {now.round}", "uploads") if train else ("the last stage", "answers")
        for attempt in range(self.limits.retries + 1):
            first = attempt == 0
            asked = self._not_in_quarantine(now, cohort) if train else cohort
            needed = self._needed(now, kind, asked)
            self._reach(now, len(asked) if first and not train else needed, asked)
            limit = self.clock.left(self._kept_for_guard(now) if train else 0.0)
            work = message(self._request(now, kind, limit, evaluate), now.broadcast)
            again = [s for s in asked if s not in answers and s not in self.distrusted]
            messages = {s: work for s in again if self._ready(s)}
            if evaluate and first:
                others = message(self._request(now, "evaluate", limit, True), now.broadcast)
                messages |= {s: others for s in self.sites if s not in asked and self._ready(s)}
            weights = self._weights(now, limit)  # a newcomer gets them beside the others' round and joins the next
            self.experiment.mark("sending" if train else "finishing", now.round)
            good, bad = self._ask(now, {**messages, **weights}, limit)
            answers |= {s: a for s, a in good.items() if s in messages}
            if train:
                bad |= self._unlike(now, answers)
                for site in (s for s, a in answers.items() if a.uploaded):
                    self.diary.quarantine.accept(site)
            refused |= {s: why for s, why in bad.items() if s in messages}
            done = [s for s in asked if self._is_done(s, answers, train)]
            needed = self._needed(now, kind, asked)  # an upload may just have put its site in quarantine
            if len(done) >= needed:
                return answers, refused
            self.diary.tell("", "short", f"{len(done)} of at least {needed} {what}, attempt {attempt + 1}")
            if all(
                s in answers or s in self.distrusted | self.spent for s in asked
            ):  # asked again, a diverged site says so again
                break
        problem = f"{stage}: {len(done)} good {what}, {needed} needed (Rounds.min_sites)"
        for why, sites in (
            ("without one", [s for s in asked if s not in answers and s not in self.distrusted | self.spent]),
            ("refused", [s for s in asked if s in self.distrusted]),
            ("their privacy budget is spent", [s for s in asked if s in self.spent]),
            ("their training diverged", [s for s in asked if s in answers and s not in done]),
        ):
            problem += f"; {why}: {', '.join(sites)}" if sites else ""
        raise RunError(problem, RESUME)

    def _is_done(self, site: str, answers: Answers, train: bool) -> bool:
        """Returns whether a site did its work. Where sites are kept apart it need not be good: others are not asked."""
        if self.apart and train:
            return site in answers or site in self.distrusted
        return site in answers and (answers[site].uploaded or not train)

    def _needed(self, now: Moment, kind: str, asked: Sequence[str]) -> int:
        """Returns how many sites must have done their work; those in quarantine do not count as missing.

        asked: the sites to train; none of those whose privacy budget is spent can.
        """
        if kind == "evaluate" or (kind == "train" and self.spent.issuperset(asked)):
            return 0
        gone = {s for s in self.sites if s in self.spent or self.diary.quarantine.holds(s, now.round)}
        sites = [s for s in asked if kind != "train" or s not in gone]
        return min(self.limits.min_sites, max(1, len(sites)))

    def _expected(self, now: Moment) -> State:
        return expected_upload(self.experiment.method, self.experiment.model, now.broadcast)

    def _unlike(self, now: Moment, answers: Answers) -> dict[str, str]:
        """Removes the uploads that are absurd beside the others' (`unlike_others`); returns why."""
        if self.apart:
            return {}
        found = self._compared({s: a.upload for s, a in answers.items() if a.upload.lanes}, self._expected(now))
        for site, why in found.items():
            del answers[site]
            self._refuse(now, site, "train", why)
        return found

    def _compared(self, uploads: Mapping[str, State], expected: State) -> dict[str, str]:
        """Returns the sites whose uploads are unlike the others', or break the comparison, and why."""
        sites = list(uploads)
        try:
            found = unlike_others(stack(*uploads.values()), expected) if sites else {}
            return {sites[lane]: why for lane, why in found.items()}
        except Exception as error:
            if len(sites) == 1:
                return {sites[0]: why_not(error)}
            broken = dict[str, str]()
            for site in sites:
                broken |= self._compared({site: uploads[site]}, expected)
            rest = {s: uploads[s] for s in sites if s not in broken}
            return broken | self._compared(rest, expected) if broken else dict.fromkeys(sites, why_not(error))

    def _ask(self, now: Moment, messages: Mapping[str, RecordDict], within: float) -> tuple[Answers, dict[str, str]]:
        """Sends each site its message; returns the answers that pass every check, and why others were refused."""
        answers, refused = Answers(), dict[str, str]()
        upload = most_bytes(self._expected(now))
        for site, content in sorted(self.link.exchange(messages, within, upload).items()):
            request = read_request(messages[site])
            try:
                if isinstance(content, Refused):
                    raise content
                answers[site] = self._checked(now, site, request, content)
            except Exception as error:
                refused[site] = why_not(error)
                self._refuse(now, site, request.kind, refused[site], believed=isinstance(error, Declined))
        return answers, refused

    def _not_in_quarantine(self, now: Moment, cohort: Sequence[str]) -> list[str]:
        able = [s for s in cohort if s not in self.spent]
        if self.apart:  # who is asked although it is in quarantine depends on the others'
            return able
        asked, back = self.diary.quarantine.split(able, now.round)
        for site in back:
            self.diary.tell(site, "returned", "it is asked to train again after its quarantine")
        return asked

    def _refuse(self, now: Moment, site: str, kind: str, why: str, believed: bool = False) -> None:
        """Reports a refused answer, and counts a refused upload. believed: the site itself said that it has none."""
        if why == PRIVACY_SPENT and believed:
            self.spent.add(site)
        self.diary.tell(site, "refused", f"{kind}: {why}")
        if kind != "train" or believed:
            return
        self.distrusted.add(site)
        if not self.apart and self.diary.quarantine.refuse(site, now.round):
            many = len(self.diary.quarantine.refused[site])
            self.diary.tell(site, "quarantined", f"{many} refused uploads in a row: not asked for {PAUSE} rounds")
        self.diary.status("running", now.round)

    def _checked(self, now: Moment, site: str, request: Request, content: RecordDict) -> Answer:
        """Returns the content of a reply, if it is this site's to this request and holds what it should."""
        reply = read_reply(content)
        if reply.error:
            raise Declined(one_line(reply.error))
        if reply.site != site:
            raise Refused(f"the reply says it is {reply.site[:64]!r}")
        if reply.subject != request.subject:
            raise Refused(f"late: of run {reply.run[:64]!r}, round {reply.round}, {reply.kind[:16]!r}")
        answer = Answer(request.kind, read_numbers(content), reply.failed)
        if reply.needs == "weights":  # it came back without its disk
            self.link.needs.add(site)
            raise Declined("it needs the weights again")
        if request.kind == "weights":
            self.link.needs.discard(site)
        if reply.failed and request.kind == "train":  # an older site sends its last finite state, which is not used
            self.diary.tell(site, "diverged", "its training stopped being finite: it has no upload in this round")
        elif request.kind == "train":
            answer.upload = checked_upload(content, self._expected(now), self.limits.norm_bound, not self.apart)
            if self.by_samples:
                answer.samples = sample_count(answer.numbers.get("samples"), self.limits.max_samples)
        if request.kind == "score":
            answer.losses = guard_losses(answer.numbers.get("losses"), len(self.experiment.distill.judged()))
        return answer
