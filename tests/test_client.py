"""The client against real servers: what a worker can count on, over one shard and over several."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from conftest import Background, MakeCluster, MakeProxy, wait_for

import paramserver as ps
from paramserver import transport
from paramserver.errors import (
    AbortedError,
    AlreadyExistsError,
    ConfigError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ParamServerError,
    PermissionDeniedError,
    UnavailableError,
)

ONES = {"w": np.ones(4, np.float32)}
ZEROS = {"w": np.zeros(4, np.float32)}


def values(params: ps.Params, name: str = "w") -> list[float]:
    result: list[float] = params[name].tolist()
    return result


# -- the faces -------------------------------------------------------------------------------------


def test_the_example_runs_as_it_stands() -> None:
    with ps.Server(port=0) as server:
        with ps.Client(server.address, worker="worker:0") as client:
            client.initialize(
                {"w": np.zeros(4, np.float32)},
                optimizer=ps.optimizers.SGD(0.5),
                consistency=ps.Async(),
            )
            params = client.pull()
            result = client.push({"w": np.ones(4, np.float32)})
            assert (result.applied, result.reason, result.version) == (True, "applied", 1)
            params = client.push_pull({"w": np.ones(4, np.float32)})
        assert (params.version, params.versions, params.complete) == (2, (2,), False)
        assert values(params) == [-1.0] * 4
        assert params["w"].dtype == np.float32 and not params["w"].flags.writeable
        assert not server.join(timeout=0.0)
    assert server.join(timeout=0.0)


def test_addresses_may_be_text_or_a_list(cluster: MakeCluster) -> None:
    job = cluster(2)
    job.initialize({"a": np.ones(3), "b": np.ones(2)})
    for addresses in (",".join(job.addresses), job.addresses, tuple(reversed(job.addresses))):
        params = job.client(at=addresses).pull(wait=False)
        assert list(params) == ["a", "b"] and params.versions == (0, 0)


class Relay(grpc.GenericRpcHandler):
    """Passes every call on to a server as raw bytes, and counts calls and messages by method."""

    def __init__(self, upstream: str) -> None:
        self.calls: Counter[str] = Counter()
        self.messages: Counter[str] = Counter()
        self._channel = grpc.insecure_channel(upstream)
        self._server = grpc.server(ThreadPoolExecutor(32), options=transport.server_options())
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        name = details.method.rpartition("/")[2]
        self.calls[name] += 1
        onward: Any = self._channel.stream_stream(details.method)

        def counted(requests: Iterator[bytes]) -> Iterator[bytes]:
            for request in requests:
                self.messages[name] += 1
                yield request

        return grpc.stream_stream_rpc_method_handler(lambda rs, _: onward(counted(rs)))

    def close(self) -> None:
        self._server.stop(1).wait(5)
        self._channel.close()


def test_a_step_costs_the_same_calls_for_500_variables_as_for_one(cluster: MakeCluster) -> None:
    many = {f"v{i}": np.zeros(16, np.float32) for i in range(500)}
    one = {"v": np.zeros(8000, np.float32)}
    counted = []
    for variables in (many, one):
        job = cluster(2)
        job.initialize(variables)
        with ExitStack() as stack:
            relays = [stack.enter_context(closing(Relay(a))) for a in job.addresses]
            with ps.Client([r.address for r in relays], worker="worker:0") as client:
                grads = {name: np.ones_like(v) for name, v in variables.items()}
                for _ in range(5):
                    client.pull()
                    client.push(grads)
                for _ in range(5):
                    params = client.push_pull(grads)
                assert params.version == 10
                assert all((params[name] == -5).all() for name in params)
            data_calls = [
                {n: (r.calls[n], r.messages[n]) for n in ("Pull", "Push", "PushPull", "Join")}
                for r in relays
            ]
        counted.append(data_calls)
    # 5 pulls and one for the first turn's step; 5 pushes; one stream of 5 turns.
    assert counted[0][0] == {"Pull": (6, 6), "Push": (5, 5), "PushPull": (1, 5), "Join": (2, 2)}
    assert counted[0] == counted[1]


# -- initialise ------------------------------------------------------------------------------------


def test_initialising_twice(cluster: MakeCluster) -> None:
    """The first wins; another model is refused, and says what differs."""
    job = cluster(2)
    client = job.client("worker:0")
    start: dict[str, Any] = {"w": np.ones((2, 3), np.float32), "b": np.zeros(2, np.float32)}
    assert client.initialize(start, optimizer=ps.optimizers.SGD(0.5)) is True
    client.push({"w": np.ones((2, 3), np.float32)})
    again = {**start, "w": np.full((2, 3), 5, np.float32)}
    assert client.initialize(again, optimizer=ps.optimizers.SGD(0.5)) is False
    for other, difference in (
        ({**start, "w": np.ones((3, 3), np.float32)}, r"'w' is float32 \(2, 3\) .* \(3, 3\)"),
        ({**start, "w": np.ones((2, 3), np.float64)}, r"'w' is float32 .* in the job, not float64"),
        ({"w": start["w"]}, r"'b' is only in the job"),
        ({**start, "c": np.ones(1)}, r"'c' is only in the new model"),
    ):
        with pytest.raises(AlreadyExistsError, match=difference):
            client.initialize(other, optimizer=ps.optimizers.SGD(0.5))
    params = client.pull(wait=False)
    assert (params["w"] == 0.5).all() and params["w"].shape == (2, 3)
    assert params.versions == (1, 1)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.ones(2, np.int64), r"'v' has dtype int64; choose one of 'float32', 'float64'; cast it"),
        (np.ones(2, np.complex64), r"'v' has dtype complex64"),
        (np.array([None, 1]), r"'v' has dtype object"),
        (np.array(["a"]), r"'v' has dtype <U1"),
        ([[1.0], [1.0, 2.0]], r"'v' cannot be read as an array"),
        (np.array([1.0, np.nan]), r"'v' is nan at element 1"),
        (np.array([1.0, -np.inf]), r"'v' is -inf at element 1"),
    ],
)
def test_initial_values_that_no_variable_can_have(
    cluster: MakeCluster, value: Any, complaint: str
) -> None:
    job = cluster(2)
    client = job.client()
    with pytest.raises(InvalidArgumentError, match=complaint):
        client.initialize({"good": np.ones(2), "v": value, "w": np.ones(2)})
    assert not job.status(0).initialized and not job.status(1).initialized
    assert client.initialize({"good": np.ones(2)})


@pytest.mark.parametrize("name", ["", " ", "a b", "é", "x" * 257, "a\nb", "../é"])
def test_names_that_no_variable_can_have(cluster: MakeCluster, name: str) -> None:
    job = cluster()
    with pytest.raises(InvalidArgumentError, match="must be 1 to 256 letters"):
        job.client().initialize({name: np.ones(2)})
    assert not job.status().initialized


def test_a_model_of_odd_arrays(cluster: MakeCluster) -> None:
    """Fortran order, big endian, strided, 0-d, empty, two dtypes: all arrive as what they are."""
    odd: dict[str, npt.NDArray[Any]] = {
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "big": np.arange(4, dtype=">f8"),
        "strided": np.arange(10, dtype=np.float32)[::3],
        "backwards": np.arange(4.0)[::-1],
        "scalar": np.array(7.0, np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "nothing": np.zeros(0),
        "a/b.c:d-e_f": np.ones((1, 1, 1, 1)),
    }
    kept = {name: array.copy() for name, array in odd.items()}
    job = cluster(3)
    job.initialize(odd)
    client = job.client("worker:0")
    params = client.pull()
    assert set(params) == set(odd)
    for name, array in odd.items():
        assert params[name].shape == array.shape
        assert params[name].dtype == array.dtype.newbyteorder("<")
        np.testing.assert_array_equal(params[name], kept[name])
    # The same shapes of memory as gradients.
    params = client.push_pull(odd)
    for name, array in odd.items():
        np.testing.assert_array_equal(params[name], kept[name] * 0.5)
        np.testing.assert_array_equal(array, kept[name])
    assert client.pull(["empty", "nothing"])["empty"].shape == (0, 3)


def test_sizes_around_every_default_limit(cluster: MakeCluster) -> None:
    """Around 4 MiB, around a chunk, and many variables in one go: equal bit for bit."""
    rng = np.random.default_rng(0)
    sizes = {"a": (1 << 20) - 16, "b": 1 << 20, "c": 1_250_000, "d": (1 << 19) + 1, "e": 1}
    model = {name: rng.standard_normal(n, dtype=np.float32) for name, n in sizes.items()}
    job = cluster()
    job.initialize(model, ps.optimizers.SGD(1.0))
    client = job.client("worker:0")
    params = client.pull()
    for name, array in model.items():
        np.testing.assert_array_equal(params[name], array)
    params = client.push_pull(model)
    assert all((params[name] == 0).all() for name in model)


def test_messages_of_any_size_will_do(cluster: MakeCluster) -> None:
    """Whatever the largest message, what is larger is cut: initialise, push, pull, turns, a cut."""
    job = cluster(max_message=1 << 16)
    client = job.client("worker:0")
    w = np.arange(200_000, dtype=np.float32)
    small = {f"v{i}": np.zeros(1) for i in range(300)}
    client.initialize({"w": w, **small}, ps.optimizers.SGD(1.0))
    np.testing.assert_array_equal(client.pull()["w"], w)
    client.push({"w": w})
    params = client.push_pull({"w": w})
    np.testing.assert_array_equal(params["w"], -w)
    with job.control() as control:
        (shard,) = control.snapshot(5.0)
    np.testing.assert_array_equal(shard.arrays["w"][0], -w)


# -- pull ------------------------------------------------------------------------------------------


def test_pulled_arrays_are_the_callers_own(cluster: MakeCluster) -> None:
    """Nothing that either side does to its arrays changes the other's."""
    job = cluster()
    client = job.client("worker:0")
    start = np.zeros(4, np.float32)
    client.initialize({"w": start}, optimizer=ps.optimizers.SGD(0.5))
    start[:] = 99
    params = client.pull()
    with pytest.raises(ValueError, match="read-only"):
        params["w"] += 1
    with pytest.raises(TypeError):
        params["w"] = start  # type: ignore[index]
    mine = params.copy()
    mine["w"] += 1
    assert values(client.pull()) == [0.0] * 4
    gradient = np.ones(4, np.float32)
    client.push({"w": gradient})
    gradient[:] = 77
    assert values(params) == [0.0] * 4
    assert values(client.pull()) == [-0.5] * 4
    assert params.copy()["w"] is not params.copy()["w"]


