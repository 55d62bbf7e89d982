"""The chief over real servers: what it starts, adopts and brings back, saves, and ends.

The counting model: `w` starts at 0 and every applied step takes exactly 0.5 off each element, so
`w` and global_step must agree at any time, whatever was killed meanwhile.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from conftest import Background, Cluster, MakeCluster, MakeProxy, wait_for

import paramserver as ps
from chief import assemble
from chief.checkpoint import Checkpoint, list_checkpoints, load
from chief.files import Files, Lock
from chief.flags import Settings
from chief.starter import Started, Stopped
from chief.supervisor import Supervisor
from paramserver import framing, transport
from paramserver.control_client import ControlClient
from paramserver.errors import (
    AbortedError,
    AlreadyExistsError,
    CheckpointError,
    ConfigError,
    FailedPreconditionError,
    NotInitializedError,
    ParamServerError,
    PermissionDeniedError,
    UnavailableError,
)
from paramserver.v1 import control_pb2 as pb
from paramserver.v1 import parameter_pb2

Arrays = Mapping[str, npt.NDArray[Any]]

LEASE_S = 0.5
COUNTING: Arrays = {"w": np.zeros(4, np.float32)}
TWO: Arrays = {"a": np.zeros(4, np.float32), "b": np.zeros((2, 3), np.float32)}


def ones(arrays: Arrays) -> dict[str, npt.NDArray[Any]]:
    return {name: np.ones_like(array) for name, array in arrays.items()}


class Chief:
    """A supervisor with its control client, its run in a thread."""

    def __init__(
        self,
        job: Cluster,
        background: Background,
        settings: Settings,
        init: Arrays = COUNTING,
        **options: Any,
    ) -> None:
        self.control = job.control("chief:0", connect_timeout=options.pop("connect_timeout", 10.0))
        self.supervisor = Supervisor(self.control, settings, lambda: init, **options)
        self.settings = settings
        self._background = background
        self.running: Future[bool] | None = None

    def start(self) -> Started:
        """Starts, and runs in a thread."""
        started = self.supervisor.start()
        self.running = self._background(self.supervisor.run)
        return started

    def end(self) -> bool:
        """Waits for the end of `run`, and gives up being chief."""
        assert self.running
        try:
            return self.running.result(20)
        finally:
            self.control.close()

    def stop(self) -> None:
        """Ends the chief; the job goes on."""
        self.supervisor.stop()
        assert self.running and self.end() is False


MakeChief = Callable[..., Chief]


@pytest.fixture
def chief(background: Background, tmp_path: Path) -> Iterator[MakeChief]:
    """Makes chiefs that save into tmp_path/ckpt: `chief(job, last_step=100)`. Stops them."""
    made: list[Chief] = []

    def make(
        job: Cluster,
        init: Arrays = COUNTING,
        *,
        options: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> Chief:
        given = {
            "optimizer": ps.optimizers.SGD(0.5),
            "checkpoint_dir": tmp_path / "ckpt",
            **settings,
        }
        made.append(Chief(job, background, Settings(**given), init, **(options or {})))
        return made[-1]

    yield make
    for one in made:
        one.supervisor.stop()
    for one in made:
        if one.running:
            with suppress(ParamServerError):
                one.running.result(20)


Restart = Callable[[Cluster, int], None]


@pytest.fixture
def restart() -> Iterator[Restart]:
    """Kills a shard, and starts an empty one on the same port."""
    with ExitStack() as stack:

        def again(job: Cluster, shard: int) -> None:
            old = job.servers[shard]
            old.stop()
            port = int(old.address.rpartition(":")[2])
            again = ps.Server(port, settings=old.host.settings)
            job.servers[shard] = stack.enter_context(again)

        yield again


def train(client: ps.Client, steps: int | None = None, grad: Arrays | None = None) -> ps.Params:
    """Pushes ones (or `grad`): `steps` steps that count, or until the job is over."""
    counted = 0
    params = client.pull(timeout=20)
    while not params.complete and (steps is None or counted < steps):
        try:
            params = client.push_pull(grad or ones(params), timeout=20)
        except (AbortedError, NotInitializedError):
            params = client.pull(timeout=20)
        else:
            counted += bool(client.last_result and client.last_result.applied)
    return params


def steps_in(folder: Path) -> list[int]:
    """The steps that are saved, ascending."""
    return sorted(stored.global_step for stored in list_checkpoints(folder))


def newest(folder: Path) -> Checkpoint:
    return load(list_checkpoints(folder)[0].path)


def in_hand(control: ControlClient) -> Checkpoint:
    """What the shards hold now."""
    control.survey()
    return assemble.merge(control.snapshot(5.0))


def all_of(checkpoint: Checkpoint) -> object:
    """The arrays of a checkpoint, bit by bit, and the update counts."""
    return {
        name: (
            saved.value.tobytes(),
            {slot: array.tobytes() for slot, array in saved.slots.items()},
            saved.updates,
        )
        for name, saved in checkpoint.variables.items()
    }


# -- a job from its beginning to its end -----------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_a_job_from_its_beginning_to_its_end(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, shards: int
) -> None:
    job = cluster(shards, lease=LEASE_S)
    boss = chief(job, TWO, last_step=20)
    assert str(boss.start()) == f"chief of {shards} ps, initialized at step 0"
    assert steps_in(tmp_path / "ckpt") == [0]
    with job.client("worker:0") as worker:
        params = train(worker)
    assert boss.end()
    assert params.complete and params.version == 20
    assert all((params[name] == -10).all() for name in TWO)
    last = newest(tmp_path / "ckpt")
    assert last.global_step == 20 and (last.variables["b"].value == -10).all()
    assert all(server.host.finished.wait(5) for server in job.servers)
    assert job.status().chief == ""


def test_without_a_folder_nothing_is_saved(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=5, checkpoint_dir=None)
    boss.start()
    with job.client("worker:0") as worker:
        assert train(worker).version == 5
    assert boss.end() and not list(tmp_path.iterdir())


def test_the_chief_is_last_and_waits_for_who_still_computes(
    cluster: MakeCluster, chief: MakeChief, background: Background, tmp_path: Path
) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, workers=2, last_step=6)
    boss.start()
    slow = job.client("worker:1")
    slow.pull()  # and computes on, alive, until after the end
    with job.client("worker:0") as worker:
        finishing = background(train, worker)
        wait_for(lambda: job.status().global_step == 5)
        assert slow.push(ones(TWO)).applied
        assert finishing.result(20).complete
    wait_for(lambda: steps_in(tmp_path / "ckpt") == [0, 6])
    late = job.client("worker:2")
    wait_for(lambda: not job.status().workers or job.status().workers[0].worker == "worker:1")
    assert not boss.running.done()
    assert late.pull().complete
    late.close()
    assert slow.pull().complete
    assert boss.end()


# -- trial 18, 27: the limit ---------------------------------------------------------------------


def test_a_job_goes_on_where_it_was_and_ends_exactly(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen = []
    for limit, what, begin, end in (
        (100, "initialized", 0, 100),
        (150, "restored", 100, 150),
        (150, "restored", 150, 150),
        (120, "restored", 150, 150),
    ):
        caplog.clear()
        job = cluster(lease=LEASE_S)
        boss = chief(job, last_step=limit)
        started = boss.start()
        assert (started.what, started.step) == (what, begin)
        with job.client("worker:0") as worker:
            params = train(worker)
        assert boss.end()
        assert params.complete and params.version == end
        assert params["w"].tolist() == [-end / 2] * 4
        assert f"the limit is reached: step {end} of {limit}" in caplog.text
        seen.append(steps_in(tmp_path / "ckpt"))
    assert seen == [[0, 100], [0, 100, 150], [0, 100, 150], [0, 100, 150]]


def test_a_job_that_was_over_already_ends_at_once(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=3)
    boss.start()
    with job.client("worker:0") as worker:
        train(worker)
    assert boss.end()
    for servers in (job, cluster(lease=LEASE_S)):  # the job still there, and from the folder
        boss = chief(servers, last_step=3)
        assert boss.start().step == 3
        assert boss.end()
        assert servers.servers[0].host.finished.is_set()
    assert newest(tmp_path / "ckpt").global_step == 3


@pytest.mark.parametrize("rule", [ps.Async(), ps.Sync(3)])
def test_the_limit_is_met_exactly_with_three_workers(
    cluster: MakeCluster,
    chief: MakeChief,
    background: Background,
    tmp_path: Path,
    rule: ps.Async | ps.Sync,
) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, workers=3, last_step=20, consistency=rule)
    boss.start()

    def work(index: int) -> ps.Params:
        with job.client(f"worker:{index}") as worker:
            return train(worker)

    for finished in [background(work, i) for i in range(3)]:
        params = finished.result(20)
        assert params.version == 20 and (params["a"] == -10).all()
    assert boss.end()
    assert newest(tmp_path / "ckpt").global_step == 20


# -- trial 19, 20, 22: what comes back -----------------------------------------------------------


def gradient(step: int) -> dict[str, npt.NDArray[np.float32]]:
    rng = np.random.default_rng(step)
    return {
        "a": rng.standard_normal((10, 4)).astype(np.float32),
        "b": rng.standard_normal(3).astype(np.float32),
    }


MODEL: Arrays = {"a": np.ones((10, 4), np.float32), "b": np.ones(3, np.float32)}


def run_steps(job: Cluster, first: int, last: int) -> None:
    """Steps `first` to `last` of one worker, each with its own gradient; then it leaves."""
    with job.client("worker:0") as worker:
        for step in range(first, last + 1):
            assert worker.pull().version == step - 1
            assert worker.push(gradient(step)).applied


@pytest.mark.parametrize(
    "rule",
    [
        ps.optimizers.SGD(0.1),
        ps.optimizers.Momentum(0.1, 0.9),
        ps.optimizers.Momentum(0.1, 0.9, nesterov=True),
        ps.optimizers.Adam(0.1),
    ],
    ids=lambda rule: rule.kind,
)
def test_steps_with_a_restart_between_equal_steps_without(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, rule: ps.optimizers.Optimizer
) -> None:
    def run(folder: str, *limits: int) -> Checkpoint:
        done = 0
        for limit in limits:
            job = cluster(2, lease=LEASE_S)
            boss = chief(
                job, MODEL, optimizer=rule, last_step=limit, checkpoint_dir=tmp_path / folder
            )
            boss.start()
            run_steps(job, done + 1, limit)
            assert boss.end()
            done = limit
        return newest(tmp_path / folder)

    assert all_of(run("straight", 6)) == all_of(run("interrupted", 3, 6))


@pytest.mark.parametrize(("shards", "workers"), [(1, 1), (3, 5), (2, 3)])
def test_another_number_of_shards_and_workers_takes_over_everything(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, shards: int, workers: int
) -> None:
    adam = {"optimizer": ps.optimizers.Adam(0.1)}
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, MODEL, workers=3, last_step=20, **adam)
    boss.start()
    run_steps(job, 1, 20)
    assert boss.end()
    saved = newest(tmp_path / "ckpt")

    job = cluster(shards, lease=LEASE_S)
    boss = chief(job, MODEL, workers=workers, last_step=40, consistency=ps.Sync(workers), **adam)
    assert boss.start() == Started("restored", 20, shards)
    held = in_hand(boss.control)
    assert all_of(held) == all_of(saved) and held.global_step == 20
    assert [job.status(i).version for i in range(shards)] == [20] * shards
    assert not job.status().workers
    boss.stop()


def test_another_optimizer_starts_with_fresh_slots(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The documented rule: weights restored, slots fresh, with a warning; the same kind with
    another rate keeps its slots and uses the new rate."""
    rules: list[tuple[ps.optimizers.Optimizer, list[int], bool]] = [
        (ps.optimizers.Adam(0.1), [3, 3], False),
        (ps.optimizers.SGD(0.1), [3, 3], True),
        (ps.optimizers.Momentum(0.1), [3, 3], True),
        (ps.optimizers.Adam(0.1), [3, 3], True),
        (ps.optimizers.Adam(0.25), [6, 6], False),
    ]
    values = {name: [array.copy()] for name, array in MODEL.items()}
    slots: dict[str, Any] = {}
    done = 0
    for rule, updates, warned in rules:
        caplog.clear()
        job = cluster(2, lease=LEASE_S)
        boss = chief(job, MODEL, optimizer=rule, last_step=done + 3)
        boss.start()
        assert ("slots start afresh" in caplog.text) is warned
        run_steps(job, done + 1, done + 3)
        assert boss.end()
        last = newest(tmp_path / "ckpt")
        assert [last.variables[name].updates for name in MODEL] == updates
        for name, history in values.items():
            own = [slots[name, s] for s in rule.slots] if updates[0] > 3 else None
            own = own or list(ps.optimizers.new_slots(rule, history[-1]))
            value = history[-1]
            for t in (1, 2, 3):
                value, fresh = ps.optimizers.step(
                    rule, updates[0] - 3 + t, gradient(done + t)[name], value, own
                )
                own = list(fresh)
            history.append(value)
            slots.update({(name, s): array for s, array in zip(rule.slots, own, strict=True)})
            assert last.variables[name].value.tobytes() == value.tobytes()
            assert last.variables[name].slots.keys() == set(rule.slots)
        done += 3


