"""The services and the commands: which keys are admitted, one process per folder, private files, runs."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from perada.cli import flower as commands
from perada.cli import main as cli
from perada.errors import InputError, RunError
from perada.flower import certs, control, launch
from perada.flower.address import free_port
from perada.flower.control import Control
from perada.flower.launch import Admission
from perada.flower.project import Project
from perada.flower.settings import ServerSettings
from perada.runs import files as runs
from perada.runs.files import locked

# Which keys are admitted.


class Link(Control):
    """A SuperLink that is a dictionary. Like Flower's, it still lists unregistered nodes."""

    registered: ClassVar[dict[str, dict[str, Any]]] = {}

    def call(self, *words: str) -> dict[str, Any]:
        nodes = Link.registered
        if words[1] == "list":
            return {"nodes": list(nodes.values())}
        if words[1] == "register":
            node = str(len(nodes) + 100 + int(Path(words[2]).read_text()))
            nodes[node] = {"node-id": node, "status": "registered"}
            return {"node-id": int(node)}
        if nodes[words[2]]["status"] == "unregistered":
            raise RunError("flwr supernode: [code: 24] Node ID not found for account.")
        nodes[words[2]]["status"] = "unregistered"
        return {}


def test_the_keys_in_the_folder_are_admitted_and_no_others(tmp_path: Path) -> None:
    Link.registered = {"7": {"node-id": "7", "status": "online"}}  # a stranger
    keys = {"a": b"0", "b": b"1"}
    link = Link(tmp_path)
    link.admit(keys)
    assert sorted(link.sites().values()) == ["a", "b"]
    assert link.sites().keys() == link.nodes().keys()
    assert link.admit(keys) == []
    old = {site: node for node, site in link.sites().items()}
    keys["a"] = b"50"  # renewed
    assert len(link.admit(keys)) == 2
    new = {site: node for node, site in link.sites().items()}
    assert new["b"] == old["b"]
    assert new["a"] != old["a"]
    link.admit({"b": keys["b"]})
    assert list(link.sites().values()) == ["b"]
    Link.registered = {}  # a new database
    link.admit(keys)
    assert sorted(link.sites().values()) == ["a", "b"]
    assert not (tmp_path / "key.pub").exists()


def test_a_site_whose_key_cannot_be_read_stays_admitted(tmp_path: Path) -> None:
    """Flower never accepts an unregistered key again, so a key that is being copied stays admitted."""
    Link.registered, link = {}, Link(tmp_path)
    link.admit({"a": b"0", "b": b"1"})
    before = link.sites()
    assert link.admit({"b": b"1"}, ["a"]) == []
    assert link.sites() == before
    assert link.admit({"a": b"0", "b": b"1"}) == []


class Used(Link):
    """A SuperLink that unregistered the key of a before."""

    def call(self, *words: str) -> dict[str, Any]:
        if words[1] == "register" and words[-1] == "a":
            raise RunError("flwr supernode: [code: 23] Public key already in use")
        return super().call(*words)


def test_a_key_that_flower_refuses_does_not_stop_the_others(tmp_path: Path) -> None:
    Link.registered, link = {}, Used(tmp_path)
    lines = link.admit({"a": b"0", "b": b"1"})
    assert list(link.sites().values()) == ["b"]
    assert lines[0].startswith("warning: the key of a is not admitted")
    assert "--renew a" in lines[0]


class Broken(Link):
    """A SuperLink that does not register keys until it is fixed."""

    fixed: ClassVar[bool] = False

    def call(self, *words: str) -> dict[str, Any]:
        if words[1] == "register" and not Broken.fixed:
            raise RunError("flwr supernode: it has hiccups")
        return super().call(*words)


def test_a_key_that_cannot_be_registered_is_tried_again(tmp_path: Path) -> None:
    """The server continues, and reports it once."""
    Link.registered, Broken.fixed = {}, False
    certs.make(tmp_path / "certs", ["localhost"], ["a"])
    said: list[str] = []
    admission = Admission(Broken(tmp_path), tmp_path / "certs", ("a",), said.append)
    for _ in range(4):
        admission.update()
    assert len(said) == 1
    assert "hiccups" in said[0]
    Broken.fixed, file = True, tmp_path / "certs" / "sites" / "a.pub"
    with pytest.MonkeyPatch.context() as patch:  # a SuperLink that is a dictionary takes numbers for keys
        patch.setattr(certs, "good_keys", lambda keys: (dict.fromkeys(keys, b"1"), []))
        admission.update()
    assert said[1:] == ["the key of a is admitted"]
    assert file.is_file()
    admission.update()
    assert len(said) == 2


