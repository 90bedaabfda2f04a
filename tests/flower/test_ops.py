"""The guards around Flower's processes: who may give commands, which apps are accepted, when encryption is required."""

from __future__ import annotations

import asyncio
import io
import json
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from perada.cli import main as cli
from perada.errors import InputError
from perada.flower.address import Address, check_plain, free_port
from perada.flower.guards import COMPONENTS, LocalOnly, problem_of
from perada.flower.processes import environment, marked

# Who may give commands.


def ask(
    path: str, client: str | None, server: str = "10.0.0.1", ready: bool = True, headers: Sequence[Any] = ()
) -> int:
    """Returns the status of a request; 200 comes from behind `LocalOnly`."""
    found: list[int] = []

    async def behind(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    async def receive() -> Any:
        return {}

    scope = {"type": "http", "path": path, "client": client and (client, 1234), "server": (server, 9092)}
    scope["headers"] = headers
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERADA_FLOWER_READY", __file__ if ready else "/not/there")
        asyncio.run(LocalOnly(behind)(scope, receive, send))
    return found[0]


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task"])
@pytest.mark.parametrize("client", ["10.0.0.7", "192.168.1.9", "fe80::1", "::ffff:10.0.0.7", "testclient", None])
def test_other_machines_give_no_commands(path: str, client: str | None) -> None:
    assert ask(path, client) == 403


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/v1/fleet", "/v1/fleetx/pull-messages", "//v1/fleet/x"])
def test_other_machines_see_no_other_page(path: str) -> None:
    assert ask(path, "10.0.0.7") == 403


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", "10.0.0.1"])
def test_this_machine_gives_commands(client: str) -> None:
    assert ask("/v1/control/start-run", client) == 200


def test_sites_reach_their_part_once_their_keys_are_known() -> None:
    assert ask("/v1/fleet/pull-messages", "10.0.0.7") == 200
    assert ask("/v1/fleet/activate-node", "10.0.0.7", ready=False) == 503


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("push-object", [(b"content-length", b"5300000")], 200),
        ("push-object", [(b"content-length", b"8000001")], 413),
        ("push-messages", [(b"content-length", b"1000001")], 413),
        ("push-object", [(b"transfer-encoding", b"chunked")], 413),
        ("push-object", [(b"content-length", b"-1")], 413),
        ("push-object", [(b"content-length", b"9" * 10_000)], 413),
    ],
)
def test_a_sites_request_says_how_large_it_is(path: str, headers: list[Any], status: int) -> None:
    """Flower reads the whole body of any request before it asks who sent it."""
    assert ask(f"/v1/fleet/{path}", "10.0.0.7", headers=headers) == status


def test_a_strangers_words_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask("/v1/\x1b[31m\r\u202egnp", "10.0.0.7") == 403
    assert ask("/v1/fleet/\x1b[2J", "10.0.0.7", headers=[(b"content-length", b"99999999")]) == 413
    said = capsys.readouterr().out
    assert said.count("\n") == 2
    assert all(line.isprintable() for line in said.splitlines())


# Which apps are accepted.

PROJECT = """
[project]
dependencies = []
[tool.flwr.app.components]
serverapp = "perada.flower.app:server_app"
clientapp = "perada.flower.app:client_app"
"""


def fab(files: dict[str, str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        for name, text in files.items():
            z.writestr(name, text)
    return out.getvalue()


def test_our_app_is_accepted() -> None:
    assert problem_of(fab({"pyproject.toml": PROJECT, ".info/CONTENT": ""})) is None


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"pyproject.toml": PROJECT, "perada/flower/app.py": "boom"}, "perada/flower/app.py"),
        ({"pyproject.toml": PROJECT, "../../evil.py": "boom"}, "evil.py"),
        ({"pyproject.toml": PROJECT.replace("perada.flower.app:client_app", "os:system")}, "os:system"),
        ({"pyproject.toml": PROJECT + 'agentapp = "os:system"\n'}, "agentapp"),
        ({"pyproject.toml": PROJECT.replace("[]", '["evil"]')}, "packages"),
        ({"pyproject.toml": "[tool]\n"}, "components"),
        ({"pyproject.toml": "not toml ["}, "cannot be read"),
        ({"pyproject.toml": "tool = 3"}, "cannot be read"),
        ({"README.md": "only"}, "cannot be read"),
        ({"pyproject.toml": "#" * 1_000_001}, "too large"),
    ],
)
def test_other_apps_are_refused(files: dict[str, str], says: str) -> None:
    assert says in (problem_of(fab(files)) or "taken")


