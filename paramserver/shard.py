"""The whole state of one shard in one session: decides everything, does no I/O, knows no locks.

Fourth stop in the walk of one Push. Time comes in as `now`, decisions come out as values with a
reason: a `Push` to feed, a `PushResult`, or a closed `Gate` to wait at. Nothing here waits. The
caller (`host`, a property-based test, a simulation) guards every call with one lock, except
`Push.feed` and `Update.run`, which touch nothing shared.

    push    begin -> feed ... finish -> submit -> [take_update -> run -> commit]
    pull    pull -> read the arrays -> release
    cut     hold -> cut -> take_cut -> read the arrays -> release

ps:0 decides for all shards: who is a member, when the first round opens, which step numbers are
granted, when the job is complete. The others adopt its roster.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paramserver.buffers import Pin
from paramserver.consistency import OPEN, Gate, Progress, Sync, awaited
from paramserver.cut import Admitted, Hold
from paramserver.cut_off import CutOffSteps
from paramserver.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseLostError,
    SessionSupersededError,
    UnavailableError,
)
from paramserver.grants import Grants
from paramserver.layout import Array, Layout
from paramserver.membership import (
    KEPT_DEPARTURES,
    Departure,
    LastPush,
    Member,
    Membership,
    Opening,
    Roster,
    worker_order,
)
from paramserver.optimizers import Optimizer
from paramserver.parameters import Parameters
from paramserver.push import PushHeader, PushResult
from paramserver.state import Remembered, ShardState
from paramserver.update import Push, Update

Key = tuple[str, int]


@dataclass(frozen=True)
class View:
    """The parameters of one version: `arrays[group]` must not be written, and are to be released.

    `step` is the number granted to the puller (0: none), `complete` that these are final."""

    layout: Layout
    version: int
    global_step: int
    step: int
    complete: bool
    pin: Pin | None


@dataclass(frozen=True)
class Snapshot:
    """What a cut kept: the state, and references to all arrays, to be released."""

    state: ShardState
    layout: Layout
    pin: Pin
    pause_s: float


class Shard:
    """One shard of one session. Everything that a parameter server holds, and every decision on
    it."""

    def __init__(
        self,
        state: ShardState,
        layout: Layout,
        arrays: Sequence[Sequence[Array]],
        lease_s: float,
        now: float,
        most_in_flight: int = 1 << 62,
    ) -> None:
        self.state = state
        self.job = state.job
        self.layout = layout
        self.rounds = state.rounds
        self.superseded = False
        self.cut_off = CutOffSteps(state.cut_off)
        if self.state.index:
            self.cut_off.settle(state.version - state.global_step)
        self.counts = {"applied": 0, "refused": 0, "repeated": 0, "aborted": 0}
        self.membership = Membership(lease_s)
        self.roster = Roster(
            session=state.session, last_step=self.job.last_step, rounds=self.rounds
        )
        self._params = Parameters(layout, arrays, state.version)
        self._members: dict[str, Member] = {}
        self._clocks: dict[str, int] = {}
        self._remembered = {(r.worker, r.incarnation): r for r in state.remembered}
        self._results: dict[Key, PushResult] = {}
        self._in_flight: dict[Key, Push] = {}
        self._ready: deque[Push] = deque()
        self._staged: dict[str, Push] = {}
        self._round_begun = False
        self._grants = Grants(state.global_step)
        # Members whose direct push had to make way; their next one is staged.
        self._slow: set[Key] = set()
        self._hold: Hold | None = None
        # Bytes of staged gradients that may be on their way at one time (not in sync).
        self._most_in_flight = most_in_flight
        self._told: set[Key] = set()
        self._opening = Opening(
            getattr(self.job.consistency, "workers", 0),
            getattr(self.job.consistency, "min_workers", 0),
            [m.worker for m in state.members],
            lease_s,
        )
        self._start = Gate(False, "the first round waits for workers") if self.sync else OPEN
        if self.leads:
            self._renew_roster()
            self.tick(now)

    # -- what it is ----------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        """Whether this is ps:0, which decides for all."""
        return self.state.index == 0

    @property
    def sync(self) -> bool:
        """Whether gradients are aggregated in rounds."""
        return isinstance(self.job.consistency, Sync)

    @property
    def version(self) -> int:
        """Updates applied here."""
        return self._params.version

    @property
    def global_step(self) -> int:
        """ps:0: updates the job has applied. Elsewhere 0: it is not theirs to say."""
        return self._grants.applied if self.leads else 0

    @property
    def last_step(self) -> int:
        """The limit in force; 0: none."""
        return self.roster.last_step

    @property
    def complete(self) -> bool:
        """Whether the limit is reached: every granted step is applied."""
        if not self.leads:
            return self.roster.complete
        return 0 < self.last_step <= self._grants.applied

    @property
    def clocks(self) -> Mapping[str, int]:
        """Steps completed by each live worker, in order of index."""
        return self._clocks

    @property
    def nbytes(self) -> int:
        """Bytes of variables and slots, spares included."""
        return self._params.nbytes

    @property
    def nbytes_in_flight(self) -> int:
        """Bytes of gradients that have arrived and are not applied."""
        pushes = {id(p): p for p in (*self._in_flight.values(), *self._staged.values())}
        return sum(p.nbytes for p in pushes.values())

    def incarnation(self, worker: str) -> int:
        """The life of a live worker."""
        return self._members[worker].incarnation

    def sequence(self, member: Key) -> int:
        """A worker's last push that counts here; 0: none."""
        known = self._remembered.get(member)
        return known.sequence if known else 0

    def _progress(self) -> Progress:
        begun = self._round_begun or bool(self._staged)
        return Progress(self._clocks, self.rounds, begun, self._start)

    # -- membership ----------------------------------------------------------------------------

    def join(self, member: Key, now: float) -> int:
        """ps:0: makes a worker a member and answers the clock it counts from. Repeatable.

        Raises: AlreadyExistsError while another life of it is alive; LeaseLostError for one that
        is over; FailedPreconditionError elsewhere than at ps:0."""
        worker_order(member[0])
        if not self.leads:
            raise FailedPreconditionError(f"ps:{self.state.index} takes no members; join at ps:0")
        if not member[1]:
            raise InvalidArgumentError(f"{member[0]} has no incarnation; choose a random id")
        if any(gone.key == member for gone in self.roster.departed):
            # Its steps are weighed and listed: a life that has ended must not go on.
            raise LeaseLostError(f"this life of {member[0]} is over; join with a new incarnation")
        if self.membership.join(member, now):
            clock = self.job.consistency.start_clock(self._progress())
            self._forget(member[0])
            self._enter(Member(*member, clock))
            if not self._start.open:
                self._opening.saw(member[0])
            self._renew_roster()
            self.tick(now)
        return self._members[member[0]].clock

    def heartbeat(self, member: Key, now: float) -> None:
        """A sign of life. Raises: LeaseLostError if it is too late."""
        if self.leads:
            self.membership.renew(member, now)
            self.tick(now)

    def leave(self, member: Key, reason: str, now: float) -> None:
        """ps:0: the worker takes no part any more. Repeatable; elsewhere the roster says it."""
        if self.leads and self._is_member(member):
            self._depart(member, reason)
            self._renew_roster()
            self.tick(now)

    def tick(self, now: float) -> list[Departure]:
        """Lets time pass: ends leases and holds, opens the first round. Returns who was dropped."""
        if self._hold and now >= self._hold.until:
            self._hold = None
        if not self.leads:
            return []
        expired = self.membership.expired(now)
        dropped = [
            self._depart(member, f"lease of {self.membership.lease_s:g} s ended")
            for member in expired
        ]
        changed = bool(dropped)
        if not self._start.open:
            self._start = self._opening.gate(len(self._clocks), now)
            changed |= self._start.open
        if changed:
            self._renew_roster()
        return dropped

    def next_deadline(self) -> float | None:
        """When `tick` has something to do at the latest; None: not by time alone."""
        times = [self._hold.until if self._hold else None]
        if self.leads:
            times += [self.membership.next_expiry(), self._opening.deadline()]
        return min((t for t in times if t is not None), default=None)

    def adopt(self, roster: Roster) -> bool:
        """Takes over what ps:0 decided, if it is news of this session; True if it was."""
        if self.leads or roster.session != self.state.session:
            return False
        if roster.number <= self.roster.number:
            return False
        handled = {d.key for d in self.roster.departed}
        decided = {d.key: d.sequence for d in roster.departed if d.key not in handled}
        gone = [m.key for m in self._members.values() if not roster.has(m.key)]
        # A worker that pushed at ps:0 and died before we ever heard of it has left a step, too.
        for key in (*gone, *(key for key in decided if key not in gone)):
            self._follow(key, decided.get(key))
        for member in roster.members:
            if not self._is_member(member.key):
                self._forget(member.worker)
                self._enter(member)
        if roster.open:
            self._start = OPEN
        if roster.last_step != self.roster.last_step:
            self.job = replace(self.job, last_step=roster.last_step)
            self._told.clear()
        self.roster = roster
        return True

    def tell(self, member: Key) -> None:
        """Notes that a member has been sent the final parameters."""
        self._told.add(member)

    def untold(self) -> list[str]:
        """Members that have not been given the final parameters here."""
        return [m.worker for m in self.roster.members if m.key not in self._told]

    def set_last_step(self, last_step: int) -> None:
        """ps:0: raises the limit. Raises: InvalidArgumentError for one below what is promised."""
        if not self.leads:
            return
        lowest = self.last_step or self._grants.highest
        if last_step and (last_step < lowest):
            raise InvalidArgumentError(
                f"the limit cannot be lowered to {last_step}, below {lowest}"
            )
        self.roster = replace(self.roster, last_step=last_step)
        self.job = replace(self.job, last_step=last_step)
        self._told.clear()
        self._renew_roster()

    def _is_member(self, member: Key) -> bool:
        known = self._members.get(member[0])
        return known is not None and known.incarnation == member[1]

    def _check_member(self, member: Key) -> None:
        if not self._is_member(member):
            raise LeaseLostError(
                f"{member[0] or 'a caller without a name'} is no member of this job (any more); "
                "join again"
            )

    def _enter(self, member: Member) -> None:
        self._members[member.worker] = member
        self._members = dict(sorted(self._members.items(), key=lambda m: worker_order(m[0])))
        self._clocks[member.worker] = member.clock
        self._clocks = {worker: self._clocks[worker] for worker in self._members}

    def _forget(self, worker: str) -> None:
        """Drops what was kept of earlier lives of a worker."""
        for table in (self._remembered, self._results):
            for key in [k for k in table if k[0] == worker]:
                del table[key]

    def _depart(self, member: Key, reason: str) -> Departure:
        """ps:0: a member is gone. What it had staged stays in its round: it may be acknowledged."""
        departure = Departure(*member, self.sequence(member), reason)
        self._remove(member)
        self.membership.remove(member)
        self._grants.give_back(member)
        self.roster = replace(
            self.roster, departed=(*self.roster.departed, departure)[-KEPT_DEPARTURES:]
        )
        return departure

    def _follow(self, member: Key, decided: int | None) -> None:
        """Elsewhere: a member is gone. Its last step may be in here and not at ps:0, or the
        reverse."""
        here = self.sequence(member)
        staged = self._staged.get(member[0])
        if decided is None:
            decided = here
        if here > decided and staged and staged.header.member == member:
            del self._staged[member[0]]
            # An update that is being made with it is not published, but made again without it.
            staged.cancelled = f"{member[0]} is no member of this job any more"
        elif self.sync:
            self.cut_off.departed_from_round(member, here, decided)
        else:
            self.cut_off.departed(member, here, decided)
        self._remove(member)

    def _remove(self, member: Key) -> None:
        if self._is_member(member):
            del self._clocks[member[0]], self._members[member[0]]
        self._told.discard(member)
        self._remembered.pop(member, None)
        self._results.pop(member, None)
        self._slow.discard(member)
        push = self._in_flight.get(member)
        if push:
            self._cancel(push, f"{member[0]} is no member of this job any more")

    def _renew_roster(self) -> None:
        """ps:0: writes its decisions down under the next number."""
        members = tuple(self._members.values())
        complete = self.complete
        last = tuple(LastPush(*m.key, self.sequence(m.key)) for m in members) if complete else ()
        self.roster = replace(
            self.roster,
            number=self.roster.number + 1,
            members=members,
            open=self._start.open,
            complete=complete,
            last_pushes=last,
            rounds=self.rounds,
        )

    # -- push ----------------------------------------------------------------------------------

    def begin(self, header: PushHeader, now: float) -> Push | PushResult | Gate:
        """Decides on a push before its gradient: take it, answer it, or let it wait for a cut.

        A repeat is answered before anything else is checked. Raises: SessionSupersededError,
        LeaseLostError, AbortedError, FailedPreconditionError, InvalidArgumentError; nothing
        changes."""
        member = header.member
        known = self._remembered.get(member)
        if known and header.sequence == known.sequence:
            self.counts["repeated"] += 1
            return self._results.get(member) or PushResult(
                True, "applied", self.version, 0, self.global_step
            )
        self.check_session(header.session)
        self._check_member(member)
        if header.sequence < 1 or (known and header.sequence < known.sequence):
            raise AbortedError(
                f"{member[0]} sent push {header.sequence} after push {self.sequence(member)}"
            )
        if self.leads and self.complete:
            self.counts["refused"] += 1
            return PushResult(False, "job_complete", self.version, 0, self.global_step)
        self._check_clock(header)
        self._check_step(header)
        if self._hold and not self.sync and not self._hold.admits(member, header.sequence):
            return Gate(False, "a checkpoint is being cut")
        earlier = self._in_flight.get(member)
        if earlier:
            if self._params.writer and earlier in self._params.writer.pushes:
                return Gate(False, "the same push is being applied")
            self._cancel(earlier, "sent again")
        direct = None
        if not self.sync and not self._ready and member not in self._slow:
            direct = self._params.start(range(len(self.layout.groups)), self._rule(header))
        if not direct and not self._has_room():
            return Gate(
                False,
                f"gradients of {self._most_in_flight} bytes are in flight (--max-in-flight)",
            )
        push = Push(header, self.layout, direct)
        self._in_flight[member] = push
        return push

    def _has_room(self) -> bool:
        """Whether another staged push may arrive: each counts as large as the model, and one is
        always let in. A round needs one gradient of every worker, or it would never close."""
        waiting = sum(1 for push in self._in_flight.values() if not push.update)
        needed = (waiting + 1) * self.layout.nbytes
        return self.sync or not waiting or needed <= self._most_in_flight

    def _rule(self, header: PushHeader) -> Optimizer:
        """The update rule at a push's step (an ungranted one: at the number it will get)."""
        step = header.step or self._grants.held(header.member) or self._grants.applied + 1
        return self.job.optimizer.at(step)

    def check_session(self, session: int) -> None:
        """Raises: SessionSupersededError for a call from another session."""
        if self.superseded or session != self.state.session:
            raise SessionSupersededError(
                "the job was restored from a checkpoint since you pulled; pull again"
            )

    def _check_clock(self, header: PushHeader) -> None:
        clock = self._clocks[header.worker]
        if header.clock != clock:
            raise AbortedError(
                f"{header.worker} pushes for clock {header.clock}, and is at clock {clock}; "
                "pull again"
            )
        if self.sync and (not self._start.open or clock != self.rounds):
            raise FailedPreconditionError(
                f"{header.worker} pushes for round {clock} before it has begun "
                f"(round {self.rounds} is open); pull first"
            )

    def _check_step(self, header: PushHeader) -> None:
        """A step number must be the one that was granted; one shard alone can do without."""
        if not self.leads:
            if not header.step:
                raise FailedPreconditionError(
                    "a job of several shards needs the step number that ps:0 grants; pull first"
                )
            return
        if self.sync:
            right: int | None = self._grants.applied + 1
        else:
            right = self._grants.held(header.member)
            if not header.step and right is None:
                right = self._grants.take(header.member, self.last_step)
                if right is None:
                    raise FailedPreconditionError(
                        f"the last steps are granted to {', '.join(self._grants.holders())}"
                    )
        if header.step and header.step != right:
            raise AbortedError(f"step {header.step} is not granted to {header.worker}; pull again")

    def abort(self, push: Push, why: str = "broken off") -> None:
        """Ends a push that will not be completed; called by whoever fed it. Nothing has changed.
        Repeatable."""
        if push.update:
            self._params.drop(push.update)
        self._cancel(push, why)

    def _cancel(self, push: Push, why: str) -> None:
        """The same, while another thread may be feeding it."""
        if push.update:
            self._params.drop(push.update, still_written=True)
        if self._in_flight.get(push.header.member) is push:
            del self._in_flight[push.header.member]
            push.cancelled = why
            self.counts["aborted"] += 1

    def streaming(self) -> Push | None:
        """The direct push whose pieces are still arriving, if any. Complete ones wait for it."""
        writer = self._params.writer
        return next((p for p in self._in_flight.values() if writer and p.update is writer), None)

    def make_way(self, push: Push) -> None:
        """Ends a direct push that arrives too slowly, for the complete ones behind it. Its client
        sends it again, and then it is staged."""
        self._slow.add(push.header.member)
        self._cancel(push, "it arrives too slowly, and others are waiting; send it again")

    def submit(self, push: Push) -> PushResult | None:
        """A push is complete (`Push.finish` went through). In a synchronous job it counts from
        here.

        Returns its result, or None: it is in once an update with it has been committed
        (`result_of`). Raises: UnavailableError if it was cancelled meanwhile; sent again, it is
        answered as it deserves. SessionSupersededError if a restore came in between."""
        self._check_in_flight(push)
        if push.update:
            self._params.publish(push.update)
            return self._applied(push)
        if not self.sync:
            self._ready.append(push)
            return None
        member = push.header.member
        del self._in_flight[member]
        self._staged[member[0]] = push
        return self._remember(push, self.version + 1, self.global_step + self.leads)

    def result_of(self, push: Push) -> PushResult | None:
        """The result of a submitted push; None: not applied yet. Raises: as `submit`."""
        if push.result is None:
            self._check_in_flight(push)
        return push.result

    def _check_in_flight(self, push: Push) -> None:
        self.check_session(push.header.session)
        if push.cancelled:
            raise UnavailableError(f"push {push.header.sequence}: {push.cancelled}")

    def _remember(self, push: Push, version: int, global_step: int) -> PushResult:
        header = push.header
        clock = self._clocks[header.worker] = header.clock + 1
        self._remembered[header.member] = Remembered(
            header.worker, header.incarnation, header.sequence, clock
        )
        staleness = max(0, version - 1 - header.pulled_version)
        result = PushResult(True, "applied", version, staleness, global_step)
        self._results[header.member] = push.result = result
        self.counts["applied"] += 1
        return result

    # -- update --------------------------------------------------------------------------------

    def take_update(self) -> Update | None:
        """The next version to make, if there is one and nobody is making another. Run, then
        commit."""
        if self._params.writer or self.superseded:
            return None
        pushes = self._next_round() if self.sync else self._next_ready()
        if not pushes:
            return None
        groups = sorted({g for push in pushes for g in push.groups})
        update = self._params.start(groups, self._rule(pushes[0].header))
        if update:
            update.pushes = pushes
        return update

    def commit(self, update: Update) -> None:
        """Publishes what `Update.run` made: one swap of references, one version more.

        Called once for every update taken, also if `run` failed: then nothing changes."""
        if not update.done or self.superseded or any(p.cancelled for p in update.pushes):
            self._params.drop(update)
            if not self.sync:
                self._cancel(update.pushes[0], "it could not be applied")
            return
        self._params.publish(update)
        if self.sync:
            self._close_round(update.pushes)
        else:
            self._ready.popleft()
            self._applied(update.pushes[0])

    def _applied(self, push: Push) -> PushResult:
        """A push is in (not in sync, where a round is)."""
        del self._in_flight[push.header.member]
        self._slow.discard(push.header.member)
        if self.leads:
            self._grants.spend(push.header.member)
        result = self._remember(push, self.version, self.global_step)
        self._announce_completion()
        return result

    def _next_ready(self) -> list[Push]:
        while self._ready and self._ready[0].cancelled:
            self._ready.popleft()
        return [self._ready[0]] if self._ready else []

    def _next_round(self) -> list[Push]:
        """The gradients of the open round in worker-index order, if it can be closed."""
        self._close_empty_rounds()
        if not self._staged or not self._may_close():
            return []
        return [self._staged[w] for w in sorted(self._staged, key=worker_order)]

    def _close_empty_rounds(self) -> None:
        """Closes rounds that had begun, here or elsewhere, and that nobody can bring anything to
        any more."""
        agreed = (self._hold and self._hold.rounds) or 0
        furthest = max(agreed, self.roster.rounds, *self._clocks.values())
        while not self._staged and self._may_close():
            if not self._round_begun and self.rounds >= furthest:
                break
            self._close_round(())
            # Nobody was in the rounds that follow, up to where somebody counts from: one step.
            bounds = [furthest, *self._clocks.values(), *([agreed] if self._hold else [])]
            self.rounds = max(self.rounds, min(bounds))

    def _may_close(self) -> bool:
        held = self._hold is not None and not self._hold.closes(self.rounds)
        return self._start.open and not awaited(self._progress()) and not held

    def _close_round(self, pushes: Sequence[Push]) -> None:
        """A round is over. Without gradients (all its workers died) it is no version."""
        if pushes and self.leads:
            self._grants.applied += 1
        self.rounds += 1
        self._round_begun = False
        self.cut_off.closed_round([p.header.member for p in pushes])
        for push in pushes:
            del self._staged[push.header.worker]
        self._announce_completion()

    def _announce_completion(self) -> None:
        if self.leads and self.complete and not self.roster.complete:
            self._renew_roster()

    # -- pull ----------------------------------------------------------------------------------

    def pull(
        self, session: int, member: Key, clock: int | None, values: bool = True
    ) -> View | Gate:
        """The current parameters (references only), or what to wait for.

        `clock` None reads now and takes no part. Raises: SessionSupersededError, LeaseLostError,
        AbortedError. A view with values must be given back with `release`."""
        if session or clock is not None:
            self.check_session(session)
        step, complete = 0, False
        if clock is not None:
            self._check_member(member)
            if self.sync:
                self._close_empty_rounds()
            gate = self._pull_gate(member, clock)
            if not gate.open:
                return gate
            complete = self.complete
            if self.leads and not complete:
                step = self._grant(member)
                if not step:
                    return Gate(
                        False, f"the last steps are granted to {', '.join(self._grants.holders())}"
                    )
        pin = self._params.pin(slots=False) if values else None
        return View(self.layout, self.version, self.global_step, step, complete, pin)

    def release(self, pin: Pin) -> bool:
        """Gives back the references of a view or a snapshot; whether an update waits for that."""
        return self._params.release(pin)

    def _grant(self, member: Key) -> int:
        if self.sync:
            self._round_begun = True
            return self._grants.applied + 1
        return self._grants.take(member, self.last_step) or 0

    def _pull_gate(self, member: Key, clock: int) -> Gate:
        if self.complete:
            return self._final_gate()
        if clock != self._clocks[member[0]]:
            raise AbortedError(
                f"{member[0]} pulls for clock {clock} and is at clock {self._clocks[member[0]]}; "
                "join again"
            )
        return self.job.consistency.gate(clock, self._progress())

    def _final_gate(self) -> Gate:
        """The job is complete; elsewhere than at ps:0 the last pushes may still be on their way."""
        for last in () if self.leads else self.roster.last_pushes:
            if self._is_member(last.key) and self.sequence(last.key) < last.sequence:
                return Gate(False, f"the last push of {last.worker} is on its way")
        if self.sync and not self.leads and self.rounds < self.roster.rounds:
            return Gate(False, f"the last round, {self.roster.rounds - 1}, is being applied")
        return OPEN

    # -- cut -----------------------------------------------------------------------------------

    def hold(self, cut: int, now: float, until: float) -> Admitted:
        """Admits no further push (sync: closes no further round) until the cut, or `until`.

        Raises: FailedPreconditionError while another cut is being made."""
        if self._hold and self._hold.cut != cut:
            raise FailedPreconditionError("another checkpoint is being cut; try again")
        if not self._hold:
            self._hold = Hold(cut, now, until)
        sequences = {key: r.sequence for key, r in self._remembered.items()}
        for key, push in self._in_flight.items():
            sequences[key] = max(sequences.get(key, 0), push.header.sequence)
        busy = self.sync and self._params.writer is not None
        return Admitted(sequences, self.rounds + busy)

    def cut(self, cut: int, admit: Mapping[Key, int], rounds: int) -> None:
        """Says how far to admit. Raises: FailedPreconditionError if the hold has ended."""
        if not self._hold or self._hold.cut != cut:
            raise FailedPreconditionError("the hold of this checkpoint has ended; begin again")
        self._hold.admit, self._hold.rounds = admit, rounds

    def cut_gate(self, cut: int) -> Gate:
        """Whether the shard has come to the cut. Raises: FailedPreconditionError."""
        if not self._hold or self._hold.cut != cut:
            raise FailedPreconditionError("the hold of this checkpoint has ended; begin again")
        if self._params.writer:
            return Gate(False, "an update is being applied")
        if self.sync:
            late = self.rounds < (self._hold.rounds or 0)
            return Gate(False, f"round {self.rounds} is open") if late else OPEN
        for member, sequence in (self._hold.admit or {}).items():
            if self._is_member(member) and self.sequence(member) < sequence:
                return Gate(False, f"push {sequence} of {member[0]} is on its way")
        return OPEN

    def take_cut(self, now: float) -> Snapshot:
        """Keeps references to everything at this instant, and goes on. The gate must be open."""
        assert self._hold is not None
        pause = now - self._hold.since
        self._hold = None
        # A staged gradient is not in the cut, so the cut must not remember it as applied. Nor need
        # it remember its worker's push before: that was answered, or this one had not been sent.
        staged = {p.header.member for p in self._staged.values()}
        remembered = tuple(r for key, r in self._remembered.items() if key not in staged)
        members = tuple(
            replace(m, clock=self._clocks[m.worker] - (m.key in staged))
            for m in self._members.values()
        )
        state = replace(
            self.state,
            job=self.job,
            variables=self._params.variables(),
            version=self.version,
            global_step=self.global_step,
            rounds=self.rounds,
            remembered=remembered,
            members=members,
            cut_off=tuple(self.cut_off.steps),
        )
        return Snapshot(state, self.layout, self._params.pin(slots=True), pause)

    def release_hold(self, cut: int) -> None:
        """Goes on as if nothing had been held. Repeatable."""
        if self._hold and self._hold.cut == cut:
            self._hold = None
