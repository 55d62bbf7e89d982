"""Shards <-> checkpoint, both directions: what several snapshots are together, and how a checkpoint
is dealt out again, to any number of shards. No gRPC here, no files.

A checkpoint stores by variable, so the number of shards and workers is free. What belongs to one
shard alone (its version, its cut-off steps) comes back only where the same shard does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from chief.checkpoint import Checkpoint, Saved
from chief.manifest import Json
from paramserver.cut_off import CutOffStep
from paramserver.errors import CheckpointError
from paramserver.job import Job
from paramserver.layout import Array, Variable
from paramserver.membership import Member
from paramserver.placement import place
from paramserver.state import Remembered, ShardState
from paramserver.transfer import ShardArrays

T = TypeVar("T")


def initial(arrays: Mapping[str, Array], job: Job, shards: int) -> Checkpoint:
    """The state at step 0, before anything is on a shard. Refers to the arrays."""
    variables = {name: Saved(array) for name, array in arrays.items()}
    checkpoint = Checkpoint(0, 0, job_to_json(job), variables)
    placed = place(variables_of(checkpoint), shards)
    return replace(checkpoint, shards=[_shard_to_json(i, own) for i, own in enumerate(placed)])


def merge(shards: Sequence[ShardArrays]) -> Checkpoint:
    """All shards' snapshots of one cut, ps:0's first. Refers to their arrays.

    Raises: CheckpointError if they are not the shards of one session."""
    states = [shard.state for shard in shards]
    head = states[0]
    found = [(state.session, state.index, state.count) for state in states]
    if found != [(head.session, i, len(shards)) for i in range(len(shards))]:
        raise CheckpointError("cannot save: the snapshots are not those of one session's shards")
    variables = {
        v.name: Saved(*shard.arrays[v.name], updates=v.updates)
        for shard in shards
        for v in shard.state.variables
    }
    return Checkpoint(
        head.global_step,
        head.rounds,
        job_to_json(head.job),
        variables,
        [_shard_to_json(s.index, s.variables, s.version, s.remembered, s.cut_off) for s in states],
        [asdict(member) for member in head.members],
    )


def divide(
    checkpoint: Checkpoint, job: Job, shards: int, session: int, await_members: bool
) -> list[ShardArrays]:
    """What each of `shards` shards is to hold. Refers to the checkpoint's arrays.

    The slots come along if `job` has the optimizer that filled them, whatever its settings; for
    another optimizer they start afresh (`keeps_slots`). `await_members`: the workers at the cut are
    still there, and a synchronous job waits for them. Raises: CheckpointError for a checkpoint that
    this program did not write."""
    kept = keeps_slots(checkpoint, job)
    placed = place(variables_of(checkpoint, kept), shards)
    before = _shards_before(checkpoint, placed)
    members = [_read(Member, item) for item in checkpoint.members] if await_members else []
    divided = []
    for i, own in enumerate(placed):
        state = ShardState(
            session,
            i,
            shards,
            job,
            tuple(own),
            version=checkpoint.global_step,
            global_step=checkpoint.global_step,
            rounds=checkpoint.rounds,
            remembered=_remembered(checkpoint, before[i] if before else None),
            members=tuple(members),
        )
        if before:
            state = replace(
                state,
                version=_get(before[i], "version", int),
                cut_off=tuple(_read(CutOffStep, c) for c in _get(before[i], "cut_off", list)),
            )
        saved = {v.name: checkpoint.variables[v.name] for v in own}
        arrays = {name: (s.value, s.slots if kept else {}) for name, s in saved.items()}
        divided.append(ShardArrays(state, arrays))
    return divided


def variables_of(checkpoint: Checkpoint, with_updates: bool = False) -> list[Variable]:
    """The variables of a checkpoint, not placed yet."""
    return [
        Variable(name, s.value.dtype.name, s.value.shape, updates=s.updates * with_updates)
        for name, s in checkpoint.variables.items()
    ]


def keeps_slots(checkpoint: Checkpoint, job: Job) -> bool:
    """Whether the slots in a checkpoint are those of the job's optimizer: all of them, or none."""
    same = optimizer_of(checkpoint) == job.optimizer.kind
    wanted = set(job.optimizer.slots)
    return same and all(s.slots.keys() == wanted for s in checkpoint.variables.values())


def optimizer_of(checkpoint: Checkpoint) -> str:
    """The kind of optimizer a checkpoint was saved under. Raises: CheckpointError."""
    kind: str = _get(_get(checkpoint.job, "optimizer", dict), "kind", str)
    return kind


def job_to_json(job: Job) -> Json:
    """A job's settings as a checkpoint states them."""
    return {
        "consistency": {"name": job.consistency.name, **asdict(job.consistency)},
        "optimizer": {"kind": job.optimizer.kind, "hyper": job.optimizer.hyper()},
        "last_step": job.last_step,
        "model": job.model.hex(),
        "settings": dict(job.settings),
    }


def _shard_to_json(
    index: int,
    variables: Iterable[Variable],
    version: int = 0,
    remembered: Iterable[Remembered] = (),
    cut_off: Iterable[CutOffStep] = (),
) -> Json:
    return {
        "index": index,
        "version": version,
        "variables": sorted(v.name for v in variables),
        "remembered": [asdict(line) for line in remembered],
        "cut_off": [asdict(step) for step in cut_off],
    }


def _shards_before(checkpoint: Checkpoint, placed: Sequence[Sequence[Variable]]) -> list[Json]:
    """The shards at the cut, if each held what is placed on it now; else nothing."""
    before = list(checkpoint.shards)
    same = [sorted(v.name for v in own) for own in placed]
    return before if [_get(item, "variables", list) for item in before] == same else []


def _remembered(checkpoint: Checkpoint, before: Json | None) -> tuple[Remembered, ...]:
    """The repeat table: the shard's own, or (all are alike but for cut-off steps) that of ps:0."""
    source: Json = before or next(iter(checkpoint.shards), {"remembered": []})
    return tuple(_read(Remembered, item) for item in _get(source, "remembered", list))


def _read(kind: Callable[..., T], item: Any) -> T:
    try:
        return kind(**item)
    except TypeError as error:
        raise _foreign(error) from error


def _get(item: Any, key: str, kind: type[Any]) -> Any:
    value = item.get(key) if isinstance(item, dict) else None
    if not isinstance(value, kind):
        raise _foreign(f"{key!r} is {value!r:.80}")
    return value


def _foreign(why: object) -> CheckpointError:
    return CheckpointError(f"the checkpoint is not one that this program writes: {why}")
