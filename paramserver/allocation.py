"""Keeping memory warm: gradients and parameters move through buffers of megabytes, again and again.

A fresh page costs a fault and a zeroing: copying into fresh memory runs at about a fifth of the
speed of copying into memory used before. Two things keep it warm: the C library is told not to give
large blocks back at once (`keep_large_blocks`), and arrays handed to a user return to a `Pool` when
the last view of them is gone.
"""

from __future__ import annotations

import ctypes
import weakref
from collections import defaultdict

import numpy as np

from paramserver.layout import Array

# mallopt's parameters, from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_THRESHOLD = -3

#: glibc's own limit for the first.
_LARGE = 32 << 20

#: Below so many bytes a new array costs less than the bookkeeping.
_SMALL = 64 << 10


def keep_large_blocks() -> bool:
    """Tells glibc to reuse blocks of up to 32 MiB instead of mapping each anew. For a process of
    ours, at its start; False where the C library has no such call."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all(
        mallopt(parameter, value)
        for parameter, value in (
            (_M_MMAP_THRESHOLD, _LARGE),
            (_M_TRIM_THRESHOLD, 16 * _LARGE),
            (_M_TOP_PAD, _LARGE),
        )
    )


class Pool:
    """Arrays that are used again once nobody looks at them any more.

    `take` answers an array that its user may keep as long as they like, slice and view: its memory
    returns here when the last view of it is gone. Keeps `most` free arrays of each size and dtype.
    Thread-safe."""

    def __init__(self, most: int = 2) -> None:
        self._most = most
        self._free: dict[tuple[int, str], list[Array]] = defaultdict(list)

    def take(self, count: int, dtype: np.dtype[np.floating]) -> Array:
        """An array `(count,)`; contents are arbitrary. Small ones are simply new."""
        if count * dtype.itemsize < _SMALL:
            return np.empty(count, dtype)
        free = self._free[count, dtype.str]
        try:
            storage = free.pop()
        except IndexError:
            storage = np.empty(count, dtype)
        # Every view of the array keeps the lease alive; it, not the storage, is what they look at.
        lease = (ctypes.c_char * storage.nbytes).from_buffer(storage.data)
        weakref.finalize(lease, self._give_back, free, storage).atexit = False
        return np.frombuffer(memoryview(lease), dtype)

    def _give_back(self, free: list[Array], storage: Array) -> None:
        if len(free) < self._most:
            free.append(storage)
