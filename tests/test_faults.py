"""What networks and processes do to a job: cut, swallow, freeze, kill. Every update counts once."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import Background, Cluster, MakeCluster, MakeProxy, wait_for
from fault_proxy import FaultProxy
from processes import Process, Processes

import paramserver as ps
from paramserver.control_client import ControlClient
from paramserver.errors import (
    AbortedError,
    DeadlineExceededError,
    NotInitializedError,
    ParamServerError,
    UnavailableError,
)
from paramserver.host import HostSettings
from paramserver.v1 import control_pb2

ZEROS = {"w": np.zeros(4, np.float32)}
ONES = {"w": np.ones(4, np.float32)}

#: Two variables, one for each of two shards; cut into 7 messages each at the limit below.
MODEL = {name: np.zeros(50_000, np.float32) for name in ("a", "b")}
GRADS = {name: np.ones(50_000, np.float32) for name in ("a", "b")}
MAX_MESSAGE = 1 << 16


def exact(params: ps.Params, version: int) -> bool:
    """Whether all elements are what `version` pushes of ones make of zeros."""
    return all((params[name] == -0.5 * version).all() for name in params)


def arrived(job: Cluster, version: int) -> bool:
    """Whether all shards have come to a version."""
    return all(job.status(i).version == version for i in range(len(job.servers)))


def behind(job: Cluster, proxy: MakeProxy) -> list[FaultProxy]:
    """A proxy for each shard."""
    return [proxy(address) for address in job.addresses]


# -- connections that are cut ----------------------------------------------------------------------


@pytest.mark.parametrize("call", ["push", "push_pull"])
@pytest.mark.parametrize("cut_shard", [0, 1])
def test_a_push_cut_anywhere_counts_once(
    cluster: MakeCluster, proxy: MakeProxy, call: str, cut_shard: int
) -> None:
    """At every message boundary and in between, on one of two shards."""
    job = cluster(2, lease=5.0, max_message=MAX_MESSAGE)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    client = job.client("worker:0", at=[x.address for x in lines])
    step = client.push if call == "push" else client.push_pull
    client.pull()
    line, before = lines[cut_shard], lines[cut_shard].forwarded["up"]
    step(GRADS)
    nbytes = line.forwarded["up"] - before
    assert nbytes > 200_000
    points = [nbytes * i // 16 for i in range(16)]
    for version, point in enumerate(points, start=2):
        cuts = line.cuts
        line.cut_after(point)
        step(GRADS)
        assert line.cuts == cuts + 1, "the cut came within this step"
        assert client.last_result and client.last_result.applied
        assert client.last_result.version == version
        assert [job.status(i).version for i in range(2)] == [version] * 2
    params = client.pull()
    assert params.versions == (17, 17) and exact(params, 17)
    assert not job.status().roster.departed, "it was a member all the time"


@pytest.mark.parametrize("call", ["push", "push_pull"])
def test_a_reply_that_is_lost(
    cluster: MakeCluster, proxy: MakeProxy, background: Background, call: str
) -> None:
    """The push is in, and nobody told its worker: it asks again, and it counts once."""
    job = cluster(2, lease=5.0)
    # Small: a larger one would need the server's word to go on.
    job.initialize({"a": np.zeros(4), "b": np.zeros(4)})
    grads = {"a": np.ones(4), "b": np.ones(4)}
    lines = behind(job, proxy)
    client = job.client("worker:0", at=[x.address for x in lines])
    client.pull()
    for version in range(1, 9):
        line = lines[version % 2]
        client.pull()
        line.blackhole("down")
        step = background(client.push if call == "push" else client.push_pull, grads)
        wait_for(partial(arrived, job, version), "the push to be in everywhere")
        assert not step.done()
        line.heal()
        step.result(10)
        assert client.last_result and client.last_result.version == version
        assert client.last_result.applied and client.last_result.global_step == version
    assert exact(client.pull(), 8)
    assert [job.status(i).counts["repeated"] for i in range(2)] == [4, 4]


def test_a_pull_cut_anywhere_is_made_again(cluster: MakeCluster, proxy: MakeProxy) -> None:
    job = cluster(2, lease=5.0, max_message=MAX_MESSAGE)
    rng = np.random.default_rng(0)
    model = {name: rng.standard_normal(50_000) for name in ("a", "b")}
    job.initialize(model)
    lines = behind(job, proxy)
    client = job.client("worker:0", at=[x.address for x in lines])
    for i in range(12):
        cuts = lines[i % 2].cuts
        lines[i % 2].cut_after(33_000 * i, "down")
        params = client.pull(wait=bool(i % 3))
        assert lines[i % 2].cuts == cuts + 1
        for name, array in model.items():
            np.testing.assert_array_equal(params[name], array)
    assert client.push(GRADS_64).applied


GRADS_64 = {name: np.ones(50_000) for name in ("a", "b")}


def test_joining_and_leaving_over_a_bad_line(cluster: MakeCluster, proxy: MakeProxy) -> None:
    """Cut at any point of its first and last calls: a member once, and gone in the end."""
    job = cluster(2, lease=0.5)
    job.initialize({**ZEROS, "b": np.zeros(1)})
    lines = behind(job, proxy)
    for i in range(6):
        lines[i % 2].cut_after(300 * i)
        with ps.Client([x.address for x in lines], worker="worker:0", connect_timeout=10) as client:
            assert client.pull().version == i
            assert client.push(ONES).version == i + 1
        lines[i % 2].heal()
    wait_for(lambda: not job.status().workers, "the last to be gone")


def test_a_slow_line(cluster: MakeCluster, proxy: MakeProxy) -> None:
    job = cluster(2, lease=5.0)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    for line in lines:
        line.delay(0.03)
    client = job.client("worker:0", at=[x.address for x in lines])
    params = client.pull()
    for _ in range(3):
        params = client.push_pull(GRADS)
    assert exact(params, 3)


def test_a_server_that_is_away_for_a_while(
    cluster: MakeCluster, proxy: MakeProxy, background: Background
) -> None:
    """Whether a call is under way or not: it goes on soon after the server is back."""
    job = cluster(2, lease=10.0)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    said: list[str] = []
    client = job.client("worker:0", at=[x.address for x in lines], on_wait=said.append)
    client.pull()
    lines[1].refuse()
    step = background(client.push_pull, GRADS)
    wait_for(lambda: lines[1].connections > 4, "several attempts")
    assert not step.done()
    assert any(re.match(r"waiting for ps:1 at 127\.0\.0\.1:\d+ \(", x) for x in said)
    lines[1].heal()
    began = time.monotonic()
    assert exact(step.result(10), 1)
    assert time.monotonic() - began < 4
    # Idle meanwhile.
    for line in lines:
        line.refuse()
        line.heal()
    began = time.monotonic()
    assert exact(client.push_pull(GRADS), 2)
    assert time.monotonic() - began < 4
    assert len(said) < 20, "it backs off"


def test_a_server_that_is_away_for_good(cluster: MakeCluster, proxy: MakeProxy) -> None:
    """The call ends with an error that names it, after the time that was given; no tight loop."""
    job = cluster(2, lease=1.0)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    client = job.client("worker:0", at=[x.address for x in lines], connect_timeout=0.8)
    for call in (client.push, client.push_pull, client.pull):
        client.pull()
        lines[1].refuse()
        tried, began = lines[1].connections, time.monotonic()
        with pytest.raises(UnavailableError, match=r"ps:1 at .*gave up after 0.8 s"):
            call(*(() if call == client.pull else (GRADS,)))
        assert 0.5 < time.monotonic() - began < 6
        assert lines[1].connections - tried < 40
        lines[1].heal()
    # Nobody knows whether those steps are in on ps:1; a new life of the worker goes on.
    params = client.pull()
    assert client.push_pull(GRADS).version == params.version + 1


# -- peers that fall silent ------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_line_that_swallows_everything(
    cluster: MakeCluster, proxy: MakeProxy, background: Background, direction: str
) -> None:
    """The call notices by keepalive, and is made again when the line is whole."""
    job = cluster(2, lease=5.0, keepalive=0.3)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    said: list[str] = []
    client = job.client(
        "worker:0", at=[x.address for x in lines], keepalive_s=0.3, on_wait=said.append
    )
    client.pull()
    for version, step in enumerate((client.push, client.push_pull), start=1):
        lines[1].blackhole("up" if direction == "up" else "down")
        waiting = background(step, GRADS)
        wait_for(lambda: said, "the client to notice", seconds=5)
        assert not waiting.done()
        lines[1].heal()
        waiting.result(10)
        said.clear()
        params = client.pull()
        assert params.versions == (version, version) and exact(params, version)


def test_a_deadline_holds_on_a_silent_line(cluster: MakeCluster, proxy: MakeProxy) -> None:
    job = cluster(1, lease=1.0)
    job.initialize(ZEROS)
    line = proxy(job.addresses[0])
    client = job.client("worker:0", at=[line.address])
    client.pull()
    line.blackhole()
    pulls: list[Callable[[], object]] = [
        partial(client.pull, timeout=0.5),
        partial(client.pull, wait=False, timeout=0.5),
    ]
    for call in pulls:
        began = time.monotonic()
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            call()
        assert time.monotonic() - began < 4
    line.heal()
    client.pull()
    for step in (client.push, client.push_pull):
        line.blackhole()
        began = time.monotonic()
        with pytest.raises((DeadlineExceededError, UnavailableError)):
            step(ONES, timeout=0.5)
        assert time.monotonic() - began < 5
        line.heal()
        client.pull()
    assert client.push(ONES).applied


def test_pings_do_not_get_a_client_thrown_out(
    cluster: MakeCluster, proxy: MakeProxy, background: Background
) -> None:
    """Neither in a long wait nor while it is idle, whatever the server's own idea of keepalive."""
    # No heartbeats in between, no pings of the server's: those would make up for the clients'.
    job = cluster(1, lease=60.0, keepalive=60.0)
    job.initialize(ZEROS, consistency=ps.Sync(workers=2))
    lines = [proxy(job.addresses[0]) for _ in range(2)]
    worker = job.client("worker:0", at=[lines[0].address], keepalive_s=0.25)
    reader = job.client(at=[lines[1].address], keepalive_s=0.25)
    waiting = background(worker.pull)
    reader.pull(wait=False)
    wait_for(lambda: job.status().waiting, "the pull to wait")
    before, ping = lines[1].forwarded["up"], 17
    wait_for(lambda: lines[1].forwarded["up"] >= before + 8 * ping, "pings, one a second")
    assert not waiting.done()
    job.client("worker:1").pull()
    assert waiting.result(10).version == 0
    reader.pull(wait=False)
    assert [line.connections for line in lines] == [1, 1]