def test_a_half_copied_key_does_not_stop_the_server(tmp_path: Path) -> None:
    certs.make(tmp_path / "certs", ["localhost"], ["a", "b", "c"])
    sites = tmp_path / "certs" / "sites"
    (sites / "b.pub").write_bytes((sites / "b.pub").read_bytes()[:40])
    (sites / "gone.pub").symlink_to(tmp_path / "nowhere")  # like a file that is removed between two calls
    admitted: list[tuple[set[str], list[str]]] = []
    said: list[str] = []

    class Counter(Control):
        def admit(self, keys: Mapping[str, bytes], keep: Collection[str] = ()) -> list[str]:
            admitted.append((set(keys), list(keep)))
            return []

    admission = Admission(Counter(tmp_path), tmp_path / "certs", ("a", "b", "c"), said.append)
    admission.update()  # has seen the files once: they may still be growing
    assert admitted == []
    admission.update()
    assert admitted == [({"a", "c"}, ["b"])]
    assert said == ["warning: b.pub cannot be read: b is not admitted"]
    certs.renew_site(tmp_path / "certs", "b")
    admission.update()
    admission.update()
    admission.update()
    assert admitted[1:] == [({"a", "b", "c"}, [])]


def test_a_flower_command_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flwr").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "flwr").chmod(0o755)
    monkeypatch.setattr(control, "program", lambda name: str(tmp_path / name))
    monkeypatch.setattr(control, "CALL_S", 0.2)
    with pytest.raises(RunError, match="no answer within"):
        Control(tmp_path).nodes()
    with pytest.raises(RunError, match="no answer within"):
        Control(tmp_path).complaint("1")


