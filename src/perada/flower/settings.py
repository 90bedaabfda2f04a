"""The settings files server.toml and site.toml, and the plan that a server sends to its sites."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from ..config import Config, from_tables, presets, read_toml, resolve, section, toml_value
from ..data import VALIDATION, is_public_name
from ..data.images import IMAGENET
from ..errors import InputError, unknown
from ..methods import hyperparameters
from ..models import WEIGHTS, names_code, own_normalisation

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RUN = re.compile(rf"{NAME.pattern}-[0-9a-f]{{8}}")  # `records.open_run` makes these
SHA256 = re.compile(r"[0-9a-f]{64}")
BUILT_IN_WEIGHTS = ("package", "embedded", "random")  # a site makes these itself; the server sends all others
SHARED_DATA = ("size", "fit", "val", "test", "seed", "normalise", "augment", "resident", "meta_min", "uncertain")
MAX_ROUND = 10**6
UNSAFE_NOISE = False  # whether noise that follows from a seed is accepted; a test of parity sets it, nothing else
AGGREGATE = "norm_clip"  # over a network, where a site may be in wrong hands; server.toml may choose another rule
ADVICE = ": `perada flower init` makes one"
GREY = {"data": ((0.5,), (0.25,)), "imagenet": ((0.449,), (0.226,))}  # mean and deviation of one-channel images


def checked_name(what: str, name: str) -> str:
    """Returns a name that is safe in a path on any machine; refuses any other."""
    if not NAME.fullmatch(name):
        raise InputError(f"{what} must be letters, digits, dots, dashes and underscores (at most 64), not {name!r}")
    return name


def _check_federation(what: str, name: str) -> None:
    if checked_name(what, name).lower() in ("flower", "runs"):
        raise InputError(f"{what} {name!r} is the name of a folder in state/: choose another")


def check_sites(names: Sequence[str]) -> list[str]:
    """Returns the names in order; refuses bad ones and repetitions, also on a file system that ignores case."""
    lower = [checked_name("site name", name).lower() for name in names]
    for name in names:
        if name.lower() == "server":  # `--renew server` means the server's certificate
            raise InputError(f"site name {name!r} is reserved: choose another")
        if lower.count(name.lower()) > 1:
            raise InputError(f"site {name!r} is named twice")
    return sorted(names)


def is_run_id(text: str) -> bool:
    """Whether a text is a run's id, and so the name of a folder at the server and at the sites."""
    return RUN.fullmatch(text) is not None


@dataclass(frozen=True)
class FederationOptions:
    """The `[federation]` section of server.toml."""

    name: str
    sites: tuple[str, ...]
    classes: tuple[str, ...]  # of all sites together; a label's number is its place in this list
    channels: int = 3  # of the images: 3, or 1 for grey images in .npz files
    multilabel: bool = False
    state: str = "state"  # the server's folder for its runs
    test: str = ""  # a labelled public test set at the server, for the global model

    def __post_init__(self) -> None:
        _check_federation("FederationOptions.name", self.name)
        if not check_sites(self.sites):
            raise ValueError("sites must name at least one site")
        twice = [name for name in self.classes if self.classes.count(name) > 1]
        if twice:
            raise ValueError(f"classes: {twice[0]!r} is there twice")
        if len(self.classes) < (1 if self.multilabel else 2):
            raise ValueError("classes must name the classes of all sites, at least two")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, not {self.channels}")


@dataclass(frozen=True)
class Rounds:
    """The `[rounds]` section of server.toml: how long a round waits, and which uploads it accepts."""

    min_sites: int = 2  # a round with fewer good uploads is tried again
    deadline_s: float = 600.0  # the end of a round; a fifth of it is kept for the guard
    hello_s: float = 60.0  # how long the sites may take to say who they are
    retries: int = 10  # how often a round with too few sites is tried again
    norm_bound: float = 100.0  # an upload may differ from the broadcast by this many times the broadcast's norm
    max_samples: int = 1_000_000  # with train.weighting=samples, a site that reports more is refused
    quarantine: int = 3  # rounds with a refused upload in a row after which a site is not asked for ten rounds; 0 never
    keep: int = 20  # checkpoints that stay, so that a run can go back that many rounds
    poll_s: float = 0.5  # how often to look for replies

    def __post_init__(self) -> None:
        whole = {"max_samples": 1, "min_sites": 1, "retries": 0, "quarantine": 0, "keep": 2}
        for name, least in whole.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("deadline_s", "hello_s", "norm_bound", "poll_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, not {getattr(self, name)}")


