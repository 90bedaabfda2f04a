"""Tables, figures and one self-contained HTML page about finished runs."""

from .page import write_partition, write_report

__all__ = ["write_partition", "write_report"]
