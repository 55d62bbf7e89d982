"""A client of the published contract: gRPC, NumPy and stubs made from protos/, nothing of ours.

    PYTHONPATH=STUBS python standard_client.py ADDRESS...

Gives each shard a variable of its own, trains some steps over all of them, and reads exact values.
It shows what a client in any language has to do. Run by test_standard_client.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import paramserver
from paramserver.v1 import control_pb2 as ctl
from paramserver.v1 import control_pb2_grpc, job_pb2, parameter_pb2_grpc, tensor_pb2
from paramserver.v1 import parameter_pb2 as par

SESSION = 4711
WORKER, INCARNATION = "worker:3", 99
CHIEF = ctl.Chief(holder="somebody", incarnation=12)
RATE = 0.5


class Shard:
    """One server, and the variable that it holds."""

    def __init__(self, address: str, index: int) -> None:
        self.channel = grpc.insecure_channel(address)
        self.control = control_pb2_grpc.ControlServiceStub(self.channel)
        self.parameter = parameter_pb2_grpc.ParameterServiceStub(self.channel)
        self.index = index
        self.name = f"layer{index}/w"
        self.dtype = ("<f4", "<f8")[index % 2]
        self.value = np.arange(1000, dtype=self.dtype).reshape(20, 50)
        self.version = 0
        self.gradient = self.tensor(np.ones((20, 50)))

    def tensor(self, array: Any, start: int = 0, stop: int | None = None) -> tensor_pb2.Tensor:
        """A piece of an array of the variable's shape, by name."""
        return tensor_pb2.Tensor(
            name=self.name,
            dtype=tensor_pb2.D_TYPE_FLOAT32 if self.dtype == "<f4" else tensor_pb2.D_TYPE_FLOAT64,
            shape=array.shape,
            offset=start,
            data=array.reshape(-1)[start:stop].astype(self.dtype).tobytes(),
        )

    def initialize(self, count: int) -> None:
        """Gives it its variable, in two messages."""
        whole = self.tensor(self.value)
        job = job_pb2.Job(
            consistency=job_pb2.Consistency(mode=job_pb2.Consistency.MODE_ASYNC),
            optimizer=tensor_pb2.Optimizer(kind="sgd", hyper={"learning_rate": RATE}),
            last_step=6,
        )
        state = ctl.ShardState(
            session=SESSION,
            shard_index=self.index,
            shard_count=count,
            job=job,
            variables=[tensor_pb2.Variable(name=self.name, dtype=whole.dtype, shape=whole.shape)],
        )
        answer = self.control.Initialize(
            iter(
                [
                    ctl.InitializeRequest(
                        chief=CHIEF, state=state, tensors=[self.tensor(self.value, 0, 300)]
                    ),
                    ctl.InitializeRequest(tensors=[self.tensor(self.value, 300)], last=True),
                ]
            )
        )
        assert answer.initialized and answer.session == SESSION

    def caller(self, roster: job_pb2.Roster) -> par.Caller:
        """Who calls. Shards other than the first hear of its members from their clients."""
        return par.Caller(
            session=SESSION,
            worker=WORKER,
            incarnation=INCARNATION,
            roster=roster if self.index else None,
        )

    def header(self, sequence: int, step: int, roster: job_pb2.Roster) -> par.PushHeader:
        """The step that a push is."""
        return par.PushHeader(
            caller=self.caller(roster),
            sequence=sequence,
            clock=sequence - 1,
            step=step,
            pulled_version=self.version,
        )

    def read(self, messages: Any) -> int:
        """Checks what a pull brings; the step number that it grants."""
        flat = np.zeros(1000, self.dtype)
        step, covered = 0, 0
        for message in messages:
            if message.HasField("header"):
                step = message.header.step
                self.version = message.header.version
            at = 0
            for piece in message.ranges:
                values = np.frombuffer(message.payload, self.dtype, piece.count, at)
                flat[piece.offset : piece.offset + piece.count] = values
                at += values.nbytes
                covered += piece.count
            if message.last:
                break
        assert covered == 1000
        np.testing.assert_array_equal(flat.reshape(20, 50), self.value)
        return step


