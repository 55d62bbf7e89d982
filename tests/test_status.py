"""Errors over a real gRPC call: what the server raises is what the client catches."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import trustme

from paramserver import errors, status
from paramserver.errors import (
    AbortedError,
    ConfigError,
    DeadlineExceededError,
    InvalidArgumentError,
    ParamServerError,
    ResourceExhaustedError,
    UnavailableError,
)
from paramserver.status import call_errors, raise_for, reason, rpc_errors, translated
from paramserver.transport import make_channel, server_options

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ParamServerError)
]


class Service:
    """One unary call that raises `error`, or answers "well"."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.defects: list[BaseException] = []
        self.went_on = False
        self.got_one = threading.Event()
        self.ended = threading.Event()

    def call(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        with rpc_errors(context, self.defects.append):
            if self.error:
                raise self.error
        self.went_on = True
        return b"well"

    def count(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        try:
            with rpc_errors(context, self.defects.append):
                for _ in requests:
                    self.got_one.set()
                return b"well"
        finally:
            self.ended.set()

    def stream(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        with rpc_errors(context, self.defects.append):
            yield b"first"
            if self.error:
                raise self.error
            yield b"second"


@pytest.fixture
def service() -> Service:
    return Service()


@contextlib.contextmanager
def serving(
    service: Service, credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[grpc.Server, int]]:
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool, options=server_options())
        handlers = {
            "Call": grpc.unary_unary_rpc_method_handler(service.call),
            "Stream": grpc.unary_stream_rpc_method_handler(service.stream),
            "Count": grpc.stream_unary_rpc_method_handler(service.count),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", handlers),))
        if credentials:
            port = server.add_secure_port("localhost:0", credentials)
        else:
            port = server.add_insecure_port("localhost:0")
        server.start()
        try:
            yield server, port
        finally:
            server.stop(None).wait(10)


@pytest.fixture
def channel(service: Service) -> Iterator[grpc.Channel]:
    with serving(service) as (_, port), make_channel(f"localhost:{port}") as channel:
        yield channel


def call(channel: grpc.Channel, name: str = "Call", **kwargs: Any) -> bytes:
    with call_errors("ps at here:1"):
        answer: bytes = channel.unary_unary(f"/x/{name}")(b"", timeout=10, **kwargs)
    return answer


# -- from server to client -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_arrives_as_itself(
    kind: type[ParamServerError], service: Service, channel: grpc.Channel
) -> None:
    service.error = kind("gradient 'w1' is wrong: 1 ≠ 2")
    service.error.metadata = (("lease-left-ms", "1200"), ("other", "x"))
    with pytest.raises(ParamServerError) as raised:
        call(channel)
    assert type(raised.value) is kind
    prefix = "ps at here:1: " if kind is UnavailableError else ""
    assert str(raised.value) == f"{prefix}gradient 'w1' is wrong: 1 ≠ 2"
    assert raised.value.metadata == (("lease-left-ms", "1200"), ("other", "x"))
    cause = raised.value.__cause__
    assert isinstance(cause, grpc.RpcError)
    assert cause.code() is grpc.StatusCode[kind.code]
    assert not service.defects
    assert not service.went_on


def test_an_error_amid_a_stream_ends_it(service: Service, channel: grpc.Channel) -> None:
    service.error = AbortedError("pull again")
    received = []
    with pytest.raises(AbortedError, match="pull again"), call_errors("ps"):
        for message in channel.unary_stream("/x/Stream")(b"", timeout=10):
            received.append(message)
    assert received == [b"first"]


def test_a_defect_is_logged_told_and_internal(
    service: Service, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    service.error = ZeroDivisionError("division by zero")
    with caplog.at_level(logging.ERROR), pytest.raises(ParamServerError) as raised:
        call(channel)
    assert type(raised.value) is ParamServerError
    assert "defect in the parameter server: ZeroDivisionError" in str(raised.value)
    assert service.defects == [service.error]
    assert "Traceback" in caplog.text
    assert not service.went_on


def test_no_memory_is_no_defect(service: Service, channel: grpc.Channel) -> None:
    service.error = MemoryError()
    with pytest.raises(ResourceExhaustedError, match="out of memory"):
        call(channel)
    assert not service.defects


@contextlib.contextmanager
def counting(service: Service, channel: grpc.Channel) -> Iterator[grpc.Future[bytes]]:
    """A call whose first request has arrived, and whose second never comes."""
    done = threading.Event()

    def requests() -> Iterator[bytes]:
        yield b"one"
        done.wait(30)

    call = channel.stream_unary("/x/Count").future(requests(), timeout=30)
    try:
        assert service.got_one.wait(10)
        yield call
    finally:
        done.set()


def test_a_caller_that_goes_away_is_no_defect(
    service: Service, channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    with counting(service, channel) as call:
        call.cancel()
        assert service.ended.wait(10)
    assert not service.defects
    assert "defect" not in caplog.text


def test_a_long_message_arrives_shortened(service: Service, channel: grpc.Channel) -> None:
    service.error = InvalidArgumentError("é" * 50_000)
    with pytest.raises(InvalidArgumentError, match=r"^é{999,1000} \.\.\.$"):
        call(channel)


def test_a_kind_of_a_newer_server_is_known_by_its_status() -> None:
    error = Raised(
        grpc.StatusCode.ABORTED, "pull again", ((status.KIND_KEY, "NotInventedYetError"),)
    )
    assert type(translated(error, "ps")) is AbortedError


# -- what gRPC itself says -----------------------------------------------------------------------


class Raised(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """A failed call as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Any = ()) -> None:
        self._parts = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> Any:
        return self._parts[2]

    initial_metadata = is_active = time_remaining = cancel = add_callback = None  # type: ignore[assignment]


def test_a_refused_connection_names_the_address() -> None:
    with socket.socket() as taken:  # bound, not listening: nobody else gets it
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with (
            make_channel(f"127.0.0.1:{port}") as channel,
            pytest.raises(UnavailableError) as raised,
        ):
            try:
                channel.unary_unary("/x/Call")(b"", timeout=10)
            except grpc.RpcError as error:
                raise_for(error, f"ps at 127.0.0.1:{port}")
    assert str(raised.value) == f"cannot reach ps at 127.0.0.1:{port}: connection refused"
    assert reason(raised.value) == "connection refused"


def test_a_name_without_an_address_is_no_refusal() -> None:
    with (
        make_channel("no-such-host.invalid:1681") as channel,
        pytest.raises(
            UnavailableError,
            match=r"name resolution failed for 'no-such-host\.invalid'$",
        ),
    ):
        call(channel)


@contextlib.contextmanager
def listening(answer: bytes | None) -> Iterator[str]:
    """No gRPC server: answers with these bytes and hangs up. None: says nothing."""
    kept = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    if answer is None:
                        kept.append(connection)
                        continue
                    with connection:
                        connection.recv(100)
                        connection.sendall(answer)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def test_a_web_server_is_recognised() -> None:
    with (
        listening(b"HTTP/1.1 400 Bad Request\r\n\r\n") as target,
        make_channel(target) as channel,
        pytest.raises(UnavailableError, match=r"cannot reach .* no gRPC server listens there"),
    ):
        call(channel)


def test_a_server_that_says_nothing_does_not_answer() -> None:
    with listening(None) as target, make_channel(target) as channel:
        with (
            pytest.raises(DeadlineExceededError, match="no answer from ps at here:1 in time") as e,
            call_errors("ps at here:1"),
        ):
            channel.unary_unary("/x/Call")(b"", timeout=0.2)
        assert reason(e.value) == "it does not answer"


def test_tls_that_does_not_match_is_named(service: Service) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("localhost")
    server_side = grpc.ssl_server_credentials(
        [(own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes())]
    )
    client_side = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    options = [("grpc.enable_http_proxy", 0)]
    with serving(service, server_side) as (_, port):
        target = f"localhost:{port}"
        with grpc.secure_channel(target, client_side, options) as channel:
            assert call(channel) == b"well"
        with make_channel(target) as channel, pytest.raises(UnavailableError, match="want TLS"):
            call(channel)
        other = grpc.ssl_channel_credentials(trustme.CA().cert_pem.bytes())
        with (
            grpc.secure_channel(target, other, options) as channel,
            pytest.raises(UnavailableError, match="certificate refused"),
        ):
            call(channel)
    with (
        serving(service) as (_, port),
        grpc.secure_channel(f"localhost:{port}", client_side, options) as channel,
        pytest.raises(UnavailableError, match="the server does not speak TLS"),
    ):
        call(channel)


def test_a_foreign_grpc_server_is_recognised(channel: grpc.Channel) -> None:
    with pytest.raises(ConfigError, match="ps at here:1 is no parameter server of this version"):
        call(channel, "Other")


def test_a_server_that_stops_says_so(service: Service) -> None:
    with serving(service) as (server, port), make_channel(f"localhost:{port}") as channel:
        with counting(service, channel) as call:
            server.stop(0.1)
            with (
                pytest.raises(UnavailableError, match=r"lost .* here:1: it is shutting down"),
                call_errors("ps at here:1"),
            ):
                call.result(10)
        assert service.ended.wait(10)


@pytest.mark.parametrize(
    ("code", "details", "says"),
    [
        ("UNAVAILABLE", "Cancelling all calls", "lost the connection to ps: it is shutting down"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", "lost .* ps: connection reset"),
        ("UNAVAILABLE", "keepalive timeout", r"lost .* ps: it does not answer \(keepalive\)"),
        ("UNAVAILABLE", "Socket closed", "lost the connection to ps: connection closed"),
        ("UNAVAILABLE", "odd", "lost the connection to ps: odd"),
        ("UNAVAILABLE", "", "lost the connection to ps: UNAVAILABLE"),
        ("UNKNOWN", "Stream removed", "lost the connection to ps: Stream removed"),
        ("INTERNAL", "Received RST_STREAM with error code 2", "lost the connection to ps"),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.7:1: "
            "connect: No route to host (113)",
            "cannot reach ps: no route to host",
        ),
        (
            "UNAVAILABLE",
            "DNS resolution failed for nowhere:1681: C-ares status is not ARES_SUCCESS",
            "cannot reach ps: name resolution failed for 'nowhere'",
        ),
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: something new",
            "cannot reach ps: UNKNOWN: something new",
        ),
    ],
)
def test_what_a_broken_call_means(code: str, details: str, says: str) -> None:
    with pytest.raises(UnavailableError, match=says):
        raise_for(Raised(grpc.StatusCode[code], details), "ps")


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (
            "RESOURCE_EXHAUSTED",
            "SERVER: Received message larger than max (5 vs. 4)",
            InvalidArgumentError,
        ),
        ("RESOURCE_EXHAUSTED", "too many waiting calls", ResourceExhaustedError),
        ("INVALID_ARGUMENT", "no", InvalidArgumentError),
        ("CANCELLED", "Channel closed!", ParamServerError),
        ("UNKNOWN", "Exception calling application", ParamServerError),
        ("INTERNAL", "Exception serializing request!", ParamServerError),
        ("DATA_LOSS", "", ParamServerError),
    ],
)
def test_what_a_bare_status_means(code: str, details: str, kind: type[ParamServerError]) -> None:
    error = translated(Raised(grpc.StatusCode[code], details), "ps")
    assert type(error) is kind
    assert details in str(error)


def test_an_error_without_a_status() -> None:
    error = translated(grpc.RpcError("odd"), "ps")
    assert type(error) is ParamServerError
    assert str(error) == "the call to ps failed: odd"