# -- trial 21: when to save, how many to keep ----------------------------------------------------


def test_the_last_k_stay_across_restarts(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    folder = tmp_path / "ckpt"
    folder.mkdir()
    (folder / "notes.txt").write_text("not ours")

    def run(first: int, limit: int, keep: int) -> list[int]:
        job = cluster(lease=LEASE_S)
        boss = chief(job, last_step=limit, save_steps=10, keep=keep)
        boss.start()
        with job.client("worker:0") as worker:
            for step in range(first + 10, limit + 1, 10):
                train(worker, 10)
                wait_for(lambda step=step: step in steps_in(folder), f"step {step}")
        assert boss.end()
        return steps_in(folder)

    assert run(0, 40, keep=3) == [20, 30, 40]
    assert run(40, 70, keep=3) == [50, 60, 70]
    assert run(70, 80, keep=2) == [70, 80]
    assert run(80, 90, keep=0) == [70, 80, 90]
    assert (folder / "notes.txt").read_text() == "not ours"


@pytest.mark.parametrize("rule", [ps.Async(), ps.Sync(2)])
def test_saves_are_cut_at_multiples_where_the_order_is_known(
    cluster: MakeCluster,
    chief: MakeChief,
    background: Background,
    tmp_path: Path,
    rule: ps.Async | ps.Sync,
) -> None:
    workers = getattr(rule, "workers", 1)
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, workers=workers, last_step=407, consistency=rule, save_steps=20, keep=0)
    boss.start()
    clients = [job.client(f"worker:{i}") for i in range(workers)]
    # Some steps at a walk, so that the chief learns the pace; then at a run.
    walking = [background(train, client, 15) for client in clients]
    for walk in walking:
        walk.result(20)
    running = [background(train, client) for client in clients]
    for run in running:
        assert run.result(30).complete
    for client in clients:
        client.close()
    assert boss.end()
    *between, last = steps_in(tmp_path / "ckpt")
    assert last == 407 and len(between) > 1
    late = [step for step in between if step % 20]
    assert len(late) <= 1, between  # the first may be: the pace was not known
    for stored in list_checkpoints(tmp_path / "ckpt"):
        assert (load(stored.path).variables["a"].value == -stored.global_step / 2).all()


