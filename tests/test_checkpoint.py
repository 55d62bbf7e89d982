"""The checkpoint folder: what is saved comes back bit for bit, what is damaged never does, and
whatever dies whenever, the newest complete checkpoint can be restored."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from chief.checkpoint import (
    Checkpoint,
    Saved,
    Skipped,
    find,
    list_checkpoints,
    load,
    prune,
    save,
    verify,
)
from chief.files import REAL, Files, Lock
from chief.manifest import Damaged
from chief.parts import split
from paramserver.errors import CheckpointError, ConfigError

PART = "part-00000.safetensors"
MANIFEST = "manifest.json"


def tiny(step: int = 3, w: float = 1.0) -> Checkpoint:
    """Two variables, one with a slot; `w` makes the content differ."""
    return Checkpoint(
        global_step=step,
        rounds=0,
        job={"optimizer": {"kind": "momentum", "hyper": {"learning_rate": 0.1}}, "last_step": 200},
        variables={
            "w": Saved(np.array([[w, -2]], np.float32), {"m": np.array([[0.5, 0]], np.float32)}, 3),
            "b": Saved(np.array(0.25)),
        },
        shards=[{"index": 0, "version": step, "variables": ["w", "b"], "cut_off": []}],
        members=[{"worker": "worker:0", "incarnation": (1 << 64) - 1, "clock": step}],
    )


def bits(array: np.ndarray) -> tuple[str, tuple[int, ...], bytes]:
    """What must be equal for two arrays to be the same, NaN or not, in either byte order."""
    return array.dtype.name, array.shape, array.astype(array.dtype.newbyteorder("<")).tobytes()


def content(checkpoint: Checkpoint | None) -> object:
    """All of a checkpoint in a form that compares."""
    assert checkpoint is not None
    variables = {
        name: (bits(s.value), {slot: bits(a) for slot, a in s.slots.items()}, s.updates)
        for name, s in checkpoint.variables.items()
    }
    head = (checkpoint.global_step, checkpoint.rounds, checkpoint.job)
    return head, variables, list(checkpoint.shards), list(checkpoint.members)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def found(folder: Path) -> tuple[object, list[Skipped]]:
    checkpoint, skipped = find(folder)
    return content(checkpoint), skipped


# --- what is saved comes back


VARIABLES = {
    "float32": Saved(np.arange(6, dtype=np.float32).reshape(2, 3), {"m": np.ones((2, 3), "f4")}, 7),
    "float64": Saved(np.array([np.pi, -0.0, np.inf]), {"m": np.zeros(3), "v": np.ones(3)}, 1 << 40),
    "0-d": Saved(np.array(2.5, np.float32), {"m": np.array(1, np.float32)}),
    "empty": Saved(np.zeros((0, 4)), {"m": np.zeros((0, 4))}),
    "nan": Saved(np.array([0x7FC00001, 0xFFC12345], np.uint32).view(np.float32)),
    "subnormal": Saved(np.array([1, (1 << 63) + 1], np.uint64).view(np.float64)),
    "transposed": Saved(np.arange(6, dtype=np.float32).reshape(2, 3).T),
    "strided": Saved(np.arange(10.0)[::-3]),
    "broadcast": Saved(np.broadcast_to(np.float32(3), (2, 2))),
    "big-endian": Saved(np.arange(3, dtype=">f4")),
    "a/m/w": Saved(np.ones(1)),
    "m/w": Saved(np.ones(2), {"a": np.zeros(2)}),
    "größe": Saved(np.ones(2)),
}


@pytest.mark.parametrize("part_bytes", [1, 64, 1 << 30])
def test_round_trip_is_bit_for_bit(tmp_path: Path, part_bytes: int) -> None:
    saved = Checkpoint(1 << 40, 12, {"a": [1.1, None, True]}, VARIABLES, [{"index": 0}], [])
    path = save(tmp_path, saved, part_bytes=part_bytes)
    loaded = load(path)
    assert content(loaded) == content(saved)
    assert list(loaded.variables) == list(VARIABLES)
    assert loaded.path == path
    for s in loaded.variables.values():
        assert s.value.flags.writeable and s.value.flags.c_contiguous and s.value.flags.aligned
    assert len(names(path)) == {1: 19, 64: 7, 1 << 30: 2}[part_bytes]
    verify(path)


def test_the_arrays_handed_in_are_left_alone(tmp_path: Path) -> None:
    checkpoint = tiny()
    for saved in checkpoint.variables.values():
        saved.value.flags.writeable = False
    before = content(checkpoint)
    save(tmp_path, checkpoint)
    assert content(checkpoint) == before


def test_golden_bytes(tmp_path: Path) -> None:
    path = save(tmp_path, tiny())
    assert path == tmp_path / "step-000000000003"
    assert names(path) == [MANIFEST, PART]
    part = (
        b"\xc0\0\0\0\0\0\0\0"
        b'{"value/b":{"dtype":"F64","shape":[],"data_offsets":[0,8]},'
        b'"value/w":{"dtype":"F32","shape":[1,2],"data_offsets":[8,16]},'
        b'"slot/m/w":{"dtype":"F32","shape":[1,2],"data_offsets":[16,24]}}       '
        b"\0\0\0\0\0\0\xd0\x3f"
        b"\0\0\x80\x3f\0\0\0\xc0"
        b"\0\0\0\x3f\0\0\0\0"
    )
    assert (path / PART).read_bytes() == part
    rest = (
        b'"format": "paramserver checkpoint",\n"version": 1,\n"global_step": 3,\n"rounds": 0,\n'
        b'"job": {"optimizer": {"kind": "momentum", "hyper": {"learning_rate": 0.1}}, '
        b'"last_step": 200},\n'
        b'"variables": [\n'
        b'{"name": "w", "dtype": "float32", "shape": [1, 2], "updates": 3, "slots": ["m"]},\n'
        b'{"name": "b", "dtype": "float64", "shape": [], "updates": 0, "slots": []}\n],\n'
        b'"shards": [\n{"index": 0, "version": 3, "variables": ["w", "b"], "cut_off": []}\n],\n'
        b'"members": [\n'
        b'{"worker": "worker:0", "incarnation": 18446744073709551615, "clock": 3}\n],\n'
        b'"files": [\n{"name": "part-00000.safetensors", "size": 224, "sha256": '
        b'"c91f72d40b484b7ffe1621e363e938d3975d3751b176a902974b24c2aef41455"}\n]\n}\n'
    )
    seal = hashlib.sha256(rest).hexdigest().encode()
    assert (path / MANIFEST).read_bytes() == b'{"sha256": "' + seal + b'",\n' + rest


def test_the_safetensors_library_reads_the_parts(tmp_path: Path) -> None:
    path = save(tmp_path, Checkpoint(1, 0, {}, VARIABLES))
    read = load_file(path / PART)
    assert bits(read["value/transposed"]) == bits(VARIABLES["transposed"].value)
    assert bits(read["slot/v/float64"]) == bits(VARIABLES["float64"].slots["v"])
    assert len(read) == sum(1 + len(s.slots) for s in VARIABLES.values())


def test_parts_are_bounded() -> None:
    arrays = {str(i): np.zeros(10, np.float32) for i in range(7)} | {"big": np.zeros(100)}
    dealt = [list(part) for part in split(arrays.items(), part_bytes=120)]
    assert dealt == [["0", "1", "2"], ["3", "4", "5"], ["6"], ["big"]]
    long = ((f"{i:250d}", np.zeros(0, np.float32)) for i in range(70_000))
    lengths = [sum(len(name) + 60 for name in part) for part in split(long)]
    assert len(lengths) == 2 and max(lengths) < 64 << 20


def test_saving_copies_no_array(tmp_path: Path) -> None:
    value = np.zeros(4 << 20, np.float32)
    tracemalloc.start()
    try:
        save(tmp_path, Checkpoint(1, 0, {}, {"w": Saved(value, {"m": value})}))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < value.nbytes / 8


@pytest.mark.parametrize(
    ("checkpoint", "says"),
    [
        (Checkpoint(-1, 0, {}, {}), "global_step"),
        (Checkpoint(1 << 63, 0, {}, {}), "global_step"),
        (Checkpoint(1, 0, {"rate": float("nan")}, {}), "'job'"),
        (Checkpoint(1, 0, {"rate": np.float32(1)}, {}), "'job'"),
        (Checkpoint(1, 0, {}, {"w": Saved(np.zeros(2, np.int32))}), "'w' has dtype int32"),
        (Checkpoint(1, 0, {}, {"": Saved(np.zeros(2))}), "empty"),
        (Checkpoint(1, 0, {}, {"w\n": Saved(np.zeros(2))}), "print"),
        (Checkpoint(1, 0, {}, {"\ud800": Saved(np.zeros(2))}), "print"),
        (Checkpoint(1, 0, {}, {"w": Saved(np.zeros(2), {"m": np.zeros(3)})}), "slot 'm'"),
        (Checkpoint(1, 0, {}, {"w": Saved(np.zeros(2), {"m": np.zeros(2, "f4")})}), "slot 'm'"),
        (Checkpoint(1, 0, {}, {"w": Saved(np.zeros(2), {"a/m": np.zeros(2)})}), "a/m"),
        (Checkpoint(1, 0, {}, {"w": Saved(np.zeros(2), {}, -1)}), "updates"),
    ],
)
def test_what_cannot_be_saved_is_refused(tmp_path: Path, checkpoint: Checkpoint, says: str) -> None:
    with pytest.raises(CheckpointError, match="cannot save") as caught:
        save(tmp_path, checkpoint)
    assert says in str(caught.value)
    assert names(tmp_path) == []


# --- which checkpoint is taken


def test_nothing_saved_yet(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    (tmp_path / ".step-000000000001.tmp-0123456789abcdef").mkdir()
    for folder in (tmp_path, tmp_path / "missing"):
        assert find(folder) == (None, [])
        assert list_checkpoints(folder) == []
        assert prune(folder, 1) == []


def test_the_newest_step_wins_in_numeric_order(tmp_path: Path) -> None:
    steps = [9, 0, 10**12, 2**63 - 1, 999_999_999_999, 120]
    for step in steps:
        save(tmp_path, tiny(step))
    assert [s.global_step for s in list_checkpoints(tmp_path)] == sorted(steps, reverse=True)
    assert names(tmp_path)[:2] == ["step-000000000000", "step-000000000009"]
    assert found(tmp_path) == (content(tiny(2**63 - 1)), [])


def test_a_damaged_newest_one_is_skipped_with_the_reason(tmp_path: Path) -> None:
    old, new = save(tmp_path, tiny(10)), save(tmp_path, tiny(20))
    (new / PART).unlink()
    assert found(tmp_path) == (content(tiny(10)), [Skipped(new, f"{PART} is missing")])
    (tmp_path / "step-000000000030").mkdir()
    (tmp_path / "step-000000000040").write_text("")
    (old / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="--checkpoint-dir") as caught:
        find(tmp_path)
    for reason in (
        "step-000000000040: manifest.json cannot be read: Not a directory",
        "step-000000000030: manifest.json is missing",
        f"step-000000000020: {PART} is missing",
        "step-000000000010: manifest.json is missing",
    ):
        assert reason in str(caught.value)


def test_the_same_step_again(tmp_path: Path) -> None:
    first = save(tmp_path, tiny(5))
    assert save(tmp_path, tiny(5)) == first
    assert names(tmp_path) == ["step-000000000005"]
    second = save(tmp_path, tiny(5, w=2))
    assert second == tmp_path / "step-000000000005-1"
    assert found(tmp_path) == (content(tiny(5, w=2)), [])
    (second / PART).write_bytes(b"")
    third = save(tmp_path, tiny(5, w=2))
    assert third == tmp_path / "step-000000000005-2"
    assert found(tmp_path) == (content(tiny(5, w=2)), [])
    assert [s.copy for s in list_checkpoints(tmp_path)] == [2, 1, 0]
    assert prune(tmp_path, 2) == []
    assert prune(tmp_path, 1) == [first, second]


def test_a_copy_under_any_name_loads_but_not_under_another_step(tmp_path: Path) -> None:
    path = save(tmp_path, tiny(5))
    best = path.rename(tmp_path / "best")
    assert content(load(best)) == content(tiny(5))
    wrong = best.rename(tmp_path / "step-000000000006")
    with pytest.raises(Damaged, match="step 5"):
        load(wrong)


# --- what is damaged never loads


def damage(path: Path, how: Callable[[bytes], bytes]) -> None:
    path.write_bytes(how(path.read_bytes()))


def refused(path: Path, file: Path, says: str = "") -> None:
    """Loading and verifying fail, and name the file and a remedy."""
    for act in (load, verify):
        with pytest.raises(Damaged, match="put back a copy") as caught:
            act(path)
        assert str(file) in str(caught.value) and says in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", [MANIFEST, PART])
def test_one_flipped_bit_anywhere(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, tiny())
    good = (path / file).read_bytes()
    for at in range(len(good)):
        flipped = bytearray(good)
        flipped[at] ^= 1 << at % 8
        (path / file).write_bytes(flipped)
        with pytest.raises(Damaged) as caught:
            verify(path)
        assert str(path / file) in str(caught.value)
    (path / file).write_bytes(good)
    verify(path)


@pytest.mark.parametrize("file", [MANIFEST, PART, "part-00001.safetensors"])
@pytest.mark.parametrize(
    "how",
    [
        lambda data: bytes(len(data)),
        lambda data: data[: len(data) // 2],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"",
    ],
    ids=["zeros", "half", "a byte less", "a byte more", "empty"],
)
def test_zeros_and_truncation(tmp_path: Path, file: str, how: Callable[[bytes], bytes]) -> None:
    path = save(tmp_path, tiny(), part_bytes=1)
    damage(path / file, how)
    refused(path, path / file)


def test_swapped_files(tmp_path: Path) -> None:
    equal = {"a": Saved(np.zeros(2)), "b": Saved(np.ones(2))}
    one = save(tmp_path, Checkpoint(1, 0, {}, equal), part_bytes=1)
    (one / PART).rename(one / "x")
    (one / "part-00001.safetensors").rename(one / PART)
    (one / "x").rename(one / "part-00001.safetensors")
    refused(one, one / PART, "checksum")
    two = save(tmp_path, tiny(2))
    other = save(tmp_path / "other", tiny(2, w=9))
    (other / PART).replace(two / PART)
    refused(two, two / PART, "checksum")


def test_foreign_manifests(tmp_path: Path) -> None:
    path = save(tmp_path, tiny())
    for text in ('{"weight_map": {}}', "[]", "", "{", '{"sha256": "' + "0" * 64 + '",\n}'):
        (path / MANIFEST).write_text(text)
        refused(path, path / MANIFEST)


def test_a_pipe_or_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    path = save(tmp_path, tiny())
    for file in (path / PART, path / MANIFEST):
        file.unlink()
        os.mkfifo(file)
        refused(path, file, "regular")
        file.unlink()
        file.mkdir()
        refused(path, file, "regular")


def forge(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Changes a manifest and seals it again, as an attacker could."""
    body = json.loads((path / MANIFEST).read_bytes())
    del body["sha256"]
    edit(body)
    reseal(path, json.dumps(body)[1:])


