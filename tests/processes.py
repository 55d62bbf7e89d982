"""Real processes for tests: started, read line by line, and ended by pid, all with deadlines.

A `Processes` ends what it started when it is closed, so nothing is left behind.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

ROOT = Path(__file__).resolve().parents[1]

#: How long a start, a line or an end may take, in seconds, unless a test says otherwise.
PATIENCE_S = 30.0

READY = re.compile(r"ps serving on (\S+)")


#: Ends what is on its list when its own input ends, that is when this process has ended in any way.
_REAPER = """
import os, sys
running = set()
for line in sys.stdin:
    (running.add if line[0] == "+" else running.discard)(int(line[1:]))
for pid in running:
    os.kill(pid, 9)
"""


class Reaper:
    """A process that outlives this one by a moment, to end the children it left behind."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._popen: subprocess.Popen[str] | None = None

    def tell(self, sign: str, pid: int) -> None:
        """Notes the start ("+") or the end ("-") of a child."""
        with self._lock:
            if self._popen is None:
                self._popen = subprocess.Popen(
                    [sys.executable, "-SEc", _REAPER],
                    stdin=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
                # Nobody waits for it: it ends after us.
                self._popen.returncode = 0
            assert self._popen.stdin
            self._popen.stdin.write(f"{sign}{pid}\n")
            self._popen.stdin.flush()


REAPER = Reaper()


class Process:
    """A child process. Its output is read as it comes, so it never blocks on a full pipe."""

    def __init__(
        self,
        argv: list[str],
        env: Mapping[str, str] | None = None,
        cwd: str | Path = ROOT,
    ) -> None:
        self.argv = argv
        #: What it has written so far, line by line. Appended to by two threads.
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._more = threading.Condition()
        self._popen = subprocess.Popen(
            argv,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        REAPER.tell("+", self.pid)
        assert self._popen.stdout and self._popen.stderr
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, lines), daemon=True)
            for pipe, lines in (
                (self._popen.stdout, self.stdout),
                (self._popen.stderr, self.stderr),
            )
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, pipe: IO[str], lines: list[str]) -> None:
        with pipe:
            for line in pipe:
                with self._more:
                    lines.append(line.rstrip("\n"))
                    self._more.notify_all()
        with self._more:
            self._more.notify_all()

    @property
    def pid(self) -> int:
        """Of the child."""
        return self._popen.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._popen.poll() is None

    @property
    def output(self) -> str:
        """Everything it has written, for messages."""
        return "\n".join([f"$ {' '.join(self.argv)}", *self.stdout, *self.stderr])

    def until(self, condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
        """Waits until `condition` holds; looks again whenever the process has written a line.

        Raises: AssertionError with its output, when the time is over or its output has ended."""
        deadline = time.monotonic() + seconds
        with self._more:
            while not condition():
                ended = not any(reader.is_alive() for reader in self._readers)
                left = deadline - time.monotonic()
                assert left > 0 and not ended, f"waited in vain for:\n{self.output}"
                self._more.wait(min(left, 0.5))

    def line(self, pattern: str | re.Pattern[str], seconds: float = PATIENCE_S) -> re.Match[str]:
        """Waits for a line (of either stream) that contains `pattern`."""
        found: list[re.Match[str]] = []

        def look() -> bool:
            for line in (*self.stdout, *self.stderr):
                if match := re.search(pattern, line):
                    found.append(match)
                    return True
            return False

        self.until(look, seconds)
        return found[0]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, if it still runs."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """Ends it at once, as `kill -9` does, and takes its remains away."""
        self._popen.kill()
        self._popen.wait(PATIENCE_S)

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Its exit code, and all of its output read. Raises: AssertionError if it does not end."""
        try:
            code = self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds:g} s:\n{self.output}") from None
        REAPER.tell("-", self.pid)
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return code

    def rss(self, field: str = "VmRSS") -> int:
        """Bytes of memory it has now ("VmHWM": had at most). Linux."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        match = re.search(rf"{field}:\s+(\d+) kB", status)
        assert match, status
        return int(match[1]) << 10


class Processes:
    """All children of a test. A context manager."""

    def __init__(self) -> None:
        self._started: list[Process] = []

    def start(
        self, *argv: str, env: Mapping[str, str] | None = None, cwd: str | Path = ROOT
    ) -> Process:
        """Starts a command."""
        process = Process(list(argv), env, cwd)
        self._started.append(process)
        return process

    def python(
        self, *argv: str, env: Mapping[str, str] | None = None, cwd: str | Path = ROOT
    ) -> Process:
        """Starts this very Python: `python("-m", "paramserver", ...)`."""
        return self.start(sys.executable, *argv, env=env, cwd=cwd)

    def ps(self, *flags: str, port: int = 0) -> tuple[Process, str]:
        """Starts a parameter server and waits until it is ready: the process, and its address."""
        process = self.python("-m", "paramserver", "--port", str(port), *flags)
        return process, process.line(READY)[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._started:
            if process.running:
                process.kill()
        for process in self._started:
            process.wait()
