"""`python -m paramserver` as a process, and `Server` as an object: starting, ending, ports."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from conftest import Background, wait_for
from processes import READY, ROOT, Process, Processes

import paramserver as ps
from paramserver.__main__ import main
from paramserver.control_client import ControlClient
from paramserver.errors import ConfigError, ParamServerError, UnavailableError
from paramserver.host import HostSettings

ZEROS = {"w": np.zeros(4, np.float32)}
ONES = {"w": np.ones(4, np.float32)}


def taken_port() -> socket.socket:
    """A socket that listens on a port of this machine."""
    return socket.create_server(("127.0.0.1", 0))


# -- starting --------------------------------------------------------------------------------------


def test_it_says_where_it_serves_and_nothing_else(processes: Processes) -> None:
    process, address = processes.ps()
    assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
    with ps.Client(address, worker="worker:0", connect_timeout=10) as client:
        client.initialize(ZEROS, ps.optimizers.SGD(0.5))
        assert client.push_pull(ONES)["w"].tolist() == [-0.5] * 4
    process.send(signal.SIGTERM)
    assert process.wait(10) == 0
    assert process.stdout == [f"ps serving on {address}"]
    log = "\n".join(process.stderr)
    for event in ("event=initialize", "event=join worker=worker:0", "event=leave", "event=stop"):
        assert event in log
    assert not re.search(r"Traceback|Error|error| E ", log), log


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::1", "[::1]", "::"])
def test_hosts_to_listen_on(processes: Processes, host: str) -> None:
    _, address = processes.ps("--host", host)
    bare = host.strip("[]")
    assert address.startswith(f"[{bare}]:" if ":" in bare else f"{bare}:")
    port = address.rpartition(":")[2]
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, address.rpartition(":")[0])
    with ps.Client(f"{reachable}:{port}", connect_timeout=10) as client:
        assert client.initialize(ZEROS)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--lease", "0"], "--lease must be at least 0.05, not 0"),
        (["--lease", "nan"], "--lease must be at least 0.05, not nan"),
        (["--lease", "inf"], "--lease must be at least 0.05, not inf"),
        (["--keepalive", "-1"], "--keepalive must be at least 0.05, not -1"),
        (["--max-workers", "0"], "--max-workers must be at least 1"),
        (["--max-bytes", "0"], "--max-bytes must be at least 1"),
        (["--max-in-flight", "-5"], "--max-in-flight must be at least 1"),
        (["--port", "70000"], "70000"),
        (["--port", "-1"], "-1"),
        (["--port", "x"], "--port"),
        (["--host", ""], "host"),
        (["--host", "192.0.2.1"], "192.0.2.1"),
        (["--host", "no-such-host.invalid"], "no-such-host.invalid"),
        (["--log-level", "loud"], "--log-level"),
        (["--por", "1"], "--por"),
        (["stray"], "stray"),
    ],
)
def test_flags_that_are_wrong(
    capsys: pytest.CaptureFixture[str], flags: list[str], complaint: str
) -> None:
    """One line that names the flag; exit code 2; nothing on stdout."""
    if "--port" not in flags:
        flags = ["--port", "0", *flags]
    try:
        code = main(flags)
    except SystemExit as error:  # argparse
        assert isinstance(error.code, int)
        code = error.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, ""), err
    assert complaint in err.splitlines()[-1]


def test_a_second_server_on_the_same_port(processes: Processes) -> None:
    """It names the port and ends, the first serves on; there is one listener."""
    first, address = processes.ps()
    port = address.rpartition(":")[2]
    with ps.Client(address, connect_timeout=10) as client:
        client.initialize(ZEROS)
        began = time.monotonic()
        second = processes.python("-m", "paramserver", "--port", port)
        assert second.wait(10) == 2
        assert time.monotonic() - began < 5
        assert f"cannot listen on 127.0.0.1:{port}" in second.stderr[-1]
        assert "--port" in second.stderr[-1] and not second.stdout
        assert client.pull(wait=False).version == 0
    assert first.running
    assert listeners(int(port)) == 1


def test_a_port_that_somebody_else_has(processes: Processes) -> None:
    with taken_port() as sock:
        port = sock.getsockname()[1]
        process = processes.python("-m", "paramserver", "--port", str(port))
        assert process.wait(10) == 2
        assert str(port) in process.stderr[-1]
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            ps.Server(port=port)
        assert listeners(port) == 1
    with ps.Server(port=port) as server:
        assert server.address == f"127.0.0.1:{port}"


def listeners(port: int) -> int:
    """How many sockets of this machine listen on a TCP port."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    rows = [row.split() for t in tables if t.exists() for row in t.read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port for row in rows)


