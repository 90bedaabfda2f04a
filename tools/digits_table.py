"""The table of docs/digits.md: methods over seeds, paired differences with confidence intervals.

    python tools/digits_table.py --seeds 5 --jobs 2 --out docs/digits.json
    python tools/digits_table.py --show docs/digits.json

Each seed is another split AND another training (data.seed and run.seed). Nothing is chosen here: every row is
the preset as it is, with the one change its name says.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats

ROWS: dict[str, dict[str, Any]] = {
    "standalone": {"method.name": "standalone"},
    "fedavg": {"method.name": "fedavg"},
    "perada-no-kd": {"method.name": "perada-no-kd"},
    "perada": {"method.name": "perada"},
    "perada, guard=none": {"method.name": "perada", "distill.guard": "none"},
}
COLUMNS = {"local": "Local-test", "global": "Global-test", "shifted": "shifted", "server": "global model"}


def one(job: tuple[str, int, dict[str, Any], str]) -> dict[str, Any]:
    """Train one row with one seed in this process, on one thread."""
    from perada.client.scores import scores_on
    from perada.config import build, resolve
    from perada.data import named_sets
    from perada.lanes.machine import keep_memory

    row, seed, settings, device = job
    keep_memory()
    torch.set_num_threads(1)
    config = resolve("digits", {**settings, "run.seed": seed, "data.seed": seed, "run.device": device})
    sim = build(config)
    start = time.perf_counter()
    for _ in range(config.train.rounds):
        sim.round()
    trained = time.perf_counter() - start
    last = sim.evaluate()
    sets = named_sets(sim.federation, "shifted", severities=config.run.severities)
    shifted = scores_on(sim.model, sim.personal(), sim.federation, sets).as_dict()["mean"]
    server = last["global_model"]
    return {
        "row": row,
        "seed": seed,
        "local": last["local_test"]["mean"],
        "global": last["global_test"]["mean"],
        "val": last["local_val"]["mean"],
        "shifted": shifted,
        "server": server["global_test"] if server else None,
        "accepted": last["accepted"],
        "distilled": last["distilled"],
        "seconds": trained,
    }


def interval(differences: list[float]) -> tuple[float, float]:
    """Mean and half-width of the 95% t-interval."""
    a = np.array(differences)
    half = stats.t.ppf(0.975, len(a) - 1) * a.std(ddof=1) / np.sqrt(len(a)) if len(a) > 1 else float("nan")
    return float(a.mean()), float(half)


def table(found: list[dict[str, Any]], rows: list[str]) -> str:
    """Markdown: means ± std over seeds, then paired differences."""
    of = {row: sorted((f for f in found if f["row"] == row), key=lambda f: f["seed"]) for row in rows}
    lines = ["| method | " + " | ".join(COLUMNS.values()) + " | guard accepted |"]
    lines.append("| --- |" + " --- |" * (len(COLUMNS) + 1))
    for row in rows:
        cells = []
        for key in COLUMNS:
            values = [f[key] for f in of[row] if f[key] is not None]
            cells.append(f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else "–")
        accepted, distilled = sum(f["accepted"] for f in of[row]), sum(f["distilled"] for f in of[row])
        guarded = ROWS[row].get("distill.guard") != "none"
        share = "–" if not distilled else f"{accepted} of {distilled} rounds" if guarded else "no guard"
        lines.append(f"| {row} | " + " | ".join(cells) + f" | {share} |")
    lines += ["", "| paired difference (95% interval) | " + " | ".join(COLUMNS.values()) + " |"]
    lines.append("| --- |" + " --- |" * len(COLUMNS))
    pairs = [("perada", "standalone"), ("perada", "perada-no-kd"), ("perada, guard=none", "perada-no-kd")]
    for a, b in ((a, b) for a, b in pairs if a in rows and b in rows):
        cells = []
        for key in COLUMNS:
            both = [(x[key], y[key]) for x, y in zip(of[a], of[b], strict=True) if None not in (x[key], y[key])]
            mean, half = interval([x - y for x, y in both]) if both else (float("nan"), float("nan"))
            cells.append(f"{mean:+.2f} ± {half:.2f}" if both else "–")
        lines.append(f"| {a} − {b} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rows", default=";".join(ROWS), help="row names, separated by semicolons")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for every row")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="write the numbers here as JSON")
    parser.add_argument("--show", type=Path, help="print the table of such a file and train nothing")
    args = parser.parse_args()
    if args.show:
        found = json.loads(args.show.read_text())["results"]
        print(table(found, list(dict.fromkeys(r for r in ROWS if any(f["row"] == r for f in found)))))
        return
    from perada.config import parse_setting

    extra = dict(parse_setting(s) for s in args.set)
    rows = args.rows.split(";")
    jobs = [(r, s, {**ROWS[r], **extra}, args.device) for s in range(args.seeds) for r in rows]
    found = []
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for done in pool.imap_unordered(one, jobs):
            found.append(done)
            print(json.dumps(done), flush=True)
    print(table(found, rows), flush=True)
    if args.out:
        about = {"command": "python tools/digits_table.py", "set": extra, "torch": torch.__version__}
        about |= {"machine": platform.machine(), "cores": os.cpu_count(), "device": args.device}
        args.out.write_text(json.dumps({"about": about, "results": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
