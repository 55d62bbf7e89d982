"""A job's settings on the command line, for the chief and for a worker that may be chief.

Every flag defaults to None, so that "given" is known: what a worker gives and the job does not have
is worth a line, what it leaves out is not.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from paramserver import consistency, optimizers, schedules
from paramserver.consistency import Consistency
from paramserver.errors import ConfigError
from paramserver.job import Job
from paramserver.optimizers import RULES, Optimizer
from worker.data import DEFAULT_DATA, check_seed
from worker.models import DEFAULT_MODEL

DEFAULT_BATCH_SIZE = 32
DEFAULT_SEED = 0
DEFAULT_OPTIMIZER = "sgd"
DEFAULT_CONSISTENCY = "async"
DEFAULT_LAST_STEP = 200
DEFAULT_KEEP = 5
#: Seconds between saves, if nothing else is said.
DEFAULT_SAVE_SECS = 600.0

T = TypeVar("T")


def add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Adds what a job is made of. `settings_from` applies the defaults and checks."""
    job = parser.add_argument_group("the job (set by the chief)").add_argument
    job("--model", metavar="NAME", help=f"a name or package.module:Name (default {DEFAULT_MODEL})")
    job("--data", metavar="NAME", help=f"a name or package.module:Name (default {DEFAULT_DATA})")
    job("--batch-size", type=int, metavar="N", help=f"rows a step (default {DEFAULT_BATCH_SIZE})")
    job("--seed", type=int, metavar="N", help=f"of all that is random (default {DEFAULT_SEED})")
    job(
        "--optimizer",
        metavar="KIND",
        help=f"{', '.join(RULES)} (default {DEFAULT_OPTIMIZER}); restored with another kind,"
        " the weights are kept and its slots start afresh",
    )
    job(
        "--learning-rate",
        metavar="R",
        help="a number, or a schedule: KIND:RATE:STEPS..., such as cosine:0.1:1000 or, in turn,"
        f" warmup:0.1:100,cosine:0.1:900; kinds: {', '.join(schedules.KINDS)} (default: the"
        " optimizer's own)",
    )
    job(
        "--optimizer-arg",
        action="append",
        metavar="NAME=VALUE",
        help="another setting of the optimizer, such as momentum=0.9; may be given again",
    )
    job("--consistency", metavar="RULE", help=f"sync, async, ssp:N (default {DEFAULT_CONSISTENCY})")
    job(
        "--last-step",
        type=int,
        metavar="N",
        help=f"global_step at which the job ends, 0: never (default {DEFAULT_LAST_STEP})",
    )
    save = parser.add_argument_group("checkpoints (made by the chief)").add_argument
    save(
        "--checkpoint-dir", type=Path, metavar="DIR", help="where to save and restore (default: no)"
    )
    save("--save-steps", type=int, metavar="N", help="save every N steps (0: not by steps)")
    save(
        "--save-secs",
        type=float,
        metavar="S",
        help=f"save every S seconds (0: not by time; default {DEFAULT_SAVE_SECS:g}, or 0 with"
        " --save-steps); the end is always saved",
    )
    save(
        "--keep",
        type=int,
        metavar="K",
        help=f"checkpoints to keep, 0: all (default {DEFAULT_KEEP})",
    )


@dataclass(frozen=True)
class Settings:
    """All that a chief decides on. `save_steps` and `save_secs` 0: not by steps, not by time.

    Raises: ConfigError for a value that cannot be."""

    model: str = DEFAULT_MODEL
    data: str = DEFAULT_DATA
    batch_size: int = DEFAULT_BATCH_SIZE
    seed: int = DEFAULT_SEED
    workers: int = 1
    optimizer: Optimizer = optimizers.SGD()  # noqa: RUF009 - a frozen value
    consistency: Consistency = consistency.Async()  # noqa: RUF009 - a frozen value
    last_step: int = DEFAULT_LAST_STEP
    checkpoint_dir: Path | None = None
    save_steps: int = 0
    save_secs: float = 0.0
    keep: int = DEFAULT_KEEP

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for flag, value, lowest in (
            ("--batch-size", self.batch_size, 1),
            ("--workers", self.workers, 1),
            ("--last-step", self.last_step, 0),
            ("--save-steps", self.save_steps, 0),
            ("--save-secs", self.save_secs, 0),
            ("--keep", self.keep, 0),
        ):
            if not lowest <= value < math.inf:
                raise ConfigError(f"{flag} must be {lowest} or more, not {value:g}")

    def job(self) -> Job:
        """What the shards are told. Its `model` (a fingerprint) is left open."""
        return Job(
            self.consistency,
            self.optimizer,
            self.last_step,
            settings={
                "model": self.model,
                "data": self.data,
                "batch_size": str(self.batch_size),
                "seed": str(self.seed),
                "workers": str(self.workers),
            },
        )


