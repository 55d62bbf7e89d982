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

from paramserver.consistency import Gate
from paramserver.errors import DeadlineExceededError, ResourceExhaustedError
from paramserver.host import Host, Key
from paramserver.membership import Roster
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard, View
from paramserver.update import Push

#: A push that is applied as it arrives has to bring so many elements in so many seconds while
#: complete ones wait behind it: about 32 MB/s.
STREAM_ELEMENTS = 1 << 21
STREAM_PATIENCE_S = 0.25


class PushPull:
    """The data path of one server process. All methods are thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def begin_push(self, header: PushHeader, roster: Roster | None) -> Push | PushResult:
        """Decides on a push; see `Shard.begin`. Waits only for a cut or an earlier copy of
        itself."""

        def decide() -> Push | PushResult | Gate:
            shard = self._host.need()
            return shard.begin(header, self._host.now())

        with self._host.changed:
            if self._host.shard:
                self._host.adopt_for(self._host.shard, roster)
            begun: Push | PushResult = self._host.wait_for(decide, self._host.settings.push_wait_s)
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
        until = self._host.now() + patience_s
        token = threading.get_ident()
        with self._host.changed:
            try:
                while True:
                    shard = self._host.need()
                    outcome = shard.pull(session, member, clock, values)
                    if isinstance(outcome, View):
                        return outcome
                    if self._host.apply_one(shard):
                        continue
                    left = until - self._host.now()
                    if left <= 0 or not active():
                        return outcome
                    if token not in self._host.waits:
                        self._admit_waiting()
                    since = self._host.waits.get(token, ("", self._host.now()))[1]
                    self._host.waits[token] = (outcome.reason, since)
                    self._host.changed.wait(left)
            finally:
                self._host.waits.pop(token, None)

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
