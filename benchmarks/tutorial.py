"""A parameter server as tutorials write it, and a bare gRPC stream: what ours is compared with.

Unary calls, the array in a `bytes` field of a message, `tobytes` and `frombuffer`, the largest
message lifted, a lock. The messages are protobuf's own wrappers, so no stubs are needed. A variable
is known by its size.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue, Int64Value

from benchmarks import child

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
LEARNING_RATE = 0.5


class Server:
    """Both services in one process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[int, np.ndarray] = {}
        self._version = 0
        self._server = grpc.server(ThreadPoolExecutor(8), options=OPTIONS)
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Push": grpc.unary_unary_rpc_method_handler(
                self._push, BytesValue.FromString, Int64Value.SerializeToString
            ),
            "Pull": grpc.unary_unary_rpc_method_handler(
                self._pull, Int64Value.FromString, BytesValue.SerializeToString
            ),
            "Turn": grpc.stream_stream_rpc_method_handler(lambda requests, context: requests),
        }
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("Tutorial", methods),)
        )
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self._port}"

    def _value(self, nbytes: int) -> np.ndarray:
        return self._values.setdefault(nbytes, np.zeros(nbytes // 4, np.float32))

    def _push(self, request: BytesValue, context: grpc.ServicerContext) -> Int64Value:
        grad = np.frombuffer(request.value, np.float32)
        with self._lock:
            value = self._value(grad.nbytes)
            value -= LEARNING_RATE * grad
            self._version += 1
            return Int64Value(value=self._version)

    def _pull(self, request: Int64Value, context: grpc.ServicerContext) -> BytesValue:
        with self._lock:
            return BytesValue(value=self._value(request.value).tobytes())

    def close(self) -> None:
        """Stops serving."""
        self._server.stop(None).wait()


class Client:
    """Pushes and pulls one variable, of any size."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=OPTIONS)
        self._push = self._channel.unary_unary(
            "/Tutorial/Push", BytesValue.SerializeToString, Int64Value.FromString
        )
        self._pull = self._channel.unary_unary(
            "/Tutorial/Pull", Int64Value.SerializeToString, BytesValue.FromString
        )
        self._grads: dict[int, np.ndarray] = {}

    def push(self, nbytes: int, repeats: int) -> list[float]:
        """Seconds of pushes that are applied."""
        grad = self._grad(nbytes)
        return child.timed(lambda: self._push(BytesValue(value=grad.tobytes())), repeats)

    def pull(self, nbytes: int, repeats: int) -> list[float]:
        """Seconds of pulls, to an array that can be read."""
        return child.timed(lambda: self._pulled(nbytes), repeats)

    def pair(self, nbytes: int, repeats: int) -> list[float]:
        """Seconds of a push and the pull after it."""
        grad = self._grad(nbytes)

        def both() -> None:
            self._push(BytesValue(value=grad.tobytes()))
            self._pulled(nbytes)

        return child.timed(both, repeats)

    def _pulled(self, nbytes: int) -> np.ndarray:
        return np.frombuffer(self._pull(Int64Value(value=nbytes)).value, np.float32)

    def _grad(self, nbytes: int) -> np.ndarray:
        return self._grads.setdefault(nbytes, np.ones(nbytes // 4, np.float32))

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()


class Turns:
    """One small message at a time over one stream, there and back, as raw bytes."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call: grpc.StreamStreamMultiCallable[bytes, bytes]
        call = self._channel.stream_stream("/Tutorial/Turn")
        self._answers = call(iter(self._requests.get, None))

    def turn(self, repeats: int) -> list[float]:
        """Seconds of such turns."""

        def once() -> None:
            self._requests.put(b"a small message")
            next(self._answers)

        return child.timed(once, repeats)

    def close(self) -> None:
        """Ends stream and connection."""
        self._requests.put(None)
        self._channel.close()


if __name__ == "__main__":
    child.serve({"Server": Server, "Client": Client, "Turns": Turns})
