"""Step numbers: each is granted once at a time, and all of them are spent in the end."""

from __future__ import annotations

import random

import pytest

from paramserver.grants import Grants

A, B, C = ("worker:0", 1), ("worker:1", 2), ("worker:2", 3)


def test_numbers_are_granted_in_order_and_held_until_they_are_spent() -> None:
    grants = Grants(0)
    assert [grants.take(m, 0) for m in (A, B, A, B)] == [1, 2, 1, 2]
    assert (grants.held(A), grants.held(C)) == (1, None)
    grants.spend(B)
    assert (grants.applied, grants.highest, grants.held(B)) == (1, 2, None)
    assert grants.take(B, 0) == 3
    assert grants.holders() == ["worker:0", "worker:1"]


def test_what_the_departed_held_is_granted_again_lowest_first() -> None:
    grants = Grants(0)
    for member in (A, B, C):
        grants.take(member, 3)
    assert grants.take(("worker:3", 4), 3) is None
    grants.give_back(C)
    grants.give_back(A)
    grants.give_back(A)
    assert [grants.take(("worker:3", 4), 3), grants.take(("worker:4", 5), 3)] == [1, 3]
    assert grants.take(("worker:5", 6), 3) is None


def test_a_restored_job_goes_on_counting() -> None:
    grants = Grants(41)
    assert (grants.take(A, 42), grants.take(B, 42)) == (42, None)
    grants.spend(A)
    assert grants.applied == 42


def test_a_raised_limit_frees_more() -> None:
    grants = Grants(0)
    assert (grants.take(A, 1), grants.take(B, 1), grants.take(B, 2)) == (1, None, 2)


@pytest.mark.parametrize("seed", range(20))
def test_every_number_is_spent_once_whoever_dies(seed: int) -> None:
    choose = random.Random(seed)
    grants, limit = Grants(0), 25
    spent: list[int] = []
    for life in range(1000):
        member = (f"worker:{choose.randrange(4)}", choose.randrange(2))
        number = grants.take(member, limit)
        others = [grants.held((f"worker:{w}", i)) for w in range(4) for i in range(2)]
        held = [n for n in others if n is not None]
        assert len(set(held)) == len(held) and not set(held) & set(spent)
        if number is None:
            assert set(held) | set(spent) == set(range(1, limit + 1))
        elif choose.random() < 0.3:
            grants.give_back(member)
        elif choose.random() < 0.5:
            grants.spend(member)
            spent.append(number)
        if life > 500:
            for m in [(f"worker:{w}", i) for w in range(4) for i in range(2)]:
                grants.give_back(m)
    assert sorted(spent) == list(range(1, limit + 1))
    assert grants.applied == limit
