"""Presets, TOML files and --set: everything becomes one checked Config, or one clear error."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest

from perada.config import Config, parse_setting, presets, resolve
from perada.errors import InputError
from perada.methods import REGISTRY, hyperparameters


@pytest.mark.parametrize("name", presets())
@pytest.mark.parametrize("method", REGISTRY)
def test_every_preset_resolves_with_every_method_and_survives_its_own_toml(
    name: str, method: str, tmp_path: Path
) -> None:
    config = resolve(name, {"method.name": method})
    assert config.method_name == method
    path = tmp_path / "config.toml"
    path.write_text(config.toml())
    assert resolve(str(path)) == config
    assert config.make_method() == resolve(str(path)).make_method()


def test_presets_have_a_line_each() -> None:
    found = presets()
    assert {"digits", "folder"} <= found.keys()
    assert all(text and "\n" not in text for text in found.values())


def test_a_resolved_config_names_every_setting() -> None:
    """What a run folder says must not depend on the defaults of a later version."""
    config = resolve("digits")
    written = tomllib.loads(config.toml())
    for section in ("data", "model", "train", "distill", "run"):
        assert written[section].keys() == {f.name for f in dataclasses.fields(getattr(config, section))}
    assert written["method"].keys() == {"name", *hyperparameters("perada")}


AWKWARD = [
    "",
    "a b",
    'quote"d',
    "back\\slash",
    "tab\there",
    "ü",
    "日本",
    "emoji-😀",
    "\x7f",
    "new\nline",
    "'",
    "#",
    "[x]",
]


@pytest.mark.parametrize("text", AWKWARD, ids=ascii)
def test_any_text_survives_the_toml(text: str, tmp_path: Path) -> None:
    config = resolve("digits", {"model.weights": text})
    path = tmp_path / "config.toml"
    path.write_text(config.toml(), "utf8")
    assert resolve(str(path)) == config


@pytest.mark.parametrize("number", [1e-5, 1e-30, 1e22, 0.1, 1 / 3, 123456789.0, 5e-324, 1.7e308])
def test_any_number_survives_the_toml(number: float, tmp_path: Path) -> None:
    config = resolve("digits", {"train.lr": number, "run.seed": 2**53 + 1, "distill.candidates": [1, 2, 3]})
    path = tmp_path / "config.toml"
    path.write_text(config.toml())
    assert resolve(str(path)) == config


def test_overrides_lie_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[train]\nrounds = 7\nlr = 1\n[method]\nname = 'perada'\nlam = 0.25\n")
    config = resolve(str(path), {"train.lr": 0.5, "distill.candidates": [3, 4]})
    assert (config.train.rounds, config.train.lr, config.train.batch) == (7, 0.5, 64)
    assert config.method["lam"] == 0.25
    assert config.distill.candidates == (3, 4)
    assert isinstance(resolve(str(path)).train.lr, float), "a whole number serves as a float"


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("")
    assert resolve(str(path)) == Config(method={"name": "perada", "lam": 1.0, "personal_epochs": 0, "personal_lr": 0.0})


def test_an_override_does_not_stick_to_a_preset() -> None:
    before = resolve("digits")
    assert resolve("digits", {"train.rounds": 3}).train.rounds == 3
    assert resolve("digits") == before


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("train.rounds=3", "train.rounds", 3),
        ("train.lr=1e-3", "train.lr", 1e-3),
        ("train.lr=.5", "train.lr", 0.5),
        ("run.shifts=true", "run.shifts", True),
        ("run.shifts=True", "run.shifts", True),
        ("run.shifts=False", "run.shifts", False),
        ("distill.candidates=[1, 2]", "distill.candidates", [1, 2]),
        ("distill.candidates=[]", "distill.candidates", []),
        ("distill.guard=none", "distill.guard", "none"),
        ('distill.guard="none"', "distill.guard", "none"),
        ("data.root=/a/b=c d", "data.root", "/a/b=c d"),
        ("model.weights=file.safetensors", "model.weights", "file.safetensors"),
        (" train.rounds = 3", "train.rounds", 3),
        ("data.root=", "data.root", ""),
    ],
)
def test_settings_from_the_command_line(text: str, key: str, value: Any) -> None:
    assert parse_setting(text) == (key, value)


@pytest.mark.parametrize("text", ["train.rounds", "=3", " =3", "", "train.rounds=1\n[run]", "train.rounds=1\nseed=2"])
def test_a_setting_must_be_a_key_and_a_value(text: str) -> None:
    with pytest.raises(InputError, match=r"section\.key=value"):
        parse_setting(text)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.round": 3}, r"unknown key 'train.round': did you mean 'train.rounds'\?"),
        ({"trian.rounds": 3}, r"unknown section 'trian': did you mean 'train'\?"),
        ({"method.name": "perda"}, r"unknown method 'perda': did you mean 'perada'\?"),
        ({"method.lamda": 1.0}, r"did you mean 'method.lam'\?"),
        ({"method.zzz": 1.0}, "unknown key 'method.zzz'"),
        ({"rounds": 3}, r"did you mean 'train.rounds'\? Or 'distill.rounds'\?"),
        ({"lr": 0.1}, r"unknown key 'lr': did you mean 'train.lr'\? Or 'distill.lr'\?"),
        ({"lam": 0.1}, r"unknown key 'lam': did you mean 'method.lam'\?"),
        ({"method.name": "fedprox", "mu": 0.1}, r"unknown key 'mu': did you mean 'method.mu'\?"),
        ({"seed": 1}, r"unknown key 'seed': did you mean 'run.seed'\? Or 'data.seed'\?"),
        ({"optimizer.lr": 0.1}, r"unknown key 'optimizer.lr': did you mean 'train.lr'\? Or 'distill.lr'\?"),
        ({"optimizer.kind": "adam"}, r"unknown section 'optimizer': known: "),
        ({"distill.guard": "servers"}, "distill.guard must be one of none, server, clients, not 'servers'"),
        ({"train.rounds": "3"}, "train.rounds must be a whole number, not '3'"),
        ({"train.rounds": True}, "train.rounds must be a whole number"),
        ({"train.lr": True}, "train.lr must be a number"),
        ({"train.lr": None}, "train.lr must be a number"),
        ({"data.cap": 1}, "data.cap must be true or false"),
        ({"distill.candidates": [1.5]}, "distill.candidates must be a whole number"),
        ({"distill.candidates": "5"}, "distill.candidates must be a list"),
        ({"method.lam": "x"}, "method.lam must be a number"),
        ({"method.personal_epochs": 1.5}, "method.personal_epochs must be a whole number"),
        ({"train.lr": float("nan")}, "train.lr must be .*number, not nan"),
        ({"train.lr": float("inf")}, "train.lr"),
        ({"method.lam": float("inf")}, "method.lam"),
        ({"data.alpha": float("inf")}, "data.alpha"),
        ({"distill.temperature": 0}, "distill.temperature must be above 0"),
        ({"run.lanes": -1}, "run.lanes must be at least 0"),
        ({"run.eval_every": 0}, "run.eval_every must be at least 1"),
        ({"model.dropout": -0.1}, "model.dropout"),
        ({"model.pretrain_rounds": 0}, "model.pretrain_rounds"),
        ({"train.clip": -1.0}, "train.clip must be at least 0"),
        ({"data.size": 4}, "data.size"),
        ({"data.val": -0.1}, "data.val"),
        ({"model.weights": "/sites/\udcff"}, r"model.weights: '/sites/\\udcff' is not UTF-8, .* rename"),
    ],
)
def test_a_bad_setting_is_named_with_what_it_should_be(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve("digits", overrides)


def test_another_methods_settings_in_a_preset_are_passed_over() -> None:
    """`perada train digits --method fedavg` must not trip over the preset's λ."""
    config = resolve("digits", {"method.name": "fedavg"})
    assert config.method == {"name": "fedavg"}


