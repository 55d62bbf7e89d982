"""The text that describes a checkpoint, and the seal on it. No gRPC, no arrays, no file here.

A manifest is JSON. Its first line carries the SHA-256 of every byte after that line, so that
`tail -n +2 manifest.json | sha256sum` checks it, and one flipped bit anywhere in it is found:

    {"sha256": "…",
    "format": "paramserver checkpoint",
    "version": 1,
    …

The files it lists carry their own SHA-256: the seal of the manifest is the seal of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paramserver.errors import CheckpointError

FORMAT = "paramserver checkpoint"
#: Grows when an older program could not read what a newer one writes.
VERSION = 1

#: A JSON object: text keys; values are such objects, lists, texts, numbers, booleans or None.
Json = dict[str, Any]

PART = re.compile(r"part-\d{5,}\.safetensors", re.ASCII)
_SLOT = re.compile(r"\w{1,64}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_FIRST_LINE = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')
_DTYPES = ("float32", "float64")
_MOST_STEPS = (1 << 63) - 1

_T = TypeVar("_T")


class Damaged(CheckpointError):
    """A file is not what was saved: the checkpoint counts for nothing, an older one may do.

    `reason` is the message without the folder and the remedy."""

    def __init__(self, path: Path, reason: str) -> None:
        self.reason = f"{path.name} {reason}"
        super().__init__(
            f"{path} {reason}; put back a copy of it, "
            f"or move {path.parent} away to use an older checkpoint"
        )


@dataclass(frozen=True)
class FileRecord:
    """One file of arrays: its name within the folder, its size in bytes, its SHA-256 in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class VariableRecord:
    """What was saved of one variable. Its slots have its dtype and shape.

    `updates` is the number of updates the slots have seen (Adam's t)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    updates: int
    slots: tuple[str, ...]

    def entries(self) -> Iterator[str]:
        """What its arrays are called in the files: the value, then the slots in their order."""
        yield value_entry(self.name)
        for slot in self.slots:
            yield slot_entry(slot, self.name)


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its arrays."""

    global_step: int
    rounds: int
    job: Json
    variables: tuple[VariableRecord, ...]
    shards: Sequence[Json]
    members: Sequence[Json]
    files: tuple[FileRecord, ...]


def value_entry(name: str) -> str:
    """What a variable's value is called in the files, whichever shard held it."""
    return f"value/{name}"


def slot_entry(slot: str, name: str) -> str:
    """What a variable's slot is called. No slot's name has a slash, so no two entries collide."""
    return f"slot/{slot}/{name}"


def encode(manifest: Manifest) -> bytes:
    """The sealed text. The same manifest always gives the same bytes.

    Raises: CheckpointError for a value that could not be read back: not JSON, NaN, a bad name."""
    body: Json = {
        "format": FORMAT,
        "version": VERSION,
        "global_step": manifest.global_step,
        "rounds": manifest.rounds,
        "job": manifest.job,
        "variables": [
            {"name": v.name, "dtype": v.dtype, "shape": list(v.shape)}
            | {"updates": v.updates, "slots": list(v.slots)}
            for v in manifest.variables
        ],
        "shards": list(manifest.shards),
        "members": list(manifest.members),
        "files": [{"name": f.name, "size": f.size, "sha256": f.sha256} for f in manifest.files],
    }
    try:
        _manifest(body)
        lines = [f"{_text(key)}: {_lines(value, key)}" for key, value in body.items()]
    except _Wrong as error:
        raise CheckpointError(f"cannot save: {error}") from error
    rest = (",\n".join(lines) + "\n}\n").encode()
    return b'{"sha256": "%s",\n' % hashlib.sha256(rest).hexdigest().encode() + rest


