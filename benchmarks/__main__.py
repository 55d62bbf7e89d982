"""`python -m benchmarks`: measures, prints a table, and writes JSON and a plot.

Exit codes: 0 done, whatever was reached; 1 a section failed (the others were measured); 2 a wrong
flag.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks import plot, reach, report, resources, training, transfers
from benchmarks.benchmark import Benchmark
from benchmarks.figures import Figure, Round, transfer
from benchmarks.peers import peers
from benchmarks.processes import BenchmarkError, Processes
from benchmarks.scale import FULL, QUICK, label
from benchmarks.yardsticks import TURN_BYTES, Yardsticks

RESULTS = Path(__file__).parent / "results"


def say(line: str = "") -> None:
    """Prints a line at once."""
    print(line, flush=True)


SECTIONS: dict[str, Callable[[Benchmark], None]] = {
    "push": partial(transfers.sizes, what="push"),
    "pull": partial(transfers.sizes, what="pull"),
    "push_pull": partial(transfers.sizes, what="push_pull"),
    "adam": transfers.adam,
    "workers": transfers.workers,
    "shards": transfers.shards,
    "variables": transfers.variables,
    "tiny": transfers.tiny,
    "step": training.step,
    "mlp": training.mlp,
    "launch": training.launch,
    "memory": resources.memory,
    "apply": resources.apply,
    "peers": partial(peers, say=say),
}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures this machine, this parameter server, and peers that are installed.",
        allow_abbrev=False,
    )
    p.add_argument("--quick", action="store_true", help="little work: shows that everything runs")
    p.add_argument(
        "--only",
        type=_sections,
        default=list(SECTIONS),
        metavar="NAME,...",
        help=f"these sections: {', '.join(SECTIONS)}",
    )
    p.add_argument(
        "--out", type=Path, default=RESULTS, metavar="DIR", help="where to write JSON and plot"
    )
    return p


def _sections(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no section {', '.join(unknown)}; there are {', '.join(SECTIONS)}"
        )
    return names


def yardsticks(bench: Benchmark) -> None:
    """What everything else is compared with, at the start; it is measured again each time."""
    large = bench.scale.large
    raw, turn = bench.yard.raw(large), bench.yard.turn()
    name = f"raw socket {label(large)}"
    bench.record(Figure("yardsticks", name, "ms", tuple(1e3 * s for s in raw), large))
    name = f"raw socket {label(TURN_BYTES)} and back"
    bench.record(Figure("yardsticks", name, "ms", tuple(1e3 * s for s in turn)))
    copy = [Round(raw, bench.yard.memcpy(large))]
    bench.record(transfer("yardsticks", f"memcpy {label(large)}", copy, large, large))


def measure(bench: Benchmark, sections: Sequence[str]) -> list[str]:
    """Runs the sections; a line for each that failed."""
    failures = []
    yardsticks(bench)
    for name in sections:
        say(f"-- {name}")
        try:
            SECTIONS[name](bench)
        except BenchmarkError as error:
            failures.append(f"{name} failed: {error}")
            say(failures[-1])
    return failures


def main(argv: Sequence[str] | None = None) -> int:
    """The command. Returns the exit code."""
    args = parser().parse_args(argv)
    scale = QUICK if args.quick else FULL
    facts = report.machine()
    for line in (*report.preface(facts), "", report.heading()):
        say(line)
    with Processes() as run:
        yard = Yardsticks(scale, run)
        bench = Benchmark(scale, yard, lambda figure: say(report.row(figure)))
        try:
            failures = measure(bench, args.only)
        finally:
            yard.close()
    if set(args.only) == set(SECTIONS):
        missing = reach.unmeasured(scale, bench.figures)
        failures += [f"goal without a figure: {name}" for name in missing]
    reached = reach.table(scale, bench.figures)
    if reached:
        for line in ("", *report.goals(reached, scale.quick)):
            say(line)
    for line in failures:
        say(line)
    stem = time.strftime("%Y%m%d-%H%M%S") + ("-quick" if scale.quick else "")
    path = args.out / f"{stem}.json"
    report.write_json(path, facts, scale.quick, bench.figures, reached, failures)
    say(f"\nwrote {path}")
    try:
        plot.write_png(path.with_suffix(".png"), bench.figures, reached, report.preface(facts)[0])
        say(f"wrote {path.with_suffix('.png')}")
    except ImportError:
        say(plot.HOW_TO_GET)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
