"""Our stubs and handlers against the generated ones, over real connections."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from paramserver import transport
from paramserver.codec import chunks, framed
from paramserver.errors import InvalidArgumentError, UnavailableError
from paramserver.framing import Frame, decode
from paramserver.layout import Range
from paramserver.status import call_errors, rpc_errors
from paramserver.transport import (
    ControlStub,
    ParameterStub,
    control_handlers,
    make_channel,
    parameter_handlers,
    server_options,
)
from paramserver.v1 import control_pb2, control_pb2_grpc, parameter_pb2, parameter_pb2_grpc
from paramserver.v1.control_pb2 import InitializeRequest, RestoreRequest, SnapshotResponse
from paramserver.v1.parameter_pb2 import (
    PullResponse,
    PushPullRequest,
    PushPullResponse,
    PushRequest,
)

ARRAY = np.arange(1000, dtype="<f4")


def made(cls: Any, chunk_bytes: int = 1600) -> Iterator[Frame[Any]]:
    """ARRAY in frames of a message class."""
    for chunk in chunks([(Range(0, 0, ARRAY.size), ARRAY)], chunk_bytes):
        yield framed(cls(), chunk)


def plain(cls: Any) -> Iterator[Any]:
    """The same as ordinary messages."""
    for frame in made(cls):
        frame.message.payload = b"".join(frame.payload)
        yield frame.message


class Framed:
    """Both services as a servicer of ours sees them; each stream in and out carries ARRAY."""

    def __init__(self) -> None:
        self.received: dict[str, bytes] = {}

    def _take(self, cls: Any, requests: Iterator[bytes]) -> None:
        frames = [decode(cls, data) for data in requests]
        assert [f.message.last for f in frames] == [False, False, True]
        self.received[cls.__name__] = b"".join(p for f in frames for p in f.payload)

    def Push(self, requests: Iterator[bytes], context: Any) -> Any:
        with rpc_errors(context):
            self._take(PushRequest, requests)
            return parameter_pb2.PushResponse(result={"version": 7})

    def Pull(self, request: Any, context: Any) -> Iterator[Frame[PullResponse]]:
        assert request.options.wait
        yield from made(PullResponse)

    def PushPull(self, requests: Iterator[bytes], context: Any) -> Iterator[Frame[Any]]:
        self._take(PushPullRequest, requests)
        yield from made(PushPullResponse)

    def Initialize(self, requests: Iterator[bytes], context: Any) -> Any:
        self._take(InitializeRequest, requests)
        return control_pb2.InitializeResponse(session=7)

    def Restore(self, requests: Iterator[bytes], context: Any) -> Any:
        self._take(RestoreRequest, requests)
        return control_pb2.RestoreResponse(session=7)

    def Snapshot(self, request: Any, context: Any) -> Iterator[Frame[SnapshotResponse]]:
        yield from made(SnapshotResponse)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """All other calls answer an empty message."""
        for module in (parameter_pb2, control_pb2):
            if answer := getattr(module, f"{name}Response", None):
                return lambda request, context: answer()
        raise AttributeError(name)


class Generated:
    """The same on the generated classes, as a foreign server would be."""

    def __init__(self) -> None:
        self.received: dict[str, bytes] = {}

    def _take(self, cls: Any, requests: Iterator[Any]) -> None:
        messages = list(requests)
        assert [m.last for m in messages] == [False, False, True]
        self.received[cls.__name__] = b"".join(m.payload for m in messages)

    def Push(self, requests: Iterator[PushRequest], context: Any) -> Any:
        self._take(PushRequest, requests)
        return parameter_pb2.PushResponse(result={"version": 7})

    def Pull(self, request: Any, context: Any) -> Iterator[PullResponse]:
        yield from plain(PullResponse)

    def PushPull(self, requests: Iterator[PushPullRequest], context: Any) -> Iterator[Any]:
        self._take(PushPullRequest, requests)
        yield from plain(PushPullResponse)

    def Initialize(self, requests: Iterator[Any], context: Any) -> Any:
        self._take(InitializeRequest, requests)
        return control_pb2.InitializeResponse(session=7)

    def Restore(self, requests: Iterator[Any], context: Any) -> Any:
        self._take(RestoreRequest, requests)
        return control_pb2.RestoreResponse(session=7)

    def Snapshot(self, request: Any, context: Any) -> Iterator[Any]:
        yield from plain(SnapshotResponse)

    __getattr__ = Framed.__getattr__


@contextlib.contextmanager
def serving(add: Callable[[grpc.Server], None], port: int = 0, **options: Any) -> Iterator[int]:
    with ThreadPoolExecutor(8) as pool:
        server = grpc.server(pool, options=server_options(**options))
        add(server)
        bound = server.add_insecure_port(f"127.0.0.1:{port}")
        server.start()
        try:
            yield bound
        finally:
            server.stop(None).wait(10)


def ours(servicer: Framed) -> Callable[[grpc.Server], None]:
    return lambda server: server.add_generic_rpc_handlers(
        (parameter_handlers(servicer), control_handlers(servicer))
    )


def foreign(servicer: Generated) -> Callable[[grpc.Server], None]:
    def add(server: grpc.Server) -> None:
        parameter_pb2_grpc.add_ParameterServiceServicer_to_server(servicer, server)
        control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)

    return add


# -- on the wire ---------------------------------------------------------------------------------

WHOLE = ARRAY.tobytes()
PULL = parameter_pb2.PullRequest(options={"wait": True})


@pytest.mark.parametrize("kind", [Framed, Generated])
def test_our_stubs_speak_to_any_server(kind: type[Framed] | type[Generated]) -> None:
    servicer: Any = kind()
    add = ours(servicer) if kind is Framed else foreign(servicer)
    with serving(add) as port, make_channel(f"127.0.0.1:{port}") as channel:
        worker, chief = ParameterStub(channel), ControlStub(channel)
        assert worker.Push(made(PushRequest), timeout=10).result.version == 7
        assert chief.Initialize(made(InitializeRequest), timeout=10).session == 7
        assert chief.Restore(made(RestoreRequest), timeout=10).session == 7
        streams: list[tuple[Any, Any]] = [
            (PullResponse, worker.Pull(PULL, timeout=10)),
            (PushPullResponse, worker.PushPull(made(PushPullRequest), timeout=10)),
            (SnapshotResponse, chief.Snapshot(control_pb2.SnapshotRequest(), timeout=10)),
        ]
        for cls, stream in streams:
            frames = [decode(cls, data) for data in stream]
            assert b"".join(p for f in frames for p in f.payload) == WHOLE
            assert [f.message.ranges[0].offset for f in frames] == [0, 400, 800]
        for stub, names in (
            (worker, "Join Heartbeat Leave"),
            (chief, "Claim Hold Cut Status Configure Shutdown"),
        ):
            module = parameter_pb2 if stub is worker else control_pb2
            for name in names.split():
                request = getattr(module, f"{name}Request")()
                answer = getattr(stub, name)(request, timeout=10)
                assert type(answer).__name__ == f"{name}Response"
    assert servicer.received == dict.fromkeys(
        ["PushRequest", "PushPullRequest", "InitializeRequest", "RestoreRequest"], WHOLE
    )


def test_the_generated_stubs_speak_to_our_server() -> None:
    servicer = Framed()
    with serving(ours(servicer)) as port, make_channel(f"127.0.0.1:{port}") as channel:
        worker = parameter_pb2_grpc.ParameterServiceStub(channel)
        chief = control_pb2_grpc.ControlServiceStub(channel)
        assert worker.Push(plain(PushRequest), timeout=10).result.version == 7
        assert chief.Initialize(plain(InitializeRequest), timeout=10).session == 7
        assert chief.Restore(plain(RestoreRequest), timeout=10).session == 7
        streams: list[Any] = [
            worker.Pull(PULL, timeout=10),
            worker.PushPull(plain(PushPullRequest), timeout=10),
            chief.Snapshot(control_pb2.SnapshotRequest(), timeout=10),
        ]
        for stream in streams:
            assert b"".join(m.payload for m in stream) == WHOLE
        chief.Status(control_pb2.StatusRequest(), timeout=10)
    assert set(servicer.received.values()) == {WHOLE}


def test_bytes_that_are_no_message_are_an_invalid_argument() -> None:
    """Never INTERNAL, which would be a defect of ours."""
    with serving(ours(Framed())) as port, make_channel(f"127.0.0.1:{port}") as channel:
        push = channel.stream_unary("/paramserver.v1.ParameterService/Push")
        with pytest.raises(InvalidArgumentError, match="no valid PushRequest"), call_errors("ps"):
            push(iter([b"\x7a\xff"]), timeout=10)


def test_every_method_of_the_contract_is_in_a_stub() -> None:
    for service, stub in (
        (transport.PARAMETER_SERVICE, ParameterStub),
        (transport.CONTROL_SERVICE, ControlStub),
    ):
        assert {m.name for m in service.methods} == set(stub.__annotations__)


def test_a_servicer_that_lacks_a_method_is_refused() -> None:
    with pytest.raises(AttributeError, match="Push"):
        parameter_handlers(object())


# -- connections ---------------------------------------------------------------------------------


def status(channel: grpc.Channel, timeout: float = 10) -> None:
    with call_errors("ps"):
        ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=timeout)


def test_the_message_limit_is_ours_and_named() -> None:
    with (
        serving(ours(Framed()), max_message_bytes=3000) as port,
        make_channel(f"127.0.0.1:{port}") as channel,
        pytest.raises(InvalidArgumentError, match=r"over the limit: .* larger than max .* 3000"),
        call_errors("ps"),
    ):
        ParameterStub(channel).Push(made(PushRequest, 8000), timeout=10)
    with serving(ours(Framed())) as port, make_channel(f"127.0.0.1:{port}") as channel:
        push = channel.stream_unary("/paramserver.v1.ParameterService/Push")
        with pytest.raises(InvalidArgumentError, match="no valid"), call_errors("ps"):
            push(iter([b"\xff" * (8 << 20)]), timeout=10)  # gRPC's own limit would be 4 MiB


def test_two_servers_never_share_a_port() -> None:
    with (
        serving(ours(Framed())) as port,
        pytest.raises(RuntimeError, match="Failed to bind"),
        serving(ours(Framed()), port),
    ):
        pass


def test_a_restarted_server_is_found_again() -> None:
    with serving(ours(Framed())) as port, make_channel(f"127.0.0.1:{port}") as channel:
        status(channel)
    with make_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(UnavailableError):
            status(channel)
        with serving(ours(Framed()), port), call_errors("ps"):
            ControlStub(channel).Status(
                control_pb2.StatusRequest(), timeout=10, wait_for_ready=True
            )


def test_a_proxy_from_the_environment_is_not_asked() -> None:
    program = (
        "import sys; from paramserver.transport import ControlStub, make_channel\n"
        "from paramserver.v1.control_pb2 import StatusRequest\n"
        "ControlStub(make_channel(sys.argv[1])).Status(StatusRequest(), timeout=10)"
    )
    proxy = {"http_proxy": "http://127.0.0.1:1", "grpc_proxy": "http://127.0.0.1:1"}
    with serving(ours(Framed())) as port:
        subprocess.run(
            [sys.executable, "-c", program, f"127.0.0.1:{port}"],
            env={**os.environ, **proxy, "no_proxy": ""},
            check=True,
            timeout=60,
        )


@contextlib.contextmanager
def cable(port: int) -> Iterator[tuple[int, threading.Event]]:
    """A connection to `port` that stays up and carries nothing any more once the event is set."""
    cut, done = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", port)) as far:
                while not done.is_set():
                    for ready in select.select([near, far], [], [], 0.02)[0]:
                        if cut.is_set():
                            done.wait(30)
                        elif data := ready.recv(65536):
                            (far if ready is near else near).sendall(data)
                        else:
                            return

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield listener.getsockname()[1], cut
        finally:
            done.set()
            thread.join()


def test_a_silent_network_is_noticed() -> None:
    """Neither side hears anything: the call ends on the client, and on the server."""
    begun, ended = threading.Event(), threading.Event()
    servicer = Framed()

    def push(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        context.add_callback(ended.set)
        for _ in requests:
            begun.set()
        return parameter_pb2.PushResponse()

    servicer.Push = push  # type: ignore[method-assign]
    sent, done = threading.Event(), threading.Event()

    def requests() -> Iterator[Frame[PushRequest]]:
        yield next(made(PushRequest))
        sent.set()
        done.wait(30)

    with (
        serving(ours(servicer), keepalive_s=0.3) as port,
        cable(port) as (near, cut),
        make_channel(f"127.0.0.1:{near}", keepalive_s=0.3) as channel,
    ):
        call = ParameterStub(channel).Push.future(requests(), timeout=30)
        assert sent.wait(10) and begun.wait(10)
        cut.set()
        with pytest.raises(UnavailableError, match="does not answer"), call_errors("ps"):
            call.result(20)
        assert ended.wait(20)
        done.set()
