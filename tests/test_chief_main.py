"""`python -m chief`: its ready line, its exit codes, its signals."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import MakeCluster, wait_for
from processes import Process, Processes

import paramserver as ps
from chief.__main__ import main
from chief.checkpoint import list_checkpoints, load
from worker.data import load_data
from worker.models import load_model


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """`main` takes over the signals of its process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def train(addresses: str, data: str = "line", model: str = "linear") -> ps.Params:
    """What worker 0 does, until the job is over."""
    dataset = load_data(data)
    learner = load_model(model, dataset.spec)
    with ps.Client(addresses, worker="worker:0", connect_timeout=20) as client:
        params = client.pull(timeout=20)
        while not params.complete:
            _, grads = learner.loss_and_grads(params, dataset.train)
            params = client.push_pull(grads, timeout=20)
        return params


def start(processes: Processes, addresses: list[str], *flags: str) -> Process:
    return processes.python("-m", "chief", "--ps", ",".join(addresses), *flags)


def test_a_job_from_the_command_line(processes: Processes, tmp_path: Path) -> None:
    ckpt = ("--checkpoint-dir", str(tmp_path / "ckpt"))
    for limit, ready, code in (
        ("30", "initialized at step 0", 0),
        ("30", "restored at step 30", 0),
    ):
        servers = [processes.ps("--exit-when-done", "--lease", "1") for _ in range(2)]
        addresses = [address for _, address in servers]
        chief = start(processes, addresses, "--model", "mlp", "--last-step", limit, *ckpt)
        assert chief.line("chief of")[0] and chief.stdout == [f"chief of 2 ps, {ready}"]
        params = train(",".join(addresses), model="mlp")
        assert params.complete and params.version == 30
        assert chief.wait() == code, chief.output
        assert any("the limit is reached: step 30 of 30" in line for line in chief.stderr)
        assert "variable=hidden/weight shape=(1, 128) dtype=float32" in chief.output
        for server, _ in servers:
            assert server.wait() == 0, server.output
    steps = [stored.global_step for stored in list_checkpoints(tmp_path / "ckpt")]
    assert steps == [30, 0]
    first = load(list_checkpoints(tmp_path / "ckpt")[-1].path)
    init = load_model("mlp", load_data("line").spec).init(np.random.default_rng(0))
    assert all((first.variables[name].value == array).all() for name, array in init.items())


def test_the_first_signal_leaves_the_job_running_and_a_killed_chief_is_replaced(
    cluster: MakeCluster, processes: Processes, tmp_path: Path
) -> None:
    job = cluster(2, lease=1.0)
    flags = ("--checkpoint-dir", str(tmp_path / "ckpt"), "--last-step", "20")
    first = start(processes, job.addresses, *flags)
    first.line("initialized at step 0")
    first.send(signal.SIGTERM)
    assert first.wait(10) == 143, first.output
    assert any("the job goes on without a chief" in line for line in first.stderr)
    assert job.status().initialized and job.status().chief == ""

    second = start(processes, job.addresses, *flags)
    second.line("adopted at step 0")
    second.kill()
    third = start(processes, job.addresses, *flags)
    third.line("adopted at step 0")
    fourth = start(processes, job.addresses, "--last-step", "20")
    assert fourth.wait() == 1
    assert re.fullmatch(
        r"chief: chief:0 on \S+, process \d+ is chief of this job .*", fourth.stderr[-1]
    )
    assert f"process {third.pid} " in fourth.stderr[-1]
    assert train(",".join(job.addresses)).version == 20
    assert third.wait() == 0, third.output


def test_signals_while_it_waits(processes: Processes) -> None:
    """For a server that is not there: one signal. For one that hangs: a second one quits."""
    chief = start(processes, ["127.0.0.1:1"])
    chief.line(r"waiting for ps at 127\.0\.0\.1:1 \(connection refused\)")
    chief.send(signal.SIGINT)
    assert chief.wait(10) == 130, chief.output

    server, address = processes.ps()
    chief = start(processes, [address])
    chief.line("initialized at step 0")
    server.send(signal.SIGSTOP)

    def gone() -> bool:
        chief.send(signal.SIGTERM)
        return not chief.running

    wait_for(gone, "the chief to quit", seconds=5, every=0.2)
    assert chief.wait() == 143, chief.output


# -- in this process: quicker --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ("", ["--ps"]),
        ("--ps localhost", ["--ps", "localhost"]),
        ("--ps localhost:1,", ["--ps", "empty"]),
        ("--ps localhost:1 --model nope", ["--model", "nope", "linear"]),
        ("--ps localhost:1 --data nope", ["--data", "nope", "line"]),
        ("--ps localhost:1 --model softmax", ["softmax", "regression"]),
        ("--ps localhost:1 --workers 0", ["--workers"]),
        ("--ps localhost:1 --connect-timeout -1", ["--connect-timeout"]),
        ("--ps localhost:1 --optimizer nosuch", ["nosuch", "adam"]),
        ("--ps localhost:1 --keep 3", ["--checkpoint-dir"]),
    ],
)
def test_a_wrong_setting_is_exit_code_2_and_one_line(
    argv: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("chief: ") and err.count("\n") == 1
    for part in parts:
        assert part in err


def test_a_server_that_stays_away_is_exit_code_1_and_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--ps", "127.0.0.1:1", "--connect-timeout", "0.2"]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    for part in ("127.0.0.1:1", "connection refused", "0.2 s"):
        assert part in err


def test_an_unwritable_folder_is_exit_code_1_and_nothing_is_started(
    cluster: MakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = cluster()
    (tmp_path / "file").write_text("")
    assert main(["--ps", job.addresses[0], "--checkpoint-dir", str(tmp_path / "file" / "x")]) == 1
    assert str(tmp_path / "file") in capsys.readouterr().err
    assert not job.status().initialized and job.status().chief == ""


def test_a_defect_is_exit_code_70(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_model.py").write_text("def model(spec):\n    raise RuntimeError('oops')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["--ps", "127.0.0.1:1", "--model", "broken_model:model"]) == 70


def test_tf_config_says_who_is_where(
    cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ "master" is an older word for chief."""
    job = cluster(lease=0.5)
    monkeypatch.setenv(
        "TF_CONFIG",
        f'{{"cluster": {{"ps": ["{job.addresses[0]}"], "worker": ["a:1", "b:2"],'
        ' "master": ["c:3"]}, "task": {"type": "master", "index": 0}}',
    )
    assert main(["--last-step", "1", "--data", "no"]) == 2
    assert main(["--last-step", "0", "--connect-timeout", "0.1", "--ps", "127.0.0.1:1"]) == 1
    monkeypatch.setenv(
        "TF_CONFIG",
        '{"cluster": {"ps": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}}',
    )
    assert main([]) == 2
    assert "python -m worker" in capsys.readouterr().err
