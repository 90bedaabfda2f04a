"""A federation's folder: where things are in it, and how `perada flower init` makes one.

app/pyproject.toml    the Flower app: it names PerAda's two components and holds no code
server.toml           what is trained, by whom, how long a round waits
site.toml             what a site's people fill in
certs.sh  certs/      keys and certificates
state/                what comes into being: runs, Flower's own database and logs, sites' models
"""

from __future__ import annotations

import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import presets, resolve, toml_value
from ..data.digits import digits
from ..errors import InputError, unknown
from .address import PORT, Address
from .certs import check_sites
from .settings import ServerSettings
from .wrapped import COMPONENTS


@dataclass(frozen=True)
class Project:
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Project:
        """A folder that `init` made."""
        found = cls(folder.expanduser().absolute())
        if not found.server_toml.is_file():
            raise InputError(f"{folder} has no server.toml: make a project with `perada flower init {folder}`")
        return found

    @property
    def app(self) -> Path:
        return self.folder / "app"

    @property
    def certs(self) -> Path:
        return self.folder / "certs"

    @property
    def server_toml(self) -> Path:
        return self.folder / "server.toml"

    @property
    def site_toml(self) -> Path:
        return self.folder / "site.toml"

    def settings(self) -> ServerSettings:
        return ServerSettings.read(self.server_toml)

    def port(self) -> int:
        """What sites dial, by site.toml; Flower's own number where that is not there."""
        try:
            server = tomllib.loads(self.site_toml.read_text("utf8"))["site"]["server"]
        except (OSError, ValueError, KeyError, TypeError):
            return PORT
        return Address.parse(str(server)).port

    def flower(self) -> Path:
        """Where Flower's database, logs and configuration are."""
        return Path(self.settings().federation.state) / "flower"


def init(
    folder: Path,
    name: str,
    sites: Sequence[str],
    server: Address,
    preset: str,
    classes: Sequence[str],
    method: str | None,
    settings: Mapping[str, Any],
) -> list[Path]:
    """Write a project that runs as it is; returns the files. Refuses a folder that has anything in it."""
    check_federation(name)
    sites = check_sites(sites)
    if not sites:
        raise InputError("--sites: name at least one site, such as --sites north,south")
    if preset not in presets():
        raise unknown("preset", preset, presets())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: choose another folder")
    overrides = dict(settings) | ({"method.name": method} if method else {})
    resolve(preset, overrides)  # says now what is wrong with them
    files = {
        "app/pyproject.toml": _app(name),
        "server.toml": _server(name, sites, preset, list(classes) or _classes(preset), overrides),
        "site.toml": _site(name, server),
        "certs.sh": _certs(server, sites),
    }
    part = folder.with_name(f".{folder.name}.part")
    try:
        shutil.rmtree(part, ignore_errors=True)
        (part / "app").mkdir(parents=True)
        for file, text in files.items():
            (part / file).write_text(text, encoding="utf8")
        (part / "certs.sh").chmod(0o755)
        Project.open(part).settings()  # what cannot be read is not left behind
        if folder.exists():
            folder.rmdir()
        part.rename(folder)
    except InputError as error:  # it speaks of a file that nobody will see
        raise InputError(str(error).replace(f"{part / 'server.toml'}: ", "")) from error
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return [folder / file for file in files]


def check_federation(name: str) -> None:
    """A federation's name is a folder beside these."""
    if name.lower() in ("flower", "runs"):
        raise InputError(f"federation name {name!r} is that of a folder in state/: choose another")


def _classes(preset: str) -> list[str]:
    if preset == "digits":
        return list(digits().classes)
    raise InputError("--classes: name the classes of all sites together, such as --classes cat,dog")


def _app(name: str) -> str:
    """Flower wants an app's name in letters, digits and hyphens."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "federation"
    return f"""# The Flower app of this federation. It holds no code: sites run the PerAda that is installed there.
[project]
name = "perada-{plain}"
version = "1.0.0"
description = "PerAda over Flower"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "perada"

[tool.flwr.app.components]
serverapp = "{COMPONENTS["serverapp"]}"
clientapp = "{COMPONENTS["clientapp"]}"

[tool.flwr.app.config]
run = "run"
resume = false
continue-from = ""
"""


RANDOM = "  # better a pretrained file, beside this one: docs/deploy.md says how to make one"


def _server(name: str, sites: Sequence[str], preset: str, classes: list[str], overrides: Mapping[str, Any]) -> str:
    """The preset less what it says about data at hand, then what was asked for."""
    small = preset == "digits"
    base = {"data.size": 8, "data.normalise": "data"} if small else {}
    base |= {"train.cohort": 0, "run.lanes": 1}  # all sites in every round; a site trains its own lanes one by one
    base |= {"train.rounds": 10, "run.eval_every": 1} if small else {}
    if preset == "folder":  # which pretrains on the clients' images
        base["model.weights"] = "random"
    sections: dict[str, dict[str, Any]] = {}
    for key, value in {**base, **overrides}.items():
        section, _, rest = key.partition(".")
        sections.setdefault(section, {})[rest] = value
    said = {("model", "weights"): RANDOM} if {**base, **overrides}.get("model.weights") == "random" else {}
    told = "\n".join(
        f"[{section}]\n" + "".join(f"{k} = {toml_value(v)}{said.get((section, k), '')}\n" for k, v in values.items())
        for section, values in sections.items()
    )
    return f"""# What the federation trains. Keys are those of `perada train`; paths are relative to this file.
preset = {toml_value(preset)}

[federation]
name = {toml_value(name)}
sites = {toml_value(list(sites))}
classes = {toml_value(classes)}  # of all sites together
channels = {3}  # 1 for grey images in .npz files
state = "state"
test = ""  # a labelled public test set at the server, if there is one

[rounds]
min_sites = {max(1, min(2, len(sites) - 1))}  # a round with fewer good uploads is tried again; all but one, at most 2
deadline_s = {120 if small else 3600}  # a site that is later is left out of the round
norm_bound = 100.0  # an upload that moved further than this many times the model's norm is refused

{told}"""


def _site(name: str, server: Address) -> str:
    return f"""# What a site's people fill in; `perada flower site` may say it, too. Paths are relative to this file.
[site]
federation = {toml_value(name)}
server = {toml_value(str(server))}
name = ""  # as in server.toml
data = ""  # class/image.png folders, a manifest or a .npz file; it stays where it is
state = "state"  # your model and everything else that never leaves
device = "auto"
threads = 0  # 0: torch's own choice
score_digits = 1  # of the scores that you tell, in percent; more of them tell how many test images you have
methods = []  # those that this site takes part in, such as ["perada"]; none named: whatever the server runs
"""


def _certs(server: Address, sites: Sequence[str]) -> str:
    return f"""#!/bin/sh
# An authority, the server's certificate and a key pair for each site, in certs/. Nothing is overwritten.
# A --server-name for every name and address that sites dial. A site that would rather make its own key:
#   perada flower certs certs --keys-only --sites NAME      and sends certs/sites/NAME.pub to the server's certs/sites/
set -eu
cd "$(dirname "$0")"
exec perada flower certs certs --server-name {server.host} --sites {",".join(sites)} "$@"
"""
