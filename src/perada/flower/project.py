"""The folder of a federation: how `perada flower init` makes one, and the runs in it.

app/pyproject.toml    the Flower app: it names PerAda's two components and holds no code
server.toml           what is trained, by whom, how long a round waits
site.toml             what a site fills in
certs.sh  certs/      keys and certificates
state/                everything made later: runs, Flower's database and logs, sites' models
"""

import re
import shutil
import time
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import count
from pathlib import Path
from typing import Any, Self

from safetensors.torch import save

from ..config import resolve, toml_value
from ..data.digits import digits
from ..errors import Damaged, InputError, unknown
from ..runs.files import at_work, read_file, read_object, replaced, write_atomic
from ..runs.folder import RunFolder
from .address import PORT, Address
from .guards import COMPONENTS
from .quarantine import Quarantine
from .settings import BUILT_IN_WEIGHTS, ServerSettings, check_sites

TRIES = 5  # to copy a run


class Project:
    """A federation's folder at the server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.app, self.certs, self.server_toml = folder / "app", folder / "certs", folder / "server.toml"

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Opens a folder that `init` made."""
        project = cls(folder.expanduser().absolute())
        if not project.server_toml.is_file():
            raise InputError(f"{folder} has no server.toml: make a project with `perada flower init {folder}`")
        return project

    def settings(self) -> ServerSettings:
        return ServerSettings.read(self.server_toml)

    def port(self) -> int:
        """Returns the port that sites dial, from site.toml; Flower's own if it names none."""
        try:
            server = tomllib.loads(read_file(self.folder / "site.toml").decode("utf8"))["site"]["server"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            return PORT
        return Address.parse(str(server)).port

    def flower(self) -> Path:
        """Returns the folder of Flower's database, logs and configuration."""
        return Path(self.settings().federation.state) / "flower"

    def runs(self) -> dict[str, dict[str, Any]]:
        """Returns flower.json of every run, and its sites in quarantine, by the run's name, oldest first."""
        settings = self.settings()
        files = sorted(settings.runs().glob("*/flower.json"), key=lambda p: p.stat().st_mtime)
        return {p.parent.name: _about(p, settings.rounds.quarantine) for p in files}

    def run(self, name: str | None) -> Path:
        """Returns the folder of a run, by default of the newest."""
        known = self.runs()
        if not known:
            raise InputError(f"{self.folder} has no run yet: start one with `perada flower run`")
        if name is not None and name not in known:
            raise unknown("run", name, known)
        return self.settings().runs() / (name or list(known)[-1])

    def renew_app(self) -> None:
        """Writes the app's file again where an older version wrote it, which did not know `from-round`."""
        file = self.app / "pyproject.toml"
        if "from-round" not in file.read_text("utf8"):
            write_atomic(file, app_file(self.settings().federation.name).encode())

    def free_name(self) -> str:
        """Returns the first of run-1, run-2, ... that does not exist."""
        folder = self.settings().runs()
        return next(name for n in count(1) if not (folder / (name := f"run-{n}")).exists())

    def collect(self, name: str | None, out: Path) -> None:
        """Copies a run to a run folder, with the global adapter (or model) as one file in it.

        It has no personal models: those are at the sites (`perada flower export` there).
        """
        source = self.run(name)
        RunFolder.check(out, overwrite=False)
        if RunFolder(source).load()[0] is None:
            raise InputError(f"{source} has no finished round yet: wait for one")
        for attempt in range(TRIES):  # a run that trains writes and removes files meanwhile
            time.sleep(0.2 * attempt)
            try:
                with replaced(out) as part:
                    self._copy(source, part)
                return
            except (shutil.Error, FileNotFoundError) as error:
                of = error.args[0] if isinstance(error, shutil.Error) else ""
                why = str(of[0][2] if of and isinstance(of, list) else error.strerror or error)
            except Damaged as error:
                why = str(error).replace(str(part), str(source))
            except OSError as error:
                raise InputError(f"cannot write to {out}: {error.strerror}") from error
        raise InputError(f"cannot copy {source} to {out}: {why}; if it is training, try again or wait for its end")

    def _copy(self, source: Path, part: Path) -> None:
        """Copies a run, and reads the copy: its files must be of one moment."""
        shutil.copytree(source, part, ignore=shutil.ignore_patterns("*.part"), dirs_exist_ok=True)
        copy = RunFolder.open(part)
        copy.metrics()
        try:
            checkpoint, _ = copy.load()
        except InputError as error:
            raise Damaged(str(error)) from error
        if checkpoint is None:
            raise Damaged(f"{part} has no checkpoint")
        sent = checkpoint.broadcast
        self._save_backbone(copy)
        tensors = {n: t[0].contiguous() for kind in (sent.params, sent.buffers) for n, t in kind.items()}
        about = {"round": str(checkpoint.round), "federation": self.settings().federation.name}
        write_atomic(part / "global.safetensors", save(tensors, about))

    def _save_backbone(self, copy: RunFolder) -> None:
        """Adds the frozen weights, if they are a file at the server that no other machine has."""
        config = resolve(str(copy.path / "config.toml"))
        if config.model.weights in BUILT_IN_WEIGHTS:
            return
        from .client import backbone_state, planned_network  # these load Flower

        network = planned_network(config, len(self.settings().federation.classes))
        network.load(config.model.weights)
        copy.save_backbone({n: t[0] for n, t in backbone_state(network.net).params.items()})


def _about(file: Path, after: int) -> dict[str, Any]:
    """Returns flower.json; a run that says it is running while no process works on it was stopped."""
    quarantine = Quarantine(after)
    try:
        about = read_object(file, {"status": str, "round": int, "rounds": int}, "")
        quarantine.load(about.get("quarantine", {}), str(file))
    except (Damaged, OSError):
        return {"status": "damaged", "round": "?", "rounds": "?", "error": f"cannot read {file}", "in_quarantine": []}
    about["in_quarantine"] = sorted(site for site in quarantine.refused if quarantine.holds(site, about["round"]))
    if about["status"] == "running" and not at_work(file.parent):
        about["status"] = "stopped"
    return about


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
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not empty: choose another folder")
    resolve(preset, settings)  # refuses an unknown preset and bad settings
    if not classes and preset != "digits":
        raise InputError("--classes: name the classes of all sites together, such as --classes cat,dog")
    labels = list(classes or digits().classes)
    tables = _run_tables(preset, settings)
    about = {"name": name, "sites": sites, "server": server, "preset": preset, "classes": labels, "tables": tables}
    files = {
        "app/pyproject.toml": app_file(name),
        **{file: _filled(file, **about) for file in ("server.toml", "site.toml", "certs.sh")},
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
    """Returns pyproject.toml of the Flower app."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower() or "federation"  # Flower allows no other letters
    return _filled("app.toml", name=plain, components=COMPONENTS)


def _run_tables(preset: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the sections that a run of the preset needs in server.toml, with the given settings."""
    small = preset == "digits"
    tables: dict[str, dict[str, Any]] = {"data": {"size": 8, "normalise": "data"}} if small else {}
    tables["train"] = {"cohort": 0} | ({"rounds": 10} if small else {})  # all sites in every round
    tables["run"] = {"lanes": 1} | ({"eval_every": 1} if small else {})  # a site trains its lanes one by one
    if preset == "folder-fedavg":  # its own weights come from simulated pretraining
        tables["model"] = {"weights": "random"}
    for key, value in settings.items():
        section, _, rest = key.partition(".")
        tables.setdefault(section, {})[rest] = value
    return tables


def _filled(file: str, **values: Any) -> str:
    """Returns a file of `project_files` with these values in it."""
    from jinja2 import Environment, StrictUndefined  # here, not above: only `init` needs it

    environment = Environment(undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    environment.filters["toml"] = toml_value
    text = (resources.files(__package__) / "project_files" / file).read_text("utf8")
    return environment.from_string(text).render(values)
