"""The locks and waits around one `Shard`: the thin shell that makes the core a shared thing. No
gRPC.

One lock guards the shard; it is held only while the core decides or references are swapped.
Gradients are read and applied, arrays encoded and messages logged outside it. Waiting happens here
and nowhere else, always with a deadline, and whoever needs the result does the work: a pull that
waits for a round applies the round itself if nobody else is at it.
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
from paramserver.cut import Admitted
from paramserver.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotInitializedError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from paramserver.layout import Limits, compare_models
from paramserver.membership import ChiefLease, Departure, Roster
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard, Snapshot, View
from paramserver.state import Loading, ShardState
from paramserver.update import Push

_log = logging.getLogger(__name__)

Key = tuple[str, int]

#: A push that is applied as it arrives has to bring so many elements in so many seconds while
#: complete ones wait behind it: about 32 MB/s.
STREAM_ELEMENTS = 1 << 21
STREAM_PATIENCE_S = 0.25


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
        self._clock = clock
        self._lock = threading.Lock()
        # Woken when a gate may have opened: an update committed, a roster, a hold, or closing.
        self._changed = threading.Condition(self._lock)
        self._shard: Shard | None = None  # guarded by _lock, as all below
        self._chief = ChiefLease(settings.lease_s)
        self._closing = ""
        self._done = ""
        self._waiting: dict[int, tuple[str, float]] = {}
        self._streams: dict[int, tuple[Key, Callable[[], object]]] = {}
        self._snapshots: dict[int, tuple[Snapshot, Shard, float]] = {}
        self._said = ""
        self._ticker = threading.Thread(target=self._tick_forever, name="ps-ticker", daemon=True)
        self._ticker.start()

    # -- reading the shard ---------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[Shard | None]:
        """The shard, if there is one, under the lock: for a few quick looks, nothing slow."""
        with self._lock:
            yield self._shard

    @contextmanager
    def reading(self) -> Iterator[Shard]:
        """The same, for callers that need one. Raises: NotInitializedError, UnavailableError."""
        with self._lock:
            yield self._need()

    def now(self) -> float:
        """The host's clock, in seconds."""
        return self._clock()

    def _need(self) -> Shard:
        if self._closing:
            raise UnavailableError(self._closing)
        if self._shard is None:
            raise NotInitializedError(
                "this ps holds no variables yet; a chief (or worker 0) initialises or restores it"
            )
        return self._shard

    def waiting(self) -> list[str]:
        """What waiting calls wait for, and for how long."""
        with self._lock:
            now = self._clock()
            return [f"{reason} ({now - since:.1f} s)" for reason, since in self._waiting.values()]

    # -- membership ----------------------------------------------------------------------------

    def join(self, member: Key, session: int, roster: Roster | None) -> int:
        """Makes a worker a member (ps:0); the clock it counts from. See `Shard.join`.

        Session 0: whichever the shard is in."""
        with self._changed:
            shard = self._need()
            if session:
                shard.check_session(session)
            self._adopt(shard, roster)
            known = shard.roster.has(member)
            clock = shard.join(member, self._clock())
            self._changed.notify_all()
        if not known:
            _log.info("event=join worker=%s clock=%d", member[0], clock)
        return clock

    def heartbeat(self, session: int, member: Key, roster: Roster | None) -> None:
        """Renews a lease (ps:0), takes news (elsewhere)."""
        with self._changed:
            shard = self._need()
            shard.check_session(session)
            self._adopt(shard, roster)
            shard.heartbeat(member, self._clock())

    def leave(self, session: int, member: Key, reason: str, roster: Roster | None) -> None:
        """Ends a membership (ps:0)."""
        with self._changed:
            shard = self._need()
            shard.check_session(session)
            self._adopt(shard, roster)
            was_member = shard.roster.has(member)
            shard.leave(member, reason, self._clock())
            self._end_streams_of_the_gone(shard)
            self._check_finished()
            self._changed.notify_all()
        if was_member:
            _log.info("event=leave worker=%s reason=%r", member[0], reason)

    def news(self, known: int) -> Roster | None:
        """ps:0's roster, if it is newer than number `known`."""
        shard = self._shard
        if shard is None or not shard.leads:
            return None
        roster = shard.roster
        return roster if roster.number > known else None

    def adopt(self, roster: Roster) -> None:
        """Takes news from ps:0."""
        with self._changed:
            if self._shard:
                self._adopt(self._shard, roster)

    def _adopt(self, shard: Shard, roster: Roster | None) -> None:
        if roster and shard.adopt(roster):
            self._end_streams_of_the_gone(shard)
            self._check_finished()
            self._changed.notify_all()

    # -- push ----------------------------------------------------------------------------------

    def begin_push(self, header: PushHeader, roster: Roster | None) -> Push | PushResult:
        """Decides on a push; see `Shard.begin`. Waits only for a cut or an earlier copy of
        itself."""

        def decide() -> Push | PushResult | Gate:
            shard = self._need()
            if shard.nbytes_in_flight > self.settings.max_in_flight:
                raise ResourceExhaustedError(
                    f"{shard.nbytes_in_flight} bytes of gradients are in flight; the limit is "
                    f"{self.settings.max_in_flight} (raise it with --max-in-flight)"
                )
            return shard.begin(header, self._clock())

        with self._changed:
            if self._shard:
                self._adopt(self._shard, roster)
            begun: Push | PushResult = self._wait(decide, self.settings.push_wait_s)
            return begun

    def finish_push(self, push: Push) -> PushResult:
        """Checks a complete push and sees it applied (sync: staged). Raises what the checks
        raise."""
        push.finish()
        with self._changed:
            shard = self._need()
            result = shard.submit(push)
            if result is not None:
                # Staged. If it was the last of its round, close it here rather than in a pull.
                while self._apply_one(shard):
                    pass
                # Or it was applied while it came: others may have waited for that.
                self._changed.notify_all()
                return result

            return self._await_turn(shard, push)

    def _await_turn(self, shard: Shard, push: Push) -> PushResult:
        """Applies a staged push, or sees it applied, in its turn. Called with the lock held.

        Before it there may be a direct push that is still arriving. As long as that moves, it is
        waited for; a stalled one has to make way, so that nobody hangs on a stranger's
        connection."""
        until = self._clock() + self.settings.push_wait_s
        watched, fed, since = None, 0, 0.0
        while True:
            result = shard.result_of(push)
            if result is not None:
                return result
            if self._apply_one(shard):
                continue
            now = self._clock()
            if now >= until:
                raise DeadlineExceededError(
                    f"waited {self.settings.push_wait_s:g} s: earlier updates are being applied"
                )
            streaming = shard.streaming()
            if streaming is None:
                self._changed.wait(until - now)
                continue
            if streaming is not watched or streaming.fed >= fed + STREAM_ELEMENTS:
                watched, fed, since = streaming, streaming.fed, now
            elif now - since >= STREAM_PATIENCE_S:
                shard.make_way(streaming)
                continue
            self._changed.wait(min(until - now, STREAM_PATIENCE_S))

    def abort_push(self, push: Push) -> None:
        """Forgets a push that broke off."""
        with self._changed:
            if self._shard:
                self._shard.abort(push)
            self._changed.notify_all()

    def _apply_one(self, shard: Shard) -> bool:
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
            self._changed.notify_all()
        return True

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
        until = self._clock() + patience_s
        token = threading.get_ident()
        with self._changed:
            try:
                while True:
                    shard = self._need()
                    outcome = shard.pull(session, member, clock, values)
                    if isinstance(outcome, View):
                        return outcome
                    if self._apply_one(shard):
                        continue
                    left = until - self._clock()
                    if left <= 0 or not active():
                        return outcome
                    if token not in self._waiting:
                        self._admit_waiting()
                    since = self._waiting.get(token, ("", self._clock()))[1]
                    self._waiting[token] = (outcome.reason, since)
                    self._changed.wait(left)
            finally:
                self._waiting.pop(token, None)

    def _admit_waiting(self) -> None:
        if len(self._waiting) >= self.settings.max_workers:
            raise ResourceExhaustedError(
                f"{len(self._waiting)} calls are waiting here already; the limit is --max-workers"
            )

    def release(self, view: View) -> None:
        """Gives back a view's references."""
        if view.pin:
            with self._changed:
                if self._shard:
                    self._shard.release(view.pin)
                self._changed.notify_all()

    def delivered(self, view: View, member: Key) -> None:
        """Notes that all of a view has been sent to a worker: if it was the last, it knows now."""
        if view.complete:
            with self._changed:
                if self._shard:
                    self._shard.tell(member)
                self._check_finished()

    def wake(self) -> None:
        """Lets waiting calls look again (one was cancelled)."""
        with self._changed:
            self._changed.notify_all()

    @contextmanager
    def stream(self, member: Key, cancel: Callable[[], object]) -> Iterator[None]:
        """Registers a long-lived stream: it is cancelled when its worker's lease ends, or on
        closing.

        Raises: ResourceExhaustedError if there are too many."""
        token = threading.get_ident()
        with self._lock:
            if self._closing:
                raise UnavailableError(self._closing)
            if len(self._streams) >= self.settings.max_workers:
                raise ResourceExhaustedError(
                    f"{len(self._streams)} streams are open here already; the limit is "
                    "--max-workers"
                )
            self._streams[token] = (member, cancel)
        try:
            yield
        finally:
            with self._lock:
                self._streams.pop(token, None)

    def _end_streams_of_the_gone(self, shard: Shard) -> None:
        for member, cancel in self._streams.values():
            if not shard.roster.has(member):
                cancel()

    # -- control -------------------------------------------------------------------------------

    def claim(self, holder: str, incarnation: int, release: bool) -> tuple[bool, str, float]:
        """Claims, renews or gives up being chief: (granted, holder, seconds left)."""
        with self._changed:
            now = self._clock()
            if release:
                self._chief.release(incarnation)
                return True, self._chief.holder, 0.0
            before = self._chief.holder if self._chief.alive(now) else ""
            granted = self._chief.claim(holder, incarnation, now)
            outcome = granted, self._chief.holder, self._chief.left(now)
        if granted and before != holder:
            _log.info("event=chief holder=%r", holder)
        return outcome

    def chief(self) -> str:
        """Who is chief now; empty: nobody."""
        with self._lock:
            return self._chief.holder if self._chief.alive(self._clock()) else ""

    def check_chief(self, holder: str, incarnation: int) -> None:
        """Lets the chief pass, or somebody who becomes it by commanding while there is none.

        Raises: PermissionDeniedError that names the holder."""
        granted, current, left = self.claim(holder, incarnation, release=False)
        if not granted:
            raise PermissionDeniedError(
                f"{current} is chief here (its claim ends in {left:.1f} s unless it renews it); "
                f"{holder or 'the caller'} is not"
            )

    def loading(self, state: ShardState, restore: bool) -> Loading | None:
        """Begins to take a state; None if this very model is here already (Initialize only)."""
        with self._lock:
            if self._closing:
                raise UnavailableError(self._closing)
            if self._shard and not restore:
                _check_same_model(self._shard, state)
                return None
        return Loading(state, self.settings.limits, slots_allowed=restore)

    def install(self, loading: Loading, restore: bool) -> int:
        """Puts a complete state in place: a new session begins. Returns the session in force."""
        layout, arrays = loading.finish()
        with self._changed:
            if self._closing:
                raise UnavailableError(self._closing)
            if self._shard and not restore:
                _check_same_model(self._shard, loading.state)
                return self._shard.state.session
            old, now = self._shard, self._clock()
            self._shard = Shard(loading.state, layout, arrays, self.settings.lease_s, now)
            self._done = ""
            if old:
                old.superseded = True
                for _, cancel in self._streams.values():
                    cancel()
            self._changed.notify_all()
        _log.info(
            "event=%s shard=%d/%d variables=%d step=%d",
            "restore" if restore else "initialize",
            loading.state.index,
            loading.state.count,
            len(layout.variables),
            loading.state.global_step,
        )
        return loading.state.session

    def hold(self, cut: int, deadline_s: float) -> Admitted:
        """First half of a cut; see `Shard.hold`."""
        with self._changed:
            now = self._clock()
            admitted = self._need().hold(cut, now, now + deadline_s)
            # The ticker is to wake in time to end it.
            self._changed.notify_all()
            return admitted

    def cut(self, cut: int, admit: dict[Key, int], rounds: int, patience_s: float) -> Snapshot:
        """Second half: waits until the shard has come to the cut, and keeps it for `snapshot`."""
        with self._changed:
            shard = self._need()
            shard.cut(cut, admit, rounds)
            self._changed.notify_all()

            def decide() -> Snapshot | Gate:
                while self._apply_one(shard):
                    pass
                gate = shard.cut_gate(cut)
                return shard.take_cut(self._clock()) if gate.open else gate

            snapshot: Snapshot = self._wait(decide, patience_s)
            until = self._clock() + self.settings.snapshot_keep_s
            self._snapshots[cut] = (snapshot, shard, until)
            self._changed.notify_all()
            return snapshot

    def abandon_cut(self, cut: int) -> None:
        """Goes on without a cut, and drops what was kept of it."""
        with self._changed:
            if self._shard:
                self._shard.release_hold(cut)
            kept = self._snapshots.pop(cut, None)
            if kept:
                kept[1].release(kept[0].pin)
            self._changed.notify_all()

    @contextmanager
    def snapshot(self, cut: int) -> Iterator[Snapshot]:
        """What a cut kept, once; its references are dropped on leaving."""
        with self._lock:
            kept = self._snapshots.pop(cut, None)
        if kept is None:
            raise FailedPreconditionError("no such cut is kept here (any more); begin again")
        try:
            yield kept[0]
        finally:
            with self._changed:
                kept[1].release(kept[0].pin)
                self._changed.notify_all()

    def configure(self, last_step: int | None) -> None:
        """Changes settings of the running job (ps:0 decides; others follow its roster)."""
        with self._changed:
            if last_step is not None:
                self._need().set_last_step(last_step)
            self._changed.notify_all()

    # -- the end -------------------------------------------------------------------------------

    def done(self, reason: str) -> list[str]:
        """The job is over: the workers that still have to be told."""
        with self._changed:
            self._done = reason or "the job is done"
            self._check_finished()
            return self._shard.untold() if self._shard else []

    def close(self, reason: str) -> None:
        """Answers whoever waits with UNAVAILABLE, and takes nothing new. Idempotent."""
        with self._changed:
            if not self._closing:
                self._closing = reason
                for _, cancel in self._streams.values():
                    cancel()
            self._changed.notify_all()

    def _check_finished(self) -> None:
        if self._done and not (self._shard and self._shard.untold()):
            self.finished.set()

    # -- waiting and time ----------------------------------------------------------------------

    def _wait(self, decide: Callable[[], Any], patience_s: float) -> Any:
        """Asks again whenever something changed. Called with the lock held.

        Raises: DeadlineExceededError with the reason."""
        until = self._clock() + patience_s
        while True:
            outcome = decide()
            if not isinstance(outcome, Gate):
                return outcome
            left = until - self._clock()
            if left <= 0:
                raise DeadlineExceededError(f"waited {patience_s:g} s: {outcome.reason}")
            self._changed.wait(left)

    def _tick_forever(self) -> None:
        """Lets time pass for the core: leases, holds, the opening of a round, forgotten
        snapshots."""
        while True:
            with self._changed:
                if self._closing:
                    return
                now = self._clock()
                dropped = self._tick(now)
                wake_at = self._shard.next_deadline() if self._shard else None
                left = self.settings.lease_s / 4
                if wake_at is not None:
                    left = min(left, max(0.001, wake_at - now))
                if not dropped:
                    self._changed.wait(left)
            for departure in dropped:
                _log.warning(
                    "event=drop worker=%s last_push=%d reason=%r",
                    departure.worker,
                    departure.sequence,
                    departure.reason,
                )

    def _tick(self, now: float) -> list[Departure]:
        for cut, (snapshot, shard, until) in list(self._snapshots.items()):
            if until <= now:
                shard.release(snapshot.pin)
                del self._snapshots[cut]
        if not self._shard:
            return []
        number, due = self._shard.roster.number, self._shard.next_deadline()
        dropped = self._shard.tick(now)
        if self._shard.roster.number != number:
            self._end_streams_of_the_gone(self._shard)
            self._check_finished()
        if self._shard.roster.number != number or (due is not None and due <= now):
            # Also if it was only a hold that ended: pushes wait for that.
            self._changed.notify_all()
        return dropped


def _check_same_model(shard: Shard, state: ShardState) -> None:
    """Raises: AlreadyExistsError that names what differs between two models."""
    if (state.index, state.count) != (shard.state.index, shard.state.count):
        raise AlreadyExistsError(
            f"this is ps:{shard.state.index} of {shard.state.count} already, "
            f"not ps:{state.index} of {state.count}"
        )
    if difference := compare_models(shard.layout.variables, state.variables):
        raise AlreadyExistsError(f"another model is here already: {difference}")
