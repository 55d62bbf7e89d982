"""The way of arrays over the wire: whichever path they take, the same bits arrive, all or none.

*Direct* is a push that is applied as it arrives, *staged* one that is kept because another is being
applied; in sync all are staged until their round closes.
"""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
from conftest import Background, Cluster, MakeCluster, MakeProxy, wait_for
from optimizer_cases import CASES, START, Case
from shard_cases import begin, frozen, gradient
from test_service import Standard, caller, refused

import paramserver as ps
from chief import assemble, checkpoint
from paramserver import codec, optimizers, transport
from paramserver.codec import chunks
from paramserver.errors import AbortedError
from paramserver.host import HostSettings
from paramserver.layout import Layout
from paramserver.optimizers import SGD, Adam, Momentum, Optimizer
from paramserver.retry import RETRYABLE
from paramserver.status import translated
from paramserver.update import Push
from paramserver.v1 import parameter_pb2 as pb
from paramserver.v1 import tensor_pb2
from worker.data import Batch, Batches, load_data
from worker.models import Linear
from worker.session import TrainingSession

Array = npt.NDArray[Any]
Arrays = Mapping[str, Array]

RULES: list[Optimizer] = [
    SGD(0.1),
    Momentum(0.1, momentum=0.9),
    Momentum(0.1, momentum=0.9, nesterov=True),
    Adam(0.01),
]
RULE_IDS = ["sgd", "momentum", "nesterov", "adam"]

#: Two groups; the first is more than two blocks, and nothing in it lies at a block's boundary.
SHAPES = {
    "large": ((70_001,), np.float32),
    "w": ((30, 41), np.float32),
    "s": ((), np.float32),
    "none": ((0, 3), np.float32),
    "d": ((300, 7), np.float64),
    "z": ((), np.float64),
}

#: Which variables have a gradient in each step.
STEPS: list[tuple[str, ...]] = [
    tuple(SHAPES),
    ("w", "z"),
    tuple(SHAPES),
    ("s",),
    (),
    ("large", "none", "d"),
    tuple(SHAPES),
]

#: The largest message: by default, and one that cuts a gradient into about forty.
ONE_MESSAGE, MANY_MESSAGES = transport.MAX_MESSAGE_BYTES, 1 << 14

_numbers = itertools.count(1000)


def random_arrays(seed: int, names: Iterable[str] = SHAPES) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(rng.standard_normal(shape), dtype)
        for name, (shape, dtype) in SHAPES.items()
        if name in names
    }


@contextmanager
def writing(server: ps.Server, fed: bool = False) -> Iterator[Push]:
    """Another worker's push is being applied as it arrives, and stands still: others are staged.

    In the end it breaks off. `fed`: all of it has arrived but its end."""
    host, member = server.host, (f"worker:{next(_numbers)}", 1)
    host.join(member, 0, None)
    with host.reading() as shard:
        push = begin(shard, member)
    assert push.update
    if fed:
        for piece, values in gradient(push.layout, 7.0):
            push.feed(piece, values)
    try:
        yield push
    finally:
        with host.reading() as shard:
            shard.abort(push)
        host.leave(shard.state.session, member, "done", None)


def settled(server: ps.Server) -> bool:
    """Whether nothing is on its way and no version is being read."""
    with server.host.reading() as shard:
        pins = [flat._pinned for group in shard._params._buffers.flat for flat in group]
        return not (shard._in_flight or shard._params.writer or any(pins))


def arrays_now(server: ps.Server) -> Any:
    """Version, update counts, and every bit of values and slots. Nothing may be on its way."""
    wait_for(partial(settled, server), "the shard to settle")
    with server.host.reading() as shard:
        assert shard.nbytes_in_flight == 0
        return frozen(shard._params)


def saved(job: Cluster) -> dict[str, Any]:
    """Every variable's bits, values and slots, and its count of updates, wherever it lies."""
    with job.control() as control:
        control.survey()
        control.claim()
        shards = control.snapshot(5.0)
    return {
        v.name: (
            shard.arrays[v.name][0].tobytes(),
            {slot: array.tobytes() for slot, array in shard.arrays[v.name][1].items()},
            v.updates,
        )
        for shard in shards
        for v in shard.state.variables
    }


def computed(rule: Optimizer, start: Arrays, steps: Iterable[Arrays]) -> dict[str, Any]:
    """The same without any server, variable by variable; a step counts for all of them."""
    values = dict(start)
    slots = {name: optimizers.new_slots(rule, array) for name, array in start.items()}
    count = 0
    for count, grads in enumerate(steps, start=1):
        for name, grad in grads.items():
            values[name], slots[name] = optimizers.step(
                rule, count, grad, values[name], slots[name]
            )
    return {
        name: (
            value.tobytes(),
            dict(zip(rule.slots, (slot.tobytes() for slot in slots[name]), strict=True)),
            count,
        )
        for name, value in values.items()
    }


# -- the same bits on every path -------------------------------------------------------------------

PATHS = ["direct", "staged", "sync"]
CALLS = ["push", "push_pull"]


def step(
    job: Cluster, client: ps.Client, background: Background, grads: Arrays, call: str, path: str
) -> None:
    """Pushes one gradient on its path."""
    (server,) = job.servers
    nbytes = sum(grad.nbytes for grad in grads.values())
    staged = path == "staged" and nbytes > 0
    if call == "push":
        client.pull()
    with writing(server) if staged else nullcontext():
        pushing = background(client.push if call == "push" else client.push_pull, grads)
        if staged:
            wait_for(partial(in_flight, server, nbytes), "it to be staged", every=0.001)
    pushing.result(20)


def in_flight(server: ps.Server, nbytes: int) -> bool:
    """Whether so many bytes have arrived and are not applied."""
    with server.host.reading() as shard:
        return shard.nbytes_in_flight == nbytes


def consistency_of(path: str) -> ps.Sync | ps.Async:
    return ps.Sync(workers=1) if path == "sync" else ps.Async()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("rule", RULES, ids=RULE_IDS)
