"""What the chief holds: control calls to all shards of a job. The chief decides when; this does it.

It is chief at a shard as long as its lease there is renewed, which a thread does from `claim` on.
All calls block and are bounded in time.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy as np

from paramserver import cluster, codec, convert, framing, transport
from paramserver.cluster import Address
from paramserver.errors import (
    AlreadyExistsError,
    ConfigError,
    FailedPreconditionError,
    NotFoundError,
    ParamServerError,
    PermissionDeniedError,
    UnavailableError,
)
from paramserver.framing import Frame
from paramserver.job import Job
from paramserver.layout import (
    DTYPES,
    Array,
    Layout,
    Limits,
    Range,
    Variable,
    check_finite,
    model_fingerprint,
    plan,
)
from paramserver.placement import place
from paramserver.retry import RETRYABLE, Retry
from paramserver.state import ShardState
from paramserver.status import call_errors
from paramserver.v1 import control_pb2 as pb
from paramserver.v1 import job_pb2

_log = logging.getLogger(__name__)

#: Deadline of a call that carries no arrays, in seconds.
CALL_S = 10.0

#: Arrays move at this rate at least, in bytes a second.
SLOWEST_BYTES_PER_S = 4e6

#: What a shard says of itself, as `survey` and `look` answer it.
Status = pb.StatusResponse

Load = TypeVar("Load", pb.InitializeRequest, pb.RestoreRequest)


@dataclass(frozen=True)
class ShardArrays:
    """One shard's state with its arrays by name: (value, slots by name), in the variables'
    shapes."""

    state: ShardState
    arrays: Mapping[str, tuple[Array, Mapping[str, Array]]]


class ControlClient:
    """Control calls to the shards at `addresses` ("host:port,..." or a list; in any order).

    `holder` is who commands, for people; the host and process id are added. Thread-safe but for
    `close`: each call is independent. Raises what the calls raise, mapped to
    `ParamServerError`s."""

    def __init__(
        self,
        addresses: str | Sequence[str | Address],
        holder: str,
        *,
        connect_timeout: float = 60.0,
        on_wait: Callable[[str], None] | None = None,
        keepalive_s: float = transport.KEEPALIVE_S,
        max_message_bytes: int = transport.MAX_MESSAGE_BYTES,
    ) -> None:
        self.holder = f"{holder} on {socket.gethostname()}, process {os.getpid()}"
        self._incarnation = secrets.randbits(64) or 1
        self.connect_timeout = connect_timeout
        self._on_wait = on_wait or (lambda line: _log.info("%s", line))
        self._peers = [
            _Peer(address, keepalive_s, max_message_bytes)
            for address in cluster.parse_hosts(addresses, "--ps")
        ]
        self._closing = threading.Event()
        self._renewer: threading.Thread | None = None
        self._lease_s = 10.0
        # Why we are chief no longer; empty while we are. Written by the renewing thread.
        self._deposed = ""
        self._roster_lock = threading.Lock()
        self._roster = job_pb2.Roster(number=-1)

    # -- looking -------------------------------------------------------------------------------

    def survey(
        self, timeout: float | None = None, wait: Callable[[float], bool] | None = None
    ) -> list[Status]:
        """The status of every shard, waiting for those that do not answer yet.

        In order of index if all are initialised, else of address. Shards listed twice (by two
        names) are merged. `wait(seconds)` True interrupts (default: `close` does). Raises:
        UnavailableError naming the one that stayed away for `timeout` seconds (default:
        connect_timeout), or was waited for when interrupted."""
        found: dict[int, tuple[_Peer, Status]] = {}
        for peer in self._peers:
            retry: Retry | None = None
            while True:
                try:
                    status = self._status(peer, CALL_S)
                    break
                except RETRYABLE as error:
                    retry = self._pause(retry, peer, error, timeout, wait or self._closing.wait)
            peer.incarnation = status.server_incarnation
            found.setdefault(status.server_incarnation, (peer, status))
        self._peers = [peer for peer, _ in found.values()]
        statuses = [status for _, status in found.values()]
        if all(status.initialized for status in statuses):
            order = sorted(range(len(statuses)), key=lambda i: statuses[i].shard_index)
            self._peers = [self._peers[i] for i in order]
            statuses = [statuses[i] for i in order]
        for peer, status in zip(self._peers, statuses, strict=True):
            peer.index = status.shard_index if status.initialized else None
            if status.initialized and not status.shard_index:
                self._learn(status.roster)
        return statuses

    def look(self, timeout_s: float = CALL_S) -> list[Status | ParamServerError]:
        """The status of every shard, or why there is none; tries once, waits for nobody."""
        answers: list[Status | ParamServerError] = []
        for peer in self._peers:
            try:
                status = self._status(peer, timeout_s)
                if status.initialized and not status.shard_index:
                    self._learn(status.roster)
                answers.append(status)
            except ParamServerError as error:
                answers.append(error)
        return answers

    def _status(self, peer: _Peer, timeout_s: float) -> Status:
        try:
            with call_errors(peer.name):
                return peer.stub.Status(
                    pb.StatusRequest(roster=self._news(peer)), timeout=timeout_s
                )
        except ParamServerError:
            peer.told = -1
            raise

    # -- being chief ---------------------------------------------------------------------------

    def claim(self) -> None:
        """Becomes chief at every shard, and stays it until `close`. Call `survey` first.

        In ascending order of the servers' incarnations, so that of two who try at once one gets
        all. Raises: PermissionDeniedError that names the holder; its `metadata` says for how long
        it holds, so that the caller can tell a living holder from a dead one."""
        for peer in sorted(self._peers, key=lambda p: p.incarnation):
            answer = self._claim(peer)
            if not answer.granted:
                self._release()
                error = PermissionDeniedError(
                    f"{answer.holder} is chief of this job (its claim ends in "
                    f"{answer.lease_left_s:.1f} s unless it renews it)"
                )
                error.metadata = (("lease-left-ms", str(int(answer.lease_left_s * 1000))),)
                raise error
            self._lease_s = answer.lease_s
        if self._renewer is None:
            self._renewer = threading.Thread(
                target=self._renew_forever, name="chief-lease", daemon=True
            )
            self._renewer.start()

    def check(self) -> None:
        """Raises: PermissionDeniedError if somebody else has become chief meanwhile."""
        if self._deposed:
            raise PermissionDeniedError(self._deposed)

    @property
    def lease_s(self) -> float:
        """Seconds that a claim holds."""
        return self._lease_s

    def _claim(self, peer: _Peer, release: bool = False) -> pb.ClaimResponse:
        with call_errors(peer.name):
            answer = peer.stub.Claim(
                pb.ClaimRequest(chief=self._chief(peer), release=release), timeout=CALL_S
            )
        peer.incarnation = answer.server_incarnation
        return answer

    def _release(self) -> None:
        for peer in self._peers:
            try:
                self._claim(peer, release=True)
            except ParamServerError as error:
                _log.debug("event=release-failed peer=%r reason=%r", peer.name, str(error))

    def _renew_forever(self) -> None:
        while not self._closing.wait(self._lease_s / 3):
            for peer in self._peers:
                try:
                    answer = self._claim(peer)
                except ParamServerError as error:
                    _log.debug("event=renew-failed peer=%r reason=%r", peer.name, str(error))
                    continue
                if not answer.granted:
                    self._deposed = f"{answer.holder} has become chief of this job"
                    return

    # -- giving a shard its state --------------------------------------------------------------

    def initialize(self, arrays: Mapping[str, Array], job: Job) -> bool:
        """Places the variables and gives every shard its own, ps:0 last; True if it did so.

        False: the job is there already, with this very model; nothing changes. What a dead
        initialiser left half done is done again. `arrays` in the layout's dtypes. Raises:
        InvalidArgumentError for what no shard can hold; AlreadyExistsError that names what differs;
        FailedPreconditionError for a job that has lost a shard."""
        variables = [
            Variable(name, array.dtype.name, array.shape) for name, array in arrays.items()
        ]
        _check_values(variables, arrays)
        statuses = self.survey()
        self.claim()
        model = model_fingerprint(variables)
        job = Job(job.consistency, job.optimizer, job.last_step, model, job.settings)
        match how_far(statuses):
            case "whole":
                check_model(statuses, variables)
                return False
            case "broken":
                raise FailedPreconditionError(
                    "the job has lost a shard that held variables, or is being restored; "
                    "restore it from a checkpoint with python -m chief"
                )
        session = secrets.randbits(64) or 1
        placed = place(variables, len(statuses))
        shards = [
            ShardArrays(
                ShardState(session, i, len(placed), job, tuple(own)),
                {v.name: (arrays[v.name], {}) for v in own},
            )
            for i, own in enumerate(placed)
        ]
        self.load(shards, restore=any(status.initialized for status in statuses))
        return True

    def load(self, shards: Sequence[ShardArrays], restore: bool) -> None:
        """Gives every shard its state, ps:0 last: until then no shard accepts joins.

        Peers become shards in the order in which they stand (`survey`)."""
        cls: Any = pb.RestoreRequest if restore else pb.InitializeRequest
        with self._roster_lock:
            self._roster = job_pb2.Roster(number=-1)
        for peer, shard in reversed(list(zip(self._peers, shards, strict=True))):
            peer.index = shard.state.index
            peer.told = -1
            nbytes = sum(value.nbytes for value, _ in shard.arrays.values())
            nbytes *= 1 + len(shard.state.job.optimizer.slots)
            call = peer.stub.Restore if restore else peer.stub.Initialize
            with call_errors(peer.name):
                answer = call(
                    _load_frames(cls, self._chief(peer), shard),
                    timeout=CALL_S + nbytes / SLOWEST_BYTES_PER_S,
                )
            if answer.session != shard.state.session:
                raise AlreadyExistsError(f"{peer.name} was initialised by somebody else meanwhile")

    # -- the cut -------------------------------------------------------------------------------

    def snapshot(
        self, hold_s: float, ahead: Mapping[tuple[str, int], int] | int = 0
    ) -> list[ShardArrays]:
        """A consistent cut over all shards, with all arrays; training goes on meanwhile.

        Pushes are held for the pushes in flight plus a round trip, `hold_s` seconds at most. With
        `ahead` the cut is not made before a round (synchronous jobs), or before certain workers'
        pushes, by (worker, incarnation): until then these go on. Raises: DeadlineExceededError or
        FailedPreconditionError if the cut was not reached in that time (the job goes on)."""
        cut = secrets.randbits(64) or 1
        try:
            admit = {} if isinstance(ahead, int) else dict(ahead)
            rounds = ahead if isinstance(ahead, int) else 0
            for peer in self._peers:
                with call_errors(peer.name):
                    held = peer.stub.Hold(
                        pb.HoldRequest(chief=self._chief(peer), cut=cut, deadline_s=hold_s),
                        timeout=CALL_S,
                    )
                rounds = max(rounds, held.rounds)
                for key, sequence in convert.sequences_from_proto(held.admitted).items():
                    admit[key] = max(sequence, admit.get(key, 0))
            self._cut_all(cut, admit, rounds, hold_s)
            return [self._fetch(peer, cut) for peer in self._peers]
        except BaseException:
            self._abandon(cut)
            raise

    def _cut_all(
        self, cut: int, admit: dict[tuple[str, int], int], rounds: int, hold_s: float
    ) -> None:
        """Tells all shards how far to go at once, and carries news until all have come there."""
        calls = []
        for peer in self._peers:
            request = pb.CutRequest(
                chief=self._chief(peer),
                cut=cut,
                admit=convert.sequences_to_proto(admit),
                rounds=rounds,
            )
            calls.append(peer.stub.Cut.future(request, timeout=hold_s + CALL_S))
        waiting = list(zip(self._peers, calls, strict=True))
        while waiting:
            peer, call = waiting[0]
            try:
                with call_errors(peer.name):
                    answer = call.result(timeout=0.2)
            except grpc.FutureTimeoutError:
                # A worker that died meanwhile is dropped by ps:0; the others learn of it from here.
                self.look()
                continue
            _log.debug("event=cut peer=%r pause_s=%.4f", peer.name, answer.pause_s)
            waiting.pop(0)

    def _fetch(self, peer: _Peer, cut: int) -> ShardArrays:
        """Streams what a cut kept into fresh arrays."""
        with call_errors(peer.name):
            stream = peer.stub.Snapshot(pb.SnapshotRequest(chief=self._chief(peer), cut=cut))
            state: ShardState | None = None
            layout: Layout = plan(())
            flat: dict[tuple[int, int], Array] = {}
            slots: tuple[str, ...] = ()
            for data in stream:
                frame = framing.decode(pb.SnapshotResponse, data)
                if state is None:
                    state = convert.state_from_proto(frame.message.state)
                    layout = convert.layout_from_proto(frame.message.layout)
                    slots = state.job.optimizer.slots
                    flat = _empty(layout, len(slots))
                for piece, values in codec.pieces(frame, layout, len(slots)):
                    out = flat[piece.group, piece.slot]
                    out[piece.offset : piece.offset + piece.count] = values
                if frame.message.last:
                    return ShardArrays(state, _by_name(layout, flat, slots))
        raise UnavailableError(f"{peer.name} ended its snapshot early")

    def _abandon(self, cut: int) -> None:
        for peer in self._peers:
            try:
                with call_errors(peer.name):
                    peer.stub.Cut(
                        pb.CutRequest(chief=self._chief(peer), cut=cut, abandon=True),
                        timeout=CALL_S,
                    )
            except ParamServerError as error:
                _log.debug("event=abandon-failed peer=%r reason=%r", peer.name, str(error))

    # -- changing and ending -------------------------------------------------------------------

    def configure(self, last_step: int) -> None:
        """Raises the limit of the running job."""
        for peer in self._peers:
            with call_errors(peer.name):
                answer = peer.stub.Configure(
                    pb.ConfigureRequest(chief=self._chief(peer), last_step=last_step),
                    timeout=CALL_S,
                )
            if answer.HasField("roster"):
                self._learn(answer.roster)

    def shutdown(self, now: bool, reason: str) -> list[str]:
        """The job is done (`now`: end the servers at once). ps:0 last; tries every shard.

        Returns the workers that some shard has not told yet."""
        waiting: set[str] = set()
        for peer in reversed(self._peers):
            try:
                with call_errors(peer.name):
                    answer = peer.stub.Shutdown(
                        pb.ShutdownRequest(chief=self._chief(peer), now=now, reason=reason),
                        timeout=CALL_S,
                    )
                waiting.update(answer.waiting_for)
            except UnavailableError as error:
                _log.debug("event=shutdown-failed peer=%r reason=%r", peer.name, str(error))
        return sorted(waiting)

    def close(self) -> None:
        """Gives up being chief, and ends the connections. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._renewer:
            self._renewer.join(CALL_S)
            self._release()
        for peer in self._peers:
            peer.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- small things --------------------------------------------------------------------------

    def _chief(self, peer: _Peer) -> pb.Chief:
        return pb.Chief(holder=self.holder, incarnation=self._incarnation, roster=self._news(peer))

    def _news(self, peer: _Peer) -> job_pb2.Roster | None:
        """The newest roster, if this shard has not had it from us."""
        with self._roster_lock:
            if not peer.index or self._roster.number <= peer.told:
                return None
            peer.told = self._roster.number
            return self._roster

    def _learn(self, roster: job_pb2.Roster) -> None:
        with self._roster_lock:
            same = roster.session == self._roster.session
            if not same or roster.number > self._roster.number:
                self._roster = roster
                if not same:
                    for peer in self._peers:
                        peer.told = -1

    def _pause(
        self,
        retry: Retry | None,
        peer: _Peer,
        error: ParamServerError,
        timeout: float | None,
        wait: Callable[[float], bool],
    ) -> Retry:
        if retry is None:
            total = self.connect_timeout if timeout is None else timeout
            retry = Retry(peer.name, total, wait=wait, on_wait=self._on_wait)
        retry.pause(error)
        return retry


