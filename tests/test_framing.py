"""The one-copy encoding against the generated classes: the same messages, the same refusals."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import given, settings
from hypothesis import strategies as st

from paramserver import framing
from paramserver.errors import InvalidArgumentError
from paramserver.framing import Frame, decode, encode
from paramserver.v1.control_pb2 import InitializeRequest, RestoreRequest, SnapshotResponse
from paramserver.v1.parameter_pb2 import (
    PullResponse,
    PushPullRequest,
    PushPullResponse,
    PushRequest,
)


@pytest.fixture(autouse=True, scope="module", params=[0, framing._SMALL], ids=["walked", "small"])
def small(request: pytest.FixtureRequest) -> Iterator[int]:
    """Everything holds for messages that are walked and for those small enough for protobuf."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "_SMALL", request.param)
        yield request.param


STREAMED: list[Any] = [
    PushRequest,
    PushPullRequest,
    PullResponse,
    PushPullResponse,
    InitializeRequest,
    RestoreRequest,
    SnapshotResponse,
]

SCALARS = {
    FieldDescriptor.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_ENUM: st.integers(0, 9),
}


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 3) -> Message:
    """A random message, payload and nested ones included."""
    values: dict[str, Any] = {}
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.message_type and field.message_type.GetOptions().map_entry:
            values[field.name] = {"key": 1} if field.name == "hyper" else {"key": "value"}
            continue
        one: st.SearchStrategy[Any]
        if field.message_type:
            if not depth:
                continue
            one = messages(field.message_type, depth - 1)
        elif field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            one = st.binary(max_size=9) if field.type == field.TYPE_BYTES else st.text(max_size=5)
        else:
            one = SCALARS[field.cpp_type]
        values[field.name] = draw(st.lists(one, max_size=2) if field.is_repeated else one)
    return GetMessageClass(descriptor)(**values)


def varint(value: int, padding: int = 0) -> bytes:
    """A number on the wire, made longer than it need be by `padding` bytes."""
    out = bytearray()
    while value >= 0x80 or padding:
        padding -= value < 0x80
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


PAYLOADS = st.builds(
    lambda content, tag, length: varint(122, tag) + varint(len(content), length) + content,
    st.binary(max_size=200),
    st.sampled_from([0, 0, 0, 1, 4, 9]),
    st.sampled_from([0, 0, 0, 1, 4, 9]),
)
LEAVES = st.one_of(
    st.builds(
        lambda n, v, p: varint(n << 3) + varint(v, p),
        st.integers(1, 40),
        st.integers(0, 2**64 - 1),
        st.integers(0, 1),
    ),
    st.builds(
        lambda n, c: varint(n << 3 | 2) + varint(len(c)) + c,
        st.integers(5, 2**29 - 1),
        st.binary(max_size=20),
    ),
    st.builds(
        lambda n, c: varint(n << 3 | 1) + c, st.integers(1, 40), st.binary(min_size=8, max_size=8)
    ),
    st.builds(
        lambda n, c: varint(n << 3 | 5) + c, st.integers(1, 40), st.binary(min_size=4, max_size=4)
    ),
    PAYLOADS,
)
GROUPS = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        lambda n, parts, wrong: varint(n << 3 | 3) + b"".join(parts) + varint((n + wrong) << 3 | 4),
        st.integers(1, 40),
        st.lists(inner, max_size=3),
        st.sampled_from([0, 0, 0, 1]),
    ),
    max_leaves=4,
)


@st.composite
def wires(draw: st.DrawFn, cls: Any) -> bytes:
    """Fields in any order, unknown ones, groups, payloads; perhaps cut short or changed."""
    whole = draw(messages(cls.DESCRIPTOR)).SerializeToString()
    parts = draw(st.lists(GROUPS | PAYLOADS, max_size=5))
    data = b"".join(draw(st.permutations([whole, *parts])))
    match draw(st.sampled_from(["whole", "whole", "cut", "changed", "random"])):
        case "cut" if data:
            data = data[: draw(st.integers(0, len(data) - 1))]
        case "changed" if data:
            at = draw(st.integers(0, len(data) - 1))
            data = data[:at] + draw(st.binary(min_size=1, max_size=1)) + data[at + 1 :]
        case "random":
            data = draw(st.binary(max_size=60))
    return data


