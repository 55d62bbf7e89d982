"""Memory that is used again: never while anybody can still see it."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from paramserver.allocation import Pool, keep_large_blocks

F4 = np.dtype("<f4")
LARGE = 1 << 20


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_an_array_that_nobody_sees_is_used_again() -> None:
    pool = Pool()
    first = pool.take(LARGE, F4)
    where = address(first)
    del first
    assert address(pool.take(LARGE, F4)) == where


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a[10:20],
        lambda a: a[10:20].reshape(2, 5).T,
        lambda a: a.view(np.uint8)[3:7],
        lambda a: memoryview(a)[5:9],
        lambda a: np.asarray(a[::2]),
    ],
)
def test_a_view_keeps_its_memory_as_long_as_it_lives(view) -> None:
    pool = Pool()
    array = pool.take(LARGE, F4)
    array[:] = 7
    where, seen = address(array), view(array)
    before = bytes(seen)
    del array
    gc.collect()
    other = pool.take(LARGE, F4)
    other[:] = 9
    assert address(other) != where
    assert bytes(seen) == before
    del seen
    gc.collect()
    assert address(pool.take(LARGE, F4)) == where


def test_it_keeps_few_of_a_size_and_lets_the_rest_go() -> None:
    pool = Pool(most=2)
    arrays = [pool.take(LARGE, F4) for _ in range(5)]
    where = {address(a) for a in arrays}
    del arrays
    again = [pool.take(LARGE, F4) for _ in range(2)]
    assert {address(a) for a in again} <= where
    assert sum(len(free) for free in pool._free.values()) == 0


def test_sizes_and_dtypes_are_kept_apart() -> None:
    pool = Pool()
    del_me = pool.take(LARGE, F4)
    del del_me
    assert pool.take(LARGE, np.dtype("<f8")).dtype == np.dtype("<f8")
    assert pool.take(LARGE + 1, F4).size == LARGE + 1


def test_small_arrays_are_simply_new() -> None:
    pool = Pool()
    small = pool.take(4, F4)
    gone = weakref.ref(small)
    del small
    assert gone() is None
    assert not pool._free


def test_arrays_are_writable_until_their_user_says_otherwise() -> None:
    array = Pool().take(LARGE, F4)
    array.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1


def test_telling_the_c_library_is_harmless_anywhere() -> None:
    assert keep_large_blocks() in (True, False)
