"""The processes of a benchmark: started, told what to do, and ended by their pids. No gRPC here."""

from __future__ import annotations

import json
import queue
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[1]

#: Nothing here takes longer, in seconds.
PATIENCE_S = 300.0


class BenchmarkError(Exception):
    """A process did not do what was asked; says which, and what it wrote last."""


class Process:
    """A Python process. Its output is read as it comes, so it never blocks on a full pipe."""

    def __init__(self, argv: Iterable[str]) -> None:
        self.argv = list(argv)
        # Also a file is never full, and it has the traceback when something goes wrong.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self.started = time.monotonic()
        self._popen = subprocess.Popen(
            [sys.executable, *self.argv],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )
        self._lines: queue.SimpleQueue[tuple[float, str] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout
        with suppress(ValueError):  # closed meanwhile
            for line in self._popen.stdout:
                self._lines.put((time.monotonic(), line.rstrip("\n")))
        self._lines.put(None)

    def next_line(self, timeout_s: float = PATIENCE_S) -> tuple[float, str]:
        """Its next line of output, and when (`time.monotonic`) it came.

        Raises: BenchmarkError when there is none."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise BenchmarkError(f"{self}: no answer within {timeout_s:g} s") from None
        if line is None:
            raise BenchmarkError(f"{self} ended early: {self._last_words()}")
        return line

    def until(self, pattern: str, timeout_s: float = PATIENCE_S) -> tuple[float, re.Match[str]]:
        """Waits for a line that contains `pattern`. Raises: BenchmarkError."""
        deadline = time.monotonic() + timeout_s
        while True:
            at, line = self.next_line(max(0.0, deadline - time.monotonic()))
            if match := re.search(pattern, line):
                return at, match

    def write(self, line: str) -> None:
        """Hands it a line. Raises: BenchmarkError if it reads no more."""
        assert self._popen.stdin
        try:
            self._popen.stdin.write(line + "\n")
            self._popen.stdin.flush()
        except OSError as error:
            raise BenchmarkError(f"{self} ended early: {self._last_words()}") from error

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until it has ended well. Raises: BenchmarkError."""
        try:
            code = self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{self} still runs after {timeout_s:g} s") from None
        if code:
            raise BenchmarkError(f"{self} ended with {code}: {self._last_words()}")

    def peak_bytes(self) -> int:
        """The most memory it has had (VmHWM). Raises: BenchmarkError where there is no /proc."""
        try:
            status = Path(f"/proc/{self._popen.pid}/status").read_text()
        except OSError as error:
            raise BenchmarkError(
                f"memory is read from /proc, which is not here: {error}"
            ) from error
        return int(status.split("VmHWM:")[1].split()[0]) << 10

    def end(self) -> None:
        """Ends it, and takes its remains away. Idempotent. Blocks for seconds at most."""
        assert self._popen.stdin and self._popen.stdout
        with suppress(OSError):
            self._popen.stdin.close()
        self._popen.terminate()
        try:
            self._popen.wait(10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._reader.join()
        self._popen.stdout.close()
        self._stderr.close()

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(5)
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._popen.returncode}, and no word"

    def __str__(self) -> str:
        return f"python {' '.join(self.argv)}"


class Task(Process):
    """A process at the far end of a pipe (see `child`)."""

    def ready(self) -> Self:
        """Waits until it is ready. Raises: BenchmarkError with what it says."""
        self._answer("ready")
        return self

    def begin(self, call: str, **arguments: Any) -> Self:
        """Asks for a call, and does not wait for its result."""
        self.write(json.dumps({"call": call, **arguments}))
        return self

    def result(self) -> Any:
        """What the call begun before has come to. Raises: BenchmarkError with what it says."""
        return self._answer("result")

    def call(self, call: str, **arguments: Any) -> Any:
        """Asks, and waits for the result."""
        return self.begin(call, **arguments).result()

    def _answer(self, key: str) -> Any:
        answer = json.loads(self.next_line()[1])
        if "error" in answer:
            raise BenchmarkError(f"{self}: {answer['error']}")
        return answer[key]


class Processes:
    """What one measurement has started; ends it all. A context manager."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def python(self, *argv: str) -> Process:
        """Starts a command of ours: `python("-m", "worker", ...)`."""
        process = Process(argv)
        self._started.append(process)
        return process

    def ps(self, *flags: str, port: int = 0) -> tuple[Process, str]:
        """Starts a parameter server and waits until it is ready: the process, and its address."""
        process = self.python("-m", "paramserver", "--port", str(port), *flags)
        return process, process.until(r"ps serving on (\S+)")[1][1]

    def task(self, module: str, kind: str, **arguments: Any) -> Task:
        """Starts a process of this package, to be told what to do. Wait for it with `ready`."""
        task = Task(["-m", f"benchmarks.{module}", kind, json.dumps(arguments)])
        self._started.append(task)
        return task

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in reversed(self._started):
            process.end()


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
