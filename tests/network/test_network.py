"""Real processes: the same bytes as the simulator, whatever dies, hangs, lies or does not belong."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from flower.test_parity import assert_same, simulated
from helpers import assert_same_tensors

from network.federation import PERADA, SITES, Net, rows, until
from perada.cli import main as cli
from perada.flower import certs
from perada.flower.messages import flat
from perada.flower.processes import environment

# Parity.


@pytest.mark.parametrize("method", ["perada", "ditto", "fedbn"])
def test_real_processes_equal_the_simulator(net: Net, method: str) -> None:
    net.setting(method__name=method, train__rounds=2)
    sim = simulated(net.world)
    done = net.perada("run", str(net.home), "--name", f"parity-{method}")  # as it is typed: it prints the table
    assert done.returncode == 0, done.stderr
    assert "Local-test" in done.stdout
    path = net.finished(f"parity-{method}")
    assert_same(net.world, path, sim)
    last = list(rows(path))[-1]
    assert last["local_test"]["per_client"] == pytest.approx(sim.evaluate(("local",)).scores["local_test"].per_client)
    if method == "perada":  # with distillation and the clients' guard
        assert last["distill"]["guard_chose"] is not None
        assert last["distilled"] == 2


# Faults.

GARBAGE = {
    "nan": "not finite",
    "shape": "has shape",
    "dtype": "has dtype float64",
    "missing": "missing",
    "norm": "rounds.norm_bound",
}


def test_garbage_is_refused_by_name_and_the_round_completes(net: Net) -> None:
    """A good round, then a kind of garbage each."""
    net.misbehave({"west": {f"train-{r}": what for r, what in enumerate(GARBAGE, 1)}})
    net.setting({"quarantine": 0}, train__rounds=len(GARBAGE) + 1, distill__steps=0)
    path = net.run("garbage")
    refused = {e["round"]: e for e in net.events("garbage") if e["event"] == "refused"}
    assert sorted(refused) == list(range(1, len(GARBAGE) + 1))
    for at, what in enumerate(GARBAGE, 1):
        assert refused[at]["site"] == "west"
        assert GARBAGE[what] in refused[at]["detail"]
    found = {r["round"]: r.get("absent", []) for r in rows(path)}
    assert found == {1: []} | {r + 1: ["west"] for r in range(1, len(GARBAGE) + 1)}


def test_a_run_that_cannot_go_on_says_why_and_is_resumed(net: Net) -> None:
    net.misbehave({"west": {"train-1": "nan"}})
    net.setting({"min_sites": 3, "retries": 0}, train__rounds=2, distill__steps=0)
    done = net.perada("run", str(net.home), "--name", "short")
    assert done.returncode == 1
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "2 good uploads, 3 needed" in error
    assert f"perada flower run {net.home} --resume --name short" in error
    net.misbehave({})
    sim = simulated(net.world)
    done = net.perada("run", str(net.home), "--name", "short", "--resume")
    assert done.returncode == 0, done.stderr
    assert_same(net.world, net.finished("short"), sim)


class Clock(threading.Thread):
    """When each round of a run began."""

    def __init__(self, net: Net, run: str) -> None:
        super().__init__(daemon=True)
        self.net, self.name_of_run, self.began, self.done = net, run, {}, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.1):
            now = self.net.status(self.name_of_run)
            if now and now["round"] not in self.began:
                self.began[now["round"]] = time.monotonic()

    def longest(self) -> float:
        times = list(self.began.values())
        return max(b - a for a, b in itertools.pairwise(times))


def test_a_site_that_hangs_is_left_out_and_its_late_upload_refused(net: Net) -> None:
    net.misbehave({"west": {"train-1": "sleep 7"}})  # late, with 5 s to spare before Flower drops it
    net.setting({"deadline_s": 7.0}, train__rounds=4, distill__steps=0)
    clock = Clock(net, "hang")
    clock.start()
    path = net.run("hang")
    clock.done.set()
    told = [(e["round"], e["event"], e["detail"]) for e in net.events("hang") if e["site"] == "west"]
    print(*net.events("hang"), sep="\n")
    assert (1, "silent", "no answer to train within 7 s") in told
    assert any(event == "refused" and "late answer to train of round 1" in detail for _, event, detail in told)
    assert clock.longest() <= 7 + 10
    found = {r["round"]: r.get("absent", []) for r in rows(path)}
    assert found[2] == ["west"]
    assert [] in (found[3], found[4])  # it is back


def test_a_site_that_hangs_for_good_when_the_guard_asks_is_back_by_itself(net: Net) -> None:
    """With distillation and the clients' guard; nobody restarts the site, it gives up (here 5 s after the deadline)."""
    net.misbehave({"west": {"score-1": "sleep 600"}})
    net.setting({"deadline_s": 8.0}, train__rounds=6)
    clock = Clock(net, "stuck")
    clock.start()
    path = net.run("stuck")
    clock.done.set()
    assert "gave up on a message: the server stopped waiting for it long ago" in net.said("west")
    silent = [(e["round"], e["detail"]) for e in net.events("stuck") if (e["site"], e["event"]) == ("west", "silent")]
    assert silent[0][0] == 1
    assert silent[0][1].startswith("no answer to score within ")
    assert clock.longest() <= 8 + 10
    found = {r["round"]: r for r in rows(path)}
    assert "absent" not in found[2]  # it had uploaded, and the others judged
    assert found[2]["distill"]["guard_chose"] is not None
    assert any("absent" not in found[r] for r in range(3, 7))  # it is back


