"""The round loop on one machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .client.scores import logits_on, personal_scores, score
from .client.trainer import Trainer, sample_loss
from .config import Config
from .data import VALIDATION, Federation, build_federation, public_images
from .data.public import Chunks
from .errors import InputError
from .lanes import (
    LaneModel,
    State,
    bytes_per_lane,
    fast_kernels,
    gather,
    get_ready,
    key_of,
    on_cpu,
    repeat,
    rng_of,
    scatter,
    stack,
)
from .machine import free_memory
from .methods import Finisher, Judge, Method, check_upload
from .models import build_backbone, lane_model, load_into
from .notes import about_data, about_settings
from .runs.folder import Checkpoint, RunFolder, device_of
from .server.distill import Server, chunks_of

Say = Callable[[str], None]
DTYPES = dict.fromkeys(("auto", "fp32", "tf32", "bf16"), torch.float32) | {"fp64": torch.float64}  # of lanes


@dataclass(frozen=True)
class Moment:
    """The whole state between two rounds. It is replaced in one assignment, so a round is all or nothing."""

    round: int
    server: State
    broadcast: State
    kept: State  # a lane a client, or empty
    counters: dict[str, int]
    last: dict[str, Any]  # what the round reported: training loss, distillation, failures
    changed: frozenset[int] = frozenset()  # clients changed since the last checkpoint
    finished: bool = False  # whether the method's last stage is done, where it has one


def cohort_of(config: Config, clients: int, round: int) -> list[int]:
    """The clients sampled in a round: a pure function of (seed, round)."""
    rng = rng_of(config.run.seed, round, "cohort")
    return sorted(int(m) for m in rng.choice(clients, config.train.cohort or clients, replace=False))


class Simulation:
    """All clients of a federation on this machine. `step()` is one round of Algorithm 1."""

    def __init__(
        self, config: Config, federation: Federation, model: LaneModel, method: Method, public: Sequence[Tensor]
    ) -> None:
        self.config, self.federation, self.model, self.method = config, federation, model, method
        self.public = public
        server, broadcast, client = method.init(model)
        counters = {"bytes_up": 0, "bytes_down": 0, "distilled": 0, "accepted": 0}
        self.now = Moment(0, server, broadcast, repeat(client, len(federation.clients)), counters, {})
        self.seconds = 0.0
        self.lanes = config.run.lanes  # at once; 0 is all
        self.backbone: dict[str, Tensor] | None = None  # weights the config alone cannot make again

    def cohort(self, round: int) -> list[int]:
        return cohort_of(self.config, len(self.federation.clients), round)

    def step(self) -> None:
        """Train the cohort, update the server."""
        start, now = time.perf_counter(), self.now
        if now.finished:
            raise ValueError("the method's last stage is done: reopen() before another round")
        clients = self.cohort(now.round)
        trainer = self.trainer(clients)
        upload, kept = self.method.client_update(trainer, now.broadcast, gather(now.kept, clients))
        check_upload(self.method, self.model, upload)
        server = self._server(trainer)
        state, broadcast = self.method.server_update(server, now.server, upload)
        last: dict[str, Any] = {"train_loss": float(np.mean(trainer.losses)), "distill": server.log}
        if trainer.failed:
            last["failed"] = sorted(trainer.failed)
        self.now = Moment(
            round=now.round + 1,
            server=state,
            broadcast=broadcast,
            kept=scatter(now.kept, clients, kept) if kept.lanes else now.kept,
            counters=self._count(upload, broadcast, server.log, len(clients)),
            last=last,
            changed=now.changed | set(clients),
        )
        self.seconds += time.perf_counter() - start

    def finish(self) -> None:
        """The method's last stage, at every client, where it has one."""
        start, now, everybody = time.perf_counter(), self.now, range(len(self.federation.clients))
        if isinstance(self.method, Finisher) and not now.finished:
            trainer = self.trainer(everybody)
            kept = self.method.finish(trainer, now.broadcast, now.kept)
            failed = trainer.failed | set(now.last.get("failed", ()))
            last = {**now.last, "failed": sorted(failed)} if failed else now.last
            self.now = replace(
                now, kept=kept, counters=self._last_download(1), last=last, changed=frozenset(everybody), finished=True
            )
        self.seconds += time.perf_counter() - start

    def reopen(self) -> None:
        """More rounds than were planned: as if the last stage had not been done."""
        self.now = replace(self.now, kept=State(), counters=self._last_download(-1), finished=False)

    def _last_download(self, sign: int) -> dict[str, int]:
        """For the last stage every client gets the global model."""
        each, now = self.now.broadcast.bytes_per_lane(), self.now.counters
        return {**now, "bytes_down": now["bytes_down"] + sign * each * len(self.federation.clients)}

    def _count(self, upload: State, broadcast: State, log: dict[str, Any] | None, clients: int) -> dict[str, int]:
        """Bytes over the (simulated) network so far, and how often distillation ran and a guard accepted it."""
        now = self.now
        down = now.broadcast.bytes_per_lane()
        if log and "guard_chose" in log and self.config.distill.guard == "clients":
            down += len(log["guard_steps"]) * broadcast.bytes_per_lane()  # the candidates they judge
        return {
            "bytes_up": now.counters["bytes_up"] + upload.bytes_per_lane() * clients,
            "bytes_down": now.counters["bytes_down"] + down * clients,
            "distilled": now.counters["distilled"] + int(log is not None),
            "accepted": now.counters["accepted"] + int(bool(log and log.get("guard_chose"))),
        }

    def trainer(self, clients: Sequence[int]) -> Trainer:
        run = self.config.run
        return Trainer(self.model, self.federation, clients, self.now.round, run.seed, self.config.train, self.lanes)

    def _server(self, trainer: Trainer) -> Server:
        sizes = [float(len(self.federation.clients[c].train)) for c in trainer.clients]
        weights = sizes if self.config.train.weighting == "samples" else None

        def judge(candidates: State) -> Tensor:
            if self.config.distill.guard == "server":
                return self._server_losses(candidates)
            if not isinstance(self.method, Judge):
                raise ValueError(f"{type(self.method).__name__} has no client_score: use another distill.guard")
            return self.method.client_score(trainer, candidates)

        return Server(
            self.model,
            self.public,
            self.config.distill,
            self.federation.multilabel,
            self.now.round,
            self.config.run.seed,
            judge,
            len(self.federation.clients),
            weights,
            self.lanes,
        )

    def _server_losses(self, candidates: State) -> Tensor:
        """Candidates on the server's own labelled validation data, `[candidates, 1]`."""
        index = self.federation.server_val
        logits = logits_on(self.model, candidates, self.federation, index)
        targets = self.federation.labels(index)
        losses = sample_loss(logits, targets.expand(candidates.lanes, *targets.shape))
        return losses.mean(1, keepdim=True).double().cpu()

    def personal(self) -> State:
        """What the clients predict with now: a lane each, or one that all share."""
        return self.method.personal(self.now.broadcast, self.now.kept)

    @property
    def has_global_model(self) -> bool:
        return self.method.parts.global_model and self.model.holds(self.now.broadcast)

    def evaluate(self, splits: Sequence[str] = ("local", "val", "global")) -> dict[str, Any]:
        """The row of metrics.jsonl for this moment."""
        start, now = time.perf_counter(), self.now
        found = personal_scores(self.model, self.personal(), self.federation, splits)
        row: dict[str, Any] = {"round": now.round, **{k: v.as_dict() for k, v in found.items()}}
        row["global_model"] = None
        if self.has_global_model and "global" in splits:
            index = self.federation.test
            logits = logits_on(self.model, now.broadcast, self.federation, index)[0]
            value = score(logits, self.federation.labels(index))
            row["global_model"] = {"global_test": value}
        self.seconds += time.perf_counter() - start
        return {**row, **now.counters, "seconds": self.seconds, **now.last}

    def save(self, folder: RunFolder) -> None:
        self.snapshot(folder)()

    def snapshot(self, folder: RunFolder) -> Callable[[], None]:
        """What writes this moment to the folder, whenever it is called: from a GPU all is copied now."""
        now, everybody = self.now, range(self.now.kept.lanes)
        clients = [now.kept.map(lambda t, m=m: t[m : m + 1]) for m in everybody]  # type: ignore[misc]
        server, broadcast = now.server, now.broadcast
        if self.model.device.type != "cpu":
            server, broadcast = on_cpu(server), on_cpu(broadcast)
            written = now.changed if folder.has_checkpoint() else everybody  # the others are links to older files
            clients = [on_cpu(c) if m in written else c for m, c in enumerate(clients)]
        note = {"counters": now.counters, "last": now.last, "seconds": self.seconds, "finished": now.finished}
        checkpoint = Checkpoint(now.round, server, broadcast, clients, note)
        self.now = replace(now, changed=frozenset())
        return lambda: folder.save(checkpoint, now.changed)

    def restore(self, saved: Checkpoint) -> None:
        device, dtype = self.model.device, DTYPES[self.config.run.precision]

        def here(state: State) -> State:
            return state.map(lambda t: t.to(device, dtype))

        kept = stack(*map(here, saved.clients)) if saved.clients else State()
        note = saved.note
        self.now = Moment(
            saved.round,
            here(saved.server),
            here(saved.broadcast),
            kept,
            dict(note["counters"]),
            dict(note["last"]),
            finished=note["finished"],
        )
        self.seconds = float(note["seconds"])