def test_saves_come_by_the_clock_and_only_if_something_is_new(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=0, save_secs=0.05)
    boss.start()
    folder = tmp_path / "ckpt"
    with job.client("worker:0") as worker:
        for step in range(1, 4):
            train(worker, 1)
            wait_for(lambda step=step: steps_in(folder)[-1] == step)
        before = steps_in(folder)
        wait_for(lambda: boss.control.look() and job.status().uptime_s > 1.0)
        assert steps_in(folder) == before
    boss.stop()


# -- trial 40: more shards than variables --------------------------------------------------------


def test_shards_without_variables_take_part(
    cluster: MakeCluster, chief: MakeChief, background: Background, tmp_path: Path
) -> None:
    def work(job: Cluster, index: int, steps: int | None) -> ps.Params:
        with job.client(f"worker:{index}") as worker:
            return train(worker, steps)

    for limit, begin in ((5, 0), (10, 5)):
        job = cluster(5, lease=LEASE_S)
        boss = chief(job, TWO, workers=2, consistency=ps.Sync(2), last_step=limit)
        assert boss.start().step == begin
        for finished in [background(work, job, i, None) for i in range(2)]:
            assert (finished.result(20)["b"] == -limit / 2).all()
        assert [len(job.status(i).layout.variables) for i in range(5)] == [1, 1, 0, 0, 0]
        assert [job.status(i).version for i in range(5)] == [limit] * 5
        assert boss.end()
        assert all(server.host.finished.wait(5) for server in job.servers)
    assert newest(tmp_path / "ckpt").global_step == 10