def decode(data: bytes, path: Path) -> Manifest:
    """Reads a sealed text; `path` is only named. Nothing in it is believed before the seal is.

    Raises: Damaged; CheckpointError if a newer version of this program wrote it."""
    first = _FIRST_LINE.match(data)
    if not first:
        raise Damaged(path, "does not begin with a checksum: it is damaged, or none of ours")
    if hashlib.sha256(data[first.end() :]).hexdigest() != first[1].decode():
        raise Damaged(path, "does not match its own checksum")
    try:
        body = json.loads(data)
        if _get(body, "format", str) != FORMAT:
            raise _Wrong(f"key 'format' is {body['format']!r}, not {FORMAT!r}")
        version = _get(body, "version", int)
        if version <= VERSION:
            return _manifest(body)
    except (_Wrong, ValueError, RecursionError) as error:
        raise Damaged(path, f"cannot be understood: {error}") from error
    raise CheckpointError(
        f"{path} has format version {version}, this program reads up to {VERSION}; "
        f"use the newer program, or move {path.parent} away to use an older checkpoint"
    )


class _Wrong(Exception):
    """What is wrong with a manifest's content: names the key."""


def _manifest(body: Any) -> Manifest:
    """Checks every value, then makes a Manifest of them. Raises: _Wrong."""
    manifest = Manifest(
        global_step=_count(body, "global_step"),
        rounds=_count(body, "rounds"),
        job=_get(body, "job", dict),
        variables=tuple(_variable(item) for item in _get(body, "variables", list)),
        shards=_objects(body, "shards"),
        members=_objects(body, "members"),
        files=tuple(_file(item) for item in _get(body, "files", list)),
    )
    _unique([v.name for v in manifest.variables], "variables")
    _unique([f.name for f in manifest.files], "files")
    return manifest


def _variable(item: Any) -> VariableRecord:
    name = _get(item, "name", str)
    dtype = _get(item, "dtype", str)
    shape = _get(item, "shape", list)
    slots = _get(item, "slots", list)
    if not name or not name.isprintable():
        raise _Wrong(f"variable name {name[:80]!r} is empty or has characters that do not print")
    if dtype not in _DTYPES:
        raise _Wrong(f"variable {name!r} has dtype {dtype}; only {' and '.join(_DTYPES)} are saved")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise _Wrong(f"variable {name!r} has shape {shape}")
    if not all(isinstance(slot, str) and _SLOT.fullmatch(slot) for slot in slots):
        raise _Wrong(f"variable {name!r} has slots {slots}: letters, digits and _ only")
    _unique(slots, f"variable {name!r}, slots")
    return VariableRecord(name, dtype, tuple(shape), _count(item, "updates"), tuple(slots))


def _file(item: Any) -> FileRecord:
    name = _get(item, "name", str)
    if not PART.fullmatch(name):
        raise _Wrong(f"file name {name[:80]!r} is not of the form part-00000.safetensors")
    sha256 = _get(item, "sha256", str)
    if not _SHA256.fullmatch(sha256):
        raise _Wrong(f"key 'sha256' of file {name!r} is {sha256[:80]!r}")
    return FileRecord(name, _count(item, "size"), sha256)


def _get(body: Any, key: str, kind: type[_T]) -> _T:
    if not isinstance(body, dict) or key not in body:
        raise _Wrong(f"key {key!r} is missing")
    value = body[key]
    if type(value) is not kind:
        raise _Wrong(f"key {key!r} is {str(value)[:80]!r}, not of type {kind.__name__}")
    return value


def _count(body: Any, key: str) -> int:
    value = _get(body, key, int)
    if not 0 <= value <= _MOST_STEPS:
        raise _Wrong(f"key {key!r} is {value}, outside 0 to {_MOST_STEPS}")
    return value


def _objects(body: Any, key: str) -> list[Json]:
    items = _get(body, key, list)
    if not all(isinstance(item, dict) for item in items):
        raise _Wrong(f"key {key!r} holds something that is not an object")
    return items


def _unique(names: list[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _Wrong(f"{where}: {name!r} is there twice")
        seen.add(name)


def _text(value: object) -> str:
    return json.dumps(value, allow_nan=False)


def _lines(value: object, key: str) -> str:
    """JSON with one line for each item of a list, so that people can read it. Raises: _Wrong."""
    try:
        if isinstance(value, list) and value:
            return "[\n" + ",\n".join(_text(item) for item in value) + "\n]"
        return _text(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _Wrong(f"key {key!r} does not fit into JSON: {error}") from error