# One process per folder, private files.


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with keys, in which no service may start anything."""
    for name in ("_serve", "_join"):
        monkeypatch.setattr(launch, name, lambda *words: pytest.fail("it started"))
    server = f"127.0.0.1:{free_port()}"
    assert cli.main(["flower", "init", str(tmp_path / "k"), "--sites", "a,b", "--server", server]) == 0
    certs.make(tmp_path / "k" / "certs", ["fl.example.org"], ["a", "b"])
    return tmp_path / "k"


def refusal(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Returns the one line that refuses a command."""
    capsys.readouterr()
    assert cli.main(["flower", *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    return said


def test_a_second_server_of_a_project_is_refused(keyed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (keyed / "state" / "flower").mkdir(parents=True)
    with locked(keyed / "state" / "flower"):
        assert "runs already" in refusal(["server", str(keyed), "--port", str(free_port())], capsys)


def test_a_second_site_of_a_name_is_refused(keyed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data" / "0").mkdir(parents=True)
    home = keyed / "state" / "flower" / "a"
    home.mkdir(parents=True)
    (home / "site.toml").write_text("theirs")
    with locked(home):
        assert "site a runs already" in refusal(
            ["site", "--dir", str(keyed), "--name", "a", "--data", str(tmp_path / "data")], capsys
        )
    assert (home / "site.toml").read_text() == "theirs"


def test_a_federation_cannot_have_the_name_of_another_folder(
    keyed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`init` refuses such a name, and so does a service if the files are edited by hand."""
    (tmp_path / "data" / "0").mkdir(parents=True)
    for name, words in (
        ("server.toml", ["server", str(keyed)]),
        ("site.toml", ["site", "--dir", str(keyed), "--name", "a", "--data", str(tmp_path / "data")]),
    ):
        file = keyed / name
        file.write_text(file.read_text().replace('"federation"', '"runs"'))
        assert "'runs' is the name of a folder" in refusal(words, capsys)


@pytest.mark.parametrize("command", ["server", "site"])
def test_only_its_owner_can_read_what_a_service_writes(
    keyed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def service(*words: object) -> None:
        (tmp_path / "written").touch()

    monkeypatch.setattr(launch, "_serve", service)
    monkeypatch.setattr(launch, "_join", service)
    (tmp_path / "data" / "0").mkdir(parents=True)
    words = {
        "server": ["server", str(keyed)],
        "site": ["site", "--dir", str(keyed), "--name", "a", "--data", str(tmp_path / "data")],
    }
    before = os.umask(0o022)
    try:
        assert cli.main(["flower", *words[command]]) == 0
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)
    files = [tmp_path / "written", *(p for p in (keyed / "state").rglob("*") if p.is_file())]
    assert len(files) == (2 if command == "site" else 1)
    assert {p.stat().st_mode & 0o077 for p in files} == {0}


def test_a_host_that_the_certificate_is_not_for(keyed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server's own commands would refuse it: the message says what to do instead."""
    said = refusal(["server", str(keyed), "--host", "127.0.0.2"], capsys)
    assert "not for 127.0.0.2" in said
    assert "--host 0.0.0.0" in said
    assert "--renew server --server-name 127.0.0.2" in said


# Runs.


@pytest.mark.parametrize("name", ["../x", "a b", "", "x" * 65])
def test_a_bad_name_of_a_run_is_refused_at_once(keyed: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--name must be letters" in refusal(["run", str(keyed), "--name", name], capsys)


def flower_json(project: Path, name: str, text: str) -> Path:
    folder = project / "state" / "runs" / name
    folder.mkdir(parents=True)
    (folder / "flower.json").write_text(text)
    return folder


RUNNING = '{"status": "running", "round": 2, "rounds": 9, "error": ""}'


def test_an_unknown_run_to_continue_from_is_refused_at_once(keyed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flower_json(keyed, "run-1", RUNNING)
    said = refusal(["run", str(keyed), "--continue-from", "run-2"], capsys)
    assert "run-1" in said


def test_the_line_that_continues_a_run_is_complete(keyed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flower_json(keyed, "run-1", RUNNING)
    lines: list[str] = []

    def follow(control: Any, number: str, follower: Any, again: str) -> None:
        lines.append(again)
        raise RunError("it ended")

    monkeypatch.setattr(Control, "open", classmethod(lambda cls, home: cls(home)))
    monkeypatch.setattr(Control, "start", lambda *words: "1")
    monkeypatch.setattr(commands, "follow", follow)
    assert cli.main(["flower", "run", str(keyed), "--name", "x", "--continue-from", "run-1"]) == 1
    assert lines == [f"perada flower run {keyed} --resume --name x --continue-from run-1"]


def test_a_run_goes_back_by_one_command(
    keyed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a project of an older version, whose app does not know the setting."""
    flower_json(keyed, "run-1", RUNNING)
    app = keyed / "app" / "pyproject.toml"
    now = app.read_text()
    assert "from-round = -1" in now
    app.write_text(now.replace("from-round = -1\n", ""))
    sent: list[tuple[str, ...]] = []
    monkeypatch.setattr(Control, "open", classmethod(lambda cls, home: cls(home)))
    monkeypatch.setattr(Control, "call", lambda self, *words: sent.append(words) or {"run-id": 1})
    assert cli.main(["flower", "run", str(keyed), "--from-round", "2", "--detach"]) == 0
    assert sent[0][-1] == 'run="run-1" resume=true continue-from="" from-round=2'
    assert app.read_text() == now
    assert "leave out --resume" in refusal(["run", str(keyed), "--from-round", "2", "--resume"], capsys)
    assert "run-1" in refusal(["run", str(keyed), "--from-round", "2", "--name", "run-7"], capsys)


def test_a_run_on_a_random_backbone_gets_a_warning(
    keyed: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Control, "open", classmethod(lambda cls, home: cls(home)))
    monkeypatch.setattr(Control, "start", lambda *words: "1")
    for random in (False, True):
        monkeypatch.setattr(ServerSettings, "random_backbone", random)
        assert cli.main(["flower", "run", str(keyed), "--detach"]) == 0
        assert ("warning: the frozen backbone is random" in capsys.readouterr().err) is random


def test_a_failed_run_is_reported_soon(keyed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run's file says so, Flower is asked at once."""
    folder = flower_json(keyed, "run-1", RUNNING.replace("running", "failed"))
    monkeypatch.setattr(Control, "open", classmethod(lambda cls, home: cls(home)))
    monkeypatch.setattr(Control, "run_status", lambda self, number: "finished:failed")
    monkeypatch.setattr(Control, "complaint", lambda self, number: "too few sites")
    monkeypatch.setattr(control, "ASK_S", 60.0)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"too few sites.*: again"):
        control.follow(Control(keyed), "1", control.Follower(folder, print), "again")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '"running"', "\0"])
def test_status_of_a_damaged_run(keyed: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    flower_json(keyed, "run-1", text)
    flower_json(keyed, "run-2", RUNNING)
    capsys.readouterr()
    assert cli.main(["flower", "status", str(keyed)]) == 0
    said = capsys.readouterr().out
    assert "run-1: damaged" in said
    assert "run-2: stopped, round 2 of 9" in said


def test_two_looks_do_not_take_each_other_for_a_server(keyed: Path) -> None:
    folder = flower_json(keyed, "run-1", RUNNING)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH)
        assert Project.open(keyed).runs()["run-1"]["status"] == "stopped"
    finally:
        os.close(handle)
    with locked(folder):
        assert Project.open(keyed).runs()["run-1"]["status"] == "running"


def test_a_look_at_a_run_does_not_stop_a_server(keyed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`status` locks the run for a moment. A server that starts then waits for it, but not for another server."""
    folder = flower_json(keyed, "run-1", RUNNING)
    monkeypatch.setattr(runs, "LOOK_S", 60.0)
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    looked = threading.Timer(0.3, os.close, [handle])
    looked.start()
    with locked(folder):
        looked.join()
        monkeypatch.setattr(runs, "LOOK_S", 0.1)
        with pytest.raises(InputError, match="another process is at work"), locked(folder):
            pass
