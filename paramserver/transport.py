"""Channels, stubs and handlers: gRPC as both sides use it. Knows no layout and no shard.

Between the second and the third stop in the walk of one Push. Streamed messages leave through
`framing.encode` and arrive as raw bytes, to be decoded by whoever handles the call (see `framing`);
all others are ordinary protobuf. Nothing of this shows on the wire: the generated stubs speak to
our server, and our stubs to a server built on the generated classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from paramserver import framing
from paramserver.errors import InvalidArgumentError
from paramserver.framing import Frame
from paramserver.status import rpc_errors
from paramserver.v1 import control_pb2 as control
from paramserver.v1 import parameter_pb2 as parameter

Options = list[tuple[str, int]]

PARAMETER_SERVICE: ServiceDescriptor = parameter.DESCRIPTOR.services_by_name["ParameterService"]
CONTROL_SERVICE: ServiceDescriptor = control.DESCRIPTOR.services_by_name["ControlService"]

#: Our messages have about 2 MiB; a hand-written client may send a whole array as one.
MAX_MESSAGE_BYTES = 64 << 20

#: A peer that answers no ping is given up after twice this time. The operating system alone would
#: take a quarter of an hour to notice a vanished machine.
KEEPALIVE_S = 10.0

#: Reconnecting: soon after a restart, and never so rarely that a worker seems to hang.
FIRST_RECONNECT_MS = 100
MAX_RECONNECT_MS = 2_000

#: How long one attempt to connect may take (gRPC calls it the minimal back-off).
CONNECT_ATTEMPT_MS = 5_000


# -- channels ------------------------------------------------------------------------------------


def channel_options(
    *, keepalive_s: float = KEEPALIVE_S, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Options:
    """How a client's connection behaves.

    Frame size, look-ahead and socket reads keep gRPC's defaults: with 2 MiB messages on loopback
    neither 1 MiB frames, 8 MiB of look-ahead nor 1 MiB reads made a difference beyond the noise."""
    return [
        *_common_options(keepalive_s, max_message_bytes),
        # A proxy from the environment would take localhost away.
        ("grpc.enable_http_proxy", 0),
        # A retry is decided in `retry` alone; gRPC would also keep a copy of what it sent.
        ("grpc.enable_retries", 0),
        # Each channel has its own connection, and its own back-off: two clients in one process do
        # not share the fate of one.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", CONNECT_ATTEMPT_MS),
    ]


def server_options(
    *, keepalive_s: float = KEEPALIVE_S, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> Options:
    """How a server's connections behave."""
    return [
        *_common_options(keepalive_s, max_message_bytes),
        # Else a second server on the same port would silently take half of the calls.
        ("grpc.so_reuseport", 0),
        # Clients ping as often as they like, also between calls; none is cut off for it.
        ("grpc.http2.min_ping_interval_without_data_ms", int(keepalive_s * 500)),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _common_options(keepalive_s: float, max_message_bytes: int) -> Options:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", int(keepalive_s * 1000)),
        # The timeout that gRPC in fact obeys, and the one that its manual names.
        ("grpc.http2.ping_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(keepalive_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def make_channel(
    target: str, *, keepalive_s: float = KEEPALIVE_S, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> grpc.Channel:
    """A channel to "host:port" or "[::1]:port". Connects at the first call. Thread-safe."""
    options = channel_options(keepalive_s=keepalive_s, max_message_bytes=max_message_bytes)
    return grpc.insecure_channel(target, options)


# -- stubs ---------------------------------------------------------------------------------------


class ParameterStub:
    """What a worker calls. Frames go out, raw bytes come in: `framing.decode` them."""

    Push: grpc.StreamUnaryMultiCallable[Frame[parameter.PushRequest], parameter.PushResponse]
    Pull: grpc.UnaryStreamMultiCallable[parameter.PullRequest, bytes]
    PushPull: grpc.StreamStreamMultiCallable[Frame[parameter.PushPullRequest], bytes]
    Join: grpc.UnaryUnaryMultiCallable[parameter.JoinRequest, parameter.JoinResponse]
    Heartbeat: grpc.UnaryUnaryMultiCallable[parameter.HeartbeatRequest, parameter.HeartbeatResponse]
    Leave: grpc.UnaryUnaryMultiCallable[parameter.LeaveRequest, parameter.LeaveResponse]

    def __init__(self, channel: grpc.Channel) -> None:
        _add_calls(self, channel, PARAMETER_SERVICE)


class ControlStub:
    """What the chief calls. Frames go out, raw bytes come in: `framing.decode` them."""

    Claim: grpc.UnaryUnaryMultiCallable[control.ClaimRequest, control.ClaimResponse]
    Initialize: grpc.StreamUnaryMultiCallable[
        Frame[control.InitializeRequest], control.InitializeResponse
    ]
    Restore: grpc.StreamUnaryMultiCallable[Frame[control.RestoreRequest], control.RestoreResponse]
    Hold: grpc.UnaryUnaryMultiCallable[control.HoldRequest, control.HoldResponse]
    Cut: grpc.UnaryUnaryMultiCallable[control.CutRequest, control.CutResponse]
    Snapshot: grpc.UnaryStreamMultiCallable[control.SnapshotRequest, bytes]
    Status: grpc.UnaryUnaryMultiCallable[control.StatusRequest, control.StatusResponse]
    Configure: grpc.UnaryUnaryMultiCallable[control.ConfigureRequest, control.ConfigureResponse]
    Shutdown: grpc.UnaryUnaryMultiCallable[control.ShutdownRequest, control.ShutdownResponse]

    def __init__(self, channel: grpc.Channel) -> None:
        _add_calls(self, channel, CONTROL_SERVICE)


def _add_calls(stub: object, channel: grpc.Channel, service: ServiceDescriptor) -> None:
    for method in service.methods:
        connect = getattr(channel, _shape(method))
        call = connect(
            f"/{service.full_name}/{method.name}",
            request_serializer=_serializer(method.input_type),
            response_deserializer=_deserializer(method.output_type),
        )
        setattr(stub, method.name, call)


# -- handlers ------------------------------------------------------------------------------------


def parameter_handlers(servicer: object) -> grpc.GenericRpcHandler:
    """Offers the servicer's methods as ParameterService, for `Server.add_generic_rpc_handlers`.

        Push(requests: Iterator[bytes], context) -> PushResponse
        Pull(request: PullRequest, context) -> Iterator[Frame[PullResponse]]
        PushPull(requests: Iterator[bytes], context) -> Iterator[Frame[PushPullResponse]]
        Join, Heartbeat, Leave(request, context) -> response

    The bytes are for `framing.decode`. Raises: AttributeError if a method is missing."""
    return _handlers(servicer, PARAMETER_SERVICE)


def control_handlers(servicer: object) -> grpc.GenericRpcHandler:
    """Offers the servicer's methods as ControlService, for `Server.add_generic_rpc_handlers`.

        Initialize, Restore(requests: Iterator[bytes], context) -> response
        Snapshot(request, context) -> Iterator[Frame[SnapshotResponse]]
        Claim, Hold, Cut, Status, Configure, Shutdown(request, context) -> response

    The bytes are for `framing.decode`. Raises: AttributeError if a method is missing."""
    return _handlers(servicer, CONTROL_SERVICE)


def _handlers(servicer: object, service: ServiceDescriptor) -> grpc.GenericRpcHandler:
    handlers = {}
    for method in service.methods:
        handler = getattr(grpc, f"{_shape(method)}_rpc_method_handler")
        behave = getattr(servicer, method.name)
        handlers[method.name] = handler(
            behave if _framed(method.input_type) else _decoding(behave, method.input_type),
            response_serializer=_serializer(method.output_type),
        )
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _decoding(behave: Callable[..., Any], message: Descriptor) -> Callable[..., Any]:
    """Hands a decoded request on. gRPC's own deserializer could only fail as INTERNAL."""
    from_bytes = GetMessageClass(message).FromString

    def decode_and_behave(data: bytes, context: grpc.ServicerContext) -> Any:
        with rpc_errors(context):
            try:
                request = from_bytes(data)
            except DecodeError:
                raise InvalidArgumentError(
                    f"{len(data)} bytes are no valid {message.name} message"
                ) from None
        return behave(request, context)

    return decode_and_behave


def _shape(method: MethodDescriptor) -> str:
    names = {False: "unary", True: "stream"}
    return f"{names[method.client_streaming]}_{names[method.server_streaming]}"


def _serializer(message: Descriptor) -> Callable[[Any], bytes]:
    return framing.encode if _framed(message) else GetMessageClass(message).SerializeToString


def _deserializer(message: Descriptor) -> Callable[[bytes], Any] | None:
    return None if _framed(message) else GetMessageClass(message).FromString


def _framed(message: Descriptor) -> bool:
    return "payload" in message.fields_by_name
