"""What a training is between two rounds: its state, as a checkpoint and back, and what was measured of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..client.cohort import TOOK_PART
from ..client.scores import Scores
from ..errors import Damaged
from ..lanes import State, on_cpu, stack
from ..privacy.spending import ledger_in
from .files import is_number

COUNTERS = ("bytes_up", "bytes_down", "distilled", "accepted")
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
    took_part: int = 0  # clients that took part, summed over the rounds; 0 where an older version did not count them
    seconds: float = 0.0
    train_loss: float | None = None  # the mean over the round's clients
    distill: Mapping[str, Any] | None = None  # what the round's distillation did
    failed: tuple[str, ...] = ()  # clients whose training stopped being finite
    absent: tuple[str, ...] = ()  # sampled sites that sent nothing
    refused: Mapping[str, str] = field(default_factory=dict)  # sites whose upload was refused, and why
    epsilon: Mapping[str, float] | None = None  # ε so far, mean and max over clients, under differential privacy
    exhausted: tuple[str, ...] = ()  # clients whose privacy budget does not allow another round
    global_shifted: float | None = None  # the global model on shifted images, in summary.json only

    def as_dict(self) -> dict[str, Any]:
        """Returns the row as it is written to metrics.jsonl."""
        row: dict[str, Any] = {"round": self.round, **{name: s.as_dict() for name, s in self.scores.items()}}
        row["global_model"] = {"global_test": self.global_model} if self.has_global_model else None
        if self.global_shifted is not None:
            row["global_model"] |= {"shifted": self.global_shifted}
        row |= {"bytes_up": self.bytes_up, "bytes_down": self.bytes_down}
        row |= {"distilled": self.distilled, "accepted": self.accepted, "seconds": self.seconds}
        row |= {TOOK_PART: self.took_part} if self.took_part else {}
        row |= {"train_loss": self.train_loss, "distill": None if self.distill is None else dict(self.distill)}
        row |= {"failed": list(self.failed)} if self.failed else {}
        row |= {"absent": list(self.absent)} if self.absent else {}
        row |= {"refused": dict(self.refused)} if self.refused else {}
        row |= {"epsilon": dict(self.epsilon)} if self.epsilon else {}
        row |= {"exhausted": list(self.exhausted)} if self.exhausted else {}
        return row

    @classmethod
    def read(cls, row: Mapping[str, Any]) -> Evaluation:
        """Returns what `as_dict` wrote, or the evaluation in a summary.json.

        A field that an older version did not write has its default. A split without scores per client is left out.
        Raises ValueError, KeyError, TypeError or AttributeError for what `as_dict` does not write.
        """
        _check_kinds(row)
        known = {*COUNTERS, TOOK_PART, "seconds", "train_loss", "distill", "refused", "epsilon"}
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
            exhausted=tuple(row.get("exhausted", ())),
            **{name: row[name] for name in known & row.keys()},
        )

    def brief(self) -> str:
        """Returns the mean scores in a few words, for progress bars: `local 91.8 global 40.1`."""
        personal = {"local": "local_test", "global": "global_test"}
        shown = personal if "local_test" in self.scores else {"val": "local_val"}
        found = {name: self.scores[split] for name, split in shown.items() if split in self.scores}
        told = {name: "n/a" if s.mean is None else f"{s.mean:.1f}" for name, s in found.items()}
        over = {name: f" ({s.over})" for name, s in found.items() if s.over}
        words = [f"{name} {value}{over.get(name, '')}" for name, value in told.items()]
        return " ".join([*words, f"ε {self.epsilon['mean']:.2f}"] if self.epsilon else words)


def _check_kinds(row: Mapping[str, Any]) -> None:
    """Raises ValueError or AttributeError for a value in a row that is not of the kind that is written."""
    whole = [row["round"], *(row[name] for name in (*COUNTERS, TOOK_PART) if name in row)]
    scores = [row.get("seconds"), row.get("train_loss"), *(row.get("global_model") or {}).values()]
    for split in (row[name] for name in SPLITS if name in row):
        for part in ("per_client", "per_label"):
            scores += ((split or {}).get(part) or {}).values()
    lists = [row.get("failed", []), row.get("absent", []), row.get("exhausted", [])]
    objects = [row.get("distill") or {}, row.get("refused") or {}]
    if (spent := row.get("epsilon")) is not None:
        scores += [spent["mean"], spent["max"]]
    if not (
        all(is_number(n, int) for n in whole)
        and all(v is None or is_number(v) for v in scores)
        and all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in lists)
        and all(isinstance(one, Mapping) for one in objects)
    ):
        raise ValueError("a value of another kind than was written")


@dataclass(frozen=True)
class Checkpoint:
    """What is saved of a finished round: one state per client, none where clients keep nothing."""

    round: int
    server: State
    broadcast: State
    clients: Mapping[str, State]  # by name
    note: dict[str, Any]  # goes into state.json
    nameless: bool = False  # whether an older version wrote it, and the clients' names are not known

    def of(self, names: Sequence[str]) -> list[State]:
        """Returns the clients' states in the order of their names; refuses other clients than were saved."""
        if self.nameless and len(self.clients) == len(names):
            return list(self.clients.values())
        if self.clients and self.clients.keys() != set(names):
            other = sorted(self.clients.keys() ^ set(names))[0]
            raise Damaged(f"the checkpoint of round {self.round} has other clients than the data ({other!r})")
        return [self.clients[name] for name in names] if self.clients else []


