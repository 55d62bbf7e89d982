"""The services as any client sees them: the generated stubs against a real server.

Every request that is wrong gets a typed status and changes nothing."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from conftest import Background, Cluster, MakeCluster, wait_for

import paramserver as ps
from paramserver import transport
from paramserver.v1 import (
    control_pb2,
    control_pb2_grpc,
    job_pb2,
    parameter_pb2,
    parameter_pb2_grpc,
    tensor_pb2,
)

Array = npt.NDArray[Any]
F32, F64 = tensor_pb2.D_TYPE_FLOAT32, tensor_pb2.D_TYPE_FLOAT64
SESSION = 77
CHIEF = control_pb2.Chief(holder="chief:0", incarnation=1)
ASYNC = job_pb2.Consistency(mode=job_pb2.Consistency.MODE_ASYNC)
SGD = tensor_pb2.Optimizer(kind="sgd", hyper={"learning_rate": 0.5})
JOB = job_pb2.Job(consistency=ASYNC, optimizer=SGD)


class Standard:
    """A client of the generated stubs, of one shard."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, transport.channel_options())
        self.parameter = parameter_pb2_grpc.ParameterServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)

    def initialize(self, *messages: control_pb2.InitializeRequest) -> Any:
        return self.control.Initialize(iter(messages), timeout=10)

    def join(self, worker: str = "worker:0", incarnation: int = 5, session: int = SESSION) -> Any:
        return self.parameter.Join(
            parameter_pb2.JoinRequest(caller=caller(worker, incarnation, session)), timeout=10
        )

    def push(self, *messages: parameter_pb2.PushRequest) -> Any:
        return self.parameter.Push(iter(messages), timeout=10)

    def pull(self, wait: bool = False, **options: Any) -> list[parameter_pb2.PullResponse]:
        request = parameter_pb2.PullRequest(
            caller=caller(), options=parameter_pb2.PullOptions(wait=wait, **options)
        )
        return list(self.parameter.Pull(request, timeout=10))

    def status(self) -> control_pb2.StatusResponse:
        answer: control_pb2.StatusResponse = self.control.Status(
            control_pb2.StatusRequest(), timeout=10
        )
        return answer


def caller(
    worker: str = "worker:0", incarnation: int = 5, session: int = SESSION
) -> parameter_pb2.Caller:
    return parameter_pb2.Caller(session=session, worker=worker, incarnation=incarnation)


def variable(name: str, array: Array, **changes: Any) -> tensor_pb2.Variable:
    dtype = F32 if array.dtype == np.float32 else F64
    return tensor_pb2.Variable(**{"name": name, "dtype": dtype, "shape": array.shape, **changes})


def tensor(name: str, array: Array, **changes: Any) -> tensor_pb2.Tensor:
    dtype = F32 if array.dtype == np.float32 else F64
    fields = {"name": name, "dtype": dtype, "shape": array.shape, "data": array.tobytes()}
    return tensor_pb2.Tensor(**{**fields, **changes})


def state(variables: Iterable[tensor_pb2.Variable], **changes: Any) -> control_pb2.ShardState:
    fields = {"session": SESSION, "shard_index": 0, "shard_count": 1, "job": JOB}
    return control_pb2.ShardState(**{**fields, "variables": variables, **changes})


def header(sequence: int = 1, clock: int = 0, **changes: Any) -> parameter_pb2.PushHeader:
    fields = {"caller": caller(), "sequence": sequence, "clock": clock}
    return parameter_pb2.PushHeader(**{**fields, **changes})


def push(*tensors: tensor_pb2.Tensor, last: bool = True, **fields: Any) -> Any:
    return parameter_pb2.PushRequest(tensors=tensors, last=last, **fields)


def range_of_codec(number: Any) -> tensor_pb2.Range:
    return tensor_pb2.Range(count=8, codec=number)


#: Laid out as: group 0 (float32): w at 0, b at 6; group 1 (float64): d at 0.
MODEL = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.ones(2, np.float32),
    "d": np.full(3, 2.0),
}


def initial(**changes: Any) -> control_pb2.InitializeRequest:
    fields: dict[str, Any] = {
        "chief": CHIEF,
        "state": state(variable(n, a) for n, a in MODEL.items()),
        "tensors": [tensor(n, a) for n, a in MODEL.items()],
        "last": True,
    }
    return control_pb2.InitializeRequest(**{**fields, **changes})


@pytest.fixture
def empty(cluster: MakeCluster) -> Iterator[Standard]:
    """A client of a server that holds nothing."""
    client = Standard(cluster(lease=30.0, max_workers=8).addresses[0])
    yield client
    client.channel.close()


@pytest.fixture
def ready(empty: Standard) -> Standard:
    """A client, worker:0, of a server that holds MODEL. Nothing renews its lease."""
    assert empty.initialize(initial()).initialized
    empty.join()
    return empty


def refused(code: str, complaint: str, call: Callable[[], object]) -> grpc.Call:
    """The error that a call ends with."""
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = caught.value
    assert isinstance(error, grpc.Call)
    assert error.code().name in code.split("|"), error.details()
    assert re.search(complaint, error.details() or ""), error.details()
    return error


