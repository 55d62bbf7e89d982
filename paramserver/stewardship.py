"""What the chief asks of a `Host`: the role itself, whole states in, consistent cuts out. No
gRPC."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from paramserver.consistency import Gate
from paramserver.cut import Admitted
from paramserver.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    PermissionDeniedError,
    UnavailableError,
)
from paramserver.host import Host, Key
from paramserver.layout import compare_models
from paramserver.membership import ChiefLease
from paramserver.shard import Shard, Snapshot
from paramserver.state import Loading, ShardState

_log = logging.getLogger(__name__)


class Stewardship:
    """The control path of one server process. All methods are thread-safe."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # Guarded by the host's lock, as all below.
        self._lease = ChiefLease(host.settings.lease_s)
        self._snapshots: dict[int, tuple[Snapshot, Shard, float]] = {}
        host.on_tick(self._tick)

    def claim(self, holder: str, incarnation: int, release: bool) -> tuple[bool, str, float]:
        """Claims, renews or gives up being chief: (granted, holder, seconds left)."""
        with self._host.changed:
            now = self._host.now()
            if release:
                self._lease.release(incarnation)
                return True, self._lease.holder, 0.0
            before = self._lease.holder if self._lease.alive(now) else ""
            granted = self._lease.claim(holder, incarnation, now)
            outcome = granted, self._lease.holder, self._lease.left(now)
        if granted and before != holder:
            _log.info("event=chief holder=%r", holder)
        return outcome

    def chief(self) -> str:
        """Who is chief now; empty: nobody."""
        with self._host.changed:
            return self._lease.holder if self._lease.alive(self._host.now()) else ""

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
        with self._host.changed:
            if self._host.closing:
                raise UnavailableError(self._host.closing)
            if self._host.shard and not restore:
                _check_same_model(self._host.shard, state)
                return None
        return Loading(state, self._host.settings.limits, slots_allowed=restore)

    def install(self, loading: Loading, restore: bool) -> int:
        """Puts a complete state in place: a new session begins. Returns the session in force."""
        layout, arrays = loading.finish()
        with self._host.changed:
            if self._host.closing:
                raise UnavailableError(self._host.closing)
            if self._host.shard and not restore:
                _check_same_model(self._host.shard, loading.state)
                return self._host.shard.state.session
            old, now = self._host.shard, self._host.now()
            settings = self._host.settings
            self._host.shard = Shard(
                loading.state, layout, arrays, settings.lease_s, now, settings.max_in_flight
            )
            self._host.job_done = ""
            if old:
                old.superseded = True
                self._host.streams.end_all(long_lived_only=True)
            self._host.rethink()
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
        with self._host.changed:
            now = self._host.now()
            admitted = self._host.need().hold(cut, now, now + deadline_s)
            # The ticker is to wake in time to end it.
            self._host.rethink()
            return admitted

    def cut(self, cut: int, admit: dict[Key, int], rounds: int, patience_s: float) -> Snapshot:
        """Second half: waits until the shard has come to the cut, and keeps it for `snapshot`."""
        with self._host.changed:
            shard = self._host.need()
            shard.cut(cut, admit, rounds)
            self._host.changed.notify_all()

            def decide() -> Snapshot | Gate:
                while self._host.apply_one(shard):
                    pass
                gate = shard.cut_gate(cut)
                return shard.take_cut(self._host.now()) if gate.open else gate

            snapshot: Snapshot = self._host.wait_for(decide, patience_s)
            until = self._host.now() + self._host.settings.snapshot_keep_s
            self._snapshots[cut] = (snapshot, shard, until)
            self._host.changed.notify_all()
            return snapshot

    def abandon_cut(self, cut: int) -> None:
        """Goes on without a cut, and drops what was kept of it."""
        with self._host.changed:
            if self._host.shard:
                self._host.shard.release_hold(cut)
            kept = self._snapshots.pop(cut, None)
            if kept:
                kept[1].release(kept[0].pin)
            self._host.changed.notify_all()

    @contextmanager
    def snapshot(self, cut: int) -> Iterator[Snapshot]:
        """What a cut kept, once; its references are dropped on leaving."""
        with self._host.changed:
            kept = self._snapshots.pop(cut, None)
        if kept is None:
            raise FailedPreconditionError("no such cut is kept here (any more); begin again")
        try:
            yield kept[0]
        finally:
            with self._host.changed:
                kept[1].release(kept[0].pin)
                self._host.changed.notify_all()

    def configure(self, last_step: int | None) -> None:
        """Changes settings of the running job (ps:0 decides; others follow its roster)."""
        with self._host.changed:
            if last_step is not None:
                self._host.need().set_last_step(last_step)
            self._host.changed.notify_all()

    def _tick(self, now: float) -> None:
        """Drops what nobody came for. Called under the host's lock."""
        for cut, (snapshot, shard, until) in list(self._snapshots.items()):
            if until <= now:
                shard.release(snapshot.pin)
                del self._snapshots[cut]


def _check_same_model(shard: Shard, state: ShardState) -> None:
    """Raises: AlreadyExistsError that names what differs between two models."""
    if (state.index, state.count) != (shard.state.index, shard.state.count):
        raise AlreadyExistsError(
            f"this is ps:{shard.state.index} of {shard.state.count} already, "
            f"not ps:{state.index} of {state.count}"
        )
    if difference := compare_models(shard.layout.variables, state.variables):
        raise AlreadyExistsError(f"another model is here already: {difference}")
