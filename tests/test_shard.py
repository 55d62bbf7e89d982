"""The decisions of one shard, one scenario a test; `test_shard_machine` mixes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import pytest
from shard_cases import (
    LEASE,
    SESSION,
    VARIABLES,
    arrays_of,
    begin,
    drain,
    feed,
    frozen,
    gradient,
    header,
    load,
    pulled,
    push,
    restored,
    start,
    values,
)

from paramserver.buffers import MAX_PINNED
from paramserver.consistency import Async, Consistency, Gate, Ssp, Sync
from paramserver.cut_off import CutOffStep
from paramserver.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    ParamServerError,
    SessionSupersededError,
    UnavailableError,
)
from paramserver.job import Job
from paramserver.layout import Array, Range
from paramserver.membership import Departure, Member, Roster
from paramserver.optimizers import SGD, Adam, Optimizer
from paramserver.push import PushResult
from paramserver.shard import Shard, View
from paramserver.state import Loading, ShardState

Key = tuple[str, int]
A, B, C = ("worker:0", 11), ("worker:1", 12), ("worker:2", 13)
RATE = 0.5


def shard_of(
    consistency: Consistency | None = None,
    *members: Key,
    last_step: int = 0,
    optimizer: Optimizer | None = None,
    **options: Any,
) -> Shard:
    """A fresh shard with some members."""
    job = Job(consistency or Async(), optimizer or SGD(RATE), last_step=last_step)
    shard = start(job, **options)
    if shard.leads:
        for member in members:
            shard.join(member, 0.0)
    else:
        shard.adopt(roster(1, *members))
    return shard


def roster(number: int, *members: Key | Member, **facts: Any) -> Roster:
    """News from ps:0."""
    living = tuple(m if isinstance(m, Member) else Member(*m) for m in members)
    return Roster(number, SESSION, living, **{"open": True, **facts})


def gone(member: Key, sequence: int) -> Departure:
    return Departure(*member, sequence, "lease ended")


def counted(shard: Shard) -> float:
    """How many updates of ones every element of the shard has seen: they must agree."""
    found = {float(element) / -RATE for array in values(shard).values() for element in array}
    assert len(found) == 1, f"torn: {values(shard)}"
    return found.pop()


# -- one push --------------------------------------------------------------------------------------


def test_a_push_is_one_update_of_everything() -> None:
    shard = shard_of(Async(), A)
    assert push(shard, A) == PushResult(True, "applied", 1, 0, 1)
    assert push(shard, A, 2) == PushResult(True, "applied", 2, 0, 2)
    assert (counted(shard), shard.version, shard.global_step, shard.clocks) == (2, 2, 2, {A[0]: 2})


def test_staleness_is_the_updates_between_pull_and_push() -> None:
    shard = shard_of(Async(), A, B)
    for sequence in (1, 2, 3):
        push(shard, B, sequence)
    assert push(shard, A, pulled_version=1).staleness == 2
    assert push(shard, A, 2, pulled_version=99).staleness == 0


def test_pieces_may_come_in_any_order_and_size() -> None:
    shard = shard_of(Async(), A, B)
    pieces = [
        (Range(piece.group, piece.offset + i, 1), array[i : i + 1])
        for piece, array in gradient(shard.layout)
        for i in range(piece.count)
    ]
    push(shard, A, pieces=pieces[::-1])
    assert counted(shard) == 1
    first = begin(shard, A, 2)
    second = begin(shard, B)  # staged, while the first is applied as it comes
    feed(second, pieces[::2] + pieces[1::2])
    feed(first, pieces[1::2] + pieces[::2])
    assert shard.submit(first) and not shard.submit(second)
    drain(shard)
    assert counted(shard) == 3


@pytest.mark.parametrize("staged", [False, True])
def test_what_a_push_leaves_out_stays_as_it_is(staged: bool) -> None:
    shard = shard_of(Sync(1) if staged else Async(), A)
    pulled(shard, A)
    push(shard, A, pieces=gradient(shard.layout, names=["b"]))
    assert {name: array.tolist() for name, array in values(shard).items()} == {
        "w": [0] * 6,
        "b": [-RATE] * 4,
        "scale": [0],
    }
    pulled(shard, A)
    push(shard, A, 2, pieces=[])
    assert (shard.version, shard.global_step) == (2, 2), "an empty push is a step, too"


NAN = [(Range(0, 0, 6), np.array([1, 1, np.nan, 1, 1, 1], np.float32))]
ONES = np.ones(10, np.float32)


@pytest.mark.parametrize("mode", [Async(), Ssp(1), Sync(1)], ids=str)
@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        (NAN, "gradient 'w' is nan at element 2"),
        ([(Range(0, 6, 4), ONES[:4] * np.inf)], "gradient 'b' is inf at element 0"),
        ([(Range(0, 0, 10), ONES), *NAN], "overlap at variable 'w'"),
        ([(Range(0, 0, 6), ONES[:6]), (Range(0, 5, 1), ONES[:1])], "overlap at variable 'w'"),
        ([(Range(0, 0, 5), ONES[:5])], "'w' arrived in part only"),
        ([(Range(0, 0, 8), ONES[:8])], "'b' arrived in part only"),
        ([(Range(0, 8, 4), ONES[:4])], "outside group 0 of 10 elements"),
        ([(Range(2, 0, 1), ONES[:1])], "names group 2"),
        ([(Range(0, 0, 6, slot=1), ONES[:6])], "names slot 1"),
    ],
)
def test_a_broken_push_changes_nothing(
    mode: Consistency, pieces: list[tuple[Range, Array]], message: str
) -> None:
    shard = shard_of(mode, A)
    pulled(shard, A)
    push(shard, A)
    pulled(shard, A)
    before = frozen(shard)
    # Behind something whole, as the second part of a message.
    for pieces_sent in (pieces, [(Range(1, 0, 1), np.ones(1)), *pieces]):
        broken = begin(shard, A, 2)
        with pytest.raises(InvalidArgumentError, match=message):
            feed(broken, pieces_sent)
        shard.abort(broken)
        shard.abort(broken)
        assert frozen(shard) == before
    push(shard, A, 2)
    assert counted(shard) == 2


def test_a_push_that_breaks_off_changes_nothing() -> None:
    shard = shard_of(Async(), A, B)
    for member in (A, B):
        pulled(shard, member)
    before = frozen(shard)
    half = begin(shard, A)
    half.feed(Range(0, 0, 6), ONES[:6])
    waiting = begin(shard, B)
    waiting.feed(Range(0, 0, 6), ONES[:6])
    shard.abort(half)
    shard.abort(waiting)
    drain(shard)
    assert shard.nbytes_in_flight == 0
    assert frozen(shard) == before and counted(shard) == 0


REFUSED: list[tuple[str, dict[str, Any], type[ParamServerError], str]] = [
    ("another session", {"session": 5}, SessionSupersededError, "restored from a checkpoint"),
    ("no session", {"session": 0}, SessionSupersededError, "pull again"),
    ("a stranger", {"worker": "worker:9"}, LeaseLostError, "worker:9 is no member"),
    ("another life", {"incarnation": 99}, LeaseLostError, "worker:0 is no member"),
    ("an old push", {"sequence": 2}, AbortedError, "sent push 2 after push 3"),
    ("push 0", {"sequence": 0}, AbortedError, "sent push 0 after push 3"),
    ("a clock behind", {"clock": 2}, AbortedError, "pushes for clock 2, and is at clock 3"),
    ("a clock ahead", {"clock": 4}, AbortedError, "and is at clock 3"),
    ("a number of another", {"step": 9}, AbortedError, "step 9 is not granted to worker:0"),
    ("a number spent", {"step": 3}, AbortedError, "step 3 is not granted to worker:0"),
]


@pytest.mark.parametrize("mode", [Async(), Ssp(9), Sync(1)], ids=str)
@pytest.mark.parametrize(
    ("changes", "kind", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_refused_push_changes_nothing(
    mode: Consistency, changes: dict[str, Any], kind: type[ParamServerError], message: str
) -> None:
    shard = shard_of(mode, A)
    for sequence in (1, 2, 3):
        pulled(shard, A)
        push(shard, A, sequence)
    pulled(shard, A)
    before = frozen(shard)
    with pytest.raises(kind, match=message) as caught:
        shard.begin(header(shard, A, **{"sequence": 4, **changes}), 0.0)
    assert type(caught.value) is kind
    assert frozen(shard) == before


def test_a_job_of_several_shards_needs_a_step_number() -> None:
    other = shard_of(Async(), A, index=1, count=2)
    with pytest.raises(FailedPreconditionError, match="needs the step number that ps:0 grants"):
        other.begin(header(other, A, step=0), 0.0)


# -- exactly once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Async(), Ssp(1), Sync(1)], ids=str)
def test_a_repeat_gets_the_same_answer_before_anything_else_is_checked(mode: Consistency) -> None:
    shard = shard_of(mode, A)
    pulled(shard, A)
    first = push(shard, A, pulled_version=0)
    before = frozen(shard)
    assert push(shard, A, clock=0) == first
    assert push(shard, A, clock=77, session=5, step=9) == first
    assert frozen(shard) == before
    assert shard.counts["repeated"] == 2 and counted(shard) == 1


@pytest.mark.parametrize("mode", [Async(), Sync(1)], ids=str)
def test_a_push_sent_again_takes_the_place_of_the_first(mode: Consistency) -> None:
    shard = shard_of(mode, A)
    pulled(shard, A)
    first = feed(begin(shard, A))
    second = begin(shard, A)
    with pytest.raises(UnavailableError, match="push 1: sent again"):
        first.feed(Range(0, 0, 0), ONES[:0])
    with pytest.raises(UnavailableError, match="push 1: sent again"):
        shard.submit(first)
    shard.abort(first)
    result = shard.submit(feed(second))
    drain(shard)
    assert result and result.applied and counted(shard) == 1
    assert push(shard, A) == result


def test_a_push_sent_again_while_it_is_applied_waits_for_its_result() -> None:
    shard = shard_of(Async(), A, B)
    ahead, staged = begin(shard, B), feed(begin(shard, A))
    shard.submit(staged)
    shard.submit(feed(ahead))
    update = shard.take_update()
    assert update
    assert shard.begin(header(shard, A), 0.0) == Gate(False, "the same push is being applied")
    update.run()
    shard.commit(update)
    assert push(shard, A, clock=0) == shard.result_of(staged)
    assert counted(shard) == 2


def test_a_staged_push_sent_again_is_not_applied_twice() -> None:
    shard = shard_of(Async(), A, B)
    ahead, staged = begin(shard, B), feed(begin(shard, A))
    assert shard.submit(staged) is None
    again = feed(begin(shard, A))
    assert shard.submit(again) is None
    shard.submit(feed(ahead))
    assert drain(shard) == 1
    assert counted(shard) == 2
    with pytest.raises(UnavailableError, match="sent again"):
        shard.result_of(staged)
    assert shard.result_of(again)


def test_a_result_is_known_even_if_its_worker_left_before_anybody_looked() -> None:
    shard = shard_of(Async(), A, B)
    ahead, staged = begin(shard, B), feed(begin(shard, A))
    shard.submit(staged)
    shard.submit(feed(ahead))
    drain(shard)
    shard.leave(A, "done", 0.0)
    assert shard.result_of(staged) == PushResult(True, "applied", 2, 1, 2)
    assert shard.roster.departed[-1].sequence == 1


@pytest.mark.parametrize("mode", [Async(), Sync(2)], ids=str)
def test_a_worker_that_is_gone_has_nothing_in_flight(mode: Consistency) -> None:
    shard = shard_of(mode, A, B)
    pulled(shard, A)
    half = feed(begin(shard, A))
    shard.leave(A, "signal", 0.0)
    with pytest.raises(UnavailableError, match="worker:0 is no member"):
        shard.submit(half)
    with pytest.raises(LeaseLostError):
        shard.begin(header(shard, A), 0.0)
    drain(shard)
    assert (counted(shard), shard.nbytes_in_flight) == (0, 0)


@pytest.mark.parametrize("mode", [Async(), Sync(1)], ids=str)
@pytest.mark.parametrize("staged", [False, True])
def test_a_push_begun_before_a_restore_does_not_touch_what_comes_after(
    mode: Consistency, staged: bool
) -> None:
    old = shard_of(mode, A, B)
    pulled(old, A)
    if staged and not old.sync:
        begin(old, B)
    late = begin(old, A)
    new = load(replace(old.state, session=SESSION + 1), {})
    new.join(A, 0.0)
    old.superseded = True
    before = frozen(new)
    for shard in (new, old):
        with pytest.raises(SessionSupersededError):
            shard.submit(feed(late) if shard is new else late)
        with pytest.raises(SessionSupersededError):
            shard.result_of(late)
        shard.abort(late)
    assert frozen(new) == before
    assert (counted(new), new.version, drain(old)) == (0, 0, 0)


# -- direct and staged -----------------------------------------------------------------------------


def test_one_push_is_applied_as_it_comes_the_others_wait_their_turn() -> None:
    shard = shard_of(Async(), A, B, C)
    direct, second, third = begin(shard, A), begin(shard, B), begin(shard, C)
    assert shard.streaming() is direct
    feed(second)
    feed(third)
    assert shard.nbytes_in_flight == 2 * (10 * 4 + 8)
    assert shard.submit(third) is None and shard.submit(second) is None
    assert shard.take_update() is None, "the direct one is before them"
    assert shard.submit(feed(direct)) == PushResult(True, "applied", 1, 0, 1)
    assert shard.streaming() is None
    assert drain(shard) == 2
    assert [r and r.version for r in map(shard.result_of, (third, second))] == [2, 3]
    assert counted(shard) == 3


@pytest.mark.parametrize("fed", [False, True])
def test_a_slow_push_makes_way_and_counts_once_when_it_is_sent_again(fed: bool) -> None:
    shard = shard_of(Async(), A, B)
    slow, other = begin(shard, A), feed(begin(shard, B))
    if fed:
        feed(slow)
    shard.submit(other)
    shard.make_way(slow)
    assert drain(shard) == 1 and counted(shard) == 1
    with pytest.raises(UnavailableError, match="arrives too slowly"):
        if fed:
            shard.submit(slow)
        else:
            feed(slow)
    shard.abort(slow)
    again = begin(shard, A)
    assert shard.streaming() is None, "the next one is staged"
    assert shard.submit(feed(again)) is None
    drain(shard)
    assert counted(shard) == 2
    assert shard.streaming() is None and begin(shard, A, 2) is shard.streaming()


def test_an_update_that_fails_changes_nothing() -> None:
    shard = shard_of(Sync(1), A)
    pulled(shard, A)
    assert shard.submit(feed(begin(shard, A)))
    before = frozen(shard)
    update = shard.take_update()
    assert update
    shard.commit(update)  # without run
    assert frozen(shard) == before
    assert drain(shard) == 1 and counted(shard) == 1


# -- reading ---------------------------------------------------------------------------------------


def test_what_is_read_never_changes() -> None:
    shard = shard_of(Async(), A)
    views = []
    for sequence in range(1, MAX_PINNED + 2):
        view = shard.pull(0, ("", 0), None)
        assert isinstance(view, View) and view.pin
        views.append((view.pin, frozen(view.pin.arrays)))
        push(shard, A, sequence)
        assert all(frozen(pin.arrays) == was for pin, was in views)
    assert not any(a.flags.writeable for pin, _ in views for a in pin.arrays.values())
    bound = (2 + MAX_PINNED) * (10 * 4 + 8)
    assert shard.nbytes == bound
    # One version more would be beyond the bound: the next update waits for a reader.
    waiting = feed(begin(shard, A, 99))
    assert shard.submit(waiting) is None
    assert drain(shard) == 0 and shard.nbytes == bound
    shard.release(views.pop(0)[0])
    assert drain(shard) == 1 and shard.result_of(waiting)
    for pin, was in views:
        assert frozen(pin.arrays) == was
        shard.release(pin)
    assert shard.nbytes == 2 * (10 * 4 + 8)


def test_reading_now_needs_no_membership_and_takes_no_part() -> None:
    shard = shard_of(Sync(3), A, last_step=5)
    before = frozen(shard)
    assert set(values(shard)) == {"w", "b", "scale"}
    assert frozen(shard) == before
    headers = shard.pull(0, ("", 0), None, values=False)
    assert headers == View(shard.layout, 0, 0, 0, False, None)
    with pytest.raises(SessionSupersededError):
        shard.pull(5, ("", 0), None)


def test_a_waiting_pull_is_for_members_at_their_own_clock() -> None:
    shard = shard_of(Async(), A)
    with pytest.raises(LeaseLostError, match="worker:1 is no member"):
        shard.pull(SESSION, B, 0)
    with pytest.raises(LeaseLostError, match="a caller without a name"):
        shard.pull(SESSION, ("", 0), 0)
    with pytest.raises(AbortedError, match="pulls for clock 1 and is at clock 0; join again"):
        shard.pull(SESSION, A, 1)
    with pytest.raises(SessionSupersededError):
        shard.pull(0, A, 0)


# -- sync ------------------------------------------------------------------------------------------


def test_a_round_is_the_mean_of_its_gradients_in_index_order() -> None:
    ten = ("worker:10", 5)
    shard = shard_of(Sync(3), ten, A, B)
    for member in (ten, A, B):
        pulled(shard, member)
    # Summed in any other order, the small one would be lost or not.
    for member, value in ((ten, -1e8), (B, 1e8), (A, 1.0)):
        result = push(shard, member, pieces=gradient(shard.layout, value))
        assert result == PushResult(True, "applied", 1, 0, 1)
    expected = ((np.float32(1.0) + np.float32(1e8)) + np.float32(-1e8)) / np.float32(3)
    assert values(shard)["w"].tolist() == [-RATE * expected] * 6
    assert (shard.version, shard.rounds, shard.global_step) == (1, 1, 1)


def test_a_variable_that_some_leave_out_counts_zero_for_them() -> None:
    shard = shard_of(Sync(2), A, B)
    for member, names in ((A, ["w"]), (B, ["w", "b"])):
        pulled(shard, member)
        push(shard, member, pieces=gradient(shard.layout, 1.0, names))
    found = {name: array[0] for name, array in values(shard).items()}
    assert found == {"w": -RATE, "b": -RATE / 2, "scale": 0}


def test_a_round_waits_for_everybody_and_says_for_whom() -> None:
    shard = shard_of(Sync(2), A)
    assert shard.pull(SESSION, A, 0) == Gate(
        False, "the first round waits for workers (1 of 2 joined)"
    )
    with pytest.raises(FailedPreconditionError, match="round 0 before it has begun"):
        shard.begin(header(shard, A), 0.0)
    shard.join(B, 0.0)
    pulled(shard, A)
    push(shard, A)
    assert shard.pull(SESSION, A, 1) == Gate(False, "round 0 waits for worker:1")
    with pytest.raises(FailedPreconditionError, match="round 1 before it has begun"):
        shard.begin(header(shard, A, 2), 0.0)
    assert (shard.version, counted(shard)) == (0, 0)
    pulled(shard, B)
    push(shard, B)
    assert pulled(shard, A).version == 1
    assert counted(shard) == 1


def test_a_newcomer_in_a_round_that_has_begun_takes_part_in_the_next() -> None:
    shard = shard_of(Sync(1), A)
    assert shard.join(B, 0.0) == 0, "nobody computes yet"
    pulled(shard, A)
    assert shard.join(C, 0.0) == 1
    assert shard.join(C, 0.0) == 1
    push(shard, A)
    assert not isinstance(shard.pull(SESSION, C, 1), View)
    pulled(shard, B)
    push(shard, B)
    for member in (A, B, C):
        pulled(shard, member)
        push(shard, member, 2)
    assert (shard.version, shard.rounds, counted(shard)) == (2, 2, 2)


def test_a_gradient_stays_in_its_round_when_its_worker_dies_at_ps0() -> None:
    shard = shard_of(Sync(2), A, B)
    pulled(shard, A)
    push(shard, A, pieces=gradient(shard.layout, 3.0))
    shard.heartbeat(B, LEASE / 2)
    assert [d.key for d in shard.tick(LEASE)] == [A]
    # The same worker again, while its old gradient is in the round: it joins the next one.
    again = (A[0], 99)
    assert shard.join(again, LEASE) == 1
    pulled(shard, B)
    push(shard, B, pieces=gradient(shard.layout, 1.0))
    assert values(shard)["b"].tolist() == [-RATE * 2.0] * 4
    for member in (B, again):
        pulled(shard, member)
        push(shard, member, 2)
    assert shard.version == 2


def test_a_round_whose_workers_all_died_is_closed_empty() -> None:
    shard = shard_of(Sync(1), A)
    pulled(shard, A)
    assert shard.join(B, 5.0) == 1
    assert [d.key for d in shard.tick(LEASE)] == [A]
    assert pulled(shard, B).step == 1, "no update has to be taken first"
    assert (shard.rounds, shard.version, shard.global_step) == (1, 0, 0)
    push(shard, B)
    assert (shard.rounds, shard.version, counted(shard)) == (2, 1, 1)


def test_an_abort_after_a_gradient_is_staged_is_too_late() -> None:
    shard = shard_of(Sync(2), A, B)
    pulled(shard, A)
    staged = feed(begin(shard, A))
    shard.submit(staged)
    shard.abort(staged)
    pulled(shard, B)
    push(shard, B)
    assert (shard.version, counted(shard)) == (1, 1)


# -- ssp -------------------------------------------------------------------------------------------


def test_nobody_runs_more_than_the_slack_ahead_of_the_slowest_alive() -> None:
    shard = shard_of(Ssp(2), A, B)
    for sequence in (1, 2):
        pulled(shard, A)
        push(shard, A, sequence)
    pulled(shard, A)
    push(shard, A, 3)
    assert shard.pull(SESSION, A, 3) == Gate(False, "clock 3 is more than 2 ahead of worker:1 at 0")
    assert shard.join(C, 0.0) == 0
    shard.leave(B, "done", 0.0)
    assert not isinstance(shard.pull(SESSION, A, 3), View)
    push(shard, C)
    assert pulled(shard, A).version == 4


# -- grants and the end ----------------------------------------------------------------------------


def test_global_step_ends_exactly_at_the_limit() -> None:
    shard = shard_of(Async(), A, B, C, last_step=2)
    assert [pulled(shard, m).step for m in (B, A, B)] == [1, 2, 1]
    waiting = shard.pull(SESSION, C, 0)
    assert waiting == Gate(False, "the last steps are granted to worker:1, worker:0")
    push(shard, A, step=2)
    assert shard.pull(SESSION, C, 0) == Gate(False, "the last steps are granted to worker:1")
    shard.leave(B, "signal", 0.0)
    assert pulled(shard, C).step == 1
    push(shard, C, step=1)
    assert shard.complete and shard.global_step == 2 and shard.roster.complete
    final = pulled(shard, A)
    assert (final.complete, final.step, final.version) == (True, 0, 2)
    shard.tell(A)
    assert shard.untold() == [C[0]]
    refused = push(shard, C, 2)
    assert refused == PushResult(False, "job_complete", 2, 0, 2)
    assert pulled(shard, C).complete and shard.untold() == [C[0]]  # not before it was sent
    shard.tell(C)
    assert shard.untold() == []
    assert counted(shard) == 2


def test_a_lone_client_may_push_without_a_number_up_to_the_limit() -> None:
    shard = shard_of(Async(), A, B, last_step=2)
    pulled(shard, B)
    push(shard, A)
    with pytest.raises(FailedPreconditionError, match="the last steps are granted to worker:1"):
        shard.begin(header(shard, A, 2), 0.0)
    push(shard, B)
    assert push(shard, A, 2).reason == "job_complete"


def test_a_raised_limit_lets_the_job_go_on() -> None:
    shard = shard_of(Async(), A, last_step=1)
    push(shard, A)
    assert pulled(shard, A).complete
    with pytest.raises(InvalidArgumentError, match="cannot be lowered to 4, below 5"):
        shard_of(Async(), A, last_step=5).set_last_step(4)
    number = shard.roster.number
    shard.set_last_step(3)
    assert not shard.complete and shard.untold() == [A[0]]
    assert shard.roster.number == number + 1 and not shard.roster.complete
    assert (shard.job.last_step, shard.roster.last_step) == (3, 3)
    assert pulled(shard, A).step == 2
    push(shard, A, 2)
    assert not shard.complete


def test_a_limit_is_not_set_below_what_is_promised() -> None:
    shard = shard_of(Async(), A, B)
    pulled(shard, A)
    pulled(shard, B)
    before = frozen(shard)
    with pytest.raises(InvalidArgumentError, match="cannot be lowered to 1, below 2"):
        shard.set_last_step(1)
    assert frozen(shard) == before
    shard.set_last_step(2)
    assert isinstance(shard.pull(SESSION, A, 0), View)


@dataclass(frozen=True)
class AtStep(SGD):
    """A rule whose rate is the number of the step."""

    kind: ClassVar[str] = "at_step"

    def at(self, step: int) -> Self:
        return replace(self, learning_rate=float(step))


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("staged", [False, True])
def test_the_rule_is_evaluated_at_the_granted_number(index: int, staged: bool) -> None:
    shard = shard_of(Async(), A, B, C, index=index, count=2, optimizer=AtStep())
    if shard.leads:
        assert [pulled(shard, m).step for m in (B, C, A)] == [1, 2, 3]
    first = begin(shard, C, step=2) if staged else None
    late = begin(shard, A, step=3)
    assert (shard.streaming() is late) == (not staged)
    shard.submit(feed(late))
    if first:
        shard.submit(feed(first))
    drain(shard)
    assert values(shard)["b"][0] == -(3.0 + (2.0 if staged else 0.0))


# -- membership and time ---------------------------------------------------------------------------


def test_ps0_alone_takes_members() -> None:
    other = shard_of(Async(), index=1, count=2)
    with pytest.raises(FailedPreconditionError, match="ps:1 takes no members; join at ps:0"):
        other.join(A, 0.0)
    with pytest.raises(InvalidArgumentError, match="has no incarnation"):
        shard_of().join(("worker:0", 0), 0.0)
    with pytest.raises(InvalidArgumentError, match="must be like 'worker:0'"):
        shard_of().join(("x", 1), 0.0)
    shard = shard_of(Async(), A)
    before = frozen(shard)
    with pytest.raises(AlreadyExistsError):
        shard.join((A[0], 99), 0.0)
    assert frozen(shard) == before


def test_each_change_of_membership_is_one_roster() -> None:
    shard = shard_of()
    seen = [shard.roster.number]
    for change in (
        lambda: shard.join(A, 0.0),
        lambda: shard.join(B, 1.0),
        lambda: shard.leave(A, "done", 2.0),
        lambda: shard.tick(11.0),
    ):
        change()
        seen.append(shard.roster.number)
    assert seen == [1, 2, 3, 4, 5]
    for no_change in (
        lambda: shard.leave(A, "done", 12.0),
        lambda: shard.tick(12.0),
    ):
        no_change()
        assert shard.roster.number == 5
    assert [(d.key, d.reason) for d in shard.roster.departed] == [
        (A, "done"),
        (B, "lease of 10 s ended"),
    ]


def test_when_time_alone_changes_something() -> None:
    shard = shard_of(Sync(3, min_workers=1))
    assert shard.next_deadline() is None
    shard.join(A, 1.0)
    assert shard.next_deadline() == 11.0
    shard.heartbeat(A, 4.0)
    assert shard.next_deadline() == 11.0, "the first round begins without the others"
    assert shard.hold(1, 5.0, 8.0).rounds == 0
    assert shard.next_deadline() == 8.0
    shard.tick(11.0)
    assert shard.roster.open and shard.next_deadline() == 14.0
    assert [d.key for d in shard.tick(14.0)] == [A]
    assert shard.next_deadline() is None


def test_a_heartbeat_that_comes_too_late() -> None:
    shard = shard_of(Async(), A)
    shard.tick(LEASE)
    with pytest.raises(LeaseLostError, match="worker:0 is no member"):
        shard.heartbeat(A, LEASE)


# -- the other shards ------------------------------------------------------------------------------


def other(mode: Consistency, *members: Key) -> Shard:
    """ps:1, with these members and one update of each applied (sync: one round of all)."""
    shard = shard_of(mode, *members, index=1, count=2)
    for member in members:
        push(shard, member)
    return shard


def test_a_shard_adopts_the_highest_number_of_its_session() -> None:
    shard = other(Async(), A)
    assert not shard.adopt(roster(1))
    assert not shard.adopt(replace(roster(9), session=5))
    assert shard.adopt(roster(5, A, B))
    assert not shard.adopt(roster(4, A))
    assert list(shard.clocks) == ["worker:0", "worker:1"]
    leader = shard_of(Async(), A)
    assert not leader.adopt(roster(99))


def test_a_push_of_the_departed_is_refused_and_what_it_left_is_listed() -> None:
    shard = other(Async(), A, B, C)
    push(shard, C, 2)
    half = begin(shard, A, 2)
    assert shard.adopt(roster(2, departed=(gone(A, 2), gone(B, 1), gone(C, 1))))
    with pytest.raises(UnavailableError):
        feed(half)
    for member in (A, B, C):
        with pytest.raises(LeaseLostError):
            shard.begin(header(shard, member, 3), 0.0)
    assert shard.cut_off.steps == [CutOffStep(*A, 2, -1), CutOffStep(*C, 2, 1)]
    # ps:0 has two of A and one each of B and C; this shard one, one and two.
    assert shard.version - (2 + 1 + 1) == 0 == sum(s.delta for s in shard.cut_off.steps)
    assert not shard.adopt(roster(2, departed=(gone(A, 2),)))
    assert shard.adopt(roster(3, departed=(gone(A, 2), gone(B, 1), gone(C, 1))))
    assert len(shard.cut_off.steps) == 2, "each is handled once"


def test_a_departure_is_known_even_of_a_worker_that_was_never_heard_of() -> None:
    shard = other(Async(), A)
    shard.adopt(roster(2, A, departed=(gone(B, 1),)))
    assert shard.cut_off.steps == [CutOffStep(*B, 1, -1)]


def test_many_may_die_at_once() -> None:
    members = [(f"worker:{index}", index + 1) for index in range(100)]
    leader = shard_of(Async(), *members)
    shard = shard_of(Async(), *members, index=1, count=2)
    for member in members:
        push(shard, member)
    for member in members[:30]:
        push(leader, member)
    assert len(leader.tick(LEASE)) == 100
    shard.adopt(leader.roster)
    listed = sum(step.delta for step in shard.cut_off.steps)
    assert shard.version - leader.global_step == 70 == listed


def staged_at_other(*members: Key) -> Shard:
    """ps:1 of a synchronous job whose first round is open, with gradients of some staged."""
    shard = shard_of(Sync(3), A, B, C, index=1, count=2)
    for member in members:
        push(shard, member)
    return shard


def test_a_gradient_that_ps0_does_not_have_is_dropped_from_an_open_round() -> None:
    shard = staged_at_other(A, B)
    shard.adopt(roster(2, B, C, departed=(gone(A, 0),)))
    push(shard, C, pieces=gradient(shard.layout, 3.0))
    assert values(shard)["b"].tolist() == [-RATE * 2.0] * 4, "the mean of B and C"
    assert shard.cut_off.steps == [] and shard.nbytes_in_flight == 0


def test_a_gradient_that_ps0_has_too_stays() -> None:
    shard = staged_at_other(A, B)
    again = (A[0], 99)
    shard.adopt(roster(2, Member(*again, 1), B, C, departed=(gone(A, 1),)))
    push(shard, C, pieces=gradient(shard.layout, 4.0))
    assert values(shard)["b"].tolist() == [-RATE * 2.0] * 4, "the mean of all three"
    assert (shard.version, shard.cut_off.steps) == (1, [])


def test_an_update_being_made_with_a_dropped_gradient_is_made_again_without_it() -> None:
    shard = staged_at_other(A, B, C)
    assert (shard.version, shard.rounds) == (1, 1)
    for member, value in ((A, 7.0), (B, 1.0), (C, 3.0)):
        shard.submit(feed(begin(shard, member, 2), gradient(shard.layout, value)))
    update = shard.take_update()
    assert update
    shard.adopt(roster(2, B, C, departed=(gone(A, 1),)))
    update.run()
    shard.commit(update)
    assert (shard.version, shard.rounds) == (1, 1)
    assert drain(shard) == 1
    assert values(shard)["b"].tolist() == [-RATE * (1.0 + 2.0)] * 4
    assert (shard.version, shard.rounds, shard.cut_off.steps) == (2, 2, [])


def test_a_gradient_in_a_closed_round_is_listed() -> None:
    shard = staged_at_other(A, B, C)
    shard.adopt(roster(2, B, C, departed=(gone(A, 0),)))
    assert shard.cut_off.steps == [CutOffStep(*A, 1, 0)]
    shard.adopt(roster(3, departed=(gone(A, 0), gone(B, 0), gone(C, 0))))
    assert sum(step.delta for step in shard.cut_off.steps) == 1, "ps:0 closed that round empty"


def test_a_round_that_only_the_dead_had_begun_is_closed_empty_everywhere() -> None:
    shard = shard_of(Sync(1), A, index=1, count=2)
    newcomer = Member(*B, 1)
    shard.adopt(roster(2, newcomer, departed=(gone(A, 1),), rounds=1))
    drain(shard)
    assert (shard.rounds, shard.version) == (1, 0)
    assert shard.cut_off.steps == [CutOffStep(*A, 1, -1)]
    push(shard, B)
    assert (shard.rounds, shard.version, counted(shard)) == (2, 1, 1)


def test_a_shard_closes_what_ps0_closed_even_if_nobody_is_left() -> None:
    shard = shard_of(Sync(1), A, index=1, count=2)
    facts = {"departed": (gone(A, 1),), "rounds": 1, "complete": True}
    shard.adopt(roster(2, **facts))
    drain(shard)
    assert (shard.rounds, sum(step.delta for step in shard.cut_off.steps)) == (1, -1)


def test_the_final_parameters_are_those_with_everybodys_last_push_in() -> None:
    leader = shard_of(Async(), A, B, last_step=2)
    shard = shard_of(Async(), A, B, index=1, count=2)
    for member in (A, B):
        push(leader, member)
    push(shard, A)
    shard.adopt(leader.roster)
    assert shard.pull(SESSION, A, 1) == Gate(False, "the last push of worker:1 is on its way")
    push(shard, B)
    assert pulled(shard, A).complete
    shard.tell(A)
    assert shard.untold() == [B[0]]


def test_the_final_parameters_are_those_with_the_last_round_in() -> None:
    shard = shard_of(Sync(2), A, B, index=1, count=2)
    push(shard, A)
    shard.adopt(roster(2, A, Member(*C, 1), departed=(gone(B, 1),), complete=True, rounds=1))
    assert shard.pull(SESSION, A, 1) == Gate(False, "the last round, 0, is being applied")
    drain(shard)
    assert pulled(shard, A).complete


def test_a_raised_limit_makes_everybody_untold_everywhere() -> None:
    shard = other(Async(), A)
    shard.adopt(roster(2, A, complete=True, last_step=1))
    assert pulled(shard, A).complete
    shard.tell(A)
    assert shard.untold() == []
    # The roster in between, of the job going on, may have passed by.
    shard.adopt(roster(5, A, complete=True, last_step=2))
    assert shard.untold() == [A[0]]
    assert shard.job.last_step == 2


# -- cuts ------------------------------------------------------------------------------------------


def test_a_hold_admits_nothing_new_until_the_cut_and_only_up_to_it() -> None:
    shard = shard_of(Async(), A, B)
    push(shard, A)
    flying = begin(shard, B)
    assert shard.hold(1, 0.0, 5.0).sequences == {A: 1, B: 1}
    assert shard.hold(1, 0.5, 9.0).sequences == {A: 1, B: 1}, "repeatable"
    closed = Gate(False, "a checkpoint is being cut")
    assert shard.begin(header(shard, A, 2), 0.0) == closed
    shard.cut(1, {A: 2, B: 1}, 0)
    assert not shard.cut_gate(1).open
    shard.submit(feed(flying))
    assert shard.cut_gate(1) == Gate(False, "push 2 of worker:0 is on its way")
    assert shard.begin(header(shard, B, 2), 0.0) == closed
    assert push(shard, A, 2).applied
    assert shard.begin(header(shard, A, 3), 0.0) == closed
    assert shard.cut_gate(1).open
    snapshot = shard.take_cut(2.5)
    assert (snapshot.state.version, snapshot.pause_s) == (3, 2.5)
    for sequence in (3, 4):
        push(shard, A, sequence)
    assert {a[0] for (_, slot), a in arrays_of(snapshot).items() if not slot} == {-RATE * 3}
    shard.release(snapshot.pin)
    assert counted(shard) == 5


def test_a_cut_waits_for_pushes_that_are_staged_or_being_applied() -> None:
    shard = shard_of(Async(), A, B)
    direct, staged = begin(shard, A), feed(begin(shard, B))
    shard.submit(staged)
    admitted = shard.hold(1, 0.0, 5.0)
    shard.cut(1, admitted.sequences, 0)
    assert shard.cut_gate(1) == Gate(False, "an update is being applied")
    shard.submit(feed(direct))
    assert shard.cut_gate(1) == Gate(False, "push 1 of worker:1 is on its way")
    update = shard.take_update()
    assert update and not shard.cut_gate(1).open
    update.run()
    shard.commit(update)
    assert shard.cut_gate(1).open
    assert shard.take_cut(1.0).state.version == 2


def test_a_cut_does_not_wait_for_the_dead() -> None:
    shard = shard_of(Async(), A, B)
    flying = begin(shard, A)
    shard.cut(1, shard.hold(1, 0.0, 60.0).sequences, 0)
    shard.heartbeat(B, 5.0)
    shard.tick(LEASE)
    with pytest.raises(UnavailableError):
        feed(flying)
    assert shard.cut_gate(1).open


def test_a_hold_ends_by_itself_and_its_cut_is_too_late() -> None:
    shard = shard_of(Async(), A)
    shard.hold(1, 0.0, 5.0)
    with pytest.raises(FailedPreconditionError, match="another checkpoint is being cut"):
        shard.hold(2, 1.0, 6.0)
    with pytest.raises(FailedPreconditionError, match="has ended"):
        shard.cut(2, {}, 0)
    shard.tick(4.9)
    assert isinstance(shard.begin(header(shard, A), 0.0), Gate)
    shard.tick(5.0)
    push(shard, A)
    for late in (lambda: shard.cut(1, {}, 0), lambda: shard.cut_gate(1)):
        with pytest.raises(FailedPreconditionError, match="has ended; begin again"):
            late()
    shard.hold(2, 6.0, 9.0)
    shard.release_hold(1)
    assert isinstance(shard.begin(header(shard, A, 2), 0.0), Gate)
    shard.release_hold(2)
    shard.release_hold(2)
    push(shard, A, 2)
    assert counted(shard) == 2


def test_a_synchronous_cut_is_between_two_rounds() -> None:
    shard = shard_of(Sync(2), A, B)
    for sequence in (1, 2):
        for member in (A, B):
            pulled(shard, member)
        push(shard, A, sequence)
        if sequence == 1:
            push(shard, B, sequence)
    # Round 1 is open, with A's gradient in it.
    assert shard.hold(1, 0.0, 5.0).rounds == 1
    assert push(shard, B, 2).applied, "a push never waits in sync"
    assert (shard.rounds, shard.version) == (1, 1), "but its round does"
    shard.cut(1, {}, 1)
    assert shard.cut_gate(1).open
    snapshot = shard.take_cut(1.0)
    state = snapshot.state
    assert (state.rounds, state.version, state.global_step) == (1, 1, 1)
    assert state.remembered == (), "the pushes staged are not in, those before were answered"
    assert state.members == (Member(*A, 1), Member(*B, 1))
    assert drain(shard) == 1 and shard.rounds == 2


def test_a_synchronous_cut_may_lie_a_round_ahead() -> None:
    shard = shard_of(Sync(2), A, B)
    for member in (A, B):
        pulled(shard, member)
    push(shard, A)
    shard.submit(feed(begin(shard, B)))
    update = shard.take_update()
    assert shard.hold(1, 0.0, 5.0).rounds == 1, "the round being applied is as good as closed"
    assert update
    update.run()
    shard.commit(update)
    shard.cut(1, {}, 2)
    assert shard.cut_gate(1) == Gate(False, "round 1 is open")
    for member in (A, B):
        pulled(shard, member)
        push(shard, member, 2)
    assert shard.rounds == 2 and shard.cut_gate(1).open
    for member in (A, B):
        pulled(shard, member)
        push(shard, member, 3)
    assert shard.rounds == 2, "and no farther"
    snapshot = shard.take_cut(1.0)
    assert (snapshot.state.rounds, snapshot.state.version) == (2, 2)
    assert drain(shard) == 1


def test_a_cut_closes_empty_what_other_shards_have_closed() -> None:
    shard = shard_of(Sync(1), A, index=1, count=2)
    shard.adopt(roster(2, departed=(gone(A, 0),)))
    shard.hold(1, 0.0, 5.0)
    assert drain(shard) == 0 and shard.rounds == 0
    shard.cut(1, {}, 1)
    drain(shard)
    assert shard.cut_gate(1).open
    assert shard.take_cut(0.0).state.rounds == 1


# -- snapshot and restore --------------------------------------------------------------------------


def test_a_restored_shard_is_the_one_that_was_saved() -> None:
    shard = shard_of(Async(), A, B, optimizer=Adam(0.1), last_step=9)
    choose = np.random.default_rng(0)

    def noise() -> list[tuple[Range, Array]]:
        return [(r, choose.normal(size=a.shape).astype(a.dtype)) for r, a in gradient(shard.layout)]

    for sequence in (1, 2, 3):
        push(shard, A, sequence, noise())
    push(shard, B, 1, [p for p in noise() if p[0].group == 0])
    shard.hold(1, 0.0, 5.0)
    shard.cut(1, {}, 0)
    snapshot = shard.take_cut(0.0)
    assert {(v.name, v.updates) for v in snapshot.state.variables} == {
        ("w", 4),
        ("b", 4),
        ("scale", 4),  # left out once: it counts all the same
    }
    again = restored(snapshot)
    assert frozen(values(again)) == frozen(values(shard))
    assert (again.version, again.global_step) == (4, 4)
    # Repeats of what is in are answered; what was computed for the old session is refused.
    assert push(again, A, 3, session=SESSION).applied
    assert push(again, B, 1, session=SESSION).applied
    with pytest.raises(SessionSupersededError):
        again.begin(header(shard, A, 4), 0.0)
    for member in (A, B):
        again.join((member[0], member[1] + 100), 0.0)
    # Both go on alike, to the last bit: slots and update counts are there.
    for sequence in range(1, 5):
        pieces = noise()
        push(shard, A, 3 + sequence, pieces)
        push(again, (A[0], A[1] + 100), sequence, pieces)
        assert frozen(values(again)) == frozen(values(shard))
    assert again.state.session == SESSION + 1
    with pytest.raises(LeaseLostError):
        push(again, A, 3)


def test_a_restored_synchronous_job_waits_for_the_members_at_the_cut() -> None:
    state = ShardState(
        SESSION,
        0,
        1,
        Job(Sync(2), SGD(RATE)),
        VARIABLES,
        version=4,
        global_step=4,
        rounds=6,
        members=(Member(*A, 6), Member(*B, 6)),
    )
    shard = load(state, {})
    newcomer = ("worker:5", 50)
    assert shard.join(newcomer, 0.0) == 6
    assert not isinstance(shard.pull(SESSION, newcomer, 6), View)
    assert shard.join((A[0], 99), 3.0) == 6
    shard.join((B[0], 99), 4.0)
    assert pulled(shard, newcomer).version == 4


def test_a_restored_limit_may_be_reached_already() -> None:
    job = Job(Sync(2), SGD(RATE), last_step=7)
    shard = load(ShardState(SESSION, 0, 1, job, VARIABLES, version=7, global_step=7, rounds=7), {})
    shard.join(A, 0.0)
    assert shard.complete and pulled(shard, A).complete


def test_a_restored_shard_lists_what_its_checkpoint_came_in_between() -> None:
    job, listed = Job(optimizer=SGD(RATE)), (CutOffStep(*A, 3, 1),)
    for version, deltas in ((5, [1]), (4, [1, -1]), (7, [1, 2])):
        state = ShardState(
            SESSION, 1, 2, job, VARIABLES, version=version, global_step=4, cut_off=listed
        )
        assert [step.delta for step in load(state, {}).cut_off.steps] == deltas


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"session": 0}, "session must be a random non-zero id"),
        ({"index": 2}, "shard 2 of 2 cannot be"),
        ({"index": -1}, "shard -1 of 2"),
        ({"count": 70_000}, "of 70000 cannot be"),
        ({"version": -1}, "must be between 0 and"),
        ({"rounds": -1}, "must be between 0 and"),
    ],
)
def test_a_state_checks_itself(facts: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"session": 1, "index": 0, "count": 2, "job": Job(), "variables": ()}
    ShardState(**good)
    with pytest.raises(InvalidArgumentError, match=message):
        ShardState(**{**good, **facts})


def loading(optimizer: Optimizer, *pieces: Range, slots_allowed: bool = True) -> Loading:
    variables = tuple(replace(v, updates=5) for v in VARIABLES)
    state = ShardState(SESSION, 0, 1, Job(optimizer=optimizer), variables)
    found = Loading(state, slots_allowed=slots_allowed)
    for piece in pieces:
        dtype = found.layout.groups[piece.group].dtype
        found.feed(piece, np.full(piece.count, 7.0, dtype))
    return found


WHOLE = [Range(0, 0, 10), Range(1, 0, 1)]


def test_a_state_arrives_whole_or_not_at_all() -> None:
    with pytest.raises(InvalidArgumentError, match="'scale' is incomplete"):
        loading(SGD(), WHOLE[0]).finish()
    with pytest.raises(InvalidArgumentError, match="overlap at variable 'w'"):
        loading(SGD(), WHOLE[0], Range(0, 1, 1))
    with pytest.raises(InvalidArgumentError, match="names slot 1; the group has 0"):
        loading(SGD(), replace(WHOLE[0], slot=1))
    with pytest.raises(InvalidArgumentError, match="names slot 1; the group has 0"):
        loading(Adam(), replace(WHOLE[0], slot=1), slots_allowed=False)
    with pytest.raises(InvalidArgumentError, match="'w' is incomplete: its slot 2"):
        loading(Adam(), *WHOLE, replace(WHOLE[0], slot=1)).finish()
    with pytest.raises(InvalidArgumentError, match="variable 'w' is nan"):
        loading(SGD()).feed(*NAN[0])


def test_a_group_without_slots_starts_with_fresh_ones_and_counts_its_updates_anew() -> None:
    given = [replace(WHOLE[0], slot=slot) for slot in (1, 2)]
    layout, arrays = loading(Adam(), *WHOLE, *given).finish()
    assert [group.updates for group in layout.groups] == [5, 0]
    assert [a[0] for a in arrays[0]] == [7, 7, 7] and [a[0] for a in arrays[1]] == [7, 0, 0]
    layout, _ = loading(SGD(), *WHOLE).finish()
    assert [group.updates for group in layout.groups] == [5, 5]


def test_a_life_that_is_over_does_not_join_again() -> None:
    """Else its second end would be taken for the first one, and a cut-off step not be listed."""
    shard = shard_of(Async(), A, B)
    shard.leave(A, "left", 0.0)
    with pytest.raises(LeaseLostError, match="this life of worker:0 is over"):
        shard.join(A, 0.0)
    assert shard.join((A[0], 99), 0.0) == 0
