"""What a server and a site are told by their people: server.toml and site.toml, and what a server tells its sites."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ..config import Config, from_tables, presets, resolve, section
from ..data import VALIDATION, is_public_name
from ..data.images import IMAGENET
from ..errors import InputError, unknown
from ..methods import hyperparameters
from ..models import WEIGHTS, names_code

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN = re.compile(rf"{NAME.pattern}-[0-9a-f]{{8}}")  # `records.open_run` makes them
SHA256 = re.compile(r"[0-9a-f]{64}")
MADE_ANYWHERE = ("embedded", "random")  # weights that a site makes itself; any others are sent
MAX_ROUND = 10**6
GREY = {"data": ((0.5,), (0.25,)), "imagenet": ((0.449,), (0.226,))}  # as the sources of one channel have it


def checked_name(what: str, name: str) -> str:
    """A name that may stand in a path on any machine."""
    if not NAME.fullmatch(name):
        raise ValueError(f"{what} must be letters, digits, dots, dashes and underscores (at most 64), not {name!r}")
    return name


def is_run_id(text: str) -> bool:
    """Whether it is a run's id, which is a folder's name at the server and at the sites."""
    return RUN.fullmatch(text) is not None


@dataclass(frozen=True)
class FederationOptions:
    """The `[federation]` section of server.toml."""

    name: str
    sites: tuple[str, ...]
    classes: tuple[str, ...]  # of all sites together: a label's number is its place here
    channels: int = 3  # of the images: 3, or 1 for grey ones in .npz files
    multilabel: bool = False
    state: str = "state"  # where the server keeps its runs
    test: str = ""  # a labelled public test set at the server, for the global model

    def __post_init__(self) -> None:
        checked_name("name", self.name)
        if not self.sites:
            raise ValueError("sites must name at least one site")
        for what, names in (("sites", self.sites), ("classes", self.classes)):
            twice = next((n for n in names if names.count(n) > 1), None)
            if twice is not None:
                raise ValueError(f"{what}: {twice!r} stands there twice")
        for site in self.sites:
            checked_name("sites", site)
        if len(self.classes) < (1 if self.multilabel else 2):
            raise ValueError("classes must name the classes of all sites, at least two")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {self.channels}")


@dataclass(frozen=True)
class Rounds:
    """The `[rounds]` section of server.toml: how long to wait for whom, and what to believe."""

    min_sites: int = 2  # a round with fewer good uploads is tried again
    deadline_s: float = 600.0  # a round's end: uploads must be in by then; a fifth of it is kept for the guard
    hello_s: float = 60.0  # how long the sites may take to say who they are
    retries: int = 10  # how often a round with too few sites is tried again
    norm_bound: float = 100.0  # an upload may part from the broadcast by this many times the broadcast's norm
    max_samples: int = 1_000_000  # where weighting=samples, a site that says it has more is refused
    poll_s: float = 0.5  # how often to look for replies

    def __post_init__(self) -> None:
        if self.max_samples < 1:
            raise ValueError(f"max_samples must be at least 1, not {self.max_samples}")
        if self.min_sites < 1 or self.retries < 0:
            raise ValueError("min_sites must be at least 1 and rounds.retries not negative")
        for name in ("deadline_s", "hello_s", "norm_bound", "poll_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class ServerSettings:
    """server.toml, read."""

    federation: FederationOptions
    rounds: Rounds
    config: Config

    @classmethod
    def read(cls, path: str | Path) -> ServerSettings:
        """Sections `[federation]`, `[rounds]` and those of any run; paths are relative to the file's folder."""
        file = Path(path).expanduser().absolute()
        tables = _toml(file)
        federation = section("federation", FederationOptions, tables.pop("federation", {}))
        rounds = section("rounds", Rounds, tables.pop("rounds", {}))
        federation = replace(
            federation,
            sites=tuple(sorted(federation.sites)),
            state=str(file.parent / federation.state),
            test=str(file.parent / federation.test) if federation.test else "",
        )
        return cls(federation, rounds, _run_config(file, tables, federation))

    @property
    def untrained(self) -> bool:
        """Whether a backbone stays frozen that nothing was ever trained with."""
        trains = self.config.make_method().parts.trains
        return self.config.model.weights == "random" and trains not in ("full", "everything")

    def runs(self) -> Path:
        return Path(self.federation.state) / "runs"


def _run_config(file: Path, tables: dict[str, Any], federation: FederationOptions) -> Config:
    """The run's own configuration; what speaks of data at hand has no meaning at a server without any."""
    preset = tables.pop("preset", "folder")
    if preset not in presets():
        raise unknown("preset", str(preset), presets())
    overrides: dict[str, Any] = {}
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise InputError(f"{file}: [{name}] must be a section, not a value")
        overrides |= {f"{name}.{key}": value for key, value in values.items()}
    for key, is_name in (("model.weights", WEIGHTS.__contains__), ("distill.data", is_public_name)):
        value = overrides.get(key)
        if isinstance(value, str) and not is_name(value):
            overrides[key] = str(file.parent / Path(value).expanduser())
    for key in overrides:
        if key.startswith("data.") and key.removeprefix("data.") not in ("size", "val", "test", "seed", *SHARED_DATA):
            raise InputError(f"{file}: {key} has no meaning here: the data are at the sites")
    if overrides.get("distill.data") == VALIDATION:
        raise InputError(f"{file}: distill.data={VALIDATION} has no meaning here: the data are at the sites")
    if preset == "folder":  # its backbone is made by simulated pretraining
        overrides.setdefault("model.weights", "random")
    config = resolve(str(preset), {**overrides, "data.name": "folder", "data.partition": "site", "data.root": ""})
    return _checked(config, federation)


