"""The example programs, each as the processes that it is made of."""

from __future__ import annotations

import re
import signal
import socket
from contextlib import ExitStack

from processes import Process, Processes

EXAMPLES = "docs/examples"


def free_ports(count: int) -> list[str]:
    """Addresses that nobody listens on now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"localhost:{each.getsockname()[1]}" for each in sockets]


def test_linear_regression_with_a_script_for_each_role(processes: Processes) -> None:
    hosts = free_ports(3)
    flags = ["--ps_hosts", hosts[0], "--worker_hosts", ",".join(hosts[1:])]

    late, chief, server = [
        processes.python(f"{EXAMPLES}/linreg/{script}.py", *flags)
        for script in ("worker1", "worker0", "ps")
    ]
    found = []
    for worker in (late, chief):
        assert worker.wait() == 0, worker.output
        match = re.fullmatch(r"step 200: W=(\S+) b=(\S+) loss=\S+", worker.stdout[-1])
        assert match, worker.output
        found.append((float(match[1]), float(match[2])))
        assert any(re.match("event=step global_step=200 step=200", s) for s in worker.stderr)
    assert found[0] == found[1]
    weight, bias = found[0]
    assert abs(weight - 2) < 0.05 and abs(bias) < 0.05
    assert server.wait() == 0, server.output


def test_200_steps_of_a_product(processes: Processes) -> None:
    hosts = free_ports(4)
    flags = ["--ps_hosts", ",".join(hosts[:2]), "--worker_hosts", ",".join(hosts[2:])]

    def start(job_name: str, task_index: int) -> Process:
        return processes.python(
            f"{EXAMPLES}/matmul.py", "--job_name", job_name, "--task_index", str(task_index), *flags
        )

    servers = [start("ps", index) for index in range(2)]
    for server in servers:
        server.line("^ps serving on ")
    workers = [start("worker", index) for index in range(2)]
    own = 0
    for index, worker in enumerate(workers):
        assert worker.wait() == 0, worker.output
        assert "x: (Variable): /job:ps/task:1" in worker.stdout
        assert "w: (Variable): /job:ps/task:0" in worker.stdout
        assert f"MatMul: (NumPy): /job:worker/task:{index}" in worker.stdout
        match = re.fullmatch(r"step (\d+): x @ w = 32 after (\d+) steps here", worker.stdout[-1])
        assert match, worker.output
        assert 200 <= int(match[1]) <= 201
        own += int(match[2])
    assert 200 <= own <= 201
    for server in servers:
        server.send(signal.SIGINT)
        assert server.wait() == 0, server.output
