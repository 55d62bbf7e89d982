"""Who calls the shards of a simulated cluster: workers and a chief, as real clients behave.

Each method is one call to one shard; `simulation` decides who makes one next. No gRPC, no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from shard_cases import LEASE, arrays_of, feed

from paramserver.buffers import Pin
from paramserver.consistency import Gate, Ssp
from paramserver.cut import Admitted
from paramserver.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    UnavailableError,
)
from paramserver.layout import Array
from paramserver.membership import Roster
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard, Snapshot, View
from paramserver.state import ShardState
from paramserver.update import Push

if TYPE_CHECKING:
    from simulation import Cluster

Key = tuple[str, int]
Step = tuple[str, int, int]
Action = Callable[[], object]
T = TypeVar("T")


@dataclass
class Worker:
    """One life of a worker, as a real client leads it: one call to one shard at a time."""

    cluster: Cluster
    name: str
    incarnation: int
    frozen: bool = False
    phase: str = "join"
    why: str = ""
    sequence: int = 0
    clock: int = 0
    step: int = 0
    roster: Roster = field(default_factory=Roster)
    given: dict[int, int] = field(default_factory=dict)
    views: dict[int, View] = field(default_factory=dict)
    reading: list[tuple[int, Pin, bytes]] = field(default_factory=list)
    pushes: dict[int, Push] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    results: dict[int, PushResult] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        """Who it is."""
        return self.name, self.incarnation

    @property
    def _missing(self) -> list[int]:
        done: Mapping[int, object] = self.views if self.phase == "pull" else self.results
        return [k for k in range(len(self.cluster.shards)) if k not in done]

    def actions(self) -> list[Action]:
        """The calls it may make now, each of them one message."""
        if self.phase == "join":
            return [self.join]
        if self.phase == "leave":
            return [self.leave]
        if self.reading and self.phase == "push":
            return [self.read]
        carry: list[Action] = [
            partial(self.carry, k)
            for k in range(1, len(self.cluster.shards))
            if self.roster.number > self.given.get(k, 0)
        ]
        if self.phase == "pull":
            read = [self.read] if self.reading else []
            return [*carry, *read, *(partial(self.pull, k) for k in self._missing)]
        sent: list[Action] = [partial(self.proceed, k) for k in self.pushes]
        broken: list[Action] = [partial(self.lose, k) for k in self.pushes]
        return [*carry, *(partial(self.push, k) for k in self._missing), *sent, *sent, *broken]

    def turn(self) -> None:
        """Makes each call that is due once, without mishaps."""
        while self.reading:
            self.read()
        phase = self.phase
        if phase in ("join", "leave"):
            self.actions()[0]()
            return
        for k in self._missing:
            if self.phase != phase or self not in self.cluster.workers:
                return
            if phase == "pull":
                self.pull(k)
                continue
            if k not in self.pushes:
                self.push(k)
            for _ in range(3):
                if k in self.pushes:
                    self.proceed(k)
                    self.cluster.drain()

    # -- its calls ---------------------------------------------------------------------------------

    def join(self) -> None:
        """Joins at ps:0, if no earlier life of it is a member there still."""
        leader = self.cluster.leader
        try:
            self.clock = leader.join(self.key, self.cluster.now)
        except AlreadyExistsError as error:
            self.why = str(error)
            return
        self.roster = leader.roster
        self.phase = "pull"

    def pull(self, k: int) -> None:
        """Asks shard k for the parameters of its clock, if they are there yet."""
        shard = self.cluster.shards[k]
        outcome = self._call(k, lambda: shard.pull(shard.state.session, self.key, self.clock))
        if isinstance(outcome, Gate):
            self.why = f"{self.name} at ps:{k}: {outcome.reason}"
        if not isinstance(outcome, View):
            return
        assert outcome.pin
        self._check_guarantee(shard, outcome)
        self.views[k] = outcome
        self.reading.append((k, outcome.pin, contents(outcome.pin)))
        if outcome.complete:
            self.cluster.finals.add((k, shard.last_step, outcome.version))
        if k == 0:
            self.step = outcome.step
            assert outcome.complete or 0 < self.step <= (shard.last_step or self.step)
        if self._missing:
            return
        complete = {view.complete for view in self.views.values()}
        if complete == {True}:
            self.phase = "leave"
        elif complete == {False}:
            self.phase = "push"
            self.sequence += 1
        else:
            # Some answered before the job was complete (or its limit was raised), some after.
            self.views.clear()

    def push(self, k: int) -> None:
        """Sends its whole gradient to shard k, again if it was sent before."""
        shard = self.cluster.shards[k]
        header = PushHeader(
            shard.state.session,
            *self.key,
            self.sequence,
            self.clock,
            self.step,
            self.views[k].version,
        )
        self.cluster.sent.append((k, header))
        outcome = self._call(k, lambda: shard.begin(header, self.cluster.now))
        if isinstance(outcome, Gate):
            self.why = f"{self.name} at ps:{k}: {outcome.reason}"
        elif isinstance(outcome, PushResult):
            self._answered(k, outcome)
        elif isinstance(outcome, Push):
            self.pushes[k] = outcome
            self.done[k] = 0

    def proceed(self, k: int) -> None:
        """The next message of a push to shard k: the gradient, the last one, is it in?"""
        shard, push = self.cluster.shards[k], self.pushes[k]
        self.done[k] += 1
        try:
            if self.done[k] == 1:
                feed(push)
            elif self.done[k] == 2:
                result = self._call(k, lambda: self.cluster.submit(k, push))
            else:
                result = self._call(k, lambda: shard.result_of(push))
        except UnavailableError:
            self.lose(k)
            return
        if self.done[k] > 1 and result:
            self._answered(k, result)

    def read(self) -> None:
        """Has received all that it was answered first. It was of one version all the time."""
        k, pin, was = self.reading.pop(0)
        assert contents(pin) == was, "a pinned version has changed"
        self.cluster.shards[k].release(pin)

    def lose(self, k: int) -> None:
        """The connection breaks before the answer comes; the push will be sent again."""
        push = self.pushes.pop(k)
        self.cluster.shards[k].abort(push)

    def carry(self, k: int) -> None:
        """Its heartbeat thread passes the newest roster on."""
        self.given[k] = self.roster.number
        self.cluster.shards[k].adopt(self.roster)

    def heartbeat(self) -> None:
        """Renews its lease, and passes the news on."""
        if self.frozen or self.phase in ("join", "leave"):
            return
        leader = self.cluster.leader
        self._call(0, lambda: leader.heartbeat(self.key, self.cluster.now))
        if self in self.cluster.workers:
            for k in range(1, len(self.cluster.shards)):
                self.carry(k)

    def leave(self) -> None:
        """Is done."""
        self.cluster.leader.leave(self.key, "done", self.cluster.now)
        self.cluster.kill(self)

    def hang_up(self) -> None:
        """All its streams end."""
        for k, push in self.pushes.items():
            self.cluster.shards[k].abort(push)
        self.pushes.clear()

    # -- how it calls ------------------------------------------------------------------------------

    def _call(self, k: int, call: Callable[[], T]) -> T | None:
        """One call to shard k with the news, and the reply's news. If aborted, it lives anew."""
        try:
            if k and self.roster.number > self.given.get(k, 0):
                self.carry(k)
            reply = call()
        except AbortedError:
            self._start_anew()
            return None
        if k == 0:
            self.roster = self.cluster.leader.roster
        return reply

    def _start_anew(self) -> None:
        self.cluster.leader.leave(self.key, "joins again", self.cluster.now)
        self.cluster.kill(self)
        self.cluster.spawn(int(self.name.partition(":")[2]))

    def _answered(self, k: int, result: PushResult) -> None:
        assert result.applied, result
        self.pushes.pop(k, None)
        self.results[k] = result
        if self._missing:
            return
        self.cluster.acknowledged.add((*self.key, self.sequence))
        self.phase = "pull"
        self.clock += 1
        self.results.clear()
        self.views.clear()

    def _check_guarantee(self, shard: Shard, view: View) -> None:
        if view.complete:
            return
        if shard.sync:
            assert shard.rounds == self.clock
        if isinstance(shard.job.consistency, Ssp):
            assert min(shard.clocks.values()) >= self.clock - shard.job.consistency.slack


