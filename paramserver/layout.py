"""How the variables of a shard lie in memory, and what a piece of them is called. No gRPC here.

Variables of one dtype, one optimizer and one update count lie back to back in one flat array, a
*group*: 10,000 small variables then cost what one large one costs. A `Range` names a piece of a
group. The layout is fixed when a shard is initialised or restored, and handed to whoever joins.
"""

from __future__ import annotations

import hashlib
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paramserver.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError

Array = npt.NDArray[np.floating]

#: The element types a variable may have, by name.
DTYPES: Mapping[str, np.dtype[np.floating]] = {
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
}

_NAME = re.compile(r"[A-Za-z0-9_./:\-]{1,256}")
_MAX_RANK = 32

#: Elements looked at together for NaN and infinity.
_FINITE_BLOCK = 65536


@dataclass(frozen=True)
class Limits:
    """What a shard refuses to hold, checked before anything is allocated."""

    variables: int = 1_000_000
    total_bytes: int = 1 << 40


@dataclass(frozen=True)
class Variable:
    """One named dense array: `shape` of `dtype`, at element `offset` of group `group`.

    `updates` is the number of updates its slots have seen (Adam's t) when it was laid out."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    group: int = 0
    offset: int = 0
    updates: int = 0

    @property
    def size(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.size * DTYPES[self.dtype].itemsize

    def with_updates(self, updates: int) -> Variable:
        """The same, later: after `updates` updates."""
        return self if updates == self.updates else replace(self, updates=updates)


@dataclass(frozen=True)
class Range:
    """`count` elements from `offset` of a group: its values (slot 0) or its slot-th slot."""

    group: int
    offset: int
    count: int
    slot: int = 0


@dataclass(frozen=True)
class Group:
    """One flat array of `size` elements: what lies in it shares dtype and update count."""

    dtype: str
    size: int
    updates: int = 0


@dataclass(frozen=True)
class Layout:
    """Which variable lies where. Build one with `plan`; values are immutable and safe to share."""

    variables: tuple[Variable, ...]
    groups: tuple[Group, ...]
    fingerprint: bytes
    _by_name: Mapping[str, Variable] = field(repr=False, compare=False, default_factory=dict)
    _starts: tuple[tuple[int, ...], ...] = field(repr=False, compare=False, default=())
    #: The variables of each group as they lie in it; those without elements lie nowhere.
    order: tuple[tuple[Variable, ...], ...] = field(repr=False, compare=False, default=())

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all values, which is what a whole gradient has."""
        return sum(group.size * DTYPES[group.dtype].itemsize for group in self.groups)

    @cached_property
    def empty(self) -> tuple[Variable, ...]:
        """The variables without elements."""
        return tuple(v for v in self.variables if not v.size)

    def __getitem__(self, name: str) -> Variable:
        """The variable called `name`. Raises: NotFoundError."""
        try:
            return self._by_name[name]
        except KeyError:
            raise NotFoundError(
                f"no variable {name!r} here; there are {some(self._by_name)}"
            ) from None

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def at(self, group: int, element: int) -> Variable:
        """The (non-empty) variable that holds `element` of `group`."""
        return self.order[group][bisect_right(self._starts[group], element) - 1]

    def check(self, piece: Range, slots: int = 0) -> None:
        """Refuses a range that is not inside this layout. Raises: InvalidArgumentError."""
        if not 0 <= piece.group < len(self.groups):
            raise InvalidArgumentError(
                f"range names group {piece.group}; the shard has {len(self.groups)}"
            )
        if not 0 <= piece.slot <= slots:
            raise InvalidArgumentError(f"range names slot {piece.slot}; the group has {slots}")
        size = self.groups[piece.group].size
        if piece.offset < 0 or piece.count < 0 or piece.offset + piece.count > size:
            raise InvalidArgumentError(
                f"range [{piece.offset}, {piece.offset + piece.count}) is outside group "
                f"{piece.group} of {size} elements{self.near(piece)}"
            )

    def near(self, piece: Range) -> str:
        """Where a range begins, or the nearest to it, for a message: ", at variable 'w'"."""
        size = self.groups[piece.group].size
        if not size:
            return ""
        return f", at variable {self.at(piece.group, min(max(piece.offset, 0), size - 1)).name!r}"

    def ranges(self, names: Sequence[str] = ()) -> list[Range]:
        """The ranges that hold `names` (all, if empty), neighbours merged, in layout order.

        Raises: NotFoundError."""
        if not names:
            return [Range(i, 0, group.size) for i, group in enumerate(self.groups) if group.size]
        chosen = sorted({self[name] for name in names}, key=lambda v: (v.group, v.offset))
        merged: list[Range] = []
        for variable in chosen:
            if not variable.size:
                continue
            last = merged[-1] if merged else None
            if last and (last.group, last.offset + last.count) == (variable.group, variable.offset):
                merged[-1] = replace(last, count=last.count + variable.size)
            else:
                merged.append(Range(variable.group, variable.offset, variable.size))
        return merged


