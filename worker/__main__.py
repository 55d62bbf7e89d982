"""`python -m worker`: one worker process, which may be the chief as well.

Prints `worker:0 training with 1 ps` when it takes part, and at the end what was learned. Exit
codes: 0 done; 1 a parameter server was lost, or refuses; 2 a wrong setting; 70 a defect, ours or
the model's; 130 and 143 stopped by SIGINT and SIGTERM. The first signal leaves the job in order,
within ten seconds; a second one ends the process at once.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache

import numpy as np

from chief.flags import Settings, add_job_flags, differences, settings_from
from chief.starter import Stopped
from chief.supervisor import Supervisor
from paramserver import cluster
from paramserver.allocation import keep_large_blocks
from paramserver.client import Client
from paramserver.cluster import Resolved
from paramserver.control_client import ControlClient
from paramserver.errors import ConfigError, ParamServerError, PermissionDeniedError
from paramserver.job import Job
from paramserver.layout import Array
from worker.data import Batches, Dataset, load_data
from worker.hooks import LoggingHook, NanHook
from worker.models import Model, load_model
from worker.session import Summary, TrainingSession

_log = logging.getLogger("worker")

#: After a signal: a step under way has so long to be pushed, and all the rest to end, in seconds.
STEP_S = 1.0
LEAVE_S = 8.0

#: Parameters of so many elements in all are printed at the end.
SHOWN = 16


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m worker",
        description="Pulls parameters, computes gradients, pushes them. Worker 0 is the chief too,"
        " unless there is one: then its job flags are the job's, and everybody else's are ignored.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--ps", metavar="HOST:PORT,...", help="all parameter servers of the job, in any order")
    add("--task-index", type=int, metavar="I", help="which worker this is, from 0 (default 0)")
    add("--workers", type=int, metavar="N", help="how many share the data (default 1)")
    add("--chief", metavar="HOST:PORT", help="there is a chief: worker 0 is none (nobody calls it)")
    add(
        "--connect-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds to wait for a parameter server that does not answer, or for the chief to"
        " initialise it (default %(default)g)",
    )
    add(
        "--log-steps",
        type=int,
        default=100,
        metavar="N",
        help="log the loss every N steps (default %(default)d)",
    )
    add(
        "--no-overlap",
        dest="overlap",
        action="store_false",
        help="prepare each batch only once the parameters are there",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add_job_flags(p)
    return p


class Ending:
    """What a signal ends. The first one runs what is registered, in a thread of its own and in
    order; whoever is not through within LEAVE_S, or sends a second one, ends the process."""

    def __init__(self) -> None:
        self.number = 0
        self._ends: list[Callable[[], object]] = []
        self._signalled = threading.Event()
        self._over = threading.Event()

    def listen(self) -> None:
        """Takes over SIGINT and SIGTERM. In the main thread."""
        signal.signal(signal.SIGINT, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        threading.Thread(target=self._end, name="ending", daemon=True).start()

    def add(self, end: Callable[[], object]) -> None:
        """Registers what a signal is to end. Raises: Interrupted if there was one."""
        self._ends.append(end)
        if self.number:
            raise Interrupted(self.reason)

    @property
    def reason(self) -> str:
        """The first signal's name; empty before."""
        return signal.Signals(self.number).name if self.number else ""

    def over(self, seconds: float = 0.0) -> bool:
        """Whether everything has ended, perhaps within a time."""
        return self._over.wait(seconds)

    def done(self) -> None:
        """Everything has ended."""
        self._over.set()
        self._signalled.set()

    def _on_signal(self, number: int, _: object) -> None:
        if self.number:
            os._exit(128 + number)
        self.number = number
        self._signalled.set()

    def _end(self) -> None:
        self._signalled.wait()
        if self.over():
            return
        _log.info("event=stop reason=%s", self.reason)
        for end in list(self._ends):
            threading.Thread(target=end, daemon=True).start()
        if not self.over(LEAVE_S):
            os._exit(128 + self.number)


class Interrupted(ParamServerError):
    """A signal came before there was anything to end."""


class Chief:
    """The chief's part of worker 0: a supervisor in a thread of its own."""

    def __init__(self, supervisor: Supervisor, on_failure: Callable[[], object]) -> None:
        self._supervisor = supervisor
        self._on_failure = on_failure
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chief", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._supervisor.run()
        except PermissionDeniedError as error:
            _log.warning("event=just-work reason=%r", str(error))
        except BaseException as error:
            self._failure = error
            self._on_failure()

    def stop(self) -> None:
        """Gives up being chief, after a save under way. The job goes on. Blocks."""
        self._supervisor.stop()
        self._thread.join(LEAVE_S)

    def finish(self) -> None:
        """Waits for the last checkpoint, and until all workers know. Raises what went wrong."""
        self._thread.join()
        self.check()

    def check(self) -> None:
        """Raises what went wrong so far."""
        if self._failure:
            raise self._failure


