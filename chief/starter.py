"""How a job gets its state: initialised, restored or adopted. No files here (see `saver`).

The shards say what they hold, the checkpoint folder what there was; from these two follows what is
done (`Starter._decide`), at the start of a chief as after the loss of a shard:

    shards                          checkpoint   what is done
    whole, of one session           older        adopted; a higher limit raises its limit
    whole, of one session           newer        refused: two histories
    empty, or nothing trained yet   none         step 0 saved, then initialised
    anything else                   there is     all shards restored, in a new session
    anything else                   none         the job has failed

All shards roll back together, and nothing starts afresh once there was something to lose.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy.typing as npt

from chief import assemble
from chief.checkpoint import Checkpoint
from chief.flags import Settings
from chief.saver import Saver
from paramserver import codec, convert
from paramserver.control_client import ControlClient
from paramserver.errors import (
    CheckpointError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotInitializedError,
    PermissionDeniedError,
    UnavailableError,
)
from paramserver.job import Job
from paramserver.layout import Array, Variable, compare_models, model_fingerprint
from paramserver.placement import describe
from paramserver.retry import REPORT_S, RETRYABLE
from paramserver.survey import Status, check_model, check_set, how_far

_log = logging.getLogger(__name__)

#: More variables than this are not logged one by one.
MOST_LOGGED = 100


class Stopped(Exception):
    """The chief was asked to stop before the job was in hand."""


@dataclass(frozen=True)
class Started:
    """What was done, with how many shards, and at which global_step the job stands."""

    what: Literal["initialized", "restored", "adopted"]
    step: int
    shards: int

    def __str__(self) -> str:
        return f"chief of {self.shards} ps, {self.what} at step {self.step}"


class Starter:
    """Gets one job going, and going again. One thread uses it; setting `stop` interrupts it.

    `init` makes the variables of a fresh job, the same ones each time it is called."""

    def __init__(
        self,
        control: ControlClient,
        settings: Settings,
        init: Callable[[], Mapping[str, npt.ArrayLike]],
        saver: Saver | None,
        stop: threading.Event,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._settings = settings
        self._init = init
        self._saver = saver
        self._stop = stop
        self._clock = clock
        self._variables: list[Variable] = []
        #: The job in force, and the session that it is in; 0: none yet.
        self.job = settings.job()
        self.session = 0
        # How far the job was last known to be.
        self._step = 0

    def claim(self) -> None:
        """Becomes chief of servers that all answer; waits while an earlier chief may be dead.

        Raises: PermissionDeniedError naming who is chief; what `survey` raises."""
        self.survey()
        self._claim()

    def _claim(self) -> None:
        lease_left: dict[str, float] = {}
        said_at = -math.inf
        while True:
            try:
                self._control.claim()
                return
            except PermissionDeniedError as error:
                # A living holder renews its claim; a dead one's only runs out.
                facts = dict(error.metadata)
                if "peer" not in facts:
                    raise
                remaining = int(facts["lease-left-ms"]) / 1000
                if remaining > lease_left.get(facts["peer"], math.inf):
                    raise
                lease_left[facts["peer"]] = remaining
                if self._clock() - said_at > REPORT_S - 1:
                    said_at = self._clock()
                    _log.info("waiting for an earlier claim to end (%s)", error)
            if self._stop.wait(max(remaining / 4, 0.05)):
                raise Stopped

    def survey(self) -> list[Status]:
        """The status of all shards, once all answer.

        Raises: UnavailableError naming the one that stayed away; Stopped."""
        try:
            return self._control.survey(wait=self._stop.wait)
        except RETRYABLE as error:
            if self._stop.is_set():
                raise Stopped from error
            raise

    def settle(self, step: int = 0) -> Started:
        """Decides and does it (see the table above); again, if a shard goes away meanwhile. Blocks.

        `step` is how far the job was last known to be. Raises: ConfigError for servers that are not
        one job's; AlreadyExistsError or CheckpointError for another model, naming the difference;
        FailedPreconditionError for a job that is lost, or older than its newest checkpoint;
        CheckpointError; UnavailableError; PermissionDeniedError; Stopped."""
        self._step = step
        if not self._variables:
            arrays = self._initial_arrays()
            self._variables = [Variable(name, a.dtype.name, a.shape) for name, a in arrays.items()]
            self.job = replace(self.job, model=model_fingerprint(self._variables))
        until = self._clock() + self._control.connect_timeout
        while True:
            statuses = self.survey()
            try:
                self._claim()
                return self._decide(statuses)
            except (UnavailableError, DeadlineExceededError, NotInitializedError) as error:
                if self._clock() > until:
                    raise
                _log.warning("event=start-again reason=%r", str(error))
            if self._stop.wait(0.1):
                raise Stopped

    def _initial_arrays(self) -> dict[str, Array]:
        return {name: codec.initial_array(name, value) for name, value in self._init().items()}

    def _decide(self, statuses: Sequence[Status]) -> Started:
        """The table above."""
        state = how_far(statuses)
        held = [status for status in statuses if status.initialized]
        if state in ("whole", "broken"):
            check_set(statuses)
        if state == "whole" and self.session in (0, held[0].session):
            return self._adopt(statuses)
        running = state == "broken" or bool(self.session)
        # Where nobody is left to be asked, there may have been something.
        trained = any(s.version or s.global_step for s in held) or bool(self.session and not held)
        for status in held if state == "broken" else ():
            self.job = _with_limit(self.job, status.roster.last_step)
        checkpoint = self._saver.find() if self._saver else None
        if checkpoint:
            return self._restore(checkpoint, len(statuses), running)
        if trained:
            raise FailedPreconditionError(self._lost(statuses))
        return self._initialize(len(statuses), empty=not held)

    def _adopt(self, statuses: Sequence[Status]) -> Started:
        """The job goes on as it is, with this chief. Its settings stay but for the limit."""
        head = statuses[0]
        check_model(statuses, self._variables)
        if self._saver:
            self._saver.check_history(head.global_step)
            self._saver.adopted(head.global_step)
        job = convert.job_from_proto(head.job)
        for what, theirs, ours in _changes(assemble.job_to_json(job), self.job):
            _log.warning("event=keep %s: the running job has %s, not %s", what, theirs, ours)
        raised = _with_limit(job, self.job.last_step)
        if raised.last_step != job.last_step:
            self._control.configure(raised.last_step)
            _log.info("event=raise last_step=%d before=%d", raised.last_step, job.last_step)
        elif self._settings.last_step != job.last_step:
            _log.warning("event=keep last_step=%d: a limit is never lowered", job.last_step)
        self.job, self.session, self._step = raised, head.session, head.global_step
        return Started("adopted", self._step, len(statuses))

    def _restore(self, checkpoint: Checkpoint, shards: int, running: bool) -> Started:
        """All shards go back to a checkpoint, in a new session."""
        try:
            return self._restored(checkpoint, shards, running)
        except CheckpointError as error:
            if str(checkpoint.path) in str(error):
                raise
            raise CheckpointError(
                f"{checkpoint.path}: {error}; move that folder away to go back to the one before"
            ) from error

    def _restored(self, checkpoint: Checkpoint, shards: int, running: bool) -> Started:
        found = assemble.variables_of(checkpoint)
        if difference := compare_models(found, self._variables, "in the checkpoint"):
            raise CheckpointError(
                f"{checkpoint.path} is of another model: {difference}; give the --model and --data "
                "it was made with, or another --checkpoint-dir to start afresh"
            )
        kept = assemble.keeps_slots(checkpoint, self.job)
        if not kept or assemble.optimizer_of(checkpoint) != self.job.optimizer.kind:
            _log.warning(
                "event=fresh-slots optimizer=%s before=%s: weights are kept, slots start afresh",
                self.job.optimizer.kind,
                assemble.optimizer_of(checkpoint),
            )
        for what, before, now in _changes(checkpoint.job, self.job):
            _log.info("event=change %s: %s, before %s", what, now, before)
        lost = self._step - checkpoint.global_step
        if lost > 0:
            _log.warning("event=lost-steps steps=%d back_to=%d", lost, checkpoint.global_step)
        self._load(checkpoint, shards, running, fresh=False)
        return Started("restored", self._step, shards)

    def _initialize(self, shards: int, empty: bool) -> Started:
        """A fresh job. Step 0 is on disk before anything is on a shard: one that is lost early can
        be brought back."""
        checkpoint = assemble.initial(self._initial_arrays(), self.job, shards)
        if self._saver:
            self._saver.save(checkpoint)
        self._load(checkpoint, shards, running=False, fresh=empty)
        return Started("initialized", 0, shards)

    def _load(self, checkpoint: Checkpoint, shards: int, running: bool, fresh: bool) -> None:
        session = secrets.randbits(64) or 1
        divided = assemble.divide(checkpoint, self.job, shards, session, await_members=running)
        lines = describe([shard.state.variables for shard in divided])
        for line in lines if len(self._variables) <= MOST_LOGGED else lines[-shards:]:
            _log.info("event=place %s", line)
        self._control.load(divided, restore=not fresh)
        self.session, self._step = session, checkpoint.global_step
        if self._saver:
            self._saver.restored(checkpoint.global_step)

    def _lost(self, statuses: Sequence[Status]) -> str:
        """Why a job is beyond help."""
        empty = [p for p, s in zip(self._control.peers, statuses, strict=True) if not s.initialized]
        step = max(self._step, *(status.global_step for status in statuses))
        saver = self._saver
        where = f"{saver.folder} has no checkpoint" if saver else "no --checkpoint-dir is set"
        return (
            f"the job is lost at step {step}: {', '.join(empty) or 'some shard'} came back without "
            f"its variables, and there is nothing to restore from ({where}); end the parameter "
            "servers and start the job afresh"
        )


def _with_limit(job: Job, last_step: int) -> Job:
    """The job with the higher of two limits; 0, no limit, is the highest."""
    if job.last_step and (not last_step or last_step > job.last_step):
        return replace(job, last_step=last_step)
    return job


def _changes(before: Mapping[str, object], job: Job) -> list[tuple[str, str, str]]:
    """What differs between a job's settings as saved and now: (what, before, now). No limits."""
    now = assemble.job_to_json(job)
    pairs = [(key, before.get(key), now[key]) for key in ("consistency", "optimizer")]
    old = before.get("settings")
    old = old if isinstance(old, dict) else {}
    pairs += [(key, old[key], value) for key, value in now["settings"].items() if key in old]
    return [(key, _shown(old), _shown(new)) for key, old, new in pairs if old != new]


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_shown(each)}" for key, each in value.items())
    return str(value)
