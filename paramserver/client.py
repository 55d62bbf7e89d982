"""What a worker holds: pulls parameters, pushes gradients, over any number of shards as if over
one.

Second stop in the walk of one Push: the gradients are split by where their variables lie, encoded,
and sent to all shards at once, in one call a shard however many variables there are. A worker's
step reaches every shard, an empty message if need be, so that all clocks agree.

Every call may be repeated after a lost connection: a push carries (worker, incarnation, sequence),
and a shard counts it once. Heartbeats have a thread of their own: a worker in a long computation is
alive.
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Self, TypeVar

import numpy.typing as npt

from paramserver import cluster, codec, transport
from paramserver.connection import Connection, left, until
from paramserver.consistency import Async, Consistency
from paramserver.control_client import ControlClient
from paramserver.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotInitializedError,
    ParamServerError,
)
from paramserver.exchange import Exchange, Parts
from paramserver.gradients import pack
from paramserver.job import Job
from paramserver.link import Link
from paramserver.membership import worker_order
from paramserver.optimizers import SGD, Optimizer
from paramserver.params import Params, Ticket
from paramserver.push import PushResult
from paramserver.retry import backoff

_log = logging.getLogger(__name__)

_T = TypeVar("_T")
_RNG = random.Random()

#: `Client.close` gives calls in other threads this long to end before it cuts them off, in seconds.
CLOSE_S = 2.0


class Client:
    """One worker's (or reader's) view of all shards.

    `addresses`: "host:port[,host:port]" or a list, in any order: the shards say which is which.
    `worker`: "role:index", "worker:0"; without it the client can initialise and read, not take
    part. It joins at its first waiting pull or push. `connect_timeout`: seconds to keep trying when
    a shard cannot be reached or is empty. `on_wait`: told in words what is waited for; default: a
    log line.

    Thread-safe: one call at a time, others wait for it. Not usable in a forked child.
    Raises: ConfigError for addresses or a worker that cannot be; nothing is called yet."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        worker: str = "",
        *,
        connect_timeout: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
        keepalive_s: float = transport.KEEPALIVE_S,
        max_message_bytes: int = transport.MAX_MESSAGE_BYTES,
    ) -> None:
        self._addresses = cluster.parse_hosts(addresses, "addresses")
        if worker:
            worker_order(worker)
        self.worker = worker
        self._connect_timeout = connect_timeout
        self._keepalive_s = keepalive_s
        self._max_message_bytes = max_message_bytes
        self._on_wait = on_wait or (lambda line: _log.info("%s", line))
        self._conn = Connection(
            self._addresses,
            worker,
            connect_timeout,
            self._on_wait,
            lambda address: Link(address, keepalive_s, max_message_bytes),
        )
        self._pid = os.getpid()
        self._lock = threading.RLock()
        # Guarded by _lock.
        self._sequence = 0
        self._member = 0
        self._ticket: Ticket | None = None
        self._exchange = Exchange(self._conn)
        #: What became of this client's last push; None before the first.
        self.last_result: PushResult | None = None

    # -- the job -------------------------------------------------------------------------------

    def initialize(
        self,
        variables: Mapping[str, npt.ArrayLike],
        optimizer: Optimizer | None = None,
        consistency: Consistency | None = None,
        *,
        last_step: int = 0,
        settings: Mapping[str, str] | None = None,
    ) -> bool:
        """Gives the shards their variables, all or nothing; True if it did, False if this very
        model was there already (the first wins, nothing changes). Blocks.

        Raises: AlreadyExistsError that names what differs from the model that is there;
        PermissionDeniedError while somebody else is chief."""
        job = Job(
            optimizer=optimizer or SGD(),
            consistency=consistency or Async(),
            last_step=last_step,
            settings=settings or {},
        )
        arrays = {name: codec.initial_array(name, value) for name, value in variables.items()}
        with (
            self._call(),
            ControlClient(
                [str(a) for a in self._addresses],
                f"{self.worker or 'client'} (pid {self._pid})",
                connect_timeout=self._connect_timeout,
                on_wait=self._on_wait,
                keepalive_s=self._keepalive_s,
                max_message_bytes=self._max_message_bytes,
            ) as control,
        ):
            return control.initialize(arrays, job)

    def job(self, timeout: float | None = None) -> Job:
        """The job's settings. Blocks until the shards have been initialised."""
        with self._call():
            self._conn.connect(until(timeout))
            return self._conn.job

    def join(self, timeout: float | None = None) -> int:
        """Takes part from now on; how many shards the job has. Blocks like `job`, and while an
        earlier life of this worker may be alive. A waiting pull and a push do it by themselves.

        Raises: AlreadyExistsError while another process is this worker."""
        with self._call():
            return self._entering(lambda: len(self._conn.links), True, until(timeout))

    # -- pull ----------------------------------------------------------------------------------

    def pull(
        self,
        names: Sequence[str] | None = None,
        wait: bool = True,
        timeout: float | None = None,
        *,
        have: Params | None = None,
    ) -> Params:
        """The parameters (all, or `names`), of one version on each shard.

        `wait`: take part, that is wait for this worker's clock, and get the right to push one step;
        if the job is over, answers the final parameters with `complete`. Else read now. `have`:
        parameters pulled before; a shard that is still at their version sends no arrays, and the
        result shares theirs. Blocks; after a restore or a lost lease it joins again by itself.

        Raises: NotFoundError; DeadlineExceededError after `timeout` seconds; UnavailableError when
        a shard stays away for longer than `connect_timeout`."""
        names = [names] if isinstance(names, str) else names or ()
        with self._call():
            return self._pull(tuple(dict.fromkeys(names)), wait, until(timeout), have)

    def _pull(
        self, names: tuple[str, ...], wait: bool, deadline: float, have: Params | None = None
    ) -> Params:
        def attempt() -> Params:
            return self._exchange.pull(names, wait, deadline, have=have)

        params = self._entering(attempt, wait, deadline)
        if wait:
            self._ticket = params.ticket
        return params

    def _entering(self, attempt: Callable[[], _T], member: bool, deadline: float) -> _T:
        """`attempt()` once connected (and a `member`); again after a restore or a lost lease."""
        delays = backoff(0.05, 1.0, _RNG)
        give_up = None
        while True:
            try:
                if member:
                    self._enter(deadline)
                else:
                    self._conn.connect(deadline)
                return attempt()
            except (AbortedError, NotInitializedError) as error:
                now = time.monotonic()
                give_up = give_up or now + self._connect_timeout
                if now > min(deadline, give_up):
                    raise
                self._start_over(str(error))
                if self._conn.closing.wait(next(delays)):
                    raise

    # -- push ----------------------------------------------------------------------------------

    def push(
        self,
        grads: Mapping[str, npt.ArrayLike],
        params: Params | None = None,
        *,
        examples: int = 0,
        timeout: float | None = None,
    ) -> PushResult:
        """Pushes one step's gradients: name -> array of the variable's shape and dtype.

        Computed from the last waiting pull, or from `params`. Variables left out are not updated
        (in sync their gradient is zero); no gradients at all is a step all the same. Waits for no
        other worker, unless there was no pull: then it waits for its turn first. Blocks until all
        shards have answered; the answer is ps:0's. The arrays are only read, and only until it
        returns.

        Raises: InvalidArgumentError, NotFoundError before anything is sent; AbortedError if the
        step counts no more (pull again); UnavailableError if a shard stays away, and then it is not
        known whether the step counts."""
        with self._call():
            deadline = until(timeout)
            self._enter(deadline)
            parts = self._split(grads)
            ticket = self._use_ticket(params, deadline)
            if isinstance(ticket, PushResult):
                return ticket
            with self._step_or_nothing() as sequence:
                self.last_result = self._exchange.push(ticket, sequence, parts, examples, deadline)
            return self.last_result

    def push_pull(
        self,
        grads: Mapping[str, npt.ArrayLike],
        params: Params | None = None,
        *,
        examples: int = 0,
        timeout: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> Params:
        """`push` and the next waiting `pull` in one round trip, on a stream that stays open.

        The push's result is `client.last_result`. `meanwhile` is called while the two are on their
        way: to prepare the next batch, say; it must not write into the gradients. Raises what the
        two raise."""
        with self._call():
            deadline = until(timeout)
            self._enter(deadline)
            parts = self._split(grads)
            ticket = self._use_ticket(params, deadline)
            if isinstance(ticket, PushResult):
                return self._pull((), True, deadline)
            return self._turn(ticket, parts, examples, deadline, meanwhile)

    def _split(self, grads: Mapping[str, npt.ArrayLike]) -> list[Parts]:
        """The gradients by shard, in layout order, checked in full before anything is sent."""
        if not isinstance(grads, Mapping):
            raise InvalidArgumentError(
                f"gradients must be a mapping of name to array, not {type(grads).__name__}"
            )
        packed = [pack(link.layout, grads) for link in self._conn.links]
        if sum(found for _, found in packed) < len(grads):
            for name in grads:
                self._conn.link_of(name)  # raises NotFoundError for the one that nobody has
        return [parts for parts, _ in packed]

    def _use_ticket(self, params: Params | None, deadline: float) -> Ticket | PushResult:
        """The right to push one step, spent by this call; if the job is over, the push's refusal.

        Raises: AbortedError for params of another session."""
        ticket = params.ticket if params is not None else self._ticket
        if ticket is not None and (ticket.session, ticket.incarnation) != (
            self._conn.session,
            self._conn.incarnation,
        ):
            raise AbortedError(
                "the job was restored, or this worker joined again, since these parameters were "
                "pulled; pull again"
            )
        if ticket is not None and ticket.clock == self._conn.clock and ticket.step:
            self._ticket = None
            return ticket
        base = params.versions if params is not None else None
        fresh = self._exchange.pull((), True, deadline, header_only=True)
        self._ticket = None
        if fresh.complete or fresh.ticket is None:
            self.last_result = PushResult(
                False, "job_complete", fresh.versions[0], 0, fresh.version
            )
            return self.last_result
        if base is None:
            return fresh.ticket
        return Ticket(
            self._conn.session, self._conn.incarnation, self._conn.clock, fresh.ticket.step, base
        )

    def _turn(
        self,
        ticket: Ticket,
        parts: list[Parts],
        examples: int,
        deadline: float,
        meanwhile: Callable[[], object] | None,
    ) -> Params:
        """One turn on the streams that stay open. They have no deadline of their own."""
        timer = None
        if deadline < float("inf"):
            timer = threading.Timer(left(deadline), self._conn.end_turns)
            timer.daemon = True
            timer.start()
        try:
            with self._step_or_nothing() as sequence:
                self.last_result = self._exchange.push_turn(
                    ticket, sequence, parts, examples, deadline, meanwhile
                )
            try:
                params = self._exchange.pull_turn(deadline)
            except (AbortedError, NotInitializedError) as error:
                # The step is in; what comes after it is a pull like any other.
                self._start_over(str(error))
                return self._pull((), True, deadline)
            self._ticket = params.ticket
            return params
        except BaseException as error:
            self._conn.end_turns()
            if isinstance(error, ParamServerError) and not left(deadline):
                raise DeadlineExceededError(f"the deadline is over: {error}") from error
            raise
        finally:
            if timer:
                timer.cancel()

    @contextmanager
    def _step_or_nothing(self) -> Iterator[int]:
        """Around one push to all shards: the sequence number to use.

        If it does not go through everywhere, nobody knows which shards have it; the worker then
        leaves and will join as new, and ps:0's word decides."""
        sequence = self._sequence + 1
        try:
            yield sequence
        except BaseException as error:
            self._start_over(f"push {sequence} failed: {error}", leave=True)
            raise
        self._sequence = sequence
        self._conn.clock += 1

    def leave(self, reason: str = "done") -> None:
        """Takes no part any more: nobody waits for this worker. It may join again. Idempotent."""
        with self._call():
            self._conn.end_turns()
            self._conn.leave(reason)
            self._ticket = None

    def close(self) -> None:
        """Leaves, and ends all connections. Idempotent. Blocks for a few seconds at most.

        A call in another thread is interrupted: it raises FailedPreconditionError."""
        if self._pid == os.getpid():
            self._conn.closing.set()
            patience = until(CLOSE_S)
            while not self._lock.acquire(timeout=0.05):
                self._exchange.cancel()
                if not left(patience):
                    self._conn.cut()
            try:
                self._conn.close()
            finally:
                self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _enter(self, deadline: float) -> None:
        """Is connected and a member when it returns. A new membership counts its pushes from 1."""
        self._conn.connect(deadline)
        self._conn.join(deadline)
        if self._member != self._conn.incarnation:
            self._member, self._sequence, self._ticket = self._conn.incarnation, 0, None

    def _start_over(self, why: str, leave: bool = False) -> None:
        self._ticket = None
        self._conn.start_over(why, leave)

    # -- small things --------------------------------------------------------------------------

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Around every public call: one at a time, and only in the process that made the client."""
        if os.getpid() != self._pid:
            raise FailedPreconditionError(
                f"this client belongs to process {self._pid}; make a new one after a fork"
            )
        with self._lock:
            if self._conn.closing.is_set():
                raise FailedPreconditionError("this client is closed")
            try:
                yield
            except (ParamServerError, ValueError) as error:  # gRPC's ValueError: closed
                if self._conn.closing.is_set():
                    raise FailedPreconditionError("this client was closed meanwhile") from error
                raise
