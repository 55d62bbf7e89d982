"""Fixtures: real servers on port 0, clients, clusters, processes; all of them ended afterwards.

Leases are short and everything that waits on them is scaled alike. Waiting is for conditions, with
deadlines (`wait_for`); there are no sleeps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, TypeVar

import pytest
from fault_proxy import FaultProxy
from processes import Processes

import paramserver as ps
from paramserver import transport
from paramserver.control_client import ControlClient
from paramserver.host import HostSettings
from paramserver.v1 import control_pb2

T = TypeVar("T")

#: How long any condition is waited for, in seconds, before a test gives up.
PATIENCE_S = 20.0


def wait_for(
    condition: Callable[[], T], what: str = "", seconds: float = PATIENCE_S, every: float = 0.005
) -> T:
    """Asks until the answer is true, and returns it. Raises: AssertionError after `seconds`."""
    pause = threading.Event()
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:g} s in vain for {what or condition}"
        pause.wait(every)
    return answer


class Cluster:
    """Servers of this process, one a shard, and clients of them."""

    def __init__(self, servers: Sequence[ps.Server], stack: ExitStack, max_message: int) -> None:
        self.servers = list(servers)
        self._options: dict[str, Any] = {"connect_timeout": 10.0, "max_message_bytes": max_message}
        self._stack = stack
        self._lookers: dict[int, transport.ControlStub] = {}

    @property
    def addresses(self) -> list[str]:
        """Of the shards, in order."""
        return [server.address for server in self.servers]

    def client(
        self, worker: str = "", *, at: Sequence[str] | str = (), **options: Any
    ) -> ps.Client:
        """A client of all shards (or of those `at`); it gives up after 10 s."""
        options = {**self._options, **options}
        return self._stack.enter_context(ps.Client(at or self.addresses, worker=worker, **options))

    def control(self, holder: str = "chief", **options: Any) -> ControlClient:
        """A control client of all shards."""
        options = {**self._options, **options}
        return self._stack.enter_context(ControlClient(self.addresses, holder, **options))

    def initialize(self, variables: Any, optimizer: Any = None, *args: Any, **options: Any) -> None:
        """Initialises the job through a client of its own. SGD(0.5) unless said otherwise."""
        with ps.Client(self.addresses, **self._options) as client:
            assert client.initialize(
                variables, optimizer or ps.optimizers.SGD(0.5), *args, **options
            )

    def status(self, shard: int = 0) -> control_pb2.StatusResponse:
        """What a shard says of itself."""
        if shard not in self._lookers:
            channel = transport.make_channel(self.addresses[shard])
            self._stack.callback(channel.close)
            self._lookers[shard] = transport.ControlStub(channel)
        return self._lookers[shard].Status(control_pb2.StatusRequest(), timeout=10)


MakeCluster = Callable[..., Cluster]
MakeProxy = Callable[[str], FaultProxy]
Background = Callable[..., Future[Any]]


@pytest.fixture
def background() -> Iterator[Background]:
    """Runs a call in a thread of its own: `future = background(client.pull)`."""
    with ThreadPoolExecutor(32) as pool:
        yield pool.submit


@pytest.fixture
def cluster(background: Background) -> Iterator[MakeCluster]:
    """Makes clusters: `cluster(2, lease=0.5)`. Clients are closed before their servers."""
    with ExitStack() as servers, ExitStack() as clients:

        def make(
            shards: int = 1,
            lease: float = 2.0,
            keepalive: float = 10.0,
            max_message: int = transport.MAX_MESSAGE_BYTES,
            **settings: Any,
        ) -> Cluster:
            host_settings = HostSettings(lease_s=lease, **settings)
            started = [
                servers.enter_context(
                    ps.Server(
                        port=0,
                        settings=host_settings,
                        keepalive_s=keepalive,
                        max_message_bytes=max_message,
                    )
                )
                for _ in range(shards)
            ]
            return Cluster(started, clients, max_message)

        yield make


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Starts processes, and ends what is left of them."""
    with Processes() as started:
        yield started


@pytest.fixture
def proxy() -> Iterator[MakeProxy]:
    """Makes fault proxies: `proxy(server.address)`."""
    with ExitStack() as stack:
        yield lambda upstream: stack.enter_context(FaultProxy(upstream))
