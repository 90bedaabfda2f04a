"""Ragged lanes in a few slots: which lane trains where, when, and how wide a step is.

Lanes are of different length. The longest start first; a lane that is done makes room for the next one; when nobody
waits any more the steps get narrower, in the few widths that are recorded. All of it is known before the first step,
so nothing has to be asked of the device on the way, and the cheapest of a few schedules can be taken: with fewer slots
than there is room for, short lanes take turns while the longest one is waited for anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

STEP = 13  # lanes that cost as much as a step does by itself (docs/performance.md: 0.80 ms for 1 lane, 1.67 for 16)


@dataclass
class Span:
    """Some steps of the same width, and what is done before them, in this order."""

    width: int = 0
    steps: int = 0
    stored: list[tuple[int, int]] = field(default_factory=list)  # (slot, lane): this lane is done
    loaded: list[tuple[int, int]] = field(default_factory=list)  # (slot, lane): this lane begins
    moved: list[tuple[int, int]] = field(default_factory=list)  # (slot, slot): from, to


def schedule(steps: Sequence[int], slots: int, widths: Sequence[int]) -> list[Span]:
    """Every lane loaded once, run for its steps, stored once. The last span only stores.

    `widths` are the widths a step may have, as far as they are no more than `slots`; `slots` itself always is.
    """
    waiting = sorted((k for k, n in enumerate(steps) if n), key=lambda k: -steps[k])
    place: dict[int, int] = {}  # slot -> lane
    left: dict[int, int] = {}  # lane -> steps
    spans: list[Span] = []
    allowed = sorted({w for w in widths if w < slots} | {slots})
    free = list(range(slots))
    while True:
        span = Span(stored=[(s, k) for s, k in place.items() if not left[k]])
        for slot, _ in span.stored:
            del place[slot]
            free.append(slot)
        free.sort()
        while waiting and free:
            place[free.pop(0)] = waiting.pop(0)
            span.loaded.append(list(place.items())[-1])
            left[span.loaded[-1][1]] = steps[span.loaded[-1][1]]
        spans.append(span)
        if not place:
            return spans
        span.width = next(w for w in allowed if w >= len(place))
        for high in sorted(s for s in place if s >= span.width):
            low = free.pop(0)  # below the width there is room for all that are left
            place[low] = place.pop(high)
            free.append(high)
            span.moved.append((high, low))
        span.steps = min(left[k] for k in place.values())
        for k in place.values():
            left[k] -= span.steps


def cheapest(steps: Sequence[int], slots: int, widths: Sequence[int]) -> list[Span]:
    """`schedule` in as many of the slots as cost least."""
    tried = sorted({w for w in widths if 0 < w < slots} | {slots})
    return min((schedule(steps, w, widths) for w in tried), key=price)


def price(spans: Sequence[Span]) -> int:
    return sum(s.steps * (STEP + s.width) for s in spans)


def waste(steps: Sequence[int], spans: Sequence[Span]) -> tuple[int, int]:
    """(lane-steps asked for, lane-steps of slots that stood empty)."""
    asked = sum(steps)
    return asked, sum(s.width * s.steps for s in spans) - asked