def work(args: argparse.Namespace, ending: Ending) -> int:
    """One worker's life. The exit code. Raises: ParamServerError."""
    for flag, value in (
        ("--connect-timeout", args.connect_timeout),
        ("--log-steps", args.log_steps),
    ):
        if not 0 < value < math.inf:
            raise ConfigError(f"{flag} must be positive, not {value:g}")
    resolved = cluster.resolve(
        "worker",
        ps=args.ps,
        task_index=args.task_index,
        workers=args.workers,
        chief=args.chief,
    )
    for warning in resolved.warnings:
        _log.warning("%s", warning)
    settings = settings_from(args, resolved.num_workers)

    with ExitStack() as stack:
        client = stack.enter_context(
            Client(
                [str(address) for address in resolved.ps],
                resolved.name,
                connect_timeout=args.connect_timeout,
            )
        )
        ending.add(lambda: None if ending.over(STEP_S) else client.close())
        chief = None
        if resolved.may_be_chief:
            control = stack.enter_context(
                ControlClient(resolved.ps, resolved.name, connect_timeout=args.connect_timeout)
            )
            chief = _become_chief(control, settings, client, ending)
            if chief:
                stack.callback(chief.stop)
        job = client.job()
        if chief is None:
            for line in differences(args, job, resolved.num_workers):
                _log.warning("%s", line)
        try:
            summary = _train(resolved, _as_told(settings, job), client, args, ending)
        except ParamServerError:
            if chief:
                chief.check()
            raise
        if summary:
            print(_report(summary), flush=True)
        if chief:
            chief.finish()
    return 0


def _become_chief(
    control: ControlClient, settings: Settings, client: Client, ending: Ending
) -> Chief | None:
    """Claims to be chief, and gets the job going; None if somebody else is. Blocks until the
    parameters are there."""
    _, model = _load(settings.data, settings.model, settings.seed)

    def init() -> Mapping[str, Array]:
        return model.init(np.random.default_rng(settings.seed))

    supervisor = Supervisor(control, settings, init)
    ending.add(supervisor.stop)
    try:
        _log.info("event=chief did=%r", str(supervisor.start()))
    except PermissionDeniedError as error:
        _log.info("event=just-work reason=%r", str(error))
        return None
    except Stopped:
        raise Interrupted(ending.reason) from None
    return Chief(supervisor, client.close)


def _as_told(settings: Settings, job: Job) -> Settings:
    """What this worker goes by: the job's settings, and its own where the job has none (a program
    of the user's began it). Raises: ConfigError."""
    told = job.settings
    return replace(
        settings,
        model=told.get("model", settings.model),
        data=told.get("data", settings.data),
        batch_size=int(told.get("batch_size", settings.batch_size)),
        seed=int(told.get("seed", settings.seed)),
        workers=int(told.get("workers", settings.workers)),
    )


def _train(
    resolved: Resolved,
    settings: Settings,
    client: Client,
    args: argparse.Namespace,
    ending: Ending,
) -> Summary | None:
    """The worker's part; None if there is no data for it."""
    dataset, model = _load(settings.data, settings.model, settings.seed)
    batches = Batches(
        dataset, settings.batch_size, settings.seed, resolved.task_index, settings.workers
    )
    shards = client.join()
    if not batches.batches_per_epoch:
        # Who joined and left is not waited for at the first round of a synchronous job.
        client.leave("it has no rows to learn from")
        print(
            f"{resolved.name} has nothing to do: data {dataset.name!r} has "
            f"{len(dataset.train)} rows for {settings.workers} workers",
            flush=True,
        )
        return None
    session = TrainingSession(
        client,
        model,
        batches,
        [NanHook(), LoggingHook(args.log_steps)],
        test=dataset.test,
        overlap=args.overlap,
    )
    ending.add(lambda: session.request_stop(ending.reason))
    print(f"{resolved.name} training with {shards} ps", flush=True)
    return session.run()


@lru_cache(maxsize=1)
def _load(data: str, model: str, seed: int) -> tuple[Dataset, Model]:
    dataset = load_data(data, seed)
    return dataset, load_model(model, dataset.spec)


def _report(summary: Summary) -> str:
    """What was learned, in one line."""
    words = [f"{'stopped at' if summary.stopped else 'trained to'} step {summary.global_step}:"]
    if sum(value.size for value in summary.params.values()) <= SHOWN:
        for name in sorted(summary.params, reverse=True):  # weight before bias
            value = np.array2string(summary.params[name], precision=4, separator=", ")
            words.append(f"{name}={value}")
    words += [f"{name}={value:.4g}" for name, value in summary.metrics.items()]
    words.append(f"({summary.seconds:.2f} s)")
    return " ".join(words)


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    args = parser().parse_args(argv)
    keep_large_blocks()
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
    )
    ending = Ending()
    ending.listen()
    try:
        code = work(args, ending)
    except ParamServerError as error:
        code = 2 if isinstance(error, ConfigError) else 1
        if not ending.number:
            print(f"worker: {error}", file=sys.stderr)
    except Exception:
        _log.exception("defect")
        code = 70
    ending.done()
    return 128 + ending.number if ending.number else code


if __name__ == "__main__":
    sys.exit(main())
