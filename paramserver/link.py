"""A client's link to one shard: the calls of the data path, one attempt each. Decides no retries.

Between the second and the third stop in the walk of one Push. Not thread-safe but for `heartbeat`
and what ends things; its owner guards it.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import grpc

from paramserver import codec, framing, transport
from paramserver.allocation import Pool
from paramserver.cluster import Address
from paramserver.errors import UnavailableError
from paramserver.framing import Frame
from paramserver.layout import Array, Range, plan
from paramserver.params import Received
from paramserver.status import raise_for
from paramserver.v1 import parameter_pb2 as pb

EMPTY = plan(())

#: What a shard has been told that has been told nothing.
NOTHING = (0, -1)

#: A call that is under way. gRPC has no public names for these.
PushCall = Any
PullCall = Any

Request = TypeVar("Request", pb.PushRequest, pb.PushPullRequest)
Answer = TypeVar("Answer", pb.PullResponse, pb.PushPullResponse)

#: What a client does with a Waiting message.
OnWaiting = Callable[["Link", pb.Waiting], None]


class Link:
    """One client's connection to one parameter server."""

    def __init__(self, address: Address, keepalive_s: float, max_message_bytes: int) -> None:
        self.address = address
        self._channel = transport.make_channel(
            address.target, keepalive_s=keepalive_s, max_message_bytes=max_message_bytes
        )
        self._stub = transport.ParameterStub(self._channel)
        self._chunk_bytes = codec.chunk_bytes(max_message_bytes)
        self._turns: _Turns | None = None
        #: Which shard it leads to, and what that holds; set by the client once it has asked.
        self.index: int | None = None
        self.layout = EMPTY
        #: Memory for what is pulled, used again when its user has let go of it.
        self.pool = Pool()
        #: The newest roster that the shard is known to have had from us: (session, number).
        self.told = NOTHING

    @property
    def peer(self) -> str:
        """For messages: "ps:1 at 10.0.0.7:1682"."""
        return f"{'ps' if self.index is None else f'ps:{self.index}'} at {self.address}"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Around a call: raises errors of ours.

        A server cancels a call that it ends for reasons of its own: it stops, a restore began, a
        lease is over. The next attempt is told which."""
        try:
            yield
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.CANCELLED:
                raise UnavailableError(f"{self.peer} ended the call") from error
            raise_for(error, self.peer)
        except grpc.FutureCancelledError as error:
            raise UnavailableError(f"the call to {self.peer} was cancelled") from error

    # -- membership ----------------------------------------------------------------------------

    def join(self, caller: pb.Caller, timeout_s: float) -> pb.JoinResponse:
        """Asks what the shard is, and (with a worker's name) takes part. Blocks."""
        with self._errors():
            return self._stub.Join(pb.JoinRequest(caller=caller), timeout=timeout_s)

    def heartbeat(self, caller: pb.Caller, timeout_s: float) -> pb.HeartbeatResponse:
        """Renews the lease, or carries news. Blocks. Thread-safe."""
        with self._errors():
            return self._stub.Heartbeat(pb.HeartbeatRequest(caller=caller), timeout=timeout_s)

    def leave(self, caller: pb.Caller, reason: str, timeout_s: float) -> pb.LeaveResponse:
        """Says good-bye. Blocks."""
        with self._errors():
            return self._stub.Leave(
                pb.LeaveRequest(caller=caller, reason=reason), timeout=timeout_s
            )

    # -- push and pull -------------------------------------------------------------------------

    def start_push(
        self, header: pb.PushHeader, parts: Iterable[tuple[Range, Array]], timeout_s: float
    ) -> PushCall:
        """Begins a push; `finish_push` reads what became of it. `parts` are read while it runs."""
        first = pb.PushRequest(header=header)
        return self._stub.Push.future(self._frames(first, parts), timeout=timeout_s)

    def _frames(
        self, first: Request, parts: Iterable[tuple[Range, Array]]
    ) -> Iterator[Frame[Request]]:
        """The messages of one push. The arrays are referred to, and copied once, by
        `framing.encode`."""
        message = first
        for chunk in codec.chunks(parts, self._chunk_bytes):
            yield codec.framed(message, chunk)
            message = type(first)()

    def finish_push(self, call: PushCall) -> pb.PushResponse:
        """Waits for a push's result."""
        with self._errors():
            response: pb.PushResponse = call.result()
            return response

    def start_pull(
        self, caller: pb.Caller, options: pb.PullOptions, timeout_s: float | None
    ) -> PullCall:
        """Begins a pull; `finish_pull` reads it."""
        request = pb.PullRequest(caller=caller, options=options)
        return self._stub.Pull(request, timeout=timeout_s)

    def finish_pull(
        self, call: Iterator[bytes], received: Received | None, on_waiting: OnWaiting
    ) -> pb.PullHeader:
        """Reads the answer to a pull into `received` (None: only the header is wanted)."""
        with self._errors():
            header = self._read(self._frames_in(pb.PullResponse, call), received, on_waiting).header
            # To its end: letting go of a call before cancels it, and its server may never know
            # that all of it has arrived.
            for _ in call:
                pass
            return header

    def _frames_in(self, cls: type[Answer], call: Iterator[bytes]) -> Iterator[Frame[Answer]]:
        return (framing.decode(cls, data) for data in call)

    def _read(
        self,
        frames: Iterator[Frame[Answer]],
        received: Received | None,
        on_waiting: OnWaiting,
    ) -> Answer:
        """The message with the header; all others have been taken in when it returns."""
        head: Answer | None = None
        for frame in frames:
            message = frame.message
            if message.HasField("waiting"):
                on_waiting(self, message.waiting)
                continue
            if head is None:
                head = message
            if received is not None:
                for piece, values in codec.pieces(frame, self.layout):
                    received.add(piece, values)
            if message.last:
                if received is not None and not head.header.unchanged:
                    received.finish()
                return head
        raise UnavailableError(f"{self.peer} ended its answer early")

    # -- both in one round trip ----------------------------------------------------------------

    def start_turn(
        self,
        header: pb.PushHeader,
        parts: Iterable[tuple[Range, Array]],
        options: pb.PullOptions,
    ) -> None:
        """Sends one turn on the long-lived stream, which is opened if need be. Does not block."""
        turns = self._turns or _Turns(self._stub)
        self._turns = turns
        first = pb.PushPullRequest(header=header, options=options)
        for frame in self._frames(first, parts):
            turns.requests.put(frame)

    def turn_result(self) -> pb.PushPullResponse:
        """Waits for the push's result of the turn that was sent: `result` and perhaps `roster`.

        The same message may begin the answer to the pull; `finish_turn` then starts with it."""
        with self._errors():
            for data in self._answers():
                frame = framing.decode(pb.PushPullResponse, data)
                if self._turns is not None and frame.message.HasField("header"):
                    self._turns.head = frame
                return frame.message
            raise UnavailableError(f"{self.peer} ended the stream")

    def finish_turn(self, received: Received | None, on_waiting: OnWaiting) -> pb.PullHeader:
        """Reads the pull half of the turn."""
        with self._errors():
            answers = self._frames_in(pb.PushPullResponse, self._answers())
            turns = self._turns
            if turns is not None and turns.head is not None:
                answers, turns.head = itertools.chain((turns.head,), answers), None
            return self._read(answers, received, on_waiting).header

    def _answers(self) -> Iterator[bytes]:
        turns = self._turns
        if turns is None:
            raise UnavailableError(f"the stream to {self.peer} was closed")
        answers: Iterator[bytes] = turns.answers
        return answers

    def end_turns(self) -> None:
        """Closes the long-lived stream, whatever it is at. The next turn opens another.
        Idempotent. Thread-safe: it ends a wait in another thread."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.close()

    def close(self) -> None:
        """Ends all calls and the connection. Idempotent."""
        self.end_turns()
        self._channel.close()


class _Turns:
    """A long-lived PushPull stream. gRPC takes the requests from the queue in a thread of its
    own."""

    def __init__(self, stub: transport.ParameterStub) -> None:
        # Holds one turn at most: references to the gradient, not copies.
        self.requests: queue.SimpleQueue[Frame[pb.PushPullRequest] | None] = queue.SimpleQueue()
        self.answers = stub.PushPull(iter(self.requests.get, None))
        #: The beginning of an answer that came with the push's result.
        self.head: Frame[pb.PushPullResponse] | None = None

    def close(self) -> None:
        self.answers.cancel()
        self.requests.put(None)
