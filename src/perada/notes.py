"""What a user should know before a training begins, and what is no reason to refuse it: one line each."""

from __future__ import annotations

from .config import Config
from .data import Federation
from .methods import Method


def about_data(federation: Federation) -> list[str]:
    """Whatever the data lack."""
    lines = [f"warning: cannot read {path}: skipped (data.skip_bad)" for path in federation.skipped]
    if not federation.tested:
        lines.append("warning: nobody has test images, so test scores are n/a: raise data.test, or declare some")
    if not federation.multilabel and bool((federation.targets == federation.targets[0]).all()):
        name = federation.classes[int(federation.targets[0])]
        lines.append(f"warning: every image is of class {name!r}: any model is right, there is nothing to learn")
    return lines


def about_settings(config: Config, method: Method) -> list[str]:
    """Settings that are given and change nothing."""
    distill = config.distill
    if not method.parts.distils or distill.steps or distill.data == "none":
        return []
    return [f"warning: distill.steps is 0: nothing is distilled, and distill.data={distill.data} is not used"]