def test_a_frozen_server(processes: Processes, background: Background) -> None:
    """The worker says so, and goes on after it thaws, with exact values."""
    process, address = processes.ps("--lease", "1", "--keepalive", "0.3")
    said: list[str] = []
    with ps.Client(
        address, worker="worker:0", connect_timeout=20, keepalive_s=0.3, on_wait=said.append
    ) as client:
        client.initialize(ZEROS, ps.optimizers.SGD(0.5))
        client.pull()
        client.push_pull(ONES)
        process.send(signal.SIGSTOP)
        try:
            waiting = background(client.push_pull, ONES)
            wait_for(lambda: said, "the client to notice", seconds=10)
            assert address in said[0]
            assert not waiting.done()
        finally:
            process.send(signal.SIGCONT)
        try:
            waiting.result(10)
        except AbortedError:
            assert "no member" in str(waiting.exception()), "its lease ended in the frost"
        params = client.pull()
        assert exact(params, params.version) and params.version in (1, 2)
        assert exact(client.push_pull(ONES), params.version + 1)


def test_a_frozen_worker(
    processes: Processes, cluster: MakeCluster, background: Background
) -> None:
    """The others go on without it. On waking it is told, and comes back as a new one."""
    job = cluster(2, lease=1.0)
    job.initialize({**ZEROS, "b": np.zeros(1)}, consistency=ps.Sync(workers=2), last_step=60)
    worker = start_worker(processes, job.addresses, 1)
    client = job.client("worker:0")
    params = client.pull()
    while params.version < 10:
        params = client.push_pull(ONES)
    worker.send(signal.SIGSTOP)
    try:
        while params.version < 20:
            params = client.push_pull(ONES)
        assert [d.worker for d in job.status().roster.departed] == ["worker:1"]
    finally:
        worker.send(signal.SIGCONT)
    worker.line("worker:1 is no member of this job")
    wait_for(lambda: len(job.status().workers) == 2, "it to come back")
    while not params.complete:
        params = client.push_pull(ONES)
    assert worker.wait(20) == 0
    assert params.version == 60 and params["w"].tolist() == [-30.0] * 4
    acks = acknowledged(worker)
    assert acks == sorted(set(acks)) and len(acks) < 60
    assert worker.stdout[-1] == "complete 60"


