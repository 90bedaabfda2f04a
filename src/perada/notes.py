"""What a user should know before a training begins, and what is no reason to refuse it: one line each."""

from __future__ import annotations

from .data import Federation


def about_data(federation: Federation) -> list[str]:
    """Whatever the data lack."""
    return [f"warning: cannot read {path}: skipped (data.skip_bad)" for path in federation.skipped]
