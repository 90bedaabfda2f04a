"""Faults in the files of a run folder: no traceback, no hang, and no result that changes unsaid."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from .faults import EDITABLE, FAULTS, Bench, files_of

MUTATIONS = int(os.environ.get("PERADA_MUTATIONS", "100"))
FIRST = int(os.environ.get("PERADA_FIRST", "0"))  # so that 1,000 can be tried in parts
FINE = ("same", "said", "refused", "edited")


def table(seen: Counter[tuple[str, str]]) -> str:
    """Returns how often each kind of fault had which outcome."""
    lines = [f"{'fault':32}" + "".join(f"{name:>9}" for name in (*FINE, "wrong"))]
    for kind in FAULTS:
        lines.append(f"{kind:32}" + "".join(f"{seen[kind, name]:9}" for name in (*FINE, "wrong")))
    return "\n".join(lines)


def test_no_fault_in_a_run_folder_changes_a_result_unsaid(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power is cut here
    bench, seen, wrong = Bench(tmp_path_factory.mktemp("torture")), Counter[tuple[str, str]](), []
    kinds, again = list(FAULTS), bench.answers()
    assert {n: bench.outcome(n, a, False) for n, a in again.items()} == dict.fromkeys(again, "same")
    for number in range(FIRST, FIRST + MUTATIONS):
        bench.copy()
        rng = np.random.default_rng(number)
        files = files_of(bench.run)
        kind, file = kinds[number % len(kinds)], files[int(rng.integers(len(files)))]
        about = f"{number}: {file.relative_to(bench.run)} {kind}"
        FAULTS[kind](file, bench.run, rng)
        for name, found in bench.answers().items():
            outcome = bench.outcome(name, found, file.name in EDITABLE)
            seen[kind, outcome if outcome in FINE else "wrong"] += 1
            if outcome not in FINE:
                wrong.append(f"{about}: {name}: {outcome}")
    with capsys.disabled():
        print(f"\n{table(seen)}" if MUTATIONS > 100 else "", end="")
    assert wrong == [], "\n".join(wrong)
