"""The sites at the other end of Flower's grid: who is there, what they are asked, what they answer in time.

Flower promises little: a node comes and goes, a reply may never come, a wait may have no end. Here every wait ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..errors import RunError
from .bundle import bundle, unbundle
from .messages import About, Refused, one_line, read_about, read_reply
from .settings import Rounds

T = TypeVar("T")
STOPPED = "RunNotRunningException"  # what Flower raises when somebody stops a run
Owners = Callable[[], Mapping[int, str]]  # whose key a node has, where keys are checked
Tell = Callable[[str, str, str], None]  # (site, event, detail)
TYPES = {"hello": "query", "weights": "query", "train": "train", "finish": "train"}  # the rest is "evaluate"
GRACE = 5.0  # seconds a reply may be on its way; longer, and a site that comes back would work on a closed round
LATE = 60.0  # seconds to look out for a late reply after that, to name it


@dataclass(frozen=True)
class Asked:
    """A message that waits for its reply."""

    site: str
    about: About
    until: float = 0.0  # when to forget it: a hello is asked again then


def limit_tries(grid: Grid, seconds: float) -> None:
    """Flower's calls to its SuperLink are tried again without an end: give them one."""
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is not None and hasattr(invoker, "max_time"):
        invoker.max_time = seconds


class Link:
    """Sites by name. A node is asked once who it is (`hello`)."""

    def __init__(
        self, grid: Grid, sites: Sequence[str], rounds: Rounds, tell: Tell, owners: Owners | None = None
    ) -> None:
        self.grid, self.sites, self.rounds, self.tell, self.owners = grid, tuple(sites), rounds, tell, owners
        self.nodes: dict[str, int] = {}
        self.needs: set[str] = set()  # sites that must be sent the backbone
        self._hellos: dict[str, tuple[int, Asked]] = {}  # message -> node
        self._late: dict[str, Asked] = {}
        self._replaced: set[int] = set()  # nodes of sites that have come back as others
        self._told: set[tuple[int, str]] = set()

    def find(self, hello: RecordDict, within: float, enough: int | None = None) -> None:
        """Ask unknown nodes for their names, until all sites (or `enough`) are known or the time is up."""
        until = time.monotonic() + within
        while True:
            self._ask(hello)
            self._hear()
            wanted = len(self.sites) if enough is None else enough
            if len(self.nodes) >= wanted or time.monotonic() >= until:
                return
            time.sleep(self.rounds.poll_s)

    def _ask(self, hello: RecordDict) -> None:
        there = set(self._call(self.grid.get_node_ids))
        for site, node in list(self.nodes.items()):
            if node not in there:
                del self.nodes[site]
                self._replaced.clear()
                self.tell(site, "gone", f"node {node}")
        now = time.monotonic()
        self._hellos = {m: (n, a) for m, (n, a) in self._hellos.items() if n in there and a.until > now}
        busy = {n for n, _ in self._hellos.values()} | set(self.nodes.values())
        for node in sorted(there - busy - self._replaced):
            asked = Asked("", read_about(hello), now + self.rounds.hello_s)
            for sent, _ in self._push({node: hello}, "hello", self.rounds.hello_s):
                self._hellos[sent] = (node, asked)

    def _hear(self) -> None:
        for message, (node, asked) in self._pull(self._hellos):
            try:
                if isinstance(message, str) or message.has_error():
                    why = message if isinstance(message, str) else one_line(message.error.reason)
                    raise Refused(f"no answer to hello: {why}")
                reply = read_reply(message.content)
                if not reply.about.answers(asked.about):
                    raise Refused(f"hello: {one_line(reply.error) or 'an answer to something else'}")
                if reply.site not in self.sites:
                    raise Refused(f"{reply.site[:64]!r} is no site of this federation")
                self._check_owner(node, reply.site)
                if reply.error:
                    raise Refused(f"{reply.site}: {one_line(reply.error)}")
            except Refused as error:
                if (node, str(error)) not in self._told:  # it is asked again: say it once
                    self._told.add((node, str(error)))
                    self.tell("", "refused", f"node {node}: {error}")
                continue
            if (old := self.nodes.get(reply.site)) is not None:
                self._replaced.add(old)
            self.nodes[reply.site] = node  # the newest wins: a site that came back may have a new node
            (self.needs.add if reply.needs == "weights" else self.needs.discard)(reply.site)
            self.tell(reply.site, "here", f"node {node}")

    def _check_owner(self, node: int, site: str) -> None:
        """A site may not speak with another's name: its key says who it is."""
        if self.owners is not None and (owner := self.owners().get(node)) != site:
            whose = f"{owner!r}" if owner else "no site"
            raise Refused(f"it says it is {site!r}, but its key belongs to {whose}")

    def exchange(self, contents: Mapping[str, RecordDict], within: float) -> dict[str, RecordDict]:
        """Send each site its message and wait for the replies, `within` seconds at most."""
        about = {site: read_about(content) for site, content in contents.items()}
        pending: dict[str, Asked] = {}
        replies: dict[str, RecordDict] = {}
        for kind in dict.fromkeys(a.kind for a in about.values()):
            to = {self.nodes[s]: c for s, c in contents.items() if s in self.nodes and about[s].kind == kind}
            names = {node: site for site, node in self.nodes.items()}
            for sent, node in self._push(to, kind, within):
                pending[sent] = Asked(names[node], about[names[node]])
        until = time.monotonic() + within
        while pending and time.monotonic() < until:
            for message, asked in self._pull(pending):
                if isinstance(message, str):
                    self.tell(asked.site, "refused", f"{asked.about.kind}: its reply cannot be read ({message})")
                elif message.has_error():
                    self.tell(asked.site, "failed", f"{asked.about.kind}: {one_line(message.error.reason)}")
                else:
                    replies[asked.site] = message.content
            for message, asked in self._pull(self._late):
                if not isinstance(message, str) and message.has_content():
                    late = f"late answer to {asked.about.kind} of round {asked.about.round}"
                    self.tell(asked.site, "refused", late)
            if pending:
                pause = max(self.rounds.poll_s, 0.02 * len(pending))  # a look at each costs the SuperLink some work
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
        for asked in pending.values():
            self.tell(asked.site, "silent", f"no answer to {asked.about.kind} within {within:.3g} s")
        now = time.monotonic()
        self._late = {m: a for m, a in self._late.items() if a.until > now}
        self._late |= {m: replace(a, until=now + LATE) for m, a in pending.items()}
        return replies

    def _call(self, call: Callable[..., Any], *words: Any) -> Any:
        """Flower itself tries again and again (`limit_tries`); what it gives up on ends the run, which is saved."""
        try:
            return call(*words)
        except Exception as error:
            raise self._lost(error) from error

    def _lost(self, error: Exception) -> RunError:
        kind = type(error).__name__
        what = f"the SuperLink does not answer ({kind} {(str(error).splitlines() or [''])[0]})"
        what = "the run was stopped" if kind == STOPPED else what
        return RunError(f"{what}; the last round is saved: run it again with resume=true")

    def _push(self, to: Mapping[int, RecordDict], kind: str, within: float) -> list[tuple[str, int]]:
        """(message, node) of what was sent. It lives as long as it is waited for, and no longer."""
        messages = [
            Message(bundle(content), node, TYPES.get(kind, "evaluate"), ttl=within + GRACE)
            for node, content in to.items()
        ]
        ids = list(self._call(self.grid.push_messages, messages)) if messages else []
        return [(m, node) for m, node in zip(ids, to, strict=False) if m]

    def _pull(self, asked: dict[str, T]) -> list[tuple[Message | str, T]]:
        """The replies that have come, or why one cannot be read; what is answered is no longer asked. One at a time:
        a reply that breaks Flower's own reading must not take the others with it."""
        found: list[tuple[Message | str, T]] = []
        for sent in list(asked):
            try:
                replies = list(self.grid.pull_messages([sent]))[:1]
                for message in replies:
                    if message.has_content():
                        message.content = unbundle(message.content)
            except Exception as error:
                if _is_links(error):
                    raise self._lost(error) from error
                found.append((type(error).__name__, asked.pop(sent)))
                continue
            found += [(message, asked.pop(sent)) for message in replies]
        return found


def _is_links(error: Exception) -> bool:
    """Whether the SuperLink is at fault, and not what a site sent."""
    kind = type(error)
    return isinstance(error, OSError) or kind.__module__.startswith("httpx") or kind.__name__ == STOPPED
