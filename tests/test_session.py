"""The training loop against real servers, workers as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import pytest
from conftest import wait_for

import paramserver as ps
from paramserver import client as client_module
from paramserver.consistency import Consistency
from paramserver.control_client import ControlClient
from paramserver.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from paramserver.host import HostSettings
from paramserver.layout import Array
from paramserver.params import Params
from paramserver.transfer import ShardArrays
from worker import session as session_module
from worker.data import Batch, Batches, DataSpec, load_data
from worker.hooks import Hook, NanHook, NanLossError, RunContext, RunValues, StopAtStepHook
from worker.models import Linear, Model
from worker.session import Summary, TrainingSession

#: All waits of these tests end after this time, in seconds.
PATIENCE_S = 30.0


class Counting:
    """The counting model: every gradient of `w` (4,) is `value`, so that w counts the updates."""

    def __init__(self, value: float = 1.0, compute: Callable[[int], object] | None = None) -> None:
        self.value = value
        self.clocks: list[int] = []
        self._compute = compute

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        return {"w": np.zeros(4, np.float32)}

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        clock = int(batch.x[0, 0])
        self.clocks.append(clock)
        if self._compute:
            self._compute(clock)
        return self.value, {"w": np.full(4, self.value, np.float32)}


class Clocks:
    """Batches of one row that holds the clock."""

    def batch(self, clock: int) -> Batch:
        return Batch(np.full((1, 1), clock, np.float32), np.zeros(1, np.float32))


@dataclass
class Recorder(Hook):
    """Notes every call, and does `at_push` before each push."""

    calls: list[str] = field(default_factory=list)
    values: list[RunValues] = field(default_factory=list)
    at_push: Callable[[RunContext], object] | None = None
    error: BaseException | None = None

    def begin(self, session: TrainingSession) -> None:
        self.calls.append("begin")

    def before_run(self, context: RunContext) -> None:
        self.calls.append("before_run")

    def before_push(self, context: RunContext, loss: float, grads: dict[str, Array]) -> None:
        self.calls.append("before_push")
        if self.at_push:
            self.at_push(context)

    def after_run(self, context: RunContext, values: RunValues) -> None:
        self.calls.append("after_run")
        self.values.append(values)

    def end(self, session: TrainingSession, error: BaseException | None) -> None:
        self.calls.append("end")
        self.error = error


def serve(lease_s: float = 10.0, port: int = 0) -> ps.Server:
    return ps.Server(port, settings=HostSettings(lease_s=lease_s))


def prepare(
    server: ps.Server,
    consistency: Consistency | None = None,
    last_step: int = 0,
    model: Model | None = None,
    learning_rate: float = 0.5,
) -> None:
    with ps.Client(server.address) as client:
        client.initialize(
            (model or Counting()).init(np.random.default_rng(0)),
            ps.optimizers.SGD(learning_rate),
            consistency,
            last_step=last_step,
        )


def work(
    addresses: str | Sequence[str],
    model: Model,
    index: int = 0,
    hooks: Sequence[Hook] = (),
    connect_timeout: float = PATIENCE_S,
) -> Summary:
    """One worker's whole life."""
    worker = f"worker:{index}"
    with ps.Client(addresses, worker, connect_timeout=connect_timeout) as client:
        return TrainingSession(client, model, Clocks(), hooks).run()


def results(futures: Sequence[Future[Summary]]) -> list[Summary]:
    return [future.result(PATIENCE_S) for future in futures]


def read(server: ps.Server) -> Params:
    with ps.Client(server.address) as client:
        return client.pull(wait=False)