# -- trial 42: lost shards -----------------------------------------------------------------------


@pytest.mark.parametrize(("shards", "lost"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])])
def test_a_lost_shard_takes_all_back_to_the_checkpoint(
    cluster: MakeCluster,
    chief: MakeChief,
    background: Background,
    restart: Restart,
    tmp_path: Path,
    shards: int,
    lost: list[int],
) -> None:
    job = cluster(shards, lease=LEASE_S)
    boss = chief(job, TWO, last_step=40, save_steps=10)
    boss.start()
    worker = job.client("worker:0")
    train(worker, 20)
    wait_for(lambda: 20 in steps_in(tmp_path / "ckpt"))
    train(worker, 5)
    session = job.status().session
    for shard in lost:
        restart(job, shard)
    params = train(worker)
    assert params.complete and params.version == 40
    assert all((params[name] == -20).all() for name in TWO)
    worker.close()
    assert boss.end()
    assert job.status().session != session
    assert (newest(tmp_path / "ckpt").variables["a"].value == -20).all()


def test_somebody_elses_claim_on_an_empty_shard_is_waited_out(
    cluster: MakeCluster, chief: MakeChief, restart: Restart
) -> None:
    """A second chief, before ps:0 refuses it; or one that died just then."""
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, last_step=5)
    boss.start()
    restart(job, 1)
    with transport.make_channel(job.addresses[1]) as channel:
        other = pb.Chief(holder="chief:0 on elsewhere, process 7", incarnation=7)
        transport.ControlStub(channel).Claim(pb.ClaimRequest(chief=other), timeout=5)
    with job.client("worker:0") as worker:
        assert train(worker).version == 5
    assert boss.end()


