"""The lock and the waits around one `Shard`: the thin shell that makes the core a shared thing. No
gRPC.

One lock guards the shard; it is held only while the core decides or references are swapped.
Gradients are read and applied, arrays encoded and messages logged outside it. Every wait has a
deadline. `PushPull` is what workers' pushes and pulls ask of a host, `Stewardship` what the chief
asks.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from paramserver.consistency import Gate
from paramserver.errors import (
    DeadlineExceededError,
    NotInitializedError,
    UnavailableError,
)
from paramserver.layout import Limits
from paramserver.membership import Departure, Roster
from paramserver.shard import Shard
from paramserver.streams import Stream, Streams

_log = logging.getLogger(__name__)

Key = tuple[str, int]


@dataclass(frozen=True)
class HostSettings:
    """How patient and how large a parameter server is. Seconds and bytes."""

    lease_s: float = 10.0
    #: Calls that may wait, and long-lived streams that may be open, at one time.
    max_workers: int = 64
    #: Gradient bytes that may have arrived without being applied.
    max_in_flight: int = 4 << 30
    limits: Limits = field(default_factory=Limits)
    #: How long a push waits at most for a cut, an earlier copy of itself, or its turn.
    push_wait_s: float = 60.0
    #: How long a snapshot's arrays are kept for a chief that does not come for them.
    snapshot_keep_s: float = 60.0


class Host:
    """What one server process shares between its threads. All methods are thread-safe."""

    def __init__(
        self,
        settings: HostSettings,
        incarnation: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.incarnation = incarnation
        self.started = clock()
        #: Set once the job is over and everybody knows (see Shutdown in the contract).
        self.finished = threading.Event()
        #: Set when the server is to end at once: a client asked for it, a defect, or it has been
        #: stopped.
        self.shutdown_now = threading.Event()
        #: The one lock, woken when a gate may have opened: an update committed, a roster, a hold
        #: that ended, closing. It guards all that follows, and the shard itself.
        self._lock = threading.Lock()
        self.changed = threading.Condition(self._lock)
        self.shard: Shard | None = None
        #: Why nothing new is taken; empty while it is.
        self.closing = ""
        #: Why the job is over; empty while it is not.
        self.job_done = ""
        #: What waiting pulls wait for, and since when, by thread.
        self.waits: dict[int, tuple[str, float]] = {}
        #: The streaming calls that are open.
        self.streams = Streams(settings.max_workers)
        self._clock = clock
        # Woken when the ticker may have to wake earlier than it meant to.
        self._timer = threading.Condition(self._lock)
        self._on_tick: list[Callable[[float], None]] = []
        self._ticker = threading.Thread(target=self._tick_forever, name="ps-ticker", daemon=True)
        self._ticker.start()

    # -- reading the shard ---------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[Shard | None]:
        """The shard, if there is one, under the lock: for a few quick looks, nothing slow."""
        with self._lock:
            yield self.shard

    @contextmanager
    def reading(self) -> Iterator[Shard]:
        """The same, for callers that need one. Raises: NotInitializedError, UnavailableError."""
        with self._lock:
            yield self.need()

    def now(self) -> float:
        """The host's clock, in seconds."""
        return self._clock()

    def need(self) -> Shard:
        """The shard. Called with the lock held. Raises: NotInitializedError, UnavailableError."""
        if self.closing:
            raise UnavailableError(self.closing)
        if self.shard is None:
            raise NotInitializedError(
                "this ps holds no variables yet; a chief (or worker 0) initialises or restores it"
            )
        return self.shard

    def waiting(self) -> list[str]:
        """What waiting calls wait for, and for how long."""
        with self._lock:
            now = self.now()
            return [f"{reason} ({now - since:.1f} s)" for reason, since in self.waits.values()]

    # -- membership ----------------------------------------------------------------------------

    def join(self, member: Key, session: int, roster: Roster | None) -> int:
        """Makes a worker a member (ps:0); the clock it counts from. See `Shard.join`.

        Session 0: whichever the shard is in."""
        with self.changed:
            shard = self.need()
            if session:
                shard.check_session(session)
            self.adopt_for(shard, roster)
            known = shard.roster.has(member)
            clock = shard.join(member, self.now())
            self.rethink()
        if not known:
            _log.info("event=join worker=%s clock=%d", member[0], clock)
        return clock

    def heartbeat(self, session: int, member: Key, roster: Roster | None) -> None:
        """Renews a lease (ps:0), takes news (elsewhere)."""
        with self.changed:
            shard = self.need()
            shard.check_session(session)
            self.adopt_for(shard, roster)
            shard.heartbeat(member, self.now())

    def leave(self, session: int, member: Key, reason: str, roster: Roster | None) -> None:
        """Ends a membership (ps:0)."""
        with self.changed:
            shard = self.need()
            shard.check_session(session)
            self.adopt_for(shard, roster)
            was_member = shard.roster.has(member)
            shard.leave(member, reason, self.now())
            self.streams.end_of(shard.roster.has)
            self.check_finished()
            self.changed.notify_all()
        if was_member:
            _log.info("event=leave worker=%s reason=%r", member[0], reason)

    def news(self, known: int) -> Roster | None:
        """ps:0's roster, if it is newer than number `known`."""
        shard = self.shard
        if shard is None or not shard.leads:
            return None
        roster = shard.roster
        return roster if roster.number > known else None

    def adopt(self, roster: Roster) -> None:
        """Takes news from ps:0."""
        with self.changed:
            if self.shard:
                self.adopt_for(self.shard, roster)

    def adopt_for(self, shard: Shard, roster: Roster | None) -> None:
        """The same for a call that is about to ask this shard. Called with the lock held."""
        if roster and shard.adopt(roster):
            self.streams.end_of(shard.roster.has)
            self.check_finished()
            self.changed.notify_all()

    def apply_one(self, shard: Shard) -> bool:
        """Makes and publishes the next version, if there is one to make. Called with the lock held,
        which is released for the arithmetic."""
        update = shard.take_update()
        if update is None:
            return False
        self._lock.release()
        try:
            update.run()
        finally:
            self._lock.acquire()
            shard.commit(update)
            self.changed.notify_all()
        return True

    def wake(self) -> None:
        """Lets waiting calls look again (one was cancelled)."""
        with self.changed:
            self.changed.notify_all()

    @contextmanager
    def stream(self, cancel: Callable[[], object], long_lived: bool = False) -> Iterator[Stream]:
        """Around a streaming call: `cancel` ends it if its client stalls for a lease, if the worker
        it belongs to is dropped, or (a long-lived one) on closing.

        Raises: ResourceExhaustedError if there are too many; UnavailableError when closing."""
        stream = Stream(cancel, self._clock, long_lived)
        with self._lock:
            if self.closing:
                raise UnavailableError(self.closing)
            self.streams.add(stream)
        try:
            yield stream
        finally:
            with self._lock:
                self.streams.remove(stream)

    # -- the end -------------------------------------------------------------------------------

    def done(self, reason: str) -> list[str]:
        """The job is over: the workers that still have to be told."""
        with self.changed:
            self.job_done = reason or "the job is done"
            self.check_finished()
            return self.shard.untold() if self.shard else []

    def close(self, reason: str) -> None:
        """Answers whoever waits with UNAVAILABLE, and takes nothing new. Idempotent."""
        with self.changed:
            if not self.closing:
                self.closing = reason
                self.streams.end_all(long_lived_only=True)
            self.rethink()

    def check_finished(self) -> None:
        """Sees whether everybody knows that the job is over. Called with the lock held."""
        if self.job_done and not (self.shard and self.shard.untold()):
            self.finished.set()

    # -- waiting and time ----------------------------------------------------------------------

    def wait_for(self, decide: Callable[[], Any], patience_s: float) -> Any:
        """Asks again whenever something changed. Called with the lock held.

        Raises: DeadlineExceededError with the reason."""
        until = self.now() + patience_s
        while True:
            outcome = decide()
            if not isinstance(outcome, Gate):
                return outcome
            left = until - self.now()
            if left <= 0:
                raise DeadlineExceededError(f"waited {patience_s:g} s: {outcome.reason}")
            self.changed.wait(left)

    def rethink(self) -> None:
        """Lets waiting calls look again, and the ticker too. Called with the lock held."""
        self.changed.notify_all()
        self._timer.notify()

    def on_tick(self, look: Callable[[float], None]) -> None:
        """Registers what else is to look at the time now and then, under the lock."""
        self._on_tick.append(look)

    def _tick_forever(self) -> None:
        """Lets time pass for the core: leases, holds, the opening of a round."""
        while True:
            with self.changed:
                if self.closing:
                    return
                now = self.now()
                dropped = self._tick(now)
                wake_at = self.shard.next_deadline() if self.shard else None
                left = self.settings.lease_s / 4
                if wake_at is not None:
                    left = min(left, max(0.001, wake_at - now))
                if not dropped:
                    self._timer.wait(left)
            for departure in dropped:
                _log.warning(
                    "event=drop worker=%s last_push=%d reason=%r",
                    departure.worker,
                    departure.sequence,
                    departure.reason,
                )

    def _tick(self, now: float) -> list[Departure]:
        for look in self._on_tick:
            look(now)
        self.streams.end_stalled(now, self.settings.lease_s)
        if not self.shard:
            return []
        number, due = self.shard.roster.number, self.shard.next_deadline()
        dropped = self.shard.tick(now)
        if self.shard.roster.number != number:
            self.streams.end_of(self.shard.roster.has)
            self.check_finished()
        if self.shard.roster.number != number or (due is not None and due <= now):
            # Also if it was only a hold that ended: pushes wait for that.
            self.changed.notify_all()
        return dropped