def test_every_path_gives_the_same_bits(
    cluster: MakeCluster, background: Background, rule: Optimizer, path: str
) -> None:
    """One message or many, push or turn, at once or in its turn: values, slots and counts agree."""
    start, grads = random_arrays(0), [random_arrays(i, n) for i, n in enumerate(STEPS, start=1)]
    expected = computed(rule, start, grads)
    for max_message, call in itertools.product((ONE_MESSAGE, MANY_MESSAGES), CALLS):
        job = cluster(lease=30.0, max_message=max_message)
        job.initialize(start, rule, consistency_of(path))
        client = job.client("worker:0")
        for version, own in enumerate(grads, start=1):
            step(job, client, background, own, call, path)
            assert client.last_result and client.last_result.version == version
        assert saved(job) == expected, (max_message, call)
        params = client.pull(wait=False)
        assert {n: params[n].tobytes() for n in params} == {n: e[0] for n, e in expected.items()}


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_what_is_left_out_counts_the_same_however_it_is_sharded(
    cluster: MakeCluster, shards: int
) -> None:
    """Adam's correction goes by the steps of the job, not by those that named a neighbour."""
    start = {"a": np.zeros(3, np.float32), "b": np.zeros(2, np.float32)}
    steps: list[Arrays] = [{"a": np.ones(3, np.float32)}] * 5 + [{"b": np.ones(2, np.float32)}, {}]
    job = cluster(shards, lease=30.0)
    job.initialize(start, Adam(0.1))
    client = job.client("worker:0")
    for grads in steps:
        client.push(grads)
    assert saved(job) == computed(Adam(0.1), start, steps)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "case", [case for case in CASES if len(set(case.rules)) == 1], ids=lambda case: case.name
)
def test_known_results_on_every_path(
    cluster: MakeCluster, background: Background, case: Case, path: str
) -> None:
    """The published numbers, a thousand times over so that they take many messages."""
    job = cluster(lease=30.0, max_message=MANY_MESSAGES)
    job.initialize({"w": np.tile(START, 1000)}, case.rules[0], consistency_of(path))
    client = job.client("worker:0")
    for grad, call in zip(case.grads, itertools.cycle(CALLS), strict=False):
        step(job, client, background, {"w": np.tile(grad, 1000)}, call, path)
    with job.control() as control:
        (shard,) = control.snapshot(5.0)
    value, slots = shard.arrays["w"]
    np.testing.assert_allclose(value, np.tile(case.after[len(case.grads)], 1000), 1e-10, 1e-12)
    for slot, numbers in case.slots.items():
        np.testing.assert_allclose(slots[slot], np.tile(numbers, 1000), 1e-10, 1e-15)