def test_the_loop_is_gradient_descent() -> None:
    data = load_data("line")
    batches, model = Batches(data, 32), Linear(data.spec)
    params = model.init(np.random.default_rng(0))
    losses = []
    for clock in range(50):
        loss, grads = model.loss_and_grads(params, batches.batch(clock))
        losses.append(loss)
        params = {name: np.asarray(params[name] - np.float32(0.1) * grads[name]) for name in params}

    with serve() as server:
        prepare(server, last_step=50, model=model, learning_rate=0.1)
        recorder = Recorder()
        with ps.Client(server.address, "worker:0") as client:
            session = TrainingSession(client, model, batches, [recorder], test=data.test)
            summary = session.run()

    for name, value in params.items():
        np.testing.assert_allclose(summary.params[name], value, rtol=1e-6)
    assert (summary.steps, summary.global_step, summary.complete) == (50, 50, True)
    assert (summary.dropped, summary.stopped) == (0, "")
    assert (summary.first_loss, summary.last_loss) == pytest.approx((losses[0], losses[-1]))
    assert summary.metrics == pytest.approx(model.evaluate(params, data.test), rel=1e-5)
    assert summary.seconds > 0
    assert recorder.calls == ["begin", *["before_run", "before_push", "after_run"] * 50, "end"]
    assert [v.step for v in recorder.values] == list(range(1, 51))
    assert [v.global_step for v in recorder.values] == list(range(1, 51))
    assert {v.examples for v in recorder.values} == {25}


def test_a_finished_job_has_no_steps_left() -> None:
    with serve() as server:
        prepare(server, last_step=3)
        assert work(server.address, Counting()).steps == 3
        again = work(server.address, Counting())
    assert (again.steps, again.first_loss, again.complete, again.global_step) == (0, None, True, 3)


@pytest.mark.parametrize(
    ("consistency", "limit"), [(None, 100), (ps.Sync(3), 20), (ps.Ssp(2), 50)], ids=str
)
def test_the_limit_is_exact_with_several_workers(
    consistency: Consistency | None, limit: int
) -> None:
    with serve() as server, ThreadPoolExecutor(3) as pool:
        prepare(server, consistency, limit)
        done = results([pool.submit(work, server.address, Counting(), i) for i in range(3)])
        assert read(server).version == limit
    for summary in done:
        assert (summary.complete, summary.global_step) == (True, limit)
        np.testing.assert_array_equal(summary.params["w"], np.full(4, -0.5 * limit, np.float32))
    steps = sum(summary.steps for summary in done)
    assert steps == (3 * limit if isinstance(consistency, ps.Sync) else limit)


def test_sync_is_sync() -> None:
    """One worker is slow, and pushes threes where the other pushes ones."""
    clocks = {0: -1, 1: -1}
    apart: list[int] = []

    def computing(index: int, seconds: float) -> Callable[[int], None]:
        def compute(clock: int) -> None:
            clocks[index] = clock
            apart.append(abs(clocks[0] - clocks[1]))
            threading.Event().wait(seconds)  # a computation that takes its time

        return compute

    with serve() as server, ThreadPoolExecutor(2) as pool:
        prepare(server, ps.Sync(2), 20)
        models = [Counting(1.0, computing(0, 0.0)), Counting(3.0, computing(1, 0.01))]
        done = results([pool.submit(work, server.address, m, i) for i, m in enumerate(models)])
    for summary in done:
        assert (summary.global_step, summary.steps) == (20, 20)
        np.testing.assert_array_equal(summary.params["w"], np.full(4, -20, np.float32))
    assert max(apart) <= 1


@pytest.mark.parametrize("batches", [(24, 26), (5, 5, 20, 20)], ids=str)
def test_workers_with_unequal_numbers_of_batches(batches: tuple[int, ...]) -> None:
    """Who has none left leaves; the others go on with smaller rounds."""
    with serve() as server, ThreadPoolExecutor(len(batches)) as pool:
        prepare(server, ps.Sync(len(batches)))
        done = results(
            [
                pool.submit(work, server.address, Counting(), i, [StopAtStepHook(num_steps=n)])
                for i, n in enumerate(batches)
            ]
        )
        final = read(server)
    assert [summary.steps for summary in done] == list(batches)
    assert final.version == max(batches)
    np.testing.assert_array_equal(final["w"], np.full(4, -0.5 * max(batches), np.float32))


