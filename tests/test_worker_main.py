"""`python -m worker` as people run it: real processes, one line for each mistake, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from conftest import wait_for
from processes import Process, Processes

import paramserver as ps
from paramserver import transport
from paramserver.v1 import control_pb2
from worker.__main__ import main

TRAINED = re.compile(
    r"trained to step (\d+): weight=\[(\S+)\] bias=(\S+) loss=(\S+) r2=(\S+) \((\S+) s\)"
)


def worker(processes: Processes, address: str, *flags: str, **env: str) -> Process:
    return processes.python("-m", "worker", "--ps", address, *flags, env=env)


def trained(process: Process, seconds: float = 30.0) -> tuple[int, float, float]:
    """Its last line: step, weight, bias."""
    assert process.wait(seconds) == 0, process.output
    match = TRAINED.fullmatch(process.stdout[-1])
    assert match, process.output
    return int(match[1]), float(match[2]), float(match[3])


Call = Callable[..., tuple[int, list[str], list[str]]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """Runs the command in this process: (exit code, lines of stdout, lines of stderr)."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*argv: str) -> tuple[int, list[str], list[str]]:
        code = main(argv)
        out, err = capfd.readouterr()
        return code, out.splitlines(), err.splitlines()

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def free_port() -> int:
    with socket.socket() as each:
        each.bind(("127.0.0.1", 0))
        port: int = each.getsockname()[1]
        return port


def status(address: str) -> control_pb2.StatusResponse:
    with transport.make_channel(address) as channel:
        return transport.ControlStub(channel).Status(control_pb2.StatusRequest(), timeout=10)


# -- it works ------------------------------------------------------------------------------------


def test_the_bare_commands_train(processes: Processes) -> None:
    server, address = processes.ps("--exit-when-done")
    one = worker(processes, address)
    step, weight, bias = trained(one)
    assert step == 200
    assert abs(weight - 2) < 0.1 and abs(bias) < 0.1
    assert one.stdout[0] == "worker:0 training with 1 ps"
    assert server.wait() == 0, server.output


def test_the_worker_may_come_first(processes: Processes) -> None:
    port = free_port()
    early = worker(processes, f"localhost:{port}")
    early.line(rf"waiting for ps at localhost:{port} \(connection refused\)")
    server, _ = processes.ps("--exit-when-done", port=port)
    assert trained(early)[0] == 200
    assert server.wait() == 0, server.output


def test_a_peer_that_never_comes_is_not_waited_for(processes: Processes) -> None:
    """Trial 1: async, three workers, the last is never started."""
    server, address = processes.ps("--exit-when-done")
    both = [
        worker(processes, address, "--workers", "3", "--task-index", str(i), "--last-step", "40")
        for i in (1, 0)
    ]
    assert [trained(process)[0] for process in both] == [40, 40]
    assert not any("worker:2" in line for line in both[1].stderr)
    assert server.wait() == 0, server.output


@pytest.mark.parametrize(
    ("consistency", "limit"), [("async", 100), ("sync", 20), ("ssp:2", 40)], ids=str
)
def test_three_workers_end_at_the_limit(
    processes: Processes, tmp_path: Path, consistency: str, limit: int
) -> None:
    """Trial 27: exactly, and the chief last, after the final checkpoint."""
    folder = tmp_path / "ckpt"
    server, address = processes.ps("--exit-when-done", "--lease", "2")
    flags = ["--workers", "3"]
    job = [
        "--consistency", consistency, "--last-step", str(limit), "--checkpoint-dir", str(folder)
    ]  # fmt: skip
    chief = worker(processes, address, *flags, *job)
    others = [worker(processes, address, *flags, "--task-index", str(i)) for i in (1, 2)]
    found = {trained(process) for process in (*others, chief)}
    assert len(found) == 1
    assert found.pop()[0] == limit
    assert server.wait() == 0, server.output
    assert any(str(limit) in path.name for path in folder.iterdir()), list(folder.iterdir())


