"""Reading ahead: everything in order, errors in their place, and the thread ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from paramserver.read_ahead import read_ahead

PATIENCE_S = 10.0


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "ps-read-ahead"]


def all_ended(threads: list[threading.Thread]) -> bool:
    for thread in threads:
        thread.join(PATIENCE_S)
    return not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_items_come_in_order(count: int, depth: int) -> None:
    assert list(read_ahead(iter(range(count)), depth)) == list(range(count))


def test_it_reads_while_its_user_works_but_no_further_than_depth() -> None:
    taken: list[int] = []
    arrived = threading.Semaphore(0)

    def source() -> Iterator[int]:
        for i in range(10):
            taken.append(i)
            arrived.release()
            yield i

    items = read_ahead(source(), 2)
    assert next(items) == 0
    for _ in range(4):  # 0 is with us, 1 and 2 wait, 3 is in the reader's hand
        assert arrived.acquire(timeout=PATIENCE_S)
    assert taken == [0, 1, 2, 3]
    assert not arrived.acquire(timeout=0.05)
    assert list(items) == list(range(1, 10))


def test_an_error_comes_after_the_items_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise KeyError("three")

    seen = []
    with pytest.raises(KeyError, match="three"):
        for item in read_ahead(source(), 2):
            seen.append(item)
    assert seen == [1, 2]


def test_a_user_who_stops_early_leaves_no_thread_behind() -> None:
    items = read_ahead(iter(range(1000)), 2)
    assert next(items) == 0
    threads = readers()
    assert threads
    items.close()
    assert all_ended(threads)


def test_the_thread_ends_with_the_source() -> None:
    assert sum(read_ahead(iter(range(100)), 3)) == 4950
    assert all_ended(readers())
