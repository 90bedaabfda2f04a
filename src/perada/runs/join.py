"""A new client joins a finished run: it gets a personal model from the global one, and nobody else changes.

The result is a run folder of its own, with this one client. So everything that opens a run opens it, and the old run is
only read: its clients' adapters stay what they are, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..client.cohort import TOOK_PART, LocalCohort
from ..client.interval import interval
from ..client.scores import own_logits, score
from ..config import Config, build
from ..data import Federation
from ..data.one_site import one_site
from ..errors import Diverged, InputError, RunError
from ..experiment import Experiment, Say
from ..inputs import user_path
from ..lanes import State
from ..lanes.machine import device_of
from ..methods import Finisher
from ..models import Backbone
from ..report import write_report
from .folder import RunFolder
from .moment import Evaluation
from .names import NewFolder
from .run import Run, load
from .train import summary_of

SPLITS = ("local", "val")  # other clients' test data are not here


@dataclass(frozen=True)
class Newcomer:
    """A client that joins, and the global model that it joins with."""

    old: Run
    config: Config
    federation: Federation  # of this one client
    received: State  # the global model

    def experiment(self, config: Config) -> Experiment:
        """Returns an experiment of this client alone, on the old run's frozen network."""
        before = self.old.experiment
        network = Backbone(before.net, before.head or "", adapt_from=before.adapt_from)
        made = build(config, federation=self.federation, to_train=False, net=network)
        made.keep_features()
        return made

    def personal(self) -> Experiment:
        """Returns the experiment whose client has received the global model, and keeps what the method makes of it."""
        experiment = self.experiment(self.config)
        experiment.model.begin_from(experiment.here(self.received))
        kept = experiment.method.init(experiment.model)[2]
        server = experiment.here(self.old.experiment.now.server)
        received = experiment.here(self.received)
        experiment.now = replace(experiment.now, server=server, broadcast=received, kept=kept)
        return experiment

    def standalone(self) -> Experiment:
        """Returns the experiment in which this client trains a whole model alone, from the same network."""
        return self.experiment(replace(self.config, method={"name": "standalone"}))


def join(
    run: Run | str | Path,
    *,
    data: str | Path,
    name: str,
    rounds: int | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    overwrite: bool = False,
    say: Say = lambda text: None,
) -> Run:
    """Trains a personal model for a client that was not in a run; returns a run of its own with this client.

    The client runs the method's own client update so many times (rounds), always from the run's last global model. By
    default that is as often as a client of the run took part. `summary["joined"]` has the scores of the personal model,
    of a model that the client trained alone, and of the global model, on the client's own test images.
    run: a finished run, or its folder.
    data: class/image files, a manifest or .npz, as for a site.
    rounds: how often the client update runs; a method with a last stage at the clients runs that stage once instead.
    """
    old = run if isinstance(run, Run) else load(run, device=device or "auto")
    _check(old, name)
    times = default_rounds(old) if rounds is None else rounds
    if times < 1:
        raise InputError(f"a client joins by at least one round of training, not {times}")
    options = replace(
        old.config.data,
        name="folder",
        root=str(user_path(str(data)).absolute()),
        partition="site",
        server_val=0.0,
        size=int(old.names.images.shape[-1]),
    )
    config = replace(
        old.config,
        data=options,
        train=replace(old.config.train, rounds=times, cohort=0),
        drift=replace(old.config.drift, prior="uniform"),  # the other clients' label counts are not here
        run=replace(old.config.run, shifts=False, device=device or old.config.run.device),  # type: ignore[arg-type]
    )
    path = Path(out) if out is not None else Path(f"{old.path}-{name}")
    if old.path.resolve() in (path.resolve(), *path.resolve().parents):
        raise InputError(
            f"{old.path} stays as it is, so the new client needs a folder outside it: choose another --out"
        )
    federation = one_site(options, name, old.names, device_of(config.run.device))
    newcomer = Newcomer(old, config, federation, _global(old))
    with ExitStack() as stack:
        new = NewFolder(path, out is not None or overwrite, config, overwrite, stack)
        say(f"{name} trains {times} rounds from the global model of {old.path}")
        try:
            return _trained(newcomer, new)
        except OSError as error:
            raise RunError(f"cannot write to {path}: {error.strerror}", "make room, then join again") from error


def default_rounds(old: Run) -> int:
    """Returns how often a client of a run took part, on average."""
    train, clients = old.config.train, max(1, len(old.clients))
    return max(1, round(train.rounds * (train.cohort or clients) / clients))