def reseal(path: Path, rest: str) -> None:
    seal = hashlib.sha256(rest.encode()).hexdigest()
    (path / MANIFEST).write_text(f'{{"sha256": "{seal}",\n{rest}')


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda m: m["files"][0].update(name="../x"), "'../x'"),
        (lambda m: m["files"][0].update(name="/etc/passwd"), "'/etc/passwd'"),
        (lambda m: m["files"][0].update(name="part-00000.safetensors/../../x"), "file name"),
        (lambda m: m["files"][0].update(name="part-00000.safetensors\n"), "file name"),
        (lambda m: m["files"][0].update(sha256="0"), "'sha256'"),
        (lambda m: m["files"][0].update(size=-1), "'size'"),
        (lambda m: m["files"][0].update(size=True), "'size'"),
        (lambda m: m["files"].append(m["files"][0]), "twice"),
        (lambda m: m.update(files=[]), "'slot/m/w', which no file holds"),
        (lambda m: m.update(format="other"), "'other'"),
        (lambda m: m.update(version="1"), "'version'"),
        (lambda m: m.pop("rounds"), "'rounds' is missing"),
        (lambda m: m.update(global_step=1.5), "'global_step'"),
        (lambda m: m.update(global_step=4), "step 4"),
        (lambda m: m.update(job=[]), "'job'"),
        (lambda m: m.update(shards=[1]), "'shards'"),
        (lambda m: m.update(members={}), "'members'"),
        (lambda m: m.update(variables=[[]]), "'name'"),
        (lambda m: m["variables"][0].update(dtype="object"), "object"),
        (lambda m: m["variables"][0].update(dtype="float64"), "the manifest says F64"),
        (lambda m: m["variables"][0].update(shape=[2, 1]), "the manifest says F32 (2, 1)"),
        (lambda m: m["variables"][0].update(shape=[-1, -2]), "shape"),
        (lambda m: m["variables"][0].update(shape=[1 << 62, 1 << 62]), "the manifest says"),
        (lambda m: m["variables"][0].update(shape="12"), "'shape'"),
        (lambda m: m["variables"][0].update(updates=None), "'updates'"),
        (lambda m: m["variables"][0].update(slots=[]), "'slot/m/w', which the manifest"),
        (lambda m: m["variables"][0].update(slots=["m", "v"]), "'slot/v/w', which no file"),
        (lambda m: m["variables"][0].update(slots=["m", "m"]), "twice"),
        (lambda m: m["variables"][0].update(slots=["../m"]), "../m"),
        (lambda m: m["variables"].append(m["variables"][0]), "twice"),
        (lambda m: m["variables"].pop(), "'value/b', which the manifest"),
    ],
)
def test_a_forged_manifest(
    tmp_path: Path, edit: Callable[[dict[str, Any]], object], says: str
) -> None:
    path = save(tmp_path, tiny())
    forge(path, edit)
    with pytest.raises(Damaged) as caught:
        load(path)
    assert says in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize("rest", ["[" * 100_000, '"a": ' + "1" * 10_000 + "}", '"a": NaN}', "}{"])
