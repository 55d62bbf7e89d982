"""What a chief does from a job's first minute to its last: watches over it, saves it, brings it
back when a shard is lost, and says that it is over. No files here (see `saver`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping

import numpy.typing as npt

from chief import assemble
from chief.files import REAL, Files
from chief.flags import Settings
from chief.pace import Pace
from chief.saver import Saver
from chief.starter import Started, Starter, Stopped
from paramserver.control_client import ControlClient
from paramserver.errors import (
    CheckpointError,
    DeadlineExceededError,
    FailedPreconditionError,
    ParamServerError,
    PermissionDeniedError,
)
from paramserver.job import Job
from paramserver.retry import REPORT_S
from paramserver.survey import Status

_log = logging.getLogger(__name__)

#: A job that does not move is explained this often, in seconds.
SAY_EVERY_S = 8.0

#: A save is begun this long before its step is there, so that it is cut exactly there, in seconds.
AHEAD_S = 0.2

#: How long it takes a plan to reach the shards: what comes sooner can only be cut late.
LEAD_S = 0.01

#: Workers started together with a chief that finds the job over get this long to hear of it.
LATECOMERS_S = 3.0


class Supervisor:
    """The chief of one job: `start`, then `run`, both in one thread. `stop` may be called by any.

    `control` stays the caller's, and closing it gives up being chief. `init` makes the variables of
    a fresh job (name -> array); it is also called to compare them with those that are there, and
    must make the same ones each time."""

    def __init__(
        self,
        control: ControlClient,
        settings: Settings,
        init: Callable[[], Mapping[str, npt.ArrayLike]],
        *,
        files: Files = REAL,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control = control
        self._workers = settings.workers
        self._clock = clock
        self._stop = threading.Event()
        self._saver: Saver | None = None
        if settings.checkpoint_dir is not None:
            self._saver = Saver(settings.checkpoint_dir, settings, files, clock)
        self._starter = Starter(control, settings, init, self._saver, self._stop, clock)
        self._pace = Pace(control.lease_s)
        #: The job's global_step at the last look.
        self.step = 0
        self._seen: set[str] = set()
        self._started_at = math.inf
        self._complete_since: float | None = None
        self._said_done = False
        # How long the last look took, in seconds.
        self._look_s = 0.0
        self._said = ("", 0.0)
        # The step at which the job was last seen to move, and when; when its rest was last told.
        self._moved = (-1, clock())
        self._idle_said = -math.inf

    @property
    def job(self) -> Job:
        """The settings in force, once started."""
        return self._starter.job

    def stop(self) -> None:
        """Ends `start` and `run` soon, after a save under way. The job goes on without a chief."""
        self._stop.set()

    def start(self) -> Started:
        """Becomes chief and gets the job going, whatever there is (see `starter`). Blocks.

        Raises: PermissionDeniedError naming who is chief; Stopped; what `Starter.settle` raises."""
        try:
            self._starter.claim()
            if self._saver:
                self._saver.lock(self._control.holder)
            started = self._starter.settle()
        except BaseException:
            self._release()
            raise
        self._pace = Pace(self._control.lease_s)
        self._started_at = self._clock()
        return started

    # -- the run -------------------------------------------------------------------------------

    def run(self) -> bool:
        """Watches over the job until it is over: True; or until `stop`: False. Blocks.

        At the end the last step is saved, the workers are waited for (a lease at most, unless they
        still compute), and the shards are told that the job is done. Raises: what `start` raises,
        when a shard is lost for good; PermissionDeniedError if somebody else became chief;
        CheckpointError if the end could not be saved."""
        try:
            while not self._stop.is_set():
                if self._tick():
                    return True
            return False
        except Stopped:
            return False
        finally:
            self._release()

    def _tick(self) -> bool:
        """One look, and what follows from it; True: the job is over and everybody knows."""
        self._control.check()
        statuses = self._look()
        if not statuses:
            return True
        head, now = statuses[0], self._clock()
        self.step = head.global_step
        self._pace.saw(self.step, len(head.workers), now)
        self._seen.update(worker.worker for worker in head.workers)
        self._seen.update(gone.worker for gone in head.roster.departed)
        self._say_if_idle(head, now)
        last = self.job.last_step
        steps = last - self.step if last else 1 << 62
        if steps <= 0:
            if self._end(head):
                return True
            steps = 0
        elif self._saver:
            self._save_if_due(self._saver, head, steps)
            steps = min(steps, max(0, self._saver.next_step() - self.step) or steps)
        self._stop.wait(self._pace.delay(steps, now, self._look_s))
        return False

    def _say_if_idle(self, head: Status, now: float) -> None:
        """A line every few seconds while the job does not move, with what it waits for."""
        if self.step != self._moved[0]:
            self._moved = self.step, now
        elif now - max(self._moved[1], self._idle_said) >= SAY_EVERY_S:
            self._idle_said = now
            why = "; ".join(head.waiting) or f"{len(head.workers)} workers take part, none pushes"
            _log.info("event=waiting step=%d reason=%r", self.step, why)

    def _look(self) -> list[Status]:
        """The shards' status in order, the job brought back first if need be. Empty: all is done,
        and ps:0 is gone."""
        while True:
            began = self._clock()
            answers = self._control.look()
            self._look_s = self._clock() - began
            statuses = [answer for answer in answers if isinstance(answer, Status)]
            session = self._starter.session
            if self._said_done:
                return [s for s in statuses if s.session == session and not s.shard_index]
            if len(statuses) < len(answers):
                statuses = self._starter.survey()
            peers = zip(self._control.peers, statuses, strict=True)
            lost = [peer for peer, status in peers if status.session != session]
            if not lost:
                return sorted(statuses, key=lambda status: status.shard_index)
            _log.warning("event=lost shards=%s step=%d", ",".join(lost), self.step)
            _log.warning("event=recovered %s", self._starter.settle(self.step))
            self._complete_since = None

    # -- saving --------------------------------------------------------------------------------

    def _save_if_due(self, saver: Saver, head: Status, steps_left: int) -> None:
        """Saves, if it is time. A step that is near is cut exactly, where the job's order of steps
        is known beforehand; else as soon as it is passed."""
        lead = math.ceil(self._pace.rate * LEAD_S)
        steps = saver.next_step(self.step + lead) - self.step
        ahead = _ahead(head, steps) if 0 < steps < steps_left else 0
        seconds = self._pace.seconds_to(steps)
        soon = ahead and self._pace.moving and seconds <= AHEAD_S
        if soon and self._save(saver, AHEAD_S + 2 * seconds, ahead):
            return
        if saver.due(self.step):
            self._save(saver, self._hold_s)

    @property
    def _hold_s(self) -> float:
        """How long pushes may be held: a worker that died in the middle of one is dropped by
        then."""
        return min(60.0, max(2.0, 1.5 * self._control.lease_s))

    def _save(
        self, saver: Saver, hold_s: float, ahead: Mapping[tuple[str, int], int] | int = 0
    ) -> bool:
        """Cuts, fetches and writes; whether it did. A failure is logged and tried again later."""
        try:
            saver.save(assemble.merge(self._control.snapshot(hold_s, ahead)))
            return True
        except PermissionDeniedError:
            raise
        except ParamServerError as error:
            slow = isinstance(error, DeadlineExceededError | FailedPreconditionError)
            if not (ahead and slow):  # else the job slowed down, and is saved where it is
                saver.failed(str(error), again_s=self._control.lease_s)
            return False

    # -- the end -------------------------------------------------------------------------------

    def _end(self, head: Status) -> bool:
        """The limit is reached: saves, lets the workers leave, tells the shards. True: all done."""
        if self._complete_since is None:
            self._complete_since = self._clock()
            _log.info("the limit is reached: step %d of %d", self.step, self.job.last_step)
        since = self._clock() - self._complete_since
        if self._saver and self._saver.saved_step != self.step:
            return self._save_the_end(self._saver, since)
        if not self._said_done:
            lease_s = self._control.lease_s
            awaited = [worker.worker for worker in head.workers]
            if awaited and since < lease_s:
                self._say(f"the job is done; waiting for {', '.join(awaited)} to leave")
                return False
            age = self._clock() - self._started_at
            if len(self._seen) < self._workers and age < min(LATECOMERS_S, lease_s):
                self._say("the job is done; waiting for workers that may be starting")
                return False
            self._said_done = True
        untold = self._control.shutdown(now=False, reason="the job is done")
        if untold:
            self._say(f"the job is done; waiting for {', '.join(untold)} to hear of it")
        return not untold

    def _save_the_end(self, saver: Saver, since: float) -> bool:
        """Saves the last step, again and again for as long as a server may stay away. False."""
        failed = saver.ready and not self._save(saver, self._hold_s)
        if failed and since > self._control.connect_timeout:
            raise CheckpointError(
                f"step {self.step} is the last and could not be saved: {saver.failure}; the "
                "parameter servers still hold it: mend this and start the chief again"
            )
        return False

    def _say(self, line: str) -> None:
        """Tells what is waited for: when it changes, and every few seconds."""
        before, since = self._said
        if line != before or self._clock() - since > REPORT_S - 1:
            self._said = line, self._clock()
            _log.info("%s", line)

    def _release(self) -> None:
        if self._saver:
            self._saver.release()


def _ahead(head: Status, steps: int) -> Mapping[tuple[str, int], int] | int:
    """What `ControlClient.snapshot` is to wait for, so that `steps` more steps are in the cut.

    A round is a step; of a single worker, so is a push. Else (0) nobody can say."""
    if head.job.consistency.workers:
        return head.rounds + steps
    if len(head.workers) == 1:
        worker = head.workers[0]
        return {(worker.worker, worker.incarnation): worker.sequence + steps}
    return 0
