"""A job's state in a folder: save, find, load, verify, prune. No gRPC here, no threads.

    ckpt/
      .lock                            one chief at a time (`chief.files.Lock`)
      step-000000000120/               a checkpoint: global_step 120
        manifest.json                  what it is, sealed (`chief.manifest`)
        part-00000.safetensors         the arrays (`chief.parts`)
      step-000000000120-1/             step 120 again, with other content: counts as the newer
      .step-000000000130.tmp-<random>  a save that has not finished, or a removal

A checkpoint gets its name by one rename, when all of it is on the disk: whatever dies whenever,
what has a name is complete. Arrays are stored by variable and not by shard, so that any number of
shards can take them up. A checkpoint with a file of somebody else's in it is never removed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from chief import folder as folders
from chief import manifest as manifests
from chief import parts
from chief.files import REAL, Files, Lock, doing, make_folders
from chief.folder import MANIFEST, Stored, list_checkpoints
from chief.manifest import Damaged, FileRecord, Json, Manifest, VariableRecord
from chief.parts import PART_BYTES, Array, Spec
from paramserver.errors import CheckpointError, ConfigError

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Lock",
    "Saved",
    "Skipped",
    "Stored",
    "find",
    "list_checkpoints",
    "load",
    "prune",
    "save",
    "verify",
]

_log = logging.getLogger(__name__)
_MOST_MANIFEST_BYTES = 1 << 30


@dataclass(frozen=True, eq=False)
class Saved:
    """One variable: a float32 or float64 array of any layout in memory, and its optimizer's state.

    `slots` have the dtype and shape of `value`; `updates` is the number of updates they have seen
    (Adam's t)."""

    value: Array
    slots: Mapping[str, Array] = field(default_factory=dict)
    updates: int = 0


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a job at one cut, whatever the number of shards.

    `job`, `shards` and `members` are JSON (tuples come back as lists). `path` is where a loaded
    checkpoint was found; `save` ignores it."""

    global_step: int
    rounds: int
    job: Json
    variables: Mapping[str, Saved]
    shards: Sequence[Json] = ()
    members: Sequence[Json] = ()
    path: Path | None = None


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that `find` passed over, and why."""

    path: Path
    reason: str


def save(
    folder: Path | str, checkpoint: Checkpoint, files: Files = REAL, part_bytes: int = PART_BYTES
) -> Path:
    """Writes a checkpoint, all or nothing; returns its folder once a power cut could not undo it.

    A complete one with the very same content is kept and returned instead. With other content, the
    new one gets the next free name of that step and counts as the newer. What earlier saves left
    unfinished is cleared away first. Blocks for as long as the disk takes; needs memory for one
    array at most. The caller holds the folder's `Lock`, and nobody writes to the arrays meanwhile.

    Raises: CheckpointError (disk full, no permission, a value that cannot be saved). Older
    checkpoints are as they were."""
    folder = Path(folder)
    make_folders(folder, files)
    try:
        folders.sweep(folder, files)
    except CheckpointError as error:
        _log.warning("%s", error)
    unfinished = folders.temporary(folder, folders.name_of(checkpoint.global_step))
    published = False
    try:
        sealed = _write(unfinished, checkpoint, files, part_bytes)
        newest = next(
            (s for s in list_checkpoints(folder) if s.global_step == checkpoint.global_step), None
        )
        if newest and _is_same(newest.path, sealed):
            target = newest.path
        else:
            copy = newest.copy + 1 if newest else 0
            target = folder / folders.name_of(checkpoint.global_step, copy)
            with doing("rename", unfinished):
                files.rename(unfinished, target)
            published = True
        with doing("flush", folder):
            files.sync_folder(folder)
    finally:
        if not published:
            with suppress(CheckpointError):
                folders.discard(unfinished, files)
    return target


def find(folder: Path | str) -> tuple[Checkpoint | None, list[Skipped]]:
    """Loads the newest checkpoint that is what was saved; says which newer ones are not, and why.

    (None, []) if the folder is missing or holds no checkpoint. Blocks; reads the chosen one twice.

    Raises: CheckpointError if there are checkpoints and none is whole, with all reasons; also,
    rather than go back to an older one, if the newest cannot be read and is not known to be damaged
    (no permission, a newer format)."""
    skipped: list[Skipped] = []
    for stored in list_checkpoints(folder):
        try:
            return load(stored.path), skipped
        except Damaged as error:
            skipped.append(Skipped(stored.path, error.reason))
    if skipped:
        reasons = "; ".join(f"{s.path.name}: {s.reason}" for s in skipped)
        raise CheckpointError(
            f"no checkpoint in {folder} is whole ({reasons}); put back a copy of one, or choose "
            "another --checkpoint-dir to start afresh"
        )
    return None, []


def load(path: Path | str) -> Checkpoint:
    """Reads one checkpoint's folder, every bit checked before any is believed. Blocks.

    The arrays are the caller's: writable, C-order. Raises: CheckpointError that names the file."""
    path = Path(path)
    manifest, arrays = _read(path)
    variables = {
        v.name: Saved(
            arrays[manifests.value_entry(v.name)],
            {slot: arrays[manifests.slot_entry(slot, v.name)] for slot in v.slots},
            v.updates,
        )
        for v in manifest.variables
    }
    return Checkpoint(
        manifest.global_step,
        manifest.rounds,
        manifest.job,
        variables,
        manifest.shards,
        manifest.members,
        path,
    )


def verify(path: Path | str) -> None:
    """Checks as `load` does, without keeping the arrays. Blocks. Raises: CheckpointError."""
    _read(Path(path), arrays=False)


def prune(
    folder: Path | str, keep: int, files: Files = REAL, trusted: set[Path] | None = None
) -> list[Path]:
    """Removes all but the newest whole checkpoints of `keep` steps; returns what it removed.

    `keep` 0 keeps all. With fewer than `keep` whole ones nothing is removed. A damaged one counts
    for nothing: it goes once it is older than all that stay. Unfinished saves are cleared away.

    Whole means that all bits were read and checked. Those in `trusted`, which the caller saved or
    loaded itself, are checked by size alone; those found whole are added to it. Blocks. The caller
    holds the folder's `Lock`. Raises: ConfigError, CheckpointError."""
    if keep < 0:
        raise ConfigError(f"keep is {keep}; choose 0 (all) or the number of checkpoints to keep")
    folder = Path(folder)
    trusted = set() if trusted is None else trusted
    folders.sweep(folder, files)
    kept: set[int] = set()
    surplus: list[Path] = []
    for stored in list_checkpoints(folder) if keep else ():
        if len(kept) == keep or stored.global_step in kept:
            surplus.append(stored.path)
        elif _is_whole(stored.path, trusted):
            kept.add(stored.global_step)
    if len(kept) < keep:
        return []
    removed = [path for path in reversed(surplus) if _is_ours(path)]
    for path in removed:
        folders.remove(path, files)
        trusted.discard(path)
    return removed


def _write(unfinished: Path, checkpoint: Checkpoint, files: Files, part_bytes: int) -> bytes:
    """Writes all of a checkpoint durably under its temporary name; returns the sealed manifest."""
    description = Manifest(
        checkpoint.global_step,
        checkpoint.rounds,
        checkpoint.job,
        tuple(_record(name, saved) for name, saved in checkpoint.variables.items()),
        checkpoint.shards,
        checkpoint.members,
        files=(),
    )
    manifests.encode(description)  # what cannot be saved is refused before anything is written
    with doing("create", unfinished):
        files.make_folder(unfinished)
    written: list[FileRecord] = []
    for number, part in enumerate(parts.split(_entries(checkpoint.variables), part_bytes)):
        path = unfinished / f"part-{number:05d}.safetensors"
        written.append(parts.write(path, part, files))
    sealed = manifests.encode(replace(description, files=tuple(written)))
    path = unfinished / MANIFEST
    with doing("write", path), files.create(path) as file:
        files.write(file, sealed)
        files.sync(file)
    with doing("flush", unfinished):
        files.sync_folder(unfinished)
    return sealed


def _entries(variables: Mapping[str, Saved]) -> Iterator[tuple[str, Array]]:
    for name, saved in variables.items():
        yield manifests.value_entry(name), saved.value
        for slot, array in saved.slots.items():
            yield manifests.slot_entry(slot, name), array


def _record(name: str, saved: Saved) -> VariableRecord:
    """Describes a variable. Raises: CheckpointError if a slot is not like its value."""
    value = saved.value
    for slot, array in saved.slots.items():
        if (array.dtype, array.shape) != (value.dtype, value.shape):
            raise CheckpointError(
                f"cannot save: slot {slot!r} of variable {name!r} is {array.dtype} {array.shape}, "
                f"its value {value.dtype} {value.shape}"
            )
    return VariableRecord(name, value.dtype.name, value.shape, saved.updates, tuple(saved.slots))


def _manifest(path: Path) -> tuple[Manifest, bytes]:
    """The manifest of a checkpoint's folder, and its text. Raises: Damaged, CheckpointError."""
    file = path / MANIFEST
    if parts.regular_size(file) > _MOST_MANIFEST_BYTES:
        raise Damaged(file, f"is larger than {_MOST_MANIFEST_BYTES} bytes")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise parts.unreadable(file, error) from error
    manifest = manifests.decode(data, file)
    named = folders.parse(path)
    if named and named.global_step != manifest.global_step:
        raise Damaged(file, f"is that of step {manifest.global_step}, unlike its folder's name")
    return manifest, data


def _read(path: Path, arrays: bool = True) -> tuple[Manifest, dict[str, Array]]:
    """Checks all of a checkpoint: sizes, then every bit, then what the files say they hold."""
    manifest, _ = _manifest(path)
    for record in manifest.files:
        parts.check_size(path / record.name, record)
    for record in manifest.files:
        parts.check_content(path / record.name, record)
    specs = {entry: Spec(v.dtype, v.shape) for v in manifest.variables for entry in v.entries()}
    found: dict[str, Array] = {}
    for record in manifest.files:
        for name, array in parts.read(path / record.name, specs, arrays).items():
            if name in found:
                raise Damaged(path / record.name, f"holds {name!r}, as an earlier file does")
            found[name] = array
    missing = specs.keys() - found.keys()
    if missing:
        raise Damaged(path / MANIFEST, f"lists {min(missing)!r}, which no file holds")
    return manifest, found


def _is_same(path: Path, sealed: bytes) -> bool:
    """Whether this checkpoint has that manifest, and is whole."""
    try:
        same = _manifest(path)[1] == sealed
        if same:
            verify(path)
    except CheckpointError:
        return False
    return same


def _is_whole(path: Path, trusted: set[Path]) -> bool:
    """Whether it would load. Reads all of it, unless it is trusted."""
    try:
        if path in trusted:
            for record in _manifest(path)[0].files:
                parts.check_size(path / record.name, record)
        else:
            verify(path)
    except CheckpointError:
        return False
    trusted.add(path)
    return True


def _is_ours(path: Path) -> bool:
    """Whether it is beyond doubt a checkpoint, with nothing of anybody else's in it."""
    try:
        _manifest(path)
        return folders.holds_only_ours(path)
    except CheckpointError:
        return False
