"""What this machine can do, with nothing of ours in the way: a raw socket, a copy, bare gRPC.

As a command: the far end of the raw socket. `Yardsticks` holds all that a run compares with, and
lives as long as the run; idle, it costs nothing.
"""

from __future__ import annotations

import socket
import time

import numpy as np

from benchmarks import child
from benchmarks.processes import Processes, Task
from benchmarks.scale import KIB, Scale

#: What a small raw turn sends; one byte comes back.
TURN_BYTES = 4 * KIB


class Sink:
    """Takes in what a raw socket brings, into one buffer, and acknowledges each piece."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = memoryview(bytearray(b"\1" * nbytes))  # written, so that its pages exist
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._peer: socket.socket | None = None

    def port(self) -> int:
        """Where to connect."""
        port: int = self._listener.getsockname()[1]
        return port

    def take(self, nbytes: int, count: int) -> None:
        """Takes `count` pieces of `nbytes`."""
        if self._peer is None:
            self._peer, _ = self._listener.accept()
            self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(count):
            got = 0
            while got < nbytes:
                got += self._peer.recv_into(self._buffer[got:nbytes])
            self._peer.sendall(b"!")


class Yardsticks:
    """Measured anew whenever something is to be compared with them. All answers are in seconds."""

    def __init__(self, scale: Scale, run: Processes) -> None:
        self._run = run
        self._scale = scale
        self._sink = run.task("yardsticks", "Sink", nbytes=scale.large).ready()
        self._socket = socket.create_connection(("127.0.0.1", self._sink.call("port")))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        source = np.random.default_rng(0).integers(0, 256, scale.large, np.uint8)
        self._source = memoryview(source.tobytes())
        self._tasks: dict[str, Task] = {}

    def raw(self, nbytes: int) -> list[float]:
        """Sending `nbytes` to another process that has a buffer ready, until its acknowledgement
        is here."""
        repeats, piece = self._scale.repeats(nbytes), self._source[:nbytes]

        def send() -> None:
            self._socket.sendall(piece)
            self._socket.recv(1)

        warm = 2
        self._sink.begin("take", nbytes=nbytes, count=warm + repeats)
        seconds = child.timed(send, repeats, warm=warm)
        self._sink.result()
        return seconds

    def turn(self) -> list[float]:
        """The same with 4 KiB: what a round trip costs."""
        return self.raw(TURN_BYTES)

    def memcpy(self, nbytes: int) -> list[float]:
        """Copying `nbytes` between two arrays that have been used before."""
        source, copy = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        return child.timed(lambda: np.copyto(copy, source), self._scale.repeats(nbytes))

    def stream_turn(self) -> list[float]:
        """One small message there and back on a gRPC stream that stays open; nothing else."""
        seconds: list[float] = self._client("Turns").call("turn", repeats=self._scale.most)
        return seconds

    def tutorial(self, call: str, nbytes: int) -> list[float]:
        """The service of a tutorial: `call` is "push", "pull" or "pair" (both)."""
        repeats = max(self._scale.fewest, self._scale.repeats(nbytes) // 4)
        client = self._client("Client")
        seconds: list[float] = client.call(call, nbytes=nbytes, repeats=repeats)
        return seconds

    def python(self) -> float:
        """Starting a Python that imports gRPC and NumPy, until it ends."""
        start = time.monotonic()
        self._run.python("-c", "import grpc, numpy").wait()
        return time.monotonic() - start

    def _client(self, kind: str) -> Task:
        """A process that speaks to the tutorial's server; the first one starts both."""
        if "Server" not in self._tasks:
            self._tasks["Server"] = self._run.task("tutorial", "Server").ready()
        if kind not in self._tasks:
            address = self._tasks["Server"].call("address")
            self._tasks[kind] = self._run.task("tutorial", kind, address=address).ready()
        return self._tasks[kind]

    def close(self) -> None:
        """Ends the raw connection; the processes are their owner's."""
        self._socket.close()


if __name__ == "__main__":
    child.serve({"Sink": Sink})
