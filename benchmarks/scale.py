"""How much is measured: sizes, repeats, and how many processes take part."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True)
class Scale:
    """One run's amounts of work. All sizes in bytes."""

    quick: bool = False
    #: What push, pull and push_pull are measured at.
    sizes: tuple[int, ...] = (4 * KIB, 100 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
    #: The size that most floors speak of, and the one that must keep up with it.
    large: int = 64 * MIB
    largest: int = 256 * MIB
    #: A model of so few bytes is all latency.
    small: int = 4 * KIB
    workers: tuple[int, ...] = (1, 2, 4, 8)
    shards: tuple[int, ...] = (1, 2, 4)
    #: (how many variables, bytes each), against one variable of the same total.
    many: tuple[int, int] = (500, 128 * KIB)
    tiny: tuple[int, int] = (10_000, KIB)
    #: Each figure is measured so many times, with fresh processes and a fresh yardstick.
    rounds: int = 3
    #: One measurement moves about so many bytes, in `fewest` to `most` repeats.
    budget: int = 1 << 30
    fewest: int = 5
    most: int = 1000
    #: How long several workers push side by side, in seconds.
    window_s: float = 3.0
    #: Steps of the jobs that train, and of a worker that only keeps a server busy.
    train_steps: int = 2000
    mlp_steps: int = 2000
    memory_pushes: int = 8
    launches: int = 5

    def repeats(self, nbytes: int) -> int:
        """How often to move `nbytes` in one measurement."""
        return max(self.fewest, min(self.most, self.budget // max(nbytes, 1)))


FULL = Scale()

#: Shows that everything runs, in a fraction of the time. Its figures say nothing.
QUICK = Scale(
    quick=True,
    sizes=(4 * KIB, MIB, 4 * MIB),
    large=MIB,
    largest=4 * MIB,
    workers=(1, 2),
    shards=(1, 2),
    many=(8, 128 * KIB),
    tiny=(100, KIB),
    rounds=1,
    budget=4 * MIB,
    fewest=2,
    most=20,
    window_s=0.2,
    train_steps=30,
    memory_pushes=2,
    launches=1,
)


def label(nbytes: int) -> str:
    """Bytes for people: "64 MiB"."""
    for unit, size in (("MiB", MIB), ("KiB", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:g} {unit}"
    return f"{nbytes} bytes"