def test_a_gradient_changed_while_others_push_is_applied_as_it_was(cluster: MakeCluster) -> None:
    """A round keeps what was pushed, not the caller's array."""
    job = cluster(lease=5.0)
    job.initialize(ZEROS, consistency=ps.Sync(workers=2))
    first, second = job.client("worker:0"), job.client("worker:1")
    pull = [background_pull(first), background_pull(second)]
    for thread in pull:
        thread.join(10)
    gradient = np.ones(4, np.float32)
    first.push({"w": gradient})
    gradient[:] = 99
    params = second.push_pull(ONES)
    assert values(params) == [-0.5] * 4


def background_pull(client: ps.Client) -> threading.Thread:
    thread = threading.Thread(target=client.pull, daemon=True)
    thread.start()
    return thread


def test_pull_some(cluster: MakeCluster) -> None:
    job = cluster(2)
    job.initialize({"a": np.zeros(3), "b": np.ones(2, np.float32), "c": np.ones((2, 2))})
    client = job.client("worker:0")
    params = client.pull(["c", "a"])
    assert list(params) == ["a", "c"] and "b" not in params and len(params) == 2
    assert list(client.pull("a")) == ["a"]
    with pytest.raises(KeyError, match="'b' was not pulled"):
        params["b"]
    with pytest.raises(
        NotFoundError, match=r"no variable 'd' in this job; there are 'a', 'b', 'c'"
    ):
        client.pull(["a", "d"])
    assert "version=0" in repr(params)
    # A step may still be pushed, for all of the variables.
    assert client.push({"b": np.ones(2, np.float32)}, params).applied