def test_a_worker_in_a_long_computation_is_alive(cluster: MakeCluster) -> None:
    """No call for many leases but the heartbeats of its own thread."""
    job = cluster(2, lease=0.3)
    job.initialize({**ZEROS, "b": np.zeros(1)})
    client = job.client("worker:0")
    params = client.pull()
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 1.2, seconds=5)
    assert [w.worker for w in job.status().workers] == ["worker:0"]
    assert client.push(ONES, params).applied


def test_shards_that_do_not_answer_cost_nobody_the_lease(
    cluster: MakeCluster, proxy: MakeProxy
) -> None:
    """While there is news for them that cannot be delivered, ps:0 still hears of the worker."""
    job = cluster(5, lease=0.9)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    client = job.client("worker:0", at=[x.address for x in lines])
    client.pull()
    for line in lines[1:]:
        line.blackhole()
    job.client("worker:1").pull()
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 3.0, seconds=5)
    assert [w.worker for w in job.status().workers] == ["worker:0", "worker:1"]
    for line in lines:
        line.heal()
    assert client.push(GRADS).applied


def test_a_member_through_every_reconnection(cluster: MakeCluster, proxy: MakeProxy) -> None:
    """A worker whose connections break all the time keeps its place."""
    job = cluster(2, lease=2.0)
    job.initialize({**ZEROS, "b": np.zeros(1)})
    lines = behind(job, proxy)
    client = job.client("worker:0", at=[x.address for x in lines])
    for version in range(10):
        for line in lines:
            line.reset()
        assert client.pull().version == version
        for line in lines:
            line.reset()
        assert client.push(ONES).version == version + 1
    assert not job.status().roster.departed


