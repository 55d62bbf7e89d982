"""The arrays of a shard, version by version: where an update reads, where it writes, what is
current.

One update exists at a time. It is started on spare arrays, written outside every lock, and
published by swapping references; or dropped, and nothing has changed. Not thread-safe: guarded by
the owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from paramserver.buffers import Buffers, Pin
from paramserver.layout import Array, Layout, Variable
from paramserver.optimizers import Optimizer
from paramserver.update import Target, Update


class Parameters:
    """Values and slots of all groups, the version they are of, and the update in the making."""

    def __init__(self, layout: Layout, arrays: Sequence[Sequence[Array]], version: int) -> None:
        self.layout = layout
        #: Updates applied.
        self.version = version
        #: The update in the making, if any.
        self.writer: Update | None = None
        self._buffers = Buffers(arrays)
        # Whether an update could not start for want of a spare array.
        self._starved = False
        self._updates = [group.updates for group in layout.groups]

    @property
    def nbytes(self) -> int:
        """Bytes of variables and slots, spares and pinned versions included."""
        return self._buffers.nbytes

    def variables(self) -> tuple[Variable, ...]:
        """The variables, each with the updates that its slots have seen by now."""
        return tuple(v.with_updates(self._updates[v.group]) for v in self.layout.variables)

    def start(self, groups: Sequence[int], rule: Optimizer) -> Update | None:
        """Begins the next version of `groups`; None while another is in the making, or while so
        many versions are being read that there is no spare array left."""
        flats = self._buffers.flat
        if self.writer:
            return None
        if not all(flat.has_spare() for g in groups for flat in flats[g]):
            self._starved = True
            return None
        targets = [
            Target(
                self._updates[g] + 1,
                [flat.current.view() for flat in flats[g]],
                [flat.spare() for flat in flats[g]],
            )
            for g in groups
        ]
        self.writer = Update(rule, dict(zip(groups, targets, strict=True)))
        return self.writer

    def publish(self, update: Update) -> None:
        """Makes what the update wrote current: one swap of references, one version more."""
        self.writer = None
        self.version += 1
        # Also those it leaves out: how variables are spread over groups and shards must not show.
        self._updates = [updates + 1 for updates in self._updates]
        for g, target in update.targets.items():
            for flat, spare in zip(self._buffers.flat[g], target.spares, strict=True):
                if g in update.touched:
                    flat.publish(spare)
                else:
                    flat.discard(spare)

    def drop(self, update: Update, still_written: bool = False) -> None:
        """Forgets an update. `still_written`: by a thread that has not noticed yet, so that its
        arrays must not be used again."""
        if self.writer is not update:
            return
        self.writer = None
        for g, target in update.targets.items():
            for flat, spare in zip(self._buffers.flat[g], target.spares, strict=True):
                if still_written:
                    flat.forget()
                else:
                    flat.discard(spare)

    def pin(self, slots: bool) -> Pin:
        """References to the current values (and slots), never written until released."""
        return self._buffers.pin(slots)

    def release(self, pin: Pin) -> bool:
        """Ends a pin; its arrays may be overwritten from now on. Whether an update waits for
        that."""
        self._buffers.release(pin)
        starved, self._starved = self._starved, False
        return starved