@pytest.mark.parametrize("rule", [SGD(0.1), Adam(0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("call", CALLS)
def test_a_round_is_the_same_mean_whoever_comes_first(
    cluster: MakeCluster, background: Background, rule: Optimizer, call: str
) -> None:
    """Of three: a sum whose order shows in the last bit. What one leaves out counts as zero."""
    start = random_arrays(0)
    orders = [(0, 1, 2), (2, 1, 0), (1, 2, 0)]
    rounds = []
    for seed in range(1, 1 + len(orders)):
        rounds.append([random_arrays(10 * seed + i) for i in range(3)])
        del rounds[-1][seed % 3]["w"], rounds[-1][seed % 3]["z"]
    means = [
        {name: mean([own.get(name) for own in grads], array) for name, array in start.items()}
        for grads in rounds
    ]
    expected = computed(rule, start, means)
    for max_message in (ONE_MESSAGE, MANY_MESSAGES):
        job = cluster(lease=30.0, max_message=max_message)
        job.initialize(start, rule, ps.Sync(workers=3))
        clients = [job.client(f"worker:{i}") for i in range(3)]
        for pulling in [background(client.pull) for client in clients]:
            pulling.result(10)
        for clock, (order, grads) in enumerate(zip(orders, rounds, strict=True), start=1):
            pushing = []
            for i in order:
                client = clients[i]
                pushing.append(
                    background(client.push if call == "push" else client.push_pull, grads[i])
                )
                wait_for(partial(has_pushed, job, i, clock), "it to be in the round", every=0.001)
            for each in pushing:
                each.result(10)
        assert saved(job) == expected, max_message


def mean(gradients: Sequence[Array | None], like: Array) -> Array:
    """Of three, added in this order."""
    first, second, third = (np.zeros_like(like) if g is None else g for g in gradients)
    return np.asarray((first + second + third) / like.dtype.type(3))


def has_pushed(job: Cluster, worker: int, sequence: int) -> bool:
    return job.status().workers[worker].sequence == sequence


# -- streams that are not as they should be --------------------------------------------------------

#: a at 0, b at 1000 (float32); d (float64).
MODEL = {
    "a": np.arange(1000, dtype=np.float32),
    "b": np.ones(500, np.float32),
    "d": np.full(300, 2.0),
}
GRADS = {name: np.full_like(array, 0.25) for name, array in MODEL.items()}

#: Into seven messages: a is in the first three and the fourth, where b begins; d in the last two.
CHUNK = 1200
Messages = list[pb.PushRequest]


def in_messages(layout: Layout, value: float = 0.25, chunk_bytes: int = CHUNK) -> Messages:
    """A whole gradient as the generated classes say it, without a header."""
    made = []
    for chunk in chunks(gradient(layout, value), chunk_bytes):
        message = pb.PushRequest(last=chunk.last)
        for r in chunk.ranges:
            message.ranges.add(group=r.group, offset=r.offset, count=r.count)
        message.payload = b"".join(array.tobytes() for array in chunk.arrays)
        made.append(message)
    return made


def but(message: pb.PushRequest, payload: bytes | None = None, **changes: int) -> pb.PushRequest:
    """The same with another payload, or its range with another `group`, `offset` or `count`."""
    copy = pb.PushRequest()
    copy.CopyFrom(message)
    if payload is not None:
        copy.payload = payload
    for name, value in changes.items():
        setattr(copy.ranges[-1], name, value)
    return copy


def not_last(message: pb.PushRequest) -> pb.PushRequest:
    copy = but(message)
    copy.last = False
    return copy


def tensor_of(name: str, array: Array) -> pb.PushRequest:
    tensor = tensor_pb2.Tensor(
        name=name, dtype=codec.dtype_to_proto(array.dtype.name), data=array.tobytes()
    )
    tensor.shape.extend(array.shape)
    return pb.PushRequest(tensors=[tensor])


NAN = np.array(np.nan).tobytes()
SECOND = pb.PushRequest(header=pb.PushHeader(sequence=2))

#: What is done to the messages of a gradient, and what the server has to say.
BROKEN: dict[str, tuple[Callable[[Messages], list[Any]], str, str]] = {
    "one of a is missing": (lambda m: m[:1] + m[2:],
        "INVALID_ARGUMENT", "'a' arrived in part only"),
    "the one with a and b is missing": (lambda m: m[:3] + m[4:],
        "INVALID_ARGUMENT", "'a' arrived in part only"),
    "one of d is missing": (lambda m: m[:-2] + m[-1:],
        "INVALID_ARGUMENT", "'d' arrived in part only"),
    "the last is missing": (lambda m: m[:-1],
        "INVALID_ARGUMENT", "ended before its last message.*'d'"),
    "one comes twice": (lambda m: m[:3] + m[2:],
        "INVALID_ARGUMENT", "overlap at variable 'a'"),
    "one comes again later": (lambda m: m[:-1] + m[4:5] + m[-1:],
        "INVALID_ARGUMENT", "overlap at variable 'b'"),
    "all come twice": (lambda m: [*m[:-1], not_last(m[-1]), *m],
        "INVALID_ARGUMENT", "overlap at variable 'a'"),
    "two overlap": (lambda m: [*m[:2], but(m[2], offset=599), *m[3:]],
        "INVALID_ARGUMENT", "overlap at variable 'a'"),
    "beyond the end": (lambda m: [*m[:-1], but(m[-1], offset=299)],
        "INVALID_ARGUMENT", "outside group 1 of 300 elements.*'d'"),
    "before the beginning": (lambda m: [but(m[0], offset=-1), *m[1:]],
        "INVALID_ARGUMENT", "outside group 0 of 1500 elements.*'a'"),
    "in no group": (lambda m: [*m[:-1], but(m[-1], group=2)],
        "INVALID_ARGUMENT", "group 2; the shard has 2"),
    "more bytes than named": (lambda m: [*m[:2], but(m[2], m[2].payload + bytes(4)), *m[3:]],
        "INVALID_ARGUMENT", "name 1200 bytes, the payload has 1204.*'a'"),
    "fewer bytes than named": (lambda m: [*m[:-1], but(m[-1], m[-1].payload[:-1])],
        "INVALID_ARGUMENT", "name 1200 bytes, the payload has 1199.*'d'"),
    "in another group": (lambda m: [*m[:2], but(m[2], group=1, offset=0), *m[3:]],
        "INVALID_ARGUMENT", "name 2400 bytes, the payload has 1200.*'d'"),
    "in another variable": (lambda m: [*m[:2], tensor_of("b", MODEL["b"]), *m[2:]],
        "INVALID_ARGUMENT", "overlap at variable 'b'"),
    "in no variable": (lambda m: [*m[:2], tensor_of("x", MODEL["b"]), *m[2:]],
        "NOT_FOUND", "no variable 'x' here; there are 'a', 'b', 'd'"),
    "the last number is none": (lambda m: [*m[:-1], but(m[-1], m[-1].payload[:-8] + NAN)],
        "INVALID_ARGUMENT", "'d' is nan at element 299"),
    "no message at all": (lambda m: [*m[:-1], b"\x7a\x7f" + bytes(9)],
        "INVALID_ARGUMENT", "bytes are no valid Push"),
    "a second beginning": (lambda m: [*m[:2], SECOND, *m[2:]],
        "INVALID_ARGUMENT", "second header"),
}  # fmt: skip


class Raw(Standard):
    """A worker of bare messages, or another connection (`of`) of one. A context manager."""

    def __init__(
        self, job: Cluster, worker: str = "worker:0", *, at: str = "", of: Raw | None = None
    ) -> None:
        super().__init__(at or job.addresses[0])
        self.caller: pb.Caller = of.caller if of else caller(worker, session=job.status().session)
        if not of:
            self.parameter.Join(pb.JoinRequest(caller=self.caller), timeout=10)

    def turn(
        self,
        call: str,
        messages: Iterable[pb.PushRequest | bytes],
        sequence: int = 1,
        timeout: float = 20,
    ) -> Iterator[Any]:
        """Sends one push, or a turn; its answers. `call`: "push" or "push_pull"."""
        of_push = call == "push"

        def wires() -> Iterator[bytes]:
            header = pb.PushHeader(caller=self.caller, sequence=sequence, clock=sequence - 1)
            options = pb.PullOptions(wait=True, clock=sequence)
            # Fields of one number are the same in both, and messages merge end to end.
            head: Any = (
                pb.PushRequest(header=header)
                if of_push
                else pb.PushPullRequest(header=header, options=options)
            )
            wire = head.SerializeToString()
            for message in messages:
                yield wire + (
                    message if isinstance(message, bytes) else message.SerializeToString()
                )
                wire = b""

        name = "Push" if of_push else "PushPull"
        answer: Any = pb.PushResponse if of_push else pb.PushPullResponse
        stream: Any = self.channel.stream_stream(
            f"/paramserver.v1.ParameterService/{name}", response_deserializer=answer.FromString
        )
        answers: Iterator[Any] = stream(wires(), timeout=timeout)
        return answers

    def send(self, call: str, messages: Iterable[Any], sequence: int = 1, **options: Any) -> Any:
        """The same, to its end; the push's result."""
        first, *_ = self.turn(call, messages, sequence, **options)
        return first.result

    def ready(self, clock: int) -> None:
        """Pulls, as one has to in sync."""
        options = pb.PullOptions(wait=True, clock=clock, header_only=True)
        list(self.parameter.Pull(pb.PullRequest(caller=self.caller, options=options), timeout=10))

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CALLS)
def test_a_stream_that_is_not_as_it_should_be(cluster: MakeCluster, call: str, path: str) -> None:
    """Refused with a word on what is wrong; nothing is applied or kept, and the step may follow."""
    job = cluster(lease=60.0)
    job.initialize(MODEL, Adam(0.5), consistency_of(path))
    (server,) = job.servers
    right = in_messages(server.host.need().layout)
    assert len(right) == 7
    with Raw(job) as raw:
        for sequence, (name, (broken, code, complaint)) in enumerate(BROKEN.items(), start=1):
            raw.ready(sequence - 1)
            before, held = arrays_now(server), job.status().bytes_held
            with writing(server) if path == "staged" else nullcontext():
                refused(
                    code,
                    complaint,
                    lambda: raw.send(call, broken(right), sequence),  # noqa: B023
                )
            assert arrays_now(server) == before, name
            assert job.status().bytes_held <= max(held, 2 * 3 * 8400), name
            assert raw.send(call, right, sequence).version == sequence, name
    expected = computed(Adam(0.5), MODEL, [GRADS] * len(BROKEN))
    assert saved(job) == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CALLS)
def test_messages_may_come_in_any_order(cluster: MakeCluster, call: str, path: str) -> None:
    """In any order, with empty ones between: what counts is that all are there."""
    job = cluster(lease=60.0)
    job.initialize(MODEL, Adam(0.5), consistency_of(path))
    (server,) = job.servers
    shuffle = random.Random(0).shuffle
    with Raw(job) as raw:
        for sequence in range(1, 9):
            raw.ready(sequence - 1)
            messages = [not_last(m) for m in in_messages(server.host.need().layout)]
            messages += [pb.PushRequest()] * 2
            shuffle(messages)
            messages.append(pb.PushRequest(last=True))
            # A quarter of a second, and the one that stands still has to make way.
            with writing(server) if path == "staged" and sequence < 3 else nullcontext():
                assert raw.send(call, messages, sequence).version == sequence
    assert saved(job) == computed(Adam(0.5), MODEL, [GRADS] * 8)


@pytest.mark.parametrize("path", ["direct", "staged"])
@pytest.mark.parametrize("call", CALLS)
def test_a_stream_cut_at_any_byte(
    cluster: MakeCluster, proxy: MakeProxy, call: str, path: str
) -> None:
    """All of it or nothing; sent again it counts once."""
    job = cluster(lease=60.0)
    job.initialize(MODEL, Adam(0.5))
    (server,) = job.servers
    line = proxy(job.addresses[0])
    right = in_messages(server.host.need().layout)
    with Raw(job) as raw:
        with Raw(job, at=line.address, of=raw) as whole:
            whole.send(call, right)
        nbytes, version = line.forwarded["up"], 1
        points = {nbytes * i // 24 for i in range(25)} | set(range(nbytes - 12, nbytes))
        for point in sorted(points):
            before = arrays_now(server)
            with writing(server) if path == "staged" else nullcontext():
                line.cut_after(point)
                with Raw(job, at=line.address, of=raw) as cut, suppress(grpc.RpcError):
                    # Behind one that stands still it would make way for it.
                    cut.send(call, right, version + 1, timeout=0.15 if path == "staged" else 5)
                line.heal()
            after = arrays_now(server)
            assert after == before or server.host.need().version == version + 1, point
            version += 1
            assert raw.send(call, right, version).version == version, point
    assert saved(job) == computed(Adam(0.5), MODEL, [GRADS] * version)


# -- streams that stand still ----------------------------------------------------------------------


def stalling(messages: Sequence[Any], at: int, release: threading.Event) -> Iterator[Any]:
    """The first `at` messages, and the rest once it is released."""
    yield from messages[:at]
    release.wait(20)
    yield from messages[at:]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("call", CALLS)
def test_a_stream_that_stalls_ends_at_its_deadline(
    cluster: MakeCluster, call: str, path: str
) -> None:
    job = cluster(lease=60.0)
    job.initialize(MODEL, Adam(0.5), consistency_of(path))
    (server,) = job.servers
    right = in_messages(server.host.need().layout)
    release = threading.Event()
    with Raw(job) as raw:
        raw.ready(0)
        before = arrays_now(server)
        for at in (1, 6):
            with writing(server) if path == "staged" else nullcontext():
                refused(
                    "DEADLINE_EXCEEDED",
                    "",
                    lambda: raw.send(call, stalling(right, at, release), timeout=0.2),  # noqa: B023
                )
            assert arrays_now(server) == before, at
        release.set()
        assert raw.send(call, right).version == 1
    assert saved(job) == computed(Adam(0.5), MODEL, [GRADS])


@pytest.mark.parametrize("call", CALLS)
def test_a_worker_on_a_slow_line_holds_nobody_up(
    cluster: MakeCluster, proxy: MakeProxy, background: Background, call: str
) -> None:
    """Applied as it comes its push would keep others waiting: it makes way, and counts once."""
    job = cluster(lease=30.0)
    size = 4_000_000
    job.initialize({"w": np.zeros(size, np.float32)}, SGD(0.5))
    grads = {"w": np.ones(size, np.float32)}
    (server,) = job.servers
    line = proxy(job.addresses[0])
    slow, quick = job.client("worker:0", at=[line.address]), job.client("worker:1")
    slow.pull()
    quick.pull()
    # The proxy holds a megabyte at most: about 20 MB/s.
    line.delay(0.05)
    pushing = background(slow.push if call == "push" else slow.push_pull, grads)
    wait_for(partial(has_fed, server), "some of it to arrive")
    line.blackhole("up")
    began = time.monotonic()
    for version in (1, 2, 3):
        assert quick.push(grads).version == version
    # A quarter of a second, and what three pushes take.
    assert time.monotonic() - began < 3
    assert not pushing.done() and job.status().counts["applied"] == 3
    line.heal()
    pushing.result(20)
    assert slow.last_result and slow.last_result.version == 4
    assert quick.push(grads).version == 5
    assert (quick.pull()["w"] == -2.5).all()
    assert slow.push_pull(grads).version == 6


def has_fed(server: ps.Server) -> bool:
    """Whether a push is applied as it comes, and the first of it has come."""
    with server.host.reading() as shard:
        push = shard.streaming()
        return push is not None and push.fed > 0


# -- back-pressure ---------------------------------------------------------------------------------


@contextmanager
def no_room(server: ps.Server) -> Iterator[None]:
    """One push is being applied as it comes, one is staged, and neither goes on."""
    with writing(server):
        host, member = server.host, (f"worker:{next(_numbers)}", 1)
        host.join(member, 0, None)
        with host.reading() as shard:
            staged = begin(shard, member)
        assert not staged.update
        try:
            yield
        finally:
            with host.reading() as shard:
                shard.abort(staged)
            host.leave(shard.state.session, member, "done", None)


def gated(job: Cluster, count: int) -> bool:
    """Whether so many calls wait for room."""
    return sum("bytes are in flight (--max-in-flight)" in w for w in job.status().waiting) == count


@pytest.mark.parametrize("call", CALLS)
def test_a_push_waits_for_room_and_control_calls_do_not(
    cluster: MakeCluster, background: Background, call: str
) -> None:
    job = cluster(lease=30.0, max_in_flight=1)
    job.initialize(MODEL, SGD(0.5))
    (server,) = job.servers
    client = job.client("worker:0")
    client.pull()
    with no_room(server):
        pushing = background(client.push if call == "push" else client.push_pull, GRADS)
        wait_for(partial(gated, job, 1), "the push to wait")
        with Raw(job, "worker:1") as raw:
            began = time.monotonic()
            for _ in range(20):
                raw.parameter.Heartbeat(pb.HeartbeatRequest(caller=raw.caller), timeout=5)
                assert job.status().version == 0
            assert job.client().pull(wait=False).version == 0
            assert (time.monotonic() - began) / 20 < 0.1
        assert not pushing.done() and job.status().bytes_in_flight == 0
    pushing.result(10)
    assert client.last_result and client.last_result.version == 1
    assert not job.status().waiting


def test_a_push_that_finds_no_room_in_time_may_be_sent_again(cluster: MakeCluster) -> None:
    """The status says so, and a client backs off: no error if room comes before it gives up."""
    job = cluster(lease=30.0, max_in_flight=1, push_wait_s=0.15)
    job.initialize(MODEL, SGD(0.5))
    (server,) = job.servers
    right = in_messages(server.host.need().layout)
    said: list[str] = []
    client = job.client("worker:1", on_wait=said.append)
    client.pull()
    with Raw(job) as raw, ThreadPoolExecutor(1) as pool:
        with no_room(server):
            before = job.status()
            for call in CALLS:
                error = refused(
                    "DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED",
                    "waited 0.15 s: gradients of 1 bytes are in flight",
                    lambda: raw.send(call, right),  # noqa: B023
                )
                assert isinstance(error, grpc.RpcError)
                assert isinstance(translated(error, "ps:0"), RETRYABLE)
            assert job.status().counts == before.counts
            pushing = pool.submit(client.push, GRADS)
            wait_for(lambda: said, "the client to back off")
            assert "are in flight" in said[0]
        assert pushing.result(10).applied
        assert raw.send("push", right).version == 2
    assert saved(job) == computed(SGD(0.5), MODEL, [GRADS, GRADS])


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_nobody_waits_for_takes_no_room(
    cluster: MakeCluster, background: Background, call: str
) -> None:
    """Its client has sent the push again: that one is not to be broken off for the first."""
    job = cluster(lease=30.0, max_in_flight=1)
    job.initialize(MODEL, SGD(0.5))
    (server,) = job.servers
    right = in_messages(server.host.need().layout)
    release = threading.Event()
    with Raw(job) as raw, Raw(job, of=raw) as again:
        with no_room(server):
            for _ in range(3):
                refused("DEADLINE_EXCEEDED", "", lambda: raw.send(call, right, timeout=0.1))
            wait_for(partial(gated, job, 0), "the server to notice")
            aborted = job.status().counts["aborted"]
            pushing = background(again.send, call, stalling(right, 2, release))
            wait_for(partial(gated, job, 1), "the second to wait")
        wait_for(partial(has_fed, server), "the second to have begun")
        server.host.wake()
        release.set()
        assert pushing.result(10).version == 1
        assert job.status().counts["aborted"] == aborted + 2, "those that took the room"


def test_more_workers_than_threads_through_no_room(
    cluster: MakeCluster, background: Background
) -> None:
    """Some wait, others are refused and come again; control calls find a thread all the time."""
    job = cluster(lease=30.0, max_in_flight=1, max_workers=2)
    job.initialize(MODEL, SGD(0.5))
    (server,) = job.servers
    clients = [job.client(f"worker:{i}") for i in range(30)]
    for client in clients:
        client.join()
    with no_room(server):
        pushing = [background(client.push, GRADS) for client in clients]
        wait_for(partial(gated, job, 2), "as many to wait as may")
        for _ in range(20):
            assert job.status().version == 0
            with job.servers[0].host.reading() as shard:
                assert shard.nbytes_in_flight == 0
    for each in pushing:
        assert each.result(20).applied
    assert job.status().version == 30
    assert saved(job) == computed(SGD(0.5), MODEL, [GRADS] * 30)


@pytest.mark.parametrize(
    ("limit", "max_message"),
    [(1, ONE_MESSAGE), (1, MANY_MESSAGES), (2 * 8400, MANY_MESSAGES), (1 << 30, ONE_MESSAGE)],
)
def test_many_workers_through_little_room(
    cluster: MakeCluster, background: Background, limit: int, max_message: int
) -> None:
    """Each of their steps counts, nothing read is torn, and no more is kept than may be."""
    job = cluster(lease=30.0, max_in_flight=limit, max_message=max_message)
    job.initialize(MODEL, SGD(0.5))
    (server,) = job.servers
    done = threading.Event()

    def work(index: int) -> None:
        client = job.client(f"worker:{index}")
        for _ in range(20):
            if index % 2:
                assert client.push(GRADS).applied
            else:
                client.push_pull(GRADS)

    def watch() -> tuple[int, int]:
        most, reads = 0, 0
        reader = job.client()
        while not done.is_set():
            with server.host.reading() as shard:
                most = max(most, shard.nbytes_in_flight)
            params = reader.pull(wait=False)
            assert (params["d"] == 2 - 0.125 * params.version).all()
            assert (params["b"] == params["d"][0] - 1).all()
            reads += 1
        return most, reads

    watching = background(watch)
    for each in [background(work, i) for i in range(8)]:
        each.result(30)
    done.set()
    most, reads = watching.result(10)
    assert most <= max(8400, limit) and reads > 3
    assert saved(job) == computed(SGD(0.5), MODEL, [GRADS] * 160)


def test_a_round_gets_its_gradients_whatever_the_room(
    cluster: MakeCluster, background: Background
) -> None:
    """Else it could never close: one of each worker has to be there, and some come slowly."""
    job = cluster(lease=30.0, max_in_flight=1, push_wait_s=1.0)
    job.initialize(MODEL, SGD(0.5), ps.Sync(workers=3))
    clients = [job.client(f"worker:{i}", connect_timeout=0.5) for i in range(2)]
    release = threading.Event()
    with Raw(job, "worker:2") as raw:
        for pulling in [background(client.pull) for client in clients]:
            pulling.result(10)
        right = in_messages(job.servers[0].host.need().layout)
        slow = background(raw.send, "push", stalling(right, 6, release))
        wait_for(lambda: job.status().bytes_in_flight == 7200, "most of the slow one")
        for client in clients:
            assert client.push(GRADS).applied
        assert job.status().bytes_in_flight == 7200 + 2 * 8400
        release.set()
        assert slow.result(10).version == 1
    assert clients[0].pull().version == 1
    assert saved(job) == computed(SGD(0.5), MODEL, [GRADS])


# -- while updates are made ------------------------------------------------------------------------


def test_nobody_waits_for_a_push_that_is_half_applied(cluster: MakeCluster) -> None:
    """What is read is the version before, all of it, and every other call is answered."""
    job = cluster(lease=30.0)
    job.initialize(MODEL, Adam(0.5))
    (server,) = job.servers
    reader = job.client()
    with writing(server, fed=True) as push, Raw(job) as raw:
        began = time.monotonic()
        for _ in range(5):
            params = reader.pull(wait=False)
            assert params.version == job.status().version == 0
            assert {name: params[name].tobytes() for name in params} == {
                name: array.tobytes() for name, array in MODEL.items()
            }
            raw.parameter.Heartbeat(pb.HeartbeatRequest(caller=raw.caller), timeout=5)
            with job.control() as control:
                control.survey()
        assert time.monotonic() - began < 2
        assert push is server.host.need().streaming()


def test_a_large_update_holds_nobody_up(cluster: MakeCluster, background: Background) -> None:
    """While the arithmetic runs, status, heartbeat and pull are answered with the state before."""
    size = 16 << 20
    job = cluster(lease=60.0)
    start = {"large": np.zeros(size, np.float32), "small": np.zeros(4, np.float32)}
    job.initialize(start, Adam(0.5), ps.Sync(workers=1))
    (server,) = job.servers
    client, reader = job.client("worker:0"), job.client()
    grads = {name: np.ones_like(array) for name, array in start.items()}
    client.pull(["small"])
    beat = pb.HeartbeatRequest(
        caller=caller("worker:0", job.status().workers[0].incarnation, job.status().session)
    )
    waits: dict[str, list[float]] = {"status": [], "heartbeat": [], "pull": []}
    lasted = 0.0
    with closing(transport.make_channel(server.address)) as channel:
        stub = transport.ParameterStub(channel)
        calls: dict[str, Callable[[int], object]] = {
            "status": lambda version: job.status().version == version,
            "heartbeat": lambda _: stub.Heartbeat(beat, timeout=10),
            "pull": lambda version: reader.pull(["small"], wait=False).version == version,
        }
        for version in range(3):
            pushing = background(client.push, grads)
            update = wait_for(partial(being_made, server), "the update", every=0.001)
            began = asked = time.monotonic()
            for name in itertools.cycle(calls):
                answer = calls[name](version)
                asked, before = time.monotonic(), asked
                if being_made(server) is not update:
                    break
                assert answer, name
                waits[name].append(asked - before)
            lasted += time.monotonic() - began
            pushing.result(20)
            client.pull(["small"])
    assert lasted > 0.1
    for name, seconds in waits.items():
        assert len(seconds) >= 3, (name, lasted)
        # Two busy cores may take their time now and then, but nobody waited for the arithmetic.
        assert statistics.median(seconds) < 0.05, (name, lasted, seconds)
        assert max(seconds) < max(0.1, lasted / 4), (name, lasted, seconds)


def being_made(server: ps.Server) -> Any:
    """The update in the making, if any."""
    with server.host.reading() as shard:
        return shard._params.writer


def test_turns_lose_no_update_and_tear_no_read(
    cluster: MakeCluster, background: Background
) -> None:
    """Four workers at once, each step in many messages, while somebody reads what is new."""
    job = cluster(lease=30.0, max_message=1 << 18)
    size = 500_000
    job.initialize({"w": np.zeros(size, np.float32)}, SGD(0.5))
    grads = {"w": np.ones(size, np.float32)}
    done = threading.Event()

    def work(index: int) -> None:
        client = job.client(f"worker:{index}")
        for _ in range(25):
            params = client.push_pull(grads)
            assert (params["w"] == params["w"][0]).all()

    def read() -> int:
        reader, versions = job.client(), set()
        params = reader.pull(wait=False)
        while not done.is_set():
            params = reader.pull(wait=False, have=params)
            assert (params["w"] == -0.5 * params.version).all()
            versions.add(params.version)
        return len(versions)

    reading = background(read)
    for working in [background(work, i) for i in range(4)]:
        working.result(30)
    done.set()
    assert reading.result(10) > 3
    params = job.client().pull(wait=False)
    assert params.version == 100 and (params["w"] == -50).all()


# -- what is not sent again ------------------------------------------------------------------------


def test_a_shard_that_has_not_changed_sends_nothing(
    cluster: MakeCluster, proxy: MakeProxy, background: Background
) -> None:
    """Of two shards one has the next step already: its arrays come, the other's are shared."""
    job = cluster(2, lease=30.0)
    arrays = {"a": np.zeros(50_000), "b": np.zeros(50_000)}
    job.initialize(arrays)
    lines = [proxy(address) for address in job.addresses]
    upward = [proxy(address) for address in job.addresses]
    reader = job.client(at=[line.address for line in lines])
    writer = job.client("worker:0", at=[line.address for line in upward])
    first = reader.pull(wait=False)
    writer.pull()
    upward[0].blackhole("up")
    pushing = background(writer.push, {name: np.ones_like(a) for name, a in arrays.items()})
    wait_for(lambda: job.status(1).version == 1, "the step to reach one shard")
    names = [s.layout.variables[0].name for s in (job.status(0), job.status(1))]
    before = [line.forwarded["down"] for line in lines]
    mixed = reader.pull(wait=False, have=first)
    grown = [line.forwarded["down"] - was for line, was in zip(lines, before, strict=True)]
    assert grown[0] < 2000 and grown[1] > 400_000
    assert mixed.versions == (0, 1)
    assert np.shares_memory(mixed[names[0]], first[names[0]])
    assert (mixed[names[1]] == -0.5).all() and (first[names[1]] == 0).all()
    upward[0].heal()
    pushing.result(10)
    # The shard that was behind: what is had may be of different pulls.
    again = reader.pull(wait=False, have=mixed)
    assert again.versions == (1, 1) and (again[names[0]] == -0.5).all()
    assert np.shares_memory(again[names[1]], mixed[names[1]])


def test_what_is_had_of_some_variables(cluster: MakeCluster, proxy: MakeProxy) -> None:
    """Only the same question has the same answer."""
    job = cluster(2, lease=30.0)
    job.initialize({name: np.full(20_000, float(i)) for i, name in enumerate("abcd", start=1)})
    lines = [proxy(address) for address in job.addresses]
    reader = job.client(at=[line.address for line in lines])

    def pull(names: Sequence[str] | None, have: ps.Params) -> tuple[ps.Params, int]:
        before = sum(line.forwarded["down"] for line in lines)
        params = reader.pull(names, wait=False, have=have)
        for i, name in enumerate("abcd", start=1):
            assert name not in params or (params[name] == i).all()
        return params, sum(line.forwarded["down"] for line in lines) - before

    one = reader.pull(["a"], wait=False)
    same, nbytes = pull(["a"], one)
    assert list(same) == ["a"] and np.shares_memory(same["a"], one["a"]) and nbytes < 2000
    for names, arrays in ((["b"], 1), (["a", "b"], 2), (None, 4)):
        other, nbytes = pull(names, one)
        assert list(other) == (names or list("abcd"))
        assert arrays * 160_000 < nbytes < (arrays + 1) * 160_000
    everything = reader.pull(wait=False)
    assert pull(["a"], everything)[1] > 160_000
    assert pull(None, everything)[1] < 2000
    with pytest.raises(KeyError, match="'b' was not pulled"):
        same["b"]


def test_what_is_had_of_another_session(cluster: MakeCluster) -> None:
    """The same version after a restore is another one."""
    job = cluster(2, lease=30.0)
    job.initialize({"a": np.zeros(3), "b": np.zeros(3)})
    worker, reader = job.client("worker:0"), job.client()
    with job.control() as control:
        kept = assemble.merge(control.snapshot(5.0))
        for name, value in (("a", 7.0), ("b", 8.0)):
            kept.variables[name].value[:] = value
        have = [reader.pull(wait=False), worker.pull()]
        control.load(assemble.divide(kept, worker.job(), 2, 99, False), restore=True)
    for client, before in zip((reader, worker), have, strict=True):
        params = client.pull(wait=client is worker, have=before)
        assert params.versions == before.versions == (0, 0)
        assert (params["a"] == 7).all() and (params["b"] == 8).all()
        assert (before["a"] == 0).all()
    assert worker.push({"a": np.ones(3)}).version == 1


def test_a_name_given_twice_is_pulled_once(cluster: MakeCluster) -> None:
    job = cluster(2)
    job.initialize({"a": np.zeros(3), "b": np.ones(3)})
    params = job.client().pull(["b", "a", "b"], wait=False)
    assert list(params) == ["a", "b"] and len(params) == 2


def test_some_of_very_many_variables(cluster: MakeCluster) -> None:
    """Every other one, so that no two lie side by side: not much dearer than all of them."""
    count = 20_000
    job = cluster(lease=60.0)
    job.initialize({f"v{i:05}": np.full(2, i, np.float32) for i in range(count)})
    client = job.client()
    client.job()
    spent = []
    for names in (list(client.pull(wait=False)), [f"v{i:05}" for i in range(0, count, 2)]):
        began = time.process_time()
        params = client.pull(names, wait=False)
        arrays = [params[name] for name in names]
        spent.append(time.process_time() - began)
        assert all(
            (array == int(name[1:])).all() for name, array in zip(names, arrays, strict=True)
        )
    assert spent[1] < 5 * spent[0]


def test_a_server_knows_who_has_pulled_the_end(cluster: MakeCluster) -> None:
    """Each time and on each shard, or the chief would wait for somebody who has all of it."""
    job = cluster(2, lease=30.0)
    job.initialize({"a": np.zeros(4), "b": np.zeros(4)}, last_step=1)
    job.client("worker:0").push({"a": np.ones(4)})
    for i in range(1, 61):
        client = job.client(f"worker:{i}")
        assert client.pull().complete
        for server in job.servers:
            wait_for(partial(told, server, f"worker:{i}"), "it to be known", 5)
        client.close()


def told(server: ps.Server, worker: str) -> bool:
    with server.host.reading() as shard:
        return worker not in shard.untold()


# -- both at once ----------------------------------------------------------------------------------


def test_what_is_done_meanwhile_is_done_while_others_are_awaited(
    cluster: MakeCluster, background: Background
) -> None:
    """All has been sent and nothing is waited for yet: the push is in, and the round is open."""
    job = cluster(2, lease=30.0, max_message=MANY_MESSAGES)
    job.initialize(MODEL, SGD(0.5), ps.Sync(workers=2))
    first, second = job.client("worker:0"), job.client("worker:1")
    for pulling in [background(first.pull), background(second.pull)]:
        pulling.result(10)
    seen: list[int] = []

    def meanwhile() -> None:
        for shard in range(2):
            wait_for(lambda: job.status(shard).workers[0].sequence == 1, "the push")  # noqa: B023
        seen.append(job.status().version)
        second.push(GRADS)

    assert first.push_pull(GRADS, meanwhile=meanwhile).version == 1
    assert seen == [0]


class Noting:
    """Batches that note when they were asked for, and by whom."""

    def __init__(self, batches: Batches) -> None:
        self.asked: list[int] = []
        self._batches = batches

    def batch(self, clock: int) -> Batch:
        self.asked.append(clock)
        return self._batches.batch(clock)


@pytest.mark.parametrize("rule", [SGD(0.1), Adam(0.05)], ids=["sgd", "adam"])
@pytest.mark.parametrize("consistency", [ps.Async(), ps.Sync(workers=1), ps.Ssp(slack=1)], ids=str)
def test_training_is_the_same_with_overlap_and_without(
    cluster: MakeCluster, rule: Optimizer, consistency: Any
) -> None:
    data = load_data("line")
    model = Linear(data.spec)
    results = []
    for overlap in (True, False):
        job = cluster(2, lease=30.0)
        job.initialize(model.init(np.random.default_rng(0)), rule, consistency, last_step=40)
        batches = Noting(Batches(data, 32))
        session = TrainingSession(job.client("worker:0"), model, batches, overlap=overlap)
        summary = session.run()
        # One more has been prepared when the job turns out to be over.
        assert batches.asked == list(range(40 + overlap))
        results.append((saved(job), summary.first_loss, summary.last_loss, summary.steps))
    assert results[0] == results[1]


# -- sizes and distances ---------------------------------------------------------------------------


def test_two_hundred_variables_in_one_go(cluster: MakeCluster) -> None:
    """100 KB each, with every default: there and back, equal bit for bit."""
    rng = np.random.default_rng(0)
    model = {f"v{i:03}": rng.standard_normal(25_000, dtype=np.float32) for i in range(200)}
    job = cluster(lease=30.0)
    job.initialize(model, SGD(1.0))
    client = job.client("worker:0")
    params = client.pull()
    assert all(params[name].tobytes() == array.tobytes() for name, array in model.items())
    params = client.push_pull(model)
    assert all(not params[name].any() for name in model)


def test_a_variable_beyond_the_largest_message(cluster: MakeCluster, tmp_path: Path) -> None:
    """3.5 MiB where a message has 1: initialised, pushed, pulled, saved and restored exactly."""
    start: Arrays = {"large": np.arange(917_504, dtype=np.float32), "small": np.ones(3)}
    grads = {name: np.asarray(array * 0.5) for name, array in start.items()}
    job, other = (cluster(2, lease=30.0, max_message=1 << 20) for _ in range(2))
    job.initialize(start, Momentum(0.5))
    client = job.client("worker:0")
    client.push(grads)
    client.push_pull(grads)
    expected = computed(Momentum(0.5), start, [grads, grads])
    assert saved(job) == expected
    with job.control() as control:
        path = checkpoint.save(tmp_path, assemble.merge(control.snapshot(5.0)))
    found = checkpoint.load(path)
    assert found.global_step == 2
    with other.control() as control:
        control.survey()
        control.claim()
        control.load(assemble.divide(found, client.job(), 2, 99, False), restore=True)
    assert saved(other) == expected
    params = other.client().pull(wait=False)
    assert params["large"].tobytes() == expected["large"][0]


@pytest.mark.parametrize("idle", [False, True])
def test_a_server_that_is_away_for_seconds(
    cluster: MakeCluster, background: Background, idle: bool
) -> None:
    """Restored when it is back: whoever tried meanwhile and whoever did not goes on at once."""
    job = cluster(lease=1.0)
    job.initialize(MODEL, SGD(0.5))
    said: list[str] = []
    client = job.client("worker:0", connect_timeout=20, on_wait=said.append)
    client.push_pull(GRADS)
    with job.control() as control:
        kept = assemble.divide(assemble.merge(control.snapshot(5.0)), client.job(), 1, 99, False)
    job.servers[0].stop()
    pulling = None if idle else background(client.pull)
    began = time.monotonic()
    wait_for(lambda: time.monotonic() - began > 1.5, "it to be away")
    assert idle or said[0] == f"waiting for ps:0 at {job.addresses[0]} (connection refused)"
    port = int(job.addresses[0].rpartition(":")[2])
    with ps.Server(port, settings=HostSettings(lease_s=1.0)) as server:
        with job.control() as control:
            control.survey()
            control.load(kept, restore=True)
        began = time.monotonic()
        if pulling:
            assert pulling.result(10).version == 1
        else:
            with pytest.raises(AbortedError):
                client.push(GRADS)
            assert client.pull().version == 1
        assert client.push_pull(GRADS).version == 2
        assert time.monotonic() - began < 4
        assert server.host.need().clocks == {"worker:0": 1}


def test_both_sides_agree_on_pings() -> None:
    """A server takes them as often as a client sends them, idle or not, and counts no strikes."""
    for keepalive_s in (0.5, 10.0, 60.0):
        ours: dict[str, int] = dict(transport.server_options(keepalive_s=keepalive_s))
        theirs: dict[str, int] = dict(transport.channel_options(keepalive_s=keepalive_s))
        every = theirs["grpc.keepalive_time_ms"]
        assert every == keepalive_s * 1000
        assert ours["grpc.http2.min_ping_interval_without_data_ms"] < every
        assert ours["grpc.http2.max_ping_strikes"] == 0
        assert ours["grpc.keepalive_permit_without_calls"] == 1
        assert theirs["grpc.keepalive_permit_without_calls"] == 1
        assert theirs["grpc.http2.max_pings_without_data"] == 0


def test_arrays_travel_as_bytes() -> None:
    """No message repeats numbers: each holds its arrays in `payload`, or `data` of a named one."""
    for service in (transport.PARAMETER_SERVICE, transport.CONTROL_SERVICE):
        for method in service.methods:
            for message in (method.input_type, method.output_type):
                for field in message.fields:
                    assert not (
                        field.is_repeated
                        and field.cpp_type in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE)
                    ), field.full_name
                payload = message.fields_by_name.get("payload")
                assert payload is None or payload.type == payload.TYPE_BYTES
    assert tensor_pb2.Tensor.DESCRIPTOR.fields_by_name["data"].type == 12
