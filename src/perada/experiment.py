"""An experiment: a network, a federation and a method, and the rounds that train them.

Only this code trains. `round()` is Algorithm 1 of the paper for any method, with any cohort: clients on
this machine, or sites behind a network.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .adapters import Adapter, adapt, adapter_of
from .client.cohort import SPLITS, Cohort, LocalCohort, Report, Uploads
from .client.scores import Scores, logits_on, score
from .client.trainer import Train, Trainer, sample_losses
from .data import Federation
from .data.public import Chunks
from .errors import Diverged, InputError
from .fields import made
from .lanes import LaneModel, Prefix, State, ops_for, repeat, rng_of
from .lanes.machine import arithmetic, device_of, free_memory, precision_of
from .methods import Finisher, Method, copy_epochs, expected_upload
from .models import BACKBONES, Backbone
from .predict.drift import Drift
from .privacy import UNSAFE, Privacy
from .privacy.accountant import check_installed
from .privacy.apart import check_apart
from .privacy.spending import Spending
from .runs.folder import RunFolder
from .runs.moment import Checkpoint, Evaluation, Moment, Progress
from .runs.options import RunOptions, check_fit, check_kinds
from .server.aggregate import Rule
from .server.distill import Distill, public_chunks
from .server.guard import Server
from .server.private import ClientPrivacy

if TYPE_CHECKING:
    from .callbacks import Callback
    from .runs.run import Run

Say = Callable[[str], None]
PATIENCE = 3  # rounds in a row without an upload after which a training ends
IDLE, NORMS = "idle", "norms"  # in the memory of a Moment: the number of such rounds, and `aggregate.Norms`
DTYPES = dict.fromkeys(("auto", "fp32", "tf32", "bf16"), torch.float32) | {"fp64": torch.float64}  # of the lanes


def lanes_of(
    net: nn.Module, method: Method, adapter: Adapter | None, head: str | None, options: RunOptions, start: str = ""
) -> LaneModel:
    """Returns the lanes that a method trains, over a network."""
    parts, device = method.parts, device_of(options.device)
    kind = adapter if parts.adapters else None
    model = adapt(net, adapter=kind, trained=parts.trains, head=head, seed=options.seed, start=start)
    compute = torch.bfloat16 if precision_of(options.precision, device) == "bf16" else None
    return model.to(device, DTYPES[options.precision], compute)


class Experiment:
    """A method that trains a network on a federation.

    net: any torch module, with its weights; it is copied, never changed.
    adapter: what is inserted where the method trains adapters (`adapters.Residual(...)`).
    head: the name of the prediction layer; by default the last linear layer.
    adapt_from: the first stage of the network that is adapted. Those before it stay frozen, whatever the method, and
        what they make of an image is computed once. Empty adapts all.
    public: the server's images for distillation, uint8 `[n, C, H, W]`; only methods that distil need them.
    drift: how the clients' predictions notice drift; training does not depend on it.
    privacy: differential privacy, of every sample or of every client; off by default.
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
        adapt_from: str = "",
        public: Tensor | None = None,
        train: Train = Train(),
        distill: Distill = Distill(),
        drift: Drift = Drift(),
        privacy: Privacy = Privacy(),
        cohort: Callable[[Experiment], Cohort] | None = None,
        to_train: bool = True,
        **run: Any,
    ) -> None:
        if to_train and privacy.on and privacy.deterministic:
            warnings.warn(UNSAFE, stacklevel=2)
        check_kinds(federation, method, train, distill, drift, privacy)
        self.options: RunOptions = run.pop("options", None) or made(RunOptions, run)
        self.device, self.dtype = device_of(self.options.device), DTYPES[self.options.precision]
        arithmetic(self.options.precision, self.device)
        if to_train:
            ops_for(self.device).get_ready(self.device)
        self.net, self.federation, self.method = net, federation.to(self.device), method
        self.adapter, self.head, self.train, self.distill = adapter_of(adapter), head, train, distill
        self.adapt_from, self.drift, self.privacy = adapt_from, drift, privacy
        if to_train:
            height, width = map(int, federation.images.shape[-2:])
            image = 3, height, width
            Backbone(net, head or "").check(image, len(federation.classes))
            if adapt_from:
                Prefix.check(net, adapt_from, image)
        self.model = lanes_of(net, method, self.adapter, head, self.options, adapt_from)
        if to_train and (privacy.of_clients or (privacy.on and cohort is None)):
            check_installed()
        if to_train and privacy.target:
            if cohort is not None:
                raise InputError("Privacy.target works in simulations only: set Privacy.noise")
            privacy = self.privacy = self._spending(self.federation.sizes).solved(train.rounds)
        self.cohort: Cohort = (
            cohort(self)
            if cohort
            else LocalCohort(self.model, self.federation, method, train, self.options.seed, privacy)
        )
        self.public: Sequence[Any] = []
        if to_train:
            check_fit(self.federation, method, train, distill, cohort is None, drift, privacy)
            if privacy.of_samples and cohort is None:
                check_apart(self.model, (height, width))
            self.keep_features()
            self.public = self._chunks(public)
        server, broadcast, client = method.init(self.model)
        self.now = Moment(0, server, broadcast, repeat(client, len(self.federation.clients)))
        self.seconds = 0.0
        self.client_privacy = ClientPrivacy(privacy, train.cohort, self.options.seed)
        self._gathered: tuple[State, Uploads] | None = None  # what clients trained from and sent, until it is paid
        self._stop_at: int | None = None  # where `stop` ends the training before its planned last round
        self.test_data = self.federation if self.federation.clients else None  # what the global model is tested on
        self.mark: Callable[[str, int], None] = lambda what, round: None  # is told of every boundary inside a round
        self.config: Any = None  # the configuration that this was built from, if any
        self.about_lanes = (
            self.cohort.fit_lanes(self.options) if to_train and isinstance(self.cohort, LocalCohort) else ""
        )

    @property
    def distils(self) -> bool:
        """Whether public images are needed."""
        return self.method.parts.distils and self.distill.steps > 0

    @property
    def public_digest(self) -> str:
        """The sha256 of the public images; empty without any."""
        if not isinstance(self.public, Chunks):
            return ""
        return hashlib.sha256(self.public.images.cpu().contiguous().numpy().data).hexdigest()

    def _chunks(self, images: Tensor | None) -> Sequence[Any]:
        """Returns the public images, prepared in chunks of equal size."""
        if not self.distils:
            return []
        if images is None:
            raise InputError(
                "distillation needs public images: set Distill.data (or the argument `public`), or Distill.steps=0"
            )
        chunks = public_chunks(images, self.federation, self.distill, self.dtype)
        if self.device.type == "cuda" or self.model.prefix is not None:
            chunks.keep(self.model, free_memory(self.device) // 4)
        return chunks

    def keep_features(self) -> None:
        """Computes once what the network's frozen stages make of the clients' images, if it has such stages."""
        self.federation = self.federation.keeping(self.model)
        if isinstance(self.cohort, LocalCohort):
            self.cohort.federation = self.federation

    # Privacy

    def _spending(self, sizes: Mapping[str, int]) -> Spending:
        epochs = copy_epochs(self.method, self.train.epochs)
        return Spending(self.privacy, sizes, self.train.batch, epochs, self.train.cohort)

    @cached_property
    def spending(self) -> Spending:
        """What the rounds cost the clients. Over a network only the sites know that, at level `sample`."""
        return self._spending(dict.fromkeys(self.clients, 1) if self.privacy.of_clients else self.federation.sizes)

    @property
    def epsilons(self) -> dict[str, float]:
        """The ε so far per client; empty without differential privacy."""
        return self.spending.epsilons(self.now.memory)

    @property
    def exhausted(self) -> tuple[str, ...]:
        """The clients whose privacy budget does not allow another round."""
        return self.spending.exhausted(self.now.memory)

    # A round

    @property
    def clients(self) -> tuple[str, ...]:
        return self.cohort.names

    def sampled(self, round: int) -> list[int]:
        """Returns the clients that train in a round: a pure function of (seed, round).

        With differential privacy of clients each is drawn independently of the others, from a secret.
        """
        clients = len(self.clients)
        if self.privacy.of_clients:
            return self.client_privacy.sampled(clients, round)
        drawn = rng_of(self.options.seed, round, "cohort").choice(clients, self.train.cohort or clients, replace=False)
        return sorted(int(m) for m in drawn)

    def taking_part(self) -> list[int]:
        """Returns the clients that train in the next round: those sampled whose privacy budget allows it."""
        spent = self.exhausted
        return [m for m in self.sampled(self.now.round) if self.clients[m] not in spent]

    def round(self) -> None:
        """Trains one round: uploads, the server's update, the guard's choice."""
        self.update(self.gather())

    def gather(self) -> Uploads:
        """Returns the uploads of the next round's clients.

        With differential privacy they train once: until `update`, another call returns the same uploads.
        """
        if self.now.finished:
            raise ValueError("the method's last stage is done: reopen() before another round")
        if self.spending.over(self.now.memory):
            raise InputError("every client's Privacy.budget is spent: nothing more is trained")
        clients = self.taking_part()
        if not clients:
            return Uploads(State(), (), Report())
        if self._gathered is not None and self._gathered[0] is self.now.broadcast:
            return self._gathered[1]
        with self._timed():
            uploads = self.cohort.train(self.now, clients)
        self._gathered = (self.now.broadcast, uploads) if self.privacy.on else None
        return uploads

    def update(self, uploads: Uploads) -> None:
        """Ends the round at the server: the method proposes, the guard scores and chooses."""
        with self._timed():
            now, trained = self.now, self.taking_part()
            uploads, memory, left_out = self._admit(uploads, bool(trained) and not uploads.spent)
            if left_out:
                self.cohort.left_out(left_out)
            report = uploads.report
            idle = not uploads.states.lanes
            state, broadcast, log = (now.server, now.broadcast, None) if idle else self._at_server(uploads)
            self.now = Moment(
                round=now.round + 1,
                server=state,
                broadcast=broadcast,
                kept=now.kept if uploads.kept is None else uploads.kept,
                counters=uploads.counters(now.counters, now.broadcast, broadcast, log, self.distill.guard == "clients"),
                last={"train_loss": report.loss, "distill": log, **report.as_note()},
                memory=memory | self.spending.charged(now.memory, [self.clients[m] for m in trained]),
                changed=now.changed | set(trained),
            )
            self._gathered = None

    def _at_server(self, uploads: Uploads) -> tuple[State, State, dict[str, Any] | None]:
        """Returns the server's new state, the next broadcast, and what the distillation did."""
        server = Server(
            self.model,
            self.public,
            self.distill,
            self.federation.multilabel,
            self.now.round,
            self.options.seed,
            len(self.clients),
            uploads.weights,
            self.lanes,
            self.rule,
        )
        state, broadcast = self.method.server_update(server, self.now.server, uploads.states)
        if (proposed := server.candidates) is None:
            return state, broadcast, None
        best, log = proposed.choose(self.judge(proposed.states))
        return proposed.pick(state, best), proposed.pick(broadcast, best), log

    @property
    def rule(self) -> Rule:
        """How uploads become one."""
        return Rule(self.train.aggregate, self.train.trim)

    def _admit(self, uploads: Uploads, asked: bool) -> tuple[Uploads, dict[str, Any], Mapping[str, str]]:
        """Returns the uploads as they take part in the round, what the server keeps, and who is left out and why.

        Raises Diverged if nobody uploaded anything in several rounds in a row. asked: whether anybody trained.
        """
        memory = self.now.memory
        reference = expected_upload(self.method, self.model, self.now.broadcast)
        if self.privacy.of_clients:
            clients, round = len(self.clients), self.now.round
            mean = self.client_privacy.mean(uploads.states, reference, clients, round, self.model.inert)
            return replace(uploads, states=mean, weights=None), {}, {}
        if uploads.clients:
            uploads, norms, left_out = uploads.admitted(self.rule, reference, memory.get(NORMS, {}))
            return uploads, {NORMS: norms} if norms else {}, left_out
        if not asked:
            return uploads, dict(memory), {}
        idle = memory.get(IDLE, 0) + 1
        if idle >= PATIENCE:
            raise Diverged(
                f"no client's training stayed finite in {idle} rounds in a row",
                "lower Train.lr, or bound the gradients with Train.clip",
            )
        return uploads, memory | {IDLE: idle}, {}

    def judge(self, candidates: State) -> Tensor | None:
        """Returns the guard's losses `[candidates, judges]`; None without a guard."""
        if self.distill.guard == "none":
            return None
        if self.distill.guard == "clients":
            return self.cohort.score(self.now, candidates)
        losses = sample_losses(self.model, candidates, self.federation, self.federation.server_val)
        return losses.mean(1, keepdim=True).double().cpu()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts the seconds that this takes as training time."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    # The last stage

    @property
    def has_last_stage(self) -> bool:
        return isinstance(self.method, Finisher)

    def finish(self) -> bool:
        """Runs the method's last stage at every client, if it has one that is not done; returns whether it ran."""
        if not self.has_last_stage or self.now.finished:
            return False
        with self._timed():
            now = self.now
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
        return True

    def reopen(self) -> None:
        """Undoes the last stage, so that more rounds than were planned can follow."""
        self.now = replace(self.now, kept=State(), counters=self._last_download(-1), finished=False)

    def _last_download(self, sign: int) -> dict[str, int]:
        """Returns the counters with or without what the last stage sends: the global model, to every client."""
        size, before = self.now.broadcast.bytes_per_lane(), self.now.counters
        return {**before, "bytes_down": before["bytes_down"] + sign * size * len(self.clients)}

    # Evaluation

    def personal(self) -> State:
        """Returns what the clients predict with now: one lane per client, or one that all share."""
        return self.method.personal(self.now.broadcast, self.now.kept)

    @property
    def global_model(self) -> State | None:
        """The one global model, if the method has one."""
        if not (self.method.parts.global_model and self.model.holds(self.now.broadcast)):
            return None
        return self.model.part_of(self.now.broadcast)

    def both_models(self) -> tuple[State, State]:
        """Returns what the clients predict with and the global model; refuses a method that lacks one of them."""
        name, lanes, whole = type(self.method).__name__, self.personal(), self.global_model
        need = "predictions that notice drift need a personal and a global model"
        if whole is None:
            raise InputError(f"{name} has no global model, and {need}")
        if all(t is whole.params.get(n) for n, t in lanes.params.items()):
            raise InputError(f"{name} has no personal models, and {need}")
        return self.model.part_of(lanes), whole

    def evaluate(self, splits: Sequence[str] = SPLITS, last: bool = True) -> Evaluation | None:
        """Returns the clients' scores now; None if a network's clients send them with the next uploads."""
        with self._timed():
            scores = self.cohort.evaluate(self.now, splits, last)
        return None if scores is None else self.row(scores, splits)

    def row(self, scores: Mapping[str, Scores], splits: Sequence[str] = SPLITS) -> Evaluation:
        """Returns the evaluation of this moment: the clients' scores, and the global model's."""
        now, test, value = self.now, self.test_data, None
        measured = self.global_model if "global" in splits and test is not None else None
        with self._timed():
            if measured is not None and test is not None:
                value = score(logits_on(self.model, measured, test, test.test)[0], test.labels(test.test))
        last = {**now.last, "failed": tuple(now.last.get("failed", ())), "absent": tuple(now.last.get("absent", ()))}
        more: dict[str, Any] = {**now.counters, **last, "seconds": self.seconds}
        if epsilons := list(self.epsilons.values()):
            more["epsilon"] = {"mean": sum(epsilons) / len(epsilons), "max": max(epsilons)}
            more["exhausted"] = self.exhausted
        return Evaluation(now.round, scores, value, measured is not None, **more)

    # The whole training

    @property
    def lanes(self) -> int:
        """How many lanes are trained at once; 0 is all."""
        return self.cohort.lanes if isinstance(self.cohort, LocalCohort) else self.options.lanes

    def stop(self) -> None:
        """Makes the next round the last one of this training; another `run` or `rounds` goes on to the planned end."""
        self._stop_at = self.now.round + 1

    @property
    def last_round(self) -> int:
        """The number of rounds after which the training ends."""
        planned = self.train.rounds
        if self.spending.over(self.now.memory):
            planned = min(planned, self.now.round)
        return planned if self._stop_at is None else min(planned, self._stop_at)

    def progress(self, known: Container[int] = (), splits: Sequence[str] = SPLITS) -> Iterator[Progress]:
        """Trains to the last round, and yields what happens on the way; rounds in `known` are evaluated already."""
        every = self.options.eval_every
        if self.now.finished and self.now.round < self.last_round:
            self.reopen()
        while True:
            number = self.now.round
            last, row, late = number >= self.last_round, None, False
            if last and self.finish():
                yield self._progress("finished")
            if (last or (number and number % every == 0)) and number not in known:
                row = self.evaluate(splits, last)
                late = row is None
            yield self._progress("round", row)
            if last:
                self._stop_at = None
                return
            uploads = self.gather()
            row = self.row(uploads.scores, splits) if late and uploads.scores is not None else None
            yield self._progress("gathered", row)
            self.update(uploads)
            yield self._progress("trained")

    def _progress(self, event: Any, row: Evaluation | None = None) -> Progress:
        failed = tuple(self.now.last.get("failed", ()))
        return Progress(self.now.round, self.last_round, row, failed, event, exhausted=self.exhausted)

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
        """Returns a function that writes this moment to the folder later; what is on a GPU is copied now."""
        now = self.now
        copy, rows = self.device.type != "cpu", folder.rows.mark()
        checkpoint = now.checkpoint(self.seconds, self.clients, copy, folder.has_checkpoint())
        changed = {self.clients[m] for m in now.changed}
        self.now = replace(now, changed=frozenset())
        return lambda: folder.save(checkpoint, changed, rows)

    def restore(self, saved: Checkpoint) -> None:
        """Goes back to a checkpoint."""
        self.now, self.seconds = Moment.of(saved, self.clients, self.here), float(saved.note["seconds"])

    def here(self, state: State) -> State:
        """Returns a state on this experiment's device, in its precision; whole numbers stay whole."""
        return state.map(lambda t: t.to(self.device, self.dtype if t.is_floating_point() else t.dtype))

    def trainer(self, clients: Sequence[int]) -> Trainer:
        """Returns what the method sees of these clients in the next round."""
        assert isinstance(self.cohort, LocalCohort)
        return self.cohort.trainer_of(clients, self.now.round)
