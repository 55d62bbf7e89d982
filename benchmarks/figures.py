"""A figure: what was measured, how often, and what it comes to beside its yardstick. Only numbers.

A round is one yardstick and, right after it, one measurement; the ratio of a figure is the median
of its rounds' ratios, so that a machine that grows slower or faster meanwhile does not show in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Round:
    """Seconds of the yardstick, and of the work that was measured after it."""

    yardstick: Sequence[float]
    work: Sequence[float]


@dataclass(frozen=True)
class Figure:
    """One line of the table. `values` are single measurements, in `unit`, in the order taken."""

    section: str
    name: str
    unit: str
    values: tuple[float, ...]
    #: Bytes that one measurement moved, if it is about that.
    nbytes: int = 0
    #: Against the yardstick measured just before it: in words, and how that came out.
    ratio: float | None = None
    yardstick: str = ""
    yardstick_value: float = 0.0
    yardstick_unit: str = ""
    #: What it is a figure of: bytes, workers, shards. For the plot.
    at: float | None = None
    note: str = ""

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.values)

    @property
    def gb_per_s(self) -> float | None:
        """The rate at the median, if it moved bytes in a time."""
        scale = {"ms": 1e-3, "s": 1.0}.get(self.unit)
        return self.nbytes / (self.median * scale) / 1e9 if self.nbytes and scale else None

    def to_json(self) -> dict[str, Any]:
        """All of it, with what is computed."""
        return {
            **asdict(self),
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "GB/s": self.gb_per_s,
        }


def transfer(
    section: str,
    name: str,
    rounds: Sequence[Round],
    nbytes: int,
    yard_bytes: int,
    at: float | None = None,
    note: str = "",
) -> Figure:
    """A figure of moving `nbytes`, against the raw socket moving `yard_bytes`: rate over rate."""
    rate = [nbytes / median(r.work) for r in rounds]
    raw = [yard_bytes / median(r.yardstick) for r in rounds]
    return Figure(
        section,
        name,
        "ms",
        tuple(1e3 * s for r in rounds for s in r.work),
        nbytes,
        median(mine / yard for mine, yard in zip(rate, raw, strict=True)),
        "the raw socket",
        median(raw) / 1e9,
        "GB/s",
        at,
        note,
    )


def latency(
    section: str, name: str, rounds: Sequence[Round], yardstick: str, note: str = ""
) -> Figure:
    """A figure of how long something takes, as a multiple of the yardstick's time."""
    return Figure(
        section,
        name,
        "ms",
        tuple(1e3 * s for r in rounds for s in r.work),
        ratio=median(median(r.work) / median(r.yardstick) for r in rounds),
        yardstick=yardstick,
        yardstick_value=1e3 * median(s for r in rounds for s in r.yardstick),
        yardstick_unit="ms",
        note=note,
    )


def comparison(section: str, name: str, ratios: Sequence[float], note: str = "") -> Figure:
    """One thing over another, a ratio for each round in which both were measured."""
    return Figure(section, name, "x", tuple(ratios), note=note)


def number(value: float) -> str:
    """Three significant digits, for a table."""
    if value and not 1e-3 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"
