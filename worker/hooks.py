"""What may happen around a training loop without standing in it: logging, stopping, checking.

TensorFlow's session hooks, by their names. Hooks run in the loop's own thread; they make no calls
to a parameter server.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paramserver.errors import ConfigError, ParamServerError
from paramserver.layout import Array
from paramserver.params import Params
from paramserver.push import PushResult
from worker.data import Batch

if TYPE_CHECKING:
    from worker.session import TrainingSession

_log = logging.getLogger(__name__)

Clock = Callable[[], float]


@dataclass(frozen=True)
class RunContext:
    """One step under way: what it is computed from, and how to ask that it be the last."""

    session: TrainingSession
    params: Params
    batch: Batch

    @property
    def stop_requested(self) -> bool:
        """Whether this step is the last."""
        return self.session.should_stop

    def request_stop(self, reason: str = "a hook asked for it") -> None:
        """Ends the loop after this step; asked for in `before_push`, before its push."""
        self.session.request_stop(reason)


@dataclass(frozen=True)
class RunValues:
    """What a step came to. `step` counts this worker's steps from 1, `global_step` the job's, in
    the parameters that the next step starts from; `result` is what became of the push."""

    step: int
    global_step: int
    loss: float
    examples: int
    result: PushResult


class Hook:
    """The moments at which a session calls its hooks, in the order in which they were given.

    Derive from it and override what you need. An exception ends the loop."""

    def begin(self, session: TrainingSession) -> None:
        """Once, before the first pull."""

    def before_run(self, context: RunContext) -> None:
        """Before each step is computed."""

    def before_push(self, context: RunContext, loss: float, grads: dict[str, Array]) -> None:
        """Between computing and pushing. `grads` is the hook's to change; its arrays are not."""

    def after_run(self, context: RunContext, values: RunValues) -> None:
        """After each step that counts. A step whose push was lost or refused has none."""

    def end(self, session: TrainingSession, error: BaseException | None) -> None:
        """Once, if `begin` was called: the loop is over, because of `error` or as it should be."""


class StopAtStepHook(Hook):
    """Stops at a step: `last_step` of the job, or after `num_steps` of this worker's own.

    With several workers the job may run past `last_step` by the steps that the others have under
    way; the job's own limit is exact."""

    def __init__(self, last_step: int | None = None, num_steps: int | None = None) -> None:
        """Raises: ConfigError unless exactly one is given and positive."""
        _check_one("StopAtStepHook", last_step=last_step, num_steps=num_steps)
        self._last_step, self._num_steps = last_step, num_steps

    def begin(self, session: TrainingSession) -> None:
        self._begun_at = session.steps

    def before_run(self, context: RunContext) -> None:
        if self._last_step is not None and context.params.version >= self._last_step:
            context.request_stop(f"global_step {context.params.version} is reached already")

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._last_step is not None and values.global_step >= self._last_step:
            context.request_stop(f"global_step {values.global_step} is reached")
        if self._num_steps is not None and values.step - self._begun_at >= self._num_steps:
            context.request_stop(f"{self._num_steps} steps are done")


class Every:
    """Says when something is due again: after so many steps, or so many seconds. Due at first."""

    def __init__(
        self,
        every_n_steps: int | None,
        every_secs: float | None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Raises: ConfigError unless exactly one is given and positive."""
        _check_one("a hook", every_n_steps=every_n_steps, every_secs=every_secs)
        self._steps, self._seconds, self._clock = every_n_steps, every_secs, clock
        self._last: tuple[int, float] | None = None

    def due(self, step: int) -> bool:
        """Whether `step` is one to act at."""
        if self._last is None:
            return True
        if self._steps is not None:
            return step - self._last[0] >= self._steps
        return self._clock() - self._last[1] >= (self._seconds or 0)

    def acted(self, step: int) -> float | None:
        """Notes that it was done; steps a second since the last time.

        None if that cannot be said: the first time, and when neither clock nor step moved on."""
        before, self._last = self._last, (step, self._clock())
        if before is None:
            return None
        steps, seconds = self._last[0] - before[0], self._last[1] - before[1]
        return steps / seconds if steps > 0 and seconds > 0 else None


class LoggingHook(Hook):
    """Logs global_step, this worker's step, the loss, and its steps a second if they can be told.

    At the first step, then every so often (default: every 100 steps), and at the last."""

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_secs: float | None = None,
        *,
        write: Callable[[str], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`write` takes the line; default: a log line. Raises: ConfigError as `Every`."""
        if every_n_steps is None and every_secs is None:
            every_n_steps = 100
        self._every = Every(every_n_steps, every_secs, clock)
        self._write = write or (lambda line: _log.info("%s", line))
        self._unsaid: RunValues | None = None

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self._unsaid = values
        if self._every.due(values.step):
            self._say(values)

    def end(self, session: TrainingSession, error: BaseException | None) -> None:
        if self._unsaid:
            self._say(self._unsaid)

    def _say(self, values: RunValues) -> None:
        self._unsaid = None
        rate = self._every.acted(values.step)
        self._write(
            f"event=step global_step={values.global_step} step={values.step} "
            f"loss={values.loss:.6g}" + (f" steps_per_s={rate:.1f}" if rate is not None else "")
        )


class StepCounterHook(Hook):
    """Measures how fast the job goes: `rate` is in global steps a second, None while unknown."""

    def __init__(
        self,
        every_n_steps: int | None = None,
        every_secs: float | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Default: every 100 steps. Raises: ConfigError as `Every`."""
        if every_n_steps is None and every_secs is None:
            every_n_steps = 100
        self._every = Every(every_n_steps, every_secs, clock)
        self.rate: float | None = None

    def after_run(self, context: RunContext, values: RunValues) -> None:
        if self._every.due(values.global_step):
            rate = self._every.acted(values.global_step)
            if rate is not None:
                self.rate = rate
                _log.info("event=speed global_steps_per_s=%.1f", rate)


class NanLossError(ParamServerError):
    """The loss is not a number, or infinite: training has diverged."""


class NanHook(Hook):
    """Looks at each loss before its gradients are pushed: one that is not finite ends the loop.

    `fail`: with a NanLossError; else as if the hook had asked to stop. Nothing of the step is
    pushed either way."""

    def __init__(self, fail: bool = True) -> None:
        self._fail = fail

    def before_push(self, context: RunContext, loss: float, grads: dict[str, Array]) -> None:
        if math.isfinite(loss):
            return
        line = (
            f"the loss is {loss} at global_step {context.params.version}; "
            "try a smaller --learning-rate"
        )
        if self._fail:
            raise NanLossError(line)
        _log.warning("%s", line)
        context.request_stop(line)


def _check_one(who: str, **values: float | None) -> None:
    """Raises: ConfigError unless exactly one of the two is given and positive."""
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) != 1:
        raise ConfigError(f"{who} takes one of {' and '.join(values)}, not {len(given)} of them")
    for name, value in given.items():
        if not value > 0:
            raise ConfigError(f"{name} must be positive, not {value}")