def test_a_synchronous_job_awaits_its_workers_again_after_a_loss(
    cluster: MakeCluster,
    chief: MakeChief,
    background: Background,
    restart: Restart,
    tmp_path: Path,
) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, workers=2, last_step=20, consistency=ps.Sync(2), save_steps=10)
    boss.start()
    clients = [job.client(f"worker:{i}") for i in range(2)]
    for finished in [background(train, client, 10) for client in clients]:
        finished.result(20)
    wait_for(lambda: 10 in steps_in(tmp_path / "ckpt"))
    assert [m["worker"] for m in newest(tmp_path / "ckpt").members] == ["worker:0", "worker:1"]
    restart(job, 1)
    early = background(train, clients[0])
    waiting = wait_for(
        lambda: [w for w in job.status().waiting if "first round" in w], "the barrier"
    )
    assert "worker:1" in waiting[0]
    assert train(clients[1]).version == 20
    assert early.result(20).complete
    for client in clients:
        client.close()
    assert boss.end()


def test_without_a_checkpoint_a_lost_shard_is_the_end(
    cluster: MakeCluster, chief: MakeChief, restart: Restart
) -> None:
    for shards, lost in ((1, 0), (2, 0), (2, 1)):
        job = cluster(shards, lease=LEASE_S)
        boss = chief(job, TWO, last_step=40, checkpoint_dir=None)
        boss.start()
        with job.client("worker:0") as worker:
            train(worker, 5)
            wait_for(lambda boss=boss: boss.supervisor.step == 5)
        restart(job, lost)
        address = job.addresses[lost]
        with pytest.raises(FailedPreconditionError) as caught:
            boss.end()
        assert "lost at step 5" in str(caught.value) and address in str(caught.value)
        assert "no --checkpoint-dir" in str(caught.value)
        # The next chief does not start afresh either, as long as somebody remembers.
        if shards == 2:
            with pytest.raises(FailedPreconditionError, match="nothing to restore from"):
                chief(job, TWO, last_step=40, checkpoint_dir=None).start()


def test_before_anything_was_trained_a_lost_shard_is_made_anew(
    cluster: MakeCluster, chief: MakeChief, restart: Restart
) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, last_step=3, checkpoint_dir=None)
    boss.start()
    session = job.status().session
    restart(job, 1)
    wait_for(lambda: job.status().session != session)
    with job.client("worker:0") as worker:
        assert train(worker).version == 3
    assert boss.end()


def test_a_shard_that_is_away_is_waited_for_by_name(
    cluster: MakeCluster, chief: MakeChief, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, options={"connect_timeout": 0.5})
    boss.start()
    job.servers[1].stop()
    with pytest.raises(UnavailableError) as caught:
        boss.end()
    assert job.addresses[1] in str(caught.value) and "0.5 s" in str(caught.value)
    assert f"waiting for ps:1 at {job.addresses[1]} (connection refused)" in caplog.text


