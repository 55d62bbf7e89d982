"""A shard's whole state on the wire: what Initialize and Restore send, what Snapshot brings.

Both directions side by side. Arrays go by name here, in their variables' shapes, whatever the
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from paramserver import codec, convert, framing
from paramserver.errors import NotFoundError, UnavailableError
from paramserver.framing import Frame
from paramserver.layout import (
    DTYPES,
    Array,
    Layout,
    Limits,
    Range,
    Variable,
    check_finite,
    plan,
)
from paramserver.state import ShardState
from paramserver.v1 import control_pb2 as pb

Load = TypeVar("Load", pb.InitializeRequest, pb.RestoreRequest)


@dataclass(frozen=True)
class ShardArrays:
    """One shard's state with its arrays by name: (value, slots by name), in the variables'
    shapes."""

    state: ShardState
    arrays: Mapping[str, tuple[Array, Mapping[str, Array]]]


def load_frames(
    cls: type[Load], chief: pb.Chief, shard: ShardArrays, chunk_bytes: int
) -> Iterator[Frame[Load]]:
    """The messages that give a shard its state. Arrays are referred to, and copied once on
    encoding."""
    layout = plan(shard.state.variables)
    slots: tuple[str, ...] = shard.state.job.optimizer.slots
    parts: list[tuple[Range, Array]] = []
    for slot, name in enumerate(("", *slots)):
        for variable in sorted(layout.variables, key=lambda v: (v.group, v.offset)):
            value, own = shard.arrays[variable.name]
            array = value if not slot else own.get(name)
            if array is None:
                continue
            if array.shape != variable.shape or array.dtype != DTYPES[variable.dtype]:
                raise NotFoundError(f"{variable.name!r} is not as its state says")
            piece = Range(variable.group, variable.offset, variable.size, slot)
            parts.append((piece, array.reshape(-1)))
    message = cls(chief=chief, state=convert.state_to_proto(shard.state))
    for chunk in codec.chunks(parts, chunk_bytes):
        yield codec.framed(message, chunk)
        message = cls()


def received(stream: Iterable[bytes], peer: str) -> ShardArrays:
    """Reads a Snapshot's answer from `peer` into fresh arrays. Raises: UnavailableError if it ends
    early."""
    state: ShardState | None = None
    layout: Layout = plan(())
    flat: dict[tuple[int, int], Array] = {}
    slots: tuple[str, ...] = ()
    for data in stream:
        frame = framing.decode(pb.SnapshotResponse, data)
        if state is None:
            state = convert.state_from_proto(frame.message.state)
            layout = convert.layout_from_proto(frame.message.layout)
            slots = state.job.optimizer.slots
            flat = _empty(layout, len(slots))
        for piece, values in codec.pieces(frame, layout, len(slots)):
            out = flat[piece.group, piece.slot]
            out[piece.offset : piece.offset + piece.count] = values
        if frame.message.last:
            return ShardArrays(state, _by_name(layout, flat, slots))
    raise UnavailableError(f"{peer} ended its snapshot early")


def check_values(variables: Sequence[Variable], arrays: Mapping[str, Array]) -> None:
    """Refuses before the first shard is called what some shard would refuse, so that none is given
    half a model. Raises: InvalidArgumentError that names the variable."""
    layout = plan(variables, Limits(len(variables), total_bytes=1 << 62))
    for v in layout.variables:
        whole = Range(v.group, v.offset, v.size)
        check_finite(layout, whole, arrays[v.name].reshape(-1), "variable")


def _empty(layout: Layout, slots: int) -> dict[tuple[int, int], Array]:
    return {
        (g, s): np.empty(group.size, DTYPES[group.dtype])
        for g, group in enumerate(layout.groups)
        for s in range(1 + slots)
    }


def _by_name(
    layout: Layout, flat: Mapping[tuple[int, int], Array], slots: Sequence[str]
) -> dict[str, tuple[Array, Mapping[str, Array]]]:
    found: dict[str, tuple[Array, Mapping[str, Array]]] = {}
    for v in layout.variables:
        own = slice(v.offset, v.offset + v.size)
        found[v.name] = (
            flat[v.group, 0][own].reshape(v.shape),
            {name: flat[v.group, k][own].reshape(v.shape) for k, name in enumerate(slots, start=1)},
        )
    return found
