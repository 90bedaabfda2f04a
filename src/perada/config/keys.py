"""Reads configurations: a preset or TOML file, with settings laid over it. Only this room knows keys."""

import dataclasses
import difflib
import json
import re
import tomllib
import typing
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from ..adapters import Adapter, Bottleneck, Lora, Residual, adapter_of
from ..adapters import known as known_adapter
from ..adapters import name_of as adapter_name
from ..client.trainer import Train
from ..data import GIVEN, DataOptions, is_public_name
from ..errors import InputError, unknown
from ..fields import check_fields, coerce
from ..inputs import plain_file, user_path
from ..methods import REGISTRY, Method, check_name, hyperparameters, make_method
from ..models import WEIGHTS, known
from ..predict.drift import Drift
from ..privacy import Privacy
from ..runs.options import RunOptions
from ..server.distill import Distill

ADAPTERS: dict[str, tuple[Any, dict[str, str]]] = {  # the kinds with keys: their fields, and the keys of these
    "residual": (Residual, {"dropout": "dropout", "std": "adapter_std", "where": "where"}),
    "lora": (
        Lora,
        {**{n: n for n in ("rank", "alpha", "target_modules", "freeze_a")}, "dropout": "adapter_dropout"},
    ),
    "bottleneck": (Bottleneck, {"reduction": "reduction", "dropout": "adapter_dropout", "where": "where"}),
}


@dataclass(frozen=True)
class ModelOptions:
    """The `[model]` section."""

    backbone: str = "resnet18"
    weights: str = "random"  # a .safetensors or .pth file, package, embedded, torchvision, timm, fedavg or random
    head: str = ""  # name of the prediction layer; empty: the backbone's own, by default its last linear layer
    adapt_from: str = ""  # the first stage that is adapted, those before it stay frozen; auto: what the backbone says
    adapter: str = "residual"  # residual, lora, bottleneck, none, package.module:callable or an entry point
    where: str = ""  # regular expression for the layers with adapters (not for LoRA); empty: the kind's own rule
    dropout: float = 0.3
    adapter_std: float = 1e-4  # standard deviation of a new adapter's weights
    rank: int = 8  # of LoRA
    alpha: float = 16.0  # LoRA counts alpha/rank times
    target_modules: tuple[str, ...] | str = ()  # of LoRA: (ends of) names, a regular expression or all-linear
    freeze_a: bool = False  # whether LoRA's first matrix stays as it is drawn
    reduction: int = 16  # how many times narrower than its layer a bottleneck adapter is
    adapter_dropout: float = 0.0  # of LoRA and bottleneck adapters; residual adapters have `dropout`
    pretrain_rounds: int = 20  # of FedAvg, where weights = "fedavg",
    pretrain_lr: float = 0.01  # with this learning rate, whatever the method's own is

    def __post_init__(self) -> None:
        check_fields(self, {"dropout": 0, "adapter_std": 0, "pretrain_rounds": 1}, positive=("pretrain_lr",))
        if self.dropout >= 1:
            raise InputError(f"ModelOptions.dropout must be below 1, not {self.dropout}")
        if self.backbone != GIVEN:
            known(self.backbone)
        known_adapter(self.adapter)
        if self.adapter in ADAPTERS:
            self.strategy()  # which checks the options

    def strategy(self) -> Adapter | None:
        """Returns the adapter that these options describe."""
        if self.adapter not in ADAPTERS:
            return adapter_of(self.adapter)
        kind, keys = ADAPTERS[self.adapter]
        values = {name: getattr(self, key) for name, key in keys.items()}
        return kind(**{n: None if n == "where" and not v else v for n, v in values.items()})  # type: ignore[no-any-return]

    @staticmethod
    def of(adapter: Adapter | None) -> dict[str, Any]:
        """Returns the options that describe an adapter; the inverse of `strategy`."""
        name = adapter_name(adapter)
        _, keys = ADAPTERS.get(name, (None, {}))
        values = {key: getattr(adapter, field) for field, key in keys.items()}
        return {"adapter": name, **{k: "" if k == "where" and v is None else v for k, v in values.items()}}


