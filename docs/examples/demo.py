"""Two parameter servers, a chief and two workers, each a process of its own, on real data.

    python docs/examples/demo.py

They learn a linear regression on the diabetes data (scikit-learn's) in rounds: each step averages
both workers' gradients. The report compares what they learned with the exact least-squares answer;
the exit code is 0 only if it is as good.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from chief.checkpoint import list_checkpoints, load
from paramserver.control_client import ControlClient
from paramserver.errors import ParamServerError
from paramserver.survey import Status
from worker.data import Dataset, least_squares, load_data
from worker.models import Linear, evaluate

#: A test R2 that differs by more from the exact answer's is a failure.
TOLERANCE = 0.01

#: How long anything may take, in seconds.
PATIENCE_S = 50.0


class Failed(Exception):
    """Something did not go as it should."""


@dataclass
class Child:
    """One process; all that it writes goes into a file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Children:
    """The processes of the demo. None of them outlives the `with` block."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._pause = threading.Event()
        self.all: list[Child] = []

    def start(self, name: str, module: str, *flags: str) -> Child:
        """Starts `python -m module flags`."""
        log = self._logs / f"{name.replace(':', '-')}.log"
        command = [sys.executable, "-u", "-m", module, *flags]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        self.all.append(Child(name, process, log))
        return self.all[-1]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits. Raises: Failed when the time is over, or one of them has failed."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            for child in self.all:
                if child.process.poll():
                    raise Failed(
                        f"{child.name} ended with exit code {child.process.returncode}:\n"
                        f"{child.text()}"
                    )
            if time.monotonic() > deadline:
                raise Failed(f"waited {PATIENCE_S:g} s in vain for {what}")
            self._pause.wait(0.02)

    def ready(self, child: Child, pattern: str) -> str:
        """Waits for a child's ready line; what the pattern's group found there."""
        self.until(lambda: re.search(pattern, child.text()) is not None, f"{child.name} to start")
        found = re.search(pattern, child.text())
        assert found
        return found[1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        running = [child.process for child in self.all if child.process.poll() is None]
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Watch:
    """Looks at the shards while they train: a line that changes on a terminal, else some lines."""

    def __init__(self, control: ControlClient, last_step: int, out: IO[str]) -> None:
        self._control = control
        self._last_step = last_step
        self._out = out
        self._said = (-1, 0.0)
        #: When which global_step was seen first.
        self.seen: list[tuple[float, int]] = []
        #: The last status of each shard, by index.
        self.shards: dict[int, Status] = {}

    def look(self, worker: Child) -> None:
        """Looks once. `worker` is whose loss is shown."""
        for status in self._control.look(timeout_s=5.0):
            if isinstance(status, Status) and status.initialized:
                self.shards[status.shard_index] = status
        if 0 not in self.shards:
            return
        head, now = self.shards[0], time.monotonic()
        if not self.seen or self.seen[-1][1] != head.global_step:
            self.seen.append((now, head.global_step))
        self._say(head, re.findall(r"loss=(\S+)", worker.text()), now)

    def _say(self, head: Status, losses: Sequence[str], now: float) -> None:
        before, at = self._said
        done = head.global_step >= self._last_step
        live = self._out.isatty()
        if head.global_step == before or (now - at < 0.5 and not live and not done):
            return
        self._said = head.global_step, now
        bar = "#" * (30 * head.global_step // self._last_step)
        line = f"[{bar:30}] step {head.global_step} of {self._last_step}"
        line += f", loss {losses[-1]}" if losses else ""
        line += f", {len(head.workers)} workers"
        text, end = (f"\r{line:78}", "") if live else (line, "\n")
        print(text, end=end, file=self._out, flush=True)


def _leave(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo. The exit code."""
    parser = argparse.ArgumentParser(description="A whole job on this machine.", allow_abbrev=False)
    parser.add_argument("--last-step", type=int, default=200, help="steps (default %(default)d)")
    parser.add_argument(
        "--lease", type=float, default=10.0, help="seconds, see the ps (default %(default)g)"
    )
    parser.add_argument("--folder", type=Path, help="for checkpoints and logs (default: a new one)")
    args = parser.parse_args(argv)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="paramserver-demo-"))
    if (folder / "ckpt").exists():
        parser.error(f"--folder {folder}: there is a job in it already; choose another")
    folder.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)  # through the `with` block, which ends the processes
    try:
        dataset = load_data("diabetes")
        with Children(folder) as children:
            watch, seconds = run(children, folder / "ckpt", args.last_step, args.lease)
        return report(dataset, folder / "ckpt", watch, seconds, children)
    except (Failed, ParamServerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def run(
    children: Children, checkpoints: Path, last_step: int, lease_s: float
) -> tuple[Watch, float]:
    """Starts everything and watches until all of it has ended: (what was seen, when it began)."""
    print("starting 2 parameter servers, a chief and 2 workers", flush=True)
    began = time.monotonic()
    flags = ("--port", "0", "--exit-when-done", "--lease", str(lease_s))
    servers = [children.start(f"ps:{i}", "paramserver", *flags) for i in range(2)]
    addresses = ",".join(children.ready(each, r"ps serving on (\S+)") for each in servers)
    cluster = ("--ps", addresses, "--workers", "2")
    # The chief's flags are the job's; the workers are told.
    children.start(
        "chief",
        "chief",
        *cluster,
        *("--checkpoint-dir", str(checkpoints), "--last-step", str(last_step)),
        *("--model", "linear", "--data", "diabetes", "--batch-size", "32"),
        *("--consistency", "sync", "--optimizer", "adam", "--learning-rate", "0.01"),
    )
    workers = [
        # The chief's address is TensorFlow's notation for "there is one": nobody calls it.
        children.start(
            f"worker:{i}",
            "worker",
            *cluster,
            *("--task-index", str(i), "--chief", "localhost:1680", "--log-steps", "10"),
        )
        for i in range(2)
    ]
    with ControlClient(addresses, "demo") as control:
        watch = Watch(control, last_step, sys.stdout)

        def over() -> bool:
            watch.look(workers[0])
            return all(child.process.poll() is not None for child in children.all)

        children.until(over, "the end")
    if sys.stdout.isatty():
        print()
    return watch, began


def report(
    dataset: Dataset, checkpoints: Path, watch: Watch, began: float, children: Children
) -> int:
    """Says what came of it. 0 if it is as good as the exact answer."""
    newest, *_, oldest = list_checkpoints(checkpoints)
    last, first = load(newest.path), load(oldest.path)
    model = Linear(dataset.spec)
    loss = {}
    for checkpoint in (first, last):
        params = {name: saved.value for name, saved in checkpoint.variables.items()}
        loss[checkpoint.global_step] = evaluate(model, params, dataset.train)["loss"]
    r2 = evaluate(model, params, dataset.test)["r2"]
    exact = least_squares(dataset)
    good = abs(r2 - exact.r2) <= TOLERANCE

    training = [(at, step) for at, step in watch.seen if step]
    (start, step), (end, final) = training[0], training[-1]
    rate = f"{(final - step) / (end - start):.0f}" if end > start else "too fast to tell"
    placed = [
        f"{v.name} {tuple(v.shape)} on ps:{index}"
        for index, status in sorted(watch.shards.items())
        for v in status.layout.variables
    ]
    lines = {
        "global_step": str(last.global_step),
        "first step after": f"{start - began:.2f} s, processes and all",
        "steps a second": rate,
        "training loss": f"{loss[0]:.4f} at the start, {loss[last.global_step]:.4f} at the end",
        "test R2": f"{r2:.4f}; the exact least squares have {exact.r2:.4f}: "
        + ("as good" if good else f"more than {TOLERANCE} apart"),
        "placement": ", ".join(placed),
        "checkpoint": str(newest.path),
        "processes": f"{len(children.all)}, all ended with exit code 0",
    }
    for name, value in lines.items():
        print(f"{name:18}{value}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
