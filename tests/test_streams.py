"""Calls that stand still are ended: unused, stalled, unread, or of a worker that is gone."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import Cluster, wait_for

import paramserver as ps
from paramserver import transport
from paramserver.errors import ResourceExhaustedError
from paramserver.streams import Stream, Streams
from paramserver.v1 import (
    control_pb2,
    control_pb2_grpc,
    job_pb2,
    parameter_pb2,
    parameter_pb2_grpc,
)

LEASE = 0.4


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stream(clock: Clock, ended: list[Stream] | None = None, long_lived: bool = False) -> Stream:
    one = Stream(lambda: ended.append(one) if ended is not None else None, clock, long_lived)
    return one


def test_only_waiting_for_the_client_counts() -> None:
    clock = Clock()
    one = stream(clock)

    def messages() -> Iterator[int]:
        clock.now += 5  # the client takes so long
        assert one.stalled(clock.now, 4) and not one.stalled(clock.now, 6)
        yield 1

    for _ in one.reading(messages()):
        clock.now += 100  # and we so long, which is not its fault
        assert not one.stalled(clock.now, 4)


def test_between_turns_silence_is_no_stall() -> None:
    clock = Clock()
    one = stream(clock)
    one.at_rest = True

    def messages() -> Iterator[int]:
        clock.now += 100
        assert not one.stalled(clock.now, 4)
        yield 1

    assert list(one.reading(messages())) == [1]


def test_a_client_without_room_for_the_answer_stalls() -> None:
    clock = Clock()
    one = stream(clock)
    for _ in one.sending([1, 2]):
        clock.now += 5
        assert one.stalled(clock.now, 4)
    assert not one.stalled(clock.now + 100, 4)


def test_the_stalled_and_the_gone_are_ended_and_nobody_else() -> None:
    clock, ended, streams = Clock(), [], Streams(4)
    waiting, busy, gone, stays = (stream(clock, ended) for _ in range(4))
    gone.member, stays.member = ("worker:1", 1), ("worker:2", 2)
    for one in (waiting, busy, gone, stays):
        streams.add(one)
    never = waiting.reading(iter(queue.SimpleQueue().get, None))
    waiting._since = 0.0
    assert streams.end_stalled(5.0, 4.0) == 1 and ended == [waiting]
    streams.end_of(lambda member: member == ("worker:2", 2))
    assert ended == [waiting, gone]
    del never


def test_limits_name_the_option() -> None:
    clock, streams = Clock(), Streams(2)
    for _ in range(2):
        streams.add(stream(clock, long_lived=True))
    with pytest.raises(ResourceExhaustedError, match=r"2 streams are open.*--max-workers"):
        streams.add(stream(clock, long_lived=True))
    others = [stream(clock) for _ in range(4)]
    for one in others:
        streams.add(one)
    with pytest.raises(ResourceExhaustedError, match=r"6 calls are open.*--max-workers"):
        streams.add(stream(clock))
    streams.remove(others[0])
    streams.add(stream(clock))


# -- at a real server ------------------------------------------------------------------------------


class Raw:
    """Calls as a hostile or broken client makes them."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, transport.channel_options())
        self.parameter = parameter_pb2_grpc.ParameterServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)
        self._queues: list[queue.SimpleQueue[Any]] = []

    def requests(self, *first: Any) -> Iterator[Any]:
        """`first`, and then silence."""
        silent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for message in first:
            silent.put(message)
        self._queues.append(silent)
        return iter(silent.get, None)

    def close(self) -> None:
        for silent in self._queues:
            silent.put(None)
        self.channel.close()


@pytest.fixture
def raw(cluster: Callable[..., Cluster]) -> Iterator[tuple[Cluster, Raw]]:
    job = cluster(lease=LEASE, max_workers=4)
    job.initialize({"w": np.zeros(4, np.float32)})
    client = Raw(job.addresses[0])
    yield job, client
    client.close()


def ends(call: Any) -> grpc.StatusCode:
    """The status that a call ends with by itself."""
    wait_for(lambda: call.done() or None, "the call to be ended")
    code = call.code()
    assert isinstance(code, grpc.StatusCode)
    return code


@pytest.mark.parametrize("name", ["Push", "PushPull", "Initialize", "Restore"])
def test_a_stream_that_is_never_used_is_ended(raw: tuple[Cluster, Raw], name: str) -> None:
    job, client = raw
    stub = client.control if name in ("Initialize", "Restore") else client.parameter
    call = getattr(stub, name)
    requests = client.requests()
    started = call(requests) if name == "PushPull" else call.future(requests)
    assert ends(started) is grpc.StatusCode.CANCELLED
    wait_for(lambda: not job.servers[0].host.streams._open, "its thread to be free")


