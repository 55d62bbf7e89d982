"""One client's place in the job: its links to all shards, its membership, and the roster it
carries.

`Connection` finds out which shard is which, joins at ps:0, keeps the lease alive from a thread of
its own, and passes ps:0's newest roster on to the other shards: with every call, and, while a call
waits there, with heartbeats. `Client` does the pulling and pushing on top of it.
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Sequence

from paramserver import convert
from paramserver.cluster import Address
from paramserver.errors import (
    AlreadyExistsError,
    ConfigError,
    FailedPreconditionError,
    NotFoundError,
    NotInitializedError,
    ParamServerError,
    UnavailableError,
)
from paramserver.job import Job
from paramserver.layout import some
from paramserver.link import NOTHING, Link
from paramserver.retry import RETRYABLE, Retry
from paramserver.v1 import job_pb2
from paramserver.v1 import parameter_pb2 as pb

_log = logging.getLogger(__name__)

#: Deadline of a call that carries no arrays and never waits, in seconds.
CALL_S = 30.0


class Connection:
    """The links of one client. One thread calls it (its owner holds a lock); `_beat_forever` is
    another."""

    def __init__(
        self,
        addresses: Sequence[Address],
        worker: str,
        connect_timeout: float,
        on_wait: Callable[[str], None],
        make_link: Callable[[Address], Link],
    ) -> None:
        self.worker = worker
        self.closing = threading.Event()
        #: The shards in order of index, once connected.
        self.links: list[Link] = []
        self.job = Job()
        self.session = 0
        self.incarnation = 0
        self.joined = False
        self.clock = 0
        self._addresses = addresses
        self._connect_timeout = connect_timeout
        self._on_wait = on_wait
        self._make_link = make_link
        self._all_links: dict[Address, Link] = {}
        self._lease_s = 10.0
        self._waited: tuple[str, float] = ("", 0.0)
        # Shared with the heartbeat thread.
        self._roster_lock = threading.Lock()
        self._roster = job_pb2.Roster(number=-1)
        self._news = threading.Event()
        self._heart: threading.Thread | None = None

    # -- connecting and joining ----------------------------------------------------------------

    def connect(self, deadline: float) -> None:
        """Asks all shards what they are, until they are one job. Blocks."""
        if self.session:
            return
        for address in self._addresses:
            if address not in self._all_links:
                self._all_links[address] = self._make_link(address)
        links = list(self._all_links.values())
        retry: Retry | None = None
        while True:
            found: dict[int, tuple[Link, pb.JoinResponse]] = {}
            for link in links:
                while True:
                    try:
                        answer = link.join(pb.Caller(), min(CALL_S, left(deadline)))
                        break
                    except NotInitializedError as error:
                        empty = UnavailableError(
                            "not initialised yet: no chief, no worker 0; start one, or check --ps"
                        )
                        empty.__cause__ = error
                        try:
                            retry = self.pause(retry, link, empty, deadline)
                        except UnavailableError as final:
                            raise UnavailableError(f"{link.peer}: {final}") from error
                    except RETRYABLE as error:
                        retry = self.pause(retry, link, error, deadline)
                if answer.server_incarnation in found:
                    other = found[answer.server_incarnation][0].address
                    _log.warning("%s and %s are the same shard", other, link.address)
                    continue
                found[answer.server_incarnation] = link, answer
            answers = sorted(found.values(), key=lambda a: a[1].shard_index)
            if len({answer.session for _, answer in answers}) == 1:
                break
            mixed = UnavailableError("the shards are in different sessions: a restore is going on")
            retry = self.pause(retry, answers[0][0], mixed, deadline)
        _check_set([answer for _, answer in answers])
        self.links = [link for link, _ in answers]
        for link, answer in answers:
            link.index = answer.shard_index
            link.layout = convert.layout_from_proto(answer.layout)
            link.told = NOTHING
        head = answers[0][1]
        self.session, self._lease_s = head.session, head.lease_s
        self.job = convert.job_from_proto(head.job)
        with self._roster_lock:
            self._roster = job_pb2.Roster(number=-1)
        self.learn(head.roster)

    def join(self, deadline: float) -> None:
        """Becomes a member at ps:0. Blocks while an earlier life of this worker may be alive."""
        if self.joined:
            return
        if not self.worker:
            raise FailedPreconditionError(
                'this client has no worker name; make it with worker="worker:0" to take part'
            )
        link = self.links[0]
        self.incarnation = secrets.randbits(64) or 1
        lease_left = float("inf")
        retry: Retry | None = None
        while True:
            try:
                answer = link.join(self.caller(link), min(CALL_S, left(deadline)))
                break
            except AlreadyExistsError as error:
                # Whoever renews its lease meanwhile is alive; a dead one's only runs out.
                remaining = int(dict(error.metadata).get("lease-left-ms", "0")) / 1000
                if remaining > lease_left:
                    raise
                lease_left = remaining
                self._say(f"waiting for {link.peer} ({error})")
                if self.closing.wait(
                    min(max(remaining / 4, 0.05), self._lease_s / 4, left(deadline))
                ):
                    raise
            except RETRYABLE as error:
                retry = self.pause(retry, link, error, deadline)
        self.learn(answer.roster)
        self.clock = answer.clock
        self.joined = True
        if self._heart is None:
            self._heart = threading.Thread(
                target=self._beat_forever, name="ps-heartbeat", daemon=True
            )
            self._heart.start()
        self._news.set()

    def start_over(self, why: str, leave: bool = False) -> None:
        """Forgets session and membership; the next call connects and joins again."""
        if self.joined:
            _log.warning("event=start-over worker=%s reason=%r", self.worker, why)
        self.end_turns()
        if leave:
            self.leave("gave up a step")
        self.joined = False
        self.session = 0

    def end_turns(self) -> None:
        """Closes the long-lived streams."""
        for link in self.links:
            link.end_turns()

    def leave(self, reason: str) -> None:
        """Takes no part any more; best effort, within two seconds. Idempotent."""
        if self.joined:
            self.joined = False
            link = self.links[0]
            try:
                link.leave(self.caller(link), reason, min(2.0, self._lease_s))
            except ParamServerError as error:
                _log.debug("event=leave-failed reason=%r", str(error))

    # -- the roster ----------------------------------------------------------------------------

    def caller(self, link: Link) -> pb.Caller:
        """Who calls, and what this shard is not known to have heard yet.

        A roster goes along until one call with it has been answered: another call may overtake the
        first."""
        with self._roster_lock:
            roster = self._roster
        return pb.Caller(
            session=self.session,
            worker=self.worker,
            incarnation=self.incarnation,
            known_roster=roster.number,
            roster=roster if self._is_news(link, roster) else None,
        )

    @staticmethod
    def _is_news(link: Link, roster: job_pb2.Roster) -> bool:
        session, number = link.told
        return bool(link.index) and (session != roster.session or number < roster.number)

    def learn(self, roster: job_pb2.Roster) -> None:
        """Keeps the newest roster, and lets the heartbeat thread carry it to shards that wait."""
        with self._roster_lock:
            if roster.number <= self._roster.number or roster.session != self.session:
                return
            self._roster = roster
        if len(self.links) > 1:
            self._news.set()

    def on_waiting(self, link: Link, waiting: pb.Waiting) -> None:
        """Takes in what a waiting shard says."""
        if waiting.HasField("roster"):
            self.learn(waiting.roster)
        self._say(f"waiting for {link.peer} ({waiting.reason})")

    def _say(self, line: str) -> None:
        """Tells what is waited for: when it changes, and every few seconds."""
        before, since = self._waited
        now = time.monotonic()
        if line != before or now - since > 4.0:
            self._waited = line, now
            self._on_wait(line)

    def _beat_forever(self) -> None:
        """The heartbeat thread: renews the lease at ps:0, carries news to the other shards."""
        due = time.monotonic()
        while True:
            self._news.wait(left(due))
            self._news.clear()
            if self.closing.is_set():
                return
            links = self.links if self.joined else []
            for link in links:
                # Also in between: others that are slow to answer must not cost us the lease.
                if not left(due):
                    due = time.monotonic() + self._lease_s / 3
                    self._beat(links[0])
                if self._is_news(link, self._roster):
                    self._beat(link)
            if not links:
                due = time.monotonic() + self._lease_s / 3

    def _beat(self, link: Link) -> None:
        """One heartbeat; that it failed shows in the next call."""
        caller = self.caller(link)
        try:
            answer = link.heartbeat(caller, self._lease_s / 3)
            if caller.HasField("roster"):
                link.told = caller.roster.session, caller.roster.number
            if answer.HasField("roster"):
                self.learn(answer.roster)
        except (ParamServerError, ValueError) as error:  # gRPC's ValueError: closed
            link.told = NOTHING
            _log.debug("event=heartbeat-failed peer=%r reason=%r", link.peer, str(error))

    def pause(
        self, retry: Retry | None, link: Link, error: ParamServerError, deadline: float
    ) -> Retry:
        """Waits before another attempt. Raises: `error` when there is none."""
        if self.closing.is_set():
            raise error
        link.told = NOTHING
        if retry is None:
            retry = Retry(
                link.peer,
                min(self._connect_timeout, left(deadline)),
                wait=self.closing.wait,
                on_wait=self._say,
            )
        retry.pause(error)
        return retry

    def link_of(self, name: str) -> Link:
        """The shard that holds a variable. Raises: NotFoundError."""
        for link in self.links:
            if name in link.layout:
                return link
        names = sorted(v.name for link in self.links for v in link.layout.variables)
        raise NotFoundError(f"no variable {name!r} in this job; there are {some(names)}")

    def cut(self) -> None:
        """Ends all connections, and so every call, without a good-bye. Idempotent. Thread-safe."""
        self.joined = False
        for link in list(self._all_links.values()):
            link.close()

    def close(self) -> None:
        """Leaves, and ends all connections. Idempotent."""
        self.closing.set()
        self._news.set()
        self.end_turns()
        self.leave("closed")
        self.cut()
        if self._heart:
            self._heart.join(self._lease_s)


def until(timeout_s: float | None) -> float:
    """The moment at which a call of this timeout is to be over; None: never."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def left(moment: float) -> float:
    """Seconds until then, >= 0."""
    return max(0.0, moment - time.monotonic())


def _check_set(answers: Sequence[pb.JoinResponse]) -> None:
    """Refuses a set of shards that is not the job's. Raises: ConfigError that says what is
    missing."""
    count = answers[0].shard_count
    present = [answer.shard_index for answer in answers]
    missing = [f"ps:{i}" for i in range(count) if i not in present]
    if missing:
        raise ConfigError(
            f"--ps names {len(present)} of the job's {count} shards; missing: {', '.join(missing)}"
        )
    if len(present) != count:
        raise ConfigError(f"--ps names {len(present)} shards, but the job has {count}")
