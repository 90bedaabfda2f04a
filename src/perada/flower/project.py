"""The folder of a federation, and how `perada flower init` makes one.

app/pyproject.toml    the Flower app: it names PerAda's two components and holds no code
server.toml           what is trained, by whom, how long a round waits
site.toml             what a site fills in
certs.sh  certs/      keys and certificates
state/                everything made later: runs, Flower's database and logs, sites' models
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import presets, resolve, toml_value
from ..data.digits import digits
from ..errors import InputError, unknown
from ..runs.folder import replaced
from .address import PORT, Address
from .certs import check_sites
from .guards import COMPONENTS
from .settings import ServerSettings


@dataclass(frozen=True)
class Project:
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Project:
        """Opens a folder that `init` made."""
        project = cls(folder.expanduser().absolute())
        if not project.server_toml.is_file():
            raise InputError(f"{folder} has no server.toml: make a project with `perada flower init {folder}`")
        return project

    @property
    def app(self) -> Path:
        return self.folder / "app"

    @property
    def certs(self) -> Path:
        return self.folder / "certs"

    @property
    def server_toml(self) -> Path:
        return self.folder / "server.toml"

    def settings(self) -> ServerSettings:
        return ServerSettings.read(self.server_toml)

    def port(self) -> int:
        """Returns the port that sites dial, from site.toml; Flower's own if it names none."""
        try:
            server = tomllib.loads((self.folder / "site.toml").read_text("utf8"))["site"]["server"]
        except (OSError, ValueError, KeyError, TypeError):
            return PORT
        return Address.parse(str(server)).port

    def flower(self) -> Path:
        """Returns the folder of Flower's database, logs and configuration."""
        return Path(self.settings().federation.state) / "flower"


def init(
    folder: Path,
    name: str,
    sites: Sequence[str],
    server: Address,
    preset: str,
    classes: Sequence[str],
    settings: Mapping[str, Any],
) -> list[Path]:
    """Writes a project that is ready to run; returns its files. Refuses a folder that is not empty."""
    sites = check_sites(sites)
    if not sites:
        raise InputError("--sites: name at least one site, such as --sites north,south")
    if preset not in presets():
        raise unknown("preset", preset, presets())
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: choose another folder")
    resolve(preset, settings)  # refuses bad settings
    if not classes and preset != "digits":
        raise InputError("--classes: name the classes of all sites together, such as --classes cat,dog")
    files = {
        "app/pyproject.toml": app_file(name),
        "server.toml": _server_file(name, sites, preset, list(classes or digits().classes), settings),
        "site.toml": _site_file(name, server),
        "certs.sh": _certs_file(server, sites),
    }
    try:
        with replaced(folder) as part:
            (part / "app").mkdir()
            for file, text in files.items():
                (part / file).write_text(text, encoding="utf8")
            (part / "certs.sh").chmod(0o755)
            Project.open(part).settings()  # a project that cannot be read is not left behind
    except InputError as error:  # without the name of the temporary file
        raise InputError(str(error).replace(f"{part / 'server.toml'}: ", "")) from error
    except OSError as error:
        raise InputError(f"cannot write to {folder}: {error.strerror}") from error
    return [folder / file for file in files]


def app_file(name: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "federation"  # Flower allows no other letters
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


def _server_file(name: str, sites: Sequence[str], preset: str, classes: list[str], settings: Mapping[str, Any]) -> str:
    """Returns server.toml: the preset without its settings of local data, and the given settings."""
    small = preset == "digits"
    tables: dict[str, dict[str, Any]] = {"data": {"size": 8, "normalise": "data"}} if small else {}
    tables["train"] = {"cohort": 0} | ({"rounds": 10} if small else {})  # all sites in every round
    tables["run"] = {"lanes": 1} | ({"eval_every": 1} if small else {})  # a site trains its lanes one by one
    if preset == "folder":  # its own weights come from simulated pretraining
        tables["model"] = {"weights": "random"}
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        tables.setdefault(section, {})[rest] = value
    lines = "\n".join(
        f"[{section}]\n" + "".join(f"{k} = {toml_value(v)}\n" for k, v in values.items())
        for section, values in tables.items()
    )
    hint = "  # better a pretrained file next to this one: docs/deploy.md says how to make it"
    return f"""# What the federation trains. Keys are those of `perada train`; paths are relative to this file.
preset = {toml_value(preset)}

[federation]
name = {toml_value(name)}
sites = {toml_value(list(sites))}
classes = {toml_value(classes)}  # of all sites together
channels = 3  # 1 for grey images in .npz files
state = "state"
test = ""  # a labelled public test set at the server, if there is one

[rounds]
min_sites = {max(1, min(2, len(sites) - 1))}  # a round with fewer good uploads is tried again; all but one, at most 2
deadline_s = {120 if small else 3600}  # the round goes on without a site that is later
norm_bound = 100.0  # an upload that moved further than this many times the model's norm is refused

{lines}""".replace('\nweights = "random"\n', f'\nweights = "random"{hint}\n')


def _site_file(name: str, server: Address) -> str:
    return f"""# What a site fills in. Options of `perada flower site` replace it. Paths are relative to this file.
[site]
federation = {toml_value(name)}
server = {toml_value(str(server))}
name = ""  # as in server.toml
data = ""  # class/image.png folders, a manifest or a .npz file; it stays where it is
state = "state"  # your model and everything else that never leaves
device = "auto"
threads = 0  # 0: torch's own choice
score_digits = 1  # of the scores that you report, in percent; more digits tell how many test images you have
methods = []  # the methods that this site takes part in, such as ["perada"]; empty: whatever the server runs
"""


def _certs_file(server: Address, sites: Sequence[str]) -> str:
    """Returns certs.sh. For a trial on one machine it makes the sites' keys too."""
    keys = f" --sites {','.join(sites)}" if server.loopback else ""
    who = "All sites are on this machine, so it makes their keys too. Elsewhere each" if server.loopback else "Each"
    return f"""#!/bin/sh
# Makes an authority and the server's certificate in certs/, and overwrites nothing.
# Give a --server-name for every name and address that sites dial.
# {who} site makes its own key:
#   perada flower certs certs --keys-only --sites NAME      and sends certs/sites/NAME.pub to the server's certs/sites/
set -eu
cd "$(dirname "$0")"
exec perada flower certs certs --server-name {server.host}{keys} "$@"
"""
