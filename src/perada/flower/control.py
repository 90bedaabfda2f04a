"""Flower's own commands to its SuperLink (`flwr ...`) as calls: admit keys; start, follow and stop runs; list nodes."""

import hashlib
import json
import re
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Self

from ..config import toml_value
from ..errors import InputError, RunError
from ..inputs import one_line, printable
from ..runs.files import write_atomic
from ..runs.folder import RunFolder
from .address import Address, NoAnswer, probe
from .processes import environment, program

CALL_S = 60.0  # the longest that one of Flower's commands may take
LINK = "federation"  # the connection's name in Flower's configuration file
LOOK_S = 0.5  # seconds between two looks at the files of a run
ASK_S = 10.0  # seconds between two questions to Flower whether the run still runs
SOON_S = 2.0  # the same if flower.json says that it failed, which an earlier try of the run may have written


class Control:
    """A SuperLink on this machine, known by the folder of its files."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.server_file = home / "server.json"  # its address and authority
        self.nodes_file = home / "nodes.json"  # {node id: site}; by it the ServerApp knows whose key signed a message

    @classmethod
    def write(cls, home: Path, address: Address, ca: Path | None) -> Self:
        """Writes Flower's configuration file, and ours for `run` and `status`."""
        control, server = cls(home), str(address.local)
        security = f"root-certificates = {toml_value(str(ca))}\n" if ca else "insecure = true\n"
        text = f'[superlink]\ndefault = "{LINK}"\n\n[superlink.{LINK}]\naddress = {toml_value(server)}\n{security}'
        write_atomic(home / "config.toml", text.encode())
        write_atomic(control.server_file, json.dumps({"address": server, "ca": str(ca) if ca else None}).encode())
        if ca is None:
            control.nodes_file.unlink(missing_ok=True)
        return control

    @classmethod
    def open(cls, home: Path) -> Self:
        """Returns the control of the server that runs in a project; InputError if none does."""
        control = cls(home)
        try:
            if control.server_file.is_file():
                server = json.loads(control.server_file.read_text())
                probe(Address.parse(server["address"]), Path(server["ca"]) if server["ca"] else None)
                return control
        except NoAnswer:  # it was killed
            pass
        raise InputError(f"no server runs for {home.parent.parent}: start one with `perada flower server`")

    @property
    def address(self) -> Address:
        return Address.parse(json.loads(self.server_file.read_text())["address"])

    def call(self, *words: str) -> dict[str, Any]:
        """Runs `flwr WORDS --format json`; returns its answer, or raises RunError with Flower's reason."""
        done = self._flwr(*words, "--format", "json")
        try:
            answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            answer = {}
        if done.returncode == 0 and answer.get("success", True):
            return answer
        why = str(answer.get("error-message") or done.stderr or done.stdout).strip().splitlines()
        raise RunError(f"flwr {words[0]}: {one_line(why[-1]) if why else f'code {done.returncode}'}")

    def _flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        command, env = [program("flwr"), *words], environment(self.home)
        try:
            return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=CALL_S)
        except subprocess.TimeoutExpired as error:
            raise RunError(f"flwr {words[0]}: no answer within {CALL_S:g} s") from error

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Returns what the SuperLink says about each registered node, by its id."""
        listed = self.call("supernode", "list", LINK).get("nodes", [])
        return {str(n["node-id"]): n for n in listed if n["status"] != "unregistered"}  # Flower lists those, too

    def sites(self) -> dict[str, str]:
        """Returns {node id: site} as last admitted."""
        return json.loads(self.nodes_file.read_text()) if self.nodes_file.is_file() else {}

    def admit(self, keys: Mapping[str, bytes], keep: Collection[str] = ()) -> list[str]:
        """Registers these sites' keys and unregisters all others; returns a line per change.

        The keys of the sites in `keep` stay: Flower never accepts a key again that was unregistered. If a step fails,
        the steps before it are on record, and the next call continues from there.
        """
        hashes_file = self.home / "keys.json"
        hashes: dict[str, str] = json.loads(hashes_file.read_text()) if hashes_file.is_file() else {}
        wanted = {site: hashlib.sha256(data).hexdigest() for site, data in keys.items()}
        nodes = self.nodes()
        admitted = {node: site for node, site in self.sites().items() if node in nodes}
        lines = []
        try:
            for node in nodes:
                site = admitted.get(node)
                if site is not None and (site in keep or wanted.get(site) == hashes.get(node)):
                    continue
                self.call("supernode", "unregister", node, LINK)
                admitted.pop(node, None)
                lines.append(f"the key of {site or f'node {node}'} is no longer admitted")
            for site in sorted(wanted.keys() - set(admitted.values())):
                try:
                    node = self._register(site, keys[site])
                except RunError as error:
                    if "in use" not in str(error):
                        raise
                    lines.append(
                        f"warning: the key of {site} is not admitted ({error}): --renew {site} makes a new one"
                    )
                    continue
                admitted[node], hashes[node] = site, wanted[site]
                lines.append(f"the key of {site} is admitted")
        finally:
            kept = {node: hashes[node] for node in admitted if node in hashes}
            write_atomic(hashes_file, json.dumps(kept, indent=1).encode())
            write_atomic(self.nodes_file, json.dumps(admitted, indent=1).encode())
        return lines

    def _register(self, site: str, key: bytes) -> str:
        """Registers the very bytes that were checked, whatever the site's file holds by now; returns the node's id."""
        copy = self.home / "key.pub"
        write_atomic(copy, key)
        try:
            return str(self.call("supernode", "register", str(copy), LINK, "--name", site)["node-id"])
        finally:
            copy.unlink(missing_ok=True)

    def start(self, app: Path, run: str, resume: bool, after: str, back: int | None = None) -> str:
        """Starts a run of the app; returns its number at Flower."""
        config = f"run={toml_value(run)} resume={toml_value(resume)} continue-from={toml_value(after)}"
        config += "" if back is None else f" from-round={back}"
        return str(self.call("run", str(app), LINK, "--run-config", config)["run-id"])

    def run_status(self, number: str) -> str:
        """Returns `pending`, `running`, `finished:completed`, `finished:failed`, ..."""
        runs = self.call("list", LINK, "--run-id", number).get("runs", [])
        return str(runs[0]["status"]) if runs else "unknown"

    def complaint(self, number: str) -> str:
        """Returns the last `error: ...` in a run's log, which Flower does not show by itself."""
        done = self._flwr("log", number, LINK, "--show")
        errors = re.findall(r"\berror: (.+)", done.stdout + done.stderr)
        return printable(errors[-1].strip()) if errors else ""

    def stop(self, number: str) -> None:
        self.call("stop", number, LINK)


