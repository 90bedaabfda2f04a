"""One evaluation of a run: a row of metrics.jsonl, with names and types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..client.scores import Scores

SPLITS = ("local_test", "local_val", "global_test", "server_val", "shifted")


@dataclass(frozen=True)
class Evaluation:
    """What was measured after a round, and what the run had cost by then."""

    round: int
    scores: Mapping[str, Scores]  # by split: those of SPLITS that were measured; "shifted" in summary.json only
    global_model: float | None = None  # the one global model on Global-test, in percent
    has_global_model: bool = False  # whether there is one; without test data its score is None all the same
    bytes_up: int = 0
    bytes_down: int = 0
    distilled: int = 0  # rounds that distilled
    accepted: int = 0  # rounds whose guard kept a distilled candidate
    seconds: float = 0.0
    train_loss: float | None = None  # the mean over the round's clients
    distill: Mapping[str, Any] | None = None  # what the round's distillation did
    failed: tuple[str, ...] = ()  # clients whose training stopped being finite
    absent: tuple[str, ...] = ()  # sampled sites that sent nothing
    refused: Mapping[str, str] = field(default_factory=dict)  # sites whose upload was refused, and why
    global_shifted: float | None = None  # the global model on shifted images, in summary.json only

    def as_dict(self) -> dict[str, Any]:
        """The row as it is written."""
        row: dict[str, Any] = {"round": self.round, **{name: s.as_dict() for name, s in self.scores.items()}}
        row["global_model"] = {"global_test": self.global_model} if self.has_global_model else None
        if self.global_shifted is not None:
            row["global_model"] |= {"shifted": self.global_shifted}
        row |= {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        row |= {"distilled": self.distilled, "accepted": self.accepted, "seconds": self.seconds}
        row |= {"train_loss": self.train_loss, "distill": None if self.distill is None else dict(self.distill)}
        row |= {"failed": list(self.failed)} if self.failed else {}
        row |= {"absent": list(self.absent)} if self.absent else {}
        row |= {"refused": dict(self.refused)} if self.refused else {}
        return row

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Evaluation:
        """Returns what `as_dict` wrote, or the evaluation in a summary.json.

        What an older version did not write has its default. A split without scores per client is left out.
        """
        known = {"bytes_up", "bytes_down", "distilled", "accepted", "seconds", "train_loss", "distill", "refused"}
        splits = {name: row[name] for name in row if name in SPLITS}
        server = row.get("global_model") or {}
        return cls(
            round=row["round"],
            scores={name: Scores.read(of) for name, of in splits.items() if of and "per_client" in of},
            global_model=server.get("global_test"),
            global_shifted=server.get("shifted"),
            has_global_model=row.get("global_model") is not None,
            failed=tuple(row.get("failed", ())),
            absent=tuple(row.get("absent", ())),
            **{name: row[name] for name in known & row.keys()},
        )

    def brief(self) -> str:
        """Returns the mean scores in a few words, for progress bars: `local 91.8 global 40.1`."""
        personal = {"local": "local_test", "global": "global_test"}
        shown = personal if "local_test" in self.scores else {"val": "local_val"}
        means = {name: self.scores[split].mean for name, split in shown.items() if split in self.scores}
        return " ".join(f"{name} {'n/a' if mean is None else f'{mean:.1f}'}" for name, mean in means.items())
