"""A cluster in virtual time: shards, workers and a chief as plain objects. No gRPC, no threads.

Every message and every step of a server is one call, so a test decides the order of everything. A
worker does what a real client does, one call at a time: it joins at ps:0, waits in its pull on all
shards, pushes one step to all of them, and carries the newest roster that ps:0 gave it to each
other shard. All gradients are ones and the rule is SGD, so that every element of a shard is minus
RATE times its version, exactly: what is lost, counted twice or torn shows.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import numpy as np
from shard_cases import LEASE, SESSION, arrays_of, feed, load, start, values

from paramserver.buffers import Pin
from paramserver.consistency import Gate, Ssp
from paramserver.cut import Admitted
from paramserver.errors import (
    AbortedError,
    AlreadyExistsError,
    FailedPreconditionError,
    UnavailableError,
)
from paramserver.job import Job
from paramserver.layout import Array, Variable
from paramserver.membership import Roster
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard, Snapshot, View
from paramserver.state import ShardState
from paramserver.update import Push, Update

Key = tuple[str, int]
Step = tuple[str, int, int]
Action = Callable[[], object]
T = TypeVar("T")

RATE = 0.5


@dataclass
class Saved:
    """A checkpoint: each shard's state, the steps in it there, and those that must be in it."""

    states: list[ShardState]
    arrays: dict[tuple[str, int], Array]
    steps: list[set[Step]]
    must: set[Step]


class Cluster:
    """Some shards, the workers alive, a chief, and a ledger of what was applied where."""

    def __init__(
        self, job: Job, shards: int, names: Sequence[str] = ("w0", "w1", "w2", "w3")
    ) -> None:
        variables = [Variable(name, "float32", (2,)) for name in names]
        self._begin(
            [start(job, variables[k::shards], index=k, count=shards) for k in range(shards)]
        )

    def _begin(self, shards: list[Shard]) -> None:
        self.now = 0.0
        self.shards = shards
        self.workers: list[Worker] = []
        self.chief = Chief(self)
        self.acknowledged: set[Step] = set()
        self.ledger: list[dict[Step, tuple[int, int]]] = [{} for _ in shards]
        self.sent: list[tuple[int, PushHeader]] = []
        self._writers: list[Update | None] = [None for _ in shards]
        self._start = [(shard.version, values(shard)) for shard in shards]
        self._started_at = shards[0].global_step
        self._incarnations = itertools.count(1)

    @classmethod
    def restored(cls, saved: Saved, shards: int, incarnation: int = 1000) -> Cluster:
        """The job that a checkpoint starts again, on another number of shards."""
        cluster = cls.__new__(cls)
        first = saved.states[0]
        variables = sorted((v for s in saved.states for v in s.variables), key=lambda v: v.name)
        states = [
            replace(
                first,
                session=SESSION + 1,
                index=k,
                count=shards,
                variables=tuple(variables[k::shards]),
                version=first.global_step,
                cut_off=(),
            )
            for k in range(shards)
        ]
        if shards == len(saved.states):
            # What belongs to one shard alone comes back where the same shard does.
            states = [
                replace(state, version=was.version, cut_off=was.cut_off)
                for state, was in zip(states, saved.states, strict=True)
            ]
        cluster._begin([load(state, saved.arrays) for state in states])
        cluster._incarnations = itertools.count(incarnation)
        return cluster

    @property
    def leader(self) -> Shard:
        """ps:0."""
        return self.shards[0]

    @property
    def sync(self) -> bool:
        """Whether the job runs in rounds."""
        return self.leader.sync

    def spawn(self, index: int) -> Worker:
        """A new life of worker `index` begins; it has still to join."""
        worker = Worker(self, f"worker:{index}", next(self._incarnations))
        self.workers.append(worker)
        return worker

    def kill(self, worker: Worker, noticed: bool = True) -> None:
        """Nothing is heard of a worker from here on. Servers may notice that its streams broke."""
        self.workers.remove(worker)
        while worker.reading:
            worker.read()
        if noticed:
            worker.hang_up()

    def advance(self, seconds: float) -> None:
        """Lets time pass in small steps; whoever is not frozen sends heartbeats meanwhile."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + LEASE / 4)
            for worker in list(self.workers):
                worker.heartbeat()
            for shard in self.shards:
                shard.tick(self.now)

    def take(self, k: int) -> bool:
        """Shard k begins to make its next version, if it can."""
        if self._writers[k] is None:
            self._writers[k] = self.shards[k].take_update()
        return self._writers[k] is not None

    def commit(self, k: int) -> None:
        """Shard k publishes the version it is making."""
        update, shard = self._writers[k], self.shards[k]
        if update is None:
            return
        self._writers[k] = None
        version, round_ = shard.version, shard.rounds
        update.run()
        shard.commit(update)
        if shard.version == version:
            return
        assert shard.version == version + 1
        self._note(k, update.pushes, round_)

    def submit(self, k: int, push: Push) -> PushResult | None:
        """The last message of a push arrives at shard k."""
        shard = self.shards[k]
        result = shard.submit(push)
        if result and not shard.sync:
            self._note(k, [push], shard.rounds)
        return result

    def deliver_again(self, k: int, header: PushHeader) -> None:
        """A copy of a push that was sent to shard k at any time before arrives, all of it."""
        try:
            outcome = self.shards[k].begin(header, self.now)
        except (AbortedError, FailedPreconditionError):
            return
        if isinstance(outcome, Push):
            self.submit(k, feed(outcome))

    def _note(self, k: int, pushes: Sequence[Push], round_: int) -> None:
        for push in pushes:
            step = (*push.header.member, push.header.sequence)
            assert step not in self.ledger[k], f"{step} is applied twice on ps:{k}"
            self.ledger[k][step] = (push.header.step, round_)
        self.check_values(k)

    def drain(self) -> None:
        """All shards apply whatever they can."""
        for k in range(len(self.shards)):
            self.commit(k)
            while self.take(k):
                self.commit(k)

    def check_values(self, k: int) -> None:
        """Every element of a shard counts its versions."""
        version, was = self._start[k]
        for name, array in values(self.shards[k]).items():
            assert np.array_equal(array, was[name] - RATE * (self.shards[k].version - version)), (
                f"{name} on ps:{k} is {array} at version {self.shards[k].version}"
            )

    def actions(self) -> list[Action]:
        """Everything that can happen next, but for misfortunes and the passing of time."""
        found: list[Action] = [action for w in self.workers for action in w.actions()]
        found += [partial(self.take, k) for k, u in enumerate(self._writers) if u is None]
        found += [partial(self.commit, k) for k, u in enumerate(self._writers) if u]
        return found + self.chief.actions()

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Everybody still alive goes on, in turn, until the job is complete and all have left.

        Newcomers take the place of the dead. It must end within a bounded number of turns."""
        for worker in self.workers:
            worker.frozen = False
        wanted = getattr(self.leader.job.consistency, "workers", 1)
        newcomers = itertools.count(10)
        for _ in range(60 + 8 * (self.leader.last_step - self.leader.global_step)):
            while not self.leader.complete and len({w.name for w in self.workers}) < wanted:
                self.spawn(next(newcomers))
            for worker in list(self.workers):
                worker.turn()
                self.drain()
            self.chief.turn()
            self.advance(LEASE / 5)
            if self.leader.complete and not self.workers:
                break
        else:
            waits = [w.why for w in self.workers]
            raise AssertionError(f"stuck at step {self.leader.global_step}: {waits}")
        self.advance(LEASE)
        for shard in self.shards[1:]:
            shard.adopt(self.leader.roster)
        self.drain()

    def verify(self) -> None:
        """What must hold once the job is complete and every shard has the newest roster."""
        limit = self.leader.last_step
        assert self.leader.complete and self.leader.global_step == limit
        numbers = {step for step, _ in self.ledger[0].values()}
        assert numbers == set(range(self._started_at + 1, limit + 1))
        assert not self.leader.cut_off.steps
        for k, shard in enumerate(self.shards):
            self.check_values(k)
            assert shard.complete
            listed = sum(step.delta for step in shard.cut_off.steps)
            assert shard.version - limit == listed, (
                f"ps:{k} is at version {shard.version} of {limit} and lists {shard.cut_off.steps}"
            )
            assert shard.nbytes_in_flight == 0
            missing = self.acknowledged - self.ledger[k].keys()
            assert not missing, f"ps:{k} lacks acknowledged steps {missing}"
            if self.sync:
                for step in self.acknowledged:
                    assert self.ledger[k][step][1] == self.ledger[0][step][1], "different rounds"
        # Nobody is left, and a last checkpoint holds everything that is acknowledged.
        saved = len(self.chief.saved)
        self.chief.abandon()
        self.chief.begin()
        for _ in range(3):
            self.chief.turn()
            self.drain()
        assert len(self.chief.saved) == saved + 1
        self.chief.saved[-1].must = self.acknowledged
        for each in self.chief.saved:
            self.verify_checkpoint(each)

    def verify_checkpoint(self, saved: Saved) -> None:
        """Each acknowledged step is in on every shard's snapshot or on none; rounds agree."""
        everywhere = set.intersection(*saved.steps)
        somewhere = set.union(*saved.steps)
        torn = self.acknowledged & (somewhere - everywhere)
        assert not torn, f"{torn} are in on some shards of a checkpoint only"
        assert saved.must <= everywhere
        assert len({s.rounds for s in saved.states}) == 1 or not self.sync


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


