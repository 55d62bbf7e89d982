"""The demo, as it stands: a whole job in processes of its own, and a report that holds."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from processes import ROOT

PATIENCE_S = 55


@contextmanager
def demo(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """The demo in a process group of its own, of which nothing may be left in the end."""
    command = [sys.executable, "docs/examples/demo.py", "--folder", str(folder), "--lease", "2"]
    process = subprocess.Popen(
        [*command, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_the_demo_learns_as_much_as_least_squares(tmp_path: Path) -> None:
    with demo(tmp_path) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, err) == (0, ""), out + err
    assert re.search(r"^\[#+ *\] step \d+ of 200, loss \S+, \d workers$", out, re.MULTILINE), out
    assert re.search(r"^global_step +200$", out, re.MULTILINE)
    assert re.search(r"^first step after +\d+\.\d\d s", out, re.MULTILINE)
    assert re.search(r"^steps a second +\d+$", out, re.MULTILINE)
    first, last = map(float, re.findall(r"([\d.]+) at the", out))
    assert first == 1 and last < 0.55
    ours, exact = map(float, re.findall(r"(?:R2|have) +(\d\.\d+)", out))
    assert abs(ours - exact) <= 0.01
    assert "weight (10,) on ps:0, bias () on ps:1" in out
    checkpoint = re.search(r"^checkpoint +(.+)$", out, re.MULTILINE)
    assert checkpoint and Path(checkpoint[1], "manifest.json").is_file()
    assert (tmp_path / "worker-1.log").is_file()


def test_a_demo_that_learned_too_little_fails(tmp_path: Path) -> None:
    with demo(tmp_path, "--last-step", "10") as process:
        out, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, out + err
    assert "more than 0.01 apart" in out


def test_an_interrupted_demo_leaves_nothing_behind(tmp_path: Path) -> None:
    with demo(tmp_path, "--last-step", "1000000") as process:
        assert process.stdout
        for line in process.stdout:
            if "step 0" in line:
                break
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
