"""What a pull brings: the parameters by name, read-only, all of a shard of one version."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paramserver.allocation import Pool
from paramserver.errors import InvalidArgumentError, NotFoundError
from paramserver.layout import DTYPES, Array, Layout, Range, some


class Received:
    """The arrays of one shard's answer while it arrives. Fed by one thread.

    Costs one copy: from the message into one array for each requested range."""

    def __init__(self, layout: Layout, names: Sequence[str], pool: Pool) -> None:
        self.layout = layout
        self._missing = 0
        self._parts: list[Array] = []
        # Where each part begins: (group, offset), ascending.
        self._starts: list[tuple[int, int]] = []
        for piece in layout.ranges(names):
            array = pool.take(piece.count, DTYPES[layout.groups[piece.group].dtype])
            self._parts.append(array)
            self._starts.append((piece.group, piece.offset))
            self._missing += piece.count

    def add(self, piece: Range, values: Array) -> None:
        """Takes a piece. Raises: InvalidArgumentError for one that was not asked for."""
        part = self._part(piece.group, piece.offset, piece.count)
        if part is None:
            raise InvalidArgumentError(f"the server sent {piece}, which was not asked for")
        np.copyto(part, values)
        self._missing -= piece.count

    def _part(self, group: int, offset: int, count: int) -> Array | None:
        """Where `count` elements from `offset` of a group go; None: they were not asked for."""
        i = bisect_right(self._starts, (group, offset)) - 1
        if i < 0 or self._starts[i][0] != group:
            return None
        start = offset - self._starts[i][1]
        return (
            self._parts[i][start : start + count] if start + count <= len(self._parts[i]) else None
        )

    def finish(self) -> None:
        """Checks that all has come, once the last message has. Raises: InvalidArgumentError."""
        if self._missing:
            raise InvalidArgumentError(f"the server left out {self._missing} elements")
        for array in self._parts:
            array.flags.writeable = False

    def array(self, name: str) -> Array | None:
        """The variable in its shape, read-only; None if it was not asked for."""
        variable = self.layout[name]
        if not variable.size:
            empty = np.empty(variable.shape, DTYPES[variable.dtype])
            empty.flags.writeable = False
            return empty
        part = self._part(variable.group, variable.offset, variable.size)
        return None if part is None else part.reshape(variable.shape)


@dataclass(frozen=True)
class Ticket:
    """What a gradient computed from a pull needs to be pushed: the step it is for, and its base."""

    session: int
    incarnation: int
    clock: int
    step: int
    versions: tuple[int, ...]


class Params(Mapping[str, Array]):
    """The parameters of one pull: name -> read-only array. Yours to keep; nothing changes them.

    `version` is the global_step they are of, `versions` each shard's own count, `complete` whether
    the job is over and these are final. To change an array, take a `copy()`: writing into one
    raises ValueError. Iterates over the names that were asked for, sorted. Thread-safe."""

    def __init__(
        self,
        received: Sequence[Received | None],
        asked: tuple[str, ...],
        session: int,
        version: int,
        versions: tuple[int, ...],
        complete: bool,
        ticket: Ticket | None,
    ) -> None:
        self.received = received
        self.asked = asked
        self.session = session
        self.version = version
        self.versions = versions
        self.complete = complete
        self.ticket = ticket
        self._views: dict[str, Array] = {}

    @cached_property
    def _names(self) -> list[str]:
        everything = (v.name for r in self.received if r for v in r.layout.variables)
        return sorted(self.asked or everything)

    @property
    def clock(self) -> int:
        """Steps the worker had completed, counted from where it joined: which batch is next. 0 for
        a pull that took no part."""
        return self.ticket.clock if self.ticket else 0

    def __getitem__(self, name: str) -> Array:
        view = self._views.get(name)
        if view is not None:
            return view
        for received in self.received:
            if received and name in received.layout:
                array = received.array(name)
                if array is not None:
                    self._views[name] = array
                    return array
        raise NotFoundError(f"{name!r} was not pulled; there are {some(self._names)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def copy(self) -> dict[str, Array]:
        """Writable copies by name, independent of everything."""
        return {name: self[name].copy() for name in self}

    def __repr__(self) -> str:
        return f"Params({some(self._names)}; version={self.version}, complete={self.complete})"
