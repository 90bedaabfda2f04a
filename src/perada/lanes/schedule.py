"""Ragged lanes in a few slots: which lane trains where and when, and how wide each step is.

Lanes have different numbers of steps. The longest start first, and a lane that is done makes room for the next. When no
lane waits, the steps get narrower, in the few widths that are recorded. All of this is known before the first step, so
the device is never asked, and the cheapest of a few schedules is taken: short lanes may take turns in fewer slots, as
the longest lane takes its time anyway.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

STEP = 13  # the fixed cost of a step, in lanes (docs/performance.md: 0.80 ms for 1 lane, 1.67 for 16)


@dataclass
class Span:
    """Steps of the same width, and what happens before them, in this order."""

    width: int = 0
    steps: int = 0
    stored: list[tuple[int, int]] = field(default_factory=list)  # (slot, lane) of lanes that are done
    loaded: list[tuple[int, int]] = field(default_factory=list)  # (slot, lane) of lanes that begin
    moved: list[tuple[int, int]] = field(default_factory=list)  # (from slot, to slot)


def schedule(steps: Sequence[int], slots: int, widths: Sequence[int]) -> list[Span]:
    """Returns spans that load every lane once, run its steps and store it once. The last span only stores.

    A step is as wide as one of `widths`, where that is less than `slots`, or as `slots`.
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
            low = free.pop(0)  # all remaining lanes fit below the width
            place[low] = place.pop(high)
            free.append(high)
            span.moved.append((high, low))
        span.steps = min(left[k] for k in place.values())
        for k in place.values():
            left[k] -= span.steps


def cheapest(steps: Sequence[int], slots: int, widths: Sequence[int]) -> list[Span]:
    """Returns the `schedule` in the number of slots that costs least."""
    choices = sorted({w for w in widths if 0 < w < slots} | {slots})
    return min((schedule(steps, w, widths) for w in choices), key=price)


def price(spans: Sequence[Span]) -> int:
    return sum(s.steps * (STEP + s.width) for s in spans)


def waste(steps: Sequence[int], spans: Sequence[Span]) -> tuple[int, int]:
    """Returns the steps of all lanes, and the steps of empty slots."""
    useful = sum(steps)
    return useful, sum(s.width * s.steps for s in spans) - useful
