"""Hooks on their own: what they say, when they stop, and clocks that do not behave."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest

from paramserver.errors import ConfigError
from paramserver.params import Params
from paramserver.push import PushResult
from worker.data import Batch
from worker.hooks import (
    Every,
    Hook,
    LoggingHook,
    NanHook,
    NanLossError,
    RunContext,
    RunValues,
    StepCounterHook,
    StopAtStepHook,
)


class Session:
    """What a hook sees of a session."""

    def __init__(self, steps: int = 0) -> None:
        self.steps = steps
        self.stop = ""

    @property
    def should_stop(self) -> bool:
        return bool(self.stop)

    def request_stop(self, reason: str) -> None:
        self.stop = self.stop or reason


def context(session: Session, version: int = 0) -> RunContext:
    params = Params([], (), 1, version, (version,), False, None)
    return RunContext(cast(Any, session), params, Batch(np.zeros((1, 1)), np.zeros(1)))


def values(step: int, global_step: int | None = None, loss: float = 0.5) -> RunValues:
    at = step if global_step is None else global_step
    return RunValues(step, at, loss, 1, PushResult(True, "applied", at, 0, at))


class Clock:
    """A clock that ticks by what it is told."""

    def __init__(self, *ticks: float) -> None:
        self.now = 0.0
        self._ticks: Iterator[float] = iter(ticks)

    def __call__(self) -> float:
        self.now += next(self._ticks, 0.0)
        return self.now


def run(hook: Hook, steps: list[RunValues], session: Session | None = None) -> Session:
    session = session or Session()
    hook.begin(cast(Any, session))
    for each in steps:
        hook.after_run(context(session), each)
    hook.end(cast(Any, session), None)
    return session


def test_stop_at_a_step_of_the_job() -> None:
    hook, session = StopAtStepHook(last_step=200), Session()
    run(hook, [values(3, 199)], session)
    assert not session.should_stop
    run(hook, [values(4, 200)], session)
    assert session.stop == "global_step 200 is reached"


def test_stop_at_a_step_that_is_passed_already() -> None:
    session = Session()
    StopAtStepHook(last_step=5).before_run(context(session, 4))
    assert not session.should_stop
    StopAtStepHook(last_step=5).before_run(context(session, 5))
    assert session.should_stop


def test_stop_after_own_steps_counts_from_the_beginning() -> None:
    hook, session = StopAtStepHook(num_steps=2), Session(steps=7)
    run(hook, [values(8, 90)], session)
    assert not session.should_stop
    run(hook, [values(9, 95)], session)
    assert session.should_stop


@pytest.mark.parametrize(
    "arguments",
    [{}, {"last_step": 0}, {"num_steps": -1}, {"last_step": 3, "num_steps": 3}],
)
def test_stop_takes_one_positive_number(arguments: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        StopAtStepHook(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"every_n_steps": 0}, {"every_secs": -1.0}, {"every_n_steps": 1, "every_secs": 1.0}],
)
def test_an_interval_is_one_positive_number(arguments: dict[str, Any]) -> None:
    for kind in (LoggingHook, StepCounterHook):
        with pytest.raises(ConfigError):
            kind(**arguments)


def test_logging_says_the_first_step_every_nth_and_the_last() -> None:
    lines: list[str] = []
    hook = LoggingHook(10, write=lines.append, clock=Clock(0, 2, 1))
    run(hook, [values(step, 2 * step, 1 / step) for step in range(1, 26)])
    assert lines == [
        "event=step global_step=2 step=1 loss=1",
        "event=step global_step=22 step=11 loss=0.0909091 steps_per_s=5.0",
        "event=step global_step=42 step=21 loss=0.047619 steps_per_s=10.0",
        "event=step global_step=50 step=25 loss=0.04",
    ]


def test_logging_by_time() -> None:
    lines: list[str] = []
    # Each `due` reads the clock once, and each line once more.
    hook = LoggingHook(every_secs=5, write=lines.append, clock=Clock(0, 3, 3, 0, 1))
    run(hook, [values(step) for step in (1, 2, 3, 4)])
    assert [line.split()[2] for line in lines] == ["step=1", "step=3", "step=4"]
    assert lines[1].endswith("steps_per_s=0.3")


def test_one_step_in_all_is_said_once() -> None:
    lines: list[str] = []
    run(LoggingHook(write=lines.append, clock=Clock()), [values(1)])
    assert lines == ["event=step global_step=1 step=1 loss=0.5"]


@pytest.mark.parametrize("ticks", [[], [0, -1, -1, -1], [5, -2, 1, -3, 1]])
def test_a_bad_clock_leaves_the_rate_out(ticks: list[float]) -> None:
    lines: list[str] = []
    run(LoggingHook(1, write=lines.append, clock=Clock(*ticks)), [values(i) for i in range(1, 5)])
    assert len(lines) == 4
    for line in lines:
        rate = line.partition("steps_per_s=")[2]
        assert not rate or 0 < float(rate) < math.inf


def test_a_step_that_goes_back_leaves_the_rate_out() -> None:
    every = Every(1, None, Clock(0, 1, 1, 1))
    assert every.acted(10) is None
    assert every.acted(4) is None
    assert every.acted(4) is None
    assert every.acted(6) == 2


def test_the_step_counter_counts_the_jobs_steps() -> None:
    hook = StepCounterHook(100, clock=Clock(0, 2))
    run(hook, [values(1, 3)])
    assert hook.rate is None
    run(hook, [values(2, 102), values(3, 203)])
    assert hook.rate == 100


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_fails_or_stops(loss: float) -> None:
    session = Session()
    NanHook().before_push(context(session), 1e30, {})
    with pytest.raises(NanLossError, match=r"global_step 7; try a smaller"):
        NanHook().before_push(context(session, 7), loss, {})
    assert not session.should_stop
    NanHook(fail=False).before_push(context(session, 7), loss, {})
    assert session.should_stop


def test_a_hook_may_leave_everything_out() -> None:
    hook, session = Hook(), Session()
    run(hook, [values(1)], session)
    hook.before_run(context(session))
    hook.before_push(context(session), math.nan, {})
    assert not session.should_stop