def same_as_protobuf(cls: Any, data: bytes) -> None:
    """Asserts that we and protobuf read the same message from the bytes, or both refuse them."""
    try:
        expected = cls.FromString(data)
    except DecodeError:
        with pytest.raises(InvalidArgumentError, match=cls.DESCRIPTOR.name):
            decode(cls, data)
        return
    frame = decode(cls, data)
    assert not frame.message.payload
    assert len(frame.payload) <= 1
    assert all(memoryview(p).readonly and p.nbytes for p in frame.payload)
    frame.message.payload = b"".join(frame.payload)
    assert frame.message.SerializeToString(deterministic=True) == expected.SerializeToString(
        deterministic=True
    )


@pytest.mark.parametrize("cls", STREAMED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bytes_get_protobufs_verdict(cls: Any, data: st.DataObject) -> None:
    same_as_protobuf(cls, data.draw(wires(cls)))


@pytest.mark.parametrize("cls", STREAMED)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_protobuf_reads_what_we_write(cls: Any, data: st.DataObject) -> None:
    message = data.draw(messages(cls.DESCRIPTOR))
    message.ClearField("payload")
    arrays = [
        np.array(a, dtype)
        for a, dtype in data.draw(
            st.lists(st.tuples(st.lists(st.floats(width=32)), st.sampled_from(["<f4", "<f8"])))
        )
    ]
    wire = encode(Frame(message, arrays))
    read = cls.FromString(wire)
    assert read.payload == b"".join(a.tobytes() for a in arrays)
    same_as_protobuf(cls, wire)


def test_truncation_at_every_byte() -> None:
    message = PushRequest(last=True)
    message.ranges.add(group=1, offset=5, count=3)
    message.header.caller.worker = "worker:0"
    wire = encode(Frame(message, [np.arange(3, dtype="<f4")])) + varint(900 << 3 | 5) + b"four"
    for stop in range(len(wire) + 1):
        same_as_protobuf(PushRequest, wire[:stop])


def test_the_last_payload_wins() -> None:
    first, last = PushRequest(payload=b"first"), PushRequest(payload=b"last", last=True)
    wire = first.SerializeToString() + last.SerializeToString()
    assert bytes(decode(PushRequest, wire).payload[0]) == b"last"
    assert decode(PushRequest, wire + varint(122) + b"\0").payload == ()


def test_a_payload_inside_a_group_is_not_the_payload() -> None:
    inner = PushRequest(payload=b"inner").SerializeToString()
    wire = varint(40 << 3 | 3) + inner + varint(40 << 3 | 4)
    assert decode(PushRequest, wire).payload == ()
    same_as_protobuf(PushRequest, wire)


def test_the_payload_is_a_view_of_the_message(small: int) -> None:
    wire = encode(Frame(PushRequest(last=True), [np.arange(4, dtype="<f4")]))
    (payload,) = decode(PushRequest, wire).payload
    assert isinstance(payload, memoryview)
    assert (payload.obj is wire) is (len(wire) > small)
    assert payload.readonly


def test_the_payload_is_found_before_and_after_other_fields(small: int) -> None:
    payload = PushRequest(payload=b"12345678").SerializeToString()
    last = PushRequest(last=True).SerializeToString()
    for wire in (payload + last, last + payload, last + payload + varint(99 << 3) + b"\1"):
        frame = decode(PushRequest, wire)
        assert frame.message.last
        assert isinstance(frame.payload[0], memoryview)
        assert (frame.payload[0].obj is wire) is (len(wire) > small)
        assert bytes(frame.payload[0]) == b"12345678"


def test_no_payload_is_no_field() -> None:
    for payload in ([], [np.empty(0, "<f4")]):
        assert encode(Frame(PushRequest(last=True), payload)) == b"\x20\x01"


def test_a_scattered_array_is_refused() -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        encode(Frame(PushRequest(), [np.zeros((4, 4), "<f4")[:, :2]]))


def test_a_flood_of_tiny_fields_costs_no_time() -> None:
    """16 MiB of one-byte fields: walked in Python field by field they would hold the process."""
    wire = b"\x20\x01" * (8 << 20)
    before = time.process_time()
    assert decode(PushRequest, wire).message.last
    assert time.process_time() - before < 0.7


def test_every_streamed_message_is_listed() -> None:
    constrained = framing.M.__constraints__
    assert {c.DESCRIPTOR.name for c in STREAMED} == {c.DESCRIPTOR.name for c in constrained}
    for cls in STREAMED:
        assert cls.DESCRIPTOR.fields_by_name["payload"].number == 15
