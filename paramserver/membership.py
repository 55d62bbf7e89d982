"""Who takes part: leases at ps:0, and the roster that carries its decisions to the other shards.

No clock and no threads here: the time is an argument (seconds of any monotonic clock). Only ps:0
decides (`Membership`); the others adopt the roster with the highest number, which clients carry
from shard to shard. No parameter server ever calls another.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from paramserver.consistency import Gate
from paramserver.errors import AlreadyExistsError, InvalidArgumentError, LeaseLostError

#: Departures a roster remembers. A shard that missed more learns of the rest by their absence, and
#: cannot list what they had cut off.
KEPT_DEPARTURES = 256

#: Counters stay below this, so that counting on never leaves 64 bits.
MOST = 1 << 62

# One spelling for one index: no leading zeros, no other digits.
_WORKER = re.compile(r"([a-z][a-z0-9_\-]{0,31}):(0|[1-9][0-9]{0,5})")


@dataclass(frozen=True)
class Member:
    """A living worker. `clock` is where Join told it to count from."""

    worker: str
    incarnation: int
    clock: int = 0

    @property
    def key(self) -> tuple[str, int]:
        """What identifies one life of a worker."""
        return self.worker, self.incarnation


@dataclass(frozen=True)
class Departure:
    """A worker that is gone; `sequence` is its last push that ps:0 admitted (0: none)."""

    worker: str
    incarnation: int
    sequence: int
    reason: str

    @property
    def key(self) -> tuple[str, int]:
        """What identifies one life of a worker."""
        return self.worker, self.incarnation


@dataclass(frozen=True)
class LastPush:
    """How far one worker's pushes have come."""

    worker: str
    incarnation: int
    sequence: int

    @property
    def key(self) -> tuple[str, int]:
        """What identifies one life of a worker."""
        return self.worker, self.incarnation


@dataclass(frozen=True)
class Roster:
    """What ps:0 decided for all shards. A value: it is numbered, passed on, never changed."""

    number: int = 0
    session: int = 0
    members: tuple[Member, ...] = ()
    departed: tuple[Departure, ...] = ()
    open: bool = False
    complete: bool = False
    last_pushes: tuple[LastPush, ...] = ()
    last_step: int = 0
    rounds: int = 0

    def check(self) -> None:
        """Refuses what ps:0 cannot have decided, before any of it is adopted.

        Raises: InvalidArgumentError."""
        names = [m.worker for m in self.members]
        for worker in (*names, *(d.worker for d in self.departed)):
            worker_order(worker)
        if len(set(names)) < len(names):
            raise InvalidArgumentError("the roster names a worker twice")
        numbers = (
            self.number,
            self.last_step,
            self.rounds,
            *(m.clock for m in self.members),
            *(d.sequence for d in self.departed),
            *(p.sequence for p in self.last_pushes),
        )
        if not all(0 <= number <= MOST for number in numbers):
            raise InvalidArgumentError(f"the roster has a number outside 0 to {MOST}")

    def has(self, key: tuple[str, int]) -> bool:
        """Whether this life of a worker is a member."""
        return any(m.key == key for m in self.members)


def worker_order(worker: str) -> tuple[int, str]:
    """Sort key of worker ids: by index, so that sums run in worker-index order.

    Raises: InvalidArgumentError for an id that is not "role:index"."""
    match = _WORKER.fullmatch(worker)
    if not match:
        raise InvalidArgumentError(f"worker id {worker[:80]!r} must be like 'worker:0'")
    return int(match[2]), match[1]