def test_twenty_servers_at_once(processes: Processes) -> None:
    """Each has a port of its own, and keeps what it is given."""
    started = [processes.python("-m", "paramserver", "--port", "0") for _ in range(4)]
    with ThreadPoolExecutor(16) as pool:
        servers = list(pool.map(lambda _: ps.Server(port=0), range(16)))
        try:
            addresses = [server.address for server in servers]
            addresses += [process.line(READY)[1] for process in started]
            assert len(set(addresses)) == 20

            def write(number: int) -> float:
                with ps.Client(addresses[number], connect_timeout=20) as client:
                    client.initialize({"w": np.full(3, float(number))})
                    return float(client.pull(wait=False)["w"][2])

            assert list(pool.map(write, range(20))) == [float(n) for n in range(20)]
        finally:
            list(pool.map(ps.Server.stop, servers))


def test_without_ipv6(processes: Processes) -> None:
    """In a network of its own where IPv6 is off: it serves on IPv4, and says nothing of it."""
    inside = "ip link set lo up && sysctl -qw net.ipv6.conf.all.disable_ipv6=1"
    namespace = ["unshare", "--user", "--map-root-user", "--net", "sh", "-c"]
    probe = subprocess.run([*namespace, inside], capture_output=True, check=False, timeout=20)
    if probe.returncode:
        pytest.skip(f"no network namespace to be had here: {probe.stderr.decode().strip()}")
    script = """
import sys, numpy as np, paramserver as ps
from paramserver.__main__ import main
for host in ("127.0.0.1", "0.0.0.0", "localhost"):
    with ps.Server(port=0, host=host) as server:
        address = server.address.replace("0.0.0.0", "localhost")
        with ps.Client(address, worker="worker:0", connect_timeout=5) as client:
            client.initialize({"w": np.zeros(2)})
            print(host, client.push_pull({"w": np.ones(2)}).version, flush=True)
sys.exit(main(["--port", "0"]))
"""
    command = f'{inside} && exec "$0" -c "$1"'
    process = processes.start(*namespace, command, sys.executable, script)
    process.line(READY)
    # The namespace ends with its last process; the signal goes to it through the shell's exec.
    process.send(signal.SIGTERM)
    assert process.wait(10) == 0
    *lines, ready = process.stdout
    assert lines == ["127.0.0.1 1", "0.0.0.0 1", "localhost 1"]
    assert READY.fullmatch(ready)
    assert not [x for x in process.stderr if " I " not in x], process.output


# -- ending ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_worker_waits(
    processes: Processes, background: Background, number: signal.Signals
) -> None:
    """The server exits 0 soon; the worker is told which server it lost."""
    process, address = processes.ps("--lease", "2")
    with ps.Client(address, worker="worker:0", connect_timeout=0.5) as client:
        client.initialize(ZEROS, consistency=ps.Sync(workers=2))
        waiting = background(client.pull)
        process.line("event=join worker=worker:0")
        began = time.monotonic()
        process.send(number)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 4
        with pytest.raises(UnavailableError, match=rf"ps:0 at {re.escape(address)}"):
            waiting.result(10)
    assert f"event=stop reason='{number.name}'" in "\n".join(process.stderr)


