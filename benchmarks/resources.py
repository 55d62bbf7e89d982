"""Sections about what a server needs: memory for its variables, and time for its arithmetic."""

from __future__ import annotations

from statistics import median

from benchmarks.benchmark import Benchmark, check, job
from benchmarks.figures import Figure, Round
from benchmarks.processes import Processes
from benchmarks.scale import label


def memory(bench: Benchmark) -> None:
    """The most memory a server has had while two workers push all of it, asynchronously."""
    nbytes = bench.scale.largest
    peaks = []
    for _ in range(bench.scale.rounds):
        with job(nbytes, workers=2) as ((server,), workers):
            for worker in workers:
                worker.begin("measure", what="push", repeats=bench.scale.memory_pushes)
            for worker in workers:
                worker.result()
            check(workers)
            peaks.append(server.peak_bytes() / nbytes)
    name = f"peak memory / variables, {label(nbytes)}"
    bench.record(
        Figure("memory", name, "x", tuple(peaks), note="VmHWM, interpreter and gRPC included")
    )


def apply(bench: Benchmark) -> None:
    """Every optimizer on arrays in memory, against copying what it must move."""
    large = bench.scale.large
    repeats = bench.scale.repeats(large)
    with Processes() as run:
        arithmetic = run.task("arithmetic", "Arithmetic", nbytes=large).ready()
        for kind, arrays in arithmetic.call("kinds").items():
            rounds = [
                Round(
                    arithmetic.call("memcpy", repeats=repeats),
                    arithmetic.call("apply", kind=kind, repeats=repeats),
                )
                for _ in range(bench.scale.rounds)
            ]
            bench.record(
                Figure(
                    "apply",
                    f"apply {kind} {label(large)}",
                    "ms",
                    tuple(1e3 * s for r in rounds for s in r.work),
                    large,
                    median(median(r.work) / median(r.yardstick) / (arrays / 2) for r in rounds),
                    f"memcpy of {arrays} arrays",
                    1e3 * median(s for r in rounds for s in r.yardstick) * arrays / 2,
                    "ms",
                    note="GB/s of gradient",
                )
            )