def test_a_site_killed_mid_round_keeps_its_adapter_and_comes_back(net: Net, tmp_path: Path) -> None:
    """West is killed when it has trained round 4 and is writing it down, and is away until round 10 is over.

    A site that comes back is asked for its name at the start of a round, and takes part in the next. North keeps round
    9 open until west is connected, and round 10 until it has answered. Every mean and every page says over whom it is.
    """
    net.misbehave({"west": {"train-3": "stop writing"}, "north": {"train-8": "wait", "train-9": "wait"}})
    net.setting({"deadline_s": 40.0}, train__rounds=12, distill__steps=0)
    clock = Clock(net, "killed")
    clock.start()
    with subprocess.Popen([*PERADA, "flower", "run", str(net.home), "--name", "killed"], env=net.env) as run:
        until((net.home / "asleep-west-3").exists, 60, "west is in the middle of round 4")
        state = net.world.site("west").state
        id = net.status("killed")["run"]
        assert list((state.path / id).glob(".*.part/kept.safetensors"))
        before = flat(state.newest(id))
        net.kill("west")
        assert_same_tensors(flat(state.newest(id)), before)
        until(lambda: net.status("killed")["round"] >= 4, 40 + 10, "round 4 is closed")
        until((net.home / "asleep-north-8").exists, 60, "round 9")
        hellos = net.greeted("west")
        times = net.said("server").count("site west connected")
        net.start("west")
        until(lambda: net.said("server").count("site west connected") > times, 30, "west is back")
        net.misbehave({"north": {"train-9": "wait"}})
        until(lambda: net.greeted("west") > hellos, 30, "west has said its name")
        time.sleep(2)  # until the server has it
        net.misbehave({})
        assert run.wait(200) == 0
    clock.done.set()
    assert clock.longest() <= 40 + 10
    folder = net.home / "state" / "runs" / "killed"
    check_who_was_away(list(rows(folder)), "west")
    page = (folder / "report.html").read_text("utf8")
    assert "rounds 3 to 9: 2 of 3 clients, without west" in page
    assert "(over 29 uploads of 36 planned)" in page
    entries = state.rounds(id)
    assert 3 not in entries  # what was half written counts for nothing
    assert entries[-1] == 11
    assert any(not t.equal(before[n]) for n, t in flat(state.newest(id)).items())
    assert cli.main(["flower", "report", "--dir", str(net.home / "west"), "--out", str(tmp_path / "west.html")]) == 0
    page = (tmp_path / "west.html").read_text("utf8")
    assert "<b>5</b><span>of 12 planned" in page
    assert "A gap is a round without this site: 4 to 10." in page
    assert page.partition("<strong>Training loss")[2].partition("</figure>")[0].count("<polyline") == 2, "a gap"


def check_who_was_away(found: list[dict[str, Any]], site: str) -> None:
    """Checks that every row of a run says that a site was away for rounds 4 to 10.

    The scores of a round ride in the messages of the next one.
    """
    assert [r["round"] for r in found if r.get("absent") == [site]] == list(range(4, 11))
    assert [r["round"] for r in found if r["local_test"].get("missing") == [site]] == list(range(3, 10))
    for row in found:
        scores = [v for v in row["local_test"]["per_client"].values() if v is not None]
        assert len(scores) == 3 - len(row["local_test"].get("missing", ()))
        assert row["local_test"]["mean"] == pytest.approx(sum(scores) / len(scores))
    assert found[-1]["took_part"] == 3 * 12 - 7


