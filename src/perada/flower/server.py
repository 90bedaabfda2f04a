"""The server's side of a federation: the round loop of `simulate`, with sites that may fail.

A round is sampled, sent, gathered until its deadline, checked, averaged (and distilled) by the method's own
`server_update`, and saved before anything of the next one is sent. So a server that is killed anywhere goes on with
the round after its last checkpoint, and sites that trained it already answer from their disks.

The scores of a round ride in the messages of the next: a message costs seconds, so there are few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import RecordDict
from torch import Tensor

from ..client.scores import Scores, logits_on, score
from ..errors import InputError, RunError
from ..experiment import DTYPES, arithmetic, cohort_of, model_of, public_chunks
from ..lanes import State, stack
from ..methods import Finisher, Judge
from ..models import build_backbone
from ..report import write_report
from ..runs.folder import Checkpoint, RunFolder, device_of
from ..runs.run import Run, summary_of
from ..server.distill import Server
from .checks import Clock, Gathered, Number, guard_losses, mean_loss, sample_count, why_not
from .client import backbone_state, shapes_of, weights_digest
from .link import Link
from .messages import (
    About,
    Refused,
    checked_upload,
    one_line,
    read_numbers,
    read_reply,
    request,
    shared_part,
)
from .records import Diary
from .settings import Plan, ServerSettings
from .site_data import empty_federation, public_test

SCORES = ("local_test", "local_val", "global_test")
GUARD = 0.2  # of a round's time is kept for the guard, where there is one: a hung site shall not silence it
Step = Callable[[str, int], None]


def no_step(what: str, round: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True)
class Moment:
    """The server between two rounds; `simulate.Moment` without what the sites keep."""

    round: int
    server: State
    broadcast: State
    counters: dict[str, int]
    last: dict[str, Any] = field(default_factory=dict)
    finished: bool = False


class Coordinator:
    """One run. `step` is called at every boundary at which a server may die (tests do)."""

    def __init__(self, settings: ServerSettings, diary: Diary, step: Step) -> None:
        self.settings, self.diary, self.step = settings, diary, step
        self.config, self.sites = settings.config, settings.federation.sites
        config, method = self.config, self.config.make_method()
        self.device = device_of(config.run.device)
        arithmetic(config.run.precision, self.device)
        if method.parts.own_step and config.train.momentum:
            raise InputError(f"{config.method_name} has its own step, without momentum: set train.momentum=0")
        net, report = build_backbone(
            config.model.backbone, len(settings.federation.classes), config.model.weights, config.run.seed
        )
        for line in report.lines() if report else ():
            diary.say(line)
        self.plan = Plan.of(settings, weights_digest(net))
        self.backbone = backbone_state(net)
        self.method, self.model = method, model_of(config, net, method, self.device)
        self.federation = empty_federation(self.plan, self.device)
        self.public = public_chunks(config, self.federation, method, self.device, DTYPES[config.run.precision])
        test = settings.federation.test
        self.test = public_test(test, self.plan, self.device) if test else None
        server, broadcast, _ = method.init(self.model)
        counters = {"bytes_up": 0, "bytes_down": 0, "distilled": 0, "accepted": 0}
        self.now = Moment(0, server, broadcast, counters)
        self.clock = Clock.start(settings.rounds.deadline_s)  # each try of a round starts its own
        self.seconds = 0.0
        self.began = time.monotonic()

    # Between rounds

    def restore(self, saved: Checkpoint) -> None:
        """Go on after a checkpoint of this run."""
        note = saved.note
        self.now = Moment(
            saved.round,
            self._here(saved.server),
            self._here(saved.broadcast),
            dict(note["counters"]),
            dict(note["last"]),
            note["finished"],
        )
        self.seconds = float(note["seconds"])

    def begin_from(self, saved: Checkpoint) -> None:
        """A new run that starts where another ended."""
        server, broadcast = self._here(saved.server), self._here(saved.broadcast)
        if shapes_of(server) != shapes_of(self.now.server) or shapes_of(broadcast) != shapes_of(self.now.broadcast):
            raise InputError("continue-from: that run's state is another method's or model's: start without it")
        self.now = replace(self.now, server=server, broadcast=broadcast)

    def _here(self, state: State) -> State:
        dtype = DTYPES[self.config.run.precision]
        return state.map(lambda t: t.to(self.device, dtype))

    def save(self, folder: RunFolder) -> None:
        now = self.now
        self.seconds, self.began = self.seconds + time.monotonic() - self.began, time.monotonic()
        note = {"counters": now.counters, "last": now.last, "seconds": self.seconds, "finished": now.finished}
        folder.save(Checkpoint(now.round, now.server, now.broadcast, [], note), ())

    # The run

    def run(self, link: Link, folder: RunFolder) -> dict[str, Any]:
        """From the round after the newest checkpoint to the last; returns the last evaluation."""
        rounds, every = self.config.train.rounds, self.config.run.eval_every
        rows = {r["round"]: r for r in folder.metrics()}
        link.find(self._hello(), self.settings.rounds.hello_s)
        while self.now.round < rounds:
            at = self.now.round
            due = at > 0 and at % every == 0 and at not in rows
            self.diary.status("running", at)
            found = self.gather(link, due)
            self.step("gathered", at)
            if due:
                rows[at] = self.row(found.numbers)
                folder.append_metrics(rows[at])
                self.step("measured", at)
            self.now = self.update(link, found)
            self.step("updated", at)
            self.save(folder)
            self.step("saved", at)
            self.diary.say(self._line(found))
        if rounds not in rows:
            self.last_stage(link, folder)
            rows[rounds] = self.row(self._last_scores)
            folder.append_metrics(rows[rounds])
            self.step("measured", rounds)
        self.close(folder, rows[rounds])
        return rows[rounds]

    def _line(self, found: Gathered) -> str:
        loss = self.now.last["train_loss"]
        shown = "n/a" if loss is None else f"{loss:.4f}"
        who = f"{len(found.uploads)} of {len(self.cohort(self.now.round - 1))} sites"
        return f"round {self.now.round} of {self.config.train.rounds}: {who}, training loss {shown}"

    def cohort(self, round: int) -> list[str]:
        """As in the simulator, among all declared sites: one that is away counts as dropped."""
        return [self.sites[m] for m in cohort_of(self.config, len(self.sites), round)]

    def _about(self, kind: str, evaluate: bool = False, within: float = 0.0) -> About:
        d = self.diary
        text, begun = self.plan.text(), (d.start, d.start_round)
        return About(d.federation, d.run, self.now.round, kind, text, *begun, evaluate, within)

    def _hello(self) -> RecordDict:
        return request(self._about("hello", within=self.settings.rounds.hello_s))

    def _reach(self, link: Link, needed: int, cohort: Sequence[str]) -> None:
        """Look who is there and start the round's clock; wait only where too few are, and at most half the round."""
        link.find(self._hello(), 0.0)
        self.clock = Clock.start(self.settings.rounds.deadline_s)
        if len([s for s in cohort if s in link.nodes]) < needed:
            link.find(self._hello(), min(self.settings.rounds.hello_s, self.clock.left(0.5)))
        if len([s for s in cohort if self._ready(link, s)]) < needed:
            limit = self.clock.left(0.5)
            for site, reply in link.exchange(self._weights(link, limit), limit).items():
                self._equipped(link, site, reply)

    def _weights(self, link: Link, within: float) -> dict[str, RecordDict]:
        """The backbone, for the sites that have said they need it."""
        content = request(self._about("weights", within=within), self.backbone)
        return dict.fromkeys(sorted(link.needs & set(link.nodes)), content)

    @property
    def _judged(self) -> float:
        """The part of a round that is kept for the guard's question."""
        o, method = self.config.distill, self.method
        asked = isinstance(method, Judge) and method.parts.distils and o.guard == "clients" and o.steps > 0
        return GUARD if asked and not (o.rounds and self.now.round >= o.rounds) else 0.0

    def _equipped(self, link: Link, site: str, reply: RecordDict) -> None:
        if self._believed(site, reply, "weights") is not None:
            link.needs.discard(site)

    def gather(self, link: Link, evaluate: bool) -> Gathered:
        """Uploads of the cohort; a round with too few good ones is tried again, and who answered answers again from
        what it remembers."""
        limits, cohort, found = self.settings.rounds, self.cohort(self.now.round), Gathered()
        needed = min(limits.min_sites, len(cohort))
        for attempt in range(limits.retries + 1):
            self._reach(link, needed, cohort)
            limit = self.clock.left(self._judged)
            train = request(self._about("train", evaluate, limit), self.now.broadcast)
            contents = {s: train for s in cohort if s not in found.uploads and self._ready(link, s)}
            if evaluate and attempt == 0:
                others = request(self._about("evaluate", True, limit), self.now.broadcast)
                contents |= {s: others for s in self.sites if s not in cohort and self._ready(link, s)}
            weights = self._weights(link, limit)  # a newcomer gets them beside the others' round and joins the next
            self.step("sending", self.now.round)
            for site, content in sorted(link.exchange({**contents, **weights}, limit).items()):
                if site in weights:
                    self._equipped(link, site, content)
                else:
                    self._take(link, site, content, "train" if site in cohort else "evaluate", found)
            if len(found.uploads) >= needed:
                return found
            self.diary.tell("", "short", f"{len(found.uploads)} of at least {needed} uploads, attempt {attempt + 1}")
        away = [s for s in cohort if s not in found.uploads]
        raise RunError(
            f"round {self.now.round}: {len(found.uploads)} good uploads, {needed} needed (rounds.min_sites); without "
            f"one: {', '.join(away)}; the round before is saved: run it again with resume=true"
        )

    def _ready(self, link: Link, site: str) -> bool:
        return site in link.nodes and site not in link.needs

    def _take(self, link: Link, site: str, content: RecordDict, kind: str, found: Gathered) -> None:
        """Believe a reply, or say why not."""
        try:
            numbers = self._numbers(site, content, kind)
            if read_reply(content).needs == "weights":  # it came back without its disk
                link.needs.add(site)
                raise Refused("it needs the weights again")
            if kind == "train":
                like = shared_part(self.method, self.model, self.now.broadcast)
                upload = checked_upload(content, like, self.settings.rounds.norm_bound)
                if self.config.train.weighting == "samples":
                    sample_count(numbers.get("samples"), self.settings.rounds.max_samples)
                found.uploads[site] = upload
                if read_reply(content).failed:
                    found.failed.add(site)
            found.numbers[site] = numbers
        except Exception as error:
            found.refused[site] = why = why_not(error)
            self.diary.tell(site, "refused", f"{kind}: {why}")

    def _numbers(self, site: str, content: RecordDict, kind: str) -> dict[str, Number]:
        """The numbers of a reply, if it is this site's to this message."""
        reply = read_reply(content)
        if reply.error:
            raise Refused(one_line(reply.error))
        if reply.site != site:
            raise Refused(f"the reply says it is {reply.site[:64]!r}")
        if not (a := reply.about).answers(self._about(kind)):
            raise Refused(f"late: of run {a.run[:64]!r}, round {a.round}, {a.kind[:16]!r}")
        return dict(read_numbers(content))

    def _believed(self, site: str, content: RecordDict, kind: str, losses: int = 0) -> dict[str, Number] | None:
        """The same, with so many `losses`; None, and a line in the diary, where it is not believed."""
        try:
            numbers = self._numbers(site, content, kind)
            return {"losses": guard_losses(numbers.get("losses"), losses)} if losses else numbers
        except Exception as error:
            self.diary.tell(site, "refused", f"{kind}: {why_not(error)}")
            return None

    def update(self, link: Link, found: Gathered) -> Moment:
        """The method's own server update on the uploads, in the sites' order."""
        now, sites = self.now, sorted(found.uploads)
        uploads = stack(*(found.uploads[s] for s in sites))
        weights = None
        if self.config.train.weighting == "samples":
            most = self.settings.rounds.max_samples
            weights = [sample_count(found.numbers[s]["samples"], most) for s in sites]
        server = Server(
            self.model,
            self.public,
            self.config.distill,
            self.federation.multilabel,
            now.round,
            self.config.run.seed,
            lambda candidates: self.scores(link, sites, candidates),
            len(self.sites),
            weights,
            self.config.run.lanes,
        )
        state, broadcast = self.method.server_update(server, now.server, uploads)
        loss = mean_loss(found.numbers[s].get("loss") for s in sites)
        last: dict[str, Any] = {"train_loss": loss, "distill": server.log}
        if found.failed:
            last["failed"] = sorted(found.failed)
        absent = [s for s in self.cohort(now.round) if s not in found.uploads]
        if absent:
            last["absent"] = absent
        if refused := {s: why for s, why in found.refused.items() if s not in found.uploads}:
            last["refused"] = refused
        counters = self._count(uploads, broadcast, server.log, len(sites))
        return Moment(now.round + 1, state, broadcast, counters, last)

    def _count(self, upload: State, broadcast: State, log: dict[str, Any] | None, sites: int) -> dict[str, int]:
        """Bytes of arrays that training took so far, as the simulator counts them."""
        now = self.now
        down = now.broadcast.bytes_per_lane()
        if log and "guard_chose" in log and self.config.distill.guard == "clients":
            down += len(log["guard_steps"]) * broadcast.bytes_per_lane()  # the candidates they judge
        return {
            **now.counters,
            "bytes_up": now.counters["bytes_up"] + upload.bytes_per_lane() * sites,
            "bytes_down": now.counters["bytes_down"] + down * sites,
            "distilled": now.counters["distilled"] + int(log is not None),
            "accepted": now.counters["accepted"] + int(bool(log and log.get("guard_chose"))),
        }

    def scores(self, link: Link, sites: Sequence[str], candidates: State) -> Tensor:
        """The guard: losses `[candidates, sites]` from those who uploaded; NaN where no good answer came in time."""
        if not isinstance(self.method, Judge):
            raise InputError(f"{self.config.method_name} has no client_score: use distill.guard=none")
        out = torch.full((candidates.lanes, len(sites)), torch.nan, dtype=torch.float64)
        limit = self.clock.left()
        content = request(self._about("score", within=limit), candidates)
        self.step("scoring", self.now.round)
        for site, reply in link.exchange(dict.fromkeys(sites, content), limit).items():
            if numbers := self._believed(site, reply, "score", candidates.lanes):
                out[:, sites.index(site)] = torch.tensor(numbers["losses"], dtype=torch.float64)
        return out

    # Scores

    def row(self, numbers: Mapping[str, Mapping[str, Number]]) -> dict[str, Any]:
        """A row of metrics.jsonl; what nobody measured is n/a."""
        now = self.now
        row: dict[str, Any] = {"round": now.round}
        for key in SCORES:
            said = {s: numbers.get(s, {}).get(key) for s in self.sites}
            row[key] = Scores(
                {s: v if isinstance(v, float) and 0 <= v <= 100 else None for s, v in said.items()}
            ).as_dict()
        row["global_model"] = None
        if self.test is not None and self.method.parts.global_model and self.model.holds(now.broadcast):
            index = self.test.test
            logits = logits_on(self.model, now.broadcast, self.test, index)[0]
            row["global_model"] = {"global_test": score(logits, self.test.labels(index))}
        seconds = self.seconds + time.monotonic() - self.began
        return {**row, **now.counters, "seconds": seconds, **now.last}

    def last_stage(self, link: Link, folder: RunFolder) -> None:
        """After the last round: the method's own last stage, where it has one, and everybody's scores."""
        replies = self._ended(link, "finish" if isinstance(self.method, Finisher) else "evaluate")
        each, now = self.now.broadcast.bytes_per_lane(), self.now.counters
        if isinstance(self.method, Finisher) and not self.now.finished:
            failed = {s for s, r in replies.items() if s in self._last_scores and read_reply(r).failed}
            failed |= set(self.now.last.get("failed", ()))
            last = {**self.now.last, "failed": sorted(failed)} if failed else self.now.last
            counters = {**now, "bytes_down": now["bytes_down"] + each * len(self.sites)}
            self.now = replace(self.now, counters=counters, last=last, finished=True)
            self.save(folder)
            self.step("finished", self.now.round)

    def _ended(self, link: Link, kind: str) -> dict[str, RecordDict]:
        """What the sites answer in the end. Scores may be missing; a last stage that too few did is tried again."""
        limits, replies = self.settings.rounds, dict[str, RecordDict]()
        needed = min(limits.min_sites, len(self.sites)) if kind == "finish" else 0
        self._last_scores = {}
        for attempt in range(limits.retries + 1):
            self._reach(link, len(self.sites) if attempt == 0 else needed, self.sites)
            limit = self.clock.left()
            content = request(self._about(kind, True, limit), self.now.broadcast)
            self.step("finishing", self.now.round)
            asked = [s for s in self.sites if s not in self._last_scores and self._ready(link, s)]
            for site, reply in sorted(link.exchange(dict.fromkeys(asked, content), limit).items()):
                if (numbers := self._believed(site, reply, kind)) is not None:
                    self._last_scores[site], replies[site] = numbers, reply
            if len(replies) >= needed:
                return replies
            self.diary.tell("", "short", f"{len(replies)} of at least {needed} sites, attempt {attempt + 1}")
        raise RunError(
            f"the last stage: {len(replies)} sites did it, {needed} needed (rounds.min_sites); the last round is "
            "saved: run it again with resume=true"
        )

    _last_scores: dict[str, dict[str, Number]]

    def close(self, folder: RunFolder, row: dict[str, Any]) -> None:
        """summary.json and report.html."""
        run = Run(folder, self.config)
        folder.write_json("summary.json", summary_of(run, self.federation, len(self.sites), self.device, row))
        write_report([run], folder.path / "report.html")
        self.diary.status("finished", self.now.round)