GUARDED = """
import sys
from flwr.superlink.servicer.control import control_handlers
from perada.flower.guards import guard_apps
guard_apps()
for path in sys.argv[1:]:
    try:
        control_handlers.get_fab_config(open(path, "rb").read())
        print("read")
    except ValueError as error:
        print(error)
try:
    control_handlers._get_remote_fab("rest", "@flwrlabs/quickstart")
except Exception as error:
    print(type(error).__name__)
"""


def test_the_server_reads_no_app_but_ours(tmp_path: Path) -> None:
    """Runs in a process of its own, because Flower's functions are replaced. tests/network starts a real server."""
    whole = PROJECT.replace("[project]", '[project]\nname = "x"\nversion = "1.0.0"\nlicense = "MIT"')
    (tmp_path / "ours").write_bytes(fab({"pyproject.toml": whole + '[tool.flwr.app]\npublisher = "x"\n'}))
    (tmp_path / "other").write_bytes(fab({"pyproject.toml": PROJECT, "evil.py": "boom"}))
    command = [sys.executable, "-c", GUARDED, str(tmp_path / "ours"), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("perada: ")]
    assert lines == ["read", "not PerAda's own app: it holds evil.py", "FlowerError"]
    assert "perada: refused to fetch an app from Flower's hub" in done.stdout


def test_other_bytes_are_not_an_app() -> None:
    assert problem_of(b"not a zip") == "it cannot be read"


def test_the_components_exist() -> None:
    from perada.flower import app

    for path in COMPONENTS.values():
        assert hasattr(app, path.partition(":")[2])


# Addresses and encryption.


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("fl.example.org", "fl.example.org", 9092),
        ("1.2.3.4:80", "1.2.3.4", 80),
        ("[::1]:80", "::1", 80),
        ("::1", "::1", 9092),
    ],
)
def test_addresses(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)