def test_a_server_killed_anywhere_finishes_with_the_same_adapters(net: Net) -> None:
    """Five kills at random moments; the seed is in the output of a failure. No round without all three: a site that
    is slow to come back would rightly change what the others make. Each kill takes the SuperLink with it; it starts
    again on its database, and the sites come back by themselves and train nothing twice."""
    seed = random.randrange(2**32)
    print("seed", seed)
    draw = random.Random(seed)
    net.setting({"min_sites": 3, "deadline_s": 60.0}, train__rounds=8)
    sim = simulated(net.world)
    earlier, nodes = len(net.trained()), (net.home / "state" / "flower" / "nodes.json").read_text()
    net.begin("crash")
    rounds, told = [-1], 0
    for kill in range(5):
        until(lambda told=told: len(net.events("crash")) > told, 60, "the run says something new")
        if kill % 2:  # not always in the same round, however slow the machine is
            until(lambda: net.status("crash")["round"] > rounds[-1], 60, "another round")
        time.sleep(draw.uniform(0, 3))
        assert net.status("crash")["status"] == "running", f"it was over before kill {kill + 1}"
        net.kill("server")
        rounds.append(net.status("crash")["round"])
        told = len(net.events("crash"))
        net.start("server")
        until(net.ready, 60, "the server is back")
        net.begin("crash", "--resume")
    print("killed in rounds", rounds)
    assert len(set(rounds[1:])) >= 2
    path = net.finished("crash")
    print(*net.events("crash"), *rows(path), sep="\n")
    assert [r["round"] for r in rows(path)] == list(range(1, 9))
    assert_same(net.world, path, sim)
    assert sorted(net.trained()[earlier:]) == sorted((site, round) for site in SITES for round in range(8))
    assert (net.home / "state" / "flower" / "nodes.json").read_text() == nodes  # the same nodes, in the same database
    assert not any("starting it again" in net.said(site) for site in SITES)  # no SuperNode had ended


# Who does not belong.


def refused(net: Net, folder: Path, *words: str) -> str:
    """What `perada flower site` says when it is turned away: one line, code 2, and soon."""
    command = ["site", "--dir", str(folder), "--server", f"127.0.0.1:{net.port}", *words]
    done = net.perada(*command, timeout=60)
    assert done.returncode == 2, done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(error) == 1
    assert "Traceback" not in done.stderr
    return error[0]


@pytest.fixture
def stranger(net: Net, tmp_path: Path) -> Path:
    """Has everything that west has, but for its keys, which are of its own making."""
    for name in ("site.toml", "data.npz"):
        shutil.copy(net.home / "west" / name, tmp_path / name)
    certs.make(tmp_path / "certs", ["127.0.0.1"], ["west"])
    return tmp_path


def test_a_wrong_authority_is_refused(net: Net, stranger: Path) -> None:
    assert "does not vouch for" in refused(net, stranger)


def test_an_unregistered_key_is_refused(net: Net, stranger: Path) -> None:
    shutil.copy(net.home / "certs" / "ca.crt", stranger / "certs" / "ca.crt")
    assert "does not know this site's key" in refused(net, stranger)
    assert "refused a site from 127.0.0.1" in net.said("server")


def test_plaintext_to_the_tls_port_is_refused(net: Net, stranger: Path) -> None:
    assert "it wants TLS" in refused(net, stranger, "--insecure")
    with socket.create_connection(("127.0.0.1", net.port), 5) as plain:
        plain.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        plain.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert not plain.recv(100).startswith(b"HTTP")


FOREIGN = """
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    messages = [Message(RecordDict({"c": ConfigRecord({})}), n, "train") for n in nodes]
    replies = list(grid.send_and_receive(messages, timeout=30))
    with open(context.run_config["out"], "w") as f:
        f.write(repr([(m.has_error() and m.error.code, m.has_error() and m.error.reason) for m in replies]))
"""


