"""The report is one complete, safe page with the same bytes each time."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import commands
import numpy as np
import pytest
import torch

from perada.client.scores import Scores
from perada.config import resolve
from perada.data import GIVEN, DataOptions
from perada.data.federation import Client, Federation
from perada.errors import InputError
from perada.report import write_report
from perada.report.facts import distillations, gather_facts
from perada.report.figures import Series
from perada.report.page import _places
from perada.report.svg import human_bytes, shorten, ticks
from perada.runs.folder import RunFolder
from perada.runs.moment import Evaluation

HOSTILE = "<script>alert('x')</script>\"&"
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Fails on a tag that is not closed; collects text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def federation(clients: int = 3, classes: tuple[str, ...] = ("0", "1"), multilabel: bool = False) -> Federation:
    rng, n = np.random.default_rng(0), 20 * clients
    shape = (n, len(classes)) if multilabel else (n,)
    targets = torch.from_numpy(rng.integers(0, 2 if multilabel else len(classes), shape))
    parts = np.arange(n).reshape(clients, 20)
    held = tuple(Client(f"site-{i}", p[:12], p[12:15], p[15:]) for i, p in enumerate(parts))
    images = torch.zeros(n, 1, 2, 2, dtype=torch.uint8)
    return Federation("tiny", images, targets.float() if multilabel else targets, classes, held, (0.5,), (0.5,))


def scores(clients: Iterable[str], base: float) -> Scores:
    return Scores({client: base + 1.37 * i for i, client in enumerate(clients)})


class FakeRun:
    """What `write_report` uses of a `Run`."""

    def __init__(self, federation: Federation, method: str = "perada", base: float = 50.0, rounds: int = 4) -> None:
        self.config = resolve("digits", {"train.rounds": rounds, "train.cohort": 2, "method.name": method})
        self.federation, self.path = federation, Path(f"runs/tiny-{method}")
        names = [c.name for c in federation.clients]
        self.rows = [
            Evaluation(
                t,
                {
                    **{s: scores(names, base + t) for s in ("local_test", "local_val")},
                    "global_test": scores(names, base + t - 20),
                },
                base + t + 0.123,
                has_global_model=True,
                bytes_up=1000 * t,
                bytes_down=3000 * t,
                distilled=t,
                accepted=t - 1,
                seconds=2.5 * t,
            )
            for t in range(1, rounds + 1)
        ]
        self.about: dict[str, Any] = {
            "name": self.path.name,
            "data": "tiny",
            "method": method,
            "metric": "auc" if federation.multilabel else "accuracy",
            "parameters": {"trained": 24660, "communicated": 12330, "communicated_buffers": 1120},
            "versions": {"perada": "9.8.7", "torch": "2.6.0"},
            "device": "cpu",
            "threads": 1,
        }
        self.last: Evaluation | None = self.rows[-1]
        self.shifted: Scores | None = scores(names, base - 30)

    @property
    def folder(self) -> SimpleNamespace:
        return SimpleNamespace(evaluations=lambda: self.rows, about=dict)

    @property
    def summary(self) -> dict[str, Any]:
        if self.last is None:
            raise InputError("no summary yet")
        shifted = {"shifted": self.shifted.as_dict()} if self.shifted else {}
        return {**self.about, **self.last.as_dict(), **shifted}


def written(tmp_path: Path, *runs: Any) -> str:
    write_report(runs, tmp_path / "report.html")
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]  # one file, no parts left
    return (tmp_path / "report.html").read_text("utf8")


def test_page_is_whole_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    page = written(tmp_path, FakeRun(federation()))
    read = Reader(page)
    assert page.startswith("<!doctype html>")
    assert "link" not in read.tags
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'content="(default-src[^"]*)"', page)
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert not {"src", "href", "xlink:href"} & {name for name, _ in read.attributes}
    assert not re.search(r"https?:|url\(|@import|javascript:", page)
    assert len(page) < 100_000


def test_numbers_of_the_summary_are_there(tmp_path: Path) -> None:
    run = FakeRun(federation())
    text, s = Reader(written(tmp_path, run)).text, run.summary
    for name in ("local_test", "global_test", "shifted"):
        assert f"{s[name]['mean']:.2f} ± {s[name]['std']:.2f}" in text
        for client, value in s[name]["per_client"].items():
            assert f"{client}: {value:.2f}" in text
    assert f"{s['global_model']['global_test']:.2f}" in text
    for said in ("24,660", "12,330 of 77,", "accepted the distilled adapter in 3 of 4 rounds (75 %)", "9.8.7", "12 kB"):
        assert said in text
    assert 'backbone = "resnet8"' in text
    assert "unfinished" not in text


def test_accessible(tmp_path: Path) -> None:
    read = Reader(written(tmp_path, FakeRun(federation()), FakeRun(federation(), "standalone")))
    assert read.tags.count("figure") == read.tags.count("figcaption") == 10
    given = Counter(name for name, _ in read.attributes)
    named = read.tags.count("svg") + read.tags.count("table") + given["tabindex"]
    assert given["aria-label"] + given["aria-hidden"] == named
    assert given["scope"] == read.tags.count("th")
    assert ("lang", "en") in read.attributes


@pytest.mark.parametrize("where", ["class", "client", "data", "method folder"])
def test_hostile_names_are_text(tmp_path: Path, where: str) -> None:
    fed = federation(classes=("0", HOSTILE)) if where == "class" else federation()
    if where == "client":
        fed = replace(fed, clients=(replace(fed.clients[0], name=HOSTILE), *fed.clients[1:]))
    run = FakeRun(fed)
    if where == "data":
        run.about["data"] = HOSTILE
    if where == "method folder":
        run.path = Path("runs") / HOSTILE.replace("/", "")
    for runs in ((run,), (run, run)):
        page = written(tmp_path, *runs)
        assert page.count("<script") == Reader(page).tags.count("script") == 1
        assert "&lt;script&gt;" in page


def test_a_name_with_bytes_that_are_not_text(tmp_path: Path) -> None:
    Reader(written(tmp_path, FakeRun(federation(classes=("0", "caf\udce9")))))


def test_same_run_same_bytes(tmp_path: Path) -> None:
    assert written(tmp_path, FakeRun(federation())) == written(tmp_path, FakeRun(federation()))


def test_unfinished(tmp_path: Path) -> None:
    run = FakeRun(federation())
    run.last, run.rows = None, run.rows[:2]
    text = Reader(written(tmp_path, run)).text
    assert "unfinished: 2 of 4 rounds" in text
    assert f"{run.rows[-1].scores['local_test'].mean:.2f}" in text
    run.rows = []
    text = Reader(written(tmp_path, run)).text
    assert "unfinished: 0 of 4 rounds" in text
    assert "No round was evaluated yet" in text


def test_an_old_summary_of_a_resumed_run_is_not_its_end() -> None:
    run: Any = FakeRun(federation())
    run.config = resolve("digits", {"train.rounds": 9})
    run.rows.append(replace(run.rows[-1], round=6))
    (facts,) = gather_facts([run])
    assert facts.state == "unfinished: 6 of 9 rounds"


def test_without_data(tmp_path: Path) -> None:
    class Lost(FakeRun):
        federation = property(lambda self: self.lose(), lambda self, value: None)  # type: ignore[assignment]

        def lose(self) -> Federation:
            raise InputError(f"no such folder: {HOSTILE}")

    text = Reader(written(tmp_path, Lost(federation()))).text
    assert f"Not shown: no such folder: {HOSTILE}" in text
    assert "site-2" in text  # from the metrics


def test_several_runs(tmp_path: Path) -> None:
    runs = [FakeRun(federation(), m, base) for m, base in (("perada", 60.0), ("standalone", 50.0), ("fedavg", 40.0))]
    page = written(tmp_path, *runs)
    text = Reader(page).text
    assert "3 runs on tiny" in text
    best, second, third = (r.summary["local_test"]["mean"] for r in runs)
    assert f"<b>{best:.2f}</b>" in page
    assert f"<u>{second:.2f}</u>" in page
    assert f"<td>{third:.2f} <small>" in page
    assert page.count("training samples of 2 classes at 3 clients") == 1  # the same data are drawn once
    twice = Reader(written(tmp_path, runs[0], runs[0])).text
    assert "perada (tiny-perada) #1" in twice
    assert "perada (tiny-perada) #2" in twice


def test_unfinished_runs_do_not_compete() -> None:
    runs: list[Any] = [FakeRun(federation(), m, base) for m, base in (("perada", 60), ("ditto", 40), ("mtl", 50))]
    assert _places(gather_facts(runs), "local_test") == ["best", "", "next"]
    runs[0].last = None
    assert _places(gather_facts(runs), "local_test") == ["", "next", "best"]
    runs[1].last = None
    assert _places(gather_facts(runs), "local_test") == ["", "", ""]


@pytest.mark.parametrize("clients", [1, 70])
@pytest.mark.parametrize("classes", [1, 25])
def test_few_and_many(tmp_path: Path, clients: int, classes: int) -> None:
    names = tuple(f"a rather long name of class {i}" for i in range(classes))
    Reader(written(tmp_path, FakeRun(federation(clients, names), rounds=1)))


def test_values_that_are_not_there(tmp_path: Path) -> None:
    run = FakeRun(federation(), "standalone")
    for i in range(1, 4):
        local, nothing = run.rows[i].scores["local_test"].per_client, Scores(dict.fromkeys(["site-0", "site-1"]))
        found = {"local_test": Scores({**local, "site-1": None}), "global_test": nothing}
        run.rows[i] = replace(run.rows[i], scores=found, global_model=None, has_global_model=False, distilled=0)
    run.last, run.shifted = run.rows[-1], None
    page = written(tmp_path, run)
    read = Reader(page)
    assert "n/a" in read.text
    assert "No distillation." in read.text
    assert not re.search(r"\b(None|nan|NaN|inf)\b", read.text)


def test_multilabel_is_auc(tmp_path: Path) -> None:
    text = Reader(written(tmp_path, FakeRun(federation(classes=("a", "b", "c"), multilabel=True)))).text
    assert "AUC in %" in text
    assert "ccuracy" not in text


def test_cannot_write(tmp_path: Path) -> None:
    run: Any = FakeRun(federation())
    with pytest.raises(InputError, match=r"^cannot write .*No such file or directory$"):
        write_report([run], tmp_path / "missing" / "report.html")
    with pytest.raises(InputError, match="nothing to report"):
        write_report([], tmp_path / "report.html")


def test_real_run_folder(tmp_path: Path) -> None:
    import perada

    run = perada.train(
        "digits",
        method="perada-no-kd",
        set={"train.rounds": 1, "train.epochs": 1, "train.cohort": 1, "run.shifts": False},
        out=tmp_path / "run",
    )
    first = (run.path / "report.html").read_bytes()
    Reader(first.decode())
    write_report([perada.load(run.path)], tmp_path / "again.html")
    assert first == (tmp_path / "again.html").read_bytes()
    run.folder.reopen()
    write_report([perada.load(run.path)], tmp_path / "again.html")
    assert b"unfinished: 1 of 1 rounds" in (tmp_path / "again.html").read_bytes()


def test_a_page_says_who_failed_was_absent_or_refused_and_which_students_were_discarded(tmp_path: Path) -> None:
    run = FakeRun(federation())
    run.rows[1] = replace(run.rows[1], failed=("site-0",), absent=("site-1",), distill={"diverged": True})
    run.rows[2] = replace(run.rows[2], failed=("site-0", "site-2"), refused={HOSTILE: "a bad upload"})
    write_report([run], tmp_path / "page.html")  # type: ignore[list-item]
    text = Reader((tmp_path / "page.html").read_text("utf8")).text
    assert "The distilled student diverged and was discarded in 1 of 4 evaluated rounds." in text
    assert "Training stopped being finite at site-0 (in 2), site-2 (in 1) of 4 evaluated rounds." in text
    assert "Nothing came from site-1 (in 1) of 4 evaluated rounds." in text
    assert f"Uploads were refused from {HOSTILE} (in 1) of 4 evaluated rounds." in text


def test_a_run_whose_students_are_all_discarded_does_not_say_that_it_distilled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    settings = {"train__rounds": 2, "distill__lr": 1e30, "distill__guard": "none"}
    assert commands.train(out, **settings) == 0
    shown = " ".join(capsys.readouterr().out.split())
    page = Reader((out / "report.html").read_text("utf8")).text
    for text in (shown, page):
        assert "student diverged and was discarded in 2 of 2 evaluated rounds." in text
    assert "0 of 2" in shown
    assert "Distilled in 0 of 2 rounds, without a guard." in page


def test_small_helpers() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(1, 3, whole=True) == [1, 2, 3]
    assert ticks(5, 5) == [5]
    assert all(1 < len(ticks(low, low + span)) <= 6 for low in (0.0, 13.7, 96.2) for span in (0.9, 2.0, 7.3, 46.0))
    assert [human_bytes(v) for v in (0, 999, 53800, 12.9e6, 2e15)] == ["0 B", "999 B", "53.8 kB", "12.9 MB", "2000 TB"]
    assert shorten("x" * 30, 10) == "x" * 9 + "…"
    assert [shorten("北京北京", most) for most in (8, 5)] == ["北京北京", "北京…"]
    assert shorten("short", 10) == "short"


def test_a_run_made_from_objects_is_reported(tmp_path: Path) -> None:
    """Unfinished and without its network, it has no numbers of parameters."""
    import perada

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
    own = replace(federation(), options=DataOptions(name=GIVEN))
    train = perada.Train(rounds=1, cohort=2, epochs=1, batch=4)
    experiment = perada.Experiment(net, own, perada.methods.FedAvg(), adapter=None, head="1", train=train)
    path = experiment.run(tmp_path / "run").path
    assert "26 of 26 parameters" in Reader((path / "report.html").read_text("utf8")).text
    RunFolder(path).reopen()
    for given in ({}, {"model": net, "federation": own}):
        write_report([perada.load(path, **given)], tmp_path / "report.html")
        text = Reader((tmp_path / "report.html").read_text("utf8")).text
        assert ("made with data from Python" in text) == (not given)
        assert "fedavg unfinished: 1 of 1 rounds n/a n/a" in text


def test_a_round_whose_student_diverged_is_not_subtracted_twice() -> None:
    """`distilled` does not count it."""
    rows = [Evaluation(r, {}, distilled=min(r, 3), distill={"diverged": r == 4}) for r in (1, 2, 3, 4)]
    assert distillations(rows[-1], rows) == (4, 3)
    assert distillations(rows[2], rows[:3]) == (3, 3)


def test_pretraining_is_counted_and_said_apart(tmp_path: Path) -> None:
    """3 kB of adapters and 9 kB of whole models: 12 kB in all, three quarters of them in pretraining."""
    run = FakeRun(federation(), rounds=3)
    run.about["pretrain"] = {"round": 2, "bytes_up": 9000, "bytes_down": 18000, "seconds": 1.0}
    run.about["parameters"]["full"] = 61650
    page = written(tmp_path, run)
    text = Reader(page).text
    assert "Sent by clients 12 kB in all; 9 kB of it (75 %) in 2 rounds of pretraining, with whole models" in text
    assert "12,330 of 61,650 parameters; without pretraining" in text
    assert "From clients 12 kB (pretraining 9 kB of it) To clients 27 kB (pretraining 18 kB of it)" in text
    assert "from clients, round 0: 9 kB" in text
    assert "Round 0 has what pretraining sent." in text
    both = Reader(written(tmp_path, run, FakeRun(federation(), "standalone"))).text
    assert "12 kB (pretraining 9 kB of it)" in both


def test_without_pretraining_there_is_no_word_of_it(tmp_path: Path) -> None:
    text = Reader(written(tmp_path, FakeRun(federation()))).text
    assert "retraining" not in text.partition("Configuration and versions")[0]


def test_a_line_breaks_where_the_mean_is_over_others() -> None:
    points = [(1, 60.0, 1.0), (2, 66.0, 1.0), (3, 67.0, 1.0), (4, 61.0, 1.0), (5, None, None), (6, 62.0, 1.0)]
    two, one = "2 of 3 clients, without west", "1 of 3 clients, without north, west"
    assert [[r for r, _, _ in p] for p in Series("a", 0, points).pieces] == [[1, 2, 3, 4], [6]]
    assert [[r for r, _, _ in p] for p in Series("a", 0, points, {2: two, 3: two}).pieces] == [[1], [2, 3], [4], [6]]
    assert [[r for r, _, _ in p] for p in Series("a", 0, points, {2: two, 3: one}).pieces] == [[1], [2], [3], [4], [6]]
