"""A TCP proxy that does to a connection what networks do: cut, delay, swallow, reset.

It stands between a client and one server, copies bytes both ways, and obeys at once. Directions are
"up" (client to server) and "down".
"""

from __future__ import annotations

import contextlib
import math
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

Direction = Literal["up", "down"]

#: Closing with this sends a reset instead of an orderly end.
_NO_LINGER = struct.pack("ii", 1, 0)

_READ_BYTES = 1 << 16

#: What is held for a side that takes no more; then nothing more is read for it.
_QUEUED_BYTES = 1 << 20


@dataclass(eq=False)
class _End:
    """One socket, and what waits to be written to it: (not before, bytes)."""

    socket: socket.socket
    towards: Direction
    queue: deque[tuple[float, bytes]] = field(default_factory=deque)
    other: _End | None = None
    ended: bool = False
    events: int = 0

    @property
    def due(self) -> bool:
        """Whether it has something to write now."""
        return bool(self.queue) and self.queue[0][0] <= time.monotonic()


class FaultProxy:
    """Forwards connections to `upstream` ("host:port") until told otherwise. A context manager.

    One thread does the copying. All methods are thread-safe; a fault concerns all connections,
    those to come as well, until `heal`."""

    def __init__(self, upstream: str) -> None:
        host, _, port = upstream.rpartition(":")
        self._upstream = host, int(port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._budget: dict[Direction, float] = {"up": math.inf, "down": math.inf}
        self._swallow: set[Direction] = set()
        self._delay_s = 0.0
        self._refuse = False
        self._reset = False
        self._cut = False
        self._closing = False
        #: Bytes forwarded in each direction, and connections taken, since the start.
        self.forwarded: dict[Direction, int] = {"up": 0, "down": 0}
        self.connections = 0
        #: How often a connection was cut because its bytes were used up.
        self.cuts = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._ends: set[_End] = set()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    # -- faults --------------------------------------------------------------------------------

    def cut_after(self, nbytes: int, direction: Direction = "up") -> None:
        """Lets so many more bytes through, then resets all connections, once."""
        with self._lock:
            self._budget[direction] = nbytes

    def blackhole(self, *directions: Direction) -> None:
        """Takes bytes and forwards none (no direction: neither way); connections stay open."""
        with self._lock:
            self._swallow = set(directions or ("up", "down"))
        self._wake()

    def delay(self, seconds: float) -> None:
        """Forwards everything so much later."""
        with self._lock:
            self._delay_s = seconds

    def refuse(self) -> None:
        """Resets all connections, and every new one at once: the server is away."""
        with self._lock:
            self._refuse = self._reset = True
        self._wake()

    def reset(self) -> None:
        """Resets the connections there are; new ones are served."""
        with self._lock:
            self._reset = True
        self._wake()

    def heal(self) -> None:
        """Passes everything through again. What was swallowed is lost: its connections are
        reset."""
        with self._lock:
            self._reset = self._reset or bool(self._swallow)
            self._budget = {"up": math.inf, "down": math.inf}
            self._swallow, self._delay_s, self._refuse = set(), 0.0, False
        self._wake()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends all connections and the thread. Idempotent."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- the thread ----------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_in.send(b".")

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._drop_all()
            for sock in (self._listener, self._wake_out, self._wake_in):
                sock.close()
            self._selector.close()

    def _turn(self) -> bool:
        """Moves what can be moved. False: it is time to end."""
        with self._lock:
            for end in self._ends:
                self._watch(end)
            later = [e.queue[0][0] for e in self._ends if e.queue and not e.due]
        events = self._selector.select(max(0.0, min(later) - time.monotonic()) if later else None)
        with self._lock:
            if self._reset:
                # Before anything else moves: what was swallowed so far stays lost.
                self._reset = False
                self._drop_all()
            for key, ready in events:
                if key.fileobj is self._wake_out:
                    self._wake_out.recv(4096)
                elif key.fileobj is self._listener:
                    self._accept()
                elif ready & selectors.EVENT_READ and key.data in self._ends:
                    self._read(key.data)
            for end in list(self._ends):
                if end in self._ends:
                    self._write(end)
            if self._cut:
                self.cuts += 1
                self._budget = {"up": math.inf, "down": math.inf}
                self._cut = False
                self._drop_all()
            return not self._closing

    def _watch(self, end: _End) -> None:
        """Asks the selector for what this end can do now."""
        assert end.other is not None
        room = sum(len(data) for _, data in end.other.queue) < _QUEUED_BYTES
        events = selectors.EVENT_READ * (room and not end.ended) | selectors.EVENT_WRITE * end.due
        if events and end.events:
            self._selector.modify(end.socket, events, end)
        elif events:
            self._selector.register(end.socket, events, end)
        elif end.events:
            self._selector.unregister(end.socket)
        end.events = events

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.connections += 1
        if self._refuse:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            client.close()
            return
        try:
            server = socket.create_connection(self._upstream, 5)
        except OSError:
            client.close()
            return
        near, far = _End(client, "down"), _End(server, "up")
        near.other, far.other = far, near
        for end in (near, far):
            end.socket.setblocking(False)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.add(end)

    def _read(self, end: _End) -> None:
        assert end.other is not None
        try:
            data = end.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._drop(end)
            return
        end.ended = not data
        if data and end.other.towards not in self._swallow:
            end.other.queue.append((time.monotonic() + self._delay_s, data))

    def _write(self, end: _End) -> None:
        assert end.other is not None
        while end.due and not self._cut:
            at, data = end.queue.popleft()
            allowed = data[: int(min(self._budget[end.towards], len(data)))]
            # Counted before it can arrive: whoever has it may look at the count at once.
            self.forwarded[end.towards] += len(allowed)
            try:
                sent = end.socket.send(allowed) if allowed else 0
            except BlockingIOError:
                self.forwarded[end.towards] -= len(allowed)
                end.queue.appendleft((at, data))
                return
            except OSError:
                self._drop(end)
                return
            self.forwarded[end.towards] -= len(allowed) - sent
            self._budget[end.towards] -= sent
            self._cut = self._budget[end.towards] <= 0
            if sent < len(data):
                end.queue.appendleft((at, data[sent:]))
        if not end.queue and end.other.ended:
            self._drop(end)

    def _drop_all(self) -> None:
        for end in list(self._ends):
            self._drop(end)

    def _drop(self, end: _End) -> None:
        """Resets both sides of a connection."""
        for one in (end, end.other):
            if one in self._ends:
                self._ends.discard(one)
                if one.events:
                    self._selector.unregister(one.socket)
                with contextlib.suppress(OSError):
                    one.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                one.socket.close()
