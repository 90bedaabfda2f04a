"""The sections of the document about differential privacy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .cells import MISSING, number, pipes
from .private import METHODS, NOISES
from .results import Result, value
from .running import State

LEVELS = (0.0, *NOISES)
PAPER = {  # method -> accuracy at ε = ∞, 5.99, 3.7 and 1.81
    "perada-no-kd": (97.69, 77.49, 77.32, 76.68),
    "perada": (98.08, 80.33, 79.79, 77.83),
    "ditto": (98.59, 76.76, 76.75, 76.67),
}
SEEN = {
    "dp-vit": (
        "The ViT was trained by `experiments/train_vit.py` (100 epochs) on CIFAR-100's training images and labels.",
        "Distillation takes its public images from them, too. Its weights are not published: train it again.",
    )
}


def private_section(state: State, figures: dict[str, str]) -> list[str]:
    """Returns accuracy against ε, per method."""
    found = {(m, level): state.found.get(f"{m}-{level:g}") for m in METHODS for level in LEVELS}
    if not any(found.values()):
        return ["Only the searches have results so far.", ""]
    rows = []
    for level, *papers in zip(LEVELS, *(PAPER[m] for m in METHODS), strict=True):
        row = [f"{level:g}" if level else "none", _epsilon([found[m, level] for m in METHODS])]
        for method, paper in zip(METHODS, papers, strict=True):
            result = found[method, level]
            both = [None if result is None else value(result, metric) for metric in ("Local", "Global")]
            row += [*map(number, both), number(paper)]
        rows.append(row)
    head = ["noise σ", "ε at δ = 1e-5", *(w for m in METHODS for w in (f"{m}: Local", "Global", "paper"))]
    return [
        "Accuracy in %, personal models, means over the 20 clients. ε is that of a client's data over the whole",
        "run, mean ± std over clients. Small clients spend more, since a batch is a larger part of their data.",
        "*paper* is its own accuracy (ImageNet-pretrained ViT-S at 224 pixels) at ε = ∞, 5.99 ± 3.03, 3.7 ± 2.12",
        "and 1.81 ± 1.12. It names no batch size, so its ε cannot be matched. One seed, and secret noise: nobody",
        "can repeat a private run exactly.",
        *SEEN.get(state.experiment.name, ()),
        "",
        *pipes(head, rows),
        *_rates(state),
        *_untested(found),
    ]


def _epsilon(several: Sequence[Result | None]) -> str:
    """Returns ε of the methods at a noise level, as a range of means where it differs."""
    spent = [(r["last"].get("privacy") or {}).get("epsilon") for r in several if r is not None]
    shown = sorted({f"{e['mean']:.2f} ± {e['std']:.2f}" for e in spent if e is not None})
    return " or ".join(shown) if shown else "∞" if any(several) else MISSING


def _rates(state: State) -> list[str]:
    """Returns which rates were chosen on validation data."""
    words = []
    for choice in state.experiment.choices:
        scores = {n: state.found[n]["validation"]["local_val"] for n in choice.among if n in state.found}
        if len(scores) < len(choice.among):
            continue
        best = state.found[max(scores, key=lambda n: scores[n] or 0.0)]["settings"]
        shown = ", ".join(f"{key} {best[key]:g}" for key in ("train.lr", "distill.lr") if key in best)
        words.append(f"{choice.name}: {shown}")
    return [f"Chosen on validation data with noise 1 (*noisy*) and without noise (*open*): {'; '.join(words)}.", ""]


def _untested(found: Mapping[tuple[str, float], Result | None]) -> list[str]:
    missing = [f"{m} at noise {level:g}" for (m, level), result in found.items() if result is None]
    return [f"Not run yet: {', '.join(missing)}.", ""] if missing else []
