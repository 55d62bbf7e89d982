"""What a run shows and leaves: the table as it grows, the goals, and all numbers as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, number

#: Loaded more than this, in processes, a machine is not ours alone.
BUSY = 0.5

VERSIONS = ("grpcio", "protobuf", "numpy", "tensorflow", "tensorflow-cpu", "torch")


def heading() -> str:
    """The columns of `row`."""
    return f"{'':44}{'median':>9} [{'min':>8} - {'max':>8}]{'':8}{'n':>6}{'GB/s':>7}  beside"


def row(figure: Figure) -> str:
    """One figure in one line."""
    low, high = number(min(figure.values)), number(max(figure.values))
    rate = figure.gb_per_s
    beside = []
    if figure.ratio is not None:
        yardstick = f"{number(figure.yardstick_value)} {figure.yardstick_unit}"
        beside.append(f"{number(figure.ratio)} x {figure.yardstick} ({yardstick})")
    if figure.note:
        beside.append(figure.note)
    return (
        f"{figure.name:44}{number(figure.median):>9} [{low:>8} - {high:>8}] {figure.unit:7}"
        f"{len(figure.values):>6}{number(rate) if rate else '':>7}  {'; '.join(beside)}"
    ).rstrip()


def goals(rows: Sequence[dict[str, Any]], quick: bool) -> list[str]:
    """The goals in lines. A quick run's figures say nothing, and are not judged."""

    def verdict(each: dict[str, Any], key: str) -> str:
        if key not in each:
            return ""
        met = "" if quick else " yes" if each[f"{key} met"] else " NO"
        return f"{each[f'{key} text']}{met}"

    lines = [f"{'must reach':48}{'reached':>9}  {'floor':16}aim"]
    for each in rows:
        reached = number(each["reached"])
        floor, aim = verdict(each, "floor"), verdict(each, "aim")
        lines.append(f"{each['goal']:48}{reached:>9}  {floor:16}{aim}".rstrip())
    if quick:
        lines.append("(--quick: too little work to judge)")
    return lines


def machine() -> dict[str, Any]:
    """What it was measured on."""
    versions = {}
    for name in VERSIONS:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
        "load": _load(),
    }


def preface(facts: dict[str, Any]) -> list[str]:
    """The machine in a line, and a warning if others are using it."""
    versions = " ".join(f"{name} {version}" for name, version in facts["versions"].items())
    lines = [
        f"{facts['cores']} x {facts['processor']}, {facts['system']}, "
        f"Python {facts['python']}, {versions}"
    ]
    if facts["load"] > BUSY:
        lines.append(
            f"the load is {facts['load']:.2f}: others are using this machine, and it will show"
        )
    return lines


def write_json(
    path: Path,
    facts: dict[str, Any],
    quick: bool,
    figures: Sequence[Figure],
    reach: Sequence[dict[str, Any]],
    failures: Sequence[str],
) -> None:
    """All figures with all their numbers."""
    run = {
        "command": " ".join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "quick": quick,
        "machine": facts,
        "figures": [figure.to_json() for figure in figures],
        "goals": list(reach),
        "failures": list(failures),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