@dataclass(frozen=True)
class Config:
    """All that a run folder says about how a run was made."""

    data: DataOptions = field(default_factory=DataOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    train: Train = field(default_factory=Train)
    method: dict[str, Any] = field(default_factory=lambda: {"name": "perada"})
    distill: Distill = field(default_factory=Distill)
    drift: Drift = field(default_factory=Drift)
    privacy: Privacy = field(default_factory=Privacy)
    run: RunOptions = field(default_factory=RunOptions)

    @property
    def method_name(self) -> str:
        return str(self.method["name"])

    def make_method(self) -> Method:
        return make_method(self.method_name, {k: v for k, v in self.method.items() if k != "name"})

    def as_dict(self) -> dict[str, dict[str, Any]]:
        out = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: dict(v) if isinstance(v, dict) else dataclasses.asdict(v) for k, v in out.items()}

    def flat(self) -> dict[str, Any]:
        """Returns `{"section.key": value}`."""
        return {f"{section}.{k}": v for section, values in self.as_dict().items() for k, v in values.items()}

    def toml(self) -> str:
        """Returns config.toml, with every key; training it again on such a machine reproduces the run.

        The section of privacy is left out where it says nothing, as in files of earlier versions.
        """
        return "\n".join(
            f"[{section}]\n" + "".join(f"{k} = {toml_value(v)}\n" for k, v in values.items())
            for section, values in self.as_dict().items()
            if section != "privacy" or self.privacy != Privacy()
        )


SECTIONS: dict[str, Any] = {
    "data": DataOptions,
    "model": ModelOptions,
    "train": Train,
    "distill": Distill,
    "drift": Drift,
    "privacy": Privacy,
    "run": RunOptions,
}
CLASSES = {
    **{kind.__name__: name for name, kind in SECTIONS.items()},
    "FederationOptions": "federation",
    "Residual": "model",
    "Lora": "model",
    "Bottleneck": "model",
    "Rounds": "rounds",
    "SiteSettings": "site",
}
_TOML = 1 << 20  # bytes of a TOML file
NAMED = re.compile(rf"\b({'|'.join(CLASSES)})\.([a-z]\w*)")


def in_keys(text: str) -> str:
    """Returns a message of the library with keys instead of classes: `Train.cohort` becomes `train.cohort`."""

    def key(match: re.Match[str]) -> str:
        _, keys = ADAPTERS.get(match[1].lower(), (None, {}))
        return f"{CLASSES[match[1]]}.{keys.get(match[2], match[2])}"

    return NAMED.sub(key, text)


def presets() -> dict[str, str]:
    """Returns the presets' names, each with a line about it."""
    files = sorted((resources.files(__package__) / "presets").iterdir(), key=lambda p: p.name)
    return {
        p.name.removesuffix(".toml"): str(tomllib.loads(p.read_text("utf8"))["description"])
        for p in files
        if p.name.endswith(".toml")
    }


