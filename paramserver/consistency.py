"""When a worker may read: three small predicates over clocks. Pure: no gRPC, no time, nothing
waits.

A *clock* is the number of steps a worker has completed, counted from where Join put it. A waiting
pull asks to compute at clock c; the rule answers a `Gate`, open or closed with the reason in words.

    Sync   round c-1 is closed: every live worker's gradient of it is in, averaged and applied once
    Ssp    c - (the slowest live worker's clock) <= slack
    Async  always
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from paramserver.errors import ConfigError


@dataclass(frozen=True)
class Gate:
    """A decision to let pass or not; `reason` says what a closed gate waits for."""

    open: bool
    reason: str = ""


OPEN = Gate(True)


@dataclass(frozen=True)
class Progress:
    """What the predicates look at: one shard's view of the job.

    `clocks` are those of the living; `rounds` the synchronous rounds closed here; `round_begun`
    whether somebody computes for the open one already; `start` the gate of a synchronous session's
    first round."""

    clocks: Mapping[str, int]
    rounds: int = 0
    round_begun: bool = False
    start: Gate = OPEN


@dataclass(frozen=True)
class Sync:
    """Rounds of `workers`: a round's gradients are averaged and applied once.

    `workers` must have joined (or left) before the first round. Once `min_workers` are there the
    others are awaited for one lease only; 0 means all of them at the start of a job, 1 after a
    restore."""

    workers: int
    min_workers: int = 0
    name: ClassVar[str] = "sync"

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise ConfigError(f"sync needs workers >= 1, not {self.workers}")
        if not 0 <= self.min_workers <= self.workers:
            raise ConfigError(
                f"min_workers must be between 0 and {self.workers} (workers), "
                f"not {self.min_workers}"
            )

    def gate(self, clock: int, progress: Progress) -> Gate:
        """Opens when round `clock` may begin: the one before it is closed."""
        if not progress.start.open:
            return progress.start
        if progress.rounds >= clock:
            return OPEN
        late = awaited(progress)
        return Gate(False, f"round {progress.rounds} waits for {', '.join(late) or 'its update'}")

    def start_clock(self, progress: Progress) -> int:
        """Where a newcomer counts from: the next round to begin. One that has begun goes on without
        it."""
        return progress.rounds + progress.round_begun

    def __str__(self) -> str:
        return "sync"


@dataclass(frozen=True)
class Ssp:
    """Stale synchronous parallel: nobody runs more than `slack` steps ahead of the slowest.

    A pull that passes at clock c has in it every live worker's updates of clocks up to c - slack -
    1. Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", NIPS 2013."""

    slack: int
    name: ClassVar[str] = "ssp"

    def __post_init__(self) -> None:
        if self.slack < 0:
            raise ConfigError(f"ssp needs slack >= 0, not {self.slack}")

    def gate(self, clock: int, progress: Progress) -> Gate:
        """Opens when the slowest live worker is at most `slack` steps behind."""
        slowest = min(progress.clocks.values(), default=clock)
        if clock - slowest <= self.slack:
            return OPEN
        late = [w for w, c in progress.clocks.items() if c == slowest]
        return Gate(
            False,
            f"clock {clock} is more than {self.slack} ahead of {', '.join(late)} at {slowest}",
        )

    def start_clock(self, progress: Progress) -> int:
        """Where a newcomer counts from: the slowest live worker's clock."""
        return min(progress.clocks.values(), default=0)

    def __str__(self) -> str:
        return f"ssp:{self.slack}"


@dataclass(frozen=True)
class Async:
    """Nobody waits for anybody: each gradient is applied as it comes."""

    name: ClassVar[str] = "async"

    def gate(self, clock: int, progress: Progress) -> Gate:
        """Always open."""
        return OPEN

    def start_clock(self, progress: Progress) -> int:
        """Where a newcomer counts from: 0."""
        return 0

    def __str__(self) -> str:
        return "async"


Consistency = Sync | Ssp | Async


def awaited(progress: Progress) -> list[str]:
    """The live workers whose gradient the open round still lacks."""
    return [worker for worker, clock in progress.clocks.items() if clock <= progress.rounds]


def parse(text: str, workers: int) -> Consistency:
    """Reads a command line's "sync", "async" or "ssp:N". Raises: ConfigError with the choices."""
    name, _, slack = text.partition(":")
    if text == "sync":
        return Sync(workers)
    if text == "async":
        return Async()
    if name == "ssp" and slack.isascii() and slack.isdigit():
        return Ssp(int(slack))
    raise ConfigError(f"consistency {text!r} is unknown; choose sync, async or ssp:N with N >= 0")