def settings_from(args: argparse.Namespace, workers: int) -> Settings:
    """The settings that flags (None: not given) amount to. Raises: ConfigError, one line a rule."""
    if args.checkpoint_dir is None:
        for flag, value in (
            ("--save-steps", args.save_steps),
            ("--save-secs", args.save_secs),
            ("--keep", args.keep),
        ):
            if value is not None:
                raise ConfigError(
                    f"{flag} does nothing without --checkpoint-dir; give that as well"
                )
    save_secs = args.save_secs
    if save_secs is None:
        by_time = args.checkpoint_dir is not None and not args.save_steps
        save_secs = DEFAULT_SAVE_SECS if by_time else 0.0
    return Settings(
        model=_default(args.model, DEFAULT_MODEL),
        data=_default(args.data, DEFAULT_DATA),
        batch_size=_default(args.batch_size, DEFAULT_BATCH_SIZE),
        seed=_default(args.seed, DEFAULT_SEED),
        workers=workers,
        optimizer=optimizers.from_name(
            _default(args.optimizer, DEFAULT_OPTIMIZER),
            **_hyper(args),
        ),
        consistency=consistency.parse(_default(args.consistency, DEFAULT_CONSISTENCY), workers),
        last_step=_default(args.last_step, DEFAULT_LAST_STEP),
        checkpoint_dir=args.checkpoint_dir,
        save_steps=_default(args.save_steps, 0),
        save_secs=save_secs,
        keep=_default(args.keep, DEFAULT_KEEP),
    )


def differences(args: argparse.Namespace, job: Job, workers: int) -> list[str]:
    """One line for each flag that was given and says otherwise than the running job.

    `workers` is compared if --workers was given. Raises: ConfigError for an --optimizer-arg that is
    no NAME=VALUE, or a --learning-rate that is neither a number nor a schedule."""
    hyper = job.optimizer.hyper()
    given: list[tuple[str, object, object]] = [
        ("--model", args.model, job.settings.get("model")),
        ("--data", args.data, job.settings.get("data")),
        ("--batch-size", args.batch_size, job.settings.get("batch_size")),
        ("--seed", args.seed, job.settings.get("seed")),
        (
            "--workers",
            None if getattr(args, "workers", None) is None else workers,
            job.settings.get("workers"),
        ),
        ("--optimizer", args.optimizer and args.optimizer.lower(), job.optimizer.kind),
        (
            "--learning-rate",
            args.learning_rate and schedules.parse(args.learning_rate),
            getattr(job.optimizer, "learning_rate", None),
        ),
        *(("--optimizer-arg", f"{k}={v:g}", _named(k, hyper)) for k, v in _optimizer_args(args)),
        ("--consistency", args.consistency, str(job.consistency)),
        ("--last-step", args.last_step, job.last_step),
    ]
    return [
        f"{flag} {mine} is ignored: the job has {_shown(theirs)}"
        for flag, mine, theirs in given
        if mine is not None and _shown(mine) != _shown(theirs)
    ]


def _hyper(args: argparse.Namespace) -> dict[str, float | str]:
    """The optimizer's settings that were given. Raises: ConfigError for one given twice."""
    rate = args.learning_rate
    hyper: dict[str, float | str] = {} if rate is None else {"learning_rate": rate}
    for name, value in _optimizer_args(args):
        if name in hyper:
            raise ConfigError(f"the optimizer's {name} is given twice; give it once")
        hyper[name] = value
    return hyper


def _optimizer_args(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    for text in args.optimizer_arg or ():
        name, equals, value = text.partition("=")
        try:
            yield name.strip().replace("-", "_"), float(value)
        except ValueError:
            problem = f"{value[:80]!r} is not a number" if equals else "there is no '='"
            raise ConfigError(
                f"--optimizer-arg {text[:80]!r} is not of the form name=number: {problem}"
            ) from None


def _named(name: str, hyper: dict[str, float]) -> str:
    return f"{name}={hyper[name]:g}" if name in hyper else "no such setting"


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(given: T | None, default: T) -> T:
    return default if given is None else given