def unchanged(client: Standard, version: int = 0) -> bool:
    """Whether the model is what it was at first."""
    got = client.pull()
    assert got[0].header.version == version
    payload = b"".join(m.payload for m in got)
    return payload == b"".join(MODEL[n].tobytes() for n in ("w", "b", "d"))


# -- push ------------------------------------------------------------------------------------------

ONES = [tensor(n, np.ones_like(a)) for n, a in MODEL.items()]


def test_named_tensors_and_ranges_are_two_ways_to_say_one_thing(ready: Standard) -> None:
    assert ready.push(push(*ONES, header=header())).result.version == 1
    ranges = [
        tensor_pb2.Range(group=0, offset=0, count=8),
        tensor_pb2.Range(group=1, offset=0, count=3),
    ]
    payload = np.ones(8, "<f4").tobytes() + np.ones(3, "<f8").tobytes()
    message = parameter_pb2.PushRequest(
        header=header(2, 1), ranges=ranges, payload=payload, last=True
    )
    result = ready.push(message).result
    assert (result.applied, result.version, result.global_step) == (True, 2, 2)
    assert result.reason == parameter_pb2.PushResult.REASON_APPLIED
    got = ready.pull()
    assert [(r.group, r.offset, r.count) for m in got for r in m.ranges] == [(0, 0, 8), (1, 0, 3)]
    floats = np.frombuffer(got[0].payload[:32], "<f4")
    np.testing.assert_array_equal(floats, [-1, 0, 1, 2, 3, 4, 0, 0])
    np.testing.assert_array_equal(np.frombuffer(got[0].payload[32:], "<f8"), [1, 1, 1])


def test_a_push_in_many_small_pieces(ready: Standard) -> None:
    """Pieces of tensors and of ranges, in any order, one message each; empty messages between."""
    ones = np.ones(6, np.float32)
    pieces = [
        push(tensor("w", ones[:2], shape=(2, 3), offset=4), last=False),
        parameter_pb2.PushRequest(),
        push(tensor("w", ones[:3], shape=(2, 3), offset=0), last=False),
        parameter_pb2.PushRequest(
            ranges=[tensor_pb2.Range(group=0, offset=3, count=1)], payload=ones[:1].tobytes()
        ),
        parameter_pb2.PushRequest(last=True),
    ]
    pieces[0].header.CopyFrom(header())
    assert ready.push(*pieces).result.version == 1
    got = ready.pull(names=["w"])
    np.testing.assert_array_equal(np.frombuffer(got[0].payload, "<f4"), np.arange(6) - 0.5)


W = MODEL["w"]


