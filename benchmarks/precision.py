"""Shows what bf16 and tf32 cost in accuracy, as paired differences of comparisons with the same seeds.

    for p in fp32 tf32 bf16; do perada compare cifar10 --methods perada-no-kd --seeds 3 --set train.rounds=50 \\
        --set run.precision=$p --out runs/$p ... ; done
    python benchmarks/precision.py runs/fp32 runs/tf32 runs/bf16 [--out FILE.json]

The others are compared with the first. The interval is Student's, 95%.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

SCORES = ("local_test", "local_val", "global_test")


def scores(folder: Path) -> dict[str, dict[str, float]]:
    """Run -> score -> mean over the clients."""
    found = {p.parent.name: json.loads(p.read_text()) for p in sorted(folder.glob("*/summary.json"))}
    out = {run: {s: float(held[s]["mean"]) for s in SCORES} for run, held in found.items()}
    for run, held in found.items():
        out[run]["seconds"] = float(held["seconds"])
        if held["global_model"]:
            out[run]["global_model"] = float(held["global_model"]["global_test"])
    return out


def differences(first: dict[str, dict[str, float]], other: dict[str, dict[str, float]]) -> dict[str, Any]:
    """score -> mean difference over the runs both have, and half the width of its interval."""
    runs = sorted(first.keys() & other.keys())
    out: dict[str, Any] = {"runs": runs}
    for score in first[runs[0]]:
        apart = np.array([other[r][score] - first[r][score] for r in runs])
        half = t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5 if len(apart) > 1 else float("nan")
        out[score] = [float(apart.mean()), float(half)]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    held = {folder.name: scores(folder) for folder in args.folders}
    base = args.folders[0].name
    found = {"scores": held, "differences": {n: differences(held[base], s) for n, s in held.items() if n != base}}
    for name, apart in found["differences"].items():
        shown = ", ".join(f"{k} {v[0]:+.2f} ± {v[1]:.2f}" for k, v in apart.items() if k != "runs")
        print(f"{name} - {base} ({len(apart['runs'])} runs): {shown}")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
