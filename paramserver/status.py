"""Errors <-> gRPC statuses, both directions, each in one place.

The server raises, `rpc_errors` ends the call with the kind's status (always by `abort`, so that no
handler goes on after its error), and on the client `raise_for` raises the same kind again. The
status says what any client needs to know; the kind's name travels in the trailing metadata.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import grpc

from paramserver.errors import (
    AbortedError,
    AlreadyExistsError,
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ParamServerError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
)

_log = logging.getLogger(__name__)

#: Trailing metadata that names the kind: "SessionSupersededError".
KIND_KEY = "paramserver-error"

#: A message travels percent-encoded in a header; gRPC drops a call whose headers pass 8 KiB.
_MAX_MESSAGE_BYTES = 2000


def _kinds(root: type[ParamServerError]) -> Iterator[type[ParamServerError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


_KIND_BY_NAME = {kind.__name__: kind for kind in _kinds(ParamServerError)}

_KIND_BY_STATUS: dict[grpc.StatusCode, type[ParamServerError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
}


# -- server --------------------------------------------------------------------------------------


@contextmanager
def rpc_errors(
    context: grpc.ServicerContext, on_defect: Callable[[BaseException], None] | None = None
) -> Iterator[None]:
    """Ends the call with the status of whatever is raised inside.

    Anything but a `ParamServerError` is a defect of ours: its traceback is logged, `on_defect` is
    told, and the caller gets INTERNAL. Nothing inside may call `context.abort` itself."""
    try:
        yield
    except ParamServerError as error:
        _abort(context, error)
    except grpc.RpcError:
        # From the request iterator: the call has ended, and nobody is left to be answered.
        raise
    except MemoryError:
        _abort(context, ResourceExhaustedError("the parameter server is out of memory"))
    except Exception as error:
        _log.exception("defect peer=%s", context.peer())
        if on_defect:
            on_defect(error)
        _abort(context, ParamServerError(f"defect in the parameter server: {error!r}"))


def _abort(context: grpc.ServicerContext, error: ParamServerError) -> NoReturn:
    context.set_trailing_metadata(((KIND_KEY, type(error).__name__), *error.metadata))
    message = str(error).encode()
    if len(message) > _MAX_MESSAGE_BYTES:
        message = message[:_MAX_MESSAGE_BYTES] + b" ..."
    context.abort(grpc.StatusCode[error.code], message.decode(errors="ignore"))
    raise AssertionError("abort raises")


# -- client --------------------------------------------------------------------------------------


def raise_for(error: grpc.RpcError, peer: str) -> NoReturn:
    """Raises what the server raised, or what the failure of the call means, from `error`.

    `peer` names who was called, "ps:1 at 10.0.0.7:1682", and opens the messages that are about
    reaching it."""
    raise translated(error, peer) from error


@contextmanager
def call_errors(peer: str) -> Iterator[None]:
    """`raise_for` any `grpc.RpcError` inside: around a call, or around reading its stream."""
    try:
        yield
    except grpc.RpcError as error:
        raise_for(error, peer)
    except grpc.FutureCancelledError as error:
        raise UnavailableError(f"the call to {peer} was cancelled") from error


def translated(error: grpc.RpcError, peer: str) -> ParamServerError:
    """The error of ours that a gRPC error stands for; not raised yet."""
    details = _details(error)
    metadata = {str(key): value for key, value in _trailing(error)}
    kind = _KIND_BY_NAME.get(str(metadata.pop(KIND_KEY, "")))
    if kind:
        result = kind(f"{peer}: {details}" if issubclass(kind, UnavailableError) else details)
    else:
        result = _from_status(_status(error), details, peer, error)
    result.metadata = tuple((k, v) for k, v in metadata.items() if isinstance(v, str))
    return result


def _from_status(
    status: grpc.StatusCode, details: str, peer: str, error: grpc.RpcError
) -> ParamServerError:
    """What a status means that comes without a kind: from gRPC itself, or a foreign server."""
    match status:
        case grpc.StatusCode.UNAVAILABLE:
            verb = "cannot reach" if _CONNECTING.search(details) else "lost the connection to"
            return UnavailableError(f"{verb} {peer}: {reason(error)}")
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceededError(f"no answer from {peer} in time")
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "Concurrent RPC limit" in details:
            return ResourceExhaustedError(
                f"too many calls at once at {peer}; its --max-workers raises the limit"
            )
        case grpc.StatusCode.RESOURCE_EXHAUSTED if "larger than max" in details:
            # Not to be repeated: sending it again would not make it smaller.
            return InvalidArgumentError(f"a message to or from {peer} is over the limit: {details}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return ConfigError(f"{peer} is no parameter server of this version: {details}")
    kind = _KIND_BY_STATUS.get(status)
    return kind(details) if kind else ParamServerError(f"the call to {peer} failed: {details}")


_CONNECTING = re.compile(r"failed to connect|resol|lookup", re.IGNORECASE)

#: What gRPC says about an unreachable peer, and what that means. The first match counts.
_REASONS = (
    (r"(?:errors resolving|resolution failed for)\W*([^\s:]+)", "name resolution failed for '{}'"),
    (r"connection refused", "connection refused"),
    (r"WRONG_VERSION_NUMBER", "TLS handshake failed: the server does not speak TLS"),
    (r"CERTIFICATE_VERIFY_FAILED:? ?([\w ]*)", "TLS handshake failed: certificate refused ({})"),
    (r"handshake failed", "TLS handshake failed"),
    (r"http1\.x|SETTINGS frame as the first|Received http2 header", "no gRPC server listens there"),
    (r"failed to connect.*socket closed", "connection closed at once (does the server want TLS?)"),
    (r"cancelling all calls|GOAWAY", "it is shutting down"),
    (r"(no route to host|network is unreachable|host is down)", "{}"),
    (r"connection reset", "connection reset"),
    (r"keepalive|ping timeout", "it does not answer (keepalive)"),
    (r"timed out|timeout", "it does not answer"),
    (r"socket closed|broken pipe|EOF", "connection closed"),
)


def reason(error: BaseException | None) -> str:
    """Why a call failed, in a few words for a waiting line: "connection refused".

    Takes the gRPC error, or one of ours raised from it."""
    cause = error.__cause__ if isinstance(error, ParamServerError) else error
    if not isinstance(cause, grpc.RpcError):
        return str(error)
    details = _details(cause)
    if KIND_KEY in dict(_trailing(cause)):
        return details  # a server's own words
    if _status(cause) is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it does not answer"
    if _status(cause) is grpc.StatusCode.UNAVAILABLE:
        for pattern, meaning in _REASONS:
            if match := re.search(pattern, details, re.IGNORECASE | re.DOTALL):
                return meaning.format(*(group.strip().lower() for group in match.groups()))
    return details.rpartition("last error: ")[2] or str(_status(cause).name)


def _status(error: grpc.RpcError) -> grpc.StatusCode:
    status = (error.code() if isinstance(error, grpc.Call) else None) or grpc.StatusCode.UNKNOWN
    # A connection that breaks at an awkward moment is not always called by its name.
    broken = _BROKEN.get(status)
    return grpc.StatusCode.UNAVAILABLE if broken and broken in _details(error) else status


_BROKEN = {grpc.StatusCode.UNKNOWN: "Stream removed", grpc.StatusCode.INTERNAL: "RST_STREAM"}


def _details(error: grpc.RpcError) -> str:
    return (error.details() if isinstance(error, grpc.Call) else str(error)) or ""


def _trailing(error: grpc.RpcError) -> tuple[tuple[str, str | bytes], ...]:
    return tuple(error.trailing_metadata() or ()) if isinstance(error, grpc.Call) else ()