class Membership:
    """The leases of the living, at ps:0. Not thread-safe: guarded by the owner's lock."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._until: dict[tuple[str, int], float] = {}

    def join(self, key: tuple[str, int], now: float) -> bool:
        """Adds a member; False if this very life is one already (a repeated Join renews).

        Raises: AlreadyExistsError while another life of this worker holds a lease. Its attribute
        `metadata` says for how long, so that the caller can tell a living holder from a dead
        one."""
        for other, until in self._until.items():
            if other[0] == key[0] and other != key:
                left = max(0.0, until - now)
                error = AlreadyExistsError(
                    f"{key[0]} is in this job already; give this process another --task-index "
                    f"(if the other one is dead, its lease ends in {left:.1f} s)"
                )
                error.metadata = (("lease-left-ms", str(int(left * 1000))),)
                raise error
        known = key in self._until
        self._until[key] = now + self.lease_s
        return not known

    def renew(self, key: tuple[str, int], now: float) -> None:
        """A sign of life. Raises: LeaseLostError if it comes too late."""
        if key not in self._until:
            raise LeaseLostError(f"{key[0]} is no member of this job (any more); join again")
        self._until[key] = now + self.lease_s

    def remove(self, key: tuple[str, int]) -> None:
        """Ends a lease."""
        self._until.pop(key, None)

    def expired(self, now: float) -> list[tuple[str, int]]:
        """The members whose lease is over; they stay members until removed."""
        return [key for key, until in self._until.items() if until <= now]

    def next_expiry(self) -> float | None:
        """When the next lease ends; None: nobody has one."""
        return min(self._until.values(), default=None)

    def left(self, key: tuple[str, int], now: float) -> float:
        """Seconds until a member's lease ends; 0 if it is none."""
        return max(0.0, self._until.get(key, now) - now)


class Opening:
    """Whether a synchronous session may begin its first round; decided at ps:0.

    Everyone of `expected` (names after a restore, else any `count` workers) must have joined, or
    joined and left. Once `minimum` are there, the rest is awaited for one lease, counted from that
    moment."""

    def __init__(self, count: int, minimum: int, expected: Iterable[str], lease_s: float) -> None:
        self._expected = frozenset(expected)
        self._count = len(self._expected) or count
        self._minimum = minimum or (1 if self._expected else self._count)
        self._lease_s = lease_s
        self._seen: set[str] = set()
        self._until: float | None = None
        self._opened = False

    def saw(self, worker: str) -> None:
        """Notes that a worker joined."""
        if not self._opened:
            self._seen.add(worker)

    def gate(self, living: int, now: float) -> Gate:
        """Open from the first call on for which it was; `living` workers are members now."""
        if self._opened:
            return Gate(True)
        missing = self._expected - self._seen
        enough = not missing if self._expected else len(self._seen) >= self._count
        if living < self._minimum:
            self._until = None
        elif not enough:
            self._until = now + self._lease_s if self._until is None else self._until
            enough = now >= self._until
        if enough and living:
            self._opened = True
            self._seen.clear()
            return Gate(True)
        names = f": {', '.join(sorted(missing))}" if missing else ""
        return Gate(
            False,
            f"the first round waits for workers{names} ({len(self._seen)} of {self._count} joined)",
        )

    def deadline(self) -> float | None:
        """When waiting for the rest ends; None: not before more have joined."""
        return None if self._opened else self._until


class ChiefLease:
    """Who is chief: one holder at a time, for one lease. Not thread-safe."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.holder = ""
        self.incarnation = 0
        self._until = 0.0

    def claim(self, holder: str, incarnation: int, now: float) -> bool:
        """Claims or renews; False while somebody else holds it."""
        if self.alive(now) and incarnation != self.incarnation:
            return False
        self.holder, self.incarnation, self._until = holder, incarnation, now + self.lease_s
        return True

    def release(self, incarnation: int) -> None:
        """Gives it up, if the caller has it."""
        if incarnation == self.incarnation:
            self.holder, self.incarnation, self._until = "", 0, 0.0

    def alive(self, now: float) -> bool:
        """Whether there is a chief."""
        return bool(self.holder) and now < self._until

    def left(self, now: float) -> float:
        """Seconds until the holder's claim ends."""
        return max(0.0, self._until - now) if self.holder else 0.0
