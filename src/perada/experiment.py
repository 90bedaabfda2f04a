"""An experiment: a network, a federation and a method, and the rounds that train them.

This is the only code that trains. `round()` is Algorithm 1 of the paper for any method, with any cohort: clients on
this machine, or sites behind a network.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .adapters import Adapter, adapt, adapter_of
from .client.cohort import SPLITS, Cohort, LocalCohort, Uploads
from .client.scores import Scores, logits_on, score
from .client.trainer import Train, Trainer, sample_loss
from .data import Federation
from .errors import InputError
from .lanes import LaneModel, State, bytes_per_lane, get_ready, on_cpu, repeat, rng_of, stack
from .machine import arithmetic, device_of, free_memory, precision_of
from .methods import Finisher, Method
from .models import BACKBONES, Backbone
from .runs.folder import Checkpoint, RunFolder
from .runs.rows import Evaluation
from .server.distill import Distill, public_chunks
from .server.guard import Server

if TYPE_CHECKING:
    from .callbacks import Callback
    from .runs.run import Run

Say = Callable[[str], None]
DTYPES = dict.fromkeys(("auto", "fp32", "tf32", "bf16"), torch.float32) | {"fp64": torch.float64}  # of lanes


@dataclass(frozen=True)
class RunOptions:
    """How a run is carried out: the `[run]` section."""

    seed: int = 0
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp64"] = "auto"  # auto: bf16 on a GPU, else fp32
    eval_every: int = 1
    checkpoint_every: int = 1
    lanes: int = 0  # most lanes trained at once; 0 is all of a cohort's, or as many as there is memory for
    shifts: bool = False  # at the end, test on corrupted copies of the test images too
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)  # of those

    def __post_init__(self) -> None:
        if not self.severities or not set(self.severities) <= {1, 2, 3, 4, 5}:
            raise ValueError(f"severities must be numbers from 1 to 5, not {list(self.severities)}")
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2^63, not {self.seed}")
        for name, least in (("seed", 0), ("eval_every", 1), ("checkpoint_every", 1), ("lanes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True)
class Moment:
    """The whole state between two rounds. It is replaced in one assignment, so a round is all or nothing."""

    round: int
    server: State
    broadcast: State
    kept: State = field(default_factory=State)  # one lane per client, or empty
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("bytes_up", "bytes_down", "distilled", "accepted"), 0)
    )
    last: dict[str, Any] = field(default_factory=dict)  # the last round's loss, distillation, failures
    changed: frozenset[int] = frozenset()  # clients changed since the last checkpoint
    finished: bool = False  # whether the method's last stage is done, where it has one


@dataclass(frozen=True)
class Progress:
    """What happened in a training, for callbacks, progress bars and logs."""

    round: int
    rounds: int
    row: Evaluation | None  # where this round was evaluated
    failed: tuple[str, ...]  # clients whose training stopped being finite
    event: Literal["gathered", "trained", "finished", "round"] = "round"
    stage: str = "training"  # or pretraining


def sampled_clients(seed: int, round: int, clients: int, cohort: int) -> list[int]:
    """Returns the clients sampled in a round: a pure function of (seed, round)."""
    rng = rng_of(seed, round, "cohort")
    return sorted(int(m) for m in rng.choice(clients, cohort or clients, replace=False))


def lanes_of(
    net: nn.Module, method: Method, adapter: Adapter | None, head: str | None, options: RunOptions
) -> LaneModel:
    """Returns the lanes that a method trains, over a network."""
    parts, device = method.parts, device_of(options.device)
    kind = adapter if parts.adapters else None
    model = adapt(net, adapter=kind, trained=parts.trains, head=head, seed=options.seed)
    compute = torch.bfloat16 if precision_of(options.precision, device) == "bf16" else None
    return model.to(device, DTYPES[options.precision], compute)


def check_fit(federation: Federation, method: Method, train: Train, distill: Distill, local: bool = True) -> None:
    """Refuses settings that do not fit the data or the method. local: whether the clients are on this machine."""
    parts, clients = method.parts, len(federation.clients)
    if parts.own_step and train.momentum:
        name = type(method).__name__
        raise InputError(f"{name} has its own step, without momentum: set Train.momentum to 0")
    if not local:
        return
    if train.cohort > clients:
        raise InputError(f"Train.cohort={train.cohort} but there are {clients} clients: lower it")
    if not parts.distils or not distill.steps:
        return
    if distill.guard == "clients" and not any(len(c.val) for c in federation.clients):
        raise InputError(
            "Distill.guard=clients needs validation data at a client: raise DataOptions.val, or use guard=none"
        )
    if distill.guard == "server" and not len(federation.server_val):
        raise InputError(
            "Distill.guard=server needs labelled data at the server: set DataOptions.server_val, such as 0.05"
        )


class Experiment:
    """A method that trains a network on a federation.

    net: any torch module, with its weights; it is copied, never changed.
    adapter: what is inserted where the method trains adapters (`adapters.Residual(...)`).
    head: the name of the prediction layer; by default the last linear layer.
    public: the server's images for distillation, uint8 `[n, C, H, W]`; only methods that distil need them.
    cohort: who trains; by default all clients of the federation on this machine.
    run: the fields of `RunOptions`: seed, eval_every, device, precision, lanes, ...
    """

    def __init__(
        self,
        net: nn.Module,
        federation: Federation,
        method: Method,
        *,
        adapter: Adapter | str | None = "residual",
        head: str | None = None,
        public: Tensor | None = None,
        train: Train = Train(),
        distill: Distill = Distill(),
        cohort: Callable[[Experiment], Cohort] | None = None,
        to_train: bool = True,
        **run: Any,
    ) -> None:
        if isinstance(method, type) or not hasattr(method, "parts"):
            raise InputError(f"a method must be an object, such as perada.methods.Ditto(), not {method!r}")
        self.options = run.pop("options", None) or RunOptions(**run)
        self.device, self.dtype = device_of(self.options.device), DTYPES[self.options.precision]
        arithmetic(self.options.precision, self.device)
        if to_train:
            get_ready(self.device)
        self.net, self.federation, self.method = net, federation.to(self.device), method
        self.adapter, self.head, self.train, self.distill = adapter_of(adapter), head, train, distill
        if to_train:
            Backbone(net, head or "").check((3, *federation.images.shape[-2:]), len(federation.classes))
        self.model = lanes_of(net, method, self.adapter, head, self.options)
        self.cohort: Cohort = (
            cohort(self) if cohort else LocalCohort(self.model, self.federation, method, train, self.options.seed)
        )
        self.public: Sequence[Any] = []
        if to_train:
            check_fit(self.federation, method, train, distill, local=cohort is None)
            self.public = self._chunks(public)
        server, broadcast, client = method.init(self.model)
        self.now = Moment(0, server, broadcast, repeat(client, len(self.federation.clients)))
        self.seconds = 0.0
        self.test_data = self.federation if self.federation.clients else None  # what the global model is tested on
        self.mark: Callable[[str, int], None] = lambda what, round: None  # told of every boundary inside a round
        self.config: Any = None  # the configuration that this was built from, if any

    @property
    def distils(self) -> bool:
        """Whether public images are needed."""
        return self.method.parts.distils and self.distill.steps > 0

    def _chunks(self, images: Tensor | None) -> Sequence[Any]:
        """Returns the public images, prepared in chunks of equal size."""
        if not self.distils:
            return []
        if images is None:
            raise InputError(
                "distillation needs public images: set Distill.data (or the argument `public`), or Distill.steps=0"
            )
        chunks = public_chunks(images, self.federation, self.distill, self.dtype)
        if self.device.type == "cuda":
            chunks.keep_stems(self.model, torch.cuda.mem_get_info(self.device)[0] // 4)
        return chunks

    # A round

    @property
    def clients(self) -> tuple[str, ...]:
        return self.cohort.names

    def sampled(self, round: int) -> list[int]:
        """Returns the clients that train in a round."""
        return sampled_clients(self.options.seed, round, len(self.clients), self.train.cohort)

    def round(self) -> None:
        """Trains one round: uploads, the server's update, the guard's choice."""
        self.update(self.gather())

    def gather(self) -> Uploads:
        """Returns the uploads of the next round's clients."""
        start, now = time.perf_counter(), self.now
        if now.finished:
            raise ValueError("the method's last stage is done: reopen() before another round")
        uploads = self.cohort.train(now, self.sampled(now.round))
        self.seconds += time.perf_counter() - start
        return uploads

    def update(self, uploads: Uploads) -> None:
        """The server's half of a round: the method proposes, the guard scores and chooses."""
        start, now = time.perf_counter(), self.now
        server = self._server(uploads)
        state, broadcast = self.method.server_update(server, now.server, uploads.states)
        log: dict[str, Any] | None = None
        if (proposed := server.candidates) is not None:
            best, log = proposed.choose(self.judge(proposed.states))
            state, broadcast = proposed.pick(state, best), proposed.pick(broadcast, best)
        report = uploads.report()
        self.now = Moment(
            round=now.round + 1,
            server=state,
            broadcast=broadcast,
            kept=now.kept if uploads.kept is None else uploads.kept,
            counters=self._count(uploads, broadcast, log),
            last={"train_loss": report.loss, "distill": log, **report.as_note()},
            changed=now.changed | set(self.sampled(now.round)),
        )
        self.seconds += time.perf_counter() - start

    def _server(self, uploads: Uploads) -> Server:
        return Server(
            self.model,
            self.public,
            self.distill,
            self.federation.multilabel,
            self.now.round,
            self.options.seed,
            len(self.clients),
            uploads.weights,
            self.lanes,
        )

    def judge(self, candidates: State) -> Tensor | None:
        """Returns the guard's losses `[candidates, judges]`; None without a guard."""
        if self.distill.guard == "none":
            return None
        if self.distill.guard == "clients":
            return self.cohort.score(self.now, candidates)
        index = self.federation.server_val
        logits, targets = logits_on(self.model, candidates, self.federation, index), self.federation.labels(index)
        losses = sample_loss(logits, targets.expand(candidates.lanes, *targets.shape))
        return losses.mean(1, keepdim=True).double().cpu()

    def _count(self, uploads: Uploads, broadcast: State, log: dict[str, Any] | None) -> dict[str, int]:
        """Returns the bytes sent so far, and how often distillation ran and a guard accepted it."""
        was, down = self.now.counters, self.now.broadcast.bytes_per_lane()
        if log and "guard_chose" in log and self.distill.guard == "clients":
            down += len(log["guard_steps"]) * broadcast.bytes_per_lane()  # the candidates that clients judge
        return {
            "bytes_up": was["bytes_up"] + uploads.states.bytes_per_lane() * uploads.clients,
            "bytes_down": was["bytes_down"] + down * uploads.clients,
            "distilled": was["distilled"] + int(log is not None),
            "accepted": was["accepted"] + int(bool(log and log.get("guard_chose"))),
        }

    # The last stage

    @property
    def has_last_stage(self) -> bool:
        return isinstance(self.method, Finisher)

    def finish(self) -> bool:
        """Runs the method's last stage at every client, if it has one that is not done; returns whether it ran."""
        start, now = time.perf_counter(), self.now
        if not self.has_last_stage or now.finished:
            return False
        kept, report = self.cohort.finish(now)
        failed = {*report.failed, *now.last.get("failed", ())}
        self.now = replace(
            now,
            kept=kept,
            counters=self._last_download(1),
            last={**now.last, "failed": sorted(failed)} if failed else now.last,
            changed=frozenset(range(len(self.clients))),
            finished=True,
        )
        self.seconds += time.perf_counter() - start
        return True

    def reopen(self) -> None:
        """Undoes the last stage, so that more rounds than were planned can follow."""
        self.now = replace(self.now, kept=State(), counters=self._last_download(-1), finished=False)

    def _last_download(self, sign: int) -> dict[str, int]:
        """For the last stage every client gets the global model."""
        each, was = self.now.broadcast.bytes_per_lane(), self.now.counters
        return {**was, "bytes_down": was["bytes_down"] + sign * each * len(self.clients)}

    # Evaluation

    def personal(self) -> State:
        """Returns what the clients predict with now: one lane each, or one that all share."""
        return self.method.personal(self.now.broadcast, self.now.kept)

    @property
    def global_model(self) -> State | None:
        """The one global model, where the method has one."""
        if not (self.method.parts.global_model and self.model.holds(self.now.broadcast)):
            return None
        return self.model.part_of(self.now.broadcast)

    def evaluate(self, splits: Sequence[str] = SPLITS, last: bool = True) -> Evaluation | None:
        """Returns the clients' scores now; None if a network's clients send them with the next uploads."""
        start = time.perf_counter()
        scores = self.cohort.evaluate(self.now, splits, last)
        self.seconds += time.perf_counter() - start
        return None if scores is None else self.row(scores, splits)

    def row(self, scores: Mapping[str, Scores], splits: Sequence[str] = SPLITS) -> Evaluation:
        """Returns the evaluation of this moment from the clients' scores, the global model's beside them."""
        now, start, value = self.now, time.perf_counter(), None
        test = self.test_data
        measured = self.global_model if "global" in splits and test is not None else None
        if measured is not None and test is not None:
            logits = logits_on(self.model, measured, test, test.test)[0]
            value = score(logits, test.labels(test.test))
        last = {**now.last, "failed": tuple(now.last.get("failed", ())), "absent": tuple(now.last.get("absent", ()))}
        self.seconds += time.perf_counter() - start
        has = measured is not None
        more: dict[str, Any] = {**now.counters, **last, "seconds": self.seconds}
        return Evaluation(now.round, scores, value, has, **more)

    # The whole training

    @property
    def lanes(self) -> int:
        """How many lanes are trained at once; 0 is all."""
        return self.cohort.lanes if isinstance(self.cohort, LocalCohort) else self.options.lanes

    def stop(self) -> None:
        """Makes the next round the last one."""
        self.train = replace(self.train, rounds=min(self.train.rounds, self.now.round + 1))

    def progress(self, known: Container[int] = (), splits: Sequence[str] = SPLITS) -> Iterator[Progress]:
        """Trains to the last round, and says what happened on the way; rounds in `known` are evaluated already."""
        every = self.options.eval_every
        while True:
            at = self.now.round
            over, row, late = at >= self.train.rounds, None, False
            if over and self.finish():
                yield self._progress("finished")
            if (over or (at and at % every == 0)) and at not in known:
                row = self.evaluate(splits, last=over)
                late = row is None
            yield self._progress("round", row)
            if over:
                return
            uploads = self.gather()
            row = self.row(uploads.scores, splits) if late and uploads.scores is not None else None
            yield self._progress("gathered", row)
            self.update(uploads)
            yield self._progress("trained")

    def _progress(self, event: Any, row: Evaluation | None = None) -> Progress:
        return Progress(self.now.round, self.train.rounds, row, tuple(self.now.last.get("failed", ())), event)

    def rounds(self) -> Iterator[Evaluation]:
        """Trains to the last round; yields every evaluation. `for row in experiment.rounds(): ...`"""
        for step in self.progress():
            if step.row is not None:
                yield step.row

    def run(
        self,
        folder: str | Path,
        callbacks: Sequence[Callback] = (),
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> Run:
        """Trains in a run folder, which can be resumed and loaded again; returns the run."""
        from .runs.train import run_in  # a run opens experiments: the one arrow that points back

        return run_in(self, Path(folder), callbacks, resume, overwrite)

    # Saving

    def frozen_to_save(self) -> dict[str, Tensor]:
        """Returns the network's weights, where the configuration alone cannot make them again."""
        options = None if self.config is None else self.config.model
        if options is not None and options.weights in ("embedded", "random") and options.backbone in BACKBONES:
            return {}
        return {k: t for k, t in self.net.state_dict().items() if not k.endswith("num_batches_tracked")}

    def save(self, folder: RunFolder) -> None:
        """Writes this moment to the folder."""
        self.snapshot(folder)()

    def snapshot(self, folder: RunFolder) -> Callable[[], None]:
        """Returns what writes this moment to the folder, whenever it is called: from a GPU all is copied now."""
        now, every = self.now, range(self.now.kept.lanes)
        clients = [now.kept.map(lambda t, m=m: t[m : m + 1]) for m in every]  # type: ignore[misc]
        server, broadcast = now.server, now.broadcast
        if self.device.type != "cpu":
            server, broadcast = on_cpu(server), on_cpu(broadcast)
            written = now.changed if folder.has_checkpoint() else every  # the others are links to older files
            clients = [on_cpu(c) if m in written else c for m, c in enumerate(clients)]
        note = {"counters": now.counters, "last": now.last, "seconds": self.seconds, "finished": now.finished}
        checkpoint = Checkpoint(now.round, server, broadcast, clients, note)
        self.now = replace(now, changed=frozenset())
        return lambda: folder.save(checkpoint, now.changed)

    def restore(self, saved: Checkpoint) -> None:
        """Goes back to a checkpoint."""
        kept = stack(*map(self.here, saved.clients)) if saved.clients else State()
        note = saved.note
        server, broadcast = self.here(saved.server), self.here(saved.broadcast)
        self.now = Moment(
            saved.round, server, broadcast, kept, dict(note["counters"]), dict(note["last"]), finished=note["finished"]
        )
        self.seconds = float(note["seconds"])

    def here(self, state: State) -> State:
        """Returns a state on this experiment's device, in its precision."""
        return state.map(lambda t: t.to(self.device, self.dtype))

    def trainer(self, clients: Sequence[int]) -> Trainer:
        """Returns what the method sees of these clients in the next round."""
        assert isinstance(self.cohort, LocalCohort)
        return self.cohort.trainer_of(clients, self.now.round)

    def fit_lanes(self) -> str:
        """Chooses how many lanes train at once by the memory there is; returns a line that says so."""
        asked, device, batch = self.options.lanes, self.device, self.train.batch
        height, width = self.federation.images.shape[-2:]
        each = bytes_per_lane(self.model, (int(height), int(width)), batch)
        lanes, free = self.method.parts.copies * (self.train.cohort or len(self.clients)), free_memory(device)
        fit = self.model.room = int(0.9 * free / each)
        if fit < 1:
            raise InputError(
                f"one lane takes about {each / 2**30:.1f} GiB and {device.type} has {free / 2**30:.1f} free: lower "
                "Train.batch, or take a machine with more memory"
            )
        chosen = min(asked or lanes, lanes)
        if not asked and fit < lanes:
            chosen = fit
        if isinstance(self.cohort, LocalCohort):
            self.cohort.lanes = chosen if chosen < lanes else 0
        named = "1 lane" if chosen == 1 else f"{chosen} lanes"
        named += f" at once in {precision_of(self.options.precision, device)}"
        what = f"{named}, about {chosen * each / 2**30:.1f} GiB of {free / 2**30:.1f} free"
        return what + (f"; {lanes} lanes take turns" if chosen < lanes else "")