class _Peer:
    """One shard as the chief sees it."""

    def __init__(self, address: Address, keepalive_s: float, max_message_bytes: int) -> None:
        self.address = address
        self.channel = transport.make_channel(
            address.target, keepalive_s=keepalive_s, max_message_bytes=max_message_bytes
        )
        self.stub = transport.ControlStub(self.channel)
        self.index: int | None = None
        self.incarnation = 0
        self.told = -1

    @property
    def name(self) -> str:
        """For messages: "ps:1 at 10.0.0.7:1682"."""
        return f"{'ps' if self.index is None else f'ps:{self.index}'} at {self.address}"


def how_far(statuses: Sequence[Status]) -> str:
    """What the shards hold together: "empty", "whole" (one session), "begun" (an initialiser died
    before it came to ps:0, so nothing has ever been trained), or "broken"."""
    held = [status for status in statuses if status.initialized]
    if not held:
        return "empty"
    sessions = {status.session for status in held}
    if len(held) == len(statuses) and len(sessions) == 1:
        return "whole"
    untouched = all(not status.version for status in held)
    return "begun" if untouched and all(status.shard_index for status in held) else "broken"


def check_set(statuses: Sequence[Status]) -> None:
    """Refuses a set of servers that is not a job's set of shards. Raises: ConfigError naming what
    is missing or too much."""
    held = [status for status in statuses if status.initialized]
    for count in {status.shard_count for status in held} - {len(statuses)}:
        here = ", ".join(f"ps:{i}" for i in sorted(status.shard_index for status in held))
        raise ConfigError(
            f"--ps names {len(statuses)} servers, but a job of {count} shards is there ({here}); "
            "name all of its servers, or end them first"
        )
    if len({status.shard_index for status in held}) != len(held):
        raise ConfigError("--ps names servers of two jobs; end those of one first")


