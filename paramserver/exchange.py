"""A pull, a push, or both in one round trip, with all shards at once. Decides on retries, not on
steps.

Second stop in the walk of one Push, below `Client`: the calls to all shards are started before the
first is waited for, and each is repeated until its shard answers or `connect_timeout` is over. A
push is repeated with the same sequence number, so that it counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paramserver import convert
from paramserver.connection import CALL_S, Connection, left
from paramserver.convert import CarriesRoster
from paramserver.layout import Array, Range
from paramserver.link import Link
from paramserver.params import Params, Received, Ticket
from paramserver.push import PushResult
from paramserver.retry import RETRYABLE, Retry
from paramserver.v1 import parameter_pb2 as pb

#: One shard's part of a gradient: ranges with their flat arrays, in layout order.
Parts = list[tuple[Range, Array]]

#: An attempt at a call that waits ends after this time and is made again, in seconds.
ATTEMPT_S = 300.0

#: A push may take longer than other calls that never wait, by its bytes at this rate.
SLOWEST_BYTES_PER_S = 4e6

_Call = Any
_Answer = tuple[Received | None, pb.PullHeader]


class Exchange:
    """The data path of one client over the links of its connection. One thread at a time."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn
        # The calls under way; `cancel` reads it from another thread.
        self._running: list[_Call] = []

    # -- pull ----------------------------------------------------------------------------------

    def pull(
        self,
        names: tuple[str, ...],
        wait: bool,
        deadline: float,
        *,
        header_only: bool = False,
        have: Params | None = None,
    ) -> Params:
        """One pull of `names` (empty: all) from all shards. `header_only`: for the ticket alone.

        Shards that are still at the version of `have` share its arrays. Raises: NotFoundError."""
        for name in names:
            self._conn.link_of(name)
        if have and (have.session, have.asked) != (self._conn.session, names):
            have = None
        links = self._conn.links
        options = [self._options(link, names, wait, header_only, have) for link in links]
        with self._cancelling(
            [self._start(*each, deadline) for each in zip(links, options, strict=True)]
        ) as calls:
            answers = [
                self._finish(link, options[i], calls, i, deadline, have)
                for i, link in enumerate(links)
            ]
        return self._params(names, wait, answers, deadline)

    def _start(self, link: Link, options: pb.PullOptions, deadline: float) -> _Call:
        return link.start_pull(self._conn.caller(link), options, min(ATTEMPT_S, left(deadline)))

    def _finish(
        self,
        link: Link,
        options: pb.PullOptions,
        calls: list[_Call],
        i: int,
        deadline: float,
        have: Params | None = None,
    ) -> _Answer:
        """Reads the answer to `calls[i]`, which is made again as often as need be."""
        retry: Retry | None = None
        while True:
            received = (
                None if options.header_only else Received(link.layout, options.names, link.pool)
            )
            try:
                header = link.finish_pull(calls[i], received, self._conn.on_waiting)
            except RETRYABLE as error:
                retry = self._conn.pause(retry, link, error, deadline)
                calls[i] = self._start(link, options, deadline)
                continue
            self._learn(header)
            if header.unchanged and have:
                received = have.received[i]
            return received, header

    def _params(
        self, names: tuple[str, ...], wait: bool, answers: list[_Answer], deadline: float
    ) -> Params:
        """Puts the shards' answers together; if the job is over, sees that all are final."""
        conn, head = self._conn, answers[0][1]
        for i, link in enumerate(conn.links):
            if head.complete and not answers[i][1].complete:
                options = self._options(link, names, True, answers[i][0] is None)
                with self._cancelling([self._start(link, options, deadline)]) as calls:
                    answers[i] = self._finish(link, options, calls, 0, deadline)
        versions = tuple(header.version for _, header in answers)
        ticket = None
        if wait:
            ticket = Ticket(conn.session, conn.incarnation, conn.clock, head.step, versions)
        received = [r for r, _ in answers]
        return Params(
            received, names, conn.session, head.global_step, versions, head.complete, ticket
        )

    def _options(
        self,
        link: Link,
        names: tuple[str, ...],
        wait: bool,
        header_only: bool,
        have: Params | None = None,
    ) -> pb.PullOptions:
        here = [name for name in names if name in link.layout]
        return pb.PullOptions(
            wait=wait,
            clock=self._conn.clock if wait else 0,
            names=here,
            header_only=header_only or (bool(names) and not here),
            known_version=have.versions[link.index or 0] if have else None,
        )

    # -- push ----------------------------------------------------------------------------------

    def push(
        self, ticket: Ticket, sequence: int, parts: list[Parts], examples: int, deadline: float
    ) -> PushResult:
        """One push to all shards; what became of it at ps:0. Each shard's part may be empty."""

        def start(link: Link) -> _Call:
            own = parts[link.index or 0]
            nbytes = sum(array.nbytes for _, array in own)
            return link.start_push(
                self._header(link, ticket, sequence, examples),
                own,
                min(CALL_S + nbytes / SLOWEST_BYTES_PER_S, left(deadline)),
            )

        links = self._conn.links
        with self._cancelling([start(link) for link in links]) as calls:
            results = []
            for i, link in enumerate(links):
                retry: Retry | None = None
                while True:
                    try:
                        response = link.finish_push(calls[i])
                        break
                    except RETRYABLE as error:
                        retry = self._conn.pause(retry, link, error, deadline)
                        calls[i] = start(link)
                self._learn(response)
                results.append(response.result)
        return convert.push_result_from_proto(results[0])

    def _header(self, link: Link, ticket: Ticket, sequence: int, examples: int) -> pb.PushHeader:
        return pb.PushHeader(
            caller=self._conn.caller(link),
            sequence=sequence,
            clock=ticket.clock,
            step=ticket.step,
            pulled_version=ticket.versions[link.index or 0],
            examples=examples,
        )

    # -- both ----------------------------------------------------------------------------------

    def push_turn(
        self,
        ticket: Ticket,
        sequence: int,
        parts: list[Parts],
        examples: int,
        deadline: float,
        meanwhile: Callable[[], object] | None,
    ) -> PushResult:
        """The push half of a turn on the long-lived streams; `pull_turn` must follow.

        `meanwhile` is called once all of it is on its way, before anything is waited for."""
        options = pb.PullOptions(wait=True, clock=ticket.clock + 1)

        def start(link: Link) -> None:
            header = self._header(link, ticket, sequence, examples)
            link.start_turn(header, parts[link.index or 0], options)

        links = self._conn.links
        for link in links:
            start(link)
        if meanwhile:
            meanwhile()
        results = []
        for link in links:
            retry: Retry | None = None
            while True:
                try:
                    response = link.turn_result()
                    break
                except RETRYABLE as error:
                    link.end_turns()
                    retry = self._conn.pause(retry, link, error, deadline)
                    start(link)
            self._learn(response)
            results.append(response.result)
        return convert.push_result_from_proto(results[0])

    def pull_turn(self, deadline: float) -> Params:
        """The pull half, once the clock has moved on."""
        answers = [self._finish_turn(link, deadline) for link in self._conn.links]
        return self._params((), True, answers, deadline)

    def _finish_turn(self, link: Link, deadline: float) -> _Answer:
        received = Received(link.layout, (), link.pool)
        try:
            header = link.finish_turn(received, self._conn.on_waiting)
        except RETRYABLE as error:
            # The push half counts; only the pull is made again.
            link.end_turns()
            self._conn.pause(None, link, error, deadline)
            options = self._options(link, (), True, False)
            with self._cancelling([self._start(link, options, deadline)]) as calls:
                return self._finish(link, options, calls, 0, deadline)
        self._learn(header)
        return received, header

    # -- small things --------------------------------------------------------------------------

    def cancel(self) -> None:
        """Ends the calls under way. Thread-safe."""
        self._conn.end_turns()
        for call in list(self._running):
            call.cancel()

    def _learn(self, answer: CarriesRoster) -> None:
        if answer.HasField("roster"):
            self._conn.learn(answer.roster)

    @contextmanager
    def _cancelling(self, calls: list[_Call]) -> Iterator[list[_Call]]:
        """Cancels what is still running of `calls` if anything goes wrong."""
        outer, self._running = self._running, calls
        try:
            yield calls
        except BaseException:
            for call in calls:
                call.cancel()
            raise
        finally:
            self._running = outer
