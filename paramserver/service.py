"""What workers call, on the server's side: decodes, asks the `Host`, encodes. Decides nothing.

Third stop in the walk of one Push. Received messages are raw bytes here (see `framing`); the pieces
of a gradient are views of them, and what goes out is joined once from the shard's own arrays.
Errors leave through one door, `rpc_errors`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import grpc

from paramserver import codec, convert, framing
from paramserver.consistency import Gate
from paramserver.errors import InvalidArgumentError, ParamServerError
from paramserver.host import Host
from paramserver.layout import Array, Range
from paramserver.push import PushResult
from paramserver.push_pull import PushPull
from paramserver.read_ahead import read_ahead
from paramserver.shard import View
from paramserver.status import rpc_errors
from paramserver.streams import Stream
from paramserver.v1 import job_pb2
from paramserver.v1 import parameter_pb2 as pb

#: How often a waiting pull says what it waits for, in seconds.
WAITING_EVERY_S = 3.0

#: Messages of a large push that are received while an earlier one is applied.
READ_AHEAD = 2

Request = TypeVar("Request", pb.PushRequest, pb.PushPullRequest)
Response = TypeVar("Response", pb.PullResponse, pb.PushPullResponse)


class ParameterService:
    """The servicer of `ParameterService`. Thread-safe; each call runs in a thread of the pool."""

    def __init__(
        self,
        host: Host,
        on_defect: Callable[[BaseException], None] | None = None,
        chunk_bytes: int = codec.CHUNK_BYTES,
    ) -> None:
        self._host = host
        self._data = PushPull(host)
        self._on_defect = on_defect
        self._chunk_bytes = chunk_bytes

    # -- push ----------------------------------------------------------------------------------

    def Push(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushResponse:
        """See the contract."""
        with (
            rpc_errors(context, self._on_defect),
            self._host.stream(context.cancel) as stream,
        ):
            context.add_callback(self._host.wake)
            messages = stream.reading(requests)
            first = _first(pb.PushRequest, messages)
            result = self._push(first, messages, stream, context)
            return pb.PushResponse(
                result=convert.push_result_to_proto(result),
                roster=self._news(first.message.header.caller),
            )

    def _push(
        self,
        first: framing.Frame[Request],
        requests: Iterator[bytes],
        stream: Stream,
        context: grpc.ServicerContext,
    ) -> PushResult:
        """Takes one push off a stream, to its last message, and sees it applied."""
        cls = type(first.message)
        header = first.message.header
        outcome = self._data.begin_push(
            convert.push_header_from_proto(header),
            convert.roster_in(header.caller),
            context.is_active,
        )
        stream.member = header.caller.worker, header.caller.incarnation
        if isinstance(outcome, PushResult):
            # Nothing of the gradient is needed, but the next turn of a stream begins behind it.
            for _ in _rest(cls, first, requests):
                pass
            return outcome
        try:
            frames = _rest(cls, first, requests)
            for frame in frames if first.message.last else read_ahead(frames, READ_AHEAD):
                for piece, values in codec.pieces(frame, outcome.layout):
                    outcome.feed(piece, values)
            if not frame.message.last:
                raise InvalidArgumentError(
                    f"the push ended before its last message{outcome.where}; nothing was applied"
                )
            return self._data.finish_push(outcome)
        except BaseException:
            self._data.abort_push(outcome)
            raise

    # -- pull ----------------------------------------------------------------------------------

    def Pull(
        self, request: pb.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[framing.Frame[pb.PullResponse]]:
        """See the contract."""
        with (
            rpc_errors(context, self._on_defect),
            self._host.stream(context.cancel) as stream,
        ):
            if request.caller.HasField("roster"):
                self._host.adopt(convert.roster_from_proto(request.caller.roster))
            context.add_callback(self._host.wake)
            yield from stream.sending(self._pull(request, context))

    def _pull(
        self, request: pb.PullRequest, context: grpc.ServicerContext
    ) -> Iterator[framing.Frame[pb.PullResponse]]:
        caller, options = request.caller, request.options
        outcome = yield from self._wait(
            pb.PullResponse, caller, options, caller.known_roster, context
        )
        if outcome:
            yield from self._answer(
                pb.PullResponse(), outcome, caller, options, caller.known_roster
            )

    def _look(
        self,
        caller: pb.Caller,
        options: pb.PullOptions,
        context: grpc.ServicerContext,
        for_s: float,
    ) -> View | Gate:
        return self._data.pull(
            caller.session,
            (caller.worker, caller.incarnation),
            options.clock if options.wait else None,
            not options.header_only,
            for_s,
            context.is_active,
        )

    def _wait(
        self,
        cls: type[Response],
        caller: pb.Caller,
        options: pb.PullOptions,
        known: int,
        context: grpc.ServicerContext,
    ) -> Generator[framing.Frame[Response], None, View | None]:
        """Says every few seconds what a pull waits for; the view in the end, None if cancelled."""
        while True:
            outcome = self._look(caller, options, context, WAITING_EVERY_S)
            if isinstance(outcome, View):
                return outcome
            if not context.is_active():
                return None
            news = self._host.news(known)
            known = news.number if news else known
            waiting = pb.Waiting(
                reason=outcome.reason, roster=convert.roster_to_proto(news) if news else None
            )
            yield framing.Frame(cls(waiting=waiting))

    def _answer(
        self, head: Response, view: View, caller: pb.Caller, options: pb.PullOptions, known: int
    ) -> Iterator[framing.Frame[Response]]:
        """The messages that carry a view, the first of them `head`. Gives the view back."""
        cls = type(head)
        try:
            news = self._host.news(known)
            unchanged = options.HasField("known_version") and options.known_version == view.version
            head.header.version = view.version
            head.header.global_step = view.global_step
            head.header.step = view.step
            head.header.complete = view.complete
            head.header.unchanged = unchanged
            if news:
                head.header.roster.CopyFrom(convert.roster_to_proto(news))
            parts: list[tuple[Range, Array]] = []
            if view.pin and not unchanged:
                parts = [
                    (p, view.pin.arrays[p.group, 0][p.offset : p.offset + p.count])
                    for p in view.layout.ranges(options.names)
                ]
            message = head
            for chunk in codec.chunks(parts, self._chunk_bytes):
                yield codec.framed(message, chunk)
                # Sent. gRPC keeps a message until the next one; it must not keep arrays with it.
                chunk.arrays.clear()
                message = cls()
            self._data.delivered(view, (caller.worker, caller.incarnation))
        finally:
            self._data.release(view)

    # -- both ----------------------------------------------------------------------------------

    def PushPull(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[framing.Frame[pb.PushPullResponse]]:
        """See the contract. The stream is its worker's for as long as that is a member."""
        with (
            rpc_errors(context, self._on_defect),
            self._host.stream(context.cancel, long_lived=True) as stream,
        ):
            context.add_callback(self._host.wake)
            yield from stream.sending(self._turns(stream.reading(requests), stream, context))

    def _turns(
        self, requests: Iterator[bytes], stream: Stream, context: grpc.ServicerContext
    ) -> Iterator[framing.Frame[pb.PushPullResponse]]:
        for data in requests:
            stream.at_rest = False
            turn = self._turn(_opening(pb.PushPullRequest, data), requests, stream, context)
            # A worker may compute for long: with the turn all goes that it referred to.
            del data
            yield from turn
            stream.at_rest = True

    def _turn(
        self,
        first: framing.Frame[pb.PushPullRequest],
        requests: Iterator[bytes],
        stream: Stream,
        context: grpc.ServicerContext,
    ) -> Iterator[framing.Frame[pb.PushPullResponse]]:
        caller, options = first.message.header.caller, first.message.options
        result = self._push(first, requests, stream, context)
        known = caller.known_roster
        head = pb.PushPullResponse(result=convert.push_result_to_proto(result))
        # If the pull need not wait, one message carries both halves' answers.
        try:
            view = self._look(caller, options, context, 0.0)
        except ParamServerError:
            # The push is in, and its sender is to know, whatever became of the pull.
            yield framing.Frame(head)
            raise
        if not isinstance(view, View):
            news = self._host.news(known)
            if news:
                head.roster.CopyFrom(convert.roster_to_proto(news))
                known = news.number
            yield framing.Frame(head)
            head = pb.PushPullResponse()
            waited = yield from self._wait(pb.PushPullResponse, caller, options, known, context)
            if waited is None:
                return
            view = waited
        yield from self._answer(head, view, caller, options, known)

    # -- membership ----------------------------------------------------------------------------

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            caller = request.caller
            clock = 0
            if caller.worker:
                clock = self._host.join(
                    (caller.worker, caller.incarnation), caller.session, convert.roster_in(caller)
                )
            with self._host.reading() as shard:
                job, roster, version = shard.job, shard.roster, shard.version
            return pb.JoinResponse(
                session=shard.state.session,
                shard_index=shard.state.index,
                shard_count=shard.state.count,
                server_incarnation=self._host.incarnation,
                layout=convert.layout_to_proto(shard.layout, job.optimizer),
                job=convert.job_to_proto(job),
                clock=clock,
                lease_s=self._host.settings.lease_s,
                roster=convert.roster_to_proto(roster) if shard.leads else None,
                version=version,
            )

    def Heartbeat(
        self, request: pb.HeartbeatRequest, context: grpc.ServicerContext
    ) -> pb.HeartbeatResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            caller = request.caller
            self._host.heartbeat(
                caller.session, (caller.worker, caller.incarnation), convert.roster_in(caller)
            )
            return pb.HeartbeatResponse(roster=self._news(caller))

    def Leave(self, request: pb.LeaveRequest, context: grpc.ServicerContext) -> pb.LeaveResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            caller = request.caller
            member = caller.worker, caller.incarnation
            self._host.leave(
                caller.session, member, request.reason[:200] or "left", convert.roster_in(caller)
            )
            return pb.LeaveResponse(roster=self._news(caller))

    def _news(self, caller: pb.Caller) -> job_pb2.Roster | None:
        """ps:0's roster for the reply, if the caller does not have it yet."""
        news = self._host.news(caller.known_roster)
        return convert.roster_to_proto(news) if news else None


def _first(cls: type[Request], requests: Iterator[bytes]) -> framing.Frame[Request]:
    data = next(requests, None)
    if data is None:
        raise InvalidArgumentError(f"{cls.DESCRIPTOR.name}: the stream ended before its header")
    return _opening(cls, data)


def _opening(cls: type[Request], data: bytes) -> framing.Frame[Request]:
    """The first message of a push."""
    frame = framing.decode(cls, data)
    if not frame.message.HasField("header"):
        raise InvalidArgumentError(f"{cls.DESCRIPTOR.name}: the first message has no header")
    return frame


def _rest(
    cls: type[Request], first: framing.Frame[Request], requests: Iterator[bytes]
) -> Iterator[framing.Frame[Request]]:
    """The messages of one push, from its first to the one marked last, or as far as they come.

    Raises: InvalidArgumentError if another header comes."""
    frame = first
    while True:
        yield frame
        if frame.message.last:
            return
        data = next(requests, None)
        if data is None:
            return
        frame = framing.decode(cls, data)
        if frame.message.HasField("header"):
            raise InvalidArgumentError("a second header came inside a push; nothing was applied")