def test_what_one_has_is_not_sent_again(cluster: MakeCluster, proxy: MakeProxy) -> None:
    """Shards at the same version share the arrays of the pull before."""
    job = cluster(2)
    job.initialize({"a": np.zeros(50_000), "b": np.zeros(50_000)})
    lines = [proxy(address) for address in job.addresses]
    reader = job.client(at=[line.address for line in lines])
    first = reader.pull(wait=False)
    before = [line.forwarded["down"] for line in lines]
    same = reader.pull(wait=False, have=first)
    assert all(line.forwarded["down"] - b < 1000 for line, b in zip(lines, before, strict=True))
    assert all(same[name] is first[name] or same[name].base is first[name].base for name in "ab")
    assert same.versions == (0, 0)
    # Another question, another version, another session: all of it comes.
    assert list(reader.pull(["a"], wait=False, have=first)) == ["a"]
    writer = job.client("worker:0")
    writer.push({"a": np.ones(50_000), "b": np.ones(50_000)})
    changed = reader.pull(wait=False, have=same)
    assert changed.versions == (1, 1) and (changed["a"] == -0.5).all()
    assert (same["a"] == 0).all() and (first["b"] == 0).all()
    params = writer.pull(have=changed)
    assert params.versions == (1, 1) and (params["b"] == -0.5).all()
    assert writer.push({}, params).applied