def test_a_sealed_text_that_is_no_manifest(tmp_path: Path, rest: str) -> None:
    path = save(tmp_path, tiny())
    reseal(path, rest)
    refused(path, path / MANIFEST, "cannot be understood")


def entry(start: int, stop: int, shape: list[int]) -> dict[str, object]:
    return {"dtype": "F64", "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "length"),
    [
        ({"value/a": entry(0, 8, [1]), "value/b": entry(8, 16, [1])}, 1 << 62),
        ({"value/a": entry(0, 8, [1]), "value/b": entry(8, 16, [1])}, (1 << 64) - 1),
        ({"value/a": entry(0, 8, [1]), "value/b": entry(4, 12, [1])}, None),
        ({"value/a": entry(0, 8, [1]), "value/b": entry(8, 32, [3])}, None),
        ({"value/a": entry(0, 8, [1]), "value/b": entry(16, 8, [1])}, None),
        ({"value/a": entry(0, 8, [1 << 62, 1 << 62]), "value/b": entry(8, 16, [1])}, None),
        ({"value/a": entry(0, 8, [1])}, None),
        ({"value/a": 1}, None),
        ([], None),
        ({}, None),
    ],
)
def test_a_hostile_part_with_the_right_checksum(
    tmp_path: Path, header: object, length: int | None
) -> None:
    saved = {"a": Saved(np.zeros(1)), "b": Saved(np.ones(1))}
    path = save(tmp_path, Checkpoint(1, 0, {}, saved))
    text = json.dumps(header).encode()
    data = (length or len(text)).to_bytes(8, "little") + text + bytes(16)
    (path / PART).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    forge(path, lambda m: m["files"][0].update(size=len(data), sha256=digest))
    refused(path, path / PART)


