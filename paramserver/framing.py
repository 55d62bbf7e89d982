"""One-copy encoding of the messages that carry arrays. No gRPC here, and no idea of layouts.

Second stop in the walk of one Push, and the third on the other side. Field 15 of every streamed
message is `bytes payload`, nearly all of the message. Protobuf would copy it several times; here it
is joined to the rest once when written, and looked at in place when read. The bytes are a valid
message of the published schema in both directions: the generated classes read and write the same.

Both gRPC sides hand over received messages as raw bytes (no deserializer), and whoever handles the
call decodes them itself: an error in a gRPC deserializer could only be answered as INTERNAL.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

from google.protobuf.message import DecodeError

from paramserver.errors import InvalidArgumentError
from paramserver.layout import Array
from paramserver.v1.control_pb2 import InitializeRequest, RestoreRequest, SnapshotResponse
from paramserver.v1.parameter_pb2 import (
    PullResponse,
    PushPullRequest,
    PushPullResponse,
    PushRequest,
)

#: A message with a payload field.
M = TypeVar(
    "M",
    PushRequest,
    PushPullRequest,
    PullResponse,
    PushPullResponse,
    InitializeRequest,
    RestoreRequest,
    SnapshotResponse,
)

#: What `bytes.join` and `np.frombuffer` take without a copy.
Payload = Sequence[Array | memoryview]

#: Number and wire type (2: length, then bytes) of the payload field, as its tag stands on the wire.
_TAG = 15 << 3 | 2
_TAG_BYTE = bytes([_TAG])

#: Messages of so few bytes are left to protobuf, copies and all.
_SMALL = 2048

#: Beyond so many top-level fields protobuf's own parser is the faster walker.
_MAX_FIELDS = 1 << 16


@dataclass(frozen=True, eq=False, slots=True)
class Frame(Generic[M]):
    """A message without its payload, and the pieces that make up the payload, back to back.

    To write: any number of C-contiguous little-endian arrays or buffers, held by reference until
    encoded. As read: at most one read-only view, which keeps the received bytes alive."""

    message: M
    payload: Payload = ()

    @property
    def nbytes(self) -> int:
        """Bytes of payload."""
        return sum(piece.nbytes for piece in self.payload)


def encode(frame: Frame[M]) -> bytes:
    """The frame as one message: the payload is copied once, and is the last field.

    Thread-safe; a gRPC serializer. Raises: TypeError for an array that is not C-contiguous."""
    parts: list[bytes | memoryview] = [frame.message.SerializeToString()]
    if size := frame.nbytes:
        parts.append(_TAG_BYTE + _varint(size))
        # Arrays are buffers too, which typing can say from Python 3.12 on.
        parts += cast(Sequence[memoryview], frame.payload)
    return b"".join(parts)


def decode(cls: type[M], data: bytes) -> Frame[M]:
    """Reads what `encode`, or any protobuf library, wrote. The payload is a view, not a copy.

    Accepts and refuses exactly what protobuf does. Thread-safe. Raises: InvalidArgumentError."""
    # Copying little costs less than looking for it.
    place = _payload_place(data) if len(data) > _SMALL else None
    try:
        if place is not None:
            field, start, stop = place
            message = cls.FromString(data[:field] + data[stop:])
            if not message.payload:  # else it was given twice
                return Frame(message, (memoryview(data)[start:stop],) if start < stop else ())
        message = cls.FromString(data)
    except DecodeError:
        raise InvalidArgumentError(
            f"{len(data)} bytes are no valid {cls.DESCRIPTOR.name} message"
        ) from None
    payload = memoryview(message.payload)
    message.ClearField("payload")
    return Frame(message, (payload,) if payload else ())


def _payload_place(data: bytes) -> tuple[int, int, int] | None:
    """Where the payload field begins, and where its content begins and ends.

    Only for messages as they usually are. None leaves all others to protobuf, which decides whether
    they are valid: a payload given twice, groups, over-long lengths, truncated or random bytes."""
    at, size = 0, len(data)
    found: tuple[int, int, int] | None = None
    try:
        for _ in range(_MAX_FIELDS):
            if at == size:
                return found or (size, size, size)
            field = at
            tag, at = _read_varint(data, at)
            kind = tag & 7
            if kind == 2:
                length, at = _read_varint(data, at)
                if tag == _TAG:
                    if data[field:at] != _TAG_BYTE + _varint(length):
                        return None
                    found = field, at, at + length
                at += length
            elif kind == 0:
                _, at = _read_varint(data, at)
            elif kind == 1:
                at += 8
            elif kind == 5:
                at += 4
            else:
                return None
    except IndexError:
        pass
    return None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number, and where the next thing begins. Raises: IndexError if the bytes end too early."""
    byte = data[at]
    if byte < 0x80:
        return byte, at + 1
    value = byte & 0x7F
    for i in range(1, 10):
        byte = data[at + i]
        value |= (byte & 0x7F) << 7 * i
        if byte < 0x80:
            return value, at + i + 1
    raise IndexError("varint of more than 10 bytes")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
