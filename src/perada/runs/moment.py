"""The state between two rounds, as a checkpoint and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from ..lanes import State, on_cpu, stack
from .folder import Checkpoint
from .rows import Evaluation


@dataclass(frozen=True)
class Moment:
    """The whole state between two rounds. It is replaced in one assignment, so a round is all or nothing."""

    round: int
    server: State
    broadcast: State
    kept: State = field(default_factory=State)  # one lane per client, or empty
    counters: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("bytes_up", "bytes_down", "distilled", "accepted"), 0)
    )
    last: dict[str, Any] = field(default_factory=dict)  # the last round's loss, distillation, failures
    changed: frozenset[int] = frozenset()  # clients changed since the last checkpoint
    finished: bool = False  # whether the method's last stage is done, where it has one

    def checkpoint(self, seconds: float, copy: bool, changed_only: bool) -> Checkpoint:
        """Returns what is written of this moment.

        copy: copies from a GPU now. changed_only: the other clients are links to older files, so leaves them there.
        """
        clients = [self.kept.map(lambda t, m=m: t[m : m + 1]) for m in range(self.kept.lanes)]  # type: ignore[misc]
        server, broadcast = self.server, self.broadcast
        if copy:
            server, broadcast = on_cpu(server), on_cpu(broadcast)
            clients = [c if changed_only and m not in self.changed else on_cpu(c) for m, c in enumerate(clients)]
        note = {"counters": self.counters, "last": self.last, "seconds": seconds, "finished": self.finished}
        return Checkpoint(self.round, server, broadcast, clients, note)

    @classmethod
    def of(cls, saved: Checkpoint, here: Callable[[State], State]) -> Moment:
        """Returns the moment of a checkpoint. here: moves a state to the device and precision of the run."""
        kept = stack(*map(here, saved.clients)) if saved.clients else State()
        note = saved.note
        counters, last = dict(note["counters"]), dict(note["last"])
        server, broadcast = here(saved.server), here(saved.broadcast)
        return cls(saved.round, server, broadcast, kept, counters, last, finished=note["finished"])


@dataclass(frozen=True)
class Progress:
    """What happened in a training, for callbacks, progress bars and logs."""

    round: int
    rounds: int
    row: Evaluation | None  # where this round was evaluated
    failed: tuple[str, ...]  # clients whose training stopped being finite
    event: Literal["gathered", "trained", "finished", "round"] = "round"
    stage: str = "training"  # or pretraining
