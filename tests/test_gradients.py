"""Packing gradients: the same elements at the same places, whatever their number, order and
kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver.errors import InvalidArgumentError
from paramserver.gradients import SMALL_BYTES, pack
from paramserver.layout import DTYPES, Coverage, Layout, Variable, plan

SHAPES = [(), (0,), (1,), (3,), (2, 3), (4, 0), (SMALL_BYTES // 4,), (SMALL_BYTES // 4 + 1,)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, dict[str, np.ndarray]]:
    """A layout, and gradients for some of its variables, in any order."""
    kinds = draw(
        st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from([*DTYPES])), max_size=9)
    )
    layout = plan(Variable(f"v{i}", dtype, shape) for i, (shape, dtype) in enumerate(kinds))
    chosen = draw(st.lists(st.sampled_from(layout.variables), unique=True)) if kinds else []
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    grads = {v.name: rng.normal(size=v.shape).astype(DTYPES[v.dtype]) for v in chosen}
    return layout, {
        name: np.asarray(g, order=draw(st.sampled_from("CF"))) for name, g in grads.items()
    }


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases())
def test_every_element_is_where_its_variable_lies(case: tuple[Layout, dict[str, Any]]) -> None:
    layout, grads = case
    parts, found = pack(layout, grads)
    assert found == len(grads)
    flats = [np.full(g.size, np.nan, DTYPES[g.dtype]) for g in layout.groups]
    covered = Coverage(layout)
    for piece, array in parts:
        assert (
            array.shape == (piece.count,)
            and array.dtype == DTYPES[layout.groups[piece.group].dtype]
        )
        covered.add(piece)
        flats[piece.group][piece.offset : piece.offset + piece.count] = array
    for v in layout.variables:
        own = flats[v.group][v.offset : v.offset + v.size]
        if v.name in grads:
            assert np.array_equal(own.reshape(v.shape), grads[v.name])
        else:
            assert np.isnan(own).all()


def layout_of(**shapes: tuple[int, ...]) -> Layout:
    return plan(Variable(name, "float32", shape) for name, shape in shapes.items())


def test_small_neighbours_are_one_and_large_ones_are_not_copied() -> None:
    large = np.ones(SMALL_BYTES, np.float32)
    layout = layout_of(a=(2,), b=(3,), c=large.shape, d=(1,))
    grads = {"d": np.ones(1, np.float32), "c": large, "b": np.ones(3, np.float32)}
    grads["a"] = np.ones(2, np.float32)
    parts, _ = pack(layout, grads)
    assert [(p.offset, p.count) for p, _ in parts] == [(0, 5), (5, large.size), (5 + large.size, 1)]
    assert np.shares_memory(parts[1][1], large)


def test_what_is_left_out_parts_its_neighbours() -> None:
    layout = layout_of(a=(2,), b=(3,), c=(4,))
    parts, found = pack(layout, {"a": np.ones(2, np.float32), "c": np.ones(4, np.float32)})
    assert found == 2
    assert [(p.offset, p.count) for p, _ in parts] == [(0, 2), (5, 4)]


def test_names_of_other_shards_are_not_its() -> None:
    assert pack(layout_of(a=(2,)), {"z": np.ones(2, np.float32)}) == ([], 0)


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        (np.array([1, np.nan, 1], np.float32), "'b' is nan at element 1"),
        (np.ones((3, 1), np.float32), r"'b' has shape \(3, 1\)"),
        (np.ones(3), "'b' has dtype float64"),
        (None, "'b'"),
        (np.array([1, 2, None]), "'b' has dtype object"),
    ],
)
def test_what_is_wrong_is_named(value: Any, complaint: str) -> None:
    grads = {"a": np.ones(2, np.float32), "b": value, "c": np.ones(4, np.float32)}
    with pytest.raises(InvalidArgumentError, match=complaint):
        pack(layout_of(a=(2,), b=(3,), c=(4,)), grads)


def test_other_kinds_of_arrays_are_taken_as_what_they_mean() -> None:
    class Own(np.ndarray):
        pass

    own = np.ones(2, np.float32).view(Own)
    grads = {"a": own, "b": [1.0, 2.0, 3.0], "c": np.arange(4, dtype=">f4")}
    parts, _ = pack(layout_of(a=(2,), b=(3,), c=(4,)), grads)
    assert parts[0][1].tolist() == [1, 1, 1, 2, 3, 0, 1, 2, 3]