def test_work_beside_a_turn(cluster: MakeCluster) -> None:
    """It is done while the gradient is on its way; if it fails, the step is given up."""
    job = cluster(lease=0.5)
    job.initialize(ZEROS)
    client = job.client("worker:0")
    done: list[int] = []
    params = client.push_pull(ONES, meanwhile=lambda: done.append(1))
    assert done == [1] and params.version == 1
    with pytest.raises(ZeroDivisionError):
        client.push_pull(ONES, meanwhile=lambda: 1 // 0)
    params = client.pull()
    assert values(params) == [-0.5 * params.version] * 4 and params.version in (1, 2)
    assert client.push_pull(ONES).version == params.version + 1


def test_pulled_arrays_stay_what_they_are(cluster: MakeCluster) -> None:
    """Whatever is kept of them, and however, while hundreds more are pulled."""
    job = cluster()
    job.initialize({"a": np.zeros((100, 300)), "b": np.zeros(50_000, np.float32)})
    client = job.client("worker:0")
    kept: list[tuple[int, Any]] = []
    for version in range(60):
        params = client.pull()
        a, b = params["a"], params["b"]
        kept += [
            (version, a[3]),
            (version, a.T[::7]),
            (version, b.data[10:20]),
            (version, np.frombuffer(b.data, np.float32, 100)),
            (version, iter(b[:5])),
            (version, b.reshape(-1, 10)[::-1, 2]),
        ]
        if version % 3:
            del kept[:2]
        del a, b, params
        client.push({"a": np.ones((100, 300)), "b": np.ones(50_000, np.float32)})
    for version, part in kept:
        values = list(part) if not isinstance(part, np.ndarray) else part
        assert (np.asarray(values) == -0.5 * version).all()


def test_reading_takes_no_part(cluster: MakeCluster) -> None:
    job = cluster(2)
    job.initialize(ZEROS, consistency=ps.Sync(workers=3))
    reader = job.client()
    assert values(reader.pull(wait=False)) == [0.0] * 4
    for call in (reader.pull, lambda: reader.push(ONES), lambda: reader.push_pull(ONES)):
        with pytest.raises(FailedPreconditionError, match='make it with worker="worker:0"'):
            call()
    assert not job.status().workers
    named = job.client("worker:1")
    named.pull(wait=False)
    assert not job.status().workers


def test_a_waiting_pull_says_what_for_and_ends_in_time(cluster: MakeCluster) -> None:
    job = cluster()
    job.initialize(ZEROS, consistency=ps.Sync(workers=2))
    lines: list[str] = []
    client = job.client("worker:0", on_wait=lines.append)
    began = time.monotonic()
    with pytest.raises(DeadlineExceededError):
        client.pull(timeout=0.4)
    assert 0.3 < time.monotonic() - began < 3
    wait_for(lambda: job.status().workers, "the worker to be a member")
    with pytest.raises(DeadlineExceededError):
        client.pull(timeout=3.5)
    assert any("ps:0 at 127.0.0.1:" in x and "1 of 2 joined" in x for x in lines), lines
    wait_for(lambda: not job.status().waiting, "the server to give up the call")


def test_params_know_their_place(cluster: MakeCluster) -> None:
    job = cluster(3)
    job.initialize({"a": np.zeros(1), "b": np.zeros(1)})
    client = job.client("worker:0")
    for step in range(3):
        params = client.pull()
        assert (params.version, params.versions) == (step, (step,) * 3)
        client.push({"a": np.ones(1)})
    assert client.job().consistency == ps.Async()
    assert client.job().optimizer == ps.optimizers.SGD(0.5)


# -- push ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grads", "kind", "complaint"),
    [
        ({"w": np.ones((2, 2), np.float32)}, InvalidArgumentError, r"shape \(2, 2\), variable has"),
        ({"w": np.ones((4, 1), np.float32)}, InvalidArgumentError, r"shape \(4, 1\)"),
        ({"w": np.float32(1)}, InvalidArgumentError, r"shape \(\)"),
        ({"w": np.ones(4)}, InvalidArgumentError, r"float64, .* float32; cast it: .*np.float32"),
        ({"w": np.ones(4, np.int32)}, InvalidArgumentError, r"dtype int32"),
        ({"w": np.ones(4, np.complex64)}, InvalidArgumentError, r"dtype complex64"),
        ({"w": np.array([None] * 4)}, InvalidArgumentError, r"dtype object"),
        ({"w": ["a", "b", "c", "d"]}, InvalidArgumentError, r"dtype <U1"),
        ({"w": [1, [2], 3, 4]}, InvalidArgumentError, r"cannot be read as an array"),
        ({"w": [1, 2, np.nan, 4]}, InvalidArgumentError, r"'w' is nan at element 2"),
        ({"w": [1, 2, np.inf, 4]}, InvalidArgumentError, r"'w' is inf at element 2"),
        ({"w": [1e39, 2, 3, 4]}, InvalidArgumentError, r"'w' is inf at element 0"),
        ({"x": np.ones(4, np.float32)}, NotFoundError, r"no variable 'x' in this job"),
        ({"W": np.ones(4, np.float32)}, NotFoundError, r"there are 'b', 'w'"),
    ],
)
def test_gradients_that_do_not_fit(
    cluster: MakeCluster, grads: Any, kind: type[ParamServerError], complaint: str
) -> None:
    """Refused by name before anything is sent, on no shard; the step may still be pushed."""
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(2)})
    client = job.client("worker:0")
    params = client.pull()
    for call in (client.push, client.push_pull):
        with pytest.raises(kind, match=complaint):
            call({"b": np.ones(2), **grads})
    assert client.pull(wait=False).versions == (0, 0)
    assert client.push({"b": np.ones(2), **ONES}, params).applied
    assert values(client.pull()) == [-0.5] * 4