@pytest.mark.parametrize(("signals", "code", "seconds"), [(1, 0, 8.0), (2, 130, 3.0)])
def test_a_second_signal_ends_it_at_once(
    processes: Processes, signals: int, code: int, seconds: float
) -> None:
    """A call that never ends holds it up for a few seconds; a second signal does not wait."""
    process, address = processes.ps()
    release = threading.Event()

    def silence() -> Iterator[bytes]:
        release.wait(30)
        yield b""

    with closing(grpc.insecure_channel(address)) as channel:
        push: Any = channel.stream_unary("/paramserver.v1.ParameterService/Push")
        status: Any = channel.unary_unary("/paramserver.v1.ControlService/Status")
        call = push.future(silence())
        status(b"", timeout=10)
        began = time.monotonic()
        process.send(signal.SIGTERM)
        process.line("event=stop")
        if signals == 2:
            process.send(signal.SIGINT)
        assert process.wait(10) == code
        assert time.monotonic() - began < seconds
        release.set()
        call.cancel()
    assert "Traceback" not in process.output


def test_it_stays_until_a_signal(processes: Processes) -> None:
    """Without --exit-when-done a finished job is no reason to leave."""
    process, address = processes.ps("--lease", "0.5")
    finish(address)
    with pytest.raises(subprocess.TimeoutExpired):
        process._popen.wait(1.5)
    with ps.Client(address, connect_timeout=10) as client:
        assert client.pull(wait=False)["w"].tolist() == [-2.5] * 4
    process.send(signal.SIGTERM)
    assert process.wait(10) == 0


@pytest.mark.parametrize("shards", [1, 2])
def test_it_exits_when_the_job_is_done(processes: Processes, shards: int) -> None:
    """Once the chief has said so and every member has been told, or its lease is over."""
    started = [processes.ps("--lease", "1", "--exit-when-done") for _ in range(shards)]
    addresses = [address for _, address in started]
    with ps.Client(addresses, worker="worker:1", connect_timeout=5) as lingering:
        lingering.initialize(ZEROS, ps.optimizers.SGD(0.5), last_step=5)
        lingering.push(ONES)
        finish(addresses)
        assert all(process.running for process, _ in started), "worker:1 has not been told"
        assert lingering.pull().complete
        for process, _ in started:
            assert process.wait(10) == 0
            assert "event=stop reason='the job is done'" in "\n".join(process.stderr)


def finish(addresses: str | list[str]) -> None:
    """A whole job of five steps, and its end as the chief says it."""
    with (
        ps.Client(addresses, worker="worker:0", connect_timeout=10) as client,
        ControlClient(addresses, "chief:0", connect_timeout=10) as control,
    ):
        client.initialize(ZEROS, ps.optimizers.SGD(0.5), last_step=5)
        params = client.pull()
        while not params.complete:
            params = client.push_pull(ONES)
        assert params["w"].tolist() == [-2.5] * 4
        control.survey()
        control.shutdown(now=False, reason="limit reached")


def test_a_dead_worker_does_not_keep_it_from_ending(processes: Processes) -> None:
    process, address = processes.ps("--lease", "0.6", "--exit-when-done")
    script = f"""
import numpy as np, paramserver as ps, threading
client = ps.Client({address!r}, worker="worker:1")
client.initialize({{"w": np.zeros(4, np.float32)}}, ps.optimizers.SGD(0.5), last_step=5)
client.pull()
print("joined", flush=True)
threading.Event().wait(60)
"""
    worker = processes.python("-c", script)
    worker.line("joined")
    worker.kill()
    finish(address)
    assert process.wait(10) == 0
    assert "event=drop worker=worker:1" in process.output


def test_a_client_can_end_it_at_once(processes: Processes, background: Background) -> None:
    process, address = processes.ps()
    with ps.Client(address, worker="worker:0", connect_timeout=0.3) as client:
        client.initialize(ZEROS, consistency=ps.Sync(workers=2))
        waiting = background(client.pull)
        process.line("event=join")
        with ControlClient(address, "chief:0", connect_timeout=5) as control:
            control.survey()
            control.shutdown(now=True, reason="enough")
        assert process.wait(10) == 0
        with pytest.raises(ParamServerError):
            waiting.result(10)