@pytest.mark.parametrize(
    ("code", "complaint", "messages"),
    [
        # -- tensors that do not fit
        ("NOT_FOUND", "no variable 'x' here; there are 'w', 'b', 'd'", [push(tensor("x", W))]),
        ("INVALID_ARGUMENT", r"'w' has shape \(3, 2\), variable has \(2, 3\)",
         [push(tensor("w", W.reshape(3, 2)))]),
        ("INVALID_ARGUMENT", r"'w' has shape \(6,\)", [push(tensor("w", W.reshape(6)))]),
        ("INVALID_ARGUMENT", r"'w' has shape \(\)", [push(tensor("w", W, shape=()))]),
        ("INVALID_ARGUMENT", r"'w' has shape \(-2, -3\)", [push(tensor("w", W, shape=(-2, -3)))]),
        ("INVALID_ARGUMENT", r"1000 axes\), variable", [push(tensor("w", W, shape=[1] * 1000))]),
        ("INVALID_ARGUMENT", rf"'w' has shape \({1 << 40},\)",
         [push(tensor("w", W, shape=(1 << 40,)))]),
        ("INVALID_ARGUMENT", "'w' has dtype float64, variable has float32",
         [push(tensor("w", W.astype(np.float64)))]),
        ("INVALID_ARGUMENT", "'w' has dtype number 99; choose one of 'D_TYPE_FLOAT32'",
         [push(tensor("w", W, dtype=99))]),
        ("INVALID_ARGUMENT", "'w' has dtype number 0", [push(tensor("w", W, dtype=0))]),
        ("INVALID_ARGUMENT", "'w' has codec 7", [push(tensor("w", W, codec=7))]),
        ("INVALID_ARGUMENT", "'w' has 23 bytes", [push(tensor("w", W, data=W.tobytes()[:-1]))]),
        ("INVALID_ARGUMENT", "'w' arrived in part only", [push(tensor("w", W, data=bytes(20)))]),
        ("INVALID_ARGUMENT", "'w' has 28 bytes", [push(tensor("w", W, data=bytes(28)))]),
        ("INVALID_ARGUMENT", "24 bytes .* from element -1", [push(tensor("w", W, offset=-1))]),
        ("INVALID_ARGUMENT", "24 bytes .* from element 5", [push(tensor("w", W, offset=5))]),
        ("INVALID_ARGUMENT", "from element 9223372036854775807",
         [push(tensor("w", W, offset=(1 << 63) - 1))]),
        ("INVALID_ARGUMENT", "overlap at variable 'w'", [push(tensor("w", W), tensor("w", W))]),
        ("INVALID_ARGUMENT", "'d' is nan at element 2",
         [push(tensor("d", np.array([1.0, 2.0, np.nan])))]),
        ("INVALID_ARGUMENT", "'b' is -inf at element 0",
         [push(tensor("b", np.array([-np.inf, 1], np.float32)))]),
        # -- ranges that do not fit
        ("INVALID_ARGUMENT", r"range \[0, 9\) is outside group 0 of 8",
         [push(ranges=[tensor_pb2.Range(count=9)], payload=bytes(36))]),
        ("INVALID_ARGUMENT", r"range \[-1, 7\) is outside",
         [push(ranges=[tensor_pb2.Range(offset=-1, count=8)], payload=bytes(32))]),
        ("INVALID_ARGUMENT", "outside group 0",
         [push(ranges=[tensor_pb2.Range(offset=1 << 62, count=1 << 62)], payload=bytes(8))]),
        ("INVALID_ARGUMENT", r"range \[4, 0\) is outside",
         [push(ranges=[tensor_pb2.Range(offset=4, count=-4)], payload=bytes(0))]),
        ("INVALID_ARGUMENT", "range names group 2; the shard has 2",
         [push(ranges=[tensor_pb2.Range(group=2, count=1)], payload=bytes(4))]),
        ("INVALID_ARGUMENT", "range names slot 1; the group has 0",
         [push(ranges=[tensor_pb2.Range(slot=1, count=8)], payload=bytes(32))]),
        ("INVALID_ARGUMENT", "a range has codec 1",
         [push(ranges=[range_of_codec(1)], payload=bytes(32))]),
        ("INVALID_ARGUMENT", "the ranges name 32 bytes, the payload has 31",
         [push(ranges=[tensor_pb2.Range(count=8)], payload=bytes(31))]),
        ("INVALID_ARGUMENT", "name 0 bytes, the payload has 4", [push(payload=bytes(4))]),
        ("INVALID_ARGUMENT", "'b' arrived in part only",
         [push(ranges=[tensor_pb2.Range(count=7)], payload=bytes(28))]),
        ("INVALID_ARGUMENT", "overlap at variable 'w'",
         [push(ranges=[tensor_pb2.Range(count=6)] * 2, payload=bytes(48))]),
        # -- streams that are none
        ("INVALID_ARGUMENT", "ended before its header", []),
        ("INVALID_ARGUMENT", "ended before its last message, at variable 'd'; nothing was applied",
         [push(*ONES, last=False)]),
        ("INVALID_ARGUMENT", "a second header came inside a push",
         [push(*ONES, last=False), push(header=header(2))]),
        ("INVALID_ARGUMENT", "arrived in part only",
         [push(tensor("w", W, data=bytes(12)), last=False), push(*ONES[1:])]),
    ],
)  # fmt: skip
def test_pushes_that_do_not_fit(
    ready: Standard, code: str, complaint: str, messages: list[Any]
) -> None:
    """Also behind a piece that is right: nothing of it is applied, and the step is still free."""
    messages = [type(m).FromString(m.SerializeToString()) for m in messages]
    for message in messages[:1]:
        message.header.CopyFrom(header())
    refused(code, complaint, lambda: ready.push(*messages))
    assert unchanged(ready)
    if messages:
        right = push(tensor("d", np.ones(3)), last=False, header=header())
        messages[0].ClearField("header")
        refused(code, "", lambda: ready.push(right, *messages))
        assert unchanged(ready)
    assert ready.push(push(*ONES, header=header())).result.version == 1
    assert ready.status().bytes_in_flight == 0


@pytest.mark.parametrize(
    ("code", "complaint", "changes"),
    [
        ("ABORTED", "restored from a checkpoint since you pulled",
         {"caller": caller(session=SESSION + 1)}),
        ("ABORTED", "restored from a checkpoint", {"caller": parameter_pb2.Caller()}),
        ("ABORTED", "worker:9 is no member of this job .*join again",
         {"caller": caller("worker:9")}),
        ("ABORTED", "worker:0 is no member", {"caller": caller(incarnation=6)}),
        ("ABORTED", "without a name is no member", {"caller": caller("", 0)}),
        ("ABORTED", "for clock 3, and is at clock 0; pull again", {"clock": 3}),
        ("ABORTED", "sent push 0 after push 0", {"sequence": 0}),
        ("ABORTED", "step 9 is not granted to worker:0; pull again", {"step": 9}),
        ("INVALID_ARGUMENT", "push has sequence -1, below 0", {"sequence": -1}),
        ("INVALID_ARGUMENT", "push has clock -1", {"clock": -1}),
        ("INVALID_ARGUMENT", "push has step -5", {"step": -5}),
        ("INVALID_ARGUMENT", "push has pulled_version -5", {"pulled_version": -5}),
        ("INVALID_ARGUMENT", "push has examples -5", {"examples": -5}),
    ],
)  # fmt: skip
def test_headers_that_are_wrong(
    ready: Standard, code: str, complaint: str, changes: dict[str, Any]
) -> None:
    refused(code, complaint, lambda: ready.push(push(*ONES, header=header(**changes))))
    assert unchanged(ready)