@dataclass(frozen=True)
class ServerSettings:
    """The content of server.toml."""

    federation: FederationOptions
    rounds: Rounds
    config: Config

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Reads `[federation]`, `[rounds]` and the sections of any run; paths are relative to the file's folder."""
        file = Path(path).expanduser().absolute()
        tables = read_toml(file, ADVICE)
        federation = section("federation", FederationOptions, tables.pop("federation", {}))
        rounds = section("rounds", Rounds, tables.pop("rounds", {}))
        federation = replace(
            federation,
            sites=tuple(sorted(federation.sites)),
            state=_absolute(federation.state or ".", file.parent),
            test=_absolute(federation.test, file.parent),
        )
        return cls(federation, rounds, _run_config(file, tables, len(federation.sites)))

    @property
    def random_backbone(self) -> bool:
        """Whether the frozen backbone was never trained."""
        trains = self.config.make_method().parts.trains
        return self.config.model.weights == "random" and trains not in ("full", "everything")

    def runs(self) -> Path:
        return Path(self.federation.state) / "runs"


def _run_config(file: Path, tables: dict[str, Any], sites: int) -> Config:
    """Builds the run's configuration; refuses settings that need data at the server."""
    preset = str(tables.pop("preset", "folder"))
    if preset not in presets():
        raise unknown("preset", preset, presets())
    for name, values in tables.items():
        if not isinstance(values, dict):
            raise InputError(f"{file}: [{name}] must be a section, not a value")
    no_data = "has no meaning at a server: the data are at the sites"
    for key in tables.get("data", {}):
        if key not in SHARED_DATA:
            raise InputError(f"{file}: DataOptions.{key} {no_data}")
    for name, key, is_word in (("model", "weights", WEIGHTS.__contains__), ("distill", "data", is_public_name)):
        path = tables.get(name, {}).get(key)
        if isinstance(path, str) and not is_word(path):
            tables[name][key] = _absolute(path, file.parent)
    tables.setdefault("train", {}).setdefault("aggregate", AGGREGATE)
    config = resolve(preset, {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()})
    code = code_named(config.as_dict())
    simulated = "works in simulations only"
    for wrong, why in (
        (config.distill.data == VALIDATION, f"Distill.data={VALIDATION} {no_data}"),
        (config.distill.guard == "server", "Distill.guard=server needs labelled data at the server: use clients"),
        (config.model.weights == "fedavg", f"ModelOptions.weights=fedavg {simulated}: use random, or name a file"),
        (config.drift.prior != "uniform", f"Drift.prior={config.drift.prior} {simulated}: a site sends no such counts"),
        (config.privacy.target, f"Privacy.target {simulated}: set Privacy.noise"),
        (config.privacy.deterministic and not UNSAFE_NOISE, f"Privacy.deterministic {simulated}: leave it out"),
        (config.train.cohort > sites, f"Train.cohort={config.train.cohort} but there are {sites} sites: lower it"),
        (code, f"{code} names a module to import: install it at every site as an entry point, and give that name"),
    ):
        if wrong:
            raise InputError(f"{file}: {why}")
    data = replace(config.data, name="folder", partition="site", root="")
    return replace(config, data=data, run=replace(config.run, shifts=False))  # shifts need the test images


def _absolute(path: str, folder: Path) -> str:
    """Returns a path that is relative to a folder as an absolute one; an empty one stays empty."""
    return str(folder / Path(path).expanduser()) if path else ""


