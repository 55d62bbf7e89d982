"""The files that hold a checkpoint's arrays, in the safetensors format. No gRPC here.

A file is an 8-byte little-endian length, a JSON header of that length (name -> dtype, shape, byte
range) and the raw little-endian C-order arrays back to back: no pickle, readable from any language.
Files are written here as a stream, hashed on the way and never copied as a whole; they are read by
the safetensors library, and only once size and SHA-256 are those of the manifest.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from chief.files import Files, doing
from chief.manifest import Damaged, FileRecord
from paramserver.errors import CheckpointError

Array = npt.NDArray[np.floating]

#: What safetensors calls our dtypes.
_CODES: Mapping[str, str] = {"float32": "F32", "float64": "F64"}
#: How an array of either byte order is written: the code, and the dtype on disk.
_ON_DISK: Mapping[np.dtype[np.floating], tuple[str, np.dtype[np.floating]]] = {
    np.dtype(order + kind): (_CODES[np.dtype(kind).name], np.dtype("<" + kind))
    for order in "<>"
    for kind in ("f4", "f8")
}
#: Bytes of arrays in one file. An array larger than this has a file of its own.
PART_BYTES = 1 << 30
#: Bytes of header in one file: readers of the format refuse more than 100 MB.
_MOST_HEADER_BYTES = 64 << 20
_ALIGN = 8
_BLOCK = 4 << 20
#: What the system answers when the file itself is at fault, and not the moment.
_FILE_AT_FAULT = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO)


@dataclass(frozen=True)
class Spec:
    """What an entry must look like."""

    dtype: str
    shape: tuple[int, ...]


def split(
    entries: Iterable[tuple[str, Array]], part_bytes: int = PART_BYTES
) -> Iterator[dict[str, Array]]:
    """Deals entries out to files in the order given, at most `part_bytes` of arrays to each."""
    part: dict[str, Array] = {}
    arrays = header = 0
    for name, array in entries:
        line = 4 * len(name) + 24 * array.ndim + 96  # an upper bound
        full = arrays + array.nbytes > part_bytes or header + line > _MOST_HEADER_BYTES
        if part and full:
            yield part
            part, arrays, header = {}, 0, 0
        part[name] = array
        arrays += array.nbytes
        header += line
    if part:
        yield part


def write(path: Path, part: Mapping[str, Array], files: Files) -> FileRecord:
    """Writes one file of float32 and float64 arrays durably. The arrays are only read.

    Holds no copy beyond one array, and that only if it is not little-endian and C-order already.
    Raises: CheckpointError."""
    # The widest first: then every array starts at a multiple of its item size.
    ordered = dict(sorted(part.items(), key=lambda entry: -entry[1].itemsize))
    header = _header(ordered)
    digest, size = hashlib.sha256(), 0
    with doing("write", path), files.create(path) as file:
        for data in _bytes([len(header).to_bytes(8, "little"), header], ordered.values()):
            files.write(file, data)
            digest.update(data)
            size += len(data)
        files.sync(file)
    return FileRecord(path.name, size, digest.hexdigest())


def check_size(path: Path, record: FileRecord) -> None:
    """Cheap: is it there, and as long as it was? Raises: Damaged, CheckpointError."""
    size = regular_size(path)
    if size != record.size:
        raise Damaged(path, f"has {size} bytes, {record.size} were saved")


def check_content(path: Path, record: FileRecord) -> None:
    """Reads all of it: is every bit as it was? Raises: Damaged, CheckpointError."""
    check_size(path, record)
    try:
        with open(path, "rb", buffering=0) as file:
            digest = hashlib.file_digest(file, "sha256")
    except OSError as error:
        raise unreadable(path, error) from error
    if digest.hexdigest() != record.sha256:
        raise Damaged(path, "does not match its checksum in the manifest")


def read(path: Path, specs: Mapping[str, Spec], arrays: bool = True) -> dict[str, Array]:
    """The arrays of a file whose content was checked, or only their names -> empty arrays.

    Every one must be asked for in `specs`, in dtype and shape. The arrays are the caller's own.
    Raises: Damaged, CheckpointError."""
    found: dict[str, Array] = {}
    try:
        with safe_open(path, framework="np") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                piece = file.get_slice(name)
                _check_entry(path, name, piece.get_dtype(), tuple(piece.get_shape()), specs)
                found[name] = file.get_tensor(name) if arrays else np.empty(0)
    except SafetensorError as error:
        raise Damaged(path, f"is no safetensors file: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error
    return found


def regular_size(path: Path) -> int:
    """Bytes of a file, and no pipe, which would wait for ever. Raises: Damaged, CheckpointError."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise Damaged(path, "is not a regular file")
    return status.st_size


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error to raise: `Damaged` if the file is at fault, else one that a retry may cure."""
    if error.errno == errno.ENOENT:
        return Damaged(path, "is missing")
    if error.errno in _FILE_AT_FAULT:
        return Damaged(path, f"cannot be read: {error.strerror}")
    return CheckpointError(
        f"cannot read {path}: {error.strerror or error}; nothing says it is damaged, so no older "
        "checkpoint is used in its place: make it readable, or move its folder away"
    )


def _check_entry(
    path: Path, name: str, dtype: str, shape: tuple[int, ...], specs: Mapping[str, Spec]
) -> None:
    spec = specs.get(name)
    if spec is None:
        raise Damaged(path, f"holds {name[:300]!r}, which the manifest does not list")
    if (dtype, shape) != (_CODES[spec.dtype], spec.shape):
        raise Damaged(
            path,
            f"holds {name!r} as {dtype} {shape}, the manifest says "
            f"{_CODES[spec.dtype]} {spec.shape}",
        )


def _header(part: Mapping[str, Array]) -> bytes:
    """The JSON header, padded with spaces so that the arrays start at a multiple of 8."""
    entries, offset = {}, 0
    for name, array in part.items():
        entries[name] = {
            "dtype": _ON_DISK[array.dtype][0],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGN)


def _bytes(head: Iterable[bytes], arrays: Iterable[Array]) -> Iterator[bytes | memoryview]:
    """What the file consists of, in blocks that stay in the processor's cache while hashed."""
    yield from head
    for array in arrays:
        flat = np.asarray(array, dtype=_ON_DISK[array.dtype][1], order="C").reshape(-1)
        raw = flat.view(np.uint8).data
        for start in range(0, len(raw), _BLOCK):
            yield raw[start : start + _BLOCK]
