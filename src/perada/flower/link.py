"""The sites at the other end of Flower's grid: which are connected, and what they answer in time.

Flower promises little: nodes come and go, a reply may never come, a wait may never end. Here every wait ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..errors import RunError
from ..inputs import one_line
from ..server.checks import Refused
from .bounds import Inbox
from .messages import Reply, Request, read_reply, read_request
from .settings import Rounds

T = TypeVar("T")
STOPPED = "RunNotRunningException"  # what Flower raises when a user stops a run
RESUME = "the last finished round is saved: run it again with resume=true"
Owners = Callable[[], Mapping[int, str]]  # returns {node: site} of the admitted keys
Tell = Callable[[str, str, str], None]  # (site, event, detail)
TYPES = {"hello": "query", "weights": "query", "train": "train", "finish": "train"}  # all others: "evaluate"
GRACE = 5.0  # seconds that a reply may travel; with more, a site that comes back would work on a closed round
LATE = 60.0  # seconds to look for a late reply after that, to name its site
MIN_WAIT_S = 10.0  # a question still gets this long after the end of a round (a quarter of a short round)


@dataclass(frozen=True)
class Clock:
    """The end of a round: one for all that it waits for (sites, weights, uploads, the guard)."""

    seconds: float
    end: float

    @classmethod
    def start(cls, seconds: float) -> Clock:
        return cls(seconds, time.monotonic() + seconds)

    def left(self, reserve: float = 0.0) -> float:
        """Returns the seconds to wait now; `reserve` is the share of the round that is kept for later questions."""
        least = min(MIN_WAIT_S, self.seconds / 4)
        return max(least, self.end - reserve * self.seconds - time.monotonic())


@dataclass(frozen=True)
class Question:
    """A request that waits for its reply."""

    site: str  # empty for a hello, which asks for it
    request: Request
    until: float  # when to forget it
    state: int = 0  # the most bytes of a state in the reply


class Link:
    """The sites by name. Each node is asked once for its name (`hello`)."""

    def __init__(
        self, grid: Grid, sites: Sequence[str], rounds: Rounds, tell: Tell, owners: Owners | None = None
    ) -> None:
        self.grid, self.sites, self.rounds, self.tell, self.owners = grid, sites, rounds, tell, owners
        self.nodes: dict[str, int] = {}
        self.needs: set[str] = set()  # sites that need the backbone
        self._hellos: dict[str, tuple[int, Question]] = {}  # by message: its node and the question
        self._late: dict[str, Question] = {}
        self._inbox = Inbox(grid)
        self._replaced: set[int] = set()  # nodes whose site has come back as another node
        self._told: set[tuple[int, str]] = set()
        invoker = getattr(grid, "_retry_invoker", None)
        if invoker is not None:  # Flower tries its calls to the SuperLink again, by default forever
            invoker.max_time = rounds.deadline_s

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
        question = Question("", read_request(hello), now + self.rounds.hello_s)
        sent = self._push(dict.fromkeys(sorted(connected - known), hello), self.rounds.hello_s)
        self._hellos |= {message: (node, question) for message, node in sent}

    def _read_hellos(self) -> None:
        for message, (node, question) in self._pull(self._hellos):
            try:
                reply = self._checked_hello(message, node, question.request)
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

    def _checked_hello(self, message: Message | str, node: int, hello: Request) -> Reply:
        """Returns the reply to a hello. A site may not use another's name: its key says which site it is."""
        if isinstance(message, str) or message.has_error():
            why = message if isinstance(message, str) else one_line(message.error.reason)
            raise Refused(f"no answer to hello: {why}")
        reply = read_reply(message.content)
        if reply.subject != hello.subject:
            raise Refused(f"hello: {one_line(reply.error) or 'an answer to something else'}")
        if reply.site not in self.sites:
            raise Refused(f"{reply.site[:64]!r} is not a site of this federation")
        if self.owners is not None and (owner := self.owners().get(node)) != reply.site:
            whose = f"{owner!r}" if owner else "no site"
            raise Refused(f"it says it is {reply.site!r}, but its key belongs to {whose}")
        if reply.error:
            raise Refused(f"{reply.site}: {one_line(reply.error)}")
        return reply

    def exchange(
        self, messages: Mapping[str, RecordDict], within: float, upload: int = 0
    ) -> dict[str, RecordDict | Refused]:
        """Sends each site its message; returns the replies that come within so many seconds, or why one is refused.

        upload: the most bytes of an answer to `train`; no other answer has a state.
        """
        sites = {self.nodes[site]: site for site in messages if site in self.nodes}
        sent = self._push({node: messages[site] for node, site in sites.items()}, within)
        until = time.monotonic() + within
        asked = {m: (sites[n], read_request(messages[sites[n]])) for m, n in sent}
        pending = {m: Question(s, r, until + LATE, upload * (r.kind == "train")) for m, (s, r) in asked.items()}
        replies: dict[str, RecordDict | Refused] = {}
        while pending and time.monotonic() < until:
            for message, question in self._pull(pending, lambda question: question.state):
                kind = question.request.kind
                if isinstance(message, str):
                    replies[question.site] = Refused(f"its reply cannot be read ({message})")
                elif message.has_error():
                    self.tell(question.site, "failed", f"{kind}: {one_line(message.error.reason)}")
                else:
                    replies[question.site] = message.content
            self._report_late()
            if pending:
                pause = max(self.rounds.poll_s, 0.02 * len(pending))  # each look costs the SuperLink some work
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
        for question in pending.values():
            self.tell(question.site, "silent", f"no answer to {question.request.kind} within {within:.3g} s")
        now = time.monotonic()
        self._late = {m: q for m, q in {**self._late, **pending}.items() if q.until > now}
        self._inbox.keep(self._late.keys() | self._hellos.keys())
        return replies

    def _report_late(self) -> None:
        for message, question in self._pull(self._late, lambda question: question.state):
            if not isinstance(message, str) and message.has_content():
                late = f"late answer to {question.request.kind} of round {question.request.round}"
                self.tell(question.site, "refused", late)

    def _call(self, call: Callable[..., Any], *words: Any) -> Any:
        """Calls Flower, which tries again by itself; what it gives up on ends the run."""
        try:
            return call(*words)
        except Exception as error:
            raise _lost(error) from error

    def _push(self, to: Mapping[int, RecordDict], within: float) -> list[tuple[str, int]]:
        """Sends messages that live as long as their replies are waited for; returns (message, node) of each."""
        messages = [
            Message(content, node, TYPES.get(read_request(content).kind, "evaluate"), ttl=within + GRACE)
            for node, content in to.items()
        ]
        ids = list(self._call(self.grid.push_messages, messages)) if messages else []
        return [(m, node) for m, node in zip(ids, to, strict=False) if m]

    def _pull(
        self, questions: dict[str, T], most: Callable[[T], int] = lambda question: 0
    ) -> list[tuple[Message | str, T]]:
        """Returns the replies that have come, or why one cannot be read, and removes their questions.

        It looks for one at a time: a reply that breaks Flower's own reader must not take the others with it, and one
        of which only a part has come must not hold them up.
        most: the most bytes of a state in the reply to a question.
        """
        answers: list[tuple[Message | str, T]] = []
        for sent in list(questions):
            try:
                answer: Message | str | None = self._inbox.look(sent, most(questions[sent]))
            except Refused as error:
                answer = str(error)
            except Exception as error:
                if _is_links(error):
                    raise _lost(error) from error
                answer = type(error).__name__
            if answer is not None:
                self._inbox.forget(sent)
                answers.append((answer, questions.pop(sent)))
        return answers


def _is_links(error: Exception) -> bool:
    """Whether the SuperLink caused an error, and not a site's reply."""
    kind = type(error)
    return isinstance(error, OSError) or kind.__module__.startswith("httpx") or kind.__name__ == STOPPED


def _lost(error: Exception) -> RunError:
    kind = type(error).__name__
    what = f"the SuperLink does not answer ({kind} {(str(error).splitlines() or [''])[0]})"
    return RunError("the run was stopped" if kind == STOPPED else what, RESUME)