@dataclass(frozen=True)
class SiteSettings:
    """The `[site]` section of site.toml."""

    federation: str
    name: str
    data: str  # class/image folders, a manifest, or a .npz file; the samples of other sites are skipped
    server: str = ""  # HOST:PORT
    state: str = "state"  # the folder for everything that never leaves the site
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = 0  # of torch; 0 is torch's own choice
    test: str = ""  # the shared public test set, if this site has it
    skip_bad: bool = False  # skip images that cannot be read
    site_column: str = "site"  # in a manifest that holds several sites
    score_digits: int = 1  # of the scores it reports, in percent; all digits would tell how many test images it has
    keep: int = 21  # rounds whose personal state and upload stay on the disk, so that a run can go back to them
    budget: float = (
        0.0  # its own privacy budget, ε over all runs; then it trains with differential privacy only; 0: none
    )
    delta: float = 1e-5  # δ of that ε; a smaller one of the server's counts instead
    methods: tuple[str, ...] = ()  # the methods this site takes part in; empty means all (MTL sends personal models)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is empty: fill it in, or give --name NAME")
        _check_federation("SiteSettings.federation", self.federation)
        check_sites([self.name])
        for method in self.methods:
            hyperparameters(method)  # refuses unknown names
        if self.threads < 0:
            raise ValueError(f"threads must not be negative, not {self.threads}")
        if self.keep < 3:
            raise ValueError(f"keep must be at least 3, not {self.keep}")
        if not 0 <= self.budget < math.inf or not 0 < self.delta < 1:
            raise ValueError(
                f"budget must not be negative and delta must be between 0 and 1: {self.budget}, {self.delta}"
            )
        if not 0 <= self.score_digits <= 15:
            raise ValueError(f"score_digits must be from 0 to 15, not {self.score_digits}")

    @property
    def flower(self) -> Path:
        """The folder of Flower's files at this site, with the site.toml that the ClientApp reads."""
        return Path(self.state) / "flower" / self.name

    @classmethod
    def read(cls, path: str | Path, **given: str | None) -> Self:
        """Reads site.toml; values that are given replace its own. Paths are relative to the file's folder."""
        file = Path(path).expanduser().absolute()
        tables = read_toml(file, ADVICE)
        table = tables.pop("site", {})
        if tables:
            raise unknown("section", next(iter(tables)), ["site"])
        if isinstance(table, dict):  # `section` refuses anything else
            table |= {key: value for key, value in given.items() if value}
        site: Self = section("site", cls, table)
        data, state, test = (_absolute(path, file.parent) for path in (site.data, site.state, site.test))
        return replace(site, data=data, state=state, test=test)

    def toml(self) -> str:
        return "[site]\n" + "".join(f"{key} = {toml_value(value)}\n" for key, value in asdict(self).items())


def code_named(config: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns the first key of a configuration whose value is `package.module:callable`; empty if there is none."""

    def named(table: str, key: str) -> bool:
        name = str(config[table][key])
        return names_code(name) if key == "backbone" else ":" in name  # a torchvision:NAME runs no chosen code

    keys = (("model", "backbone"), ("model", "adapter"), ("method", "name"), ("data", "name"))
    return next((f"{table}.{key}" for table, key in keys if named(table, key)), "")


@dataclass(frozen=True)
class Plan:
    """Everything that a site needs to know to do its part. It is the same for every site, and travels in every
    message, because Flower starts a new process per message."""

    federation: str
    classes: tuple[str, ...]
    channels: int
    multilabel: bool
    backbone: str  # sha256 of the frozen network's weights; a site that cannot make them is sent them
    config: Config = field(repr=False)

    @classmethod
    def of(cls, settings: ServerSettings, backbone: str) -> Self:
        """Makes the plan, without the server's own paths and its choice of device."""
        f, config = settings.federation, settings.config
        weights = config.model.weights if config.model.weights in BUILT_IN_WEIGHTS else "random"
        config = replace(
            config,
            model=replace(config.model, weights=weights),
            distill=replace(config.distill, data="none"),
            run=replace(config.run, device="auto"),
        )
        return cls(f.name, f.classes, f.channels, f.multilabel, backbone, config)

    def text(self) -> str:
        """Returns the plan as one line of JSON; equal plans give equal texts."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads what `text` wrote. Refuses values by which a server would make a site run code or open files."""
        try:
            values = json.loads(text)
            if code := code_named(values["config"]):  # before any import
                raise ValueError(f"{code} names a module to import, which a server may not choose at a site")
            plan: Self = section("plan", cls, {**values, "config": from_tables(values["config"])})
            config = plan.config
            if config.model.weights not in BUILT_IN_WEIGHTS or config.distill.data != "none" or config.data.root:
                raise ValueError("it names files or downloads, which a server may not choose at a site")
            if (config.privacy.deterministic and not UNSAFE_NOISE) or config.privacy.target:
                raise ValueError(
                    "its noise is not one that a site may add: it follows from a seed, or is not known yet"
                )
            if not SHA256.fullmatch(plan.backbone):
                raise ValueError("backbone is not a sha256")
        except (InputError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"the server's plan cannot be read ({error}): do server and site run the same version?"
            ) from error
        return plan

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The mean and the standard deviation per channel that the server and every site normalise with."""
        how = self.config.data.normalise
        if own := own_normalisation(self.config.model.backbone, len(self.classes), how):
            return own
        return IMAGENET if self.channels == 3 else GREY.get(how, GREY["data"])