def contents(pin: Pin) -> bytes:
    """What somebody reads."""
    return b"".join(array.tobytes() for array in pin.arrays.values())


@dataclass
class Saved:
    """A checkpoint: each shard's state, the steps in it there, and those that must be in it."""

    states: list[ShardState]
    arrays: dict[tuple[str, int], Array]
    steps: list[set[Step]]
    must: set[Step]


@dataclass
class Chief:
    """Makes consistent checkpoints, one call at a time: hold all, cut all at the maximum."""

    cluster: Cluster
    busy: bool = False
    cut: int = 0
    held: dict[int, Admitted] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)
    taken: dict[int, tuple[Snapshot, set[Step]]] = field(default_factory=dict)
    must: set[Step] = field(default_factory=set)
    roster: Roster = field(default_factory=Roster)
    saved: list[Saved] = field(default_factory=list)

    def begin(self) -> None:
        """Wants a checkpoint, if it is not making one."""
        if not self.busy:
            self.busy = True
            self.cut += 1
            # In a synchronous job a step is in once its round is closed, acknowledged before.
            self.must = set() if self.cluster.sync else set(self.cluster.acknowledged)

    def actions(self) -> list[Action]:
        """The calls it may make now."""
        if not self.busy:
            return []
        all_shards = range(len(self.cluster.shards))
        if len(self.held) < len(all_shards):
            return [partial(self._try, self._hold, k) for k in all_shards if k not in self.held]
        return [partial(self._try, self._cut, k) for k in all_shards if k not in self.taken]

    def turn(self) -> None:
        """Makes each call that is due once."""
        for action in self.actions():
            if self.busy:
                action()

    def _try(self, call: Callable[[int], None], k: int) -> None:
        if k:
            self.cluster.shards[k].adopt(self.roster)
        try:
            call(k)
        except FailedPreconditionError:
            self.abandon()
        else:
            if k == 0:
                self.roster = self.cluster.leader.roster

    def _hold(self, k: int) -> None:
        now = self.cluster.now
        self.held[k] = self.cluster.shards[k].hold(self.cut, now, now + LEASE)

    def _cut(self, k: int) -> None:
        shard = self.cluster.shards[k]
        if k not in self.told:
            admit: dict[Key, int] = {}
            for held in self.held.values():
                for key, sequence in held.sequences.items():
                    admit[key] = max(admit.get(key, 0), sequence)
            shard.cut(self.cut, admit, max(held.rounds for held in self.held.values()))
            self.told.add(k)
        if not shard.cut_gate(self.cut).open:
            return
        self.taken[k] = shard.take_cut(self.cluster.now), set(self.cluster.ledger[k])
        if len(self.taken) == len(self.cluster.shards):
            taken = [self.taken[j] for j in sorted(self.taken)]
            arrays = {key: a for s, _ in taken for key, a in arrays_of(s).items()}
            steps = [steps for _, steps in taken]
            self.saved.append(Saved([s.state for s, _ in taken], arrays, steps, self.must))
            self.abandon()

    def abandon(self, dead: bool = False) -> None:
        """Lets go of all that it holds; if it is dead, a hold stays until it ends by itself."""
        for k, shard in enumerate(self.cluster.shards):
            if not dead:
                shard.release_hold(self.cut)
            if k in self.taken:
                shard.release(self.taken[k][0].pin)
        self.busy = False
        self.held, self.told, self.taken = {}, set(), {}