def plan(variables: Iterable[Variable], limits: Limits | None = None) -> Layout:
    """Lays variables out: grouped by dtype and update count, in the order given within a group.

    Pure: the same variables in the same order give the same layout everywhere. Nothing is
    allocated.

    Raises: InvalidArgumentError for a bad name, shape or dtype or a name given twice;
    ResourceExhaustedError beyond `limits`."""
    limits = limits or Limits()
    keys: dict[tuple[str, int], int] = {}
    sizes: list[int] = []
    placed: dict[str, Variable] = {}
    total = 0
    for variable in variables:
        check_variable(variable)
        if variable.name in placed:
            raise InvalidArgumentError(f"variable {variable.name!r} is given twice")
        total += variable.nbytes
        if total > limits.total_bytes:
            raise ResourceExhaustedError(
                f"variable {variable.name!r} brings the shard to {total} bytes; the limit is "
                f"{limits.total_bytes} (raise it with --max-bytes)"
            )
        if len(placed) == limits.variables:
            raise ResourceExhaustedError(f"more than {limits.variables} variables")
        group = keys.setdefault((variable.dtype, variable.updates), len(keys))
        if group == len(sizes):
            sizes.append(0)
        placed[variable.name] = replace(variable, group=group, offset=sizes[group])
        sizes[group] += variable.size
    groups = tuple(
        Group(dtype, size, updates) for (dtype, updates), size in zip(keys, sizes, strict=True)
    )
    return build(tuple(placed.values()), groups)


def build(variables: tuple[Variable, ...], groups: tuple[Group, ...]) -> Layout:
    """A layout from places that are already decided (what a shard told its client)."""
    order: list[list[Variable]] = [[] for _ in groups]
    for variable in variables:
        if variable.size:
            order[variable.group].append(variable)
    for members in order:
        members.sort(key=lambda v: v.offset)
    return Layout(
        variables,
        groups,
        _fingerprint(variables),
        {v.name: v for v in variables},
        tuple(tuple(v.offset for v in members) for members in order),
        tuple(tuple(members) for members in order),
    )


def model_fingerprint(variables: Iterable[Variable]) -> bytes:
    """SHA-256 over names, shapes and dtypes, whatever the order and the sharding: which model it
    is."""
    digest = hashlib.sha256()
    for v in sorted(variables, key=lambda v: v.name):
        digest.update(f"{v.name}\0{v.dtype}\0{v.shape}\n".encode())
    return digest.digest()


def compare_models(
    there: Iterable[Variable], here: Iterable[Variable], where: str = "in the job"
) -> str:
    """How the model that is there (`where`) differs from another; empty if it does not."""
    theirs = {v.name: (v.dtype, v.shape) for v in there}
    ours = {v.name: (v.dtype, v.shape) for v in here}
    for name in sorted(theirs.keys() | ours.keys()):
        one, other = theirs.get(name), ours.get(name)
        if one is None or other is None:
            return f"{name!r} is only {where if one else 'in the new model'}"
        if one != other:
            return f"{name!r} is {one[0]} {one[1]} {where}, not {other[0]} {other[1]}"
    return ""


def _fingerprint(variables: Iterable[Variable]) -> bytes:
    digest = hashlib.sha256()
    for v in variables:
        digest.update(f"{v.name}\0{v.dtype}\0{v.shape}\0{v.group}\0{v.offset}\n".encode())
    return digest.digest()


