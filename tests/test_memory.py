"""What is given back: the memory of what has ended, and all that was noted of who has left."""

from __future__ import annotations

import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from conftest import Background, Cluster, MakeCluster, wait_for
from processes import Process, Processes
from shard_cases import frozen
from test_wire import Raw, has_fed, in_messages, stalling

import paramserver as ps
from paramserver.membership import KEPT_DEPARTURES
from paramserver.v1 import parameter_pb2 as pb

#: One variable of a megabyte: two messages and more.
MODEL = {"w": np.zeros(1 << 20, np.float32)}
GRADS = {"w": np.ones(1 << 20, np.float32)}


def current(server: ps.Server) -> Any:
    """A weak reference to the values now."""
    with server.host.reading() as shard:
        return weakref.ref(shard._params._buffers.flat[0][0].current.array)


def gone(reference: Callable[[], Any]) -> bool:
    gc.collect()
    return reference() is None


def test_a_worker_that_computes_holds_no_version(cluster: MakeCluster) -> None:
    """Its stream stays open between two turns; what it was sent on it is only its own."""
    job = cluster(lease=30.0)
    job.initialize(MODEL)
    (server,) = job.servers
    client, other = job.client("worker:0"), job.client("worker:1")
    assert client.push_pull(GRADS).version == 1
    sent = current(server)
    # While two versions are read there are buffers to spare; this one is the first to go.
    with server.host.reading() as shard:
        pins = [shard._params.pin(slots=False)]
    other.push(GRADS)
    with server.host.reading() as shard:
        pins.append(shard._params.pin(slots=False))
    other.push(GRADS)
    with server.host.reading() as shard:
        for pin in reversed(pins):
            shard.release(pin)
    del pin, pins
    assert job.status().bytes_held == 2 * MODEL["w"].nbytes
    wait_for(partial(gone, sent), "the version to be let go", 5)
    assert client.push_pull(GRADS).version == 4


def test_a_push_that_stands_still_gives_its_memory_back(
    cluster: MakeCluster, background: Background
) -> None:
    """It had to make way, and its client says nothing more, but that it is alive."""
    job = cluster(lease=0.6)
    job.initialize(MODEL)
    (server,) = job.servers
    messages = in_messages(server.host.need().layout, 1.0, 1 << 19)
    release = threading.Event()
    with Raw(job) as raw:
        pushing = background(raw.send, "push", stalling(messages, 4, release))
        wait_for(partial(has_fed, server), "the first of it")
        with server.host.reading() as shard:
            update = shard._params.writer
            assert update
            spare = weakref.ref(update.targets[0].spares[0].array)
            del update
        assert job.client("worker:1").push(GRADS).version == 1
        assert not gone(spare), "it is written into, for all that is known"

        def let_go() -> bool:
            raw.parameter.Heartbeat(pb.HeartbeatRequest(caller=raw.caller), timeout=5)
            return gone(spare)

        wait_for(let_go, "its call to be ended", 5, every=0.05)
        release.set()
        assert pushing.exception(10) is not None
        assert raw.send("push", messages).version == 2
    assert job.status().bytes_held == 2 * MODEL["w"].nbytes


def noted(job: Cluster) -> list[int]:
    """How much each server keeps in mind, its values and its list of departures aside."""
    sizes = []
    for server in job.servers:
        with server.host.reading() as shard:
            kept = {n: frozen(v) for n, v in vars(shard).items() if n not in ("roster", "_params")}
        host = frozen(server.host.waits), len(server.host.streams._open)
        sizes.append(len(pickle.dumps((kept, host))))
    return sizes


def test_nothing_is_kept_of_workers_that_came_and_went(cluster: MakeCluster) -> None:
    job = cluster(2, lease=30.0)
    job.initialize({"a": np.zeros(4), "b": np.zeros(4)})

    def come_and_go(numbers: range) -> list[int]:
        for i in numbers:
            with ps.Client(job.addresses, worker=f"worker:{i}", connect_timeout=10) as client:
                client.push({"a": np.ones(4)})
                client.push_pull({"b": np.ones(4)})
        wait_for(lambda: not job.status().workers, "the last to be gone")
        # The other shard hears of it with the next call.
        with ps.Client(job.addresses, worker="worker:0", connect_timeout=10) as client:
            client.push({})
            wait_for(lambda: len(job.status(1).workers) == 1, "the news")
            sizes = noted(job)
        return sizes

    before = come_and_go(range(1000, 1010))
    after = come_and_go(range(2000, 2050))
    for one, other in zip(before, after, strict=True):
        assert other < one * 1.02 + 50
    assert job.status().version == 60 * 2 + 2


def test_departures_are_listed_up_to_a_number(cluster: MakeCluster) -> None:
    job = cluster(lease=30.0)
    job.initialize({"a": np.zeros(4)})
    sizes = []
    messages = in_messages(job.servers[0].host.need().layout)
    with Raw(job) as raw:
        for i in range(2 * KEPT_DEPARTURES):
            raw.caller.worker, raw.caller.incarnation = f"worker:{1000 + i}", 7 + i
            raw.parameter.Join(pb.JoinRequest(caller=raw.caller), timeout=5)
            assert raw.send("push", messages).version == i + 1
            raw.parameter.Leave(pb.LeaveRequest(caller=raw.caller), timeout=5)
            if (i + 1) % KEPT_DEPARTURES == 0:
                sizes.append(job.status().ByteSize())
    assert len(job.status().roster.departed) == KEPT_DEPARTURES
    assert sizes[1] < sizes[0] * 1.02


def test_a_long_job_costs_no_more_than_a_short_one(processes: Processes) -> None:
    """Memory, threads and open files of a server and of its workers are level."""
    server, address = processes.ps("--log-level", "error")
    steps = 2000
    with ps.Client(address, connect_timeout=10) as client:
        client.initialize(
            {"w": np.zeros(25_000, np.float32)}, ps.optimizers.SGD(0.5), last_step=steps
        )
        script = str(Path(__file__).with_name("counting_worker.py"))
        workers = [processes.python(script, address, f"worker:{i}") for i in range(2)]
        everybody = [server, *workers]

        def at(step: int) -> list[tuple[int, int, int]]:
            wait_for(
                lambda: sum(len(worker.stdout) for worker in workers) >= step, "steps", every=0.002
            )
            return [footprint(process) for process in everybody]

        early, late = at(steps // 4), at(steps - steps // 8)
        for worker in workers:
            assert worker.wait(20) == 0, worker.output
        assert (client.pull(wait=False)["w"] == -0.5 * steps).all()
    for before, after in zip(early, late, strict=True):
        assert after[0] < before[0] * 1.1 + (2 << 20), (early, late)
        assert after[1] <= before[1] + 4 and after[2] <= before[2] + 2, (early, late)


def footprint(process: Process) -> tuple[int, int, int]:
    """Resident bytes, threads, open files."""
    folder = Path(f"/proc/{process.pid}")
    threads, files = (len(list((folder / each).iterdir())) for each in ("task", "fd"))
    return process.rss(), threads, files
