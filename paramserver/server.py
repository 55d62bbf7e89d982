"""One parameter server: a `Host`, the two services, a port, and an orderly end.

`Server` is the one door for `python -m paramserver`, for tests and for notebooks alike.
"""

from __future__ import annotations

import errno
import secrets
import socket
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc

from paramserver import codec, transport
from paramserver.cluster import DEFAULT_PORT, Address
from paramserver.control_service import ControlService
from paramserver.errors import ConfigError
from paramserver.host import Host, HostSettings
from paramserver.service import ParameterService
from paramserver.streams import Streams

#: Threads beside those for waiting calls and streams: for calls that never wait.
RESERVE_THREADS = 16

#: How long calls in flight may take to end when the server stops, in seconds.
GRACE_S = 5.0


class Server:
    """A shard in this process, serving until `stop`. Use it as a context manager.

    It listens on `host`:`port` (0: any free port; `address` says which) from the constructor on,
    and holds nothing until a chief or a client initialises it. Thread-safe.

    Raises: ConfigError if the port is taken or the host is not ours."""

    def __init__(
        self,
        port: int = DEFAULT_PORT,
        host: str = "127.0.0.1",
        settings: HostSettings | None = None,
        *,
        keepalive_s: float = transport.KEEPALIVE_S,
        max_message_bytes: int = transport.MAX_MESSAGE_BYTES,
    ) -> None:
        settings = settings or HostSettings()
        chunk_bytes = codec.chunk_bytes(max_message_bytes)
        listening = Address.listening(host, port)
        # Streaming calls hold a thread each; the rest is for calls that never wait.
        threads = Streams.threads(settings.max_workers) + RESERVE_THREADS
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ps-call")
        self._server = grpc.server(
            self._pool,
            options=transport.server_options(
                keepalive_s=keepalive_s, max_message_bytes=max_message_bytes
            ),
            maximum_concurrent_rpcs=threads,
        )
        bound = _bind(self._server, listening)
        self._address = Address.listening(host, bound)
        self.host = Host(settings, secrets.randbits(64) or 1)
        #: The exception of the first defect of ours that a call ran into, if any.
        self.defect: BaseException | None = None
        self._server.add_generic_rpc_handlers(
            (
                transport.parameter_handlers(
                    ParameterService(self.host, self._on_defect, chunk_bytes)
                ),
                transport.control_handlers(ControlService(self.host, self._on_defect, chunk_bytes)),
            )
        )
        self._server.start()

    @property
    def address(self) -> str:
        """Where it listens, "127.0.0.1:1681"; [brackets] around an IPv6 address."""
        return str(self._address)

    def join(self, timeout: float | None = None) -> bool:
        """Blocks until the server is stopped or a client shut it down; False after `timeout`
        seconds."""
        return self.host.shutdown_now.wait(timeout)

    def stop(self, reason: str = "the parameter server is shutting down") -> None:
        """Answers waiting calls with UNAVAILABLE, lets the others end, and frees the port.
        Idempotent.

        Blocks for GRACE_S seconds at most."""
        self.host.close(reason)
        self._server.stop(GRACE_S).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.host.shutdown_now.set()

    def _on_defect(self, error: BaseException) -> None:
        if self.defect is None:
            self.defect = error
        self.host.shutdown_now.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()


def _bind(server: grpc.Server, address: Address) -> int:
    """Listens; the port. Raises: ConfigError that names port and host."""
    try:
        _check_free(address)
        return server.add_insecure_port(str(address))
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"cannot listen on {address}: the port is taken, or the host is not this machine's; "
            "give another --port or --host"
        ) from error


def _check_free(address: Address) -> None:
    """Refuses a name of which one address is taken: gRPC would listen on the others, and two
    servers would share it. Raises: OSError."""
    if not address.port:
        return
    for family, kind, protocol, _, where in socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM
    ):
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                # Not an address of this machine (no IPv6, say): gRPC does without it, too.
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
