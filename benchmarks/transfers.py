"""Sections about moving arrays: by size, optimizer, workers, shards, and number of variables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from benchmarks.benchmark import Benchmark, check, job
from benchmarks.figures import Figure, Round, comparison, transfer
from benchmarks.scale import label

#: One push_pull moves the gradients there and the parameters back.
WAYS = {"push": 1, "pull": 1, "push_pull": 2}


def sizes(bench: Benchmark, what: str) -> None:
    """One variable, from the smallest to the largest; and the tutorial's way of doing it."""
    relative: dict[int, list[float]] = {}
    for nbytes in bench.scale.sizes:
        rounds, tutorial = [], []
        for _ in range(bench.scale.rounds):
            rounds.append(bench.transfer(what, nbytes))
            if nbytes <= bench.scale.large and what != "push_pull":
                tutorial.append(Round(bench.yard.raw(nbytes), bench.yard.tutorial(what, nbytes)))
        moved, yard = nbytes * WAYS[what], bench.yard_bytes(nbytes)
        bench.record(transfer(what, f"{what} {label(nbytes)}", rounds, moved, yard, nbytes))
        relative[nbytes] = [_relative(each, nbytes, yard) for each in rounds]
        if tutorial:
            name = f"tutorial {what} {label(nbytes)}"
            bench.record(transfer(what, name, tutorial, nbytes, nbytes, nbytes))
            bench.record(
                comparison(
                    what,
                    f"{what} {label(nbytes)} / tutorial",
                    [
                        median(theirs.work) / median(ours.work)
                        for ours, theirs in zip(rounds, tutorial, strict=True)
                    ],
                    "rate over rate",
                )
            )
    large, largest = bench.scale.large, bench.scale.largest
    if {large, largest} <= relative.keys():
        ratios = [b / a for a, b in zip(relative[large], relative[largest], strict=True)]
        name = f"{what} {label(largest)} / {label(large)}"
        bench.record(comparison(what, name, ratios, "rates, each over its raw socket"))


def adam(bench: Benchmark) -> None:
    """The dearest of the optimizers, against the cheapest."""
    large = bench.scale.large
    rounds: dict[str, list[Round]] = {"sgd": [], "adam": []}
    for _ in range(bench.scale.rounds):
        for optimizer, own in rounds.items():
            own.append(bench.transfer("push", large, optimizer=optimizer))
    for optimizer, own in rounds.items():
        name = f"push + {optimizer} {label(large)}"
        bench.record(transfer("adam", name, own, large, large))
    ratios = [
        median(b.work) / median(a.work) for a, b in zip(rounds["sgd"], rounds["adam"], strict=True)
    ]
    bench.record(comparison("adam", "push + adam / push + sgd", ratios, "time over time"))


def variables(bench: Benchmark) -> None:
    """Many variables, against one of the same total."""
    _split(bench, "variables", *bench.scale.many, ("push", "pull"))


def tiny(bench: Benchmark) -> None:
    """Very many tiny variables, against one of the same total."""
    _split(bench, "tiny", *bench.scale.tiny, ("push", "pull", "push_pull"))


def _split(bench: Benchmark, section: str, count: int, each: int, calls: tuple[str, ...]) -> None:
    total = count * each
    for what in calls:
        rounds: dict[int, list[Round]] = {1: [], count: []}
        for _ in range(bench.scale.rounds):
            for number, own in rounds.items():
                own.append(bench.transfer(what, total, number))
        yard = bench.yard_bytes(total)
        for number, own in rounds.items():
            name = f"{what} {number} x {label(total // number)}"
            bench.record(transfer(section, name, own, total * WAYS[what], yard, number))
        ratios = [
            _relative(b, total, yard) / _relative(a, total, yard)
            for a, b in zip(rounds[1], rounds[count], strict=True)
        ]
        name = f"{what} {count} variables / 1"
        bench.record(comparison(section, name, ratios, "rates, each over its raw socket"))


def shards(bench: Benchmark) -> None:
    """One worker and more servers, each with its part."""
    large = bench.scale.large
    count = 4 * max(bench.scale.shards)
    for what, ways in WAYS.items():
        for number in bench.scale.shards:
            rounds = [bench.transfer(what, large, count, number) for _ in range(bench.scale.rounds)]
            name = f"{what} {label(large)}, {number} ps"
            bench.record(transfer("shards", name, rounds, ways * large, large, number))


def workers(bench: Benchmark) -> None:
    """More workers and one server: all of them together."""
    large, small = bench.scale.large, bench.scale.small
    rates: dict[str, dict[int, list[float]]] = {"push": {}, "step": {}}
    raws: dict[int, list[float]] = {}
    for _ in range(bench.scale.rounds):
        for number in bench.scale.workers:
            raws.setdefault(number, []).append(large / median(bench.yard.raw(large)) / 1e9)
            pushes = _together(bench, number, "push", large)
            rates["push"].setdefault(number, []).append(pushes * large / 1e9)
            steps = _together(bench, number, "push_pull", small)
            rates["step"].setdefault(number, []).append(steps)
    for number in bench.scale.workers:
        pushed, raw = rates["push"][number], raws[number]
        bench.record(
            Figure(
                "workers",
                f"push {label(large)}, {_workers(number)}",
                "GB/s",
                tuple(pushed),
                ratio=median(a / b for a, b in zip(pushed, raw, strict=True)),
                yardstick="the raw socket",
                yardstick_value=median(raw),
                yardstick_unit="GB/s",
                at=number,
                note="all together",
            )
        )
        bench.record(
            Figure(
                "workers",
                f"push_pull {label(small)}, {_workers(number)}",
                "steps/s",
                tuple(rates["step"][number]),
                at=number,
                note="all together",
            )
        )
    if {1, 2} <= rates["push"].keys():
        for what, own in rates.items():
            ratios = [two / one for one, two in zip(own[1], own[2], strict=True)]
            bench.record(comparison("workers", f"{what}: 2 workers / 1", ratios, "rates"))


def _workers(number: int) -> str:
    return f"{number} worker{'s' if number > 1 else ''}"


def _together(bench: Benchmark, number: int, what: str, nbytes: int) -> float:
    """Calls a second of `number` workers side by side, once all of them are under way."""
    with job(nbytes, workers=number) as (_, tasks):
        begin = time.monotonic() + 0.1
        end = begin + bench.scale.window_s
        for task in tasks:
            task.begin("repeat", what=what, begin=begin, end=end)
        ended = [task.result() for task in tasks]
        check(tasks)
    under_way = begin + bench.scale.window_s / 4
    return sum(rate(own, under_way, end) for own in ended)


def rate(ended: Sequence[float], begin: float, end: float) -> float:
    """One worker's calls a second between two moments, from when each of its calls ended.

    From its first to its last: what is cut off at both sides does not count."""
    counted = [moment for moment in ended if begin <= moment <= end]
    if len(counted) < 2:
        return len(counted) / (end - begin)
    return (len(counted) - 1) / (counted[-1] - counted[0])


def _relative(each: Round, nbytes: int, yard_bytes: int) -> float:
    """The rate of one round, over that of its raw socket."""
    return (nbytes / median(each.work)) / (yard_bytes / median(each.yardstick))
