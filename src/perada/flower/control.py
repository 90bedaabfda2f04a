"""Flower's commands to its SuperLink (`flwr ...`), as calls: which keys are let in, runs, what there is."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import toml_value
from ..errors import InputError, RunError
from ..runs.folder import write_atomic
from .address import Address, NoAnswer, probe
from .processes import environment, program

CALL_S = 60.0  # the most that one of Flower's commands takes
LINK = "federation"  # the connection's name in Flower's configuration file


@dataclass(frozen=True)
class Control:
    """A SuperLink of this machine, by the folder that it keeps its things in."""

    home: Path

    @property
    def nodes_file(self) -> Path:
        """{node id: site}: the ServerApp knows by it whose key a message was signed with."""
        return self.home / "nodes.json"

    @property
    def server_file(self) -> Path:
        return self.home / "server.json"

    @classmethod
    def write(cls, home: Path, address: Address, ca: Path | None) -> Control:
        """Flower's own configuration file, and ours for `run` and `status`."""
        secure = f"root-certificates = {toml_value(str(ca))}\n" if ca else "insecure = true\n"
        where = toml_value(str(address.from_here))
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = {where}\n{secure}'
        write_atomic(home / "config.toml", text.encode())
        found, held = cls(home), {"address": str(address.from_here), "ca": str(ca) if ca else None}
        write_atomic(found.server_file, json.dumps(held).encode())
        if ca is None:
            found.nodes_file.unlink(missing_ok=True)
        return found

    @classmethod
    def open(cls, home: Path) -> Control:
        """The server that runs for a project, if one does."""
        found = cls(home)
        try:
            if found.server_file.is_file():
                held = json.loads(found.server_file.read_text())
                probe(Address.parse(held["address"]), Path(held["ca"]) if held["ca"] else None)
                return found
        except NoAnswer:  # killed outright
            pass
        raise InputError(f"no server runs for {home.parent.parent}: start one with `perada flower server`")

    def gone(self) -> None:
        """The server ended in peace."""
        self.server_file.unlink(missing_ok=True)

    @property
    def address(self) -> Address:
        return Address.parse(json.loads(self.server_file.read_text())["address"])

    def call(self, *words: str) -> dict[str, Any]:
        """`flwr WORDS --format json`; its answer, or RunError with its own reason."""
        done = self._flwr(*words, "--format", "json")
        try:
            found: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            found = {}
        if done.returncode == 0 and found.get("success", True):
            return found
        why = str(found.get("error-message") or done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"flwr {words[0]}: {why[-1].strip() if why else f'code {done.returncode}'}")

    def _flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, env = [program("flwr"), *words], environment(self.home)
        try:
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=CALL_S)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"flwr {words[0]}: no answer within {CALL_S:g} s") from error

    def nodes(self) -> dict[str, dict[str, Any]]:
        """What the SuperLink says of each registered node, by its id. It lists those that were unregistered, too, and
        would not unregister them again."""
        found = self.call("supernode", "list", LINK).get("nodes", [])
        return {str(n["node-id"]): n for n in found if n["status"] != "unregistered"}

    def sites(self) -> dict[str, str]:
        """{node id: site} as last admitted."""
        return json.loads(self.nodes_file.read_text()) if self.nodes_file.is_file() else {}

    def admit(self, keys: Mapping[str, bytes], spared: Collection[str] = ()) -> list[str]:
        """Register these sites' keys and unregister all others, less those of `spared` sites (Flower never takes back a
        key that was unregistered); a line about each change. What was done is written down also where the next step
        fails, so that another try goes on from there."""
        prints_file, copy = self.home / "keys.json", self.home / "key.pub"
        prints: dict[str, str] = json.loads(prints_file.read_text()) if prints_file.is_file() else {}
        wanted = {name: hashlib.sha256(data).hexdigest() for name, data in keys.items()}
        there = self.nodes()
        known = {node: site for node, site in self.sites().items() if node in there}
        lines = []
        try:
            for node in there:
                site = known.get(node)
                if site is not None and (site in spared or wanted.get(site) == prints.get(node)):
                    continue
                self.call("supernode", "unregister", node, LINK)
                known.pop(node, None)
                lines.append(f"the key of {site or f'node {node}'} is no longer let in")
            for site in sorted(wanted.keys() - set(known.values())):
                write_atomic(copy, keys[site])  # the very bytes that were looked at, whatever the file is by now
                try:
                    node = str(self.call("supernode", "register", str(copy), LINK, "--name", site)["node-id"])
                except RunError as error:  # for good, but the others' keys are as good as before
                    if "in use" not in str(error):
                        raise
                    lines.append(f"warning: the key of {site} is not let in ({error}); a new one may: --renew {site}")
                    continue
                known[node], prints[node] = site, wanted[site]
                lines.append(f"the key of {site} is let in")
        finally:
            copy.unlink(missing_ok=True)
            write_atomic(prints_file, json.dumps({n: prints[n] for n in known if n in prints}, indent=1).encode())
            write_atomic(self.nodes_file, json.dumps(known, indent=1).encode())
        return lines

    def start(self, app: Path, run: str, resume: bool, after: str) -> str:
        """Start a run of the app; its number at Flower."""
        config = f"run={toml_value(run)} resume={'true' if resume else 'false'} continue-from={toml_value(after)}"
        return str(self.call("run", str(app), LINK, "--run-config", config)["run-id"])

    def run_status(self, number: str) -> str:
        """`pending`, `running`, `finished:completed`, `finished:failed`, ..."""
        found = self.call("list", LINK, "--run-id", number).get("runs", [])
        return str(found[0]["status"]) if found else "unknown"

    def complaint(self, number: str) -> str:
        """The last `error: ...` in a run's log; Flower shows nothing of it by itself."""
        done = self._flwr("log", number, LINK, "--show")
        found = re.findall(r"\berror: (.+)", done.stdout + done.stderr)
        return found[-1].strip() if found else ""

    def stop(self, number: str) -> None:
        self.call("stop", number, LINK)
