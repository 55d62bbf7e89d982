"""What strangers can do to a parameter server with the bytes they send: nothing but be refused."""

from __future__ import annotations

import os
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import MakeCluster
from processes import Process, Processes

import paramserver as ps
from paramserver import transport
from paramserver.v1 import control_pb2, job_pb2, parameter_pb2, tensor_pb2

FLOAT32 = tensor_pb2.D_TYPE_FLOAT32
METHODS = [
    f"/{service.full_name}/{method.name}"
    for service in (transport.PARAMETER_SERVICE, transport.CONTROL_SERVICE)
    for method in service.methods
]


class Owned:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.path}",)


def test_a_pickle_is_only_bytes(cluster: MakeCluster, tmp_path: Path) -> None:
    owned = tmp_path / "owned"
    evil = pickle.dumps(Owned(owned))
    evil += bytes(-len(evil) % 4)
    values = np.nan_to_num(np.frombuffer(evil, "<f4"))
    job = cluster()
    client = job.client("worker:0")
    client.initialize(
        {"w": np.zeros(len(evil) // 4, np.float32)},
        ps.optimizers.SGD(1.0),
        settings={"model": evil.decode("latin-1"), "data": f"__import__('os').system('{owned}')"},
    )
    assert client.job().settings["model"] == evil.decode("latin-1")
    client.push_pull({"w": values})
    channel = grpc.insecure_channel(job.addresses[0])
    with closing(channel):
        for method in METHODS:
            send(channel, method, evil)
            send(channel, method, parameter_pb2.PushRequest(payload=evil).SerializeToString())
        tensor = tensor_pb2.Tensor(name="w", dtype=FLOAT32, shape=[len(evil) // 4], data=evil)
        push = parameter_pb2.PushRequest(tensors=[tensor], last=True)
        send(channel, METHODS[0], push.SerializeToString())
        kind = tensor_pb2.Optimizer(kind=evil.decode("latin-1"))
        state = control_pb2.ShardState(session=1, shard_count=1, job=job_pb2.Job(optimizer=kind))
        load = control_pb2.InitializeRequest(chief=CHIEF, state=state, last=True)
        send(channel, "/paramserver.v1.ControlService/Restore", load.SerializeToString())
    assert not owned.exists()
    pickle.loads(evil)
    assert owned.exists(), "the trap itself works"


# -- hostile bytes ---------------------------------------------------------------------------------

CHIEF = control_pb2.Chief(holder="chief:0", incarnation=1)

#: What a caller may be told about bytes that are no request, or not a sensible one.
TYPED = {
    "OK", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "ALREADY_EXISTS", "ABORTED",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
}  # fmt: skip


def send(channel: grpc.Channel, method: str, *messages: bytes, timeout: float = 5.0) -> str:
    """Sends messages to a method as they are; the name of the status it ends with."""
    connect: Any = channel.stream_stream(method)
    call = connect(iter(messages), timeout=timeout)
    try:
        list(call)
    except grpc.RpcError as error:
        assert isinstance(error, grpc.Call)
        status = error.code().name
        assert status in TYPED, f"{method}: {status}: {error.details()}"
        assert "Traceback" not in (error.details() or "")
        return status
    return "OK"


def samples() -> list[bytes]:
    """A valid message of each kind that says little, to be damaged."""
    caller = parameter_pb2.Caller(session=1, worker="worker:0", incarnation=5)
    piece = tensor_pb2.Range(group=0, offset=0, count=2)
    tensor = tensor_pb2.Tensor(name="w", dtype=FLOAT32, shape=[2], data=bytes(8))
    header = parameter_pb2.PushHeader(caller=caller, sequence=1)
    messages = [
        parameter_pb2.PushRequest(header=header, ranges=[piece], payload=bytes(8), last=True),
        parameter_pb2.PushRequest(header=header, tensors=[tensor], last=True),
        parameter_pb2.PullRequest(caller=caller),
        parameter_pb2.JoinRequest(caller=caller),
        control_pb2.InitializeRequest(chief=CHIEF, tensors=[tensor], last=True),
        control_pb2.HoldRequest(chief=CHIEF, cut=1, deadline_s=0.01),
        control_pb2.StatusRequest(),
    ]
    return [message.SerializeToString() for message in messages]


@pytest.fixture
def victim(processes: Processes) -> tuple[Process, str]:
    """A server process that holds a variable, "w"."""
    return victim_of(processes, "1")


def victim_of(processes: Processes, lease: str) -> tuple[Process, str]:
    """The same; it ends calls that stall for a lease."""
    process, address = processes.ps("--lease", lease)
    with ps.Client(address, connect_timeout=10) as client:
        client.initialize({"w": np.zeros(2, np.float32)}, ps.optimizers.SGD(0.5))
    return process, address


def still_well(process: Process, address: str, before: int) -> None:
    """It serves, it has not grown, and no defect is in its log."""
    assert process.running
    with ps.Client(address, worker="worker:7", connect_timeout=10) as client:
        version = client.pull().version
        assert client.push({"w": np.ones(2, np.float32)}).version == version + 1
    assert process.rss("VmHWM") - before < 64 << 20
    log = "\n".join(process.stderr)
    assert "Traceback" not in log and "defect" not in log, log


def test_bytes_that_are_no_message(victim: tuple[Process, str]) -> None:
    """Random, cut short, flipped, with lengths beyond all bounds: to every method."""
    process, address = victim
    before = process.rss()
    rng = random.Random(0)
    huge = [
        b"\x7a\xff\xff\xff\xff\x0f",
        b"\x7a\x80\x80\x80\x80\x80\x80\x80\x80\x01",
        b"\x0a\xff\xff",
    ]
    huge += [b"\x0b" * 1000, b"\x08" + b"\xff" * 20, b"\x0a\x02\xff\xfe", b"\x00", b"\x7a\x00"]
    with closing(grpc.insecure_channel(address)) as channel:
        for method in METHODS:
            if method.endswith("Shutdown"):
                continue
            broken = [rng.randbytes(rng.randrange(1, 200)) for _ in range(6)]
            for sample in samples():
                flipped = bytearray(sample) or bytearray(b"\xff")
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
                broken += [sample[: rng.randrange(len(sample) + 1)], bytes(flipped)]
            for data in (*huge, *broken):
                send(channel, method, data, timeout=0.5)
            send(channel, method, b"", b"", timeout=0.5)
    still_well(process, address, before)


@pytest.mark.parametrize("method", METHODS)
def test_garbage_is_an_invalid_argument(cluster: MakeCluster, method: str) -> None:
    """By its name, whatever the kind of call; and it is no defect of the server's."""
    job = cluster()
    with closing(grpc.insecure_channel(job.addresses[0])) as channel:
        assert send(channel, method, b"\x0b\xff garbage") == "INVALID_ARGUMENT"
    assert job.servers[0].defect is None


def test_shapes_that_are_declared_only(victim: tuple[Process, str]) -> None:
    process, address = victim
    before = process.rss()
    with closing(grpc.insecure_channel(address)) as channel:
        initialize = "/paramserver.v1.ControlService/Initialize"
        restore = "/paramserver.v1.ControlService/Restore"
        for shape in ([1 << 40], [-1], [1 << 62, 1 << 62], [1] * 1000, [0, 1 << 62], [1 << 33]):
            for kind in ("sgd", "adam"):
                variable = tensor_pb2.Variable(name="v", dtype=FLOAT32, shape=shape)
                state = control_pb2.ShardState(
                    session=9, shard_count=1, variables=[variable] * 1, job=job_of(kind)
                )
                load = control_pb2.RestoreRequest(chief=CHIEF, state=state)
                load.last = shape != [0, 1 << 62]
                for method in (restore, initialize):
                    assert send(channel, method, load.SerializeToString()) != "OK"
        many = [
            tensor_pb2.Variable(name=f"v{i}", dtype=FLOAT32, shape=[1 << 30]) for i in range(200)
        ]
        state = control_pb2.ShardState(session=9, shard_count=1, variables=many, job=job_of("sgd"))
        load = control_pb2.RestoreRequest(chief=CHIEF, state=state, last=True)
        assert send(channel, restore, load.SerializeToString()) != "OK"
    still_well(process, address, before)


def job_of(kind: str) -> job_pb2.Job:
    consistency = job_pb2.Consistency(mode=job_pb2.Consistency.MODE_ASYNC)
    return job_pb2.Job(consistency=consistency, optimizer=tensor_pb2.Optimizer(kind=kind))


def test_a_compressed_flood_is_stopped_at_the_limit(processes: Processes) -> None:
    """A small message that would unpack to gigabytes."""
    process, address = victim_of(processes, "30")  # compressing it takes the client a while
    before = process.rss()
    options = [("grpc.max_send_message_length", -1)]
    with closing(grpc.insecure_channel(address, options)) as channel:
        call: Any = channel.stream_stream("/paramserver.v1.ParameterService/Push")
        flood = b"\x7a" + bytes(300 << 20)
        with pytest.raises(grpc.RpcError) as caught:
            list(call(iter([flood]), compression=grpc.Compression.Gzip, timeout=30))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    # One message of the permitted size may be there for a moment.
    still_well(process, address, before + transport.MAX_MESSAGE_BYTES)


def test_a_foreign_clients_message_over_the_limit(victim: tuple[Process, str]) -> None:
    """Told so by name, and nothing is kept of it."""
    process, address = victim
    before = process.rss()
    options = [("grpc.max_send_message_length", -1)]
    with closing(grpc.insecure_channel(address, options)) as channel:
        flood = b"\x7a\x80\x80\x80\x20" + bytes(64 << 20)
        status = send(channel, "/paramserver.v1.ParameterService/Push", flood, timeout=30)
        assert status == "RESOURCE_EXHAUSTED"
    still_well(process, address, before)


# -- strangers at the port -------------------------------------------------------------------------


def test_other_protocols_at_the_port(victim: tuple[Process, str]) -> None:
    process, address = victim
    before = process.rss()
    host, _, port = address.rpartition(":")
    rng = random.Random(1)
    greetings = [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(500),
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00" * 50,
        rng.randbytes(4096),
        b"",
    ]
    idle = []
    for greeting in greetings * 10:
        sock = socket.create_connection((host, int(port)), 5)
        sock.sendall(greeting)
        idle.append(sock)
    still_well(process, address, before)
    for sock in idle:
        sock.close()
    still_well(process, address, before)


def test_a_server_is_open_to_this_machine_only_unless_told_otherwise(processes: Processes) -> None:
    _, address = processes.ps()
    assert address.startswith("127.0.0.1:")
    help_text = processes.python("-m", "paramserver", "--help")
    assert help_text.wait() == 0, help_text.output
    text = " ".join(" ".join(help_text.stdout).split())
    assert "no authentication, so open it to networks you trust only" in text


def test_leaving_calls_open_starves_nobody(cluster: MakeCluster) -> None:
    """Streams that are opened and not used, as many as there may be, and more."""
    job = cluster(max_workers=3, lease=5.0)
    job.initialize({"w": np.zeros(2, np.float32)}, ps.optimizers.SGD(0.5))
    with closing(grpc.insecure_channel(job.addresses[0])) as channel:
        release = threading.Event()

        def silence() -> Iterator[bytes]:
            release.wait(30)
            yield from ()

        methods: list[Any] = [
            channel.stream_stream(f"/paramserver.v1.ParameterService/{name}")
            for name in ("Push", "PushPull")
        ]
        stuck = [method(silence()) for method in methods for _ in range(4)]
        client = job.client("worker:0")
        for _ in range(5):
            client.push_pull({"w": np.ones(2, np.float32)})
        for call in stuck:
            call.cancel()
        release.set()
    assert client.pull().version == 5