def test_a_second_sync_worker_may_come_late(processes: Processes) -> None:
    """Trial 3: the first waits in its pull, and says for whom."""
    _, address = processes.ps()
    flags = ["--workers", "2"]
    first = worker(processes, address, *flags, "--consistency", "sync", "--last-step", "10")
    first.line(r"waiting for ps:0 .*first round waits for workers \(1 of 2 joined\)")
    second = worker(processes, address, *flags, "--task-index", "1")
    assert trained(second)[0] == 10
    assert trained(first)[0] == 10


def test_a_mlp_learns_digits_with_two_workers(processes: Processes) -> None:
    pytest.importorskip("sklearn")
    _, address = processes.ps()
    job = [
        "--model", "mlp", "--data", "digits", "--optimizer", "adam", "--learning-rate", "0.005",
        "--consistency", "sync", "--last-step", "150",
    ]  # fmt: skip
    flags = ["--workers", "2"]
    both = [
        worker(processes, address, *flags, *job),
        worker(processes, address, *flags, "--task-index", "1"),
    ]
    for process in both:
        assert process.wait() == 0, process.output
        match = re.search(r"trained to step 150: loss=\S+ accuracy=(\S+) ", process.stdout[-1])
        assert match, process.output
        assert float(match[1]) >= 0.95


def test_a_model_and_data_of_your_own(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from worker.data import Batch, Dataset, DataSpec\n"
        "class Mean:\n"
        "    def __init__(self, spec): pass\n"
        "    def init(self, rng): return {'mean': np.zeros((), np.float32)}\n"
        "    def loss_and_grads(self, params, batch):\n"
        "        error = params['mean'] - batch.y\n"
        "        return float(error @ error), {'mean': np.asarray(2 * error.mean())}\n"
        "rows = Batch(np.zeros((6, 1), np.float32), np.full(6, 3, np.float32))\n"
        "data = Dataset('threes', DataSpec(1), rows, rows)\n"
    )
    _, address = processes.ps()
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    job = ["--model", "mine:Mean", "--data", "mine:data", "--learning-rate", "0.25"]
    mine = worker(processes, address, *job, "--last-step", "40", PYTHONPATH=path)
    assert mine.wait() == 0, mine.output
    assert re.match(r"trained to step 40: mean=3\.? ", mine.stdout[-1]), mine.output


