"""Reading a stream while what was read is worked on: the network and the arithmetic side by side.

gRPC starts to receive a message only when it is asked for one, so a handler that applies each piece
of a gradient before it asks for the next would leave the network idle meanwhile, and the reverse.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")


def read_ahead(source: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The items of `source`, of which a thread of its own reads up to `depth` in advance.

    What `source` raises comes through, in its place. When the reader stops early, the thread ends
    with its next item; so `source` must end by itself, as the requests of an ended call do."""
    changed = threading.Condition()
    items: deque[T] = deque()
    stop = False
    ended: list[BaseException | None] = []

    def read() -> None:
        error: BaseException | None = None
        try:
            for item in source:
                with changed:
                    changed.wait_for(lambda: len(items) < depth or stop)
                    if stop:
                        return
                    items.append(item)
                    changed.notify_all()
                del item  # not kept alive while the next one is awaited
        except BaseException as raised:
            error = raised
        finally:
            with changed:
                ended.append(error)
                changed.notify_all()

    threading.Thread(target=read, name="ps-read-ahead", daemon=True).start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: items or ended)
                if not items:
                    break
                item = items.popleft()
                changed.notify_all()
            yield item
            del item
        if ended[0] is not None:
            raise ended[0]
    finally:
        with changed:
            stop = True
            items.clear()
            changed.notify_all()