@pytest.fixture
def foreign(net: Net, tmp_path: Path) -> Path:
    """An app with code of its own, which would write files: `out` at the server, `owned` at a site."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "mine.py").write_text(FOREIGN)
    evil = f"open({str(tmp_path / 'owned')!r}, 'w')\nfrom flwr.clientapp import ClientApp\napp = ClientApp()\n"
    (tmp_path / "app" / "theirs.py").write_text(evil)
    text = (net.home / "app" / "pyproject.toml").read_text()
    text = text.replace("perada.flower.app:server_app", "mine:app").replace(
        "perada.flower.app:client_app", "theirs:app"
    )
    (tmp_path / "app" / "pyproject.toml").write_text(f'{text}out = "{tmp_path / "out"}"\n')
    return tmp_path


def start_app(net: Net, app: Path) -> subprocess.CompletedProcess[str]:
    """By Flower's own command, as anybody on the server's machine may."""
    command = [str(Path(sys.executable).parent / "flwr"), "run", str(app)]
    env = environment(net.home / "state" / "flower")
    return subprocess.run(command, env=env, check=False, capture_output=True, text=True)


def test_the_server_starts_no_app_but_ours(net: Net, foreign: Path) -> None:
    done = start_app(net, foreign / "app")
    assert done.returncode != 0
    until(lambda: "refused to start an app: it holds mine.py" in net.said("server"), 10, "the server says so")
    assert not (foreign / "out").exists()


def test_sites_run_no_code_that_the_server_sends(net: Net, foreign: Path) -> None:
    """Also where the server starts anything."""
    net.misbehave({"server": {"apps": "any"}})
    done = start_app(net, foreign / "app")
    assert done.returncode == 0, done.stderr
    replies = until(lambda: (foreign / "out").exists() and (foreign / "out").read_text(), 60, "the replies")
    assert replies.count("could not be verified") == len(SITES), replies
    assert not (foreign / "owned").exists()
    assert "refused an app that the server sent: it holds mine.py" in net.said("west")


def test_status_collect_report_and_export(net: Net, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net.setting(train__rounds=1, distill__steps=0)
    net.run("last")
    found = json.loads(net.perada("status", str(net.home), "--json").stdout)
    assert found["sites"] == dict.fromkeys(SITES, "online")
    assert found["runs"]["last"]["status"] == "finished"
    assert cli.main(["flower", "collect", str(net.home), "--name", "last", "--out", str(tmp_path / "run")]) == 0
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run" / "global.safetensors").is_file()
    out = tmp_path / "west.safetensors"
    words = ["export", "--dir", str(net.home / "west"), "--out", str(out), "--merged"]
    assert cli.main(["flower", *words]) == 0
    assert out.stat().st_size > 100_000
    assert "west: round 1 of 1: training loss" in net.said("west")
    assert re.search(r"west: after round 1 of 1: [\d.]+% of \d+ own test images right", net.said("west"))
    page = tmp_path / "west.html"
    assert cli.main(["flower", "report", "--dir", str(net.home / "west"), "--out", str(page)]) == 0
    assert "<b>1</b><span>of 1 planned" in page.read_text("utf8")
    for site in SITES:
        assert f"site {site} connected from 127.0.0.1" in net.said("server"), "by its key"
    net.stop("east")
    until(lambda: "site east left from 127.0.0.1" in net.said("server"), 30, "it left")
    net.start("east")
    until(lambda: net.said("east").count("connected to") > 1, 60, "it is back for the tests to come")


def test_a_renewed_key_counts_at_once(net: Net) -> None:
    """The server forgets the old one while it runs; the site, which has the new one, comes back by itself."""
    before = json.loads((net.home / "state" / "flower" / "nodes.json").read_text())
    times = net.said("west").count("connected to")
    assert cli.main(["flower", "certs", str(net.home / "certs"), "--renew", "west"]) == 0
    until(lambda: net.said("west").count("connected to") > times, 60, "west is back")
    after = json.loads((net.home / "state" / "flower" / "nodes.json").read_text())
    assert sorted(after.values()) == sorted(SITES)
    assert {site for node, site in after.items() if node not in before} == {"west"}
    assert "the key of west is no longer admitted" in net.said("server")


def test_a_damaged_key_does_not_take_the_server_down(net: Net) -> None:
    """Half of west's key, then all of it again: the others are not touched."""
    file = net.home / "certs" / "sites" / "west.pub"
    whole, nodes = file.read_bytes(), net.home / "state" / "flower" / "nodes.json"
    before = json.loads(nodes.read_text())
    file.write_bytes(whole[:60])
    until(lambda: "west.pub cannot be read: west is not admitted" in net.said("server"), 20, "the server says so")
    file.write_bytes(whole)
    time.sleep(3)
    assert json.loads(nodes.read_text()) == before, "Flower never takes back an unregistered key"