def in_memory(sim: Simulation) -> None:
    """Pretraining that leaves nothing on disk."""
    for _ in range(sim.config.train.rounds):
        sim.step()


def prepare(
    config: Config,
    backbone: Path | None = None,
    say: Say = lambda text: None,
    federation: Federation | None = None,
    pretrain: Callable[[Simulation], None] = in_memory,
    to_train: bool = True,
) -> Simulation:
    """Data, backbone, method: everything before the first round; less the public images, if not `to_train`.

    `backbone` is the copy of the weights that a run folder keeps; `federation` saves loading the data again;
    `pretrain` runs the FedAvg simulation where model.weights=fedavg.
    """
    device, dtype = device_of(config.run.device), DTYPES[config.run.precision]
    arithmetic(config.run.precision, device)
    if to_train:
        get_ready(device)
    federation = federation or build_federation(config.data, device)
    method = config.make_method()
    public: Sequence[Tensor] = []
    if to_train:
        check(config, federation, method)
        public = public_chunks(config, federation, method, device, dtype)
        for line in (*about_data(federation), *about_settings(config, method)):
            say(line)
    net = _backbone(config, federation, backbone, say, pretrain)
    sim = Simulation(config, federation, model_of(config, net, method, device), method, public)
    if isinstance(public, Chunks) and device.type == "cuda":
        public.keep_stems(sim.model, torch.cuda.mem_get_info(device)[0] // 4)
    if config.model.weights not in ("embedded", "random"):
        sim.backbone = {k: t for k, t in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    if to_train:
        sim.lanes, line = lanes_at_once(sim)
        say(line)
    say(federation.about_images())  # last: a refusal is one line
    if device.type == "cuda" and fast_kernels(device) is None:
        say("warning: no Triton here, so no kernels for lanes: the same results, slower")
    return sim


def lanes_at_once(sim: Simulation) -> tuple[int, str]:
    """How many lanes to train at once (0: all), and what that costs in memory."""
    asked, device = sim.config.run.lanes, sim.model.device
    height, width = sim.federation.images.shape[-2:]
    each = bytes_per_lane(sim.model, (int(height), int(width)), sim.config.train.batch)
    cohort = sim.config.train.cohort or len(sim.federation.clients)
    lanes, free = sim.method.parts.copies * cohort, free_memory(device)
    fit = sim.model.room = int(0.9 * free / each)
    if fit < 1:
        raise InputError(
            f"one lane takes about {each / 2**30:.1f} GiB and {device.type} has {free / 2**30:.1f} free: lower "
            "train.batch, or take a machine with more memory"
        )
    chosen = min(asked or lanes, lanes)
    if not asked and fit < lanes:
        chosen = fit
    named = "1 lane" if chosen == 1 else f"{chosen} lanes"
    named += f" at once in {precision_of(sim.config.run.precision, device)}"
    what = f"{named}, about {chosen * each / 2**30:.1f} GiB of {free / 2**30:.1f} free"
    return (chosen if chosen < lanes else 0), what + (f"; {lanes} lanes take turns" if chosen < lanes else "")


def model_of(config: Config, net: nn.Module, method: Method, device: torch.device) -> LaneModel:
    """The lanes that the method trains, over the backbone."""
    adapter = config.model.adapter if method.parts.adapters else None
    options = config.model
    model = lane_model(net, method.parts.trains, adapter, options.dropout, config.run.seed, options.adapter_std)
    compute = torch.bfloat16 if precision_of(config.run.precision, device) == "bf16" else None
    return model.to(device, DTYPES[config.run.precision], compute)


def precision_of(asked: str, device: torch.device) -> str:
    """What "auto" is on this device: the fastest precision that costs no accuracy (docs/performance.md)."""
    if asked != "auto":
        return asked
    return "bf16" if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0) else "fp32"


def arithmetic(precision: str, device: torch.device) -> None:
    """How a GPU multiplies is a setting of the whole process."""
    precision = precision_of(precision, device)
    if device.type != "cuda":
        if precision in ("tf32", "bf16"):
            raise InputError(f"run.precision={precision} needs a GPU: use fp32, or --device cuda")
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision in ("tf32", "bf16")


def check(config: Config, federation: Federation, method: Method) -> None:
    """Refuse settings that do not fit the data or the method."""
    clients = len(federation.clients)
    if method.parts.own_step and config.train.momentum:
        raise InputError(
            f"{config.method_name} has its own step, without momentum: set train.momentum=0, for it alone in "
            f"[methods.{config.method_name}] of a TOML file"
        )
    if config.train.cohort > clients:
        raise InputError(f"train.cohort={config.train.cohort} but there are {clients} clients: lower it")
    if not method.parts.distils or not config.distill.steps:
        return
    if config.distill.data in (config.data.name, config.data.root):
        raise InputError(f"distill.data={config.distill.data} holds the clients' own images: choose other public data")
    if config.distill.guard == "clients" and not any(len(c.val) for c in federation.clients):
        raise InputError("distill.guard=clients needs validation data at a client: raise data.val, or use guard=none")
    if config.distill.guard == "server" and not len(federation.server_val):
        raise InputError("distill.guard=server needs labelled data at the server: set data.server_val, such as 0.05")


def public_chunks(
    config: Config, federation: Federation, method: Method, device: torch.device, dtype: torch.dtype
) -> Sequence[Tensor]:
    if not method.parts.distils or config.distill.steps == 0:
        return []
    own, size = config.distill.data == VALIDATION, federation.images.shape[-1]
    images = federation.take(federation.val) if own else public_images(config.distill.data, size, config.data.root)
    if images is None:
        raise InputError("distillation needs public images: set distill.data, or --set distill.steps=0")
    if images.shape[2:] != federation.images.shape[2:]:
        raise InputError(
            f"public images are {tuple(images.shape[2:])} pixels and the clients' {tuple(federation.images.shape[2:])}"
        )
    if len(images) < 2 or config.distill.size == 1:
        raise InputError("distillation needs at least two public images: batch norm cannot normalise one")
    chunks = torch.stack(chunks_of(len(images), config.distill, config.data.seed)).to(device)
    return Chunks(federation, images.to(device), chunks, dtype)


def _backbone(
    config: Config, federation: Federation, held: Path | None, say: Say, pretrain: Callable[[Simulation], None]
) -> nn.Module:
    """The pretrained network, with the report of what its weights gave."""
    source = str(held) if held else config.model.weights
    if source == "fedavg":
        return _pretrained(config, federation, say, pretrain)
    net, report = build_backbone(config.model.backbone, len(federation.classes), source, config.run.seed)
    for line in report.lines() if report and not held else []:
        say(line)
    return net


def _pretrained(config: Config, federation: Federation, say: Say, pretrain: Callable[[Simulation], None]) -> nn.Module:
    """FedAvg from scratch on the clients' own data (as one of the paper's initialisations), with streams of its own."""
    start = pretraining(config)
    say(f"pretraining {config.model.backbone} with {start.train.rounds} rounds of FedAvg on the clients' data")
    sim = prepare(start, federation=federation)
    pretrain(sim)
    net, _ = build_backbone(config.model.backbone, len(federation.classes), "random", config.run.seed)
    found = {n: t[0].cpu() for held in (sim.now.broadcast.params, sim.now.broadcast.buffers) for n, t in held.items()}
    load_into(net, {n: t.float() for n, t in found.items()}, "fedavg")
    return net


def pretraining(config: Config) -> Config:
    """The FedAvg run that a run with model.weights=fedavg starts from. It does not depend on the run's own method and
    learning rate, so that the methods of a comparison start alike."""
    rounds = config.model.pretrain_rounds
    seed = key_of(config.run.seed, "pretrain") & (2**63 - 1)
    return replace(
        config,
        model=replace(config.model, weights="random"),
        method={"name": "fedavg"},
        train=replace(config.train, rounds=rounds, lr=config.model.pretrain_lr),
        run=replace(config.run, seed=seed, eval_every=rounds),
    )