def test_an_array_in_two_parts(tmp_path: Path) -> None:
    saved = {"a": Saved(np.zeros(1)), "b": Saved(np.ones(1))}
    path = save(tmp_path, Checkpoint(1, 0, {}, saved), part_bytes=1)
    second = path / "part-00001.safetensors"
    second.write_bytes((path / PART).read_bytes())
    digest = hashlib.sha256(second.read_bytes()).hexdigest()
    forge(path, lambda m: m["files"][1].update(sha256=digest))
    refused(path, second, "earlier")


def test_a_newer_format_is_never_passed_over(tmp_path: Path) -> None:
    save(tmp_path, tiny(10))
    path = save(tmp_path, tiny(20))
    forge(path, lambda m: m.update(version=2, global_step="another type by then"))
    for act, argument in ((load, path), (verify, path), (find, tmp_path)):
        with pytest.raises(CheckpointError, match=r"format version 2.*newer program") as caught:
            act(argument)
        assert str(path / MANIFEST) in str(caught.value)
        assert not isinstance(caught.value, Damaged)
    assert prune(tmp_path, 1) == []


def test_what_cannot_be_read_just_now_is_not_called_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, tiny())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        with pytest.raises(CheckpointError, match="Too many open files") as caught:
            load(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, Damaged)