def check_variable(variable: Variable) -> None:
    """Refuses a variable that no shard can hold. Raises: InvalidArgumentError."""
    if not _NAME.fullmatch(variable.name):
        raise InvalidArgumentError(
            f"variable name {variable.name[:80]!r} must be 1 to 256 letters, digits and _ . / : -"
        )
    if variable.dtype not in DTYPES:
        raise InvalidArgumentError(
            f"variable {variable.name!r} has dtype {variable.dtype}; choose one of {some(DTYPES)}"
        )
    if len(variable.shape) > _MAX_RANK or any(extent < 0 for extent in variable.shape):
        shown = str(variable.shape[:_MAX_RANK])[:200]
        raise InvalidArgumentError(
            f"variable {variable.name!r} has shape {shown}: at most {_MAX_RANK} axes, none negative"
        )
    if variable.size >= 1 << 48:
        raise InvalidArgumentError(
            f"variable {variable.name!r} declares {variable.size} elements, beyond any shard"
        )


def check_finite(layout: Layout, piece: Range, values: Array, what: str = "gradient") -> None:
    """Refuses NaN and infinity, naming the variable. Raises: InvalidArgumentError.

    One read pass in blocks that stay in cache, and nothing more if all is well. Not by a sum: BLAS
    copies what is not aligned, as a view of a message may well be."""
    for start in range(0, values.size, _FINITE_BLOCK):
        finite = np.isfinite(values[start : start + _FINITE_BLOCK])
        if finite.all():
            continue
        bad = start + int(np.argmin(finite))
        variable = layout.at(piece.group, piece.offset + bad)
        at = piece.offset + bad - variable.offset
        raise InvalidArgumentError(
            f"{what} {variable.name!r} is {values[bad]} at element {at}; "
            "NaN and infinity are refused, nothing was applied"
        )


class Coverage:
    """Which elements of each group a push has brought so far: refuses overlaps, finds gaps.

    Pieces mostly arrive in order, so each group's intervals stay a short sorted list."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._intervals: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def add(self, piece: Range) -> None:
        """Notes a piece. Raises: InvalidArgumentError if part of it was brought before."""
        if not piece.count:
            return
        start, stop = piece.offset, piece.offset + piece.count
        intervals = self._intervals.setdefault((piece.group, piece.slot), [])
        i = bisect_right(intervals, (start, start))
        before = intervals[i - 1] if i else None
        after = intervals[i] if i < len(intervals) else None
        if (before and before[1] > start) or (after and after[0] < stop):
            clash = start if before and before[1] > start else intervals[i][0]
            raise InvalidArgumentError(
                f"two pieces overlap at variable {self._layout.at(piece.group, clash).name!r}"
            )
        if before and before[1] == start:
            i, start = i - 1, before[0]
            del intervals[i]
        if after and after[0] == stop:
            stop = after[1]
            del intervals[i]
        intervals.insert(i, (start, stop))

    def covered(self, group: int, slot: int = 0) -> Sequence[tuple[int, int]]:
        """The [start, stop) intervals brought so far, sorted, neighbours merged."""
        return self._intervals.get((group, slot), ())

    def gaps(self, group: int, slot: int = 0) -> Iterator[tuple[int, int]]:
        """The [start, stop) intervals of a group that are missing."""
        at = 0
        for start, stop in self.covered(group, slot):
            if start > at:
                yield at, start
            at = stop
        if at < self._layout.groups[group].size:
            yield at, self._layout.groups[group].size

    def check_whole_variables(self) -> None:
        """Refuses a push that brought part of a variable only. Raises: InvalidArgumentError."""
        for (group, _), intervals in self._intervals.items():
            for start, stop in intervals:
                first = self._layout.at(group, start)
                last = self._layout.at(group, stop - 1)
                for variable, ok in (
                    (first, first.offset == start),
                    (last, last.offset + last.size == stop),
                ):
                    if not ok:
                        raise InvalidArgumentError(
                            f"variable {variable.name!r} arrived in part only; "
                            "send all of it or nothing"
                        )

    def check_complete(self, slots: Sequence[int]) -> None:
        """Refuses a state with holes: `slots[g]` slots beside the values of group g.

        Raises: InvalidArgumentError."""
        for group in range(len(self._layout.groups)):
            for slot in range(slots[group] + 1):
                for start, _ in self.gaps(group, slot):
                    variable = self._layout.at(group, start)
                    what = "its values" if slot == 0 else f"its slot {slot}"
                    raise InvalidArgumentError(
                        f"variable {variable.name!r} is incomplete: {what} did not arrive in full"
                    )


def some(names: Iterable[str], most: int = 8) -> str:
    """A few names for a message: "a, b, c and 12 more"."""
    listed = list(names)
    shown = ", ".join(repr(n) for n in listed[:most]) or "none"
    return shown + (f" and {len(listed) - most} more" if len(listed) > most else "")
