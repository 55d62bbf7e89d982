"""Trying again, in a time of its own."""

from __future__ import annotations

import itertools
import random

import pytest

from paramserver.errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotInitializedError,
    ParamServerError,
    ResourceExhaustedError,
    UnavailableError,
)
from paramserver.retry import Retry, backoff


class Time:
    """A clock that only waiting moves; `closed` makes waits end at once, interrupted."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []
        self.closed = False

    def clock(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        if not self.closed:
            self.waits.append(seconds)
            self.now += seconds
        return self.closed


@pytest.fixture
def time() -> Time:
    return Time()


def retry(time: Time, total_s: float = 60.0, said: list[str] | None = None) -> Retry:
    return Retry(
        "ps:1 at 10.0.0.7:1682",
        total_s,
        wait=time.wait,
        clock=time.clock,
        rng=random.Random(1),
        on_wait=None if said is None else said.append,
    )


def test_delays_double_up_to_the_cap_and_are_jittered() -> None:
    delays = list(itertools.islice(backoff(0.05, 2.0, random.Random(1)), 200))
    bounds = [min(0.05 * 2**i, 2.0) for i in range(200)]
    assert all(b / 2 <= d <= b for d, b in zip(delays, bounds, strict=True))
    assert len(set(delays)) == 200
    assert delays != list(itertools.islice(backoff(0.05, 2.0, random.Random(2)), 200))


@pytest.mark.parametrize("kind", [UnavailableError, DeadlineExceededError, ResourceExhaustedError])
def test_it_gives_up_when_its_time_is_over_and_says_so(
    kind: type[ParamServerError], time: Time
) -> None:
    attempts = retry(time, total_s=60)
    error = kind("cannot reach ps:1")
    with pytest.raises(kind, match=r"^cannot reach ps:1 \(gave up after 60 s\)$"):
        for _ in range(10_000):
            attempts.pause(error)
    assert time.now == pytest.approx(160)
    assert sum(time.waits) == pytest.approx(60)
    assert max(time.waits) <= 2
    assert attempts.remaining_s == 0


@pytest.mark.parametrize(
    "error",
    [InvalidArgumentError("no"), AbortedError("no"), NotInitializedError(""), ParamServerError("")],
)
def test_other_errors_are_raised_at_once(error: ParamServerError, time: Time) -> None:
    with pytest.raises(type(error)) as raised:
        retry(time).pause(error)
    assert raised.value is error
    assert not time.waits


def test_closing_interrupts(time: Time) -> None:
    attempts = retry(time)
    attempts.pause(UnavailableError("away"))
    time.closed = True
    with pytest.raises(UnavailableError, match="away"):
        attempts.pause(UnavailableError("away"))
    assert len(time.waits) == 1


def test_it_never_waits_ten_seconds_in_silence(time: Time) -> None:
    told: list[float] = []
    said: list[str] = []
    attempts = Retry(
        "ps:1 at 10.0.0.7:1682",
        120,
        wait=time.wait,
        clock=time.clock,
        on_wait=lambda reason: (told.append(time.now), said.append(reason))[0],
    )
    with pytest.raises(UnavailableError):
        while True:
            attempts.pause(UnavailableError("connection refused"))
    assert told[0] == 100
    assert set(said) == {"waiting for ps:1 at 10.0.0.7:1682 (connection refused)"}
    gaps = [b - a for a, b in itertools.pairwise([*told, time.now])]
    assert max(gaps) <= 10
    assert min(gaps[:-1]) > 7, "the same reason is not repeated at every attempt"


def test_a_new_reason_is_told_at_once(time: Time) -> None:
    said: list[str] = []
    attempts = retry(time, said=said)
    for why in ("refused", "refused", "it does not answer", "refused"):
        attempts.pause(UnavailableError(why))
    assert [s.partition("(")[2] for s in said] == ["refused)", "it does not answer)", "refused)"]


def test_metadata_and_cause_survive_giving_up(time: Time) -> None:
    error = UnavailableError("away")
    error.metadata = (("key", "value"),)
    error.__cause__ = cause = OSError()
    with pytest.raises(UnavailableError) as raised:
        retry(time, total_s=0).pause(error)
    assert raised.value.metadata == (("key", "value"),)
    assert raised.value.__cause__ is cause
