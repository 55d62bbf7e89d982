"""Sections about whole steps: a tiny model's, a real job's, and how soon the first one comes."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median

from benchmarks.benchmark import Benchmark, check, job
from benchmarks.figures import Figure, Round, comparison, latency
from benchmarks.processes import PATIENCE_S, BenchmarkError, Processes, free_port
from paramserver.control_client import ControlClient
from paramserver.survey import Status

#: Weight and bias of a line, in bytes.
TINY = 8

#: Two workers have to be there together for this share of the steps, or it is tried again.
MLP_SHARE = 0.3
MLP_TRIES = 4

#: How often a job that runs is asked how far it is.
LOOK_EVERY_S = 0.02


def step(bench: Benchmark) -> None:
    """One step of a tiny model: a push_pull with nothing else, and the default job's."""
    scale, yard = bench.scale, bench.yard
    pushed: list[Round] = []
    streamed: list[Round] = []
    tutorial: list[Round] = []
    trained: list[Round] = []
    for _ in range(scale.rounds):
        with job(TINY, count=2) as (_, (worker,)):
            turn = yard.turn()
            streamed.append(Round(turn, yard.stream_turn()))
            tutorial.append(Round(turn, yard.tutorial("pair", TINY)))
            pushed.append(Round(turn, worker.call("measure", what="push_pull", repeats=scale.most)))
            check([worker])
        with Processes() as run:
            _, address = run.ps()
            trainer = run.task("load", "Trainer", addresses=[address]).ready()
            trained.append(Round(yard.turn(), trainer.call("train", steps=scale.train_steps)))
    raw = "a raw 4 KiB turn"
    bench.record(latency("step", "a bare gRPC stream turn", streamed, raw))
    bench.record(latency("step", "tutorial push + pull", tutorial, raw))
    bench.record(latency("step", "push_pull, tiny model", pushed, raw))
    bench.record(latency("step", "training step, linear model", trained, raw))
    for name, theirs in (("tutorial pair", tutorial), ("bare stream turn", streamed)):
        ratios = [
            median(ours.work) / median(other.work)
            for ours, other in zip(pushed, theirs, strict=True)
        ]
        bench.record(comparison("step", f"tiny push_pull / {name}", ratios, "time over time"))


def mlp(bench: Benchmark) -> None:
    """A chief and two workers train the digits, asynchronously: real commands."""
    if importlib.util.find_spec("sklearn") is None:
        raise BenchmarkError("the digits come with scikit-learn: pip install -e '.[examples]'")
    rates, accuracies, shares = [], [], []
    for _ in range(bench.scale.rounds):
        for _ in range(MLP_TRIES):
            rate, accuracy, share = _digits(bench.scale.mlp_steps)
            if share >= MLP_SHARE:
                break
        else:
            raise BenchmarkError("one worker had done most before the other one had started")
        rates.append(rate)
        accuracies.append(accuracy)
        shares.append(share)
    note = f"while both workers were there: {min(shares):.0%} of the steps"
    bench.record(Figure("mlp", "digits MLP, 2 workers async", "steps/s", tuple(rates), note=note))
    bench.record(Figure("mlp", "digits MLP, test accuracy", "", tuple(accuracies)))


def _digits(steps: int) -> tuple[float, float, float]:
    """(global steps a second, accuracy at the end, share of the steps that the rate is of)."""
    with Processes() as run, ExitStack() as stack:
        _, address = run.ps()
        run.python(
            *f"-m chief --ps {address} --workers 2 --model mlp --data digits --batch-size 64"
            f" --optimizer adam --learning-rate 0.001 --last-step {steps}".split()
        )
        control = stack.enter_context(ControlClient(address, "benchmarks"))
        # Both at once, when the chief has been there: then they work side by side most of the time.
        next(_looks(control))
        workers = [
            run.python(
                *f"-m worker --ps {address} --chief localhost:1 --workers 2"
                f" --task-index {index}".split()
            )
            for index in range(2)
        ]
        seen: list[tuple[float, int]] = []
        for status in _looks(control):
            if len([worker for worker in status.workers if worker.clock]) == 2:
                seen.append((time.monotonic(), status.global_step))
            if status.global_step >= steps:
                break
        reports = [w.until(r"trained to step .*accuracy=([\d.]+)")[1] for w in workers]
    (begin, first), (end, last) = (seen[0], seen[-1]) if len(seen) > 1 else ((0.0, 0), (1.0, 0))
    return (last - first) / (end - begin), float(reports[0][1]), (last - first) / steps


def _looks(control: ControlClient) -> Iterator[Status]:
    """The status of a job's one server, again and again once it is initialised.

    Raises: BenchmarkError when it has lasted too long."""
    pause = threading.Event()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        (status,) = control.look()
        if isinstance(status, Status) and status.initialized:
            yield status
        pause.wait(LOOK_EVERY_S)
    raise BenchmarkError(f"the job did not come to its end within {PATIENCE_S:g} s")


def launch(bench: Benchmark) -> None:
    """A server and a worker, started at the same moment: until the first step is done."""
    rounds = []
    for _ in range(bench.scale.launches):
        yardstick = bench.yard.python()
        with Processes() as run:
            port = free_port()
            ps = run.python("-m", "paramserver", "--port", str(port))
            worker = run.python(*f"-m worker --ps 127.0.0.1:{port} --last-step 1".split())
            done, _ = worker.until("trained to step 1:")
            rounds.append(Round([yardstick], [done - ps.started]))
    note = "the step itself, and the report on it"
    bench.record(
        latency("launch", "launch to first step", rounds, "python -c 'import grpc, numpy'", note)
    )
