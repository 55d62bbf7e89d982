"""What is done to the disk, one operation a method, and the lock on a folder. No gRPC, no arrays.

Everything that writes takes a `Files`, so that a test can hand in one that fails or dies. Reading
goes straight to the disk: it changes nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType

from paramserver.errors import CheckpointError

#: What a folder's fsync answers on file systems that have nothing to flush for it.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
_MOST_HOLDER_BYTES = 200


class Files:
    """The operations that change the disk. All block; all raise OSError; none is undone."""

    def make_folder(self, path: Path) -> None:
        """Creates one folder; its parent exists and it does not."""
        path.mkdir()

    def create(self, path: Path) -> FileIO:
        """Creates a file that does not exist yet. The caller closes it."""
        return open(path, "xb", buffering=0)

    def write(self, file: FileIO, data: bytes | memoryview) -> None:
        """Appends all of `data`, a flat buffer of bytes, however many system calls it takes."""
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]

    def sync(self, file: FileIO) -> None:
        """Returns once the file's content would outlive a power cut."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Returns once the names in the folder would outlive a power cut."""
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Gives a file or folder another name, in one instant."""
        source.rename(target)

    def remove(self, path: Path) -> None:
        """Removes a file."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Removes an empty folder."""
        path.rmdir()


#: The disk itself.
REAL = Files()


@contextmanager
def doing(what: str, path: Path) -> Iterator[None]:
    """Turns an OSError of the block into a CheckpointError that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free some space, or keep fewer checkpoints"
        else:
            remedy = "check the folder, or choose another --checkpoint-dir"
        raise CheckpointError(
            f"cannot {what} {path}: {error.strerror or error}; {remedy}"
        ) from error


def make_folders(path: Path, files: Files = REAL) -> None:
    """Creates a folder with all its missing parents, durably. Raises: CheckpointError."""
    with doing("create", path):
        missing = [p for p in (path, *path.parents) if not p.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):  # another process was quicker
                files.make_folder(folder)
            files.sync_folder(folder.parent)


class Lock:
    """One chief at a time saves into a folder: held from construction to `release`.

    The operating system drops it with the process, so a killed chief leaves nothing to clean up.
    The file `.lock` stays: removing it would let two processes hold two locks of the same name."""

    def __init__(self, folder: Path | str, holder: str) -> None:
        """Takes the lock without waiting, and creates the folder if need be.

        `holder` says who you are, for the other one's error message.
        Raises: CheckpointError that names the holder, if there is one."""
        self.path = Path(folder) / ".lock"
        make_folders(self.path.parent)
        with doing("open", self.path):
            self._handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with doing("lock", self.path):
                self._take(holder)
        except BaseException:
            os.close(self._handle)
            raise

    def _take(self, holder: str) -> None:
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = os.pread(self._handle, _MOST_HOLDER_BYTES, 0).decode(errors="replace")
            raise CheckpointError(
                f"{self.path.parent} is in use by {ascii(other) if other else 'another process'}; "
                "end that one, or choose another --checkpoint-dir"
            ) from None
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, holder.encode()[:_MOST_HOLDER_BYTES], 0)

    def release(self) -> None:
        """Lets the next one in. Does nothing the second time."""
        if self._handle >= 0:
            os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