def test_a_repeat_is_answered_and_not_counted(ready: Standard) -> None:
    first = ready.push(push(*ONES, header=header())).result
    # The same number with another content, or none: the answer is the first one's.
    for again in (push(*ONES, header=header()), push(header=header(), last=True)):
        assert ready.push(again).result == first
    assert ready.push(push(*ONES, header=header(2, 1))).result.version == 2
    refused("ABORTED", "sent push 1 after push 2", lambda: ready.push(push(*ONES, header=header())))
    assert ready.status().version == 2
    assert dict(ready.status().counts) == {"applied": 2, "refused": 0, "repeated": 2, "aborted": 0}


def test_a_push_cut_at_every_message_counts_once(ready: Standard) -> None:
    """Cancelled after any number of messages it changes nothing, and the next one may follow."""
    w = [tensor("w", W.reshape(-1)[i : i + 1] * 0 + 1, shape=W.shape, offset=i) for i in range(6)]
    for step in range(7):
        messages = [push(t, last=False) for t in w] + [push(*ONES[1:])]
        messages[0].header.CopyFrom(header(step + 1, step))
        release = threading.Event()

        def cut(messages: list[Any] = messages, at: int = step, hold: Any = release) -> Any:
            yield from messages[:at]
            hold.wait(10)

        call = ready.parameter.Push.future(cut(), timeout=10)
        if step:
            wait_for(partial(has_begun, ready, step + 1), "the push to begin")
        call.cancel()
        release.set()
        assert ready.status().version == step
        assert ready.push(*messages).result.version == step + 1
    assert ready.status().bytes_in_flight == 0
    got = np.frombuffer(ready.pull(names=["w"])[0].payload, "<f4")
    np.testing.assert_array_equal(got, np.arange(6) - 3.5)


def has_begun(client: Standard, sequence: int) -> bool:
    """Whether the shard has admitted a push: asked for a hold, which is given up, it says so."""
    cut = control_pb2.HoldRequest(chief=CHIEF, cut=1, deadline_s=5)
    admitted = client.control.Hold(cut, timeout=5).admitted
    client.control.Cut(control_pb2.CutRequest(chief=CHIEF, cut=1, abandon=True), timeout=5)
    return sequence in [push.sequence for push in admitted]


def half(release: threading.Event, **changes: Any) -> Iterator[Any]:
    """All of a gradient but its end, which comes when it is released."""
    yield push(*ONES, last=False, header=header(**changes))
    release.wait(20)
    yield push()


def test_a_broken_stream_frees_its_gradient(ready: Standard) -> None:
    """Of the two the second is kept until it is complete."""
    ready.join("worker:1")
    release = threading.Event()
    calls = []
    for name in ("worker:0", "worker:1"):
        requests = half(release, caller=caller(name))
        calls.append(ready.parameter.Push.future(requests, timeout=10))
    wait_for(lambda: ready.status().bytes_in_flight == 56, "the gradient to arrive")
    for call in calls:
        call.cancel()
    wait_for(lambda: ready.status().counts["aborted"] == 2, "both to be dropped")
    release.set()
    assert ready.status().bytes_in_flight == 0
    assert unchanged(ready)


def test_a_stalled_push_makes_way(ready: Standard) -> None:
    """A push that stands still holds nobody up for long. Sent again it counts, once."""
    ready.join("worker:1")
    release = threading.Event()
    stalled = ready.parameter.Push.future(half(release), timeout=20)
    wait_for(partial(has_begun, ready, 1), "the push to begin")
    began = time.monotonic()
    assert ready.push(push(*ONES, header=header(caller=caller("worker:1")))).result.version == 1
    assert time.monotonic() - began < 5
    release.set()
    refused("UNAVAILABLE", "arrives too slowly, and others are waiting", stalled.result)
    assert ready.push(push(*ONES, header=header())).result.version == 2
    ready.push(push(*ONES, header=header(2, 1)))
    (got,) = ready.pull(names=["w"])
    np.testing.assert_array_equal(np.frombuffer(got.payload, "<f4"), np.arange(6) - 1.5)


# -- pull ------------------------------------------------------------------------------------------


def test_what_a_pull_can_ask_for(ready: Standard) -> None:
    (got,) = ready.pull(names=["d", "b"])
    assert [(r.group, r.offset, r.count) for r in got.ranges] == [(0, 6, 2), (1, 0, 3)]
    assert got.last and got.payload == MODEL["b"].tobytes() + MODEL["d"].tobytes()
    (got,) = ready.pull(wait=True, header_only=True)
    assert (got.header.step, got.payload, got.last) == (1, b"", True)
    (got,) = ready.pull(known_version=0)
    assert got.header.unchanged and not got.payload and got.last
    (got,) = ready.pull(known_version=1)
    assert not got.header.unchanged and len(got.payload) == 56
    for names in (["x"], ["w", "x"]):
        refused("NOT_FOUND", "no variable 'x'", partial(ready.pull, names=names))
    refused("ABORTED", "pulls for clock 4 and is at", lambda: ready.pull(wait=True, clock=4))
    refused("ABORTED", "pulls for clock -1", lambda: ready.pull(wait=True, clock=-1))


