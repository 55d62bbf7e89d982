"""Learning rates that change with the step. No gRPC, threads or clock here.

A schedule is a value and a pure function of the granted step number, so that every shard has the
same rate at the same step. Steps count from 1: a schedule that takes `steps` steps starts at its
`rate` before step 1 and arrives with step `steps`; what follows it in a chain starts before the
next. It has three forms:

    Chain((WarmUp(0.1, 100), Cosine(0.1, 900)))       a value; `rule.at(step)` evaluates it
    "warmup:0.1:100,cosine:0.1:900"                   on a command line: `parse`, and `str` back
    {"learning_rate.1.warmup.rate": 0.1,              on the wire, among the rule's settings: `flat`
     "learning_rate.1.warmup.steps": 100.0, ...}      and `from_flat`; a single one has no part 1
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, ClassVar

from paramserver.errors import ConfigError
from paramserver.ranges import Weight, Within, checked, settings

Steps = Annotated[int, Within(1, 2**53, "a whole number, 1 or more", whole=True)]
StepsOrForever = Annotated[int, Within(0, 2**53, "a whole number, or 0: for ever", whole=True)]
_Above0 = "above 0 and at most 1"
Factor = Annotated[float, Within(math.ulp(0.0), math.nextafter(1.0, 2.0), _Above0)]
Power = Annotated[float, Within(1e-30, 1e30, "a finite number above 0")]

_MOST_PARTS = 64
_ENTRY = re.compile(r"(?:([1-9][0-9]{0,3})\.)?([^.]+)\.([^.]+)")


@dataclass(frozen=True)
class Schedule(ABC):
    """A learning rate as a function of the step: a value, safe to share between threads.

    Constructing one raises ConfigError for a number out of its range."""

    #: Its name on the wire and on the command line.
    kind: ClassVar[str]
    #: Whether the rate stays as it is after `steps` steps.
    ends: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, allowed in settings(type(self)).items():
            given = getattr(self, name)
            object.__setattr__(self, name, checked(f"schedule {self.kind}", name, given, allowed))

    @abstractmethod
    def at(self, step: int) -> float:
        """The rate of the step with this number, 1 or more; 0 is where it starts from."""

    @property
    def length(self) -> int:
        """The steps it takes, after which the rate stays; 0: it goes on for ever."""
        return int(getattr(self, "steps", 0)) if self.ends else 0

    def __str__(self) -> str:
        """As on a command line: what `parse` reads."""
        numbers = [getattr(self, field.name) for field in fields(self)]
        for field in reversed(fields(self)):
            if numbers[-1] != field.default:
                break
            del numbers[-1]
        return ":".join([self.kind, *map(_shortest, numbers)])


@dataclass(frozen=True)
class Constant(Schedule):
    """`rate`, for `steps` steps; a chain of these is piecewise constant."""

    kind: ClassVar[str] = "constant"

    rate: Weight
    steps: StepsOrForever = 0

    def at(self, step: int) -> float:
        return self.rate


@dataclass(frozen=True)
class Step(Schedule):
    """`rate`, times `factor` after every `steps` steps: rate factor^floor((step - 1) / steps)."""

    kind: ClassVar[str] = "step"
    ends: ClassVar[bool] = False

    rate: Weight
    steps: Steps
    factor: Factor

    def at(self, step: int) -> float:
        return self.rate * math.pow(self.factor, max(step - 1, 0) // self.steps)


@dataclass(frozen=True)
class Exponential(Schedule):
    """`rate`, times `factor` in the course of `steps` steps: rate factor^(step / steps)."""

    kind: ClassVar[str] = "exponential"
    ends: ClassVar[bool] = False

    rate: Weight
    steps: Steps
    factor: Factor

    def at(self, step: int) -> float:
        return self.rate * math.pow(self.factor, step / self.steps)


@dataclass(frozen=True)
class Polynomial(Schedule):
    """From `rate` to `end`: end + (rate - end) (1 - step / steps)^power; a line for power 1."""

    kind: ClassVar[str] = "polynomial"

    rate: Weight
    steps: Steps
    end: Weight = 0.0
    power: Power = 1.0

    def at(self, step: int) -> float:
        left = 1.0 - min(step / self.steps, 1.0)
        return self.end + (self.rate - self.end) * math.pow(left, self.power)


@dataclass(frozen=True)
class Cosine(Schedule):
    """From `rate` to `end` along half a cosine (Loshchilov & Hutter 2017, without restarts):
    end + (rate - end) (1 + cos(pi step / steps)) / 2."""

    kind: ClassVar[str] = "cosine"

    rate: Weight
    steps: Steps
    end: Weight = 0.0

    def at(self, step: int) -> float:
        turn = math.cos(math.pi * min(step / self.steps, 1.0))
        return self.end + (self.rate - self.end) * (1.0 + turn) / 2.0


@dataclass(frozen=True)
class WarmUp(Schedule):
    """From `start` up to `rate` in a line: step `steps` is the first with all of it."""

    kind: ClassVar[str] = "warmup"

    rate: Weight
    steps: Steps
    start: Weight = 0.0

    def at(self, step: int) -> float:
        return self.start + (self.rate - self.start) * min(step / self.steps, 1.0)


@dataclass(frozen=True)
class Chain(Schedule):
    """One schedule after another, each counting its own steps from where it begins.

    Raises: ConfigError for a part that is never reached, since the one before goes on for ever."""

    kind: ClassVar[str] = "chain"

    parts: tuple[Schedule, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", tuple(self.parts))
        if not 2 <= len(self.parts) <= _MOST_PARTS:
            raise ConfigError(
                f"schedule chain has {len(self.parts)} parts; it must have 2 to {_MOST_PARTS}"
            )
        for number, part in enumerate(self.parts, 1):
            if not isinstance(part, Schedule) or isinstance(part, Chain):
                raise ConfigError(
                    f"schedule chain: part {number} is {part!r:.80}; "
                    f"it must be a schedule, one of {', '.join(KINDS)}"
                )
            if not part.length and number < len(self.parts):
                raise ConfigError(
                    f"schedule chain: part {number}, {part}, goes on for ever, so that part "
                    f"{number + 1} is never reached; constant, polynomial, cosine and warmup end "
                    "after their steps"
                )

    def at(self, step: int) -> float:
        for part in self.parts[:-1]:
            if step <= part.length:
                return part.at(step)
            step -= part.length
        return self.parts[-1].at(step)

    @property
    def length(self) -> int:
        last = self.parts[-1].length
        return last and sum(part.length for part in self.parts)

    def __str__(self) -> str:
        return ",".join(map(str, self.parts))


#: Every schedule that is made of numbers, by its kind.
KINDS: Mapping[str, type[Schedule]] = {
    kind.kind: kind for kind in (Constant, Step, Exponential, Polynomial, Cosine, WarmUp)
}


def parse(text: str) -> float | Schedule:
    """Reads a learning rate from a command line: a number, a schedule, or several with commas.

    A schedule is its kind and its numbers, in order and with colons: `cosine:0.1:1000`. A plain
    number's range is the rule's to check. Raises: ConfigError with the choices."""
    if ":" not in text:
        return _number(text, text)
    parts = [_parse_part(part, text) for part in text.split(",")]
    return parts[0] if len(parts) == 1 else Chain(tuple(parts))


def flat(setting: str, schedule: Schedule) -> dict[str, float]:
    """A schedule as settings of a rule, all of them numbers: "learning_rate.cosine.steps": 1000.0.

    The parts of a chain are numbered from 1: "learning_rate.2.cosine.steps"."""
    if not isinstance(schedule, Chain):
        names = {f"{setting}.{schedule.kind}": schedule}
    else:
        names = {f"{setting}.{i}.{part.kind}": part for i, part in enumerate(schedule.parts, 1)}
    return {
        f"{prefix}.{field.name}": float(getattr(part, field.name))
        for prefix, part in names.items()
        for field in fields(part)
    }


def from_flat(setting: str, entries: Mapping[str, float]) -> Schedule:
    """What `flat` made; `entries` without the setting's name: {"cosine.steps": 1000.0, ...}.

    Raises: ConfigError for an unknown kind or number, one that is missing, or parts with a hole."""
    parts: dict[int, dict[str, dict[str, float]]] = {}
    for entry, number in entries.items():
        match = _ENTRY.fullmatch(entry)
        if not match:
            raise ConfigError(
                f"setting {f'{setting}.{entry}'[:80]!r} is none of a schedule; write "
                f"{setting}.cosine.steps or, in a chain, {setting}.2.cosine.steps"
            )
        part, kind, name = match.groups()
        parts.setdefault(int(part or 0), {}).setdefault(kind, {})[name] = number
    found = sorted(parts)
    if found not in ([0], list(range(1, len(parts) + 1))):
        raise ConfigError(
            f"schedule of {setting} has a hole: there are parts {found[:_MOST_PARTS]}; number them "
            "1, 2, 3 and so on, and a single one not at all"
        )
    made = [_build(parts[number]) for number in found]
    return made[0] if found == [0] else Chain(tuple(made))


def _build(kinds: Mapping[str, Mapping[str, float]]) -> Schedule:
    """One schedule, made of what one part of a map names."""
    if len(kinds) > 1:
        some = " and ".join(repr(kind[:80]) for kind in sorted(kinds)[:2])
        raise ConfigError(f"one schedule is of kinds {some}; give one kind")
    ((name, numbers),) = kinds.items()
    kind = _kind(name)
    known = settings(kind)
    for number in numbers:
        if number not in known:
            raise ConfigError(f"schedule {name} has no number {number[:80]!r}; write {_form(kind)}")
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in numbers]:
        raise ConfigError(f"schedule {name} lacks {', '.join(missing)}; write {_form(kind)}")
    return kind(**numbers)


def _parse_part(text: str, whole: str) -> Schedule:
    """One schedule of a command line."""
    name, *numbers = text.strip().split(":")
    kind = _kind(name.lower())
    known = list(settings(kind))
    if len(numbers) > len(known):
        raise ConfigError(f"schedule {text[:80]!r} has too many numbers; write {_form(kind)}")
    return _build({kind.kind: {n: _number(t, whole) for n, t in zip(known, numbers, strict=False)}})


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"learning rate {whole[:80]!r}: {text[:80]!r} is not a number; write a number, or a "
            f"schedule, one of {_forms()}"
        ) from None


def _kind(name: str) -> type[Schedule]:
    if name not in KINDS:
        raise ConfigError(f"unknown schedule {name[:80]!r}; choose one of {_forms()}")
    return KINDS[name]


def _form(kind: type[Schedule]) -> str:
    """How a schedule is written: "cosine:RATE:STEPS[:END]"."""
    numbers = [
        f":{f.name.upper()}" if f.default is MISSING else f"[:{f.name.upper()}]"
        for f in fields(kind)
    ]
    return kind.kind + "".join(numbers)


def _forms() -> str:
    return ", ".join(map(_form, KINDS.values())) + "; several in turn with commas"


def _shortest(number: float) -> str:
    return min(f"{number:g}", repr(number), key=lambda text: (float(text) != number, len(text)))
