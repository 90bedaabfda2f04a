"""Faults in the files of a run folder: no traceback, no hang, and no result that changes unsaid."""

from __future__ import annotations

import os
from collections import Counter

import numpy as np
import pytest

from .faults import FAULTS, Bench, files_of

MUTATIONS = int(os.environ.get("PERADA_MUTATIONS", "100"))
FIRST = int(os.environ.get("PERADA_FIRST", "0"))  # so that 1,000 can be tried in parts
PARTS = 4  # tests, for as many processes
FINE = ("same", "reported", "refused", "edited")


def table(seen: Counter[tuple[str, str]]) -> str:
    """Returns how often each kind of fault had which outcome."""
    lines = [f"{'fault':32}" + "".join(f"{name:>10}" for name in (*FINE, "wrong"))]
    for kind in FAULTS:
        lines.append(f"{kind:32}" + "".join(f"{seen[kind, name]:10}" for name in (*FINE, "wrong")))
    return "\n".join(lines)


@pytest.mark.parametrize("part", range(PARTS))
def test_no_fault_in_a_run_folder_changes_a_result_unsaid(
    part: int,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power is cut here
    home, seen, wrong = tmp_path_factory.mktemp("torture"), Counter[tuple[str, str]](), []
    benches = [
        Bench(home / "each"),
        Bench(home / "every second", train__rounds=4, run__checkpoint_every=2),
        Bench(home / "older", older=True),
    ]
    for bench in benches:
        again = bench.answers()
        assert {n: bench.outcome(n, a, set()) for n, a in again.items()} == dict.fromkeys(again, "same")
    kinds = list(FAULTS)
    for number in range(FIRST + part, FIRST + MUTATIONS, PARTS):
        kind, bench = kinds[number % len(kinds)], benches[number // len(kinds) % len(benches)]
        bench.copy()
        rng = np.random.default_rng(number)
        files = files_of(bench.run)
        file = files[int(rng.integers(len(files)))]
        about = f"{number}: {file.relative_to(home)} {kind}"
        FAULTS[kind](file, bench.run, rng)
        changes = bench.changes()
        for name, answer in bench.answers().items():
            outcome = bench.outcome(name, answer, changes)
            seen[kind, outcome if outcome in FINE else "wrong"] += 1
            if outcome not in FINE:
                wrong.append(f"{about}: {name}: {outcome}")
    with capsys.disabled():
        print(f"\n{table(seen)}" if MUTATIONS > 100 else "", end="")
    assert wrong == [], "\n".join(wrong)
