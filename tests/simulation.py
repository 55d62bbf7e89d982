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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from shard_cases import LEASE, SESSION, feed, load, start, values
from simulated_clients import Action, Chief, Saved, Step, Worker

from paramserver.errors import AbortedError, FailedPreconditionError
from paramserver.job import Job
from paramserver.layout import Variable
from paramserver.push import PushHeader, PushResult
from paramserver.shard import Shard
from paramserver.update import Push, Update

RATE = 0.5


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
        #: The versions that workers were given as final: (shard, limit, version).
        self.finals: set[tuple[int, int, int]] = set()
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
            finals = {version for j, last, version in self.finals if (j, last) == (k, limit)}
            assert finals <= {shard.version}, f"ps:{k} called versions {finals} final"
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
