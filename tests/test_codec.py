"""Arrays into messages and back: nothing lost, nothing copied in vain, nothing wrong let in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver import codec, framing
from paramserver.codec import chunks, framed, gradient_array, initial_array, pieces
from paramserver.errors import InvalidArgumentError, NotFoundError
from paramserver.framing import Frame, decode, encode
from paramserver.layout import Layout, Range, Variable, plan
from paramserver.v1 import tensor_pb2 as pb
from paramserver.v1.parameter_pb2 import PullResponse, PushRequest

F4, F8 = pb.D_TYPE_FLOAT32, pb.D_TYPE_FLOAT64


@pytest.fixture
def layout() -> Layout:
    """Group 0: w1 (4, 3) and b (3,) of float32; group 1: a scalar of float64. `none` is empty."""
    return plan(
        [
            Variable("w1", "float32", (4, 3)),
            Variable("b", "float32", (3,)),
            Variable("s", "float64", ()),
            Variable("none", "float32", (0, 7)),
        ]
    )


# -- out -----------------------------------------------------------------------------------------

PARTS = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 3)), max_size=12)


@given(parts=PARTS, chunk_bytes=st.sampled_from([1, 8, 20, 64, 1000]))
def test_chunks_carry_every_element_in_order(
    parts: list[tuple[int, int, int]], chunk_bytes: int
) -> None:
    ends = {0: 0, 1: 0}
    given_parts = []
    for group, count, gap in parts:
        array = np.arange(count, dtype="<f4" if group == 0 else "<f8") + 100 * ends[group]
        given_parts.append((Range(group, ends[group] + gap, count), array))
        ends[group] += gap + count
    made = list(chunks(given_parts, chunk_bytes))

    assert [chunk.last for chunk in made] == [False] * (len(made) - 1) + [True]
    for chunk in made:
        size = sum(a.nbytes for a in chunk.arrays)
        assert size <= chunk_bytes or sum(r.count for r in chunk.ranges) == 1
        assert size or len(made) == 1
        for a, b in zip(chunk.ranges, chunk.ranges[1:], strict=False):
            assert (a.group, a.offset + a.count) != (b.group, b.offset), "neighbours are one range"
    elements = {
        (r.group, r.offset + i): value
        for chunk in made
        for r, data in _with_data(chunk)
        for i, value in enumerate(data)
    }
    expected = {
        (r.group, r.offset + i): value for r, array in given_parts for i, value in enumerate(array)
    }
    assert elements == expected


def _with_data(chunk: codec.Chunk) -> list[tuple[Range, list[float]]]:
    values = [float(v) for array in chunk.arrays for v in array]
    found = []
    for piece in chunk.ranges:
        found.append((piece, values[: piece.count]))
        values = values[piece.count :]
    assert not values
    return found


def test_no_elements_are_one_empty_last_chunk() -> None:
    assert list(chunks([])) == [([], [], True)]
    assert list(chunks([(Range(0, 0, 0), np.empty(0, "<f4"))])) == [([], [], True)]


def test_a_large_array_is_cut_without_a_copy() -> None:
    array = np.arange(1000, dtype="<f4")
    made = list(chunks([(Range(2, 5, 1000), array)], 1600))
    assert [c.ranges for c in made] == [
        [Range(2, 5, 400)],
        [Range(2, 405, 400)],
        [Range(2, 805, 200)],
    ]
    assert all(np.shares_memory(c.arrays[0], array) for c in made)


def test_slots_are_not_neighbours_of_values() -> None:
    one = np.ones(4, "<f4")
    (chunk,) = chunks([(Range(0, 0, 4), one), (Range(0, 4, 4, slot=1), one)])
    assert chunk.ranges == [Range(0, 0, 4), Range(0, 4, 4, slot=1)]


def test_a_message_names_a_bounded_number_of_ranges() -> None:
    one = np.ones(1, "<f4")
    made = list(chunks((Range(0, 2 * i, 1), one) for i in range(codec.CHUNK_RANGES + 1)))
    assert [len(c.ranges) for c in made] == [codec.CHUNK_RANGES, 1]


def test_many_small_variables_are_one_range(layout: Layout) -> None:
    names = [f"v{i}" for i in range(1000)]
    small = plan(Variable(name, "float32", (3,)) for name in names)
    (chunk,) = chunks(
        (Range(v.group, v.offset, v.size), np.ones(3, "<f4")) for v in small.variables
    )
    assert chunk.ranges == [Range(0, 0, 3000)]
    assert len(chunk.arrays) == 1000


# -- there and back ------------------------------------------------------------------------------


@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1), chunk_bytes=st.sampled_from([8, 24, 1 << 20]))
def test_arrays_survive_the_wire(seed: int, chunk_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    layout = plan(
        Variable(f"v{i}", str(rng.choice(["float32", "float64"])), tuple(rng.integers(0, 4, 2)))
        for i in range(6)
    )
    flats = [rng.normal(size=g.size).astype(g.dtype) for g in layout.groups]
    parts = [(r, flats[r.group]) for r in layout.ranges()]
    found = [np.full_like(flat, np.nan) for flat in flats]
    for chunk in chunks(parts, chunk_bytes):
        wire = encode(framed(PullResponse(), chunk))
        frame = decode(PullResponse, wire)
        assert frame.message.last == chunk.last
        for piece, array in pieces(frame, layout):
            assert not array.flags.writeable
            found[piece.group][piece.offset : piece.offset + piece.count] = array
    for flat, copy in zip(flats, found, strict=True):
        np.testing.assert_array_equal(flat, copy)


def test_pieces_are_views_of_the_received_bytes(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(framing, "_SMALL", 0)
    wire = encode(
        framed(PushRequest(), next(chunks([(Range(0, 2, 5), np.arange(5, dtype="<f4"))])))
    )
    ((piece, array),) = pieces(decode(PushRequest, wire), layout)
    assert piece == Range(0, 2, 5)
    assert array.dtype == "<f4"
    assert np.shares_memory(array, np.frombuffer(wire, np.uint8))


def push(*ranges: Range, nbytes: int, **fields: Any) -> Frame[PushRequest]:
    message = PushRequest(**fields)
    for r in ranges:
        message.ranges.add(group=r.group, slot=r.slot, offset=r.offset, count=r.count)
    return Frame(message, [memoryview(bytes(nbytes))] if nbytes else [])


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (push(Range(0, 0, 3), nbytes=8), "the ranges name 12 bytes, the payload has 8"),
        (push(Range(0, 0, 3), nbytes=16), "the ranges name 12 bytes, the payload has 16"),
        (push(nbytes=4), "the ranges name 0 bytes, the payload has 4"),
        (push(Range(0, 0, 3), nbytes=0), "the ranges name 12 bytes, the payload has 0"),
        (push(Range(1, 0, 1), nbytes=4), "the ranges name 8 bytes, the payload has 4"),
        (push(Range(2, 0, 1), nbytes=4), "group 2; the shard has 2"),
        (push(Range(0, 14, 2), nbytes=8), r"\[14, 16\) is outside group 0 of 15"),
        (push(Range(0, -1, 2), nbytes=8), r"\[-1, 1\) is outside"),
        (push(Range(0, 0, -1), nbytes=0), "outside"),
        (push(Range(0, 2**62, 2**62), nbytes=8), "outside"),
        (push(Range(0, 0, 1, slot=2), nbytes=4), "slot 2; the group has 1"),
    ],
)
def test_ranges_that_do_not_fit_are_refused(
    frame: Frame[PushRequest], says: str, layout: Layout
) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        pieces(frame, layout, slots=1)


def test_an_unknown_codec_is_refused(layout: Layout) -> None:
    message = PushRequest()
    message.ranges.add(count=1, codec=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="a range has codec 3"):
        pieces(Frame(message, [memoryview(bytes(4))]), layout)
    tensor = pb.Tensor(name="b", dtype=F4, shape=[3], data=bytes(12), codec=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="gradient 'b' has codec 3"):
        pieces(Frame(PushRequest(tensors=[tensor])), layout)


# -- named tensors -------------------------------------------------------------------------------


def test_named_tensors_become_ranges(layout: Layout) -> None:
    whole = pb.Tensor(name="s", dtype=F8, data=np.array(2.5, "<f8").tobytes())
    part = pb.Tensor(name="b", dtype=F4, shape=[3], data=np.ones(2, "<f4").tobytes(), offset=1)
    empty = pb.Tensor(name="none", dtype=F4, shape=[0, 7])
    found = pieces(Frame(PushRequest(tensors=[whole, part, empty])), layout)
    assert [piece for piece, _ in found] == [Range(1, 0, 1), Range(0, 13, 2)]
    assert [array.tolist() for _, array in found] == [[2.5], [1, 1]]
    assert not any(array.flags.writeable for _, array in found)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            pb.Tensor(name="w1", dtype=F4, shape=[3, 4], data=bytes(48)),
            r"gradient 'w1' has shape \(3, 4\), variable has \(4, 3\)",
        ),
        (pb.Tensor(name="w1", dtype=F4, shape=[3, 4]), r"has shape \(3, 4\)"),
        (pb.Tensor(name="w1", dtype=F4, shape=[-4, -3], data=bytes(48)), r"has shape \(-4, -3\)"),
        (pb.Tensor(name="w1", dtype=F4, shape=[2**40], data=bytes(48)), r"\(1099511627776,\)"),
        (pb.Tensor(name="w1", dtype=F4, shape=[1] * 1000, data=bytes(4)), r"\.\.\. 1000 axes\)"),
        (
            pb.Tensor(name="w1", dtype=F8, shape=[4, 3], data=bytes(96)),
            "dtype float64, variable has",
        ),
        (
            pb.Tensor(name="w1", shape=[4, 3], data=bytes(48)),
            "dtype number 0; choose one of 'D_TYPE",
        ),
        (pb.Tensor(name="w1", dtype=99, shape=[4, 3], data=bytes(48)), "dtype number 99"),  # type: ignore[arg-type]
        (pb.Tensor(name="w1", dtype=F4, shape=[4, 3], data=bytes(47)), "47 bytes of float32"),
        (pb.Tensor(name="w1", dtype=F4, shape=[4, 3], data=bytes(52)), "variable has 12 elements"),
        (pb.Tensor(name="w1", dtype=F4, shape=[4, 3], data=bytes(8), offset=11), "from element 11"),
        (pb.Tensor(name="w1", dtype=F4, shape=[4, 3], data=bytes(8), offset=-1), "from element -1"),
        (pb.Tensor(name="w1", dtype=F4, shape=[4, 3], offset=2**62), "from element 4611"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tensor: pb.Tensor, says: str, layout: Layout) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as error:
        pieces(Frame(PushRequest(tensors=[tensor])), layout)
    assert len(str(error.value)) < 300


def test_an_unknown_tensor_is_not_found(layout: Layout) -> None:
    with pytest.raises(NotFoundError, match=r"no variable 'w9' here; there are 'w1', 'b'"):
        pieces(Frame(PushRequest(tensors=[pb.Tensor(name="w9")])), layout)


# -- what users hand in --------------------------------------------------------------------------

W = Variable("w1", "float32", (4, 3))
BASE = np.arange(12, dtype="<f4").reshape(4, 3)


@pytest.mark.parametrize(
    "value",
    [
        BASE,
        np.asfortranarray(BASE),
        BASE.astype(">f4"),
        np.repeat(BASE, 2, axis=1)[:, ::2],
        BASE[::-1][::-1],
        BASE.tolist(),
        BASE.astype(int).tolist(),
        [list(row) for row in BASE],
    ],
    ids=[
        "plain",
        "fortran",
        "big-endian",
        "strided",
        "reversed",
        "lists",
        "ints",
        "scalars",
    ],
)
def test_a_gradient_travels_in_c_order(value: Any) -> None:
    before = np.array(value, copy=True)
    flat = gradient_array("w1", value, W)
    assert flat.shape == (12,)
    assert flat.dtype == np.dtype("<f4")
    assert flat.flags.c_contiguous
    assert not flat.flags.writeable
    assert flat.tolist() == list(range(12))
    np.testing.assert_array_equal(np.asarray(value), before)


def test_a_gradient_is_not_copied_without_need_nor_locked() -> None:
    value = BASE.copy()
    assert np.shares_memory(gradient_array("w1", value, W), value)
    assert value.flags.writeable


@pytest.mark.parametrize("value", [np.array(2, "<f4"), np.float32(2), 2.0, 2])
def test_a_scalar_gradient(value: Any) -> None:
    assert gradient_array("s", value, Variable("s", "float32", ())).tolist() == [2]


@pytest.mark.parametrize("value", [np.empty((0, 7), "<f4"), np.empty((7, 0), "<f4").T])
def test_an_empty_gradient(value: Any) -> None:
    assert gradient_array("e", value, Variable("e", "float32", (0, 7))).shape == (0,)


class Unreadable:
    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (BASE.T, r"gradient 'w1' has shape \(3, 4\), variable has \(4, 3\)"),
        (BASE.reshape(-1), r"has shape \(12,\)"),
        (np.float32(1), r"has shape \(\), variable has \(4, 3\)"),
        (
            BASE.astype("f8"),
            r"gradient 'w1' has dtype float64, variable has float32; "
            r"cast it: grad\.astype\(np\.float32\)",
        ),
        (BASE.astype(">f8"), r"cast it: grad\.astype\(np\.float32\)"),
        (BASE.astype("f2"), r"float16.*cast it"),
        (BASE.astype(int), r"int64.*cast it"),
        (BASE.astype(bool), r"bool.*cast it"),
        (BASE.astype(complex), r"complex128, variable has float32$"),
        (BASE.astype(object), r"object, variable has float32$"),
        (BASE.astype(str), r"<U32, variable has float32$"),
        ([["1"] * 3] * 4, r"<U1, variable has float32$"),
        ([[None] * 3] * 4, r"object, variable has float32$"),
        ([[1], [1, 2]], "cannot be read as an array"),
        (Unreadable(), "gradient 'w1' cannot be read as an array: call detach"),
    ],
)
def test_a_gradient_that_does_not_fit_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        gradient_array("w1", value, W)


def test_a_float32_gradient_of_a_float64_variable_is_refused_too() -> None:
    with pytest.raises(InvalidArgumentError, match=r"astype\(np\.float64\)"):
        gradient_array("w1", BASE, Variable("w1", "float64", (4, 3)))


def test_a_list_beyond_float32_is_infinite_not_a_warning() -> None:
    assert np.isinf(gradient_array("v", [1e300], Variable("v", "float32", (1,)))).all()


@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f8", ">f8"])
def test_an_initial_value_keeps_shape_and_precision(dtype: str) -> None:
    value = np.asfortranarray(np.arange(6, dtype=dtype).reshape(2, 3))
    array = initial_array("w", value)
    assert array.shape == (2, 3)
    assert array.dtype == np.dtype(dtype).newbyteorder("<")
    assert array.flags.c_contiguous
    assert not array.flags.writeable
    assert value.flags.writeable
    np.testing.assert_array_equal(array, value)
    assert initial_array("s", 1.5).shape == ()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.ones(2, int), r"variable 'w' has dtype int64.*cast it: value\.astype\(np\.float32\)"),
        (np.ones(2, "f2"), "float16"),
        (np.ones(2, complex), "choose one of 'float32', 'float64'$"),
        (["a"], "choose one of"),
    ],
)
def test_an_initial_value_of_another_dtype_is_refused(value: Any, says: str) -> None:
    with pytest.raises(InvalidArgumentError, match=says):
        initial_array("w", value)