# -- schedules -------------------------------------------------------------------------------------


def misfortunes(cluster: Cluster) -> list[Callable[[int], object]]:
    """What may happen to a cluster beside its ordinary actions; each takes a number to choose
    by."""

    def some_worker(number: int) -> Worker | None:
        return cluster.workers[number % len(cluster.workers)] if cluster.workers else None

    def spawn(number: int) -> None:
        if len(cluster.workers) < 4:
            cluster.spawn(number % 4)

    def kill(number: int) -> None:
        if worker := some_worker(number // 2):
            cluster.kill(worker, noticed=bool(number % 2))

    def freeze(number: int) -> None:
        if worker := some_worker(number):
            worker.frozen = not worker.frozen

    def wait(number: int) -> None:
        cluster.advance(LEASE / 4 * (1 + number % 5))

    def checkpoint(number: int) -> None:
        cluster.chief.begin()

    def raise_limit(number: int) -> None:
        if cluster.leader.last_step < 12:
            cluster.leader.set_last_step(cluster.leader.last_step + 1 + number % 2)

    def lose_chief(number: int) -> None:
        cluster.chief.abandon(dead=True)

    def deliver_again(number: int) -> None:
        if cluster.sent:
            cluster.deliver_again(*cluster.sent[-1 - number % len(cluster.sent)])

    def make_way(number: int) -> None:
        shard = cluster.shards[number % len(cluster.shards)]
        if push := shard.streaming():
            shard.make_way(push)

    return [
        spawn,
        kill,
        freeze,
        wait,
        checkpoint,
        lose_chief,
        raise_limit,
        deliver_again,
        make_way,
    ]


def play(cluster: Cluster, choose: random.Random, actions: int) -> None:
    """A random schedule: mostly ordinary actions, now and then a misfortune."""
    for _ in range(actions):
        ordinary = cluster.actions()
        if choose.random() < 0.06:
            choose.choice(misfortunes(cluster))(choose.randrange(1000))
        else:
            choose.choice(ordinary)()