def test_a_step_that_a_death_cut_off_stays_listed(
    cluster: MakeCluster,
    chief: MakeChief,
    background: Background,
    restart: Restart,
    proxy: MakeProxy,
    tmp_path: Path,
) -> None:
    """Also in the checkpoint, and after going back to it. The save waits for no dead worker."""
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, workers=2, last_step=40, save_steps=10)
    boss.start()
    line = proxy(job.addresses[0])
    dying = job.client("worker:1", at=[line.address, job.addresses[1]])
    dying.pull()
    line.blackhole("up")
    dead = background(dying.push, ones(TWO))
    wait_for(lambda: [w.sequence for w in job.status(1).workers] == [1], "half a step")
    worker = job.client("worker:0")
    train(worker, 10)
    wait_for(lambda: 10 in steps_in(tmp_path / "ckpt"), "the save")
    saved = newest(tmp_path / "ckpt")
    assert [(s["version"], [c["delta"] for c in s["cut_off"]]) for s in saved.shards] == [
        (10, []),
        (11, [1]),
    ]
    assert (saved.variables["a"].value == -5).all() != (saved.variables["b"].value == -5).all()
    dying.close()
    assert isinstance(dead.exception(20), ParamServerError)
    session = job.status().session
    restart(job, 0)
    wait_for(lambda: job.status().session not in (0, session), "the restore")
    assert [job.status(i).version for i in range(2)] == [10, 11]
    assert [(c.worker, c.delta) for c in job.status(1).cut_off] == [("worker:1", 1)]
    assert train(worker).versions == (40, 41)
    worker.close()
    assert boss.end()


# -- which of the three --------------------------------------------------------------------------


def test_the_job_of_a_dead_chief_is_adopted(
    cluster: MakeCluster, chief: MakeChief, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, last_step=20)
    boss.start()
    worker = job.client("worker:0")
    train(worker, 5)
    boss.stop()
    channel = transport.make_channel(job.addresses[0])
    dead = pb.Chief(holder="chief:0 on elsewhere, process 7", incarnation=7)
    assert transport.ControlStub(channel).Claim(pb.ClaimRequest(chief=dead), timeout=5).granted
    channel.close()
    second = chief(job, TWO, last_step=30, optimizer=ps.optimizers.SGD(9.0))
    assert second.start() == Started("adopted", 5, 2)
    assert "waiting for an earlier claim to end" in caplog.text and "process 7" in caplog.text
    assert "the running job has kind=sgd, hyper=learning_rate=0.5" in caplog.text
    assert train(worker).version == 30  # the limit was raised
    assert (worker.pull(wait=False)["a"] == -15).all()  # the rate was not changed
    worker.close()
    assert second.end()


def test_a_limit_is_never_lowered(
    cluster: MakeCluster, chief: MakeChief, caplog: pytest.LogCaptureFixture
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=20)
    boss.start()
    with job.client("worker:0") as worker:
        train(worker, 5)
        boss.stop()
        second = chief(job, last_step=3)
        assert second.start().what == "adopted"
        assert "a limit is never lowered" in caplog.text
        assert train(worker).version == 20
    assert second.end()


def test_a_living_chief_is_not_replaced(cluster: MakeCluster, chief: MakeChief) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO)
    boss.start()
    with pytest.raises(PermissionDeniedError) as caught:
        chief(job, TWO).start()
    assert boss.control.holder in str(caught.value)
    boss.stop()


def test_the_same_model_is_kept_and_another_refused(cluster: MakeCluster, chief: MakeChief) -> None:
    """First wins: what is there stays, whatever the initial values of the second are."""
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, {"w": np.ones((2, 3), np.float32)}, checkpoint_dir=None)
    boss.start()
    worker = job.client("worker:0")
    worker.pull()
    worker.push({"w": np.ones((2, 3), np.float32)})
    boss.stop()
    again = chief(job, {"w": np.full((2, 3), 5, np.float32)}, checkpoint_dir=None)
    assert again.start() == Started("adopted", 1, 2)
    again.stop()
    other = chief(job, {"w": np.full((3, 3), 5, np.float32)}, checkpoint_dir=None)
    with pytest.raises(AlreadyExistsError) as caught:
        other.start()
    other.control.close()
    for part in ("'w'", "(2, 3)", "(3, 3)"):
        assert part in str(caught.value)
    assert (worker.pull(wait=False)["w"] == 0.5).all()


