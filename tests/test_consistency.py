"""When a worker may read: the three rules as tables."""

from __future__ import annotations

import pytest

from paramserver.consistency import (
    OPEN,
    Async,
    Consistency,
    Gate,
    Progress,
    Ssp,
    Sync,
    awaited,
    parse,
)
from paramserver.errors import ConfigError


def clocks(*each: int) -> dict[str, int]:
    return {f"worker:{index}": clock for index, clock in enumerate(each)}


@pytest.mark.parametrize(
    ("rule", "clock", "progress", "reason"),
    [
        # sync: the round before is closed
        (Sync(2), 0, Progress(clocks(0, 0)), ""),
        (Sync(2), 3, Progress(clocks(3, 3), rounds=3), ""),
        (Sync(2), 1, Progress(clocks(1, 0)), "round 0 waits for worker:1"),
        (Sync(2), 1, Progress(clocks(1, 0, 0)), "round 0 waits for worker:1, worker:2"),
        (Sync(2), 1, Progress(clocks(1, 1)), "round 0 waits for its update"),
        (Sync(2), 4, Progress(clocks(4, 5, 3), rounds=3), "round 3 waits for worker:2"),
        (Sync(2), 0, Progress(clocks(0), start=Gate(False, "not yet")), "not yet"),
        # ssp: at most so many steps ahead of the slowest
        (Ssp(0), 5, Progress(clocks(5, 5)), ""),
        (Ssp(0), 5, Progress(clocks(5, 4)), "clock 5 is more than 0 ahead of worker:1 at 4"),
        (Ssp(2), 5, Progress(clocks(5, 3, 9)), ""),
        (Ssp(2), 6, Progress(clocks(6, 3, 3)), "6 is more than 2 ahead of worker:1, worker:2 at 3"),
        (Ssp(1), 9, Progress({}), ""),
        # async: always
        (Async(), 1000, Progress(clocks(1000, 0)), ""),
    ],
)
def test_a_pull_passes_or_is_told_whom_it_waits_for(
    rule: Consistency, clock: int, progress: Progress, reason: str
) -> None:
    gate = rule.gate(clock, progress)
    assert gate.open == (not reason)
    assert reason in gate.reason


@pytest.mark.parametrize(
    ("rule", "progress", "start"),
    [
        (Sync(1), Progress({}), 0),
        (Sync(1), Progress(clocks(7), rounds=7), 7),
        (Sync(1), Progress(clocks(7), rounds=7, round_begun=True), 8),
        (Ssp(3), Progress({}), 0),
        (Ssp(3), Progress(clocks(8, 6, 7)), 6),
        (Async(), Progress(clocks(8, 6)), 0),
    ],
)
def test_where_a_newcomer_counts_from(rule: Consistency, progress: Progress, start: int) -> None:
    assert rule.start_clock(progress) == start


def test_the_open_round_awaits_who_has_not_pushed_it() -> None:
    assert awaited(Progress(clocks(3, 2, 4, 2), rounds=2)) == ["worker:1", "worker:3"]
    assert awaited(Progress({}, rounds=2)) == []


@pytest.mark.parametrize(
    ("text", "rule"),
    [("sync", Sync(3)), ("async", Async()), ("ssp:0", Ssp(0)), ("ssp:12", Ssp(12))],
)
def test_a_command_line_names_a_rule(text: str, rule: Consistency) -> None:
    assert parse(text, workers=3) == rule
    assert str(rule) == text
    assert OPEN.open


@pytest.mark.parametrize(
    "text",
    ["", "bsp", "sync:1", "sync:", "async:", "ssp", "ssp:", "ssp:-1", "ssp:x", "ssp:1:2", "ssp:²"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ConfigError, match="choose sync, async or ssp:N"):
        parse(text, workers=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sync(0), "workers >= 1, not 0"),
        (lambda: Sync(2, min_workers=3), "between 0 and 2"),
        (lambda: Sync(2, min_workers=-1), "between 0 and 2"),
        (lambda: Ssp(-1), "slack >= 0, not -1"),
    ],
)
def test_a_rule_checks_itself(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]
