"""A job's flags: defaults, what is refused, and what a worker is told that it differs in."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import paramserver as ps
from chief.flags import Settings, add_job_flags, differences, settings_from
from paramserver.errors import ConfigError
from paramserver.job import Job


def parse(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--workers", type=int)
    add_job_flags(parser)
    return parser.parse_args(argv)


def settings(*argv: str, workers: int = 1) -> Settings:
    return settings_from(parse(*argv), workers)


def test_without_flags_nothing_is_given_and_everything_has_a_default() -> None:
    assert all(value is None for value in vars(parse()).values())
    assert settings() == Settings(
        model="linear",
        data="line",
        batch_size=32,
        seed=0,
        workers=1,
        optimizer=ps.optimizers.SGD(0.1),
        consistency=ps.Async(),
        last_step=200,
        checkpoint_dir=None,
        save_steps=0,
        save_secs=0,
        keep=5,
    )


def test_flags_become_settings_and_a_job() -> None:
    given = settings(
        *("--model", "mlp", "--data", "digits", "--batch-size", "8", "--seed", "3"),
        *("--optimizer", "Adam", "--learning-rate", "0.01", "--optimizer-arg", "beta1=0.8"),
        *("--consistency", "sync", "--last-step", "10", "--checkpoint-dir", "ckpt"),
        *("--save-steps", "4", "--save-secs", "2.5", "--keep", "0"),
        workers=3,
    )
    assert given.optimizer == ps.optimizers.Adam(0.01, beta1=0.8)
    assert given.consistency == ps.Sync(3)
    assert (given.checkpoint_dir, given.save_steps, given.save_secs, given.keep) == (
        Path("ckpt"),
        4,
        2.5,
        0,
    )
    assert given.job() == Job(
        ps.Sync(3),
        ps.optimizers.Adam(0.01, beta1=0.8),
        10,
        settings={"model": "mlp", "data": "digits", "batch_size": "8", "seed": "3", "workers": "3"},
    )


@pytest.mark.parametrize(
    ("argv", "steps", "secs"),
    [
        ("", 0, 600),
        ("--save-steps 5", 5, 0),
        ("--save-secs 5", 0, 5),
        ("--save-steps 0", 0, 600),
        ("--save-steps 5 --save-secs 7", 5, 7),
        ("--save-secs 0", 0, 0),
    ],
)
def test_when_to_save(argv: str, steps: int, secs: float) -> None:
    given = settings("--checkpoint-dir", "ckpt", *argv.split())
    assert (given.save_steps, given.save_secs) == (steps, secs)


def test_the_learning_rate_left_out_is_the_optimizers_own() -> None:
    assert settings("--optimizer", "adam").optimizer == ps.optimizers.Adam()
    assert settings("--optimizer", "momentum").optimizer == ps.optimizers.Momentum()


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("--batch-size 0", ["--batch-size", "1 or more", "0"]),
        ("--last-step -1", ["--last-step", "-1"]),
        ("--seed -1", ["--seed", "-1"]),
        ("--save-secs nan --checkpoint-dir x", ["--save-secs", "nan"]),
        ("--save-secs inf --checkpoint-dir x", ["--save-secs", "inf"]),
        ("--keep -1 --checkpoint-dir x", ["--keep", "-1"]),
        ("--save-steps 5", ["--save-steps", "--checkpoint-dir"]),
        ("--keep 5", ["--keep", "--checkpoint-dir"]),
        ("--optimizer tiger", ["tiger", "adam", "momentum", "sgd"]),
        ("--learning-rate nan", ["learning_rate", "nan"]),
        ("--optimizer-arg momentum=0.5", ["momentum", "sgd", "learning_rate"]),
        ("--optimizer-arg momentum", ["momentum", "name=number"]),
        ("--optimizer-arg momentum=much", ["much", "not a number"]),
        ("--learning-rate 1 --optimizer-arg learning-rate=2", ["learning_rate", "twice"]),
        ("--consistency eventual", ["eventual", "sync", "async", "ssp:N"]),
        ("--consistency ssp:-1", ["ssp:-1"]),
    ],
)
def test_a_wrong_flag_is_named_with_what_would_be_right(argv: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(*argv.split())
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_a_worker_hears_of_each_flag_that_the_job_has_otherwise() -> None:
    job = settings("--optimizer", "adam", "--consistency", "ssp:2", workers=2).job()
    assert differences(parse(), job, 1) == []
    same = "--optimizer ADAM --learning-rate 0.001 --consistency ssp:2 --workers 2 --batch-size 32"
    assert differences(parse(*same.split()), job, 2) == []
    other = (
        "--model mlp --data digits --batch-size 8 --seed 1 --workers 3 --optimizer sgd"
        " --learning-rate 0.5 --optimizer-arg beta1=0.5 --consistency sync --last-step 7"
        " --checkpoint-dir mine"
    )
    lines = differences(parse(*other.split()), job, 3)
    assert lines == [
        "--model mlp is ignored: the job has linear",
        "--data digits is ignored: the job has line",
        "--batch-size 8 is ignored: the job has 32",
        "--seed 1 is ignored: the job has 0",
        "--workers 3 is ignored: the job has 2",
        "--optimizer sgd is ignored: the job has adam",
        "--learning-rate 0.5 is ignored: the job has 0.001",
        "--optimizer-arg beta1=0.5 is ignored: the job has beta1=0.9",
        "--consistency sync is ignored: the job has ssp:2",
        "--last-step 7 is ignored: the job has 200",
    ]
