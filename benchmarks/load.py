"""Our clients, each in a process of its own, told what to do over a pipe.

They are started as our commands are: the C library is told to keep large blocks. Gradients are
ones, so that after n pushes with SGD every element is -n times the rate, to the bit: `check`.
"""

from __future__ import annotations

import threading
import time

import numpy as np

import paramserver as ps
from benchmarks import child
from paramserver import optimizers
from paramserver.allocation import keep_large_blocks
from worker.data import Batches, load_data
from worker.hooks import Hook, RunContext, RunValues
from worker.models import load_model
from worker.session import TrainingSession

#: Exact in binary, and so are its multiples up to 2^24 of them.
LEARNING_RATE = 0.5


class Worker:
    """One worker of a job of `count` variables of `elements` float32 each."""

    def __init__(
        self,
        addresses: list[str],
        index: int = 0,
        count: int = 1,
        elements: int = 1,
        optimizer: str = "sgd",
    ) -> None:
        """Worker 0 initialises the job; the others wait for it."""
        keep_large_blocks()
        self._client = ps.Client(addresses, worker=f"worker:{index}", connect_timeout=60)
        self._grads = {f"v{i:05}": np.ones(elements, np.float32) for i in range(count)}
        self._exact = optimizer == "sgd"
        if not index:
            zeros = {name: np.zeros_like(grad) for name, grad in self._grads.items()}
            rule = optimizers.from_hyper(optimizer, {"learning_rate": LEARNING_RATE})
            self._client.initialize(zeros, rule)
        self._client.pull()
        self._calls = {"push": self._push, "pull": self._pull, "push_pull": self._push_pull}
        self._pushed = 0

    def _push(self) -> None:
        self._client.push(self._grads)
        self._pushed += 1

    def _pull(self) -> None:
        self._client.pull()

    def _push_pull(self) -> None:
        self._client.push_pull(self._grads)
        self._pushed += 1

    def _news(self) -> None:
        """A step without gradients, so that there is something new to pull."""
        self._client.push({})

    def measure(self, what: str, repeats: int) -> list[float]:
        """Seconds of each push, pull or push_pull.

        As in a training loop, a push comes after a pull and a pull after a push; only the one that
        is asked for is counted."""
        before = {"push": self._pull, "pull": self._news}.get(what)
        return child.timed(self._calls[what], repeats, before)

    def repeat(self, what: str, begin: float, end: float) -> list[float]:
        """Calls again and again from one moment (`time.monotonic`) to another; when each ended."""
        threading.Event().wait(max(0.0, begin - time.monotonic()))
        ended = []
        while time.monotonic() < end:
            self._calls[what]()
            ended.append(time.monotonic())
        return ended

    def pushed(self) -> int:
        """Pushes so far, warming up included."""
        return self._pushed

    def check(self, pushes: int) -> None:
        """Raises: AssertionError unless exactly so many pushes have been applied."""
        for name, value in self._client.pull().items():
            if self._exact:
                expected = -LEARNING_RATE * pushes
                assert value.min() == value.max() == expected, (name, value, expected)
            else:
                assert np.isfinite(value).all() and value.max() < 0, (name, value)

    def close(self) -> None:
        """Leaves the job."""
        self._client.close()


class Trainer(Hook):
    """The job that two bare commands train (a line, batches of 32, SGD), with all that belongs to
    a step."""

    def __init__(self, addresses: list[str]) -> None:
        keep_large_blocks()
        dataset = load_data("line")
        model = load_model("linear", dataset.spec)
        self._client = ps.Client(addresses, worker="worker:0")
        self._client.initialize(model.init(np.random.default_rng(0)), optimizers.SGD())
        self._session = TrainingSession(self._client, model, Batches(dataset), [self])
        self._seconds: list[float] = []
        self._last = 0.0
        self._steps = 0

    def train(self, steps: int) -> list[float]:
        """Seconds of each step, from one to the next. Once."""
        self._steps = steps
        self._session.run()
        return self._seconds

    def after_run(self, context: RunContext, values: RunValues) -> None:
        now = time.perf_counter()
        if values.step > 1:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) == self._steps:
            context.request_stop("measured")

    def close(self) -> None:
        """Leaves the job."""
        self._client.close()


if __name__ == "__main__":
    child.serve({"Worker": Worker, "Trainer": Trainer})
