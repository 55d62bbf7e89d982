"""One run: its scale, its yardsticks, and the figures so far. Sections are functions of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from benchmarks.figures import Figure, Round
from benchmarks.processes import Process, Processes, Task
from benchmarks.scale import Scale
from benchmarks.yardsticks import Yardsticks


class Benchmark:
    """What a section measures with, and where it puts what it found."""

    def __init__(
        self, scale: Scale, yard: Yardsticks, on_figure: Callable[[Figure], object]
    ) -> None:
        self.scale = scale
        self.yard = yard
        self.figures: list[Figure] = []
        self._on_figure = on_figure

    def record(self, figure: Figure) -> None:
        """Adds a figure, and shows it."""
        self.figures.append(figure)
        self._on_figure(figure)

    def transfer(
        self,
        what: str,
        nbytes: int,
        count: int = 1,
        shards: int = 1,
        optimizer: str = "sgd",
    ) -> Round:
        """One round of "push", "pull" or "push_pull": `nbytes` in `count` variables, moved by a
        new worker to and from new servers, right after the raw socket."""
        with job(nbytes, count, shards, optimizer=optimizer) as (_, (worker,)):
            yardstick = self.yard.raw(self.yard_bytes(nbytes))
            work = worker.call("measure", what=what, repeats=self.scale.repeats(nbytes))
            check([worker])
        return Round(yardstick, work)

    def yard_bytes(self, nbytes: int) -> int:
        """What the raw socket moves, to be compared with moving `nbytes`."""
        return min(nbytes, self.scale.large)


@contextmanager
def job(
    nbytes: int, count: int = 1, shards: int = 1, workers: int = 1, optimizer: str = "sgd"
) -> Iterator[tuple[list[Process], list[Task]]]:
    """Fresh processes: the servers, and workers that have joined and pulled once."""
    with Processes() as run:
        servers = [run.ps() for _ in range(shards)]
        tasks = [
            run.task(
                "load",
                "Worker",
                addresses=[address for _, address in servers],
                index=index,
                count=count,
                elements=nbytes // count // 4,
                optimizer=optimizer,
            )
            for index in range(workers)
        ]
        yield [process for process, _ in servers], [task.ready() for task in tasks]


def check(workers: Sequence[Task]) -> None:
    """Raises: BenchmarkError unless every push has been applied once, and nothing else."""
    pushes = sum(worker.call("pushed") for worker in workers)
    workers[0].call("check", pushes=pushes)