@pytest.mark.parametrize("text", ["", ":80", "a:0", "a:x", "http://a:80", "a:70000"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(InputError, match="host:port"):
        Address.parse(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "fl.example.org", "::"])
def test_unencrypted_beyond_this_machine_must_be_asked_for_twice(host: str) -> None:
    with pytest.raises(InputError, match="--i-know-this-is-not-encrypted"):
        check_plain(Address(host, 1), insecure=True, confirmed=False)
    check_plain(Address(host, 1), insecure=True, confirmed=True)
    check_plain(Address("127.0.0.1", 1), insecure=True, confirmed=False)
    with pytest.raises(InputError, match="needs --insecure"):
        check_plain(Address(host, 1), insecure=False, confirmed=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ops") / "p"
    assert cli.main(["flower", "init", str(folder), "--sites", "a,b", "--server", f"127.0.0.1:{free_port()}"]) == 0
    (folder.parent / "data" / "0").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["server", "P"], "certs.sh"),
        (["server", "gone"], "perada flower init"),
        (["server", "P", "--insecure", "--host", "0.0.0.0"], "--i-know-this-is-not-encrypted"),
        (["server", "P", "--insecure", "--host", "203.0.113.1", "--i-know-this-is-not-encrypted"], "cannot listen"),
        (["server", "P", "--i-know-this-is-not-encrypted"], "needs --insecure"),
        (["site", "--dir", "P"], "--name"),
        (["site", "--dir", "P", "--name", "a"], "--data"),
        (["site", "--dir", "P", "--name", "a", "--data", "gone"], "no data"),
        (["site", "--dir", "P", "--name", "a", "--data", "D"], "ca.crt"),
        (["site", "--dir", "P", "--name", "../a", "--data", "D"], "name must be letters"),
        (["site", "--dir", "D", "--name", "a", "--data", "D"], "site.toml"),
        (["site", "--dir", "P", "--name", "a", "--data", "D", "--server", "fl.example.org", "--insecure"], "--i-know"),
        (["run", "P"], "no server runs"),
        (["collect", "P", "--out", "x"], "no run yet"),
        (["export", "--dir", "P", "--name", "a", "--out", "x.safetensors"], "has not taken part"),
    ],
)
def test_bad_input_is_one_line(project: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    real = [{"P": str(project), "D": str(project.parent / "data")}.get(word, word) for word in words]
    assert cli.main(["flower", *real]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    assert "Traceback" not in said


def test_status_without_a_server(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flower", "status", str(project), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"server": None, "sites": {}, "runs": {}}


def test_status_names_the_sites_in_quarantine(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = project / "state" / "runs" / "one"
    run.mkdir(parents=True)
    about = {"status": "finished", "round": 5, "rounds": 5, "quarantine": {"b": [2, 3, 4], "a": [4]}}
    (run / "flower.json").write_text(json.dumps(about))
    assert cli.main(["flower", "status", str(project), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"]["one"]["in_quarantine"] == ["b"]
    assert cli.main(["flower", "status", str(project)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].split()[:4] == ["b", "is", "in", "quarantine"]
    (run / "flower.json").write_text(json.dumps({**about, "quarantine": 3}))
    assert cli.main(["flower", "status", str(project)]) == 0
    assert "damaged" in capsys.readouterr().out


# Processes.


def test_flower_is_kept_off_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    monkeypatch.setenv("FLWR_HOME", "/elsewhere")
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # uvicorn would believe anybody who says to be 127.0.0.1
    found = environment(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["PATH"].startswith(str(Path(sys.executable).parent))
    assert not {"https_proxy", "FORWARDED_ALLOW_IPS"} & found.keys()


def test_without_flower_the_rest_works_and_one_line_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['flwr'] = None; from perada.cli import main as cli; sys.exit(cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "flower", "server", "x", "--port", "3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: perada flower needs Flower: pip install 'perada[flower]'\n"
    assert subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, check=False).returncode == 0


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
PARENT = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True)
time.sleep(60)
"""


def test_a_child_is_stopped_with_everything_it_started(tmp_path: Path) -> None:
    """The grandchild has its own session and ignores SIGTERM. This needs a process of its own, which adopts others."""
    script = f"""
import os, sys, time
from pathlib import Path
from perada.flower import processes
processes.GRACE = 0.5
with processes.stoppable():
    lines = []
    child = processes.Child([sys.executable, "-c", {PARENT!r}], dict(os.environ), Path("log"), lines.append)
    while "up" not in lines:
        time.sleep(0.02)
    print(len(processes.descendants(os.getpid())))
    child.stop()
    print(len(processes.descendants(os.getpid())))
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "0"], done.stderr
    assert (tmp_path / "log").read_text() == "up\n"


SIGNS = """
import itertools
from flwr.supercore.heartbeat import HeartbeatSender
from perada.flower.guards import guard_node
guard_node()
sender = HeartbeatSender(lambda: True)
print(list(itertools.islice(sender._retry_invoker.wait_gen_factory(), 6)))
"""


def test_a_site_is_soon_back_when_the_server_is() -> None:
    """Flower's own: 1, 2, 4, 8, 16, 20 seconds between two failed signs of life, then the site counts as away."""
    done = subprocess.run([sys.executable, "-c", SIGNS], capture_output=True, text=True, check=True)
    assert done.stdout == "[1, 2, 4, 5, 5, 5]\n"


def test_a_service_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """SIGKILL of the parent: the wrapper gets SIGTERM from the kernel."""
    wrapper = f"import os, sys; sys.path.insert(0, {str(Path(cli.__file__).parents[1])!r}); import time; " + (
        "from flower.guards import die_with_parent; die_with_parent(); print(os.getpid(), flush=True); time.sleep(60)"
    )
    parent = (
        "import os, subprocess, sys, time; "
        "env = {**os.environ, 'PERADA_FLOWER_PARENT': str(os.getpid())}; "
        f"subprocess.Popen([sys.executable, '-c', {wrapper!r}], env=env); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()
    _until(lambda: not _alive(child))


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def _until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_lines_for_the_user_are_marked() -> None:
    assert marked("perada: hello") == "hello"
    assert marked("INFO : hello") is None
