"""A shard's state as a value: what Initialize and Restore bring, and what a snapshot takes away.

`Loading` collects such a state piece by piece; nothing exists before all of it has arrived and been
checked. No gRPC, no locks, no files here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from paramserver.buffers import allocate
from paramserver.cut_off import CutOffStep
from paramserver.errors import InvalidArgumentError
from paramserver.job import Job
from paramserver.layout import Array, Coverage, Layout, Limits, Range, Variable, check_finite, plan
from paramserver.membership import MOST, Member, worker_order


@dataclass(frozen=True)
class Remembered:
    """One line of the repeat table: a worker's last push; `clock` counts the steps it completed."""

    worker: str
    incarnation: int
    sequence: int
    clock: int


@dataclass(frozen=True)
class ShardState:
    """Everything about a shard but its arrays; see ShardState in the contract."""

    session: int
    index: int
    count: int
    job: Job
    variables: tuple[Variable, ...]
    version: int = 0
    global_step: int = 0
    rounds: int = 0
    remembered: tuple[Remembered, ...] = ()
    members: tuple[Member, ...] = ()
    cut_off: tuple[CutOffStep, ...] = ()

    def __post_init__(self) -> None:
        if not self.session:
            raise InvalidArgumentError("session must be a random non-zero id")
        if not 0 <= self.index < self.count <= 1 << 16:
            raise InvalidArgumentError(f"shard {self.index} of {self.count} cannot be")
        counters = (
            self.version,
            self.global_step,
            self.rounds,
            *(r.sequence for r in self.remembered),
            *(r.clock for r in self.remembered),
            *(m.clock for m in self.members),
            *(v.updates for v in self.variables),
        )
        if not all(0 <= counter <= MOST for counter in counters):
            raise InvalidArgumentError(
                f"version, global_step, rounds and the like must be between 0 and {MOST}"
            )
        for worker in (*(r.worker for r in self.remembered), *(m.worker for m in self.members)):
            worker_order(worker)


@dataclass
class Loading:
    """A state that is arriving. Fed by one thread.

    Raises InvalidArgumentError or ResourceExhaustedError from the constructor, before anything is
    allocated, for variables or sizes that cannot be held."""

    state: ShardState
    limits: Limits = field(default_factory=Limits)
    slots_allowed: bool = True

    def __post_init__(self) -> None:
        self._slots = self.state.job.optimizer.slots
        self.layout: Layout = plan(
            self.state.variables,
            Limits(self.limits.variables, self.limits.total_bytes // (1 + len(self._slots))),
        )
        fill = [self.state.job.optimizer.slot_fill(slot) for slot in self._slots]
        self._arrays = allocate(self.layout, fill)
        self._coverage = Coverage(self.layout)
        self._with_slots: set[int] = set()

    def feed(self, piece: Range, values: Array) -> None:
        """Copies a piece in. Raises: InvalidArgumentError outside the layout, twice, or NaN."""
        self.layout.check(piece, len(self._slots) if self.slots_allowed else 0)
        if not piece.count:
            return
        self._coverage.add(piece)
        if not piece.slot:
            check_finite(self.layout, piece, values, "variable")
        else:
            self._with_slots.add(piece.group)
        np.copyto(
            self._arrays[piece.group][piece.slot][piece.offset : piece.offset + piece.count], values
        )

    def finish(self) -> tuple[Layout, Sequence[Sequence[Array]]]:
        """The layout and the arrays, owned by the caller from here on.

        A group without any slot piece starts with fresh slots, and with an update count of 0 if it
        has some. Raises: InvalidArgumentError for a state with holes."""
        slots = [len(self._slots) if g in self._with_slots else 0 for g in range(len(self._arrays))]
        self._coverage.check_complete(slots)
        groups = tuple(
            replace(group, updates=0) if self._slots and not given else group
            for group, given in zip(self.layout.groups, slots, strict=True)
        )
        return replace(self.layout, groups=groups), self._arrays