SHARED_DATA = ("normalise", "augment", "resident", "meta_min", "uncertain")


def _checked(config: Config, federation: FederationOptions) -> Config:
    if config.model.weights == "fedavg":
        raise InputError(
            "model.weights=fedavg is a simulation's: run method fedavg first and name its weights file, or use random"
        )
    if config.train.cohort > len(federation.sites):
        raise InputError(f"train.cohort={config.train.cohort} but there are {len(federation.sites)} sites: lower it")
    if config.run.shifts:
        config = replace(config, run=replace(config.run, shifts=False))  # needs the test images
    if config.distill.guard == "server":
        raise InputError("distill.guard=server needs labelled data at the server: use clients or none")
    return config


@dataclass(frozen=True)
class SiteSettings:
    """The `[site]` section of site.toml, read."""

    federation: str
    name: str
    data: str  # class/image folders, a manifest, or a .npz file; what belongs to other sites is passed over
    state: str = "state"  # where the site keeps what never leaves it
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0  # of torch; 0 leaves its own choice
    test: str = ""  # the shared public test set, if this site has it
    skip_bad: bool = False  # pass over images that cannot be read
    site_column: str = "site"  # of a manifest that holds several sites
    score_digits: int = 1  # of the scores it tells, in percent; all digits would tell how many test images it has
    methods: tuple[str, ...] = ()  # what this site takes part in; empty is anything. MTL, say, sends personal models

    def __post_init__(self) -> None:
        checked_name("federation", self.federation)
        checked_name("name", self.name)
        for method in self.methods:
            hyperparameters(method)  # refuses a name that there is not
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, not {self.threads}")
        if not 0 <= self.score_digits <= 15:
            raise ValueError(f"score_digits must be from 0 to 15, not {self.score_digits}")

    @classmethod
    def read(cls, path: str | Path) -> SiteSettings:
        """Paths are relative to the file's folder."""
        file = Path(path).expanduser().absolute()
        tables = _toml(file)
        found: SiteSettings = section("site", cls, tables.pop("site", {}))
        if tables:
            raise unknown("section", next(iter(tables)), ["site"])
        data, state = (str(file.parent / Path(name).expanduser()) for name in (found.data, found.state))
        return replace(found, data=data, state=state, test=str(file.parent / found.test) if found.test else "")


def _toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text("utf8"))
    except FileNotFoundError as error:
        raise InputError(f"no such file: {file}") from error
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # bad TOML, or bytes that are no text
        raise InputError(f"{file}: not valid TOML: {error}") from error


@dataclass(frozen=True)
class Plan:
    """All that a site must know to do its part, the same for every site; it travels in every message, because
    Flower starts a new process for each."""

    federation: str
    classes: tuple[str, ...]
    channels: int
    multilabel: bool
    backbone: str  # sha256 of the frozen network's weights; a site that cannot make them itself is sent them
    config: Config = field(repr=False)

    @classmethod
    def of(cls, settings: ServerSettings, backbone: str) -> Plan:
        """Without the server's own paths and choices of device: they are nobody else's business."""
        f, config = settings.federation, settings.config
        weights = config.model.weights if config.model.weights in MADE_ANYWHERE else "random"
        config = replace(
            config,
            model=replace(config.model, weights=weights),
            distill=replace(config.distill, data="none"),
            run=replace(config.run, device="auto"),
        )
        return cls(f.name, f.classes, f.channels, f.multilabel, backbone, config)

    def text(self) -> str:
        """As one line of JSON; the same plan gives the same text."""
        held = {k: getattr(self, k) for k in ("federation", "classes", "channels", "multilabel", "backbone")}
        return json.dumps({**held, "config": self.config.as_dict()}, sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Plan:
        try:
            found = json.loads(text)
            config = from_tables(found["config"])
            kinds: Mapping[str, type] = {"federation": str, "channels": int, "multilabel": bool, "backbone": str}
            if any(not isinstance(found[k], kind) for k, kind in kinds.items()):
                raise ValueError("a value of the wrong type")
            classes = tuple(map(str, found["classes"]))
            if config.model.weights not in MADE_ANYWHERE or config.distill.data != "none" or config.data.root:
                raise ValueError("it names files or downloads, which a server has no say in at a site")
            if names_code(config.model.backbone) or names_code(config.model.adapter):
                raise ValueError("it names a module to import, which a server has no say in at a site")
            if not SHA256.fullmatch(found["backbone"]):
                raise ValueError("backbone is no sha256")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"the server's plan cannot be read ({error}): do server and site run one version?"
            ) from error
        return cls(classes=classes, config=config, **{k: found[k] for k in kinds})

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and the standard deviation of a channel that every site and the server divide by."""
        return IMAGENET if self.channels == 3 else GREY[self.config.data.normalise]