def test_a_checkpoint_of_another_model_is_refused(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job)
    boss.start()
    boss.stop()
    job = cluster(lease=LEASE_S)
    other = chief(job, {"w": np.zeros(5, np.float32)})
    with pytest.raises(CheckpointError) as caught:
        other.start()
    for part in ("'w'", "(4,)", "(5,)", "step-000000000000"):
        assert part in str(caught.value)
    assert not job.status().initialized


def test_a_job_behind_its_newest_checkpoint_is_refused(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=9)
    boss.start()
    with job.client("worker:0") as worker:
        train(worker)
    assert boss.end()
    other = cluster(lease=LEASE_S)
    other.initialize(COUNTING)
    before = steps_in(tmp_path / "ckpt")
    behind = chief(other, last_step=20)
    with pytest.raises(FailedPreconditionError) as caught:
        behind.start()
    behind.control.close()
    for part in ("is at step 0", "has step 9", "--checkpoint-dir", "restart"):
        assert part in str(caught.value)
    assert steps_in(tmp_path / "ckpt") == before
    # One that is damaged does not count.
    (tmp_path / "ckpt" / "step-000000000009" / "manifest.json").write_text("?")
    assert chief(other, last_step=20).start().what == "adopted"


def test_shards_of_a_half_dead_job_are_restored_together(
    cluster: MakeCluster, chief: MakeChief, restart: Restart, tmp_path: Path
) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO, last_step=40, save_steps=10)
    boss.start()
    worker = job.client("worker:0")
    train(worker, 10)
    wait_for(lambda: 10 in steps_in(tmp_path / "ckpt"))
    train(worker, 5)
    boss.stop()
    restart(job, 0)
    second = chief(job, TWO, last_step=30)
    assert second.start() == Started("restored", 10, 2)
    params = train(worker)
    assert params.version == 40  # the limit in force is never lowered
    assert (params["a"] == -20).all() and (params["b"] == -20).all()
    worker.close()
    assert second.end()


def test_a_damaged_checkpoint_is_passed_over_with_a_line(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=9, save_steps=3)
    boss.start()
    with job.client("worker:0") as worker:
        for _ in range(2):
            train(worker, 3)
            wait_for(lambda: steps_in(tmp_path / "ckpt")[-1] % 3 == 0)
        train(worker)
    assert boss.end()
    *_, kept, damaged = steps_in(tmp_path / "ckpt")
    part = tmp_path / "ckpt" / f"step-{damaged:012d}" / "part-00000.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=9)
    assert boss.start() == Started("restored", kept, 1)
    assert f"step-{damaged:012d}" in caplog.text and "part-00000" in caplog.text
    with job.client("worker:0") as worker:
        assert (train(worker)["w"] == -4.5).all()
    assert boss.end()
    assert newest(tmp_path / "ckpt").global_step == 9


def test_nothing_starts_afresh_over_damaged_checkpoints(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=2)
    boss.start()
    with job.client("worker:0") as worker:
        train(worker)
    assert boss.end()
    for manifest in (tmp_path / "ckpt").glob("*/manifest.json"):
        manifest.write_bytes(b"\0" * 100)
    job = cluster(lease=LEASE_S)
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is whole"):
        chief(job).start()
    assert not job.status().initialized


def test_other_servers_than_the_jobs_are_refused(cluster: MakeCluster, chief: MakeChief) -> None:
    job = cluster(2, lease=LEASE_S)
    boss = chief(job, TWO)
    boss.start()
    boss.stop()
    more = cluster(1, lease=LEASE_S)
    for servers in (job.addresses[:1], [*job.addresses, *more.addresses]):
        with ControlClient(servers, "chief:0") as control:
            wrong = Supervisor(control, boss.settings, lambda: TWO)
            with pytest.raises(ConfigError, match="a job of 2 shards is there"):
                wrong.start()
    assert not more.status().initialized


# -- the cut -------------------------------------------------------------------------------------


