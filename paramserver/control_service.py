"""What the chief calls, on the server's side: decodes, asks the `Host`, encodes. Decides
nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import grpc

from paramserver import codec, convert, framing
from paramserver.errors import InvalidArgumentError
from paramserver.host import Host
from paramserver.layout import Array, Range
from paramserver.shard import Shard
from paramserver.shard import Snapshot as Kept
from paramserver.status import rpc_errors
from paramserver.stewardship import Stewardship
from paramserver.v1 import control_pb2 as pb

#: How long a cut waits for the pushes in flight, in seconds, unless its hold says less.
MAX_HOLD_S = 60.0

Request = TypeVar("Request", pb.InitializeRequest, pb.RestoreRequest)


class ControlService:
    """The servicer of `ControlService`. Thread-safe; each call runs in a thread of the pool."""

    def __init__(
        self,
        host: Host,
        on_defect: Callable[[BaseException], None] | None = None,
        chunk_bytes: int = codec.CHUNK_BYTES,
    ) -> None:
        self._host = host
        self._steward = Stewardship(host)
        self._on_defect = on_defect
        self._chunk_bytes = chunk_bytes

    def Claim(self, request: pb.ClaimRequest, context: grpc.ServicerContext) -> pb.ClaimResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            self._adopt(request.chief)
            granted, holder, left = self._steward.claim(
                request.chief.holder[:200], request.chief.incarnation, request.release
            )
            return pb.ClaimResponse(
                granted=granted,
                holder=holder,
                lease_left_s=left,
                lease_s=self._host.settings.lease_s,
                server_incarnation=self._host.incarnation,
            )

    def Initialize(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.InitializeResponse:
        """See the contract."""
        with (
            rpc_errors(context, self._on_defect),
            self._host.stream(context.cancel) as stream,
        ):
            messages = stream.reading(requests)
            initialized, session = self._load(pb.InitializeRequest, messages, restore=False)
            return pb.InitializeResponse(initialized=initialized, session=session)

    def Restore(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.RestoreResponse:
        """See the contract."""
        with (
            rpc_errors(context, self._on_defect),
            self._host.stream(context.cancel) as stream,
        ):
            _, session = self._load(pb.RestoreRequest, stream.reading(requests), restore=True)
            return pb.RestoreResponse(session=session)

    def _load(
        self, cls: type[Request], requests: Iterator[bytes], restore: bool
    ) -> tuple[bool, int]:
        """Takes a whole state off a stream and puts it in place: (whether it did, the session)."""
        frame = _next(cls, requests)
        self._check_chief(frame.message.chief)
        state = convert.state_from_proto(frame.message.state)
        loading = self._steward.loading(state, restore)
        if loading is None:
            with self._host.reading() as shard:
                return False, shard.state.session
        slots = len(state.job.optimizer.slots) if restore else 0
        while True:
            for piece, values in codec.pieces(frame, loading.layout, slots, "variable"):
                loading.feed(piece, values)
            if frame.message.last:
                break
            frame = _next(cls, requests)
        session = self._steward.install(loading, restore)
        return session == state.session, session

    def Hold(self, request: pb.HoldRequest, context: grpc.ServicerContext) -> pb.HoldResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            self._check_chief(request.chief)
            if not 0 < request.deadline_s <= MAX_HOLD_S:
                raise InvalidArgumentError(
                    f"deadline_s must be between 0 and {MAX_HOLD_S:g}, not {request.deadline_s:g}"
                )
            admitted = self._steward.hold(request.cut, request.deadline_s)
            return pb.HoldResponse(
                admitted=convert.sequences_to_proto(admitted.sequences), rounds=admitted.rounds
            )

    def Cut(self, request: pb.CutRequest, context: grpc.ServicerContext) -> pb.CutResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            self._check_chief(request.chief)
            if request.abandon:
                self._steward.abandon_cut(request.cut)
                return pb.CutResponse()
            snapshot = self._steward.cut(
                request.cut,
                convert.sequences_from_proto(request.admit),
                request.rounds,
                MAX_HOLD_S,
            )
            return pb.CutResponse(version=snapshot.state.version, pause_s=snapshot.pause_s)

    def Snapshot(
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[framing.Frame[pb.SnapshotResponse]]:
        """See the contract."""
        with (
            rpc_errors(context, self._on_defect),
            self._host.stream(context.cancel) as stream,
        ):
            self._check_chief(request.chief)
            with self._steward.snapshot(request.cut) as snapshot:
                yield from stream.sending(self._frames(snapshot))

    def _frames(self, kept: Kept) -> Iterator[framing.Frame[pb.SnapshotResponse]]:
        message = pb.SnapshotResponse(
            state=convert.state_to_proto(kept.state),
            layout=convert.layout_to_proto(kept.layout, kept.state.job.optimizer),
        )
        for chunk in codec.chunks(_all_parts(kept), self._chunk_bytes):
            yield codec.framed(message, chunk)
            message = pb.SnapshotResponse()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            if request.HasField("roster"):
                self._host.adopt(convert.roster_from_proto(request.roster))
            chief, waiting, now = self._steward.chief(), self._host.waiting(), self._host.now()
            with self._host.locked() as shard:
                response = _status(shard, now) if shard else pb.StatusResponse()
            if shard:
                # Immutable, and long if there are many variables: not under the lock.
                response.layout.CopyFrom(convert.layout_to_proto(shard.layout, shard.job.optimizer))
            response.server_incarnation = self._host.incarnation
            response.chief = chief
            response.waiting.extend(waiting)
            response.uptime_s = now - self._host.started
            return response

    def Configure(
        self, request: pb.ConfigureRequest, context: grpc.ServicerContext
    ) -> pb.ConfigureResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            self._check_chief(request.chief)
            last_step = request.last_step if request.HasField("last_step") else None
            self._steward.configure(last_step)
            news = self._host.news(-1)
            return pb.ConfigureResponse(roster=convert.roster_to_proto(news) if news else None)

    def Shutdown(
        self, request: pb.ShutdownRequest, context: grpc.ServicerContext
    ) -> pb.ShutdownResponse:
        """See the contract."""
        with rpc_errors(context, self._on_defect):
            self._check_chief(request.chief)
            if request.now:
                self._host.shutdown_now.set()
                return pb.ShutdownResponse()
            return pb.ShutdownResponse(waiting_for=self._host.done(request.reason))

    def _check_chief(self, chief: pb.Chief) -> None:
        self._adopt(chief)
        self._steward.check_chief(chief.holder[:200], chief.incarnation)

    def _adopt(self, chief: pb.Chief) -> None:
        if not chief.holder or not chief.incarnation:
            raise InvalidArgumentError(
                "a chief needs a name that people know it by, and an incarnation, a random id"
            )
        if chief.HasField("roster"):
            self._host.adopt(convert.roster_from_proto(chief.roster))


def _status(shard: Shard, now: float) -> pb.StatusResponse:
    """What a shard has to say of itself. Called under the lock."""
    return pb.StatusResponse(
        initialized=True,
        session=shard.state.session,
        shard_index=shard.state.index,
        shard_count=shard.state.count,
        job=convert.job_to_proto(shard.job),
        version=shard.version,
        global_step=shard.global_step,
        rounds=shard.rounds,
        workers=[
            pb.WorkerStatus(
                worker=worker,
                incarnation=shard.incarnation(worker),
                clock=clock,
                sequence=shard.sequence((worker, shard.incarnation(worker))),
                lease_left_s=shard.membership.left((worker, shard.incarnation(worker)), now),
            )
            for worker, clock in shard.clocks.items()
        ],
        roster=convert.roster_to_proto(shard.roster),
        cut_off=map(convert.cut_off_to_proto, shard.cut_off.steps),
        bytes_held=shard.nbytes,
        bytes_in_flight=shard.nbytes_in_flight,
        counts=shard.counts,
    )


def _all_parts(snapshot: Kept) -> Iterator[tuple[Range, Array]]:
    """Every flat array of a snapshot, values before slots, group by group."""
    for (group, slot), array in sorted(snapshot.pin.arrays.items()):
        yield Range(group, 0, len(array), slot), array


def _next(cls: type[Request], requests: Iterator[bytes]) -> framing.Frame[Request]:
    data = next(requests, None)
    if data is None:
        raise InvalidArgumentError(
            f"{cls.DESCRIPTOR.name}: the stream ended before its last message; nothing was changed"
        )
    return framing.decode(cls, data)
