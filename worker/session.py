"""The training loop: pull, compute, push, until the job's limit.

First stop in the walk of one Push. A step's push and the next pull share one round trip. Which
batch a step reads follows from the worker's clock, which comes with the parameters: a restore that
rewinds the parameters rewinds the data with them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Protocol

from paramserver.client import Client
from paramserver.errors import AbortedError, NotInitializedError, ParamServerError
from paramserver.params import Params
from worker.data import Batch
from worker.hooks import Hook, RunContext, RunValues
from worker.models import Model, evaluate

_log = logging.getLogger(__name__)

#: A loop gives up when so many steps in a row were lost: it would go on without ever moving.
MAX_LOST_IN_A_ROW = 20


class Batches(Protocol):
    """Where batches come from; `worker.data.Batches` is one."""

    def batch(self, clock: int) -> Batch:
        """The batch of step `clock`, from 0: the same clock, the same batch."""
        ...


@dataclass(frozen=True)
class Summary:
    """What a session came to. `params` are those of the last pull, final if `complete`."""

    params: Params
    #: This worker's steps that count, and those whose push was lost with a server or a lease.
    steps: int
    dropped: int
    first_loss: float | None
    last_loss: float | None
    seconds: float
    #: Why it ended before the job did; empty if it did not.
    stopped: str = ""
    #: The model's metrics over the test set, if there is one.
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def global_step(self) -> int:
        """The job's step that `params` are of."""
        return self.params.version

    @property
    def complete(self) -> bool:
        """Whether the job is over."""
        return self.params.complete


class TrainingSession:
    """One worker's part in a job.

    `client` must have a worker's name; it stays the caller's, to be closed by it. `test` is what
    the final parameters are evaluated on. `overlap`: the next batch is prepared while a step's push
    and pull are on their way. `run` blocks, in one thread; `request_stop` may be called
    by any."""

    def __init__(
        self,
        client: Client,
        model: Model,
        batches: Batches,
        hooks: Sequence[Hook] = (),
        *,
        test: Batch | None = None,
        overlap: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.client = client
        self.model = model
        self.batches = batches
        self.hooks = tuple(hooks)
        #: This worker's steps so far, over all runs of this session.
        self.steps = 0
        #: Steps that were computed and do not count, because a server or our lease was lost.
        self.dropped = 0
        self._test = test
        self._overlap = overlap
        self._prepared: tuple[int, Batch] | None = None
        self._clock = clock
        self._first_loss: float | None = None
        self._last_loss: float | None = None
        self._lost_in_a_row = 0
        self._stop = ""

    @property
    def should_stop(self) -> bool:
        """Whether somebody asked for the end."""
        return bool(self._stop)

    def request_stop(self, reason: str = "asked to stop") -> None:
        """Ends the loop after the step under way. Returns at once; the first reason stays. To end a
        wait as well, close the client."""
        self._stop = self._stop or reason

    def run(self) -> Summary:
        """Trains until the job is complete or somebody asks to stop, then leaves the job.

        A server that restarts is waited for, as long as the client's `connect_timeout`; a step that
        was lost with it is counted in `dropped`. Raises: what a model or a hook raises; what
        `Client.pull` and `Client.push_pull` raise and waiting cannot cure."""
        started = self._clock()
        with self._taking_part():
            params = self.client.pull()

            while not params.complete and not self.should_stop:
                batch = self._batch(params.clock)
                context = RunContext(self, params, batch)
                for hook in self.hooks:
                    hook.before_run(context)

                loss, grads = self.model.loss_and_grads(params, batch)

                for hook in self.hooks:
                    hook.before_push(context, loss, grads)
                if self.should_stop:
                    break
                try:
                    params = self.client.push_pull(
                        grads, examples=len(batch), meanwhile=self._preparing(params.clock + 1)
                    )
                except (AbortedError, NotInitializedError) as error:
                    self._lost(error)
                    params = self.client.pull()
                else:
                    self._count(context, loss, params)

        metrics = evaluate(self.model, params, self._test) if self._test is not None else {}
        return Summary(
            params,
            self.steps,
            self.dropped,
            self._first_loss,
            self._last_loss,
            self._clock() - started,
            "" if params.complete else self._stop,
            metrics,
        )

    def _preparing(self, clock: int) -> Callable[[], None] | None:
        """What to do while a step is on its way: the batch of the next one, most likely."""

        def prepare() -> None:
            self._prepared = clock, self.batches.batch(clock)

        return prepare if self._overlap else None

    def _batch(self, clock: int) -> Batch:
        """The batch of step `clock`, prepared or not."""
        prepared, self._prepared = self._prepared, None
        return prepared[1] if prepared and prepared[0] == clock else self.batches.batch(clock)

    def _count(self, context: RunContext, loss: float, params: Params) -> None:
        """A step has been pushed; `params` are what came back."""
        result = self.client.last_result
        if result is None or not result.applied:
            return  # the job was over
        self._lost_in_a_row = 0
        self.steps += 1
        self._last_loss = loss
        if self._first_loss is None:
            self._first_loss = loss
        values = RunValues(self.steps, params.version, loss, len(context.batch), result)
        for hook in self.hooks:
            hook.after_run(context, values)

    def _lost(self, error: ParamServerError) -> None:
        """A step counts no more. Raises: `error` if none has counted for too long."""
        self.dropped += 1
        self._lost_in_a_row += 1
        if self._lost_in_a_row >= MAX_LOST_IN_A_ROW:
            raise error
        _log.warning("event=dropped steps=%d reason=%r", self.dropped, str(error))

    @contextmanager
    def _taking_part(self) -> Iterator[None]:
        """Around the loop: tells the hooks, and leaves the job, whatever happens."""
        begun: list[Hook] = []
        failure: BaseException | None = None
        try:
            for hook in self.hooks:
                hook.begin(self)
                begun.append(hook)
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            # First, so that nobody waits for this worker while its hooks tidy up.
            with suppress(ParamServerError):
                self.client.leave(f"failed: {failure!r}" if failure else self._stop or "done")
            for hook in begun:
                hook.end(self, failure)