# --- keeping the last k


def steps(folder: Path) -> list[int]:
    return sorted(s.global_step for s in list_checkpoints(folder))


@pytest.mark.parametrize(
    ("keep", "left"),
    [(0, [10, 20, 30, 40]), (1, [40]), (2, [30, 40]), (4, [10, 20, 30, 40]), (9, [10, 20, 30, 40])],
)
def test_prune_keeps_the_newest(tmp_path: Path, keep: int, left: list[int]) -> None:
    for step in (10, 20, 30, 40):
        save(tmp_path, tiny(step))
    removed = prune(tmp_path, keep)
    assert steps(tmp_path) == left
    assert [p.name for p in removed] == [
        f"step-{s:012d}" for s in (10, 20, 30, 40) if s not in left
    ]
    assert prune(tmp_path, keep) == []


def test_prune_refuses_a_negative_number(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep is -1"):
        prune(tmp_path, -1)


def test_prune_never_touches_a_strangers_things(tmp_path: Path) -> None:
    strangers = ["step-5", "step-000000000005-", "step-0000000000005", ".step-000000000005", "best"]
    for name in strangers:
        save(tmp_path / name, tiny(5)).rename(tmp_path / name / "inner")
        (tmp_path / name / MANIFEST).write_text("{}")
    for name in (PART, MANIFEST, "notes.txt"):
        (tmp_path / name).write_text("mine")
    foreign = tmp_path / "step-000000000001"
    foreign.mkdir()
    (foreign / MANIFEST).write_text('{"weight_map": {}}')
    empty = tmp_path / "step-000000000002"
    empty.mkdir()
    pinned = save(tmp_path, tiny(3))
    (pinned / "notes.txt").write_text("keep this one")
    linked = tmp_path / "step-000000000004"
    linked.symlink_to(save(tmp_path / "elsewhere", tiny(4)))
    near = tmp_path / ".step-000000000005.tmp-0123"
    busy = tmp_path / ".step-000000000005.tmp-0123456789abcdef"
    for folder in (near, busy):
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    surplus = save(tmp_path, tiny(6))
    for step in (7, 8):
        save(tmp_path, tiny(step))
    assert prune(tmp_path, 2) == [surplus]
    for path in before:
        assert path.exists()
    assert content(load(pinned)) == content(tiny(3))


def test_prune_clears_what_was_left_unfinished(tmp_path: Path) -> None:
    kept = save(tmp_path, tiny(1))
    for name in ([], [PART], [PART, "part-00001.safetensors", MANIFEST]):
        folder = tmp_path / f".step-000000000002.tmp-{len(name):016x}"
        folder.mkdir()
        for file in name:
            (folder / file).write_text("half")
    assert prune(tmp_path, 0) == []
    assert names(tmp_path) == [kept.name]


def test_a_damaged_checkpoint_does_not_count(tmp_path: Path) -> None:
    paths = {step: save(tmp_path, tiny(step)) for step in (10, 20, 30, 40)}
    for step in (20, 40):
        damage(paths[step] / PART, lambda data: bytes(len(data)))
    assert prune(tmp_path, 3) == []
    assert prune(tmp_path, 2) == []
    assert prune(tmp_path, 1) == [paths[10], paths[20]]
    assert found(tmp_path)[0] == content(tiny(30))
    save(tmp_path, tiny(50))
    assert prune(tmp_path, 1) == [paths[30], paths[40]]


def test_trusted_checkpoints_are_not_read_again(tmp_path: Path) -> None:
    paths = [save(tmp_path, tiny(step)) for step in (10, 20, 30)]
    trusted = {paths[2]}
    damage(paths[2] / PART, lambda data: bytes(len(data)))
    assert prune(tmp_path, 2, trusted=trusted) == [paths[0]]
    assert trusted == {paths[1], paths[2]}
    (paths[2] / PART).unlink()
    assert prune(tmp_path, 1, trusted=trusted) == []
    assert steps(tmp_path) == [20, 30]


# --- failing and dying disks


OPERATIONS = (
    "make_folder",
    "create",
    "write",
    "sync",
    "sync_folder",
    "rename",
    "remove",
    "remove_folder",
)


class Died(BaseException):
    """The process is gone."""


class Quick(Files):
    """Flushes nothing: where a test itself decides what is lost, a real flush only takes time."""

    def sync(self, file: FileIO) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


QUICK = Quick()


class Failing(Files):
    """The n-th operation fails with an OSError."""

    def __init__(self, n: int, code: int = errno.ENOSPC) -> None:
        self.left, self.code = n, code

    def before(self, name: str, *arguments: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise OSError(self.code, os.strerror(self.code))

    def after(self, name: str, *arguments: Any) -> None:
        """The operation was done."""


class Mortal(Failing):
    """The process dies at its n-th operation, half-way through if that is a write."""

    def before(self, name: str, *arguments: Any) -> None:
        self.left -= 1
        if self.left <= 0:
            if self.left == 0:
                if name == "write":
                    file, data = arguments
                    QUICK.write(file, data[: len(data) // 2])
                self.at_death()
            raise Died

    def at_death(self) -> None:
        """What else is lost."""


class PowerCut(Mortal):
    """The machine dies: all content and all names that were not flushed are gone."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.dirty: dict[Path, int] = {}
        self.undo: list[tuple[Path, Callable[[], object]]] = []
        self.handles = ExitStack()

    def handle(self, path: Path) -> int:
        """Reaches a file or folder whatever it is called by then."""
        handle = os.open(path, os.O_RDWR if path.is_file() else os.O_RDONLY)
        self.handles.callback(os.close, handle)
        return handle

    def after(self, name: str, *arguments: Any) -> None:
        match name, *arguments:
            case "make_folder", Path() as path:
                self.undo.append((path.parent, partial(shutil.rmtree, path)))
            case "create", Path() as path:
                self.dirty[path] = self.handle(path)
                unlink = partial(os.unlink, path.name, dir_fd=self.handle(path.parent))
                self.undo.append((path.parent, unlink))
            case "sync", FileIO() as file:
                del self.dirty[Path(file.name)]
            case "rename", Path() as source, Path() as target:
                self.undo.append((target.parent, partial(target.rename, source)))
            case "sync_folder", Path() as folder:
                self.undo = [(where, undo) for where, undo in self.undo if where != folder]

    def at_death(self) -> None:
        try:
            for handle in self.dirty.values():
                os.ftruncate(handle, 0)
            for _, undo in reversed(self.undo):
                undo()
        except OSError as error:
            raise AssertionError("the power cut went wrong") from error
        self.handles.close()


def _intercepted(name: str) -> Callable[..., Any]:
    def operation(self: Failing, *arguments: Any) -> Any:
        self.before(name, *arguments)
        result = getattr(QUICK, name)(*arguments)
        self.after(name, *arguments)
        return result

    return operation


for _name in OPERATIONS:
    setattr(Failing, _name, _intercepted(_name))


def at_every_operation(
    tmp_path: Path, kind: type[Failing], earlier: list[Checkpoint], new: Checkpoint
) -> Iterator[tuple[Path, bool, BaseException | None]]:
    """Saves and prunes in a fresh folder for every n: (folder, was it saved, what went wrong)."""
    n = 0
    while True:
        n += 1
        folder = tmp_path / str(n) / "ckpt"
        for checkpoint in earlier:
            save(folder, checkpoint, QUICK)
        files, saved = kind(n), False
        try:
            save(folder, new, files, part_bytes=24)
            saved = True
            prune(folder, 2, files)
        except (Died, CheckpointError) as error:
            yield folder, saved, error
        else:
            yield folder, saved, None
            assert n > 10
            return


EARLIER = {
    "first save": [],
    "over older ones": [tiny(10), tiny(20), tiny(30)],
    "the same step again": [tiny(30), tiny(40, w=7)],
    "the same content again": [tiny(30), tiny(40)],
}


@pytest.mark.parametrize("kind", [Mortal, PowerCut])
@pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)
def test_whenever_it_dies_the_newest_complete_one_restores(
    tmp_path: Path, kind: type[Mortal], earlier: list[Checkpoint]
) -> None:
    new = tiny(40)
    for folder, saved, _ in at_every_operation(tmp_path, kind, earlier, new):
        checkpoint, skipped = find(folder)
        assert skipped == []
        if checkpoint is None:
            assert not saved and not earlier
        elif saved or content(checkpoint) != content((earlier or [new])[-1]):
            assert content(checkpoint) == content(new)
        save(folder, new, QUICK)
        prune(folder, 2, QUICK)
        assert found(folder) == (content(new), [])
        assert not [name for name in names(folder) if name.startswith(".")]
        assert len(names(folder)) == min(2, 1 + len({c.global_step for c in earlier} - {40}))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("earlier", EARLIER.values(), ids=EARLIER)
def test_whatever_fails_the_older_ones_stay(
    tmp_path: Path, earlier: list[Checkpoint], code: int
) -> None:
    def kind(n: int) -> Failing:
        return Failing(n, code)

    new = tiny(40)
    for folder, saved, error in at_every_operation(tmp_path, kind, earlier, new):  # type: ignore[arg-type]
        if error is not None:
            assert os.strerror(code) in str(error) and str(tmp_path) in str(error)
            assert ("free some space" in str(error)) == (code == errno.ENOSPC)
        if not saved:
            assert not folder.exists() or not [n for n in names(folder) if n.startswith(".")]
            for checkpoint in earlier:
                assert content(checkpoint) in [
                    content(load(s.path)) for s in list_checkpoints(folder)
                ]
        assert find(folder)[1] == []


def test_the_disk_itself(tmp_path: Path) -> None:
    class Reluctant(FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[:7])

    with Reluctant(tmp_path / "file", "wb") as file:
        REAL.write(file, b"as many calls as it takes")
    assert (tmp_path / "file").read_bytes() == b"as many calls as it takes"
    with pytest.raises(FileExistsError):
        REAL.create(tmp_path / "file")
    reader, writer = os.pipe()
    with FileIO(reader), FileIO(writer, "w") as pipe, pytest.raises(OSError, match="Invalid"):
        REAL.sync(pipe)  # a pipe has no disk to reach


def test_leftovers_that_cannot_be_cleared_do_not_stop_a_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leftover = tmp_path / ".step-000000000002.tmp-0123456789abcdef"
    leftover.mkdir()
    path = save(tmp_path, tiny(3), Failing(1, errno.EACCES))
    assert names(tmp_path) == [leftover.name, path.name]
    assert str(leftover) in caplog.text


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for act in (
        lambda: save(tmp_path / "file", tiny()),
        lambda: save(tmp_path / "file" / "under", tiny()),
        lambda: Lock(tmp_path / "file", "chief:0"),
        lambda: find(tmp_path / "file"),
    ):
        with pytest.raises(CheckpointError, match=r"file.*--checkpoint-dir"):
            act()
    assert names(tmp_path) == ["file"]


# --- one chief at a time


def test_the_second_chief_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "ckpt"
    with Lock(folder, "chief:0 on host-a (pid 7)"):
        with pytest.raises(CheckpointError, match=r"in use by 'chief:0 on host-a \(pid 7\)'"):
            Lock(folder, "worker:0")
        save(folder, tiny())
    lock = Lock(folder, "worker:0")
    lock.release()
    lock.release()
    Lock(folder, "chief:1").release()
    assert found(folder) == (content(tiny()), [])


CHILD = """
import os, sys
import numpy as np
from chief.checkpoint import Checkpoint, Saved, find, prune, save
from chief.files import REAL, Files, Lock

class Telling(Files):
    def __getattribute__(self, name):
        os.write(1, b".")
        return super().__getattribute__(name)

folder = sys.argv[1]
with Lock(folder, f"pid {os.getpid()}"):
    checkpoint, _ = find(folder)
    step = checkpoint.global_step if checkpoint else 0
    while True:
        step += 1
        w = np.full(1000, -0.5 * step, np.float32)
        save(folder, Checkpoint(step, 0, {}, {"w": Saved(w, {"m": w})}), Telling(), part_bytes=1)
        os.write(1, b"%d\\n" % step)
        prune(folder, 2, Telling())
"""


def test_kill_minus_9_at_any_moment(tmp_path: Path) -> None:
    reported = 0
    for operations in (3, 7, 13, 24, 33, 47, 58, 71):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        said = b""
        with child.stdout as out:
            while said.count(b".") < operations:
                piece = os.read(out.fileno(), 64)
                assert piece, "the child ended by itself"
                said += piece
            child.send_signal(signal.SIGKILL)
            said += out.read()
        assert child.wait(10) == -signal.SIGKILL
        finished = [int(line.strip(b".")) for line in said.split(b"\n")[:-1]]
        reported = max([reported, *finished])
        checkpoint, skipped = find(tmp_path)
        assert skipped == []
        step = checkpoint.global_step if checkpoint else 0
        assert reported <= step <= reported + 1
        reported = step
        if checkpoint:
            for array in (checkpoint.variables["w"].value, checkpoint.variables["w"].slots["m"]):
                assert array.tolist() == [-0.5 * step] * 1000
    assert reported > 3