# -- steps that death cuts off ---------------------------------------------------------------------


@pytest.mark.parametrize("reached", [0, 1])
def test_a_step_that_reached_one_shard_only(
    cluster: MakeCluster, proxy: MakeProxy, background: Background, reached: int
) -> None:
    """Listed there, and version minus global_step says the same."""
    job = cluster(2, lease=0.5)
    job.initialize(MODEL)
    lines = behind(job, proxy)
    dying = job.client("worker:0", at=[x.address for x in lines], connect_timeout=1.0)
    other = job.client("worker:1")
    dying.pull()
    dying.push(GRADS)
    dying.pull()
    lines[1 - reached].blackhole("up")
    step = background(dying.push, GRADS)
    wait_for(lambda: job.status(reached).version == 2, "the step to reach one shard")
    for line in lines:
        line.refuse()
    wait_for(lambda: job.status().roster.departed, "its lease to end")
    with pytest.raises(ParamServerError):
        step.result(20)
    other.pull()
    params = other.push_pull(GRADS)
    statuses = [job.status(i) for i in range(2)]
    assert statuses[0].global_step == statuses[0].version == 2 + (reached == 0)
    assert not statuses[0].cut_off
    (cut,) = statuses[1].cut_off
    assert (cut.worker, cut.sequence, cut.delta) == ("worker:0", 2, 1 if reached else -1)
    assert statuses[1].version - statuses[0].global_step == cut.delta
    for name in params:
        holder = next(s for s in statuses if name in [v.name for v in s.layout.variables])
        assert (params[name] == -0.5 * holder.version).all()


# -- servers that come back empty ------------------------------------------------------------------


def restart(server: ps.Server, lease: float = 2.0) -> ps.Server:
    """Ends a server and starts another, empty one on its port."""
    server.stop()
    port = int(server.address.rpartition(":")[2])
    return ps.Server(port=port, settings=HostSettings(lease_s=lease))


def test_a_server_that_comes_back_empty(cluster: MakeCluster, background: Background) -> None:
    """Whoever waits there waits for a model again; what was computed before is refused."""
    job = cluster(1)
    job.initialize(ZEROS, consistency=ps.Sync(workers=2))
    said: list[str] = []
    first, second = job.client("worker:0", on_wait=said.append), job.client("worker:1")
    waiting = background(first.pull)
    wait_for(lambda: job.status().waiting, "the pull to wait")
    with restart(job.servers[0]):
        wait_for(lambda: any("not initialised yet" in x for x in said), "it to notice")
        assert not waiting.done()
        job.initialize(ZEROS, consistency=ps.Sync(workers=2))
        second.pull()
        params = waiting.result(10)
        assert params.version == 0
        first.push(ONES)
        assert second.push_pull(ONES)["w"].tolist() == [-0.5] * 4