class Follower:
    """Reports what the files of a run say, each thing once; skips what an earlier try of the run left.

    back: the run goes back to this round; nothing is reported before it has.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], back: int | None = None) -> None:
        self.folder, self.say = folder, say
        rounds = [row["round"] for row in RunFolder(folder).metrics()]
        self.rows, self.events = len([r for r in rounds if back is None or r <= back]), len(self._events())
        self.undone = -1 if back is None else self._undone(self._about())

    def look(self) -> dict[str, Any]:
        """Reports what is new; returns flower.json, empty before there is one."""
        if self._undone(about := self._about()) <= self.undone:
            return {}
        rows, events = RunFolder(self.folder).evaluations(), self._events()
        for row in rows[self.rows :]:
            self.say(f"round {row.round}: {row.brief()}")
        for event in events[self.events :]:
            line = f"round {event['round']}: {event['site'] or 'server'}: {event['event']}: {event['detail']}"
            self.say(printable(line))  # an older version wrote what a site said as it was
        self.rows, self.events = max(self.rows, len(rows)), max(self.events, len(events))
        return about

    def _about(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.folder / "flower.json").read_text("utf8")))
        except (FileNotFoundError, ValueError):
            return {}

    @staticmethod
    def _undone(about: dict[str, Any]) -> int:
        """Returns how often a run has gone back."""
        undone = about.get("undone")
        return len(undone) if isinstance(undone, list) else 0

    def _events(self) -> list[dict[str, Any]]:
        file, events = self.folder / "events.jsonl", []
        for line in file.read_text("utf8").splitlines() if file.is_file() else ():
            try:
                events.append(json.loads(line))
            except ValueError:  # a line that is being written
                break
        return events


def follow(control: Control, number: str, follower: Follower, again: str) -> Path:
    """Waits for a run's end and returns its folder. again: the command that continues a run that ended early."""
    asked, ended = time.monotonic(), ""
    while True:
        about = follower.look()
        if about.get("status") == "finished":
            return follower.folder
        if ended:  # before this look
            why = control.complaint(number) or about.get("error") or ended
            raise RunError(f"the run ended before its last round ({why}); rounds are saved: {again}")
        if time.monotonic() - asked > (SOON_S if about.get("status") == "failed" else ASK_S):
            asked = time.monotonic()
            try:
                status = Control.open(control.home).run_status(number)
            except (InputError, RunError) as error:
                raise RunError(f"the server is gone ({error}); rounds are saved: start it, then {again}") from error
            ended = status if status.startswith("finished") else ""
        time.sleep(LOOK_S)
