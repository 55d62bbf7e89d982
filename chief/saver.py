"""A checkpoint folder in use: when to save, where to restore from, how many to keep. No gRPC here.

A save that fails is tried again; the job goes on meanwhile. The folder is locked: one chief at a
time saves into it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from chief import checkpoint as checkpoints
from chief.checkpoint import Checkpoint
from chief.files import REAL, Files, Lock
from chief.flags import Settings
from paramserver.errors import CheckpointError, FailedPreconditionError

_log = logging.getLogger(__name__)


class Saver:
    """The checkpoints of one job in one folder. One thread uses it."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        files: Files = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder = folder
        #: The step that was saved or restored last; -1: none, or it is not known to be this job's.
        self.saved_step = -1
        #: Why the last save failed; empty if it did not.
        self.failure = ""
        self._settings = settings
        self._files = files
        self._clock = clock
        # Where the schedule counts from: a step and a time.
        self._base, self._since = 0, clock()
        self._not_before = 0.0
        self._trusted: set[Path] = set()
        self._lock: Lock | None = None

    def lock(self, holder: str) -> None:
        """Takes the folder, creating it if need be. Raises: CheckpointError naming who has it."""
        if self._lock is None:
            self._lock = Lock(self.folder, holder)

    def release(self) -> None:
        """Lets the next chief have the folder. Idempotent."""
        if self._lock:
            self._lock.release()
            self._lock = None

    def find(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; a line for each that was passed over. Blocks.

        Raises: CheckpointError if there are some and none is whole."""
        found, skipped = checkpoints.find(self.folder)
        for each in skipped:
            _log.warning("event=checkpoint-skipped path=%s reason=%r", each.path, each.reason)
        if found and found.path:
            self._trusted.add(found.path)
        return found

    def check_history(self, step: int) -> None:
        """Refuses to save a job at `step` into a folder that is ahead of it: it would mix two
        histories. Blocks. Raises: FailedPreconditionError saying how to go on; CheckpointError."""
        newest = next(iter(checkpoints.list_checkpoints(self.folder)), None)
        found = self.find() if newest and newest.global_step > step else None
        if found and found.global_step > step:
            raise FailedPreconditionError(
                f"the running job is at step {step}, but {self.folder} has step "
                f"{found.global_step}: give another --checkpoint-dir to go on with the running "
                "job, or restart its parameter servers to go on from the checkpoint"
            )

    def adopted(self, step: int) -> None:
        """Takes note of a job that goes on from `step`, which is saved nowhere for all we know."""
        self.saved_step, self._base, self._since = -1, step, self._clock()

    def restored(self, step: int) -> None:
        """Takes note of a job that goes on from the checkpoint of `step`."""
        self.saved_step, self._base, self._since = step, step, self._clock()

    @property
    def ready(self) -> bool:
        """False for a while after a save that failed."""
        return self._clock() >= self._not_before

    def due(self, step: int) -> bool:
        """Whether a job at `step` is to be saved now."""
        if step == self.saved_step or not self.ready:
            return False
        if self.saved_step < 0:
            return True  # adopted: the newest checkpoint may be far behind
        by_time = 0 < self._settings.save_secs <= self._clock() - self._since
        return by_time or 0 < self.next_step() <= step

    def next_step(self, at_least: int = 0) -> int:
        """The next step that is to be saved: a multiple of --save-steps; 0: not by steps."""
        every = self._settings.save_steps
        if not every or not self.ready:
            return 0
        return max(self._base // every + 1, -(-at_least // every)) * every

    def save(self, checkpoint: Checkpoint) -> None:
        """Writes it, then removes what is too many. Blocks. Raises: CheckpointError."""
        began = self._clock()
        path = checkpoints.save(self.folder, checkpoint, self._files)
        self._trusted.add(path)
        self.restored(checkpoint.global_step)
        self.failure, self._not_before = "", 0.0
        _log.info(
            "event=saved step=%d path=%s seconds=%.3f",
            checkpoint.global_step,
            path,
            self._clock() - began,
        )
        try:
            checkpoints.prune(self.folder, self._settings.keep, self._files, self._trusted)
        except CheckpointError as error:
            _log.warning("event=prune-failed reason=%r", str(error))

    def failed(self, reason: str, again_s: float) -> None:
        """Takes note of a save that did not come about, to be tried again in `again_s` seconds."""
        if reason != self.failure:
            _log.warning("event=save-failed reason=%r again_in_s=%.3g", reason, again_s)
        self.failure, self._not_before = reason, self._clock() + again_s