def check_model(statuses: Sequence[Status], variables: Sequence[Variable]) -> None:
    """Refuses another model than the one that is there. Raises: AlreadyExistsError naming the
    difference."""
    held = {
        v.name: v for status in statuses for v in convert.layout_from_proto(status.layout).variables
    }
    given = {v.name: v for v in variables}
    for name in sorted(held.keys() | given.keys()):
        ours, theirs = held.get(name), given.get(name)
        if ours is None or theirs is None:
            where = "only in the job" if theirs is None else "only in the new model"
            raise AlreadyExistsError(f"another model is here already: {name!r} is {where}")
        if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
            raise AlreadyExistsError(
                f"another model is here already: {name!r} is {ours.dtype} {ours.shape}, "
                f"not {theirs.dtype} {theirs.shape}"
            )


def _check_values(variables: Sequence[Variable], arrays: Mapping[str, Array]) -> None:
    """Refuses before the first shard is called what some shard would refuse, so that none is given
    half a model. Raises: InvalidArgumentError that names the variable."""
    layout = plan(variables, Limits(len(variables), total_bytes=1 << 62))
    for v in layout.variables:
        whole = Range(v.group, v.offset, v.size)
        check_finite(layout, whole, arrays[v.name].reshape(-1), "variable")


def _load_frames(cls: type[Load], chief: pb.Chief, shard: ShardArrays) -> Iterator[Frame[Load]]:
    """The messages that give a shard its state. Arrays are referred to, and copied once on
    encoding."""
    layout = plan(shard.state.variables)
    slots: tuple[str, ...] = shard.state.job.optimizer.slots
    parts: list[tuple[Range, Array]] = []
    for slot, name in enumerate(("", *slots)):
        for variable in sorted(layout.variables, key=lambda v: (v.group, v.offset)):
            value, own = shard.arrays[variable.name]
            array = value if not slot else own.get(name)
            if array is None:
                continue
            if array.shape != variable.shape or array.dtype != DTYPES[variable.dtype]:
                raise NotFoundError(f"{variable.name!r} is not as its state says")
            piece = Range(variable.group, variable.offset, variable.size, slot)
            parts.append((piece, array.reshape(-1)))
    message = cls(chief=chief, state=convert.state_to_proto(shard.state))
    for chunk in codec.chunks(parts):
        yield codec.framed(message, chunk)
        message = cls()


def _empty(layout: Layout, slots: int) -> dict[tuple[int, int], Array]:
    return {
        (g, s): np.empty(group.size, DTYPES[group.dtype])
        for g, group in enumerate(layout.groups)
        for s in range(1 + slots)
    }


def _by_name(
    layout: Layout, flat: Mapping[tuple[int, int], Array], slots: Sequence[str]
) -> dict[str, tuple[Array, Mapping[str, Array]]]:
    found: dict[str, tuple[Array, Mapping[str, Array]]] = {}
    for v in layout.variables:
        own = slice(v.offset, v.offset + v.size)
        found[v.name] = (
            flat[v.group, 0][own].reshape(v.shape),
            {name: flat[v.group, k][own].reshape(v.shape) for k, name in enumerate(slots, start=1)},
        )
    return found
