"""How soon to look again."""

from __future__ import annotations

import math

import pytest

from chief.pace import LONGEST_S, SHORTEST_S, Pace


def test_the_rate_follows_what_was_seen() -> None:
    pace = Pace(lease_s=10)
    assert pace.rate == 0 and pace.seconds_to(5) == math.inf
    pace.saw(10, 1, now=1.0)
    assert pace.rate == 0 and not pace.moving
    pace.saw(30, 1, now=2.0)
    assert (pace.rate, pace.moving, pace.seconds_to(10)) == (20, True, 0.5)
    pace.saw(30, 1, now=3.0)
    assert (pace.rate, pace.moving) == (10, False)
    pace.saw(20, 1, now=4.0)  # a restore
    assert (pace.rate, pace.moving) == (0, False)
    pace.saw(20, 1, now=4.0)
    assert pace.rate == 0


def test_it_looks_half_way_to_what_is_due() -> None:
    pace = Pace(lease_s=10)
    pace.saw(0, 1, now=0.0)
    pace.saw(10, 1, now=1.0)
    assert pace.delay(4, now=1.0) == pytest.approx(0.2)
    assert pace.delay(0, now=1.0) == SHORTEST_S
    assert pace.delay(1 << 62, now=1.0) == LONGEST_S


def test_where_nothing_moves_it_looks_ever_more_rarely() -> None:
    pace = Pace(lease_s=10)
    pace.saw(0, 0, now=0.0)
    assert pace.delay(10, now=0.0) == SHORTEST_S
    assert pace.delay(10, now=2.0) == pytest.approx(0.2)
    assert pace.delay(10, now=100.0) == LONGEST_S
    pace.saw(0, 1, now=100.0)  # a worker came: it begins
    assert pace.delay(10, now=100.0) == SHORTEST_S


def test_never_more_rarely_than_a_third_of_a_lease() -> None:
    pace = Pace(lease_s=0.3)
    pace.saw(0, 0, now=0.0)
    assert pace.delay(10, now=100.0) == pytest.approx(0.1)
    assert Pace(lease_s=0.06).delay(0, now=0.0) == pytest.approx(0.02)


def test_looks_that_cost_much_are_rare() -> None:
    pace = Pace(lease_s=10)
    pace.saw(0, 1, now=0.0)
    assert pace.delay(1, now=0.0, cost_s=0.1) == pytest.approx(2.0)
    assert pace.delay(1, now=0.0, cost_s=5.0) == pytest.approx(10 / 3)