def test_a_large_finite_gradient_is_no_infinity(cluster: MakeCluster) -> None:
    """Its sum of squares overflows; it does not."""
    job = cluster()
    job.initialize(ZEROS)
    client = job.client("worker:0")
    assert values(client.push_pull({"w": np.full(4, 2.0**100, np.float32)})) == [-(2.0**99)] * 4


def test_a_push_without_a_pull_pulls_its_step_itself(cluster: MakeCluster) -> None:
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(1)})
    client = job.client("worker:0")
    for _ in range(3):
        assert client.push({}).applied
        client.push_pull(ONES)
    params = client.pull()
    assert params.versions == (6, 6) and values(params) == [-1.5] * 4


def test_staleness_counts_from_the_params_of_a_push(cluster: MakeCluster) -> None:
    job = cluster()
    job.initialize(ZEROS)
    one, other = job.client("worker:0"), job.client("worker:1")
    old = one.pull()
    for _ in range(3):
        other.push(ONES)
    assert one.push(ONES, old).staleness == 3
    # The same parameters once more: their step is spent, so a new one is asked for.
    assert one.push(ONES, old).staleness == 4
    one.pull()
    result = one.push(ONES)
    assert (result.staleness, result.version, result.global_step) == (0, 6, 6)
    assert one.last_result == result


def test_params_of_another_life_are_refused(cluster: MakeCluster) -> None:
    job = cluster()
    job.initialize(ZEROS)
    client = job.client("worker:0")
    params = client.pull()
    client.leave()
    client.leave()
    assert not job.status().workers
    with pytest.raises(AbortedError, match="pull again"):
        client.push(ONES, params)
    assert client.push(ONES, client.pull()).applied


def test_a_mean_of_two_workers(cluster: MakeCluster, background: Background) -> None:
    """Sync takes the mean (equal weights, whatever the batch sizes), async one after the other."""
    for rule, expected in ((ps.Sync(workers=2), [9.7, 10.2]), (ps.Async(), [9.4, 10.4])):
        job = cluster()
        job.initialize({"w": np.full(2, 10.0)}, ps.optimizers.SGD(0.1), consistency=rule)
        clients = [job.client("worker:0"), job.client("worker:1")]
        for waiting in [background(client.pull) for client in clients]:
            waiting.result(10)
        clients[0].push({"w": np.array([1.0, 2.0])}, examples=3)
        clients[1].push({"w": np.array([5.0, -6.0])}, examples=1)
        np.testing.assert_allclose(clients[0].pull()["w"], expected, rtol=1e-12)


# -- sync ------------------------------------------------------------------------------------------


def work(
    client: ps.Client,
    steps: int = 1 << 30,
    gradient: float = 1.0,
    step: Callable[[ps.Params], object] = lambda params: None,
) -> ps.Params:
    """Pulls and pushes `steps` times, or until the job is complete; the last parameters."""
    params = client.pull()
    for _ in range(steps):
        if params.complete:
            break
        step(params)
        params = client.push_pull({n: np.full_like(params[n], gradient) for n in params})
    return params


def test_sync_rounds_are_rounds(cluster: MakeCluster, background: Background) -> None:
    """A fast and a slow worker: never more than one round apart, every round one update."""
    job = cluster()
    job.initialize(ZEROS, consistency=ps.Sync(workers=2), last_step=20)
    rounds = [0, 0]
    apart: list[int] = []
    slow = threading.Event()

    def counted(index: int) -> Callable[[ps.Params], None]:
        def count(params: ps.Params) -> None:
            assert params.version == rounds[index]
            rounds[index] += 1
            apart.append(abs(rounds[0] - rounds[1]))
            if index:
                slow.wait(0.02)

        return count

    fast = background(work, job.client("worker:0"), gradient=1.0, step=counted(0))
    params = work(job.client("worker:1"), gradient=3.0, step=counted(1))
    assert values(params) == values(fast.result(10)) == [-0.5 * 20 * 2] * 4
    assert rounds == [20, 20] and max(apart) <= 1
    assert params.version == fast.result().version == 20
    assert params.complete and fast.result().complete


def test_a_second_worker_that_comes_late(cluster: MakeCluster, background: Background) -> None:
    job = cluster()
    job.initialize(ZEROS, consistency=ps.Sync(workers=2), last_step=10)
    first = background(work, job.client("worker:0"))
    wait_for(lambda: job.status().waiting, "the first to wait")
    assert not first.done()
    assert values(work(job.client("worker:1"))) == [-5.0] * 4
    assert values(first.result(10)) == [-5.0] * 4


