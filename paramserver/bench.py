"""`python -m paramserver bench`: tests the link from here to parameter servers, and judges it.

Empty servers are tested in full, with arrays of the test's own, and ended, since they would keep
these. Of a running job the parameters are read and nothing else: no join, no push. (How fast the
program itself is, beside yardsticks on one machine, is what `benchmarks/` measures.)
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from statistics import median

import numpy as np

from paramserver import convert
from paramserver.allocation import keep_large_blocks
from paramserver.client import Client
from paramserver.control_client import ControlClient
from paramserver.errors import ConfigError, ParamServerError, UnavailableError
from paramserver.job import Job
from paramserver.layout import Variable

MIB = 1 << 20

#: Marks a job as ours: it may be tested again, and ended.
PURPOSE = {"purpose": "self-test"}

#: One measurement goes on for so many seconds, within these repeats.
BUDGET_S = 2.0
FEWEST, MOST = 3, 300

#: Bytes a second, and what they are like.
RATES = (
    (500e6, "fast, as between processes of one machine; more servers may carry more"),
    (100e6, "good, like a network of 1 Gbit/s or more"),
    (10e6, "slow, like a network of 100 Mbit/s; larger batches push less often"),
    (0.0, "very slow; train nearer to the servers"),
)

#: Seconds, and how far away that is.
DISTANCES = (
    (2e-3, "near"),
    (20e-3, "some way off"),
    (float("inf"), "far off; async or ssp hides some of it"),
)


@dataclass(frozen=True)
class Measured:
    """One kind of call: the bytes it moves, and the seconds that each took."""

    what: str
    nbytes: int
    seconds: Sequence[float]

    @property
    def bytes_per_s(self) -> float:
        """At the median."""
        return self.nbytes / median(self.seconds)

    def __str__(self) -> str:
        low, mid, high = (1e3 * f(self.seconds) for f in (min, median, max))
        line = f"{self.what:16}{mid:9.2f} ms [{low:.2f} - {high:.2f}] n={len(self.seconds)}"
        return f"{line}  {self.bytes_per_s / 1e6:.0f} MB/s" if self.nbytes >= MIB else line


def verdict(round_trip_s: float, pull: float | None, push: float | None = None) -> list[str]:
    """What the link is good for, in lines; rates in bytes a second, None: not known."""
    distance = next(text for limit, text in DISTANCES if round_trip_s <= limit)
    lines = [f"distance: {distance} ({1 / round_trip_s:.0f} small calls a second)"]
    rates = [rate for rate in (pull, push) if rate]
    if rates:
        slowest = min(rates)
        lines.append(f"bandwidth: {next(text for limit, text in RATES if slowest >= limit)}")
    if pull and push:
        costs = (
            f"{n} MiB {1e3 * (round_trip_s + n * MIB / pull + n * MIB / push):.1f} ms"
            for n in (1, 10, 100)
        )
        lines.append(f"a step that pushes and pulls costs, for a model of {', '.join(costs)}")
    return lines


def run(addresses: str, mib: int, connect_timeout: float, keep: bool) -> Iterator[str]:
    """Tests the servers, and says line by line what it found. Raises: ParamServerError."""
    with ControlClient(addresses, "self-test", connect_timeout=connect_timeout) as control:
        statuses = control.survey()
        jobs = [status.job for status in statuses if status.initialized]
        if jobs and any(dict(job.settings) != PURPOSE for job in jobs):
            step = max(status.global_step for status in statuses)
            yield f"{addresses}: a job, at step {step}; its parameters are read, no more"
            held = [convert.layout_from_proto(s.layout).variables for s in statuses]
            variables = choose(chain.from_iterable(held), mib * MIB)
            if not variables:
                raise UnavailableError(f"the job at {addresses} has no variables to read")
            yield from _read(addresses, variables, connect_timeout)
            return
        yield f"{addresses}: no job; tested with {mib} MiB of the test's own"
        parts = len(statuses)
        arrays = {f"large/{i}": np.zeros(mib * MIB // 4 // parts, np.float32) for i in range(parts)}
        # Of another dtype: in a range of its own, to be updated without the large ones.
        control.initialize({"small": np.zeros(128), **arrays}, Job(settings=PURPOSE))
        yield from _push_and_pull(addresses, list(arrays), mib * MIB // 4 // parts)
        if keep:
            yield "the servers hold the test's arrays; end them before a job comes"
        else:
            control.shutdown(now=True, reason="the self-test is over")
            yield "ended the servers, which held the test's arrays: start them again for a job"


def _push_and_pull(addresses: str, large: list[str], elements: int) -> Iterator[str]:
    """Both directions, as a worker."""
    with Client(addresses, worker="worker:0") as client:
        nbytes = 4 * elements * len(large)
        grads = {name: np.ones(elements, np.float32) for name in large}
        small = np.ones(128)

        def turn() -> object:
            return client.pull(["small"])

        near = _timed("pull 1 KiB", 1024, turn)
        yield str(near)
        yield str(_timed("push 1 KiB", 1024, lambda: client.push({"small": small}), turn))
        title = f"{nbytes / MIB:g} MiB"
        push = _timed(f"push {title}", nbytes, lambda: client.push(grads), turn)
        yield str(push)
        pull = _timed(f"pull {title}", nbytes, lambda: client.pull(large))
        yield str(pull)
    yield from verdict(median(near.seconds), pull.bytes_per_s, push.bytes_per_s)


def _read(addresses: str, variables: Sequence[Variable], timeout: float) -> Iterator[str]:
    """One direction, as a reader that takes no part."""
    names, nbytes = [v.name for v in variables], sum(v.nbytes for v in variables)
    with Client(addresses, connect_timeout=timeout) as client:
        one = variables[0]
        near = _timed(
            f"pull {one.nbytes} bytes", one.nbytes, lambda: client.pull([one.name], wait=False)
        )
        yield str(near)
        title = f"pull {nbytes / MIB:.3g} MiB"
        pull = _timed(title, nbytes, lambda: client.pull(names, wait=False))
        yield str(pull)
    enough = nbytes >= MIB
    yield from verdict(median(near.seconds), pull.bytes_per_s if enough else None)
    if not enough:
        yield "the job is too small to tell the bandwidth; test an empty server"


def choose(variables: Iterable[Variable], nbytes: int) -> list[Variable]:
    """The smallest variables that come to `nbytes` together, smallest first; fewer bytes if what is
    left is out of all proportion. One at least, if there is any."""
    chosen: list[Variable] = []
    total = 0
    for variable in sorted(variables, key=lambda v: v.nbytes):
        if chosen and (total >= nbytes or variable.nbytes > 2 * nbytes):
            break
        chosen.append(variable)
        total += variable.nbytes
    return chosen


def _timed(
    what: str, nbytes: int, call: Callable[[], object], before: Callable[[], object] | None = None
) -> Measured:
    """Times calls; `before` is done before each, and not counted."""
    seconds: list[float] = []
    end = time.monotonic() + BUDGET_S
    while len(seconds) <= FEWEST or (time.monotonic() < end and len(seconds) <= MOST):
        if before:
            before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return Measured(what, nbytes, seconds[1:])  # the first one finds nothing warm


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m paramserver bench",
        description="Tests the link to parameter servers. Empty ones are tested in full and ended;"
        " of those that have a job only the parameters are read.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--ps", required=True, metavar="HOST:PORT,...", help="all servers of a job")
    add("--mib", type=int, default=64, metavar="N", help="size of the test (default %(default)d)")
    add("--keep", action="store_true", help="leave empty servers running, with the test's arrays")
    add(
        "--connect-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to wait for a server that does not answer (default %(default)g)",
    )
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code: 0 tested, 1 a server did not answer or refused, 2 a
    wrong setting."""
    args = parser().parse_args(argv)
    logging.basicConfig(level="WARNING", stream=sys.stderr)
    keep_large_blocks()
    try:
        for flag, value in (("--mib", args.mib), ("--connect-timeout", args.connect_timeout)):
            if not 0 < value < float("inf"):
                raise ConfigError(f"{flag} must be positive, not {value:g}")
        for line in run(args.ps, args.mib, args.connect_timeout, args.keep):
            print(line, flush=True)
    except ParamServerError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0
