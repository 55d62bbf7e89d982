"""The memory of a shard: flat arrays that readers hold by reference while the next version is made.

Every flat array (a group's values, or one of its slots) has one current buffer and a few spares. An
update is computed from the current arrays into spare ones and published by swapping references; a
buffer that is still read is recycled when its last reader lets go. So reads never tear, nothing is
copied under a lock, and memory stays within 2 x (variables + slots) + what is pinned.

No locks here: the owner guards every call but the reading of pinned arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paramserver.layout import DTYPES, Array, Layout

#: Versions that readers may hold at one time beside the current one; beyond, the next update waits.
MAX_PINNED = 3


class Buffer:
    """One flat array and the number of readers that hold it."""

    __slots__ = ("array", "pins")

    def __init__(self, array: Array) -> None:
        self.array = array
        self.pins = 0

    def view(self) -> Array:
        """The array, not to be written."""
        view = self.array.view()
        view.flags.writeable = False
        return view


class FlatArray:
    """One flat array of `size` elements through its versions."""

    def __init__(self, array: Array) -> None:
        self.current = Buffer(array)
        self._spares: list[Buffer] = []
        self._alive = 1
        self._pinned = 0

    @property
    def nbytes(self) -> int:
        """Bytes held, spares and pinned versions included."""
        return self._alive * self.current.array.nbytes

    def has_spare(self) -> bool:
        """Whether `spare` has something to give."""
        return bool(self._spares) or self._alive < 2 + MAX_PINNED

    def spare(self) -> Buffer:
        """A buffer to write the next version into; contents are arbitrary."""
        if self._spares:
            return self._spares.pop()
        self._alive += 1
        return Buffer(np.empty_like(self.current.array))

    def discard(self, buffer: Buffer) -> None:
        """Takes an unpublished buffer back."""
        self._recycle(buffer)

    def forget(self) -> None:
        """Gives up an unpublished buffer that somebody may still write into."""
        self._alive -= 1

    def publish(self, buffer: Buffer) -> None:
        """Makes `buffer` the current version; the old one is recycled once nobody reads it."""
        old, self.current = self.current, buffer
        if not old.pins:
            self._recycle(old)

    def pin(self) -> Buffer:
        """The current version, not to be written until `release`."""
        self._pinned += not self.current.pins
        self.current.pins += 1
        return self.current

    def release(self, buffer: Buffer) -> None:
        """Ends one pin."""
        buffer.pins -= 1
        if buffer.pins:
            return
        self._pinned -= 1
        if buffer is not self.current:
            self._spares.append(buffer)
        self._trim()

    def _recycle(self, buffer: Buffer) -> None:
        self._spares.append(buffer)
        self._trim()

    def _trim(self) -> None:
        # Fresh memory is slow: what the bound allows is kept.
        while self._spares and self._alive > 2 + self._pinned:
            self._spares.pop()
            self._alive -= 1


@dataclass(frozen=True)
class Pin:
    """References to arrays of one version. Give it back with `Buffers.release`."""

    held: tuple[tuple[FlatArray, Buffer], ...]
    arrays: dict[tuple[int, int], Array]


class Buffers:
    """All flat arrays of a shard: `arrays[group][0]` the values, `[group][k]` the k-th slot."""

    def __init__(self, arrays: Sequence[Sequence[Array]]) -> None:
        self.flat = [[FlatArray(array) for array in group] for group in arrays]

    @property
    def nbytes(self) -> int:
        """Bytes held, spares and pinned versions included."""
        return sum(flat.nbytes for group in self.flat for flat in group)

    def pin(self, slots: bool) -> Pin:
        """References to the current values (and slots), never written until released."""
        held = []
        arrays = {}
        for g, group in enumerate(self.flat):
            for s, flat in enumerate(group if slots else group[:1]):
                buffer = flat.pin()
                held.append((flat, buffer))
                arrays[g, s] = buffer.view()
        return Pin(tuple(held), arrays)

    def release(self, pin: Pin) -> None:
        """Ends a pin; its arrays may be overwritten from now on."""
        for flat, buffer in pin.held:
            flat.release(buffer)


def allocate(layout: Layout, slot_fill: Sequence[float]) -> list[list[Array]]:
    """Fresh flat arrays for a layout: zero values, and one slot for each fill value."""
    return [
        [
            np.zeros(group.size, DTYPES[group.dtype]),
            *(np.full(group.size, fill, DTYPES[group.dtype]) for fill in slot_fill),
        ]
        for group in layout.groups
    ]