@pytest.mark.parametrize("call", ["push", "push_pull"])
def test_a_push_to_a_server_that_came_back_empty(cluster: MakeCluster, call: str) -> None:
    """A clear refusal; never a fresh start in silence. After a restore it pulls and goes on."""
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(1)})
    client = job.client("worker:0")
    client.pull()
    client.push_pull(ONES)
    with restart(job.servers[1]) as server:
        with pytest.raises((AbortedError, NotInitializedError)):
            (client.push if call == "push" else client.push_pull)(ONES)
        with pytest.raises(ParamServerError, match=r"not initialised yet|different sessions"):
            job.client("worker:1", connect_timeout=0.5).pull()
        with pytest.raises(ParamServerError, match="lost a shard"):
            job.client().initialize({**ZEROS, "b": np.zeros(1)})
        assert not server.host.waiting()
        assert job.status(0).version in (1, 2)


# -- kill -9 ---------------------------------------------------------------------------------------


def start_worker(processes: Processes, addresses: list[str], index: int) -> Process:
    """tests/counting_worker.py as a process."""
    script = Path(__file__).with_name("counting_worker.py")
    return processes.python(str(script), ",".join(addresses), f"worker:{index}")


def acknowledged(worker: Process) -> list[int]:
    """The shard versions that its pushes were acknowledged with."""
    return [int(line.split()[1]) for line in list(worker.stdout) if line.startswith("ack")]


@pytest.mark.parametrize(
    ("consistency", "steps_between"), [(ps.Sync(workers=3), 4), (ps.Async(), 60)]
)
def test_twenty_kills(
    processes: Processes, consistency: ps.Sync | ps.Async, steps_between: int
) -> None:
    """Random workers die at random moments, each replaced at once, on two shards. The job ends at
    exactly its limit, and each acknowledged step is in, once, everywhere."""
    job_with_kills(processes, consistency, steps_between, random.Random(0))


def job_with_kills(
    processes: Processes,
    consistency: ps.Sync | ps.Async,
    steps_between: int,
    rng: random.Random,
    kills: int = 20,
    elements: int = 20_000,
) -> list[control_pb2.StatusResponse]:
    """Runs it, and checks all of it; what the shards said of themselves in the end."""
    limit = (kills + 1) * steps_between
    servers = [processes.ps("--lease", "0.5", "--log-level", "warning") for _ in range(2)]
    addresses = [address for _, address in servers]
    small = {name: np.zeros(elements, np.float32) for name in ("a", "b")}
    with ps.Client(addresses, connect_timeout=20) as reader:
        reader.initialize(small, ps.optimizers.SGD(0.5), consistency, last_step=limit)
        with ControlClient(addresses, "watcher") as watcher:
            watcher.survey()

            def status(shard: int = 0) -> control_pb2.StatusResponse:
                answer = watcher.look()[shard]
                assert isinstance(answer, control_pb2.StatusResponse), answer
                return answer

            def beyond(moment: float) -> bool:
                return status().global_step >= moment

            running = {i: start_worker(processes, addresses, i) for i in range(3)}
            lives = list(running.values())
            for kill in range(kills):
                moment = (kill + rng.random()) * steps_between
                wait_for(partial(beyond, moment), "progress", 30, every=0.02)
                busy = wait_for(
                    lambda: [i for i, w in running.items() if acknowledged(w)], every=0.02
                )
                victim = rng.choice(busy)
                running[victim].kill()
                running[victim] = start_worker(processes, addresses, victim)
                lives.append(running[victim])
            for worker in running.values():
                assert worker.wait(30) == 0, worker.output
                assert worker.stdout[-1] == f"complete {limit}"
            for worker in lives:
                assert not worker.stderr or "Traceback" not in worker.output, worker.output
            statuses = [status(i) for i in range(2)]
        params = reader.pull(wait=False)
    assert statuses[0].global_step == statuses[0].version == limit
    for shard in statuses:
        assert shard.version - limit == sum(step.delta for step in shard.cut_off)
        (variable,) = shard.layout.variables
        assert (params[variable.name] == -0.5 * shard.version).all()
    acks = [acknowledged(worker) for worker in lives]
    if isinstance(consistency, ps.Sync):
        # Each is in another round; the rounds that nobody lived to tell of are few.
        assert all(own == sorted(set(own)) for own in acks)
        told = {version for own in acks for version in own}
        assert told <= set(range(1, limit + 1)) and limit - len(told) <= kills
    else:
        told_once = [version for own in acks for version in own]
        assert len(told_once) == len(set(told_once))
        assert 0 <= limit - len(told_once) <= kills
    return statuses
