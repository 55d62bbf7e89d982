"""Arrays <-> messages, both directions. No gRPC here; `framing` puts the messages into bytes.

Second stop in the walk of one Push (`gradient_array`, `chunks`, `framed`), and the third on the
other side (`pieces`). Values travel as raw bytes: little endian, C order. What goes out is cut into
messages without a copy; what comes in is checked against the layout before anything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paramserver.errors import InvalidArgumentError
from paramserver.framing import Frame, M
from paramserver.layout import DTYPES, Array, Layout, Range, Variable, some
from paramserver.v1 import tensor_pb2 as pb

#: Payload of one message: 2 MiB was the fastest on loopback, 256 KiB clearly slower.
CHUNK_BYTES = 2 << 20

#: Ranges named in one message: their names must not outgrow the payload.
CHUNK_RANGES = 1 << 13

_DTYPE_NUMBERS = {"float32": pb.D_TYPE_FLOAT32, "float64": pb.D_TYPE_FLOAT64}
_DTYPE_NAMES: dict[int, str] = {number: name for name, number in _DTYPE_NUMBERS.items()}
assert set(_DTYPE_NUMBERS) == set(DTYPES)
assert set(_DTYPE_NAMES) == set(pb.DType.values()) - {pb.D_TYPE_UNSPECIFIED}


def chunk_bytes(max_message_bytes: int) -> int:
    """Payload of one message where a message has a limit: the ranges need room, too."""
    return min(CHUNK_BYTES, max(1, max_message_bytes // 2))


class Chunk(NamedTuple):
    """The content of one message: `arrays` hold the elements of all `ranges`, back to back.

    Neighbours in a group are one range, so there may be more arrays than ranges."""

    ranges: list[Range]
    arrays: list[Array]
    last: bool


# -- out -----------------------------------------------------------------------------------------


def chunks(parts: Iterable[tuple[Range, Array]], chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Cuts ranges, each with its flat array `(count,)`, into messages of at most `chunk_bytes`.

    Small ranges share a message, large ones are cut, and ranges that follow each other in a group
    are named once. Nothing is copied: the arrays are views of those given. The last chunk is
    marked; there is always one, so no elements at all are one empty chunk."""
    ranges: list[Range] = []
    arrays: list[Array] = []
    room = chunk_bytes
    for piece, array in parts:
        at = 0
        while at < piece.count:
            before = ranges[-1] if ranges else None
            start = piece.offset + at
            follows = (
                before is not None
                and (before.group, before.slot) == (piece.group, piece.slot)
                and before.offset + before.count == start
            )
            if arrays and (room < array.itemsize or (not follows and len(ranges) == CHUNK_RANGES)):
                yield Chunk(ranges, arrays, False)
                ranges, arrays, room = [], [], chunk_bytes
                continue
            count = min(piece.count - at, max(1, room // array.itemsize))
            if before is not None and follows:
                ranges[-1] = Range(piece.group, before.offset, before.count + count, piece.slot)
            else:
                ranges.append(Range(piece.group, start, count, piece.slot))
            arrays.append(array[at : at + count])
            room -= count * array.itemsize
            at += count
    yield Chunk(ranges, arrays, True)


def framed(message: M, chunk: Chunk) -> Frame[M]:
    """Puts a chunk into a message: adds its ranges, sets `last`, and refers to its arrays."""
    for piece in chunk.ranges:
        message.ranges.add(
            group=piece.group, slot=piece.slot, offset=piece.offset, count=piece.count
        )
    message.last = chunk.last
    return Frame(message, chunk.arrays)


def gradient_array(name: str, value: npt.ArrayLike, variable: Variable) -> Array:
    """A user's gradient as it travels: `(variable.size,)`, little endian, C order, read-only.

    Any memory order, byte order and strides are taken, and copied only if need be; the result may
    be a view of `value`, which is never written. The dtype must be the variable's: a silent cast
    would hide a model that computes in another precision than it says. Lists and Python numbers
    have no dtype, and get the variable's.

    Raises: InvalidArgumentError for another shape or dtype, with the remedy."""
    array = _as_array("gradient", name, value)
    if array.shape != variable.shape:
        raise InvalidArgumentError(
            f"gradient {name!r} has shape {_show(array.shape)}, variable has {variable.shape}"
        )
    wanted = DTYPES[variable.dtype]
    if _without_dtype(value) and array.dtype.kind in "fiu":
        with np.errstate(over="ignore"):
            array = array.astype(wanted)
    elif array.dtype.newbyteorder("<") != wanted:
        raise InvalidArgumentError(
            f"gradient {name!r} has dtype {array.dtype}, variable has {variable.dtype}"
            + _remedy(array.dtype, "grad", variable.dtype)
        )
    return _read_only(np.ascontiguousarray(array, wanted).reshape(-1))


def initial_array(name: str, value: npt.ArrayLike) -> Array:
    """A variable's first value as it travels: little endian, C order, read-only, in its shape.

    Its dtype becomes the variable's. The result may be a view of `value`, which is never written.

    Raises: InvalidArgumentError for a dtype that no variable can have, with the remedy."""
    array = _as_array("variable", name, value)
    wanted = DTYPES.get(array.dtype.name)
    if wanted is None:
        raise InvalidArgumentError(
            f"variable {name!r} has dtype {array.dtype}; choose one of {some(DTYPES)}"
            + _remedy(array.dtype, "value", "float32")
        )
    return _read_only(np.ascontiguousarray(array, wanted).reshape(array.shape))


def _as_array(what: str, name: str, value: npt.ArrayLike) -> npt.NDArray[np.generic]:
    try:
        return np.asarray(value)
    except Exception as error:  # whatever a foreign __array__ raises
        raise InvalidArgumentError(
            f"{what} {name!r} cannot be read as an array: {error}"
        ) from error


def _without_dtype(value: npt.ArrayLike) -> bool:
    return isinstance(value, list | tuple | int | float) and not isinstance(value, np.generic)


def _remedy(dtype: np.dtype[np.generic], what: str, wanted: str) -> str:
    castable = np.can_cast(dtype, DTYPES[wanted], "same_kind")
    return f"; cast it: {what}.astype(np.{wanted})" if castable else ""


def _read_only(array: Array) -> Array:
    view = array.view()
    view.flags.writeable = False
    return view


# -- in ------------------------------------------------------------------------------------------


def pieces(
    frame: Frame[M], layout: Layout, slots: int = 0, what: str = "gradient"
) -> list[tuple[Range, Array]]:
    """What a received message brings, ranges and named tensors alike, as flat read-only views.

    Every range is inside the layout (`slots`: how many slots a group has) and as long as its array
    `(count,)`, which has the group's dtype and may be unaligned. Empty pieces are left out. The
    views keep the message's bytes alive. `what` is what an error calls a named tensor.

    Raises: InvalidArgumentError for what does not fit; NotFoundError for an unknown name."""
    ranges = [_range(r, layout, slots) for r in frame.message.ranges]
    dtypes = [DTYPES[layout.groups[piece.group].dtype] for piece in ranges]
    named = sum(p.count * dtype.itemsize for p, dtype in zip(ranges, dtypes, strict=True))
    if named != frame.nbytes:
        raise InvalidArgumentError(
            f"the ranges name {named} bytes, the payload has {frame.nbytes}"
            + (layout.near(ranges[0]) if ranges else "")
        )
    found: list[tuple[Range, Array]] = []
    at = 0
    for piece, dtype in zip(ranges, dtypes, strict=True):
        if piece.count:
            found.append((piece, np.frombuffer(frame.payload[0], dtype, piece.count, at)))
            at += piece.count * dtype.itemsize
    tensors: Sequence[pb.Tensor] = getattr(frame.message, "tensors", ())
    found += [part for part in (_tensor(t, layout, what) for t in tensors) if part[0].count]
    return found


def _range(message: pb.Range, layout: Layout, slots: int) -> Range:
    _check_codec(message.codec, "a range")
    piece = Range(message.group, message.offset, message.count, message.slot)
    layout.check(piece, slots)
    return piece


def _check_codec(number: int, what: str) -> None:
    if number != pb.CODEC_UNSPECIFIED:
        raise InvalidArgumentError(f"{what} has codec {number}; only raw bytes are understood")


def _tensor(message: pb.Tensor, layout: Layout, what: str) -> tuple[Range, Array]:
    variable = layout[message.name]
    name = f"{what} {message.name!r}"
    if message.codec != pb.CODEC_UNSPECIFIED:
        raise InvalidArgumentError(
            f"{name} has codec {message.codec}; only raw bytes are understood"
        )
    dtype = dtype_from_proto(message.dtype, name)
    if dtype != variable.dtype:
        raise InvalidArgumentError(f"{name} has dtype {dtype}, variable has {variable.dtype}")
    if tuple(message.shape) != variable.shape:
        raise InvalidArgumentError(
            f"{name} has shape {_show(message.shape)}, variable has {variable.shape}"
        )
    data, itemsize = message.data, DTYPES[dtype].itemsize
    count, rest = divmod(len(data), itemsize)
    start = message.offset
    if rest or start < 0 or start + count > variable.size:
        raise InvalidArgumentError(
            f"{name} has {len(data)} bytes of {dtype} from element {start}; "
            f"variable has {variable.size} elements"
        )
    piece = Range(variable.group, variable.offset + start, count)
    return piece, np.frombuffer(data, DTYPES[dtype])


def dtype_to_proto(name: str) -> pb.DType.ValueType:
    """The number of "float32" or "float64"."""
    return _DTYPE_NUMBERS[name]


def dtype_from_proto(number: int, what: str) -> str:
    """The name of an element type; `what` says whose it is. Raises: InvalidArgumentError."""
    try:
        return _DTYPE_NAMES[number]
    except KeyError:
        raise InvalidArgumentError(
            f"{what} has dtype number {number}; choose one of {some(pb.DType.keys()[1:])}"
        ) from None


def _show(shape: Sequence[int]) -> str:
    most = 16
    if len(shape) <= most:
        return str(tuple(shape))
    return f"({', '.join(map(str, shape[:most]))}, ... {len(shape)} axes)"
