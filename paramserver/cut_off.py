"""Steps that their worker's death cut off: in on some shards, not on others. Listed, never hidden.

A worker pushes one step to all shards at once. If it dies in between, ps:0's word (how far it had
come there) decides what was acknowledged; a shard that has more, or less, notes the difference, so
that its version minus global_step always equals the sum of the deltas listed here. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

Key = tuple[str, int]

#: Steps listed one by one; beyond, the oldest are summed up in one line.
KEPT = 256


@dataclass(frozen=True)
class CutOffStep:
    """One such step; `delta` is what it did to this shard's version against global_step."""

    worker: str
    incarnation: int
    sequence: int
    delta: int


class CutOffSteps:
    """The list of one shard. Not thread-safe: guarded by the owner's lock."""

    def __init__(self, steps: Iterable[CutOffStep]) -> None:
        self.steps = list(steps)
        self._last_round: set[Key] = set()
        self._missed: CutOffStep | None = None

    def settle(self, difference: int) -> None:
        """After a restore, where version minus global_step is `difference`: a step that was cut off
        just when the checkpoint was made is not in the list yet."""
        unlisted = difference - sum(step.delta for step in self.steps)
        if unlisted:
            self._note(CutOffStep("(at the checkpoint)", 0, 0, unlisted))

    def departed(self, member: Key, here: int, decided: int) -> None:
        """A worker is gone: its last push is number `here` on this shard, `decided` at ps:0.

        Without rounds, one more or less is one version more or less."""
        if here != decided:
            self._note(CutOffStep(*member, max(here, decided), 1 if here > decided else -1))

    def departed_from_round(self, member: Key, here: int, decided: int) -> None:
        """The same where a version is a round: what counts is whether a round went through at
        all."""
        if here > decided:
            # Its round is closed here, with it. If it was alone there, ps:0 closed that round
            # empty.
            self._last_round.discard(member)
            self._note(CutOffStep(*member, here, 0 if self._last_round else 1))
        elif here < decided:
            # ps:0 has it in the round that is open here; how that ends is known when it closes.
            self._missed = CutOffStep(*member, decided, 0)
            self._note(self._missed)

    def closed_round(self, members: Iterable[Key]) -> None:
        """A round was closed here with the gradients of `members`, perhaps none."""
        self._last_round = set(members)
        if self._missed:
            if not self._last_round:
                self.steps[self.steps.index(self._missed)] = replace(self._missed, delta=-1)
            # It is in the round at ps:0, whatever becomes of the others.
            self._last_round.add((self._missed.worker, self._missed.incarnation))
        self._missed = None

    def _note(self, step: CutOffStep) -> None:
        self.steps.append(step)
        if len(self.steps) > KEPT:
            first, second, *rest = self.steps
            summary = replace(second, worker="(earlier)", delta=first.delta + second.delta)
            self.steps = [summary, *rest]
