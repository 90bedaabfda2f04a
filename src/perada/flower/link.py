"""The sites at the other end of Flower's grid: which are connected, and what they answer in time.

Flower promises little: nodes come and go, a reply may never come, a wait may never end. Here every wait ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..errors import RunError
from .messages import About, Refused, Reply, one_line, read_about, read_reply
from .settings import Rounds

T = TypeVar("T")
STOPPED = "RunNotRunningException"  # what Flower raises when a user stops a run
Owners = Callable[[], Mapping[int, str]]  # returns {node: site} of the admitted keys
Tell = Callable[[str, str, str], None]  # (site, event, detail)
TYPES = {"hello": "query", "weights": "query", "train": "train", "finish": "train"}  # all others: "evaluate"
GRACE = 5.0  # seconds that a reply may travel; with more, a site that comes back would work on a closed round
LATE = 60.0  # seconds to look for a late reply after that, to name its site


@dataclass(frozen=True)
class Question:
    """A message that waits for its reply."""

    site: str
    about: About
    until: float = 0.0  # when to forget it


def limit_tries(grid: Grid, seconds: float) -> None:
    """Limits Flower's calls to its SuperLink, which are tried again forever by default."""
    invoker = getattr(grid, "_retry_invoker", None)
    if invoker is not None and hasattr(invoker, "max_time"):
        invoker.max_time = seconds


