"""Shards <-> checkpoint: everything comes back, on any number of shards."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import paramserver as ps
from chief import assemble
from chief.checkpoint import Checkpoint
from paramserver.cut_off import CutOffStep
from paramserver.errors import CheckpointError
from paramserver.job import Job
from paramserver.layout import Variable
from paramserver.membership import Member
from paramserver.placement import place
from paramserver.state import Remembered, ShardState
from paramserver.transfer import ShardArrays

JOB = Job(ps.Sync(2), ps.optimizers.Adam(0.1), 50, b"\1\2", {"model": "linear"})
VARIABLES = [
    Variable("a", "float32", (3,)),
    Variable("b", "float64", ()),
    Variable("c", "float32", (0, 2)),
]
MEMBERS = (Member("worker:0", 1 << 63, 4), Member("worker:1", 6, 4))
REMEMBERED = (Remembered("worker:0", 1 << 63, 3, 4),)


def shards(count: int = 2) -> list[ShardArrays]:
    """A job in training, cut; shard 1 has seen one step more, which a death cut off."""
    found = []
    for i, own in enumerate(place(VARIABLES, count)):
        updates = 9 + i
        variables = tuple(replace(v, updates=updates) for v in own)
        state = ShardState(
            5,
            i,
            count,
            JOB,
            variables,
            9 + i,
            9,
            7,
            REMEMBERED,
            MEMBERS,
            (CutOffStep("worker:1", 6, 3, 1),) * i,
        )
        found.append(ShardArrays(state, {v.name: arrays(v) for v in own}))
    return found


def arrays(v: Variable) -> tuple[Any, dict[str, Any]]:
    base = np.arange(v.size, dtype=v.dtype).reshape(v.shape)
    return base, {"m": base + 1, "v": base + 2}


def content(found: list[ShardArrays]) -> dict[str, Any]:
    return {
        name: (value.tolist(), {slot: array.tolist() for slot, array in slots.items()})
        for shard in found
        for name, (value, slots) in shard.arrays.items()
    }


def as_loaded(checkpoint: Checkpoint) -> Checkpoint:
    """What comes back from the disk: JSON, lists for tuples."""
    return replace(
        checkpoint,
        job=json.loads(json.dumps(checkpoint.job)),
        shards=json.loads(json.dumps(checkpoint.shards)),
        members=json.loads(json.dumps(checkpoint.members)),
    )


def test_on_the_same_shards_everything_comes_back() -> None:
    checkpoint = as_loaded(assemble.merge(shards()))
    assert (checkpoint.global_step, checkpoint.rounds) == (9, 7)
    assert checkpoint.job == {
        "consistency": {"name": "sync", "workers": 2, "min_workers": 0},
        "optimizer": {"kind": "adam", "hyper": JOB.optimizer.hyper()},
        "last_step": 50,
        "model": "0102",
        "settings": {"model": "linear"},
    }
    back = assemble.divide(checkpoint, JOB, 2, 8, await_members=True)
    assert [s.state for s in back] == [replace(s.state, session=8) for s in shards()]
    assert content(back) == content(shards())
    assert [s.arrays["a"][0].dtype for s in back if "a" in s.arrays] == [np.float32]


@pytest.mark.parametrize("count", [1, 3, 5])
def test_on_other_shards_values_slots_and_steps_come_back(count: int) -> None:
    checkpoint = as_loaded(assemble.merge(shards()))
    back = assemble.divide(checkpoint, JOB, count, 8, await_members=False)
    assert content(back) == content(shards())
    for i, shard in enumerate(back):
        state = shard.state
        assert (state.index, state.count, state.session) == (i, count, 8)
        assert (state.version, state.global_step, state.rounds) == (9, 9, 7)
        assert (state.members, state.cut_off, state.remembered) == ((), (), REMEMBERED)
        assert set(shard.arrays) == {v.name for v in state.variables}
    updates = {v.name: v.updates for shard in back for v in shard.state.variables}
    assert updates == {v.name: v.updates for s in shards() for v in s.state.variables}


def test_another_optimizer_gets_no_slots_and_another_rate_all() -> None:
    checkpoint = as_loaded(assemble.merge(shards()))
    for rule, kept in ((ps.optimizers.SGD(0.1), False), (ps.optimizers.Adam(0.2), True)):
        job = replace(JOB, optimizer=rule)
        assert assemble.keeps_slots(checkpoint, job) is kept
        for shard in assemble.divide(checkpoint, job, 2, 8, await_members=False):
            assert shard.state.job.optimizer == rule
            for v in shard.state.variables:
                assert set(shard.arrays[v.name][1]) == ({"m", "v"} if kept else set())
                assert v.updates == (9 + shard.state.index if kept else 0)
    assert assemble.optimizer_of(checkpoint) == "adam"


def test_the_beginning_has_neither_slots_nor_versions() -> None:
    values = {v.name: arrays(v)[0] for v in VARIABLES}
    checkpoint = as_loaded(assemble.initial(values, JOB, 2))
    assert checkpoint.global_step == checkpoint.rounds == 0
    for shard in assemble.divide(checkpoint, JOB, 2, 8, await_members=True):
        assert (shard.state.version, shard.state.members, shard.state.cut_off) == (0, (), ())
        assert all(not slots for _, slots in shard.arrays.values())
        assert all(v.updates == 0 for v in shard.state.variables)


def test_snapshots_of_different_sessions_are_not_mixed() -> None:
    one, two = shards()
    other = replace(two, state=replace(two.state, session=6))
    for wrong in ([one, other], [two, one], [one]):
        with pytest.raises(CheckpointError, match="one session"):
            assemble.merge(wrong)


@pytest.mark.parametrize(
    "damage",
    [
        {"job": {}},
        {"job": {"optimizer": {"kind": 3}}},
        {"shards": [{"index": 0}]},
        {"shards": [{"variables": [], "remembered": [{"who": 1}]}]},
        {"members": [{"who": 1}]},
    ],
)
def test_a_checkpoint_of_something_else_is_refused_in_one_line(damage: dict[str, Any]) -> None:
    checkpoint = replace(assemble.merge(shards()), **damage)
    with pytest.raises(CheckpointError, match="not one that this program writes"):
        assemble.divide(checkpoint, JOB, 2, 8, await_members=True)
