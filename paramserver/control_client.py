"""What the chief holds: control calls to all shards of a job. The chief decides when; this does it.

It is chief at a shard as long as its lease there is renewed, which a thread does from `claim` on.
All calls block and are bounded in time.
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc

from paramserver import cluster, codec, convert, transport
from paramserver.cluster import Address
from paramserver.consistency import Sync
from paramserver.cut_off import CutOffStep
from paramserver.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    ParamServerError,
    PermissionDeniedError,
    UnavailableError,
)
from paramserver.job import Job
from paramserver.layout import (
    Array,
    Variable,
    model_fingerprint,
)
from paramserver.placement import place
from paramserver.retry import RETRYABLE, Retry, backoff
from paramserver.state import ShardState
from paramserver.status import call_errors
from paramserver.survey import Status, check_model, how_far
from paramserver.transfer import ShardArrays, check_values, load_frames, received
from paramserver.v1 import control_pb2 as pb
from paramserver.v1 import job_pb2

_log = logging.getLogger(__name__)

#: Deadline of a call that carries no arrays, in seconds.
CALL_S = 10.0

#: Giving up a claim is a courtesy: it ends by itself. Seconds.
RELEASE_S = 2.0

#: Arrays move at this rate at least, in bytes a second.
SLOWEST_BYTES_PER_S = 4e6

#: What a shard says of itself, as `survey` and `look` answer it.


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

    @property
    def peers(self) -> list[str]:
        """The shards for messages, "ps:1 at 10.0.0.7:1682", in the order of `survey` and `look`."""
        return [peer.name for peer in self._peers]

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
                peer.told = -1
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
        leases = []
        for peer in sorted(self._peers, key=lambda p: p.incarnation):
            with call_errors(peer.name):
                answer = self._claim(peer, CALL_S).result()
            peer.incarnation = answer.server_incarnation
            if not answer.granted:
                self._claim_all(RELEASE_S, release=True)
                error = PermissionDeniedError(
                    f"{answer.holder} is chief of this job (its claim ends in "
                    f"{answer.lease_left_s:.1f} s unless it renews it)"
                )
                left_ms = str(int(answer.lease_left_s * 1000))
                error.metadata = (("lease-left-ms", left_ms), ("peer", peer.name))
                raise error
            leases.append(answer.lease_s)
        self._lease_s = min(leases)
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

    def _claim(self, peer: _Peer, timeout_s: float, release: bool = False) -> Any:
        """Begins the call, and returns its future."""
        request = pb.ClaimRequest(chief=self._chief(peer), release=release)
        return peer.stub.Claim.future(request, timeout=timeout_s)

    def _claim_all(self, timeout_s: float, release: bool = False) -> None:
        """Renews or gives up all claims at once: a server that hangs holds up no other."""
        calls = [(peer, self._claim(peer, timeout_s, release)) for peer in self._peers]
        for peer, call in calls:
            try:
                with call_errors(peer.name):
                    answer = call.result()
            except ParamServerError as error:
                _log.debug("event=claim-failed peer=%r reason=%r", peer.name, str(error))
                continue
            # ps:0 decides. Another's claim may for a moment be with somebody who tries in vain.
            if not answer.granted and not release and peer is self._peers[0]:
                self._deposed = f"{answer.holder} has become chief of this job"

    def _renew_forever(self) -> None:
        while not self._closing.wait(self._lease_s / 3) and not self._deposed:
            self._claim_all(self._lease_s / 3)

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
        check_values(variables, arrays)
        statuses = self._claimed_unless_there()
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

    def _claimed_unless_there(self) -> list[Status]:
        """What the shards hold, seen as chief; or without a claim, if they hold a job already.

        While somebody else is chief that one may be bringing it: it is waited for.
        Raises: PermissionDeniedError if it brings nothing."""
        delays = backoff(0.02, 0.5, random.Random())
        give_up = time.monotonic() + self.connect_timeout
        while how_far(statuses := self.survey()) != "whole":
            try:
                self.claim()
                return self.survey()
            except PermissionDeniedError as error:
                self._on_wait(f"waiting for the shards to be initialised ({error})")
                if time.monotonic() > give_up or self._closing.wait(next(delays)):
                    raise
        return statuses

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
                    load_frames(cls, self._chief(peer), shard, peer.chunk_bytes),
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
        pushes, by (worker, incarnation): until then these go on. A step that a death cut off, and
        that a shard could not know of yet, is listed as if it had. Raises: DeadlineExceededError or
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
            # Whoever has a push in the cut at ps:0 must be known to all: it is on its way to them.
            self._ask_leader()
            self._cut_all(cut, admit, rounds, hold_s)
            shards = [self._fetch(peer, cut) for peer in self._peers]
            self._ask_leader()
            return [shards[0], *(self._with_departed(s, shards[0].state) for s in shards[1:])]
        except BaseException:
            self._abandon(cut)
            raise

    def _ask_leader(self) -> None:
        """Gets ps:0's newest roster."""
        self._learn(self._status(self._peers[0], CALL_S).roster)

    def _with_departed(self, shard: ShardArrays, head: ShardState) -> ShardArrays:
        """A shard's cut with the steps of workers that were gone from ps:0's cut already."""
        with self._roster_lock:
            roster = convert.roster_from_proto(self._roster)
        steps = list(shard.state.cut_off)
        pushed = {(r.worker, r.incarnation): r.sequence for r in shard.state.remembered}
        present = {member.key for member in head.members}
        known = {member.key for member in shard.state.members}
        for gone in roster.departed:
            here = pushed.get(gone.key, 0)
            if gone.key in known - present and here != gone.sequence:
                delta = 1 if here > gone.sequence else -1
                if isinstance(head.job.consistency, Sync):
                    # A round that others were in as well is a version either way.
                    extra = shard.state.version - head.version - sum(step.delta for step in steps)
                    delta = delta if extra else 0
                steps.append(CutOffStep(*gone.key, max(here, gone.sequence), delta))
        return replace(shard, state=replace(shard.state, cut_off=tuple(steps)))

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
        nbytes = self._status(peer, CALL_S).bytes_held
        request = pb.SnapshotRequest(chief=self._chief(peer), cut=cut)
        with call_errors(peer.name):
            stream = peer.stub.Snapshot(request, timeout=CALL_S + nbytes / SLOWEST_BYTES_PER_S)
            return received(stream, peer.name)

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
            except (UnavailableError, DeadlineExceededError) as error:
                _log.debug("event=shutdown-failed peer=%r reason=%r", peer.name, str(error))
        return sorted(waiting)

    def close(self) -> None:
        """Gives up being chief, and ends the connections. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._renewer:
            self._renewer.join(RELEASE_S)
            self._claim_all(RELEASE_S, release=True)
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
        self.chunk_bytes = codec.chunk_bytes(max_message_bytes)
        self.index: int | None = None
        self.incarnation = 0
        self.told = -1

    @property
    def name(self) -> str:
        """For messages: "ps:1 at 10.0.0.7:1682"."""
        return f"{'ps' if self.index is None else f'ps:{self.index}'} at {self.address}"