class Link:
    """The sites by name. Each node is asked once for its name (`hello`)."""

    def __init__(
        self, grid: Grid, sites: Sequence[str], rounds: Rounds, tell: Tell, owners: Owners | None = None
    ) -> None:
        self.grid, self.sites, self.rounds, self.tell, self.owners = grid, tuple(sites), rounds, tell, owners
        self.nodes: dict[str, int] = {}
        self.needs: set[str] = set()  # sites that need the backbone
        self._hellos: dict[str, tuple[int, Question]] = {}  # by message: its node and the question
        self._late: dict[str, Question] = {}
        self._replaced: set[int] = set()  # nodes whose site has come back as another node
        self._told: set[tuple[int, str]] = set()

    def find(self, hello: RecordDict, within: float) -> None:
        """Asks unknown nodes for their names, until all sites are known or the time is over."""
        until = time.monotonic() + within
        while True:
            self._send_hellos(hello)
            self._read_hellos()
            if len(self.nodes) >= len(self.sites) or time.monotonic() >= until:
                return
            time.sleep(self.rounds.poll_s)

    def _send_hellos(self, hello: RecordDict) -> None:
        connected = set(self._call(self.grid.get_node_ids))
        for site, node in list(self.nodes.items()):
            if node not in connected:
                del self.nodes[site]
                self._replaced.clear()
                self.tell(site, "gone", f"node {node}")
        now = time.monotonic()
        self._hellos = {m: (n, q) for m, (n, q) in self._hellos.items() if n in connected and q.until > now}
        known = {n for n, _ in self._hellos.values()} | set(self.nodes.values()) | self._replaced
        question = Question("", read_about(hello), now + self.rounds.hello_s)
        for node in sorted(connected - known):
            for sent, _ in self._push({node: hello}, "hello", self.rounds.hello_s):
                self._hellos[sent] = (node, question)

    def _read_hellos(self) -> None:
        for message, (node, question) in self._pull(self._hellos):
            try:
                reply = self._checked_hello(message, node, question)
            except Refused as error:
                if (node, str(error)) not in self._told:  # the node is asked again: report it once
                    self._told.add((node, str(error)))
                    self.tell("", "refused", f"node {node}: {error}")
                continue
            if (old := self.nodes.get(reply.site)) is not None:
                self._replaced.add(old)
            self.nodes[reply.site] = node  # the newest wins: a site that comes back may have a new node
            (self.needs.add if reply.needs == "weights" else self.needs.discard)(reply.site)
            self.tell(reply.site, "here", f"node {node}")

    def _checked_hello(self, message: Message | str, node: int, question: Question) -> Reply:
        """Returns the reply to a hello. A site may not use another's name: its key says which site it is."""
        if isinstance(message, str) or message.has_error():
            why = message if isinstance(message, str) else one_line(message.error.reason)
            raise Refused(f"no answer to hello: {why}")
        reply = read_reply(message.content)
        if not reply.about.answers(question.about):
            raise Refused(f"hello: {one_line(reply.error) or 'an answer to something else'}")
        if reply.site not in self.sites:
            raise Refused(f"{reply.site[:64]!r} is not a site of this federation")
        if self.owners is not None and (owner := self.owners().get(node)) != reply.site:
            whose = f"{owner!r}" if owner else "no site"
            raise Refused(f"it says it is {reply.site!r}, but its key belongs to {whose}")
        if reply.error:
            raise Refused(f"{reply.site}: {one_line(reply.error)}")
        return reply

    def exchange(self, contents: Mapping[str, RecordDict], within: float) -> dict[str, RecordDict]:
        """Sends each site its message; returns the replies that come within so many seconds."""
        about = {site: read_about(content) for site, content in contents.items()}
        pending: dict[str, Question] = {}
        replies: dict[str, RecordDict] = {}
        for kind in dict.fromkeys(a.kind for a in about.values()):
            to = {self.nodes[s]: c for s, c in contents.items() if s in self.nodes and about[s].kind == kind}
            names = {node: site for site, node in self.nodes.items()}
            for sent, node in self._push(to, kind, within):
                pending[sent] = Question(names[node], about[names[node]])
        until = time.monotonic() + within
        while pending and time.monotonic() < until:
            for message, question in self._pull(pending):
                kind = question.about.kind
                if isinstance(message, str):
                    self.tell(question.site, "refused", f"{kind}: its reply cannot be read ({message})")
                elif message.has_error():
                    self.tell(question.site, "failed", f"{kind}: {one_line(message.error.reason)}")
                else:
                    replies[question.site] = message.content
            self._report_late()
            if pending:
                pause = max(self.rounds.poll_s, 0.02 * len(pending))  # each look costs the SuperLink some work
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
        for question in pending.values():
            self.tell(question.site, "silent", f"no answer to {question.about.kind} within {within:.3g} s")
        now = time.monotonic()
        self._late = {m: q for m, q in self._late.items() if q.until > now}
        self._late |= {m: replace(q, until=now + LATE) for m, q in pending.items()}
        return replies

    def _report_late(self) -> None:
        for message, question in self._pull(self._late):
            if not isinstance(message, str) and message.has_content():
                late = f"late answer to {question.about.kind} of round {question.about.round}"
                self.tell(question.site, "refused", late)

    def _call(self, call: Callable[..., Any], *words: Any) -> Any:
        """Calls Flower, which tries again by itself (`limit_tries`); what it gives up on ends the run."""
        try:
            return call(*words)
        except Exception as error:
            raise _lost(error) from error

    def _push(self, to: Mapping[int, RecordDict], kind: str, within: float) -> list[tuple[str, int]]:
        """Sends messages that live as long as their replies are waited for; returns (message, node) of each."""
        type_ = TYPES.get(kind, "evaluate")
        messages = [Message(content, node, type_, ttl=within + GRACE) for node, content in to.items()]
        ids = list(self._call(self.grid.push_messages, messages)) if messages else []
        return [(m, node) for m, node in zip(ids, to, strict=False) if m]

    def _pull(self, questions: dict[str, T]) -> list[tuple[Message | str, T]]:
        """Returns the replies that have come, or why one cannot be read, and removes their questions.

        It pulls one at a time: a reply that breaks Flower's own reader must not take the others with it.
        """
        answers: list[tuple[Message | str, T]] = []
        for sent in list(questions):
            try:
                replies = list(self.grid.pull_messages([sent]))[:1]
            except Exception as error:
                if _is_links(error):
                    raise _lost(error) from error
                answers.append((type(error).__name__, questions.pop(sent)))
                continue
            answers += [(message, questions.pop(sent)) for message in replies]
        return answers


def _is_links(error: Exception) -> bool:
    """Whether the SuperLink caused an error, and not a site's reply."""
    kind = type(error)
    return isinstance(error, OSError) or kind.__module__.startswith("httpx") or kind.__name__ == STOPPED


def _lost(error: Exception) -> RunError:
    kind = type(error).__name__
    what = f"the SuperLink does not answer ({kind} {(str(error).splitlines() or [''])[0]})"
    what = "the run was stopped" if kind == STOPPED else what
    return RunError(what, "the last round is saved: run it again with resume=true")
