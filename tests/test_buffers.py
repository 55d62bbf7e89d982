"""The memory of a shard: what is read never changes, and memory stays within its bound."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paramserver.buffers import MAX_PINNED, Buffer, Buffers, FlatArray, allocate
from paramserver.layout import Variable, plan

SIZE = 4
BYTES = 8 * SIZE


def flat() -> FlatArray:
    return FlatArray(np.zeros(SIZE))


def publish(array: FlatArray, value: float) -> None:
    """Makes a version whose elements are all `value`."""
    spare = array.spare()
    spare.array[:] = value
    array.publish(spare)


def test_versions_alternate_between_two_arrays_while_nobody_reads() -> None:
    array = flat()
    used = set()
    for version in range(1, 6):
        publish(array, version)
        used.add(id(array.current.array))
        assert array.current.array.tolist() == [version] * SIZE
    assert len(used) == 2
    assert array.nbytes == 2 * BYTES


def test_a_pinned_version_outlives_any_number_of_updates() -> None:
    array = flat()
    publish(array, 1)
    pinned = array.pin()
    for version in range(2, 8):
        publish(array, version)
    assert pinned.array.tolist() == [1] * SIZE
    assert array.nbytes == 3 * BYTES
    array.release(pinned)
    assert array.nbytes == 2 * BYTES


def test_two_readers_of_one_version_are_two_pins() -> None:
    array = flat()
    first, second = array.pin(), array.pin()
    publish(array, 1)
    array.release(first)
    publish(array, 2)
    publish(array, 3)
    assert second.array.tolist() == [0] * SIZE
    array.release(second)
    assert array.nbytes == 2 * BYTES


def test_the_current_version_may_be_pinned_and_released_without_an_update() -> None:
    array = flat()
    array.release(array.pin())
    publish(array, 1)
    assert array.current.array.tolist() == [1] * SIZE
    assert array.nbytes == 2 * BYTES


def test_too_many_pinned_versions_leave_no_spare_until_one_is_released() -> None:
    array = flat()
    pins = []
    for version in range(1, 2 + MAX_PINNED):
        assert array.has_spare()
        pins.append(array.pin())
        publish(array, version)
    assert len(pins) == MAX_PINNED + 1
    assert not array.has_spare()
    assert array.nbytes == (2 + MAX_PINNED) * BYTES
    array.release(pins.pop())
    assert array.has_spare()


def test_a_discarded_update_costs_nothing() -> None:
    array = flat()
    for _ in range(3):
        array.discard(array.spare())
    assert array.current.array.tolist() == [0] * SIZE
    assert array.nbytes == 2 * BYTES


def test_a_reader_that_ends_during_an_update_leaves_no_third_array_behind() -> None:
    array = flat()
    pinned = array.pin()
    publish(array, 1)
    spare = array.spare()
    array.release(pinned)
    assert array.nbytes == 2 * BYTES
    array.discard(spare)
    assert array.nbytes == 2 * BYTES


def test_a_forgotten_buffer_is_never_used_again() -> None:
    array = flat()
    forgotten = array.spare()
    array.forget()
    assert array.nbytes == BYTES
    for version in range(1, 5):
        publish(array, version)
        assert array.current is not forgotten
        forgotten.array[:] = -1  # its thread has not noticed yet
        assert array.current.array.tolist() == [version] * SIZE


def test_views_cannot_be_written() -> None:
    view = Buffer(np.zeros(SIZE)).view()
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


@pytest.mark.parametrize("seed", range(30))
def test_any_order_of_reads_and_updates(seed: int) -> None:
    choose = random.Random(seed)
    array, version = flat(), 0
    pins: list[tuple[Buffer, int]] = []
    writing: Buffer | None = None
    for _ in range(200):
        move = choose.choice(["pin", "release", "spare", "publish", "discard", "forget"])
        if move == "pin":
            pins.append((array.pin(), version))
        elif move == "release" and pins:
            buffer, was = pins.pop(choose.randrange(len(pins)))
            assert buffer.array.tolist() == [was] * SIZE
            array.release(buffer)
        elif move == "spare" and writing is None and array.has_spare():
            writing = array.spare()
            assert writing is not array.current
            writing.array[:] = -1
        elif writing is not None and move in ("publish", "discard", "forget"):
            if move == "publish":
                version += 1
                writing.array[:] = version
                array.publish(writing)
            elif move == "discard":
                array.discard(writing)
            else:
                array.forget()
            writing = None
        read = {id(buffer): was for buffer, was in pins}
        assert array.nbytes <= (2 + len(read)) * BYTES
        assert array.nbytes <= (2 + MAX_PINNED) * BYTES
        assert array.current.array.tolist() == [version] * SIZE
        assert all(buffer.array.tolist() == [was] * SIZE for buffer, was in pins)


def test_a_pin_holds_the_values_of_all_groups_and_their_slots_if_asked() -> None:
    layout = plan([Variable("w", "float32", (3,)), Variable("x", "float64", (2,))])
    buffers = Buffers(allocate(layout, [0.5, 0.25]))
    assert buffers.nbytes == 3 * (3 * 4 + 2 * 8)
    values, everything = buffers.pin(slots=False), buffers.pin(slots=True)
    assert sorted(values.arrays) == [(0, 0), (1, 0)]
    assert sorted(everything.arrays) == [(g, s) for g in (0, 1) for s in (0, 1, 2)]
    assert {s: everything.arrays[1, s].tolist() for s in (0, 1, 2)} == {
        0: [0, 0],
        1: [0.5, 0.5],
        2: [0.25, 0.25],
    }
    assert everything.arrays[0, 1].dtype == np.float32
    for flat_array in (f for group in buffers.flat for f in group):
        publish(flat_array, 9)
    assert everything.arrays[0, 0].tolist() == [0, 0, 0]
    buffers.release(values)
    buffers.release(everything)
    assert buffers.nbytes == 2 * 3 * (3 * 4 + 2 * 8)
