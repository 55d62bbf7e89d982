"""The streaming calls that are open at a server, and an end to those that stand still. No gRPC.

A call that streams holds a thread. A client that opens one and sends nothing, stops in the middle,
or does not read its answer would hold it for ever; so would the call of a worker that has died.
Each call says when it begins to wait for its client, and whoever looks at the clock ends those that
wait too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from paramserver.errors import ResourceExhaustedError

T = TypeVar("T")
Key = tuple[str, int]


class Stream:
    """One open call. Its own thread calls it; `stalled` and `cancel` may be called by others."""

    def __init__(
        self, cancel: Callable[[], object], clock: Callable[[], float], long_lived: bool
    ) -> None:
        self.cancel = cancel
        self.long_lived = long_lived
        #: Whose call it is, once that is known: it ends with the membership.
        self.member: Key | None = None
        #: Between two turns: silence is no stall.
        self.at_rest = False
        self._clock = clock
        # When it began to wait for its client; None while it does not. One reference, swapped.
        self._since: float | None = None

    def reading(self, messages: Iterator[T]) -> Iterator[T]:
        """The client's messages. It may take its time between turns, not in the middle of one."""
        while True:
            self._since = None if self.at_rest else self._clock()
            try:
                message = next(messages)
            except StopIteration:
                return
            finally:
                self._since = None
            yield message
            del message  # not kept alive while the next one is awaited

    def sending(self, messages: Iterable[T]) -> Iterator[T]:
        """The answer. Each message is awaited until the client has room for it."""
        for message in messages:
            self._since = self._clock()
            yield message
            self._since = None

    def stalled(self, now: float, patience_s: float) -> bool:
        """Whether the client has kept it waiting for longer than `patience_s`."""
        since = self._since
        return since is not None and now - since > patience_s


class Streams:
    """All open calls, `most` at one time, and as many long-lived ones as there may be workers.

    Not thread-safe: guarded by the owner's lock."""

    def __init__(self, most_workers: int) -> None:
        self._most_workers = most_workers
        self._open: set[Stream] = set()

    @staticmethod
    def threads(most_workers: int) -> int:
        """How many calls may be open: a stream and a call beside it, and a waiting pull, each."""
        return 3 * most_workers

    def add(self, stream: Stream) -> None:
        """Lets a call in. Raises: ResourceExhaustedError that names the limit."""
        lasting = sum(s.long_lived for s in self._open)
        if stream.long_lived and lasting >= self._most_workers:
            raise ResourceExhaustedError(
                f"{lasting} streams are open here already; the limit is --max-workers"
            )
        if len(self._open) >= self.threads(self._most_workers):
            raise ResourceExhaustedError(
                f"{len(self._open)} calls are open here already; --max-workers raises the limit"
            )
        self._open.add(stream)

    def remove(self, stream: Stream) -> None:
        """A call has ended."""
        self._open.discard(stream)

    def end_stalled(self, now: float, patience_s: float) -> int:
        """Ends the calls whose clients keep them waiting; how many."""
        stalled = [stream for stream in self._open if stream.stalled(now, patience_s)]
        for stream in stalled:
            stream.cancel()
        return len(stalled)

    def end_of(self, is_member: Callable[[Key], bool]) -> None:
        """Ends the calls of workers that are members no longer."""
        for stream in self._open:
            if stream.member and not is_member(stream.member):
                stream.cancel()

    def end_all(self, long_lived_only: bool = False) -> None:
        """Ends every call."""
        for stream in self._open:
            if stream.long_lived or not long_lived_only:
                stream.cancel()
