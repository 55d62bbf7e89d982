"""Where variables lie, what a piece of them is called, and what a shard refuses to hold."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from paramserver.layout import (
    Coverage,
    Layout,
    Limits,
    Range,
    Variable,
    build,
    check_finite,
    model_fingerprint,
    plan,
    some,
)


def var(name: str, *shape: int, dtype: str = "float32", updates: int = 0) -> Variable:
    return Variable(name, dtype, shape, updates=updates)


MODEL = plan(
    [var("a", 2, 3), var("x", 4, dtype="float64"), var("none", 0, 5), var("b"), var("c", 3)]
)


# Plan


def test_variables_lie_back_to_back_in_one_group_a_dtype() -> None:
    places = {v.name: (v.group, v.offset, v.size) for v in MODEL.variables}
    assert places == {
        "a": (0, 0, 6),
        "x": (1, 0, 4),
        "none": (0, 6, 0),
        "b": (0, 6, 1),
        "c": (0, 7, 3),
    }
    assert [(g.dtype, g.size) for g in MODEL.groups] == [("float32", 10), ("float64", 4)]
    assert [v.nbytes for v in MODEL.variables] == [24, 32, 0, 4, 12]


def test_variables_of_different_update_counts_do_not_share_a_group() -> None:
    layout = plan([var("a", 2, updates=3), var("b", 2), var("c", 2, updates=3)])
    assert [(g.size, g.updates) for g in layout.groups] == [(4, 3), (2, 0)]
    assert layout["a"].with_updates(3) is layout["a"]
    assert layout["a"].with_updates(9) == Variable("a", "float32", (2,), updates=9)


def test_a_client_builds_the_layout_that_the_shard_planned() -> None:
    built = build(MODEL.variables, MODEL.groups)
    assert built == MODEL
    assert [built.at(0, element).name for element in range(10)] == list("aaaaaabccc")


def test_a_name_is_looked_up_or_refused_with_a_few_that_are_there() -> None:
    assert MODEL["b"].shape == () and "b" in MODEL and "q" not in MODEL
    with pytest.raises(NotFoundError, match=r"no variable 'q' here; there are 'a', 'x', 'none'"):
        MODEL["q"]


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (var(""), "name '' must be"),
        (var("a b"), "name 'a b' must be"),
        (var("ä"), "must be 1 to 256 letters"),
        (var("n" * 257), "must be 1 to 256"),
        (var("w", 2, -1), "none negative"),
        (var("w", *([1] * 33)), "at most 32 axes"),
        (var("w", 2, dtype="int32"), "dtype int32; choose one of 'float32', 'float64'"),
        (var("w", *([2**31] * 32)), "beyond any shard"),
    ],
)
def test_a_variable_that_no_shard_can_hold(variable: Variable, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        plan([variable])


def test_a_name_may_be_given_once() -> None:
    with pytest.raises(InvalidArgumentError, match="'w' is given twice"):
        plan([var("w"), var("v"), var("w")])


def test_limits_are_checked_before_anything_is_allocated() -> None:
    with pytest.raises(ResourceExhaustedError, match=r"'v' brings the shard to 1032 bytes.*1000"):
        plan([var("w", 8), var("v", 250)], Limits(total_bytes=1000))
    with pytest.raises(ResourceExhaustedError, match="more than 1 variables"):
        plan([var("w"), var("v")], Limits(variables=1))
    with pytest.raises(ResourceExhaustedError, match="562949953421312 bytes"):
        plan([var("w", 2**24, 2**23)])
    assert plan([var("w", 8), var("v", 242)], Limits(total_bytes=1000)).groups[0].size == 250


# Fingerprints


def test_a_layouts_fingerprint_tells_places_apart_a_models_only_the_model() -> None:
    one, other = [var("a", 2), var("b", 3)], [var("b", 3), var("a", 2)]
    assert plan(one).fingerprint != plan(other).fingerprint
    assert model_fingerprint(one) == model_fingerprint(plan(other).variables)
    for changed in ([var("a", 2), var("b", 4)], [var("a", 2), var("b", 3, dtype="float64")]):
        assert model_fingerprint(changed) != model_fingerprint(one)


# Ranges


@pytest.mark.parametrize(
    ("names", "ranges"),
    [
        ([], [Range(0, 0, 10), Range(1, 0, 4)]),
        (["b"], [Range(0, 6, 1)]),
        (["c", "b"], [Range(0, 6, 4)]),
        (["a", "none", "b"], [Range(0, 0, 7)]),
        (["x", "c", "a"], [Range(0, 0, 6), Range(0, 7, 3), Range(1, 0, 4)]),
        (["none"], []),
        (["a", "a"], [Range(0, 0, 6)]),
    ],
)
def test_names_become_ranges_with_neighbours_merged(names: list[str], ranges: object) -> None:
    assert MODEL.ranges(names) == ranges


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (Range(2, 0, 1), "names group 2; the shard has 2"),
        (Range(-1, 0, 1), "names group -1"),
        (Range(0, 0, 1, slot=1), "names slot 1; the group has 0"),
        (Range(0, 0, 1, slot=-1), "names slot -1"),
        (Range(0, 8, 3), r"\[8, 11\) is outside group 0 of 10 elements"),
        (Range(0, -1, 2), "outside group 0"),
        (Range(0, 4, -1), "outside group 0"),
        (Range(1, 2**62, 2**62), "outside group 1"),
    ],
)
def test_a_range_outside_the_layout(piece: Range, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        MODEL.check(piece)


def test_a_range_inside_the_layout() -> None:
    MODEL.check(Range(0, 0, 10))
    MODEL.check(Range(0, 10, 0))
    MODEL.check(Range(1, 0, 4, slot=2), slots=2)


# Coverage


def covering(layout: Layout, *pieces: Range) -> Coverage:
    coverage = Coverage(layout)
    for piece in pieces:
        coverage.add(piece)
    return coverage


def test_pieces_are_merged_whatever_their_order() -> None:
    coverage = covering(MODEL, Range(0, 4, 2), Range(0, 0, 2), Range(0, 8, 2), Range(0, 2, 2))
    assert list(coverage.covered(0)) == [(0, 6), (8, 10)]
    assert list(coverage.gaps(0)) == [(6, 8)]
    assert list(coverage.gaps(1)) == [(0, 4)]
    assert list(covering(MODEL, Range(0, 3, 0)).covered(0)) == []


@pytest.mark.parametrize(
    ("second", "name"),
    [
        (Range(0, 6, 1), "b"),
        (Range(0, 4, 3), "b"),
        (Range(0, 7, 3), "c"),
        (Range(0, 0, 10), "b"),
        (Range(0, 8, 1), "c"),
    ],
)
def test_an_overlap_is_refused_by_name(second: Range, name: str) -> None:
    coverage = covering(MODEL, Range(0, 6, 3))
    with pytest.raises(InvalidArgumentError, match=f"overlap at variable '{name}'"):
        coverage.add(second)
    coverage.add(Range(1, 0, 4))
    coverage.add(Range(0, 6, 3, slot=1))


@pytest.mark.parametrize(
    ("pieces", "name"),
    [
        ([Range(0, 0, 5)], "a"),
        ([Range(0, 1, 5)], "a"),
        ([Range(0, 6, 3)], "c"),
        ([Range(0, 0, 6), Range(0, 8, 2)], "c"),
        ([Range(0, 0, 2), Range(0, 4, 2)], "a"),
        ([Range(1, 1, 2)], "x"),
    ],
)
def test_part_of_a_variable_is_refused(pieces: list[Range], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"'{name}' arrived in part only"):
        covering(MODEL, *pieces).check_whole_variables()


@pytest.mark.parametrize(
    "pieces",
    [[], [Range(0, 6, 1)], [Range(0, 6, 4), Range(1, 0, 4)], [Range(0, 3, 3), Range(0, 0, 3)]],
)
def test_whole_variables_may_be_left_out(pieces: list[Range]) -> None:
    covering(MODEL, *pieces).check_whole_variables()


def test_a_state_is_complete_with_all_values_and_all_slots_or_none() -> None:
    values = [Range(0, 0, 10), Range(1, 0, 4)]
    covering(MODEL, *values).check_complete([0, 0])
    slots = [Range(1, 0, 4, slot=1), Range(1, 0, 4, slot=2)]
    covering(MODEL, *values, *slots).check_complete([0, 2])
    with pytest.raises(InvalidArgumentError, match="'x' is incomplete: its values"):
        covering(MODEL, values[0], Range(1, 0, 3)).check_complete([0, 0])
    with pytest.raises(InvalidArgumentError, match="'x' is incomplete: its slot 2"):
        covering(MODEL, *values, slots[0]).check_complete([0, 2])


@settings(deadline=None, derandomize=True, database=None)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=8),
)
def test_coverage_is_a_set_of_elements(
    sizes: Sequence[int], pieces: Sequence[tuple[int, int]]
) -> None:
    layout = plan([var(f"v{i}", size) for i, size in enumerate(sizes)])
    total = layout.groups[0].size
    coverage, seen = Coverage(layout), set[int]()
    for start, count in pieces:
        elements = set(range(start, start + count))
        if start + count > total:
            continue
        if elements & seen:
            with pytest.raises(InvalidArgumentError):
                coverage.add(Range(0, start, count))
        else:
            coverage.add(Range(0, start, count))
            seen |= elements
        assert {e for a, b in coverage.covered(0) for e in range(a, b)} == seen
        assert {e for a, b in coverage.gaps(0) for e in range(a, b)} == set(range(total)) - seen
    own = [set(range(v.offset, v.offset + v.size)) for v in layout.variables]
    if all(elements <= seen or not elements & seen for elements in own):
        coverage.check_whole_variables()
    else:
        with pytest.raises(InvalidArgumentError):
            coverage.check_whole_variables()


# Finite numbers


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_variable_and_element(bad: float) -> None:
    values = np.ones(4, np.float32)
    values[2] = bad
    with pytest.raises(InvalidArgumentError, match=rf"'c' is {bad} at element 1; NaN and"):
        check_finite(MODEL, Range(0, 6, 4), values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_large_numbers_are_finite(dtype: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_finite(MODEL, Range(0, 0, 6), np.full(6, np.finfo(dtype).max, dtype))


def test_the_last_element_of_a_long_array_is_looked_at_too() -> None:
    layout = plan([var("w", 200_001)])
    values = np.ones(200_001, np.float32)
    check_finite(layout, Range(0, 0, 200_001), values)
    values[-1] = np.nan
    with pytest.raises(InvalidArgumentError, match="at element 200000"):
        check_finite(layout, Range(0, 0, 200_001), values)


def test_a_message_names_a_few() -> None:
    assert some([]) == "none"
    assert some(["a", "b"]) == "'a', 'b'"
    assert some(map(str, range(5)), most=3) == "'0', '1', '2' and 2 more"