def test_a_worker_without_rows_joins_and_leaves_so_that_the_barrier_opens() -> None:
    with serve() as server, ThreadPoolExecutor(2) as pool:
        prepare(server, ps.Sync(3), 4)
        running = [pool.submit(work, server.address, Counting(), i) for i in range(2)]
        with ps.Client(server.address, "worker:2") as idle:
            assert idle.join(PATIENCE_S) == 1
            idle.leave("no rows")
        done = results(running)
    assert [summary.global_step for summary in done] == [4, 4]


def test_a_computation_longer_than_the_lease_is_waited_for() -> None:
    lease_s = 0.3

    def compute(clock: int) -> None:
        if clock == 2:
            threading.Event().wait(4 * lease_s)

    with serve(lease_s) as server, ThreadPoolExecutor(2) as pool:
        prepare(server, ps.Sync(2), 4)
        models = [Counting(), Counting(compute=compute)]
        done = results([pool.submit(work, server.address, m, i) for i, m in enumerate(models)])
    assert [(summary.steps, summary.dropped) for summary in done] == [(4, 0), (4, 0)]


def test_stop_at_a_step_on_request() -> None:
    with serve() as server:
        prepare(server)
        summary = work(server.address, Counting(), hooks=[StopAtStepHook(last_step=7)])
        assert (summary.steps, summary.global_step, summary.complete) == (7, 7, False)
        assert summary.stopped == "global_step 7 is reached"
        again = work(server.address, Counting(), hooks=[StopAtStepHook(last_step=7)])
        assert (again.steps, again.global_step) == (0, 7)


def test_a_failing_model_leaves_nobody_waiting() -> None:
    def compute(clock: int) -> None:
        if clock == 2:
            raise ZeroDivisionError("the model's own")

    recorder = Recorder()
    with serve() as server, ThreadPoolExecutor(2) as pool:
        prepare(server, ps.Sync(2), 6)
        failing = pool.submit(work, server.address, Counting(compute=compute), 0, [recorder])
        other = pool.submit(work, server.address, Counting(), 1)
        with pytest.raises(ZeroDivisionError, match="the model's own"):
            failing.result(PATIENCE_S)
        assert other.result(PATIENCE_S).global_step == 6
    assert isinstance(recorder.error, ZeroDivisionError)
    assert recorder.calls[-1] == "end"


@pytest.mark.parametrize("how", ["done", "stopped", "failed"])
def test_a_session_leaves_the_job_and_the_client_open(how: str) -> None:
    model = Counting(float("nan") if how == "failed" else 1.0)
    with serve() as server:
        prepare(server, last_step=4)
        with ps.Client(server.address, "worker:0") as client:
            hooks = [NanHook(), *([StopAtStepHook(num_steps=2)] if how == "stopped" else [])]
            session = TrainingSession(client, model, Clocks(), hooks)
            with pytest.raises(NanLossError) if how == "failed" else nullcontext():
                session.run()
            with server.host.locked() as shard:
                assert shard and not shard.roster.members
            assert client.pull(wait=False).version == {"done": 4, "stopped": 2, "failed": 0}[how]


def test_a_hook_that_fails_to_begin_is_not_ended() -> None:
    class Broken(Hook):
        def begin(self, session: TrainingSession) -> None:
            raise OSError("no folder")

    before, after = Recorder(), Recorder()
    with serve() as server:
        prepare(server)
        with pytest.raises(OSError, match="no folder"):
            work(server.address, Counting(), hooks=[before, Broken(), after])
    assert (before.calls, after.calls) == (["begin", "end"], [])
    assert isinstance(before.error, OSError)