def test_a_waiting_pull_speaks_and_frees_its_thread(
    cluster: MakeCluster, background: Background
) -> None:
    """More waiting calls than allowed are refused; those cancelled make room; pushes still pass."""
    job = cluster(lease=30.0, max_workers=2)
    job.initialize({"w": np.zeros(2)}, consistency=ps.Sync(workers=9))
    client = Standard(job.addresses[0])
    session = job.status().session
    requests = []
    for i in range(3):
        who = caller(f"worker:{i}", 5, session)
        client.parameter.Join(parameter_pb2.JoinRequest(caller=who), timeout=5)
        options = parameter_pb2.PullOptions(wait=True)
        requests.append(parameter_pb2.PullRequest(caller=who, options=options))
    calls = [client.parameter.Pull(request, timeout=30) for request in requests[:2]]
    wait_for(lambda: len(job.status().waiting) == 2, "two calls to wait")
    error = refused(
        "RESOURCE_EXHAUSTED",
        "2 calls are waiting here already; the limit is --max-workers",
        lambda: list(client.parameter.Pull(requests[2], timeout=5)),
    )
    assert dict(error.trailing_metadata() or ())["paramserver-error"] == "ResourceExhaustedError"
    message = next(calls[0])
    assert message.waiting.reason == "the first round waits for workers (3 of 9 joined)"
    assert not message.HasField("header") and message.waiting.HasField("roster")
    for call in calls:
        call.cancel()
    wait_for(lambda: not job.status().waiting, "the cancelled to be forgotten")
    calls = [client.parameter.Pull(requests[2], timeout=30)]
    wait_for(lambda: len(job.status().waiting) == 1, "the third to wait")
    calls[0].cancel()
    client.channel.close()


def test_turns_on_one_stream(ready: Standard) -> None:
    """Result first, or with the parameters; the second turn needs no new stream."""
    turns = [
        parameter_pb2.PushPullRequest(
            header=header(n, n - 1),
            tensors=ONES,
            last=True,
            options=parameter_pb2.PullOptions(wait=True, clock=n),
        )
        for n in (1, 2)
    ]
    answers = ready.parameter.PushPull(iter(turns), timeout=10)
    for n in (1, 2):
        turn = [next(answers)]
        while not turn[-1].last:
            turn.append(next(answers))
        assert [m.result.version for m in turn if m.HasField("result")] == [n]
        assert turn[0].HasField("result")
        assert [(m.header.version, m.header.step) for m in turn if m.HasField("header")] == [
            (n, n + 1)
        ]
    assert list(answers) == []
    assert list(ready.parameter.PushPull(iter(()), timeout=10)) == []
    # A turn whose second half fails says first that its push is in.
    turns[0].header.CopyFrom(header(3, 2))
    turns[0].options.names.append("x")
    answers = ready.parameter.PushPull(iter(turns[:1]), timeout=10)
    assert next(answers).result.version == 3
    refused("NOT_FOUND|ABORTED", "'x'|clock", lambda: next(answers))
    bad = parameter_pb2.PushPullRequest(tensors=ONES, last=True)
    refused("INVALID_ARGUMENT", "no header", lambda: list(ready.parameter.PushPull(iter([bad]))))


def test_a_stream_ends_with_its_workers_membership(ready: Standard) -> None:
    release = threading.Event()

    def turns() -> Iterator[Any]:
        options = parameter_pb2.PullOptions(wait=True, clock=1)
        yield parameter_pb2.PushPullRequest(header=header(), last=True, options=options)
        release.wait(20)

    answers = ready.parameter.PushPull(turns(), timeout=20)
    while not next(answers).last:
        pass
    ready.parameter.Leave(parameter_pb2.LeaveRequest(caller=caller(), reason="done"), timeout=5)
    began = time.monotonic()
    refused("CANCELLED", "", lambda: next(answers))
    assert time.monotonic() - began < 3
    release.set()


# -- before there is a model, and with another one -------------------------------------------------


def test_an_empty_server_says_so(empty: Standard) -> None:
    turn = parameter_pb2.PushPullRequest(header=header())
    for call in (
        lambda: empty.push(push(*ONES, header=header())),
        lambda: empty.pull(),
        lambda: empty.pull(wait=True),
        lambda: empty.join(),
        lambda: list(empty.parameter.PushPull(iter([turn]))),
        lambda: empty.parameter.Heartbeat(parameter_pb2.HeartbeatRequest(caller=caller())),
        lambda: empty.parameter.Leave(parameter_pb2.LeaveRequest(caller=caller())),
        lambda: empty.control.Hold(control_pb2.HoldRequest(chief=CHIEF, cut=1, deadline_s=1)),
        lambda: empty.control.Cut(control_pb2.CutRequest(chief=CHIEF, cut=1)),
        lambda: list(empty.control.Snapshot(control_pb2.SnapshotRequest(chief=CHIEF, cut=1))),
        lambda: empty.control.Configure(control_pb2.ConfigureRequest(chief=CHIEF, last_step=1)),
    ):  # fmt: skip
        refused("FAILED_PRECONDITION", "holds no variables yet|no such cut", call)
    status = empty.status()
    assert not status.initialized and status.server_incarnation and status.uptime_s > 0