def resolve(source: str = "digits", overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the configuration of a preset or TOML file with `overrides` laid over it. Paths become absolute.

    A file that begins with `preset = "digits"` says only what differs. `[methods.NAME]` has settings for one method
    (`train.lr = 0.01`); `perada tune` writes it.
    """
    tables = _tables(source)
    tables.pop("tune", None)
    special = tables.pop("methods", {})
    method = tables.get("method", {})
    chosen = (overrides or {}).get("method.name") or (method.get("name") if isinstance(method, dict) else None)
    for key, value in {**_flat(special, str(chosen or "perada"), source), **(overrides or {})}.items():
        section, dot, name = key.partition(".")
        if not dot:
            raise _unknown("", key, chosen if chosen in REGISTRY else "perada")
        table = tables.setdefault(section, {})
        if not isinstance(table, dict):
            raise InputError(f"{source}: [{section}] must be a section, not a value")
        table[name] = value
    config = from_tables(tables)
    for key in overrides or {}:  # in a preset a setting of another method is skipped, in an override it is an error
        if key.startswith("method.") and key.removeprefix("method.") not in config.method:
            owners = ", ".join(m for m in REGISTRY if key in _known_keys(m))
            raise InputError(f"unknown key {key!r} of {config.method_name}: that is a setting of {owners}")
    return config


def tune_grid(source: str) -> dict[str, list[Any]]:
    """Returns the `[tune]` section of a preset or file, such as `{"train.lr": [0.01, 0.05]}`."""
    grid = _flat({"tune": _tables(source).get("tune", {})}, "tune", source, check=False)
    for key, values in grid.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"{source}: [tune] {key} must be a list of values to try, not {values!r}")
    return grid


def _tables(source: str) -> dict[str, Any]:
    """Returns the sections of a preset or file, laid over those of the preset that it names."""
    tables = _read(source)
    tables.pop("description", None)
    if "preset" not in tables:
        return tables
    own, base = tables, str(tables.pop("preset"))
    if base not in presets():
        raise unknown("preset", base, presets())
    tables = _read(base)
    del tables["description"]
    for section, values in own.items():
        if not isinstance(values, dict):
            raise InputError(f"{source}: [{section}] must be a section, not a value")
        tables[section] = {**tables.get(section, {}), **values}
    return tables


def _flat(special: Any, name: str, source: str, check: bool = True) -> dict[str, Any]:
    """Returns `[methods.NAME]` as `{"section.key": value}`."""
    if not isinstance(special, dict):
        raise InputError(f"{source}: [methods] holds one section per method, such as [methods.ditto]")
    for other in special if check else ():
        check_name(other)
    sections = special.get(name, {})
    if not isinstance(sections, dict) or not all(isinstance(values, dict) for values in sections.values()):
        raise InputError(f"{source}: write settings for {name} as section.key = value, such as train.lr = 0.01")
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def parse_setting(text: str) -> tuple[str, Any]:
    """Returns the key and value of `section.key=value`; the value is TOML, or else plain text."""
    key, equals, value = text.partition("=")
    if not equals or not key.strip() or len(text.strip().splitlines()) > 1:
        raise InputError(f"--set {text!r}: write it as section.key=value")
    if value in ("True", "False"):  # Python's spelling
        return key.strip(), value == "True"
    if len(text) > _TOML:
        raise InputError(f"--set {key.strip()}: the value has {len(value):,} characters: write it in a TOML file")
    try:
        return key.strip(), tomllib.loads(f"v = {value}")["v"]
    except RecursionError as error:
        raise InputError(f"--set {key.strip()}: the value is nested too deeply") from error
    except ValueError:  # not TOML, or a number of thousands of digits
        pass
    try:
        return key.strip(), float(value) if value.isascii() else value  # `.5`, which is not TOML
    except ValueError:
        return key.strip(), value


def parse_grid(text: str) -> tuple[str, list[Any]]:
    """Returns the key and values of `section.key=a,b,c`."""
    key, equals, values = text.partition("=")
    parts = [v for v in values.strip("[] ").split(",") if v.strip()]
    if not equals or not key.strip() or not parts:
        raise InputError(f"--grid {text!r}: write it as section.key=value,value,...")
    return key.strip(), [parse_setting(f"{key}={v}")[1] for v in parts]


def _read(source: str) -> dict[str, Any]:
    known = presets()
    path = user_path(source)
    if source not in known and path.suffix != ".toml":
        if (path / "config.toml").is_file():
            raise InputError(f"{source} is a run folder: to go on with it, perada train --out {source} --resume")
        raise unknown("preset", source, known)
    return read_toml(resources.files(__package__) / "presets" / f"{source}.toml" if source in known else path)


def read_toml(path: Traversable, advice: str = "") -> dict[str, Any]:
    """Returns the content of a TOML file. advice: what to do if there is no such file."""
    if isinstance(path, Path):
        plain_file(path, _TOML)
    try:
        return tomllib.loads(path.read_text("utf8"))
    except FileNotFoundError as error:
        raise InputError(f"no such file: {path}{advice}") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:  # bad TOML, or bytes that are not text
        raise InputError(f"{path}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise InputError(f"{path}: not valid TOML: nested too deeply") from error


def section(name: str, kind: Any, values: Any) -> Any:
    """Returns a section of a TOML file as an object of the dataclass `kind`."""
    if not isinstance(values, dict):
        raise InputError(f"[{name}] must be a section, not a value")
    known = {f.name: f for f in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            raise unknown("key", f"{name}.{key}", [f"{name}.{k}" for k in known])
    missing = [k for k, f in known.items() if f.default is dataclasses.MISSING and k not in values]
    if missing:
        raise InputError(f"[{name}] needs {missing[0]} = ...")
    return _section(name, kind, values)


def _unknown(section: str, key: str, method: str) -> InputError:
    """Returns an error that suggests `train.lr` for `lr` and `optimizer.lr`, and `train` for `trian.lr`."""
    written, keys, sections = f"{section}.{key}".strip("."), _known_keys(method), [*SECTIONS, "method"]
    same = [k for k in keys if k.partition(".")[2] == key]
    same.sort(key=lambda k: not k.startswith(("train.", "run.")))  # the likelier ones first
    if same and not difflib.get_close_matches(section or key, sections, n=1, cutoff=0.8):
        return InputError(f"unknown key {written!r}: did you mean {'? Or '.join(map(repr, same))}?")
    return unknown("section", section, sections) if section else unknown("key", key, keys)


def _known_keys(method: str) -> list[str]:
    keys = [f"{s}.{f.name}" for s, kind in SECTIONS.items() for f in dataclasses.fields(kind)]
    return [*keys, "method.name", *(f"method.{k}" for k in hyperparameters(method))]


def from_tables(tables: Mapping[str, Any]) -> Config:
    """Returns the configuration that a file's sections describe; the inverse of `Config.as_dict`."""
    tables = dict(tables)
    method = tables.pop("method", {})
    if not isinstance(method, dict):
        raise InputError('[method] must be a section with a name, such as name = "perada"')
    method = dict(method)
    name = method.setdefault("name", "perada")
    if not isinstance(name, str):
        raise InputError(f"method.name must be text, not {name!r}")
    known = hyperparameters(name)
    for section, values in tables.items():
        if section in SECTIONS and not isinstance(values, dict):
            raise InputError(f"{section} is a section: write [{section}] above its keys, or {section}.key = value")
        if section not in SECTIONS:
            where = (section, next(iter(values), "")) if isinstance(values, dict) else ("", section)
            raise _unknown(*where, name)
        for key in values:
            if f"{section}.{key}" not in (keys := _known_keys(name)):
                raise unknown("key", f"{section}.{key}", keys)
    made = {s: _section(s, kind, tables.get(s, {})) for s, kind in SECTIONS.items()}
    made["data"] = replace(made["data"], root=_absolute(made["data"].root, ("",)))
    made["model"] = replace(made["model"], weights=_absolute(made["model"].weights, (*WEIGHTS, GIVEN)))
    public = made["distill"].data
    made["distill"] = replace(made["distill"], data=public if is_public_name(public) else _absolute(public, ()))
    settings = {k: v for k, v in method.items() if k != "name"}
    # A preset's setting for its own method is skipped for another; a setting that no method has is an error.
    for key in settings:
        if key not in known and not any(key in hyperparameters(m) for m in REGISTRY):
            raise unknown("key", f"method.{key}", _known_keys(name))
    typed = {k: coerce(v, known[k], f"method.{k}") for k, v in settings.items() if k in known}
    try:
        filled = make_method(name, typed)
    except ValueError as error:
        raise InputError(f"method.{error}") from error
    config = Config(method={"name": name, **{k: getattr(filled, k) for k in known}}, **made)
    for key, value in config.flat().items():
        if isinstance(value, str) and value.encode("utf8", "replace").decode() != value:
            raise InputError(f"{key}: {value!r} is not UTF-8, which settings files are: rename the file or folder")
    return config


def _absolute(value: str, names: Container[str]) -> str:
    """Returns an absolute path, or the value itself if it is one of the names with another meaning."""
    return value if value in names else str(user_path(value).absolute())


def _section(section: str, kind: Any, values: Mapping[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    typed = {k: coerce(v, hints[k], f"{section}.{k}") for k, v in values.items()}
    try:
        return kind(**typed)
    except InputError as error:  # which names the class
        raise InputError(in_keys(str(error))) from error
    except ValueError as error:  # which names the field alone
        raise InputError(f"{section}.{error}") from error


def toml_value(value: Any) -> str:
    """Returns a value as it is written in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml_value(v) for v in value) + "]"
    if value is None:
        raise TypeError("TOML has no null")
    # JSON writes strings as TOML does, except for surrogate pairs and one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