def test_stopping_with_calls_in_flight(background: Background) -> None:
    """Waiting calls are answered at once; stop may be called again, and by several."""
    with (
        ps.Server(port=0, settings=HostSettings(lease_s=2.0)) as server,
        ps.Client(server.address, worker="worker:0", connect_timeout=0.2) as client,
    ):
        client.initialize(ZEROS, consistency=ps.Sync(workers=2))
        waiting = background(client.pull)
        wait_for(lambda: server.host.waiting(), "the pull to wait")
        began = time.monotonic()
        for stop in [background(server.stop, "enough of it") for _ in range(3)]:
            stop.result(10)
        assert server.join(0)
        assert time.monotonic() - began < 2
        with pytest.raises(UnavailableError):
            waiting.result(10)
    before = threading.active_count()
    with ps.Server(port=0):
        pass
    wait_for(lambda: threading.active_count() <= before, "its threads to end")


def test_a_wrong_start_leaves_nothing(processes: Processes) -> None:
    """A process whose start fails after others have begun holds no port."""
    with taken_port() as sock:
        port = sock.getsockname()[1]
        before = set(os.listdir("/proc/self/task"))
        for _ in range(3):
            with pytest.raises(ConfigError):
                ps.Server(port=port)
        wait_for(lambda: len(os.listdir("/proc/self/task")) <= len(before) + 2, "threads to end")


def test_a_process_imports_no_worker(processes: Processes) -> None:
    """The server needs nothing beyond the core dependencies."""
    script = "import sys, paramserver.__main__; print(*sorted(sys.modules))"
    process: Process = processes.python("-c", script, cwd=ROOT)
    assert process.wait() == 0
    loaded = set(process.stdout[0].split())
    assert not loaded & {"worker", "chief", "sklearn", "scipy", "torch", "safetensors"}


def test_nothing_grows(processes: Processes, background: Background) -> None:
    """Pushes, comings and goings, and failing calls leave nothing behind in the server."""
    process, address = processes.ps("--log-level", "error")
    grads = {"w": np.ones(25_000, np.float32)}
    with ps.Client(address, connect_timeout=10) as client:
        client.initialize({"w": np.zeros(25_000, np.float32)})

    def train(index: int) -> None:
        with ps.Client(address, worker=f"worker:{index}", connect_timeout=10) as client:
            for _ in range(40):
                client.push(grads)
                client.push_pull(grads)

    def come_and_go(index: int) -> None:
        with ps.Client(address, worker=f"worker:{index}", connect_timeout=10) as client:
            client.push_pull(grads)

    def fail(_: int) -> None:
        with closing(grpc.insecure_channel(address)) as channel:
            call: Any = channel.stream_unary("/paramserver.v1.ParameterService/Push")
            for _ in range(20):
                with pytest.raises(grpc.RpcError):
                    call(iter([b"\x0a\x00\x7a\x05hello"]), timeout=5)

    def do(work: Callable[[int], None], indexes: range) -> tuple[int, int, int]:
        for start in range(indexes.start, indexes.stop, 4):
            for future in [background(work, i) for i in range(start, start + 4)]:
                future.result(30)
        files = Path(f"/proc/{process.pid}/fd")
        tasks = Path(f"/proc/{process.pid}/task")
        wait_for(lambda: len(list(files.iterdir())) < 40, "connections to be closed")
        return process.rss(), len(list(tasks.iterdir())), len(list(files.iterdir()))

    before = do(train, range(4))
    do(come_and_go, range(100, 108))
    do(fail, range(4))
    for work, indexes in (
        (train, range(12)),
        (come_and_go, range(1000, 1080)),
        (fail, range(20)),
    ):
        after = do(work, indexes)
        assert after[0] < before[0] * 1.1 + (4 << 20), (work, before, after)
        # The pool of threads may fill up to its size; nothing else may.
        assert after[1] < before[1] + 2 * 64 + 16
        assert after[2] <= before[2] + 4
    with ps.Client(address, connect_timeout=10) as client:
        assert client.pull(wait=False).version == (4 + 12) * 80 + 8 + 80


def test_a_name_of_which_one_address_is_taken_is_refused() -> None:
    with ps.Server(port=0, host="127.0.0.1") as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on localhost:{port}"):
            ps.Server(port=port, host="localhost")
