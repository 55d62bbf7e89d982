"""The names in a checkpoint folder: which are checkpoints, which unfinished, which a stranger's.

No content is read here. A checkpoint that is removed loses its name first, by one rename, so that a
removal that dies half-way leaves an unfinished folder behind and no damaged checkpoint.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from chief.files import Files, doing
from chief.manifest import PART
from paramserver.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d{12,19})(?:-(\d{1,9}))?", re.ASCII)
_TEMPORARY = re.compile(r"\.step-\d{12,19}(?:-\d{1,9})?\.tmp-[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True, order=True)
class Stored:
    """A checkpoint by its name alone. `copy` counts from 1 when a step was saved again."""

    global_step: int
    copy: int
    path: Path


def parse(path: Path) -> Stored | None:
    """What a name says: a checkpoint of which step, or None."""
    match = _NAME.fullmatch(path.name)
    if match:
        stored = Stored(int(match[1]), int(match[2] or 0), path)
        if path.name == name_of(stored.global_step, stored.copy):
            return stored
    return None


def name_of(step: int, copy: int = 0) -> str:
    """What the folder of a step is called; names sort as their steps do, up to 12 digits."""
    return f"step-{step:012d}" + (f"-{copy}" if copy else "")


def temporary(folder: Path, name: str) -> Path:
    """A fresh name for something on its way to be called `name`, or on its way out."""
    return folder / f".{name}.tmp-{secrets.token_hex(8)}"


def list_checkpoints(folder: Path | str) -> list[Stored]:
    """What is there by name, newest first. Cheap: nothing is opened. Raises: CheckpointError."""
    folder = Path(folder)
    found = (parse(folder / name) for name in names(folder))
    return sorted((stored for stored in found if stored), reverse=True)


def names(folder: Path) -> list[str]:
    """The names in a folder, sorted; none if there is no such folder. Raises: CheckpointError."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot read {folder}: {error.strerror}; check it, or choose another --checkpoint-dir"
        ) from error


def holds_only_ours(path: Path) -> bool:
    """Whether it is a real folder with nothing in it that this program would not have put there."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(name == MANIFEST or PART.fullmatch(name) for name in names(path))


def sweep(folder: Path, files: Files) -> None:
    """Clears away what saves and removals left unfinished. Raises: CheckpointError."""
    for name in names(folder):
        if _TEMPORARY.fullmatch(name) and holds_only_ours(folder / name):
            discard(folder / name, files)


def discard(unfinished: Path, files: Files) -> None:
    """Removes a folder under a temporary name, and what is in it. Raises: CheckpointError."""
    for name in names(unfinished):
        with doing("remove", unfinished / name):
            files.remove(unfinished / name)
    with doing("remove", unfinished):
        files.remove_folder(unfinished)


def remove(checkpoint: Path, files: Files) -> None:
    """Removes a checkpoint: first its name, in one instant. Raises: CheckpointError."""
    unfinished = temporary(checkpoint.parent, checkpoint.name)
    with doing("remove", checkpoint):
        files.rename(checkpoint, unfinished)
        files.sync_folder(checkpoint.parent)
    discard(unfinished, files)
