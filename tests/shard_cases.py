"""One shard for tests: made as Initialize and Restore make it, pushed to as a worker does.

No gRPC, no threads, no clock: what a test does happens in the order in which it says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np

from paramserver.job import Job
from paramserver.layout import DTYPES, Array, Layout, Range, Variable
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard, Snapshot, View
from paramserver.state import Loading, ShardState
from paramserver.update import Push

Key = tuple[str, int]
Pieces = Iterable[tuple[Range, Array]]

LEASE = 10.0
SESSION = 77

#: What most tests hold: two groups, so that an update is more than one swap.
VARIABLES = (
    Variable("w", "float32", (2, 3)),
    Variable("b", "float32", (4,)),
    Variable("scale", "float64", ()),
)


def start(
    job: Job,
    variables: Sequence[Variable] = VARIABLES,
    *,
    index: int = 0,
    count: int = 1,
    now: float = 0.0,
    lease_s: float = LEASE,
) -> Shard:
    """A shard as Initialize makes it, all zeros."""
    state = ShardState(SESSION, index, count, job, tuple(variables))
    return load(state, {}, now=now, lease_s=lease_s)


def load(
    state: ShardState,
    arrays: Mapping[tuple[str, int], Array],
    *,
    now: float = 0.0,
    lease_s: float = LEASE,
) -> Shard:
    """A shard as Restore makes it, from the flat values (slot 0) and slots of each variable.

    Values that are not given are zeros."""
    loading = Loading(state)
    for variable in loading.layout.variables:
        for slot in range(1 + len(state.job.optimizer.slots)):
            array = arrays.get((variable.name, slot))
            if array is None and not slot:
                array = np.zeros(variable.size, DTYPES[variable.dtype])
            if array is not None:
                loading.feed(Range(variable.group, variable.offset, variable.size, slot), array)
    return Shard(state, *loading.finish(), lease_s, now)


def arrays_of(snapshot: Snapshot) -> dict[tuple[str, int], Array]:
    """Copies of all that a snapshot holds: flat values (slot 0) and slots, by variable."""
    return {
        (v.name, slot): array[v.offset : v.offset + v.size].copy()
        for v in snapshot.layout.variables
        for (group, slot), array in snapshot.pin.arrays.items()
        if group == v.group
    }


def values(shard: Shard) -> dict[str, Array]:
    """The parameters now, by name, flat."""
    view = shard.pull(0, ("", 0), None)
    assert isinstance(view, View) and view.pin
    found = {
        v.name: view.pin.arrays[v.group, 0][v.offset : v.offset + v.size].copy()
        for v in shard.layout.variables
    }
    shard.release(view.pin)
    return found


def gradient(
    layout: Layout, value: float = 1.0, names: Sequence[str] = ()
) -> list[tuple[Range, Array]]:
    """A push's pieces: every element of `names` (all, if empty) is `value`."""
    return [
        (piece, np.full(piece.count, value, DTYPES[layout.groups[piece.group].dtype]))
        for piece in layout.ranges(names)
    ]


def feed(push: Push, pieces: Pieces | None = None) -> Push:
    """Brings a whole gradient (ones, unless given)."""
    for piece, array in gradient(push.layout) if pieces is None else pieces:
        push.feed(piece, array)
    push.finish()
    return push


def drain(shard: Shard) -> int:
    """Applies whatever can be applied, as a server does; the number of versions made."""
    made = 0
    while update := shard.take_update():
        update.run()
        shard.commit(update)
        made += 1
    return made


def restored(snapshot: Snapshot, **changes: Any) -> Shard:
    """The shard that a snapshot starts again, in a new session."""
    state = replace(snapshot.state, **{"session": SESSION + 1, **changes})
    return load(state, arrays_of(snapshot))


def pulled(shard: Shard, member: Key) -> View:
    """What a worker's waiting pull answers, which must not wait; read already."""
    view = shard.pull(shard.state.session, member, shard.clocks[member[0]])
    assert isinstance(view, View) and view.pin, view
    shard.release(view.pin)
    return view


def header(shard: Shard, member: Key, sequence: int = 1, **changes: Any) -> PushHeader:
    """What a worker would say of its next push, which is computed from the current version."""
    said = PushHeader(
        shard.state.session,
        *member,
        sequence,
        clock=shard.clocks.get(member[0], 0),
        step=0 if shard.leads else 1,
        pulled_version=shard.version,
    )
    return replace(said, **changes)


def begin(shard: Shard, member: Key, sequence: int = 1, **changes: Any) -> Push:
    """A push that the shard is ready to take."""
    push = shard.begin(header(shard, member, sequence, **changes), 0.0)
    assert isinstance(push, Push), push
    return push


def push(
    shard: Shard, member: Key, sequence: int = 1, pieces: Pieces | None = None, **changes: Any
) -> PushResult:
    """A whole push; without rounds it is applied."""
    begun = shard.begin(header(shard, member, sequence, **changes), 0.0)
    if isinstance(begun, PushResult):
        return begun
    assert isinstance(begun, Push), begun
    result = shard.submit(feed(begun, pieces))
    drain(shard)
    result = result or shard.result_of(begun)
    assert result
    return result


#: Statistics, and memory kept warm: no part of what a shard is.
_ASIDE = {"counts", "_spares", "_alive", "_scratch"}


def frozen(thing: Any) -> Any:
    """Everything that there is to an object, all the way down, as a value to compare."""
    if thing is None or isinstance(thing, str | bytes | int | float):
        return thing
    if isinstance(thing, np.ndarray):
        return thing.dtype.str, thing.shape, thing.tobytes()
    if isinstance(thing, Mapping):
        return [(frozen(k), frozen(v)) for k, v in thing.items()]
    if isinstance(thing, list | tuple | deque):
        return [frozen(each) for each in thing]
    if isinstance(thing, set | frozenset):
        return set(thing)
    if is_dataclass(thing) and type(thing).__hash__ is not None:  # immutable
        return thing
    names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
    return [type(thing), *((n, frozen(getattr(thing, n))) for n in names if n not in _ASIDE)]
