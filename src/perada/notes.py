"""What a user should know before a training begins, and what is no reason to refuse it: one line each."""

from __future__ import annotations

from .data import Federation


def about_data(federation: Federation) -> list[str]:
    """Whatever the data lack."""
    lines = [f"warning: cannot read {path}: skipped (data.skip_bad)" for path in federation.skipped]
    if not federation.tested:
        lines.append("warning: nobody has test images, so test scores are n/a: raise data.test, or declare some")
    if not federation.multilabel and bool((federation.targets == federation.targets[0]).all()):
        name = federation.classes[int(federation.targets[0])]
        lines.append(f"warning: every image is of class {name!r}: any model is right, there is nothing to learn")
    return lines
