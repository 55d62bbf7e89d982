"""`python -m chief`: starts a job or brings it back, saves it, and says when it is over.

Prints `chief of 2 ps, initialized at step 0` (or `restored`, `adopted`) when the job is in hand.

Exit codes: 0 the limit is reached, and everything is saved; 1 the job has failed, or somebody else
is chief; 2 a wrong setting; 70 a defect, ours or the model's; 130 SIGINT, 143 SIGTERM: the first
signal lets a save under way come to its end, gives up being chief and leaves the job running (start
the chief again to go on), the second quits at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np

from chief.flags import Settings, add_job_flags, settings_from
from chief.starter import Stopped
from chief.supervisor import Supervisor
from paramserver import cluster
from paramserver.allocation import keep_large_blocks
from paramserver.control_client import ControlClient
from paramserver.errors import ConfigError, ParamServerError
from paramserver.layout import Array
from worker.data import load_data
from worker.models import load_model

_log = logging.getLogger("chief")

#: How long a signal may go unheard, in seconds.
SIGNAL_S = 0.5


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m chief",
        description="Starts a job or brings it back, saves it, and says when it is over.",
        allow_abbrev=False,
    )
    add = p.add_argument
    add("--ps", metavar="HOST:PORT,...", help="all parameter servers (or TF_CONFIG)")
    add("--workers", type=int, metavar="N", help="how many workers train (default 1, or TF_CONFIG)")
    add(
        "--connect-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="how long a parameter server may stay away (default %(default)g)",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    add_job_flags(p)
    return p


def initial(settings: Settings) -> dict[str, Array]:
    """The variables of a fresh job: the same ones for the same settings. Raises: ConfigError."""
    data = load_data(settings.data, settings.seed)
    model = load_model(settings.model, data.spec)
    return model.init(np.random.default_rng(settings.seed))


def supervise(args: argparse.Namespace) -> int:
    """Is chief until the job is over or a signal comes. The exit code. Raises: ParamServerError."""
    if not 0 <= args.connect_timeout < float("inf"):
        raise ConfigError(f"--connect-timeout must be 0 or more, not {args.connect_timeout:g}")
    resolved = cluster.resolve("chief", ps=args.ps, workers=args.workers)
    for warning in resolved.warnings:
        _log.warning("%s", warning)
    settings = settings_from(args, resolved.num_workers)
    variables = initial(settings)
    control = ControlClient(resolved.ps, "chief:0", connect_timeout=args.connect_timeout)
    supervisor = Supervisor(control, settings, lambda: variables)
    signals = _on_signals(supervisor)
    # In a thread of its own: while gRPC waits, the main thread would not hear of a signal.
    with ThreadPoolExecutor(1, thread_name_prefix="chief") as pool:
        chief = pool.submit(_be_chief, control, supervisor)
        # Woken now and then: a signal that another thread gets does not end an untimed wait.
        while not wait((chief,), SIGNAL_S).done:
            pass
    if chief.result():
        return 0
    _log.warning("event=stop signal=%s: the job goes on without a chief", signals[0].name)
    return 128 + signals[0]


def _be_chief(control: ControlClient, supervisor: Supervisor) -> bool:
    """From the claim to its end; whether the job is over. Blocks."""
    with control:
        try:
            print(supervisor.start(), flush=True)
            return supervisor.run()
        except Stopped:
            return False


def _on_signals(supervisor: Supervisor) -> list[signal.Signals]:
    """The list gets the first signal that comes."""
    caught: list[signal.Signals] = []

    def on_signal(number: int, _: object) -> None:
        if caught:
            os._exit(128 + number)
        caught.append(signal.Signals(number))
        supervisor.stop()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return caught


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    args = parser().parse_args(argv)
    keep_large_blocks()
    logging.basicConfig(
        level=args.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s %(message)s",
    )
    try:
        return supervise(args)
    except ConfigError as error:
        print(f"chief: {error}", file=sys.stderr)
        return 2
    except ParamServerError as error:
        print(f"chief: {error}", file=sys.stderr)
        return 1
    except Exception:
        _log.exception("defect")
        return 70


if __name__ == "__main__":
    sys.exit(main())
