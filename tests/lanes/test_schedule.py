"""Lanes in slots: every lane gets its steps, once, and the longest lane alone decides how long it takes."""

from __future__ import annotations

import random

import pytest

from perada.lanes.replay import Span, cheapest, price, schedule, waste

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16)


def played(steps: list[int], slots: int, spans: list[Span]) -> dict[int, int]:
    """Steps each lane was given, by following the schedule with a finger."""
    place: dict[int, int] = {}
    done: dict[int, int] = {}
    given: dict[int, int] = {}
    for span in spans:
        for slot, lane in span.stored:
            assert place.pop(slot) == lane
            done[lane] = given[lane]
        for slot, lane in span.loaded:
            assert slot not in place
            assert lane not in given
            place[slot], given[lane] = lane, 0
        for high, low in span.moved:
            assert low not in place
            place[low] = place.pop(high)
        assert all(s < span.width for s in place)
        assert span.width <= slots
        for lane in place.values():
            given[lane] += span.steps
            assert given[lane] <= steps[lane]
    assert not place
    return done


@pytest.mark.parametrize("seed", range(40))
def test_every_lane_gets_its_steps(seed: int) -> None:
    draw = random.Random(seed)
    steps = [draw.choice([0, 1, draw.randint(1, 50)]) for _ in range(draw.randint(1, 40))]
    slots = draw.randint(1, 20)
    spans = schedule(steps, slots, WIDTHS)
    assert played(steps, slots, spans) == {k: n for k, n in enumerate(steps) if n}
    asked, empty = waste(steps, spans)
    assert asked == sum(steps)
    assert empty >= 0


def test_with_a_slot_each_nothing_is_moved_and_the_longest_decides() -> None:
    steps = [5, 9, 2, 9, 1]
    spans = schedule(steps, 5, WIDTHS)
    assert sum(s.steps for s in spans) == 9
    assert not any(s.moved for s in spans)
    assert [(s.width, s.steps) for s in spans] == [(5, 1), (4, 1), (3, 3), (2, 4), (0, 0)]
    assert waste(steps, spans) == (26, 0)


def test_a_lane_that_is_done_makes_room() -> None:
    spans = schedule([4, 4, 2, 2], 3, WIDTHS)
    assert [(s.width, s.steps, s.loaded) for s in spans[:2]] == [(3, 2, [(0, 0), (1, 1), (2, 2)]), (3, 2, [(2, 3)])]
    assert sum(s.steps for s in spans) == 4
    assert waste([4, 4, 2, 2], spans) == (12, 0)


def test_steps_get_narrower_by_moving_who_is_left() -> None:
    spans = schedule([10, 1, 9, 1, 12], 2, WIDTHS)  # after the others somebody trains on alone, in the first slot
    assert spans[-2].width == 1
    assert sum(s.steps for s in spans) < 33


def test_widths_that_are_not_recorded_are_rounded_up() -> None:
    spans = schedule([3] * 5 + [1] * 2, 7, (4, 6))
    assert [(s.width, s.steps) for s in spans] == [(7, 1), (6, 2), (0, 0)]
    assert waste([3] * 5 + [1] * 2, spans) == (17, 2)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_schedule_is_one_and_no_dearer_than_all_slots(seed: int) -> None:
    draw = random.Random(seed)
    steps = [draw.choice([0, 1, draw.randint(1, 50)]) for _ in range(draw.randint(1, 40))]
    slots = draw.randint(1, 20)
    for widths in (WIDTHS, (), (7, 3, 3)):
        spans = cheapest(steps, slots, widths)
        assert played(steps, slots, spans) == {k: n for k, n in enumerate(steps) if n}
        assert price(spans) <= price(schedule(steps, slots, widths))
    assert cheapest(steps, slots, ()) == schedule(steps, slots, ())


def test_mostly_fewer_slots_are_cheaper_for_lanes_as_clients_have_them() -> None:
    """Eight clients of very different size, a personal and a local lane each, in as many slots."""
    draw, fewer = random.Random(0), 0
    for _ in range(50):
        steps = [draw.randint(10, 700) for _ in range(8)] * 2
        fewer += price(cheapest(steps, 16, WIDTHS)) < price(schedule(steps, 16, WIDTHS))
    assert fewer > 25


def test_short_lanes_wait_for_each_other_where_the_longest_lane_is_waited_for_anyway() -> None:
    """One lane of 12 steps and six of 4: in three slots these take turns beside the long one, and no slot stands empty;
    in eight there are 4 steps that one of is empty in, and 8 of one lane."""
    steps = [12, *[4] * 6]
    spans = cheapest(steps, 8, (1, 3, 8))
    assert [(s.width, s.steps) for s in spans] == [(3, 4)] * 3 + [(0, 0)]
    assert waste(steps, spans) == (36, 0)
    assert waste(steps, schedule(steps, 8, (1, 3, 8))) == (36, 4)


def test_equal_lanes_have_a_slot_each() -> None:
    assert [(s.width, s.steps) for s in cheapest([5] * 6, 6, WIDTHS)] == [(6, 5), (0, 0)]