def test_more_workers_than_rows(processes: Processes, tmp_path: Path) -> None:
    """Trial 53: the idle one says so, and the barrier opens without it."""
    (tmp_path / "few.py").write_text(
        "import numpy as np\n"
        "from worker.data import Batch, Dataset, DataSpec\n"
        "rows = Batch(np.ones((2, 1), np.float32), np.ones(2, np.float32))\n"
        "data = Dataset('few', DataSpec(1), rows, rows)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    _, address = processes.ps()
    job = ["--data", "few:data", "--consistency", "sync", "--last-step", "5"]
    flags = ["--workers", "3"]
    chief = worker(processes, address, *flags, *job, PYTHONPATH=path)
    first = worker(processes, address, *flags, "--task-index", "1", PYTHONPATH=path)
    idle = worker(processes, address, *flags, "--task-index", "2", PYTHONPATH=path)
    assert idle.wait() == 0, idle.output
    assert idle.stdout == ["worker:2 has nothing to do: data 'few' has 2 rows for 3 workers"]
    assert [trained(process)[0] for process in (first, chief)] == [5, 5]


def test_the_chiefs_settings_are_the_jobs(processes: Processes) -> None:
    _, address = processes.ps()
    flags = ["--workers", "2"]
    chief = worker(
        processes, address, *flags, "--consistency", "sync", "--last-step", "7", "--seed", "3"
    )
    chief.line("^worker:0 training")
    other = worker(
        processes, address, "--task-index", "1", "--last-step", "9", "--seed", "3",
        "--learning-rate", "0.7", "--optimizer", "sgd",
    )  # fmt: skip
    assert trained(other)[0] == trained(chief)[0] == 7
    ignored = [line for line in other.stderr if "is ignored" in line]
    assert [line.partition("worker ")[2] for line in ignored] == [
        "--learning-rate 0.7 is ignored: the job has 0.1",
        "--last-step 9 is ignored: the job has 7",
    ]


def test_worker_0_just_works_when_a_chief_is_named(processes: Processes) -> None:
    _, address = processes.ps()
    plain = worker(processes, address, "--chief", "localhost:1680")
    plain.line("not initialised yet: no chief, no worker 0")
    with ps.Client(address) as client:
        client.initialize(
            {"weight": np.zeros(1, np.float32), "bias": np.zeros((), np.float32)}, last_step=30
        )
    assert trained(plain)[0] == 30


def test_tf_config_says_who_is_who(processes: Processes) -> None:
    _, address = processes.ps()
    names = {"ps": [address], "worker": ["localhost:1682", "localhost:1683"]}

    def start(index: int) -> Process:
        config = json.dumps({"cluster": names, "task": {"type": "worker", "index": index}})
        return processes.python("-m", "worker", "--last-step", "20", env={"TF_CONFIG": config})

    chief, other = start(0), start(1)
    assert trained(other)[0] == trained(chief)[0] == 20
    assert other.stdout[0] == "worker:1 training with 1 ps"


def test_an_adopted_job_goes_on(processes: Processes) -> None:
    """A worker that comes back finds the job where it was; a higher limit raises it."""
    _, address = processes.ps()
    assert trained(worker(processes, address, "--last-step", "10"))[0] == 10
    assert trained(worker(processes, address, "--last-step", "10"))[0] == 10
    assert trained(worker(processes, address, "--last-step", "25"))[0] == 25


# -- it fails as it should -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no parameter server is named: give --ps"),
        (["--ps", "localhost"], "--ps: 'localhost' is not host:port"),
        (["--ps", "localhost:1,"], "--ps: entry 2 of 'localhost:1,' is empty"),
        (["--ps", "localhost:1", "--task-index", "-1"], "--task-index"),
        (["--ps", "localhost:1", "--workers", "0"], "--workers"),
        (["--ps", "localhost:1", "--model", "nosuch"], "--model 'nosuch' is not known"),
        (["--ps", "localhost:1", "--model", "nosuch:M"], "no module 'nosuch'"),
        (["--ps", "localhost:1", "--model", "worker.data:DATASETS"], "without the method"),
        (["--ps", "localhost:1", "--model", "softmax"], "softmax"),
        (["--ps", "localhost:1", "--data", "nosuch"], "--data 'nosuch' is not known"),
        (["--ps", "localhost:1", "--optimizer", "nosuch"], "nosuch"),
        (["--ps", "localhost:1", "--consistency", "nosuch"], "nosuch"),
        (["--ps", "localhost:1", "--batch-size", "0"], "--batch-size must be 1 or more, not 0"),
        (["--ps", "localhost:1", "--connect-timeout", "0"], "--connect-timeout must be positive"),
        (["--ps", "localhost:1", "--log-steps", "0"], "--log-steps must be positive"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, list) else "",
)
def test_a_wrong_setting_is_one_line(call: Call, flags: list[str], message: str) -> None:
    code, out, err = call(*flags)
    assert (code, out) == (2, [])
    assert len(err) == 1
    assert err[0].startswith("worker: ")
    assert message in err[0]