@pytest.mark.parametrize(
    ("code", "complaint", "changes"),
    [
        ("INVALID_ARGUMENT", "'w' is incomplete", {"tensors": [tensor("b", MODEL["b"])]}),
        ("INVALID_ARGUMENT", "variable 'w' has dtype float64, variable has float32",
         {"tensors": [tensor("w", MODEL["w"].astype(np.float64))]}),
        ("INVALID_ARGUMENT", "variable 'w' is nan at element 0",
         {"tensors": [tensor("w", MODEL["w"] * np.nan)]}),
        ("INVALID_ARGUMENT", "ended before its last message", {"last": False}),
        ("NOT_FOUND", "no variable 'x' here", {"tensors": [tensor("x", MODEL["w"])]}),
        ("INVALID_ARGUMENT", "range names slot 1", {"ranges": [tensor_pb2.Range(slot=1, count=8)],
                                                   "payload": bytes(32)}),
        ("INVALID_ARGUMENT", "must be a random non-zero", {"state": state([], session=0)}),
        ("INVALID_ARGUMENT", "mode number 0", {"state": control_pb2.ShardState()}),
        ("INVALID_ARGUMENT", "shard 1 of 1 cannot be", {"state": state([], shard_index=1)}),
        ("INVALID_ARGUMENT", "shard -1 of 1 cannot be", {"state": state([], shard_index=-1)}),
        ("INVALID_ARGUMENT", "shard 0 of 2147483647", {"state": state([], shard_count=2**31 - 1)}),
        ("INVALID_ARGUMENT", "must be between 0 and", {"state": state([], version=-1)}),
        ("INVALID_ARGUMENT", "mode number 0 is unknown; choose sync, ssp or async",
         {"state": state([], job=job_pb2.Job(optimizer=SGD))}),
        ("INVALID_ARGUMENT", "sync needs workers >= 1", {"state": state([], job=job_pb2.Job(
            optimizer=SGD, consistency=job_pb2.Consistency(mode=job_pb2.Consistency.MODE_SYNC)))}),
        ("INVALID_ARGUMENT", "slack", {"state": state([], job=job_pb2.Job(optimizer=SGD,
            consistency=job_pb2.Consistency(mode=job_pb2.Consistency.MODE_SSP, slack=-1)))}),
        ("INVALID_ARGUMENT", "choose", {"state": state([], job=job_pb2.Job(consistency=ASYNC))}),
        ("INVALID_ARGUMENT", "os.system", {"state": state([], job=job_pb2.Job(
            consistency=ASYNC, optimizer=tensor_pb2.Optimizer(kind="os.system")))}),
        ("INVALID_ARGUMENT", "learning_rate", {"state": state([], job=job_pb2.Job(
            consistency=ASYNC, optimizer=tensor_pb2.Optimizer(
                kind="sgd", hyper={"learning_rate": float("nan")})))}),
        ("INVALID_ARGUMENT", "last_step", {"state": state([], job=job_pb2.Job(
            consistency=ASYNC, optimizer=SGD, last_step=-1))}),
        ("INVALID_ARGUMENT", "'w' is given twice", {"state": state([variable("w", W)] * 2)}),
        ("INVALID_ARGUMENT", "must be 1 to 256 letters", {"state": state([variable("a b", W)])}),
        ("INVALID_ARGUMENT", "dtype number 9", {"state": state([variable("w", W, dtype=9)])}),
        ("INVALID_ARGUMENT", "none negative", {"state": state([variable("w", W, shape=(-1, 3))])}),
        ("INVALID_ARGUMENT", "at most 32 axes",
         {"state": state([variable("w", W, shape=[1] * 1000)])}),
        ("INVALID_ARGUMENT", "beyond any shard",
         {"state": state([variable("w", W, shape=(1 << 62,))])}),
        ("INVALID_ARGUMENT", "beyond any shard",
         {"state": state([variable("w", W, shape=(1 << 40, 1 << 40))])}),
        ("RESOURCE_EXHAUSTED", r"'w' brings the shard to 4398046511104 bytes; .*--max-bytes",
         {"state": state([variable("w", W, shape=(1 << 40,))])}),
        ("RESOURCE_EXHAUSTED", r"'w4' brings the shard to .*--max-bytes",
         {"state": state([variable(f"w{i}", W, shape=(1 << 36,)) for i in range(5)])}),
        ("INVALID_ARGUMENT", "a chief needs a name", {"chief": control_pb2.Chief()}),
        ("INVALID_ARGUMENT", "a chief needs a name", {"chief": control_pb2.Chief(incarnation=1)}),
        ("INVALID_ARGUMENT", "a chief needs .* an incarnation",
         {"chief": control_pb2.Chief(holder="chief:0")}),
    ],
)  # fmt: skip
def test_models_that_cannot_be(
    empty: Standard, code: str, complaint: str, changes: dict[str, Any]
) -> None:
    refused(code, complaint, lambda: empty.initialize(initial(**changes)))
    assert not empty.status().initialized
    assert empty.initialize(initial()).initialized


