"""What workers' pushes and pulls ask of a `Host`: when to decide, when to wait, who does the work.
No gRPC.

Between the third stop and the fourth in the walk of one Push. The host's lock is held only while
the shard decides or references are swapped; gradients are checked and applied outside it. Whoever
needs a result does the work for it: a pull that waits for a round applies the round if nobody else
is at it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from paramserver.consistency import Gate
from paramserver.errors import DeadlineExceededError, ResourceExhaustedError
from paramserver.host import Host, Key
from paramserver.membership import Roster
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard, View
from paramserver.update import Push

T = TypeVar("T")

#: A push that is applied as it arrives has to bring so many elements in so many seconds while
#: complete ones wait behind it: about 32 MB/s.
STREAM_ELEMENTS = 1 << 21
STREAM_PATIENCE_S = 0.25


class PushPull:
    """The data path of one server process. All methods are thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def begin_push(
        self, header: PushHeader, roster: Roster | None, active: Callable[[], bool]
    ) -> Push | PushResult:
        """Decides on a push; see `Shard.begin`. Waits only for a cut, an earlier copy of itself, or
        room, and no longer than the call is `active`. Raises: DeadlineExceededError."""

        def decide() -> Push | PushResult | Gate:
            return self._host.need().begin(header, self._host.now())

        patience_s = self._host.settings.push_wait_s
        with self._host.changed:
            if self._host.shard:
                self._host.adopt_for(self._host.shard, roster)
            begun: Push | PushResult | Gate = self._until_open(decide, patience_s, active)
        if isinstance(begun, Gate):
            raise DeadlineExceededError(f"waited {patience_s:g} s: {begun.reason}")
        return begun

    def finish_push(self, push: Push) -> PushResult:
        """Checks a complete push and sees it applied (sync: staged). Raises what the checks
        raise."""
        push.finish()
        with self._host.changed:
            shard = self._host.need()
            result = shard.submit(push)
            if result is not None:
                # Staged. If it was the last of its round, close it here rather than in a pull.
                while self._host.apply_one(shard):
                    pass
                # Or it was applied while it came: others may have waited for that.
                self._host.changed.notify_all()
                return result

            return self._await_turn(shard, push)

    def _await_turn(self, shard: Shard, push: Push) -> PushResult:
        """Applies a staged push, or sees it applied, in its turn. Called with the lock held.

        Before it there may be a direct push that is still arriving. As long as that moves, it is
        waited for; a stalled one has to make way, so that nobody hangs on a stranger's
        connection."""
        until = self._host.now() + self._host.settings.push_wait_s
        watched, fed, since = None, 0, 0.0
        while True:
            result = shard.result_of(push)
            if result is not None:
                return result
            if self._host.apply_one(shard):
                continue
            now = self._host.now()
            if now >= until:
                raise DeadlineExceededError(
                    f"waited {self._host.settings.push_wait_s:g} s: "
                    "earlier updates are being applied"
                )
            streaming = shard.streaming()
            if streaming is None:
                self._host.changed.wait(until - now)
                continue
            if streaming is not watched or streaming.fed >= fed + STREAM_ELEMENTS:
                watched, fed, since = streaming, streaming.fed, now
            elif now - since >= STREAM_PATIENCE_S:
                shard.make_way(streaming)
                continue
            self._host.changed.wait(min(until - now, STREAM_PATIENCE_S))

    def abort_push(self, push: Push) -> None:
        """Forgets a push that broke off."""
        with self._host.changed:
            if self._host.shard:
                self._host.shard.abort(push)
            self._host.changed.notify_all()

    # -- pull ----------------------------------------------------------------------------------

    def pull(
        self,
        session: int,
        member: Key,
        clock: int | None,
        values: bool,
        patience_s: float,
        active: Callable[[], bool],
    ) -> View | Gate:
        """The parameters, or, after `patience_s`, what the caller is still waiting for.

        Returns early with a closed gate when the call is no longer `active`. A view with values is
        to be given back with `release`."""

        def look() -> View | Gate:
            while True:
                shard = self._host.need()
                outcome = shard.pull(session, member, clock, values)
                if isinstance(outcome, View) or not self._host.apply_one(shard):
                    return outcome

        with self._host.changed:
            return self._until_open(look, patience_s, active)

    def _until_open(
        self, decide: Callable[[], T | Gate], patience_s: float, active: Callable[[], bool]
    ) -> T | Gate:
        """Asks again whenever something changed; a closed gate once the time is over or the call no
        longer `active`: nobody must pass then. Called with the lock held.

        Raises: ResourceExhaustedError if too many wait already."""
        until = self._host.now() + patience_s
        token = threading.get_ident()
        waits = self._host.waits
        try:
            while True:
                outcome = decide()
                if not isinstance(outcome, Gate):
                    return outcome
                left = until - self._host.now()
                if left <= 0:
                    return outcome
                if token not in waits:
                    self._admit_waiting()
                waits[token] = outcome.reason, waits.get(token, ("", self._host.now()))[1]
                self._host.changed.wait(left)
                if not active():
                    return outcome
        finally:
            waits.pop(token, None)

    def _admit_waiting(self) -> None:
        if len(self._host.waits) >= self._host.settings.max_workers:
            raise ResourceExhaustedError(
                f"{len(self._host.waits)} calls are waiting here already; "
                "the limit is --max-workers"
            )

    def release(self, view: View) -> None:
        """Gives back a view's references."""
        if view.pin:
            with self._host.changed:
                # The pin knows its arrays, also if another session has begun meanwhile.
                if self._host.shard and self._host.shard.release(view.pin):
                    self._host.changed.notify_all()

    def delivered(self, view: View, member: Key) -> None:
        """Notes that all of a view has been sent to a worker: if it was the last, it knows now."""
        if view.complete:
            with self._host.changed:
                if self._host.shard:
                    self._host.shard.tell(member)
                self._host.check_finished()