def _check(old: Run, name: str) -> None:
    """Refuses a run that is not finished or was joined itself, and a name that is taken."""
    if "federation" not in vars(old) and (old.path / "flower.json").is_file():
        raise InputError(f"{old.path} is of a federation over a network: use `perada flower join` at the new site")
    if "joined" in old.folder.about():
        raise InputError(f"{old.path} is of a client that joined a run: join that run instead")
    if old.config.privacy.on:
        raise InputError(f"{old.path} has differential privacy, which a client that joins later cannot account for yet")
    old.summary  # noqa: B018 - refuses an unfinished run
    if name in old.clients:
        raise InputError(f"{name!r} is a client of {old.path} already: choose another name")
    if not name.strip() or Path(name).name != name:
        raise InputError(f"{name!r} cannot be a client's name: give a plain one, such as east")


def _global(old: Run) -> State:
    """Returns the last broadcast; refuses a method without a global model, and one that keeps nothing personal."""
    experiment = old.experiment
    method, now = experiment.method, experiment.now
    if experiment.global_model is None:
        raise InputError(
            f"{old.config.method_name} has no global model that a new client could start from: perada, ditto, apfl, "
            "pfedme and fedavg-ft have one"
        )
    kept = method.init(experiment.model)[2]
    other = method.personal(now.broadcast, kept.map(lambda t: t + 1))
    shown, sent = other.params, now.broadcast.params
    if not isinstance(method, Finisher) and all(t.equal(sent[n]) for n, t in shown.items() if n in sent):
        raise InputError(
            f"{old.config.method_name} keeps nothing personal: every client, also a new one, uses the global model of "
            f"{old.path}"
        )
    return now.broadcast


def _trained(newcomer: Newcomer, new: NewFolder) -> Run:
    """Trains and measures in memory, then writes the folder at once."""
    personal, rows = newcomer.personal(), list[Evaluation]()
    size = newcomer.received.bytes_per_lane()
    personal.now = replace(personal.now, counters={**personal.now.counters, "bytes_down": size})
    update(personal, rows)
    alone = newcomer.standalone()
    update(alone, [])
    lanes = {"personal": personal.personal(), "standalone": alone.personal(), "global": personal.global_model}
    models = {"standalone": alone}
    scores = {kind: measured(models.get(kind, personal), state) for kind, state in lanes.items() if state is not None}
    test = newcomer.federation.clients[0].test
    joined = {"from": newcomer.old.path.name, "round": newcomer.old.summary["round"], "rounds": personal.now.round}
    return _written(newcomer, new.made, personal, rows, {**joined, "test_images": len(test), **scores})


def update(experiment: Experiment, rows: list[Evaluation]) -> None:
    """Runs the method's client update in every round, and adds the evaluations to `rows`.

    The server and what it sends never change. A method that trains clients in a last stage runs that stage instead.
    """
    cohort, method, last = experiment.cohort, experiment.method, experiment.train.rounds
    assert isinstance(cohort, LocalCohort)
    for round in range(last - 1 if isinstance(method, Finisher) else 0, last):
        if isinstance(method, Finisher):
            kept, report = cohort.finish(experiment.now)
        else:
            uploads = cohort.train(experiment.now, [0])
            kept, report = uploads.kept or State(), uploads.report
        if report.failed:
            raise Diverged("the new client's training stopped being finite", "lower Train.lr, or set Train.clip")
        experiment.now = replace(
            experiment.now,
            round=round + 1,
            kept=kept,
            last={"train_loss": report.loss, "distill": None},
            counters={**experiment.now.counters, TOOK_PART: round + 1},
            changed=frozenset({0}),
            finished=isinstance(method, Finisher),
        )
        due = round + 1 == last or (round + 1) % experiment.options.eval_every == 0
        if due and (row := experiment.evaluate(SPLITS)) is not None:
            rows.append(row)


def measured(experiment: Experiment, lanes: State) -> dict[str, Any]:
    """Returns the score of a model on the client's own test images, with its 95% interval."""
    federation = experiment.federation
    index = federation.clients[0].test
    logits, targets = own_logits(experiment.model, lanes, federation, [index])[0], federation.labels(index)
    return {"score": score(logits, targets), "interval": interval(logits, targets)}


def _written(
    newcomer: Newcomer, folder: RunFolder, experiment: Experiment, rows: list[Evaluation], joined: Mapping[str, Any]
) -> Run:
    """Writes the run folder of the new client; returns it opened."""
    run = Run(folder, newcomer.config, net=newcomer.old.net)
    run.experiment, run.federation = experiment, experiment.federation
    folder.write_json("data.json", {**experiment.federation.facts(), "joined": {"from": joined["from"]}})
    if tensors := newcomer.old.experiment.frozen_to_save():
        folder.save_backbone(tensors)
    for row in rows:
        folder.append_metrics(row.as_dict())
    experiment.save(folder)
    summary = summary_of(run, experiment, rows[-1])
    sizes = {**summary["parameters"], "communicated": 0, "communicated_buffers": 0}  # it sends nothing
    folder.finish({**summary, "parameters": sizes, "joined": dict(joined)})
    write_report([run], folder.path / "report.html")
    return run