def test_workers_with_unequal_numbers_of_batches(
    cluster: MakeCluster, background: Background
) -> None:
    """Who has no more leaves, and the others go on."""
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(1)}, consistency=ps.Sync(workers=4))

    def train(index: int, batches: int) -> ps.Params:
        client = job.client(f"worker:{index}")
        params = work(client, batches)
        client.leave()
        return params

    threads = [background(train, i, batches) for i, batches in enumerate((5, 5, 20, 12))]
    assert [thread.result(20).version for thread in threads] == [5, 5, 20, 12]
    assert job.status(0).version == job.status(1).version == 20
    assert not job.status().workers


def test_a_long_evaluation_between_rounds_is_waited_for(
    cluster: MakeCluster, background: Background
) -> None:
    """For four leases, and nobody is dropped: heartbeats have a thread of their own."""
    job = cluster(lease=0.3)
    job.initialize(ZEROS, consistency=ps.Sync(workers=2), last_step=4)
    pause = threading.Event()

    def evaluate(params: ps.Params) -> None:
        if params.version == 2:
            pause.wait(1.2)

    first = background(work, job.client("worker:0"))
    assert values(work(job.client("worker:1"), step=evaluate)) == [-2.0] * 4
    assert first.result(10).version == 4
    assert not job.status().roster.departed


def test_a_dead_worker_frees_the_round(
    cluster: MakeCluster, background: Background, proxy: MakeProxy
) -> None:
    """A replacement joins at a round boundary; updates applied equal rounds completed."""
    job = cluster(2, lease=0.4)
    job.initialize({**ZEROS, "b": np.zeros(1)}, consistency=ps.Sync(workers=3), last_step=30)
    lines = [proxy(address) for address in job.addresses]
    threads = [background(work, job.client(f"worker:{i}")) for i in (0, 1)]
    dead = job.client("worker:2", at=[line.address for line in lines])
    work(dead, 4)
    for line in lines:
        line.refuse()
    wait_for(lambda: job.status().version >= 6, "the others to go on")
    replacement = job.client("worker:2")
    assert replacement.pull().version >= 6
    threads.append(background(work, replacement))
    for thread in threads:
        params = thread.result(20)
        assert params.versions == (30, 30) and values(params) == [-15.0] * 4
    assert [d.worker for d in job.status().roster.departed] == ["worker:2"]
    for line in lines:
        line.heal()
    with pytest.raises(AbortedError, match="no member"):
        dead.push(ONES)


# -- the limit -------------------------------------------------------------------------------------


def test_async_ends_exactly_at_the_limit(cluster: MakeCluster, background: Background) -> None:
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(1)}, last_step=100)
    threads = [background(work, job.client(f"worker:{i}")) for i in range(3)]
    for thread in threads:
        params = thread.result(20)
        assert params.complete and params.version == 100 and params.versions == (100, 100)
        assert values(params) == [-50.0] * 4
    client = job.client("worker:3")
    refused = client.push(ONES)
    assert (refused.applied, refused.reason) == (False, "job_complete")
    assert (refused.version, refused.global_step) == (100, 100)
    client.last_result = None
    assert client.push_pull(ONES).complete
    assert client.last_result == refused
    assert job.status(0).version == job.status(1).version == 100


def test_a_grant_that_nobody_spends_goes_to_another(
    cluster: MakeCluster, background: Background
) -> None:
    """Whoever leaves with the last step in its hand does not take it along."""
    job = cluster()
    job.initialize(ZEROS, last_step=3)
    keeper, other = job.client("worker:0"), job.client("worker:1")
    keeper.pull()
    finish = background(work, other)
    wait_for(lambda: any("last steps are granted to worker:0" in w for w in job.status().waiting))
    assert job.status().global_step == 2
    keeper.leave()
    assert values(finish.result(10)) == [-1.5] * 4


def test_ssp_keeps_within_its_slack(cluster: MakeCluster, background: Background) -> None:
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(1)}, consistency=ps.Ssp(slack=2))
    fast, slow = job.client("worker:0"), job.client("worker:1")
    fast.pull()
    slow.pull()
    ahead = background(work, fast, 5)
    wait_for(lambda: job.status().waiting, "the fast one to wait")
    assert [(w.worker, w.clock) for w in job.status().workers] == [("worker:0", 3), ("worker:1", 0)]
    work(slow, 3)
    assert ahead.result(10).version == 8
    assert [w.clock for w in job.status(1).workers] == [5, 3]


# -- concurrency -----------------------------------------------------------------------------------


