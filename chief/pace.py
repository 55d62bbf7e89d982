"""How fast a job goes, and so how soon to look at it again. Pure: time is an argument."""

from __future__ import annotations

import math

#: Nobody looks more often than this, nor more rarely than that, in seconds.
SHORTEST_S = 0.05
LONGEST_S = 0.5

#: Looking takes at most one part in so many of the time; but a third of a lease is never exceeded.
SPARING = 20


class Pace:
    """Steps a second, by what was seen last. One thread uses it."""

    def __init__(self, lease_s: float) -> None:
        #: Steps a second; 0 while nothing moves or nothing is known.
        self.rate = 0.0
        #: Whether the last look saw another step than the one before it.
        self.moving = False
        self._bound_s = lease_s / 3
        self._seen: tuple[int, int, float] | None = None
        self._moved_at = -math.inf

    def saw(self, step: int, workers: int, now: float) -> None:
        """Takes note of global_step and of who takes part. A step that went back starts anew."""
        before, self._seen = self._seen, (step, workers, now)
        if before is None or before[:2] != (step, workers):
            self._moved_at = now
        self.moving = before is not None and step > before[0]
        if before is None or step < before[0]:
            self.rate = 0.0
        elif now > before[2]:
            rate = (step - before[0]) / (now - before[2])
            self.rate = (self.rate + rate) / 2 if self.rate else rate

    def seconds_to(self, steps: int) -> float:
        """How long so many steps will take; infinite if nothing moves."""
        return steps / self.rate if self.rate else math.inf

    def delay(self, steps: int, now: float, cost_s: float = 0.0) -> float:
        """Seconds until the next look, if something is due in `steps` and a look takes `cost_s`.

        Half of the way there; where nothing moves, a tenth of the time that it has not."""
        soon = self.seconds_to(steps) / 2 if self.rate else (now - self._moved_at) / 10
        return min(self._bound_s, max(SHORTEST_S, min(LONGEST_S, soon), SPARING * cost_s))
