"""Leases, the opening of a synchronous session, and who is chief: tables over time."""

from __future__ import annotations

import pytest

from paramserver.errors import AlreadyExistsError, InvalidArgumentError, LeaseLostError
from paramserver.membership import ChiefLease, Member, Membership, Opening, Roster, worker_order

A, B = ("worker:0", 1), ("worker:1", 2)
LEASE = 10.0


# Worker ids


def test_workers_are_ordered_by_index_not_by_text() -> None:
    names = ["worker:10", "worker:9", "chief:0", "worker:0"]
    assert sorted(names, key=worker_order) == ["chief:0", "worker:0", "worker:9", "worker:10"]


@pytest.mark.parametrize(
    "name", ["", "worker", "worker:", ":0", "worker:-1", "Worker:0", "worker:0 ", "worker:1234567"]
)
def test_anything_else_is_no_worker(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match="must be like 'worker:0'"):
        worker_order(name)


def test_a_roster_knows_one_life_from_another() -> None:
    roster = Roster(members=(Member(*A),))
    assert roster.has(A)
    assert not roster.has((A[0], 7))


# Membership


def test_a_lease_ends_a_lease_after_the_last_sign_of_life() -> None:
    members = Membership(LEASE)
    assert members.next_expiry() is None
    assert members.join(A, now=0.0)
    assert members.join(B, now=4.0)
    members.renew(A, now=6.0)
    assert members.next_expiry() == 14.0
    assert members.left(A, now=6.0) == LEASE
    assert members.expired(13.9) == []
    assert members.expired(14.0) == [B]
    assert members.expired(16.0) == [A, B]
    members.remove(B)
    members.remove(B)
    assert members.expired(16.0) == [A]
    assert members.left(B, now=6.0) == 0.0


def test_a_repeated_join_renews_and_is_no_news() -> None:
    members = Membership(LEASE)
    assert members.join(A, now=0.0)
    assert not members.join(A, now=5.0)
    assert members.next_expiry() == 15.0


def test_a_second_life_waits_for_the_end_of_the_first() -> None:
    members = Membership(LEASE)
    members.join(A, now=0.0)
    second = (A[0], 99)
    with pytest.raises(AlreadyExistsError, match=r"lease ends in 7\.5 s") as caught:
        members.join(second, now=2.5)
    assert caught.value.metadata == (("lease-left-ms", "7500"),)
    assert members.next_expiry() == 10.0, "a refused join renews nothing"
    members.remove(A)
    assert members.join(second, now=2.5)


def test_a_renewal_that_comes_too_late_is_told_so() -> None:
    members = Membership(LEASE)
    members.join(A, now=0.0)
    members.remove(A)
    with pytest.raises(LeaseLostError, match="worker:0 is no member"):
        members.renew(A, now=1.0)


# Opening: (time, living workers, those that join at it) -> open?


def opened(opening: Opening, *moments: tuple[float, int, str]) -> list[bool]:
    found = []
    for now, living, joiners in moments:
        for joiner in joiners.split():
            opening.saw(f"worker:{joiner}")
        found.append(opening.gate(living, now).open)
    return found


@pytest.mark.parametrize(
    ("count", "minimum", "expected", "moments", "wanted"),
    [
        pytest.param(2, 0, "", [(0, 1, "0"), (99, 1, ""), (99, 2, "1")], [0, 0, 1], id="all"),
        pytest.param(2, 0, "", [(0, 1, "0"), (1, 0, ""), (2, 1, "1")], [0, 0, 1], id="joined-left"),
        pytest.param(2, 0, "", [(0, 1, "0"), (9, 1, "0")], [0, 0], id="same-again"),
        pytest.param(2, 0, "", [(0, 2, "0 1"), (1, 0, "")], [1, 1], id="once-open-stays-open"),
        pytest.param(1, 0, "", [(0, 0, "0"), (1, 1, "3")], [0, 1], id="never-without-anybody"),
        pytest.param(3, 1, "", [(0, 1, "0"), (9.9, 1, ""), (10, 1, "")], [0, 0, 1], id="minimum"),
        pytest.param(3, 2, "", [(0, 1, "0"), (8, 2, "1"), (17, 2, ""), (18, 2, "")], [0, 0, 0, 1],
                     id="a-lease-from-when-the-minimum-was-there"),
        pytest.param(3, 1, "", [(0, 1, "0"), (5, 0, ""), (12, 1, "1"), (21, 1, ""), (22, 1, "")],
                     [0, 0, 0, 0, 1], id="the-minimum-left-and-came-again"),
        pytest.param(9, 0, "0 1", [(0, 1, "0"), (1, 2, "1")], [0, 1], id="restored: names count"),
        pytest.param(9, 0, "0 1", [(0, 1, "5"), (9, 1, ""), (10, 1, "")], [0, 0, 1],
                     id="restored: others after a lease"),
    ],
)  # fmt: skip
def test_when_the_first_round_may_begin(
    count: int,
    minimum: int,
    expected: str,
    moments: list[tuple[float, int, str]],
    wanted: list[int],
) -> None:
    names = [f"worker:{index}" for index in expected.split()]
    opening = Opening(count, minimum, names, LEASE)
    assert opened(opening, *moments) == [bool(w) for w in wanted]


def test_a_closed_opening_says_who_is_missing() -> None:
    opening = Opening(2, 0, [], LEASE)
    opening.saw("worker:0")
    assert opening.gate(1, 0.0).reason == "the first round waits for workers (1 of 2 joined)"
    restored = Opening(2, 0, ["worker:0", "worker:3"], LEASE)
    restored.saw("worker:0")
    assert "workers: worker:3 (1 of 2" in restored.gate(1, 0.0).reason


def test_a_deadline_is_there_only_while_something_is_to_happen_at_it() -> None:
    opening = Opening(3, 1, [], LEASE)
    assert opening.deadline() is None
    opening.saw("worker:0")
    opening.gate(1, 5.0)
    assert opening.deadline() == 15.0
    # Everybody is gone: no time that passes opens it, so nobody needs to look at any time.
    opening.gate(0, 7.0)
    assert opening.deadline() is None
    opening.gate(1, 20.0)
    opening.gate(1, 30.0)
    assert opening.deadline() is None


# The chief


def test_one_chief_at_a_time() -> None:
    chief = ChiefLease(LEASE)
    assert not chief.alive(0.0)
    assert chief.claim("chief:0", 1, now=0.0)
    assert not chief.claim("worker:0", 2, now=9.9)
    assert chief.holder == "chief:0"
    assert chief.claim("chief:0", 1, now=9.0)
    assert chief.left(10.0) == 9.0
    assert chief.alive(18.9) and not chief.alive(19.0)
    assert chief.left(25.0) == 0.0
    assert chief.claim("worker:0", 2, now=19.0)
    assert not chief.claim("chief:0", 1, now=19.0)


def test_only_the_holder_gives_it_up() -> None:
    chief = ChiefLease(LEASE)
    chief.release(5)
    chief.claim("chief:0", 1, now=0.0)
    chief.release(2)
    assert chief.alive(1.0)
    chief.release(1)
    assert not chief.alive(1.0) and chief.left(1.0) == 0.0
    assert chief.claim("worker:0", 2, now=1.0)