def test_no_update_is_lost_and_no_read_is_torn(
    cluster: MakeCluster, background: Background
) -> None:
    """8 threads over 4 channels, 100 pushes each, while another reads in a loop."""
    job = cluster()
    size = 200_000
    job.initialize({"w": np.zeros(size, np.float32)})
    grads = {"w": np.ones(size, np.float32)}
    reader = job.client()
    done = threading.Event()

    def read() -> int:
        reads = 0
        while not done.is_set():
            w = reader.pull(wait=False)["w"]
            assert (w == w[0]).all()
            reads += 1
        return reads

    def push(client: ps.Client) -> None:
        for _ in range(100):
            assert client.push(grads).applied

    clients = [job.client(f"worker:{i}") for i in range(4)]
    reading = background(read)
    for pushing in [background(push, clients[i % 4]) for i in range(8)]:
        pushing.result(60)
    done.set()
    assert reading.result(10) > 5
    params = reader.pull(wait=False)
    assert params.version == 800 and (params["w"] == -400).all()


# -- who is who ------------------------------------------------------------------------------------


def test_a_second_worker_of_the_same_index(
    cluster: MakeCluster, background: Background, proxy: MakeProxy
) -> None:
    """Refused while the first lives, which takes no longer than a lease; counted as nobody."""
    lease = 0.6
    job = cluster(lease=lease)
    job.initialize(ZEROS, consistency=ps.Sync(workers=2))
    line = proxy(job.addresses[0])
    first = job.client("worker:0", at=[line.address])
    waiting = background(first.pull)
    wait_for(lambda: job.status().waiting, "the first to wait")
    began = time.monotonic()
    with pytest.raises(
        AlreadyExistsError, match=r"worker:0 is in this job already; .*--task-index"
    ):
        job.client("worker:0").pull()
    assert time.monotonic() - began < 2 * lease
    assert not waiting.done() and "(1 of 2 joined)" in job.status().waiting[0]
    # Once the first is dead, its lease is waited for, and its place taken.
    line.refuse()
    lines: list[str] = []
    began = time.monotonic()
    replacement = background(job.client("worker:0", on_wait=lines.append).pull)
    wait_for(lambda: len(job.status().roster.departed) == 1, "the first to be dropped")
    wait_for(lambda: job.status().waiting, "the replacement to wait")
    assert time.monotonic() - began < 3 * lease
    assert not replacement.done() and any("its lease ends in" in x for x in lines)
    job.client("worker:1").pull()
    assert replacement.result(10).version == 0


