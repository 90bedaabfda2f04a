"""A run folder, opened: its clients, scores, personal models, predictions and exports."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..client.scores import Scores, all_scores_on, personal_scores, scores_on
from ..config import Config, build, federation_of, resolve
from ..config.objects import public_of
from ..config.settings import Settings, given
from ..data import GIVEN, SEVERITIES, Federation, blank, data_home, named_sets, place_of
from ..data.one_site import one_site
from ..data.source import Pixels
from ..errors import InputError, unknown
from ..experiment import DTYPES, Experiment, Say
from ..lanes import State, gather
from ..lanes.machine import device_of
from ..models import with_weights
from ..predict.drift import Calibration
from ..predict.personal import PersonalModel, aware_predictions
from ..predict.predictor import Predictor
from ..predict.scores import NAMES, DriftScores
from ..predict.scores import OWN as OWN_SETS
from .calibration import calibrated, check_labels, scorer
from .calibration import load as load_calibrations
from .folder import RunFolder
from .further import add_scores
from .names import not_empty

OWN = {"local": "local_test", "val": "local_val", "global": "global_test"}  # test sets that every run has


def warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


class Run:
    """A run folder, opened. Weights and data are read when they are first needed.

    say: receives what a user should know; by default it warns.
    data_given: whether the user says where the data are, so that they are checked even if they are not needed.
    net, federation: what the folder of a run made from Python objects cannot hold.
    """

    def __init__(
        self,
        folder: RunFolder,
        config: Config,
        say: Say = warn,
        data_given: bool = False,
        net: nn.Module | None = None,
        federation: Federation | None = None,
    ) -> None:
        self.folder, self.config, self.path, self.say, self.data_given = folder, config, folder.path, say, data_given
        self.net = net
        if net is not None and not isinstance(net, nn.Module):
            raise InputError(f"model must be a torch.nn.Module, not {type(net).__name__}")
        if federation is not None and not isinstance(federation, Federation):
            raise InputError(f"federation must be a Federation, not {type(federation).__name__}")
        if federation is not None:
            federation = federation.to(device_of(config.run.device))
            folder.check_data(federation.facts())
            self.federation = federation

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment at the run's newest checkpoint."""
        net = self.net
        if net is None and self.config.model.backbone == GIVEN:
            raise InputError(
                f"{self.path} was made with a network from Python: perada.load({str(self.path)!r}, model=...)"
            )
        if net is not None and self.folder.backbone is not None:
            net = with_weights(net, self.folder.backbone)
        experiment = build(self.config, self.folder.backbone, federation=self.names, to_train=False, net=net)
        saved, skipped = self.folder.load()
        for line in skipped:
            self.say(f"{self.path}: {line}")
        if saved is None:
            raise InputError(f"{self.path} has no checkpoint yet: train it first")
        experiment.restore(saved)
        return experiment

    @property
    def summary(self) -> dict[str, Any]:
        return self.folder.summary()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.folder.metrics()

    @cached_property
    def federation(self) -> Federation:
        """The clients' data, which are read for this."""
        if (self.path / "flower.json").is_file():
            raise InputError(
                f"the images and personal models of {self.path} are at its sites: use `perada flower predict` there"
            )
        if self.config.data.name == GIVEN:
            raise InputError(
                f"{self.path} was made with data from Python: perada.load({str(self.path)!r}, federation=...)"
            )
        about, device = self.folder.about(), device_of(self.config.run.device)
        joined = blank(about, device) if "joined" in about else None  # one client's data, with the old run's classes
        name = next(iter(about.get("clients", ())), "")
        federation = one_site(self.config.data, name, joined, device) if joined else federation_of(self.config)
        self.folder.check_data(federation.facts())
        return federation

    @cached_property
    def names(self) -> Federation:
        """The clients and classes, without images if the run folder has them."""
        if "federation" in self.__dict__ or self.data_given:
            return self.federation
        return blank(self.folder.about(), device_of(self.config.run.device)) or self.federation

    @property
    def clients(self) -> tuple[str, ...]:
        return tuple(c.name for c in self.names.clients)

    def table(self) -> list[dict[str, Any]]:
        """Returns one row per client: its data and its personal model's scores."""
        rows = self.metrics
        if not rows:
            raise InputError(f"{self.path} was not evaluated yet: resume the run to finish it")
        last, sizes = rows[-1], self.folder.about().get("clients")
        if sizes is None:  # an older version did not write it
            sizes = {c.name: [len(c.train), len(c.val), len(c.test)] for c in self.federation.clients}
        return [
            {
                "client": name,
                **dict(zip(("train", "val", "test"), sizes[name], strict=True)),
                **{s: last[s]["per_client"][name] for s in ("local_test", "local_val", "global_test") if s in last},
            }
            for name in self.clients
        ]

    def state(self, client: str) -> State:
        """Returns what one client predicts with, one lane: its personal adapter (or model)."""
        if client not in self.clients:
            raise unknown("client", client, self.clients)
        lanes = self.experiment.personal()  # in the order of the names
        at = self.clients.index(client) if lanes.lanes > 1 else 0
        return lanes.map(lambda t: t[at : at + 1])

    def personal(self, client: str) -> PersonalModel:
        """Returns a client's model with all that a prediction or an exported file needs."""
        model, state = self.experiment.model, self.state(client)
        return PersonalModel(client, self.config, self.names, model, state, self.say, self._thresholds(client))

    def _thresholds(self, client: str) -> dict[str, float | None] | None:
        """Returns a client's thresholds of labels; None before the run is finished, and for an older one."""
        if not self.names.multilabel or not (self.path / "summary.json").is_file():
            return None
        chosen: dict[str, float | None] | None = self.summary.get("thresholds", {}).get(client)
        return chosen

    def model(self, client: str) -> nn.Module:
        """Returns a plain torch module on the CPU, in eval mode, personal adapter in place.

        Its input is `normalise(images)`.
        """
        return self.personal(client).module()

    def normalise(self, images: Tensor) -> Tensor:
        """Returns what `model()` takes, of uint8 images `[n, C, H, W]`."""
        if images.dtype != torch.uint8:
            raise InputError(f"normalise takes uint8 images, 0 to 255, not {images.dtype}")
        return self.names.prepare(images, DTYPES[self.config.run.precision])

    def evaluate(
        self, on: str | Sequence[str] = ("local", "global"), progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Scores]:
        """Returns the clients' scores on `local`, `val`, `global`, or a test set of `data.named_sets`.

        Those are `fog:3`, `fog`, `shifted`, `cifar10.1`, ...; `shifted` has the severities of the run's options.
        progress: receives how many corrupted copies are made, and of how many.
        """
        names, data, model = [on] if isinstance(on, str) else list(on), self.federation, self.experiment.model
        lanes = self._lanes_for(data)
        plain = [s for s in names if s in OWN]
        out = personal_scores(model, lanes, data, plain) if plain else {}
        for name in names:
            if name not in plain:
                out[name] = scores_on(model, lanes, data, self.test_sets(data, name, progress))
        return {key: out[key] for key in (OWN.get(name, name) for name in names)}

    @cached_property
    def calibrations(self) -> dict[str, Calibration]:
        """What each client knows of its own data; read from the folder, or made from the clients' data."""
        experiment, options = self.experiment, self.config.drift
        experiment.both_models()  # refuses a method without them, before anything is read
        check_labels(self.names, options)
        saved = load_calibrations(self.folder, options, experiment.now.round)
        if saved is not None and saved.keys() >= set(self.clients):
            return saved
        data = self.in_order(self.federation)
        public = public_of(self.config, data) if options.prior == "public" else None
        return calibrated(experiment, data, public)

    def predictor(self, client: str) -> Predictor:
        """Returns a client's predictor, which notices drift: for one image, a window, or a stream."""
        personal, (_, shared) = self.state(client), self.experiment.both_models()
        model, by = self.experiment.model, self.calibrations[client]
        rest = self.names, by, self.config.drift, self.config.data.fit, self.say
        return Predictor.of(client, model, model.part_of(personal), shared, *rest)

    def drift_scores(
        self, on: str | Sequence[str] = OWN_SETS, progress: Callable[[int, int], None] | None = None
    ) -> DriftScores:
        """Returns the clients' scores, alone and when they notice drift.

        on: `local`, `global`, `mixed` (half of a client's images are its own, half are everybody's), or a test set of
        `data.named_sets`. Images come in a random order, which depends on the run's seed.
        """
        names = [on] if isinstance(on, str) else list(on)
        if "val" in names:
            raise InputError(
                "clients are calibrated on their validation data, so drift is not tested on them: leave out val"
            )
        data = self.in_order(self.federation)
        judge = scorer(self.experiment, data, self.calibrations)
        judge.own([n for n in names if n in OWN_SETS])
        lanes = self.experiment.both_models()
        for name in names:
            if name not in OWN_SETS:
                see = partial(judge.see_all, name)
                all_scores_on(self.experiment.model, lanes, data, self.test_sets(data, name, progress), see)
        found = judge.result()
        order = [NAMES.get(name, name) for name in names]
        return replace(found, alone={n: found.alone[n] for n in order}, aware={n: found.aware[n] for n in order})

    def in_order(self, data: Federation) -> Federation:
        """Returns the federation with its clients in the order of the lanes."""
        by_name = {c.name: c for c in data.clients}
        return replace(data, clients=tuple(by_name[name] for name in self.clients))

    def test_sets(
        self, data: Federation, name: str, progress: Callable[[int, int], None] | None = None
    ) -> Iterator[tuple[Pixels, Tensor]]:
        """Returns a test set of `data.named_sets`."""
        official = name.partition(":")[0]
        home = place_of(official, self.config.data.root) if official.startswith("cifar10") else None
        levels = self.config.run.severities if name == "shifted" else SEVERITIES
        return named_sets(data, name, home or self.config.data.root or data_home(), levels, progress)

    def note(self, scores: Mapping[str, Scores]) -> bool:
        """Writes scores on further test sets to the folder, for its report; returns whether there are any."""
        further = {name: of for name, of in scores.items() if name not in OWN.values()}
        if further:
            add_scores(self.path, self.experiment.now.round, further)
        return bool(further)

    def _lanes_for(self, data: Federation) -> State:
        """Returns what the clients predict with, in the order that the data have them."""
        lanes, order = self.experiment.personal(), [self.clients.index(c.name) for c in data.clients]
        return lanes if lanes.lanes == 1 else gather(lanes, order)

    def predict(
        self, client: str, images: str | Path | Sequence[str | Path], drift: bool = False
    ) -> list[dict[str, Any]]:
        """Returns class names with probabilities, most probable first; label probabilities for multi-label data.

        images: an image file or a folder of them, or several.
        drift: whether the client notices drift; then each image has what was said of its window, too.
        """
        paths = [images] if isinstance(images, str | Path) else images
        return aware_predictions(self.predictor(client), paths) if drift else self.personal(client).predict(paths)

    def export(self, client: str, out: str | Path, merged: bool = False) -> None:
        """Writes a client's model: .safetensors is the personal part, or with `merged` the whole network.

        .pt2 and .onnx are the whole network as a program: pictures of any shape in, uint8
        `[batch, height, width, 3]`, and probabilities out.
        """
        self.personal(client).export(Path(out), merged)


def load(
    path: str | Path,
    *,
    data: str | Path | None = None,
    set: Settings | None = None,
    device: str = "auto",
    say: Say = warn,
    model: nn.Module | None = None,
    federation: Federation | None = None,
) -> Run:
    """Opens a run folder, on this machine's device.

    data: where your own images are now, if they moved. set: other settings of how predictions notice drift.
    model, federation: those of a run made from Python objects, which the folder cannot hold.
    """
    not_empty("--data", data)
    folder = RunFolder.open(Path(path))
    config = resolve(str(folder.path / "config.toml"), given(set, data=data, device=device))
    for line in folder.notices():
        say(line)
    return Run(folder, config, say, data is not None, model, federation)