def test_unused_streams_do_not_keep_others_out_for_long(raw: tuple[Cluster, Raw]) -> None:
    job, client = raw
    calls = [client.parameter.Push.future(client.requests()) for _ in range(60)]
    codes = {ends(call) for call in calls}
    assert codes <= {grpc.StatusCode.CANCELLED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    worker = job.client("worker:0")
    worker.pull(timeout=5)
    assert worker.push({"w": np.ones(4, np.float32)}).applied


def test_a_push_that_stops_in_the_middle_is_ended(raw: tuple[Cluster, Raw]) -> None:
    job, client = raw
    caller = parameter_pb2.Caller(session=job.status().session, worker="worker:7", incarnation=7)
    client.parameter.Join(parameter_pb2.JoinRequest(caller=caller), timeout=5)
    begun = parameter_pb2.PushRequest(
        header=parameter_pb2.PushHeader(caller=caller, sequence=1), payload=bytes(8)
    )
    begun.ranges.add(group=0, offset=0, count=2)
    call = client.parameter.Push.future(client.requests(begun))
    assert ends(call) is grpc.StatusCode.CANCELLED
    assert job.status().version == 0
    wait_for(lambda: not job.status().bytes_in_flight, "the memory to be given back")


def test_an_answer_that_nobody_reads_is_given_up(cluster: Callable[..., Cluster]) -> None:
    job = cluster(lease=LEASE)
    job.initialize({"w": np.zeros(16 << 20, np.float32)})  # 64 MiB: more than any window holds
    client = Raw(job.addresses[0])
    call = client.parameter.Pull(parameter_pb2.PullRequest())
    assert next(call).header.version == 0
    # The call stays open on our side; the server lets go of the arrays it had pinned.
    wait_for(lambda: not job.servers[0].host.streams._open, "the server to give up")
    client.close()


def test_an_idle_stream_is_its_workers_as_long_as_that_lives(
    cluster: Callable[..., Cluster],
) -> None:
    job = cluster(lease=LEASE)
    job.initialize({"w": np.zeros(4, np.float32)})
    worker = job.client("worker:0")
    worker.pull()
    worker.push_pull({"w": np.ones(4, np.float32)})
    (stream,) = job.servers[0].host.streams._open
    looked = job.servers[0].host.now()
    wait_for(lambda: job.servers[0].host.now() > looked + 3 * LEASE, "three leases to pass")
    assert job.servers[0].host.streams._open == {stream}
    assert worker.push_pull({"w": np.ones(4, np.float32)})["w"][0] == -1.0


# -- what no ps:0 would say ------------------------------------------------------------------------


def roster(session: int, **changes: Any) -> Any:
    member = job_pb2.Member(worker="worker:0", incarnation=5)
    fields: dict[str, Any] = {"number": 9, "session": session, "members": [member], "open": True}
    return job_pb2.Roster(**{**fields, **changes})


BAD_ROSTERS: dict[str, dict[str, Any]] = {
    "a name that is none": {"members": [{"worker": "bad name!", "incarnation": 1}]},
    "a worker twice": {"members": [{"worker": "worker:0", "incarnation": i} for i in (1, 2)]},
    "a clock beyond counting": {
        "members": [{"worker": "a:0", "incarnation": 1, "clock": 2**63 - 1}]
    },
    "a negative clock": {"members": [{"worker": "worker:0", "incarnation": 1, "clock": -1}]},
    "a negative limit": {"last_step": -3},
    "a number beyond counting": {"number": 2**63 - 1},
    "rounds beyond counting": {"rounds": 2**63 - 1},
    "a departure of nobody": {"departed": [{"worker": "", "incarnation": 1}]},
}


@pytest.mark.parametrize("case", BAD_ROSTERS)
def test_a_roster_that_cannot_be_changes_nothing(
    cluster: Callable[..., Cluster], case: str
) -> None:
    job = cluster(2, lease=5.0)
    job.initialize({"v": np.zeros(2, np.float32), "w": np.zeros(4, np.float32)})
    client = Raw(job.addresses[1])
    before = job.status(1)
    bad = roster(before.session, **BAD_ROSTERS[case])
    with pytest.raises(grpc.RpcError) as caught:
        client.control.Status(control_pb2.StatusRequest(roster=bad), timeout=5)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    after = job.status(1)
    assert after.roster == before.roster and not after.workers
    assert job.servers[1].defect is None
    good = roster(before.session)
    client.control.Status(control_pb2.StatusRequest(roster=good), timeout=5)
    assert job.status(1).roster.number == 9
    client.close()


def test_rounds_that_were_never_played_cost_nothing(cluster: Callable[..., Cluster]) -> None:
    job = cluster(2, lease=5.0)
    variables = {"v": np.zeros(2, np.float32), "w": np.zeros(4, np.float32)}
    job.initialize(variables, consistency=ps.Sync(1))
    far = roster(job.status(1).session, rounds=1 << 61, members=[])
    client = Raw(job.addresses[1])
    client.control.Status(control_pb2.StatusRequest(roster=far), timeout=5)
    assert job.status(1).initialized  # and it answers still
    client.close()
