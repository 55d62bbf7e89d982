"""Placement: every variable once, nobody overloaded, and the same answer in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.errors import ConfigError, InvalidArgumentError
from paramserver.layout import Variable
from paramserver.placement import Placement, describe, place


def var(name: str, *shape: int, dtype: str = "float32") -> Variable:
    return Variable(name, dtype, shape)


def loads(placement: Placement) -> list[int]:
    return [sum(v.nbytes for v in held) for held in placement]


def names(placement: Placement) -> list[list[str]]:
    return [[v.name for v in held] for held in placement]


variables = st.lists(
    st.builds(
        Variable,
        name=st.text(alphabet="abc/_0", min_size=1, max_size=6),
        dtype=st.sampled_from(["float32", "float64"]),
        shape=st.lists(st.integers(0, 40), max_size=2).map(tuple),
    ),
    max_size=30,
    unique_by=lambda v: v.name,
)


@settings(deadline=None)
@given(variables, st.integers(1, 8), st.randoms(use_true_random=False))
def test_a_placement_is_complete_balanced_and_the_same_for_everybody(
    model: list[Variable], shards: int, random: object
) -> None:
    placement = place(model, shards)
    assert len(placement) == shards
    assert sorted(n for held in names(placement) for n in held) == sorted(v.name for v in model)
    assert all(held == sorted(held) for held in names(placement))

    largest = max((v.nbytes for v in model), default=0)
    mean = sum(v.nbytes for v in model) / shards
    assert max(loads(placement)) <= mean + largest * (1 - 1 / shards) + 1e-9

    random.shuffle(model)  # type: ignore[attr-defined]
    assert place(model, shards) == placement


def test_one_dominant_variable_has_a_shard_to_itself() -> None:
    mb = 1 << 18  # float32 elements
    model = [var("big", 40 * mb), var("mid/a", 8 * mb), var("mid/b", 8 * mb)]
    model += [var(f"small/{i:02d}", 1 << 10) for i in range(30)]
    placement = place(model, 4)
    assert names(placement)[:3] == [["big"], ["mid/a"], ["mid/b"]]
    assert len(placement[3]) == 30  # 120 KB: less than either middle one
    without_big = loads(place(model[1:], 2))
    assert max(without_big) <= 1.01 * sum(without_big) / 2


def test_equal_sizes_are_dealt_out_by_name() -> None:
    model = [var(f"w{i}", 4) for i in reversed(range(6))]
    assert names(place(model, 3)) == [["w0", "w3"], ["w1", "w4"], ["w2", "w5"]]


def test_empty_variables_do_not_pile_up() -> None:
    assert names(place([var("a", 0), var("b", 0), var("c", 0)], 3)) == [["a"], ["b"], ["c"]]


def test_shards_beyond_the_variables_are_there_and_empty() -> None:
    assert names(place([var("w", 4), var("b", 1)], 5)) == [["w"], ["b"], [], [], []]
    assert place([], 2) == [[], []]


def test_bytes_count_not_elements() -> None:
    placement = place([var("a", 3, dtype="float64"), var("b", 4), var("c", 2)], 2)
    assert names(placement) == [["a"], ["b", "c"]]


def test_another_strategy_fits_in() -> None:
    def all_on_the_last(ordered: Sequence[Variable], shards: int) -> Placement:
        return [*([] for _ in range(shards - 1)), list(reversed(ordered))]

    placement = place([var("b", 1), var("a", 1)], 3, all_on_the_last)
    assert names(placement) == [[], [], ["a", "b"]]


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^cannot place variables on 0 shards"):
        place([var("w", 1)], 0)
    with pytest.raises(InvalidArgumentError, match=r"^variable 'w' is given twice"):
        place([var("w", 1), var("b", 1), var("w", 2)], 2)


def test_the_description_says_where_everything_is() -> None:
    placement = place([var("w", 784, 10), var("b", 10), var("scale", dtype="float64")], 3)
    assert describe([*placement, []]) == [
        "variable=b shape=(10,) dtype=float32 bytes=40 shard=ps:1",
        "variable=scale shape=() dtype=float64 bytes=8 shard=ps:2",
        "variable=w shape=(784, 10) dtype=float32 bytes=31360 shard=ps:0",
        "shard=ps:0 variables=1 bytes=31360",
        "shard=ps:1 variables=1 bytes=40",
        "shard=ps:2 variables=1 bytes=8",
        "shard=ps:3 variables=0 bytes=0",
    ]


def test_another_process_places_alike() -> None:
    program = (
        "from paramserver.layout import Variable\n"
        "from paramserver.placement import describe, place\n"
        "model = {Variable(f'w{i}', 'float32', (i % 5,)) for i in range(40)}\n"
        "print(*describe(place(list(model), 3)), sep='\\n')\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert "variable=w0 " in seen.pop()