def test_a_push_in_the_cut_at_ps_0_is_in_it_everywhere(
    cluster: MakeCluster, background: Background
) -> None:
    """Even of a client that the other shard has not heard of when the cut begins."""
    job = cluster(2, lease=10.0)
    job.initialize(TWO)
    control = job.control()
    control.survey()
    control.claim()
    with ExitStack() as stack:
        channels = [stack.enter_context(transport.make_channel(a)) for a in job.addresses]
        stubs = [transport.ParameterStub(channel) for channel in channels]
        caller = parameter_pb2.Caller(worker="worker:0", incarnation=7)
        joined = stubs[0].Join(parameter_pb2.JoinRequest(caller=caller), timeout=5)
        caller.session = joined.session
        options = parameter_pb2.PullOptions(wait=True, clock=joined.clock, header_only=True)
        (data,) = stubs[0].Pull(parameter_pb2.PullRequest(caller=caller, options=options))
        step = framing.decode(parameter_pb2.PullResponse, data).message.header.step

        def push(shard: int) -> parameter_pb2.PushResponse:
            header = parameter_pb2.PushHeader(caller=caller, sequence=1, step=step)
            request = parameter_pb2.PushRequest(header=header, last=True)
            return stubs[shard].Push(iter([framing.Frame(request)]), timeout=5)

        assert push(0).result.applied and not job.status(1).workers
        cut = background(control.snapshot, 10.0)
        wait_for(lambda: job.status(1).workers, "the roster at ps:1")
        assert not cut.done()
        assert push(1).result.applied
        merged = assemble.merge(cut.result(20))
    assert merged.global_step == 1
    assert [shard["version"] for shard in merged.shards] == [1, 1]


# -- what goes wrong on the disk -----------------------------------------------------------------


class FullDisk(Files):
    """A disk that is full as long as `full` says."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.refused = 0

    def sync(self, file: Any) -> None:
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        super().sync(file)


def test_a_failed_save_is_tried_again_and_training_goes_on(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = FullDisk(False)
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=30, save_steps=10, options={"files": disk})
    boss.start()
    disk.full = True
    with job.client("worker:0") as worker:
        train(worker, 12)
        wait_for(lambda: "event=save-failed" in caplog.text)
        assert disk.refused and "free some space" in caplog.text
        assert train(worker, 3).version == 15
        assert steps_in(tmp_path / "ckpt") == [0]
        disk.full = False
        wait_for(lambda: steps_in(tmp_path / "ckpt") == [0, 15])
        train(worker)
    assert boss.end()
    assert newest(tmp_path / "ckpt").global_step == 30


def test_the_end_that_cannot_be_saved_stays_with_the_servers(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    disk = FullDisk(False)
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=5, options={"files": disk, "connect_timeout": 0.2})
    boss.start()
    disk.full = True
    with job.client("worker:0") as worker:
        train(worker)
    with pytest.raises(CheckpointError, match="step 5 is the last and could not be saved"):
        boss.end()
    assert not job.servers[0].host.finished.is_set()
    second = chief(job, last_step=5)
    assert second.start() == Started("adopted", 5, 1)
    assert second.end()
    assert newest(tmp_path / "ckpt").global_step == 5


def test_a_folder_in_use_or_not_writable_stops_the_chief_before_anything(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    with Lock(tmp_path / "ckpt", "somebody"), pytest.raises(CheckpointError, match="somebody"):
        chief(job).start()
    job = cluster(lease=LEASE_S)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        chief(job, checkpoint_dir=tmp_path / "file").start()
    job = cluster(lease=LEASE_S)
    with pytest.raises(CheckpointError, match="free some space"):
        chief(job, options={"files": FullDisk(True)}).start()
    assert not job.status().initialized


# -- being stopped -------------------------------------------------------------------------------


def test_a_chief_that_waits_for_a_server_can_be_stopped(
    cluster: MakeCluster, chief: MakeChief, background: Background
) -> None:
    job = cluster(lease=LEASE_S)
    job.servers[0].stop()
    boss = chief(job, options={"connect_timeout": 60.0})
    starting = background(boss.supervisor.start)
    boss.supervisor.stop()
    with pytest.raises(Stopped):
        starting.result(10)


def test_a_stopped_chief_leaves_the_job_running(
    cluster: MakeCluster, chief: MakeChief, tmp_path: Path
) -> None:
    job = cluster(lease=LEASE_S)
    boss = chief(job, last_step=10)
    boss.start()
    with job.client("worker:0") as worker:
        train(worker, 4)
        boss.stop()
        assert job.status().chief == ""
        assert train(worker).complete
    assert not job.servers[0].host.finished.is_set()
    Lock(tmp_path / "ckpt", "the next").release()
