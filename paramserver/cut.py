"""A consistent cut over all shards, without stopping the job: hold, agree, keep references, go on.

The chief asks every shard to hold: it admits no further push and says how far each worker has come.
The maximum over the shards is a state that every shard reaches by admitting up to it, and no
farther; there the shard keeps references to its arrays and goes on. In a synchronous job the cut is
a round number. A hold ends by itself after its deadline, so a dead chief stops nobody. Pure: time
is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Hold:
    """A cut in the making. `admit` and `rounds` are None until the chief has said how far."""

    cut: int
    since: float
    until: float
    admit: Mapping[tuple[str, int], int] | None = None
    rounds: int | None = None

    def admits(self, member: tuple[str, int], sequence: int) -> bool:
        """Whether this push is on the near side of the cut."""
        return self.admit is not None and sequence <= self.admit.get(member, 0)

    def closes(self, round_: int) -> bool:
        """Whether this round may be closed."""
        return self.rounds is not None and round_ < self.rounds


@dataclass(frozen=True)
class Admitted:
    """How far a shard has come: each worker's last admitted push, and the rounds it has closed."""

    sequences: Mapping[tuple[str, int], int] = field(default_factory=dict)
    rounds: int = 0