@pytest.mark.parametrize("fail", [True, False])
def test_a_loss_that_is_no_number_is_not_pushed(fail: bool) -> None:
    model = Counting()

    def compute(clock: int) -> None:
        if clock == 3:
            model.value = float("nan")

    model._compute = compute
    with serve() as server:
        prepare(server, last_step=10)
        if fail:
            with pytest.raises(NanLossError, match="global_step 3"):
                work(server.address, model, hooks=[NanHook()])
        else:
            summary = work(server.address, model, hooks=[NanHook(fail=False)])
            assert (summary.steps, summary.complete) == (3, False)
        np.testing.assert_array_equal(read(server)["w"], np.full(4, -1.5, np.float32))


def test_without_the_hook_the_client_refuses_what_is_no_number() -> None:
    with serve() as server:
        prepare(server, last_step=10)
        with pytest.raises(InvalidArgumentError, match="'w'"):
            work(server.address, Counting(float("nan")))


def test_a_hook_may_change_the_gradients() -> None:
    class Doubling(Hook):
        def before_push(self, context: RunContext, loss: float, grads: dict[str, Array]) -> None:
            grads["w"] = grads["w"] * 2

    with serve() as server:
        prepare(server, last_step=3)
        summary = work(server.address, Counting(), hooks=[Doubling()])
    np.testing.assert_array_equal(summary.params["w"], np.full(4, -3, np.float32))