def main(addresses: list[str]) -> None:
    ours = {"client", "codec", "framing", "transport", "layout"}
    assert not ours & {p.stem for p in Path(paramserver.__path__[0]).iterdir()}
    shards = [Shard(address, index) for index, address in enumerate(addresses)]
    first = shards[0]

    # The first shard is initialised last: until then none can be joined.
    for shard in reversed(shards):
        shard.initialize(len(shards))
    joined = first.parameter.Join(
        par.JoinRequest(caller=par.Caller(session=SESSION, worker=WORKER, incarnation=INCARNATION))
    )
    assert (joined.shard_index, joined.shard_count, joined.clock) == (0, len(shards), 0)
    assert joined.layout.variables[0].name == first.name
    roster = joined.roster

    def pull(sequence: int) -> int:
        """All parameters as of so many steps; the number of the next one."""
        options = par.PullOptions(wait=True, clock=sequence)
        granted = [
            shard.read(
                shard.parameter.Pull(
                    par.PullRequest(caller=shard.caller(roster), options=options), timeout=10
                )
            )
            for shard in shards
        ]
        assert not any(granted[1:])
        return granted[0]

    gradient = np.ones((20, 50))
    # By name, whole.
    step = pull(0)
    for shard in shards:
        request = par.PushRequest(
            header=shard.header(1, step, roster), tensors=[shard.gradient], last=True
        )
        result = shard.parameter.Push(iter([request]), timeout=10).result
        assert result.applied and result.reason == par.PushResult.REASON_APPLIED
        # The same once more, as after a lost answer: it is not counted again.
        assert shard.parameter.Push(iter([request]), timeout=10).result == result
        shard.value = shard.value - RATE

    # By ranges of the layout, in four messages.
    step = pull(1)
    for shard in shards:
        flat = np.full(1000, 2.0).astype(shard.dtype)
        requests = [
            par.PushRequest(
                ranges=[tensor_pb2.Range(group=0, offset=at, count=250)],
                payload=flat[at : at + 250].tobytes(),
                last=at == 750,
            )
            for at in range(0, 1000, 250)
        ]
        requests[0].header.CopyFrom(shard.header(2, step, roster))
        assert shard.parameter.Push(iter(requests), timeout=10).result.version == 2
        shard.value = shard.value - RATE * 2

    # By name, in pieces.
    step = pull(2)
    for shard in shards:
        requests = [
            par.PushRequest(header=shard.header(3, step, roster)),
            par.PushRequest(tensors=[shard.tensor(gradient, 0, 1)]),
            par.PushRequest(tensors=[shard.tensor(gradient, 1)], last=True),
        ]
        assert shard.parameter.Push(iter(requests), timeout=10).result.version == 3
        shard.value = shard.value - RATE

    # What does not fit is refused by name, and the step may still be pushed.
    step = pull(3)
    wrong = shards[-1].tensor(gradient.reshape(50, 20))
    request = par.PushRequest(header=shards[-1].header(4, step, roster), tensors=[wrong], last=True)
    try:
        shards[-1].parameter.Push(iter([request]), timeout=10)
        raise AssertionError("a gradient of another shape was taken")
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "has shape (50, 20), variable has (20, 50)" in str(error.details())

    # Push and the next pull in one round trip.
    streams = []
    for shard in shards:
        turn = par.PushPullRequest(
            header=shard.header(4, step, roster),
            tensors=[shard.gradient],
            last=True,
            options=par.PullOptions(wait=True, clock=4),
        )
        streams.append(shard.parameter.PushPull(iter([turn]), timeout=10))
        shard.value = shard.value - RATE
    granted = [shard.read(stream) for shard, stream in zip(shards, streams, strict=True)]
    assert granted[0] == 5

    # A cut over all shards.
    for shard in shards:
        held = shard.control.Hold(ctl.HoldRequest(chief=CHIEF, cut=1, deadline_s=5.0))
        assert [(x.worker, x.sequence) for x in held.admitted] == [(WORKER, 4)]
    for shard in shards:
        cut = ctl.CutRequest(chief=CHIEF, cut=1, admit=held.admitted)
        assert shard.control.Cut(cut, timeout=10).version == 4
        messages = list(shard.control.Snapshot(ctl.SnapshotRequest(chief=CHIEF, cut=1)))
        assert messages[0].state.version == 4 and messages[-1].last
        payload = b"".join(message.payload for message in messages)
        np.testing.assert_array_equal(
            np.frombuffer(payload, shard.dtype).reshape(20, 50), shard.value
        )

    status = first.control.Status(ctl.StatusRequest())
    assert (status.global_step, status.version, status.job.last_step) == (4, 4, 6)
    assert [(w.worker, w.clock, w.sequence) for w in status.workers] == [(WORKER, 4, 4)]
    first.parameter.Heartbeat(par.HeartbeatRequest(caller=first.caller(roster)))
    left = first.parameter.Leave(par.LeaveRequest(caller=first.caller(roster), reason="done"))
    assert not left.roster.members and left.roster.departed[0].sequence == 4
    assert first.control.Claim(ctl.ClaimRequest(chief=CHIEF, release=True)).granted
    for shard in shards:
        shard.channel.close()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