def test_a_model_that_is_declared_and_never_sent_costs_nothing(cluster: MakeCluster) -> None:
    """A terabyte that nobody sends: the declaration alone takes no memory, or is refused."""
    empty = Standard(cluster().addresses[0])
    before = resident_bytes()
    for elements in (1 << 33, 1 << 36, 1 << 37):
        shape = (elements,)
        with pytest.raises(grpc.RpcError) as caught:
            empty.initialize(initial(state=state([variable("w", W, shape=shape)]), tensors=[]))
        assert caught.value.code() in (
            grpc.StatusCode.INVALID_ARGUMENT,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        )
    assert resident_bytes() - before < 50 << 20
    assert not empty.status().initialized
    empty.channel.close()


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_the_first_model_wins(ready: Standard) -> None:
    again = initial(state=state((variable(n, a) for n, a in MODEL.items()), session=99))
    answer = ready.initialize(again)
    assert (answer.initialized, answer.session) == (False, SESSION)
    other = {**MODEL, "w": np.zeros((3, 3), np.float32)}
    for variables, complaint in (
        (
            [variable(n, a) for n, a in other.items()],
            r"'w' is float32 \(2, 3\) in the job, not .* \(3, 3\)",
        ),
        ([variable("w", W)], "'b' is only in the job"),
    ):
        changed = initial(state=state(variables), tensors=[])
        refused("ALREADY_EXISTS", complaint, partial(ready.initialize, changed))
    elsewhere = initial(state=state([], shard_index=1, shard_count=2))
    refused("ALREADY_EXISTS", "this is ps:0 of 1 already", lambda: ready.initialize(elsewhere))
    assert unchanged(ready)


def test_two_initialisers_at_once(cluster: MakeCluster, background: Background) -> None:
    """One model is there afterwards, whole, and everyone is told the same session."""
    empty = Standard(cluster().addresses[0])
    requests = []
    for i in range(6):
        model = {n: a * 0 + i for n, a in MODEL.items()}
        requests.append(
            initial(
                state=state((variable(n, a) for n, a in model.items()), session=100 + i),
                tensors=[tensor(n, a) for n, a in model.items()],
            )
        )
    answers = [f.result(10) for f in [background(empty.initialize, r) for r in requests]]
    assert len({a.session for a in answers}) == 1
    assert sum(a.initialized for a in answers) == 1
    winner = answers[0].session - 100
    request = parameter_pb2.PullRequest(options=parameter_pb2.PullOptions(names=["w"]))
    (got,) = empty.parameter.Pull(request, timeout=5)
    assert (np.frombuffer(got.payload, "<f4") == winner).all()
    empty.channel.close()


# -- membership and control ------------------------------------------------------------------------


def test_joining(ready: Standard) -> None:
    answer = ready.join("worker:1", 9, session=0)
    assert (answer.session, answer.shard_index, answer.shard_count) == (SESSION, 0, 1)
    assert [v.name for v in answer.layout.variables] == ["w", "b", "d"]
    assert answer.lease_s == 30.0 and answer.roster.number > 0
    assert [m.worker for m in answer.roster.members] == ["worker:0", "worker:1"]
    for worker, incarnation, session, code, complaint in (
        ("worker:1", 8, SESSION, "ALREADY_EXISTS", "worker:1 is in this job already"),
        ("worker:2", 0, SESSION, "INVALID_ARGUMENT", "has no incarnation"),
        ("worker", 1, SESSION, "INVALID_ARGUMENT", "must be like 'worker:0'"),
        ("x" * 100_000, 1, SESSION, "INVALID_ARGUMENT", "must be like 'worker:0'"),
        ("worker:2", 1, SESSION + 1, "ABORTED", "restored from a checkpoint"),
    ):
        refused(code, complaint, partial(ready.join, worker, incarnation, session))
    assert ready.join("worker:1", 9).clock == 0
    beats = [parameter_pb2.HeartbeatRequest(caller=caller("worker:1", n)) for n in (9, 8)]
    ready.parameter.Heartbeat(beats[0], timeout=5)
    refused("ABORTED", "no member", lambda: ready.parameter.Heartbeat(beats[1], timeout=5))
    leave = parameter_pb2.LeaveRequest(caller=caller("worker:1", 9), reason="z" * 5000)
    for _ in range(2):
        ready.parameter.Leave(leave, timeout=5)
    gone = ready.status().roster.departed
    assert [(d.worker, d.reason) for d in gone] == [("worker:1", "z" * 200)]


