"""What applying a gradient costs by itself: the optimizers of a server, without a server."""

from __future__ import annotations

import numpy as np

from benchmarks import child
from paramserver import optimizers
from paramserver.allocation import keep_large_blocks
from paramserver.optimizers import RULES, Scratch


class Arithmetic:
    """Every rule over one float32 variable."""

    def __init__(self, nbytes: int) -> None:
        keep_large_blocks()
        self._elements = nbytes // 4
        self._grad, self._source, self._copy = (
            np.full(self._elements, 0.5, np.float32) for _ in range(3)
        )

    def kinds(self) -> dict[str, int]:
        """The rules, and how many arrays each must move at least: the gradient and the current
        value and slots are read, the new value and slots are written."""
        return {kind: 3 + 2 * len(rule.slots) for kind, rule in RULES.items()}

    def memcpy(self, repeats: int) -> list[float]:
        """Seconds of copying one array onto another: two arrays are moved."""
        return child.timed(lambda: np.copyto(self._copy, self._source), repeats)

    def apply(self, kind: str, repeats: int) -> list[float]:
        """Seconds of one update."""
        rule = optimizers.from_hyper(kind, {})
        value, out = np.ones(self._elements, np.float32), np.ones(self._elements, np.float32)
        slots = optimizers.new_slots(rule, value)
        out_slots = optimizers.new_slots(rule, value)
        scratch = Scratch(value.dtype)

        def update() -> None:
            optimizers.apply(rule, 2, [self._grad], value, slots, out, out_slots, scratch)

        return child.timed(update, repeats)


if __name__ == "__main__":
    child.serve({"Arithmetic": Arithmetic})