def check_note(note: Mapping[str, Any], round: int) -> None:
    """Raises ValueError, KeyError, TypeError or AttributeError for a note that is not that of a `Moment`."""
    last = note["last"]
    counters = {n: note["counters"][n] for n in COUNTERS} | {TOOK_PART: note["counters"].get(TOOK_PART, 0)}
    Evaluation.read({"round": round, **counters, "seconds": note["seconds"], **last})
    ledger_in(note.get("memory", {}))
    if not isinstance(note["finished"], bool) or not last.keys() <= {f.name for f in fields(Evaluation)}:
        raise ValueError("a value of another kind than was written")


@dataclass(frozen=True)
class Moment:
    """The whole state between two rounds. It is replaced in one assignment, so a round is all or nothing."""

    round: int
    server: State
    broadcast: State
    kept: State = field(default_factory=State)  # one lane per client, or empty
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*COUNTERS, TOOK_PART), 0))
    last: dict[str, Any] = field(default_factory=dict)  # the last round's loss, distillation, failures
    memory: dict[str, Any] = field(default_factory=dict)  # what the server remembers of the rounds before
    changed: frozenset[int] = frozenset()  # clients changed since the last checkpoint
    finished: bool = False  # whether the method's last stage is done, where it has one

    def checkpoint(self, seconds: float, names: Sequence[str], copy: bool, changed_only: bool) -> Checkpoint:
        """Returns what is saved of this moment. names: the clients, one per lane.

        copy: copies from a GPU now. changed_only: copies only clients that changed; the others' files are there.
        """
        clients = [self.kept.map(lambda t, m=m: t[m : m + 1]) for m in range(self.kept.lanes)]  # type: ignore[misc]
        server, broadcast = self.server, self.broadcast
        if copy:
            server, broadcast = on_cpu(server), on_cpu(broadcast)
            clients = [c if changed_only and m not in self.changed else on_cpu(c) for m, c in enumerate(clients)]
        note = {"counters": self.counters, "last": self.last, "seconds": seconds, "finished": self.finished}
        note |= {"memory": self.memory} if self.memory else {}
        by_name = dict(zip(names, clients, strict=True)) if clients else {}
        return Checkpoint(self.round, server, broadcast, by_name, note)

    @classmethod
    def of(cls, saved: Checkpoint, names: Sequence[str], here: Callable[[State], State]) -> Moment:
        """Returns the moment of a checkpoint. here: moves a state to the device and precision of the run."""
        kept = stack(*map(here, saved.of(names))) if saved.clients else State()
        note = saved.note
        counters, last = dict(note["counters"]), dict(note["last"])
        server, broadcast = here(saved.server), here(saved.broadcast)
        memory = dict(note.get("memory", {}))  # an older version had none
        return cls(saved.round, server, broadcast, kept, counters, last, memory, finished=note["finished"])


@dataclass(frozen=True)
class Progress:
    """What happened in a training, for callbacks, progress bars and logs."""

    round: int
    rounds: int
    row: Evaluation | None  # where this round was evaluated
    failed: tuple[str, ...]  # clients whose training stopped being finite
    event: Literal["gathered", "trained", "finished", "round"] = "round"
    stage: str = "training"  # or pretraining
    exhausted: tuple[str, ...] = ()  # clients whose privacy budget does not allow another round