def test_only_the_chief_commands(ready: Standard) -> None:
    other = control_pb2.Chief(holder="somebody", incarnation=2)
    claim = ready.control.Claim(control_pb2.ClaimRequest(chief=other), timeout=5)
    assert not claim.granted and claim.holder == "chief:0" and 0 < claim.lease_left_s <= 30
    for call in (
        lambda: ready.initialize(initial(chief=other)),
        lambda: ready.control.Restore(iter([control_pb2.RestoreRequest(chief=other)])),
        lambda: ready.control.Hold(control_pb2.HoldRequest(chief=other, cut=1, deadline_s=1)),
        lambda: ready.control.Cut(control_pb2.CutRequest(chief=other, cut=1)),
        lambda: list(ready.control.Snapshot(control_pb2.SnapshotRequest(chief=other, cut=1))),
        lambda: ready.control.Configure(control_pb2.ConfigureRequest(chief=other, last_step=1)),
        lambda: ready.control.Shutdown(control_pb2.ShutdownRequest(chief=other, now=True)),
    ):
        refused("PERMISSION_DENIED", "chief:0 is chief here .* somebody is not", call)
    ready.control.Claim(control_pb2.ClaimRequest(chief=CHIEF, release=True), timeout=5)
    assert ready.control.Claim(control_pb2.ClaimRequest(chief=other), timeout=5).granted
    refused(
        "INVALID_ARGUMENT",
        "a chief needs a name .* an incarnation",
        lambda: ready.control.Claim(control_pb2.ClaimRequest(), timeout=5),
    )


def test_control_calls_that_are_wrong(ready: Standard) -> None:
    hold = control_pb2.HoldRequest
    for deadline in (0, -1, 1e9, float("nan"), float("inf")):
        refused(
            "INVALID_ARGUMENT",
            "deadline_s must be between 0 and 60",
            partial(ready.control.Hold, hold(chief=CHIEF, cut=1, deadline_s=deadline)),
        )
    ready.control.Hold(hold(chief=CHIEF, cut=1, deadline_s=5), timeout=5)
    refused(
        "FAILED_PRECONDITION",
        "another checkpoint is being cut",
        lambda: ready.control.Hold(hold(chief=CHIEF, cut=2, deadline_s=5)),
    )
    refused(
        "FAILED_PRECONDITION",
        "the hold of this checkpoint has ended",
        lambda: ready.control.Cut(control_pb2.CutRequest(chief=CHIEF, cut=2)),
    )
    ready.control.Cut(control_pb2.CutRequest(chief=CHIEF, cut=1), timeout=5)
    snapshot = control_pb2.SnapshotRequest(chief=CHIEF, cut=1)
    messages = list(ready.control.Snapshot(snapshot, timeout=5))
    assert messages[-1].last and messages[0].state.session == SESSION
    refused("FAILED_PRECONDITION", "no such cut", lambda: list(ready.control.Snapshot(snapshot)))
    ready.push(push(*ONES, header=header()))
    for limit in (-1, -(1 << 63)):
        refused(
            "INVALID_ARGUMENT",
            "limit|last_step",
            partial(
                ready.control.Configure,
                control_pb2.ConfigureRequest(chief=CHIEF, last_step=limit),
            ),
        )
    ready.control.Configure(control_pb2.ConfigureRequest(chief=CHIEF, last_step=5), timeout=5)
    refused(
        "INVALID_ARGUMENT",
        "the limit cannot be lowered to 4, below 5",
        lambda: ready.control.Configure(
            control_pb2.ConfigureRequest(chief=CHIEF, last_step=4), timeout=5
        ),
    )


def test_a_push_waits_out_a_forgotten_hold(ready: Standard) -> None:
    """A chief that died between Hold and Cut stops nobody for longer than its deadline."""
    hold = control_pb2.HoldRequest(chief=CHIEF, cut=1, deadline_s=0.3)
    ready.control.Hold(hold, timeout=5)
    began = time.monotonic()
    assert ready.push(push(*ONES, header=header())).result.version == 1
    assert 0.2 < time.monotonic() - began < 3


def test_unknown_fields_are_passed_over(ready: Standard) -> None:
    """What a newer client says beside what we know does no harm."""
    message = push(*ONES, header=header()).SerializeToString()
    unknown = b"\xc2\x0c\x05hello"  # field 200, length-delimited
    raw: Any = ready.channel.stream_unary("/paramserver.v1.ParameterService/Push")
    assert unknown not in parameter_pb2.PushRequest.FromString(message).SerializeToString()
    for data in (message + unknown, unknown + message):
        answer = parameter_pb2.PushResponse.FromString(raw(iter([data]), timeout=5))
        assert answer.result.version == 1


def test_cluster_status_of_an_unknown_member(cluster: MakeCluster) -> None:
    job: Cluster = cluster(2)
    job.initialize({"a": np.zeros(1), "b": np.zeros(1)})
    other = Standard(job.addresses[1])
    session = job.status(1).session
    refused(
        "FAILED_PRECONDITION",
        "ps:1 takes no members; join at ps:0",
        lambda: other.join(session=session),
    )
    other.channel.close()
