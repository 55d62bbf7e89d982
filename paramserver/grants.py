"""Step numbers: ps:0 grants each exactly once, so that global_step ends exactly at the limit.

A worker gets a number with its waiting pull and spends it with its push. What a dead or leaving
worker had is granted again. Pure bookkeeping; rounds of a synchronous job need none of it (all
members of a round share the number global_step + 1).
"""

from __future__ import annotations

import heapq


class Grants:
    """The numbers 1 .. limit of one session: applied, outstanding, returned, or not reached yet.

    Not thread-safe: guarded by the lock of the shard it belongs to."""

    def __init__(self, applied: int) -> None:
        #: Steps applied: global_step.
        self.applied = applied
        self._next = applied + 1
        self._returned: list[int] = []
        self._outstanding: dict[tuple[str, int], int] = {}

    def take(self, member: tuple[str, int], limit: int) -> int | None:
        """The member's number: the one it holds already, else the lowest free; None: none is
        left."""
        held = self._outstanding.get(member)
        if held is not None:
            return held
        if self._returned:
            number = heapq.heappop(self._returned)
        elif not limit or self._next <= limit:
            number = self._next
            self._next += 1
        else:
            return None
        self._outstanding[member] = number
        return number

    @property
    def highest(self) -> int:
        """The highest number granted or applied so far."""
        return self._next - 1

    def held(self, member: tuple[str, int]) -> int | None:
        """The number the member holds, if any."""
        return self._outstanding.get(member)

    def give_back(self, member: tuple[str, int]) -> None:
        """Frees what a departed member held."""
        number = self._outstanding.pop(member, None)
        if number is not None:
            heapq.heappush(self._returned, number)

    def spend(self, member: tuple[str, int]) -> None:
        """Counts the member's number as applied."""
        del self._outstanding[member]
        self.applied += 1

    def holders(self) -> list[str]:
        """The workers whose numbers are outstanding."""
        return [worker for worker, _ in self._outstanding]