@pytest.mark.parametrize("text", ["[train\n", "a = b", "train.lr = 1\n[train]\nlr = 2\n"])
def test_a_file_that_is_no_toml_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=r"mine\.toml: not valid TOML"):
        resolve(str(path))


def test_a_run_folder_is_no_preset(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    with pytest.raises(InputError, match=f"--out {tmp_path} --resume"):
        resolve(str(tmp_path), {})


def test_a_config_is_frozen() -> None:
    config = resolve("digits")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.lr = 1.0  # type: ignore[misc]


def test_a_file_may_build_on_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "digits"\n[train]\nrounds = 7\n[method]\nname = "fedavg"\n')
    assert resolve(str(path)) == resolve("digits", {"train.rounds": 7, "method.name": "fedavg"})
    path.write_text('preset = "digit"\n')
    with pytest.raises(InputError, match="did you mean 'digits'"):
        resolve(str(path))
    path.write_text('preset = "digits"\ntrain = 3\n')
    with pytest.raises(InputError, match="must be a section"):
        resolve(str(path))


def test_a_setting_of_another_method_names_its_owners() -> None:
    with pytest.raises(InputError, match=r"unknown key 'method.mu' of perada: that is a setting of .*fedprox"):
        resolve("digits", {"method.mu": 1.0})


def test_a_section_that_is_a_value_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("train = 3\n")
    with pytest.raises(InputError, match=r"^train is a section: write \[train\] above its keys"):
        resolve(str(tmp_path / "x.toml"))