@pytest.mark.parametrize("worker", ["worker", "worker:", "worker:-1", "0", "Worker:0", "a b:0"])
def test_a_name_that_no_worker_can_have(worker: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be like 'worker:0'"):
        ps.Client("127.0.0.1:1", worker=worker)


def test_more_shards_than_variables(cluster: MakeCluster, background: Background) -> None:
    """The empty ones take part in everything."""
    job = cluster(5)
    job.initialize({**ZEROS, "b": np.zeros(2)}, consistency=ps.Sync(workers=2), last_step=10)
    threads = [background(work, job.client(f"worker:{i}")) for i in range(2)]
    for thread in threads:
        params = thread.result(20)
        assert values(params) == [-5.0] * 4 and params.versions == (10,) * 5
    statuses = [job.status(i) for i in range(5)]
    assert sorted(len(s.layout.variables) for s in statuses) == [0, 0, 0, 1, 1]
    assert [s.rounds for s in statuses] == [10] * 5
    with job.control() as control:
        assert [s.state.version for s in control.snapshot(5.0)] == [10] * 5


def test_the_order_of_addresses_says_nothing(cluster: MakeCluster, background: Background) -> None:
    job = cluster(3)
    model = {name: np.zeros(2) for name in "abc"}
    job.initialize(model, consistency=ps.Sync(workers=2), last_step=5)
    here = job.client("worker:0", at=job.addresses)
    there = job.client("worker:1", at=list(reversed(job.addresses)))
    threads = [background(work, client) for client in (here, there)]
    for thread in threads:
        params = thread.result(10)
        assert all((params[name] == -2.5).all() for name in "abc")


def test_a_part_of_the_shards_is_refused(cluster: MakeCluster) -> None:
    job, other = cluster(3), cluster(1)
    job.initialize({name: np.zeros(2) for name in "abc"})
    other.initialize({"a": np.zeros(2)})
    client = job.client("worker:0", at=[job.addresses[2], job.addresses[0]])
    with pytest.raises(ConfigError, match=r"--ps names 2 of the job's 3 shards; missing: ps:1"):
        client.pull()
    mixed = job.client("worker:0", at=[*job.addresses, *other.addresses], connect_timeout=0.5)
    with pytest.raises(ParamServerError, match="different sessions"):
        mixed.pull()
    assert not job.status().workers and not other.status().workers


def test_one_shard_by_two_names(cluster: MakeCluster) -> None:
    job = cluster(2)
    ports = [address.rpartition(":")[2] for address in job.addresses]
    names = [f"localhost:{ports[1]}", *job.addresses, f"localhost:{ports[0]}"]
    client = job.client("worker:0", at=names)
    client.initialize({"a": np.zeros(2), "b": np.zeros(2)}, ps.optimizers.SGD(0.5))
    assert client.push_pull({"a": np.ones(2), "b": np.ones(2)}).versions == (1, 1)


def test_another_chief_is_named(cluster: MakeCluster) -> None:
    job = cluster(2, lease=1.0)
    with job.control("chief:0") as control:
        control.survey()
        control.claim()
        with pytest.raises(PermissionDeniedError, match=r"chief:0 on .* is chief of this job"):
            job.client().initialize(ZEROS)
        assert not job.status().initialized
    job.initialize(ZEROS)


# -- ends ------------------------------------------------------------------------------------------


def test_a_call_on_a_closed_client(cluster: MakeCluster) -> None:
    job = cluster()
    job.initialize(ZEROS)
    client = job.client("worker:0")
    client.pull()
    client.close()
    client.close()
    assert not job.status().workers
    for call in (client.pull, lambda: client.push(ONES), client.job, client.leave):
        with pytest.raises(FailedPreconditionError, match="this client is closed"):
            call()


@pytest.mark.parametrize("call", ["pull", "push", "push_pull"])
def test_closing_interrupts_a_waiting_call(
    cluster: MakeCluster, background: Background, call: str
) -> None:
    job = cluster(2)
    job.initialize({**ZEROS, "b": np.zeros(1)}, consistency=ps.Sync(workers=2))
    client, other = job.client("worker:0"), job.client("worker:1")
    if call == "pull":
        waiting = background(client.pull)
    elif call == "push":
        waiting = background(client.push, ONES)
    else:
        pull = background(client.pull)
        other.pull()
        pull.result(10)
        waiting = background(client.push_pull, ONES)
    wait_for(lambda: job.status().waiting, "the call to wait")
    began = time.monotonic()
    client.close()
    with pytest.raises(ParamServerError, match="closed"):
        waiting.result(5)
    assert time.monotonic() - began < 2
    wait_for(lambda: not job.status().waiting, "the server to give up the call")
    assert "worker:0" not in [w.worker for w in job.status().workers]


def test_closing_interrupts_the_wait_for_a_server(background: Background) -> None:
    lines: list[str] = []
    client = ps.Client("127.0.0.1:1", on_wait=lines.append)
    waiting = background(client.pull, wait=False)
    wait_for(lambda: lines, "a line")
    assert lines[0] == "waiting for ps at 127.0.0.1:1 (connection refused)"
    client.close()
    with pytest.raises(ParamServerError):
        waiting.result(5)


def test_nobody_there(cluster: MakeCluster) -> None:
    with ps.Client("127.0.0.1:1", connect_timeout=0.5) as client:
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=r"127.0.0.1:1: connection refused .*gave up"):
            client.pull(wait=False)
        assert time.monotonic() - began < 5
    with (
        ps.Client("no-such-host.invalid:1681", connect_timeout=0.5) as client,
        pytest.raises(UnavailableError, match=r"name resolution failed for 'no-such-host.invalid"),
    ):
        client.pull(wait=False)
    empty = cluster()
    lines: list[str] = []
    with pytest.raises(UnavailableError, match="not initialised yet"):
        empty.client("worker:0", connect_timeout=0.3, on_wait=lines.append).pull()
    assert "not initialised yet: no chief, no worker 0" in lines[0]


def test_a_forked_child_is_told_to_make_its_own(cluster: MakeCluster) -> None:
    job = cluster()
    job.initialize(ZEROS)
    client = job.client("worker:0")
    client.pull()
    forking = multiprocessing.get_context("fork")
    answers = forking.SimpleQueue()

    def child() -> None:
        for call in (lambda: client.pull(timeout=5), lambda: client.push(ONES)):
            try:
                answers.put(repr(call()))
            except FailedPreconditionError as error:
                answers.put(str(error))
        client.close()
        answers.put("closed")

    process = forking.Process(target=child)
    process.start()
    process.join(10)
    assert process.exitcode == 0
    told = [answers.get() for _ in range(3)]
    assert (
        told[:2]
        == [f"this client belongs to process {os.getpid()}; make a new one after a fork"] * 2
    )
    assert client.push(ONES).applied
    assert values(client.pull()) == [-0.5] * 4


def test_many_who_initialise_the_same_model_at_once_agree(cluster: MakeCluster) -> None:
    """One does it, the others find it there: none is refused because another is at it."""
    job = cluster(2)
    variables = {"v": np.zeros(2, np.float32), "w": np.zeros(4, np.float32)}
    clients = [job.client(f"worker:{i}") for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        did = list(pool.map(lambda client: client.initialize(variables), clients))
    assert sorted(did) == [False, False, False, True]