def test_a_wrong_setting_of_a_process_is_one_line(processes: Processes) -> None:
    process = worker(processes, "localhost:1", "--model", "nosuch")
    assert process.wait() == 2, process.output
    assert process.stdout == []
    assert len(process.stderr) == 1


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ('{"type": "evaluator", "index": 0}', "an evaluator takes no part"),
        ('{"type": "worker", "index": 5}', "index"),
        ('{"type": "ps", "index": 0}', "run `python -m paramserver` here"),
    ],
)
def test_a_wrong_tf_config_is_one_line(
    call: Call, monkeypatch: pytest.MonkeyPatch, task: str, message: str
) -> None:
    config = '{"cluster": {"ps": ["a:1"], "worker": ["b:1"], "evaluator": ["c:1"]}, "task": %s}'
    monkeypatch.setenv("TF_CONFIG", config % task)
    code, _, err = call()
    assert (code, len(err)) == (2, 1)
    assert message in err[0]


@pytest.mark.parametrize("chief", [[], ["--chief", "localhost:1680"]], ids=["chief", "worker"])
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("localhost:{port}", "connection refused"),
        ("no-such-host.invalid:1681", "name resolution failed for 'no-such-host.invalid'"),
    ],
    ids=["refused", "no name"],
)
def test_no_server_is_one_line(
    call: Call, caplog: pytest.LogCaptureFixture, address: str, why: str, chief: list[str]
) -> None:
    """Trial 2 b, c."""
    caplog.set_level("INFO")
    address = address.format(port=free_port())
    code, _, err = call("--ps", address, "--connect-timeout", "0.5", *chief)
    assert (code, len(err)) == (1, 1)
    assert err[0].startswith("worker: ")
    assert address in err[0] and why in err[0] and "gave up after 0.5 s" in err[0]
    assert f"waiting for ps at {address} ({why})" in caplog.messages


def test_a_second_worker_of_one_index_is_refused(processes: Processes) -> None:
    """Trial 4: it is not counted as the missing one either; after a kill it is let in."""
    _, address = processes.ps("--lease", "1")
    job = ["--workers", "2", "--consistency", "sync", "--last-step", "5"]
    chief = worker(processes, address, *job)
    chief.line("first round waits for workers")
    twin = worker(processes, address, "--workers", "2", "--chief", "localhost:1680")
    assert twin.wait() == 1, twin.output
    assert "worker:0 is in this job already" in twin.stderr[-1]
    assert chief.running
    chief.kill()
    again = worker(processes, address, *job)
    other = worker(processes, address, "--workers", "2", "--task-index", "1")
    assert trained(other)[0] == trained(again)[0] == 5


def test_a_killed_sync_worker_is_not_waited_for(processes: Processes) -> None:
    """Trial 46: the round goes on without it, and a replacement joins."""
    server, address = processes.ps("--lease", "1")
    flags = ["--workers", "3"]
    job = ["--consistency", "sync", "--last-step", "0"]
    workers = [
        worker(processes, address, *flags, *job),
        *(worker(processes, address, *flags, "--task-index", str(i)) for i in (1, 2)),
    ]
    wait_for(lambda: status(address).rounds > 5)
    workers[2].kill()
    server.line("event=drop worker=worker:2")
    rounds = status(address).rounds
    wait_for(lambda: status(address).rounds > rounds + 5)
    assert {w.worker for w in status(address).workers} == {"worker:0", "worker:1"}
    worker(processes, address, *flags, "--task-index", "2").line("^worker:2 training")
    wait_for(lambda: len(status(address).workers) == 3)
    now = status(address)
    wait_for(lambda: status(address).rounds > now.rounds + 5)
    final = status(address)
    assert final.version == final.rounds


def test_a_lost_server_is_one_line(processes: Processes) -> None:
    server, address = processes.ps()
    process = worker(processes, address, "--last-step", "0", "--connect-timeout", "0.5")
    process.line("event=step")
    server.kill()
    assert process.wait() == 1, process.output
    assert process.stderr[-1].startswith("worker: ")
    assert address in process.stderr[-1]
    assert not any("Traceback" in line for line in process.stderr)