@pytest.mark.parametrize("first", [True, False], ids=["first pull", "barrier"])
def test_closing_the_client_ends_a_wait(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first pull, or in the round trip of a step; without cutting the connection off."""
    monkeypatch.setattr(client_module, "CLOSE_S", 10 * PATIENCE_S)
    steps = 0 if first else 2
    with serve() as server, ThreadPoolExecutor(3) as pool:
        prepare(server, ps.Sync(2))
        client = ps.Client(server.address, "worker:0")
        session = TrainingSession(client, Counting(), Clocks())
        blocked = pool.submit(session.run)
        if not first:
            held = threading.Event()

            def compute(clock: int) -> None:
                if clock == 2:
                    held.wait(PATIENCE_S)

            other = pool.submit(
                work,
                server.address,
                Counting(compute=compute),
                1,
                [StopAtStepHook(num_steps=3)],
            )
            other.add_done_callback(lambda _: held.set())
        wait_for(lambda: session.steps == steps and server.host.waiting())
        session.request_stop("the test is over")
        pool.submit(client.close).result(5)
        with pytest.raises(FailedPreconditionError, match="closed"):
            blocked.result(5)
        if not first:
            held.set()
            assert other.result(PATIENCE_S).steps == 3
    assert session.steps == steps


class Restart:
    """Ends a server and starts another on its port, restored to a snapshot, or left empty."""

    def __init__(self, server: ps.Server, at: int, restore: bool = True) -> None:
        self.server = server
        self._at, self._restore = at, restore
        self._taken: list[ShardArrays] = []

    def __call__(self, context: RunContext) -> None:
        with ControlClient(self.server.address, "test") as control:
            control.survey()
            if context.params.version == self._at - 2 and not self._taken:
                control.claim()
                self._taken = control.snapshot(5.0)
        if context.params.version == self._at:
            port = int(self.server.address.rpartition(":")[2])
            self.server.stop()
            self.server = serve(port=port)
            if self._restore:
                self.restore()
            self._at = -1

    def restore(self) -> None:
        with ControlClient(self.server.address, "test") as control:
            control.survey()
            control.claim()
            state = self._taken[0].state
            renewed = ShardArrays(
                type(state)(**{**vars(state), "session": state.session + 1}),
                self._taken[0].arrays,
            )
            control.load([renewed], restore=True)


@pytest.mark.parametrize("consistency", [ps.Async(), ps.Sync(1)], ids=str)
def test_a_restored_server_rewinds_parameters_and_data(consistency: Consistency) -> None:
    first = serve()
    restart = Restart(first, at=5)
    try:
        prepare(first, consistency, 8)
        model = Counting()
        recorder = Recorder(at_push=restart)
        summary = work(first.address, model, hooks=[recorder])
        assert restart.server is not first
        assert (summary.global_step, summary.complete, summary.dropped) == (8, True, 1)
        np.testing.assert_array_equal(summary.params["w"], np.full(4, -4, np.float32))
        # Computed for clock 5, restored to step 3: in sync the data goes on from there too.
        rewound = [3, 4, 5, 6, 7] if isinstance(consistency, ps.Sync) else [0, 1, 2, 3, 4]
        assert model.clocks == [*range(6), *rewound]
        assert summary.steps == 10
    finally:
        restart.server.stop()


def test_an_empty_server_is_an_error_in_the_end() -> None:
    first = serve()
    restart = Restart(first, at=2, restore=False)
    try:
        prepare(first, last_step=8)
        with pytest.raises(UnavailableError, match=r"not initialised yet.*gave up after 0\.3 s"):
            work(
                first.address,
                Counting(),
                hooks=[Recorder(at_push=restart)],
                connect_timeout=0.3,
            )
        assert restart.server is not first
    finally:
        restart.server.stop()


def test_a_server_that_is_gone_is_an_error_in_the_end() -> None:
    server = serve()

    def stop(context: RunContext) -> None:
        if context.params.version == 2:
            server.stop()

    prepare(server, last_step=8)
    with pytest.raises(UnavailableError, match=rf"{server.address}.*gave up after 0\.3 s"):
        work(server.address, Counting(), hooks=[Recorder(at_push=stop)], connect_timeout=0.3)


def test_each_lost_lease_costs_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_LOST_IN_A_ROW", 2)
    with serve() as server:
        prepare(server, last_step=5)

        def evict(context: RunContext) -> None:
            if context.params.version == 1 + 2 * context.session.dropped:
                with server.host.locked() as shard:
                    assert shard
                    (member,) = shard.roster.members
                    shard.leave(member.key, "evicted by the test", server.host.now())

        summary = work(server.address, Counting(), hooks=[Recorder(at_push=evict)])
    assert (summary.steps, summary.dropped, summary.global_step) == (5, 2, 5)


def test_steps_that_are_lost_again_and_again_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_LOST_IN_A_ROW", 3)
    with serve() as server:
        prepare(server, last_step=5)

        def evict(context: RunContext) -> None:
            with server.host.locked() as shard:
                assert shard
                (member,) = shard.roster.members
                shard.leave(member.key, "evicted by the test", server.host.now())

        recorder = Recorder(at_push=evict)
        with pytest.raises(AbortedError):
            work(server.address, Counting(), hooks=[recorder])
    assert recorder.calls.count("before_push") == 3


def test_two_shards() -> None:
    spec = DataSpec(3)
    with serve() as one, serve() as two, ThreadPoolExecutor(2) as pool:
        addresses = [two.address, one.address]
        model = Linear(spec)
        with ps.Client(addresses) as client:
            client.initialize(
                model.init(np.random.default_rng(0)), consistency=ps.Sync(2), last_step=30
            )

        class Rows:
            def batch(self, clock: int) -> Batch:
                x = np.random.default_rng(clock).normal(size=(8, 3)).astype(np.float32)
                return Batch(x, x @ np.array([1, 2, 3], np.float32) + np.float32(1))

        def run(index: int) -> Summary:
            with ps.Client(addresses, f"worker:{index}") as client:
                return TrainingSession(client, model, Rows()).run()

        done = results([pool.submit(run, i) for i in range(2)])
    assert [summary.global_step for summary in done] == [30, 30]
    np.testing.assert_allclose(done[0].params["weight"], [1, 2, 3], atol=0.2)
    np.testing.assert_array_equal(done[0].params["weight"], done[1].params["weight"])
