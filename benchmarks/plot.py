"""A run in one picture. Needs matplotlib, which only this module imports."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, number
from benchmarks.scale import label

HOW_TO_GET = "no plot: matplotlib is not installed; pip install -e '.[bench]' brings it"

#: The lines of the first panel: how the names of their figures begin, and how they look.
LINES = {
    "push ": ("C0", "o-"),
    "pull ": ("C1", "o-"),
    "push_pull ": ("C2", "o-"),
    "tutorial push ": ("C0", "x:"),
    "tutorial pull ": ("C1", "x:"),
}


def write_png(
    path: Path, figures: Sequence[Figure], reach: Sequence[dict[str, Any]], title: str
) -> None:
    """Draws rates by size, more workers and servers, and the goals.

    Raises: ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, ((by_size, small), (more, goals)) = pyplot.subplots(
        2, 2, figsize=(15, 11), layout="constrained"
    )
    canvas.suptitle(title)
    _by_size(by_size, figures)
    _latencies(small, figures)
    _more(more, figures)
    _goals(goals, reach)
    for axes in (by_size, small, more, goals):
        axes.set_visible(axes.has_data())
    canvas.savefig(path, dpi=110)
    pyplot.close(canvas)


def _by_size(axes: Any, figures: Sequence[Figure]) -> None:
    axes.set(title="rate by size of the one variable", xlabel="bytes", ylabel="GB/s")
    for name, (color, style) in LINES.items():
        own = [f for f in figures if f.name.startswith(name) and f.section in name and f.at]
        if own:
            rates = [f.gb_per_s for f in own]
            axes.loglog([f.at for f in own], rates, style, color=color, label=name.strip())
    raw = {f.at: f.yardstick_value for f in figures if f.section in ("push", "pull") and f.at}
    if raw:
        sizes = sorted(raw)
        axes.loglog(sizes, [raw[at] for at in sizes], "k--", label="raw socket")
        axes.set_xticks(sizes, [label(int(at)) for at in sizes], rotation=30)
        axes.minorticks_off()
        axes.legend()
    axes.grid(True, alpha=0.3)


def _latencies(axes: Any, figures: Sequence[Figure]) -> None:
    own = [f for f in figures if f.section == "step" and f.unit == "ms"]
    axes.set(title="one step of a tiny model", xlabel="ms")
    _bars(axes, [(f.name, f.median, f"{number(f.median)} ms") for f in own])


def _more(axes: Any, figures: Sequence[Figure]) -> None:
    own = [f for f in figures if f.section in ("workers", "shards") and f.at]
    rates = [(f.name, f.median if f.unit == "GB/s" else f.gb_per_s) for f in own]
    axes.set(title="more workers, more servers", xlabel="GB/s, all together")
    _bars(axes, [(name, rate, number(rate)) for name, rate in rates if rate])


def _goals(axes: Any, reach: Sequence[dict[str, Any]]) -> None:
    axes.set(title="what was reached, over the floor (or the ceiling, over it)", xlabel="x")
    bars = []
    for row in reach:
        if "floor" in row:
            most = str(row["floor text"]).startswith("<=")
            over = row["floor"] / row["reached"] if most else row["reached"] / row["floor"]
            bars.append((row["goal"], over, number(row["reached"])))
    if bars:
        _bars(axes, bars)
        axes.axvline(1.0, color="k", linewidth=1)


def _bars(axes: Any, bars: Sequence[tuple[str, float, str]]) -> None:
    """Horizontal bars, from the top down, each with its number."""
    drawn = axes.barh([name for name, _, _ in bars], [value for _, value, _ in bars])
    axes.bar_label(drawn, [text for _, _, text in bars], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.15)