@pytest.mark.parametrize("consistency", ["async", "sync"])
def test_a_restarted_server_is_restored_and_trained_on(
    processes: Processes, tmp_path: Path, consistency: str
) -> None:
    server, address = processes.ps("--lease", "1")
    job = ["--consistency", consistency, "--last-step", "0"]
    save = ["--checkpoint-dir", str(tmp_path / "ckpt"), "--save-steps", "20"]
    both = [
        worker(processes, address, "--workers", "2", *job, *save),
        worker(processes, address, "--workers", "2", "--task-index", "1"),
    ]
    wait_for(lambda: status(address).global_step > 50 and len(status(address).workers) == 2)
    server.kill()
    processes.ps("--lease", "1", port=int(address.rpartition(":")[2]))
    wait_for(lambda: status(address).global_step)
    now = status(address).global_step
    wait_for(lambda: len(status(address).workers) == 2)
    wait_for(lambda: status(address).global_step > now + 20)
    for process in both:
        process.line("event=start-over worker=worker:")
        process.send(signal.SIGTERM)
        assert process.wait(10) == 143, process.output
        assert not any("Traceback" in line for line in process.stderr), process.output


def test_training_that_diverges_is_one_line(processes: Processes) -> None:
    _, address = processes.ps()
    process = worker(processes, address, "--learning-rate", "100")
    assert process.wait() == 1, process.output
    assert "try a smaller --learning-rate" in process.stderr[-1], process.output


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "number"),
    [
        ("training", signal.SIGINT),
        ("training", signal.SIGTERM),
        ("barrier", signal.SIGINT),
        ("no ps", signal.SIGINT),
        ("no chief", signal.SIGTERM),
    ],
)
def test_a_signal_ends_it_in_order(
    processes: Processes, where: str, number: signal.Signals
) -> None:
    """Trial 9 c, and wherever else a worker may be."""
    if where == "no ps":
        process = worker(processes, f"localhost:{free_port()}")
        process.line("connection refused")
    else:
        server, address = processes.ps()
        if where == "training":
            process = worker(processes, address, "--last-step", "0")
            process.line("event=step")
        elif where == "barrier":
            process = worker(processes, address, "--consistency", "sync", "--workers", "2")
            wait_for(lambda: status(address).waiting)
        else:
            process = worker(processes, address, "--chief", "localhost:1680")
            process.line("not initialised yet")
    process.send(number)
    assert process.wait(10) == 128 + number, process.output
    assert not any("Traceback" in line for line in process.stderr)
    if where in ("training", "barrier"):
        server.line("event=leave worker=worker:0")


def test_a_signal_to_a_sync_worker_lets_the_others_go_on(processes: Processes) -> None:
    _, address = processes.ps()
    flags = ["--workers", "2"]
    chief = worker(processes, address, *flags, "--consistency", "sync", "--last-step", "0")
    other = worker(processes, address, *flags, "--task-index", "1")
    other.line("event=step")
    other.send(signal.SIGTERM)
    assert other.wait(10) == 143, other.output
    rounds = status(address).rounds
    wait_for(lambda: status(address).rounds > rounds + 5)
    assert chief.running


def test_a_frozen_server_does_not_hold_a_signal_up(processes: Processes) -> None:
    server, address = processes.ps()
    with ps.Client(address) as client:
        client.initialize(
            {"weight": np.zeros(1, np.float32), "bias": np.zeros((), np.float32)},
            ps.optimizers.SGD(0.1),
        )
    process = worker(processes, address, "--chief", "localhost:1680")
    process.line("event=step")
    server.send(signal.SIGSTOP)
    process.send(signal.SIGTERM)
    assert process.wait(10) == 143, process.output


def test_a_second_signal_ends_it_at_once(processes: Processes) -> None:
    server, address = processes.ps()
    process = worker(processes, address, "--last-step", "0")
    process.line("event=step")
    server.send(signal.SIGSTOP)
    process.send(signal.SIGTERM)
    process.line("event=stop")
    process.send(signal.SIGINT)
    assert process.wait(1) == 130, process.output


def test_the_command_can_be_called() -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
