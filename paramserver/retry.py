"""Trying again: which errors are worth it, how long to wait in between, and when to give up.

Used by the client only. A push may be sent again after any of these errors: the shard counts it
once. No calls and no sleeping here: clock and wait are arguments.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from paramserver.errors import (
    DeadlineExceededError,
    ParamServerError,
    ResourceExhaustedError,
    UnavailableError,
)
from paramserver.status import reason

#: The errors that may be gone the next time.
RETRYABLE = (UnavailableError, DeadlineExceededError, ResourceExhaustedError)

#: Nobody waits longer than this in silence.
REPORT_S = 10.0


def backoff(base_s: float, cap_s: float, rng: random.Random) -> Iterator[float]:
    """Endless delays: each random between half and all of a bound that doubles up to `cap_s`.

    Random, so that workers that lost the same server do not come back in step."""
    bound = base_s
    while True:
        yield rng.uniform(bound / 2, bound)
        bound = min(2 * bound, cap_s)


class Retry:
    """The attempts at one call, `total_s` seconds in all. Not thread-safe: one for each call.

        retry = Retry("ps:1 at 10.0.0.7:1682", 60, wait=closing.wait, on_wait=log)
        while True:
            try:
                return attempt(timeout=retry.remaining_s)
            except ParamServerError as error:
                retry.pause(error)

    `wait(seconds)` returns True if it was interrupted (`threading.Event.wait` of an event that is
    set to close). `on_wait` is told "waiting for ps:1 at 10.0.0.7:1682 (connection refused)": at
    once, when the reason changes, and every `report_s` at least as long as attempts are short."""

    def __init__(
        self,
        peer: str,
        total_s: float,
        *,
        wait: Callable[[float], bool],
        on_wait: Callable[[str], None] | None = None,
        base_s: float = 0.05,
        cap_s: float = 2.0,
        report_s: float = REPORT_S,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._peer = peer
        self._total_s = total_s
        self._wait = wait
        self._on_wait = on_wait
        self._report_s = report_s
        self._clock = clock
        self._until = clock() + total_s
        self._delays = backoff(base_s, cap_s, rng or random.Random())
        self._reported: tuple[str, float] | None = None

    @property
    def remaining_s(self) -> float:
        """Seconds until it gives up, >= 0."""
        return max(0.0, self._until - self._clock())

    def pause(self, error: ParamServerError) -> None:
        """Waits before the next attempt. Blocks, `cap_s` at most.

        Raises: `error` itself if it is not worth another attempt or the wait was interrupted; the
        same kind, saying how long it was tried, when the time is over."""
        if not isinstance(error, RETRYABLE):
            raise error
        remaining = self.remaining_s
        if not remaining:
            final = type(error)(f"{error} (gave up after {self._total_s:g} s)")
            final.metadata = error.metadata
            raise final from error.__cause__
        delay = min(next(self._delays), remaining)
        self._report(reason(error), delay)
        if self._wait(delay):
            raise error

    def _report(self, why: str, delay: float) -> None:
        now = self._clock()
        if self._reported:
            before, since = self._reported
            if before == why and now + delay - since < self._report_s:
                return
        self._reported = why, now
        if self._on_wait:
            self._on_wait(f"waiting for {self._peer} ({why})")
