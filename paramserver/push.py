"""What a push says of itself, and what becomes of it: two values that both sides share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PushHeader:
    """Whose step a push is, and what it was computed from; see PushHeader in the contract."""

    session: int
    worker: str
    incarnation: int
    sequence: int
    clock: int = 0
    step: int = 0
    pulled_version: int = 0
    examples: int = 0

    @property
    def member(self) -> tuple[str, int]:
        """Who pushes."""
        return self.worker, self.incarnation


@dataclass(frozen=True)
class PushResult:
    """What became of a push.

    `applied`: it counts (in sync: it is part of its round). `reason`: "applied" or "job_complete".
    `version`: the shard's, with this push in it. `staleness`: updates between the pull it was
    computed from and it. `global_step`: ps:0's count, 0 from other shards."""

    applied: bool
    reason: str
    version: int
    staleness: int
    global_step: int
