"""What an update rule is: settings, slots, and arithmetic over a block. No gRPC or threads here.

A rule is a frozen dataclass of settings and one elementwise function over a *block*: it reads the
current arrays, writes spare ones, and keeps nothing. `optimizers` names all rules and where they
are; `blocks` drives them over whole arrays.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Self

import numpy as np
import numpy.typing as npt

from paramserver import schedules
from paramserver.errors import InvalidArgumentError
from paramserver.ranges import Within, checked, settings
from paramserver.schedules import Schedule

Array = npt.NDArray[np.floating]

_RATE_TEXT = "a finite number, 0 or more, or a schedule"
#: A learning rate: a number or a schedule.
Rate = Annotated[float | Schedule, Within(0.0, 1e30, _RATE_TEXT, scheduled=True)]


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule with its settings: a value, safe to share between threads.

    Settings are Python floats (or flags), whatever number they were given as: a NumPy scalar would
    pull float32 arithmetic up to float64. A setting that is a `Schedule` has a number once the rule
    is evaluated at a step (`at`). Constructing a rule raises ConfigError for a setting out of its
    range."""

    #: The rule's name on the wire and on the command line.
    kind: ClassVar[str]
    #: Names of the arrays kept beside a variable, each of its shape and dtype, in `update`'s order.
    slots: ClassVar[tuple[str, ...]] = ()
    #: Scratch blocks that `update` needs.
    scratch: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name, allowed in settings(type(self)).items():
            given = getattr(self, name)
            if not (allowed and allowed.scheduled and isinstance(given, Schedule)):
                given = checked(f"optimizer {self.kind}", name, given, allowed)
            object.__setattr__(self, name, given)

    @abstractmethod
    def update(
        self,
        t: int,
        grad: Array,
        value: Array,
        slots: Sequence[Array],
        out_value: Array,
        out_slots: Sequence[Array],
        scratch: Sequence[Array],
    ) -> None:
        """Computes one block of the t-th update (t counts from 1); elementwise.

        All arrays are `(n,)` of one dtype, and the arithmetic is done in it. Inputs are never
        written. Outputs serve as working space from the start, so none may share memory with an
        input. Nothing is allocated, nothing blocks.

        Raises: InvalidArgumentError, before anything is written, if a schedule is not evaluated."""

    def slot_fill(self, slot: str) -> float:
        """What a slot holds before the first update."""
        return 0.0

    def at(self, step: int) -> Self:
        """The rule with its settings as they are at the granted step number `step`."""
        now = {name: s.at(step) for name, s in vars(self).items() if isinstance(s, Schedule)}
        return replace(self, **now) if now else self

    def hyper(self) -> dict[str, float]:
        """All settings by name, flags as 0 or 1, a schedule as several: the wire form, which
        `from_hyper` reads."""
        hyper: dict[str, float] = {}
        for field in fields(self):
            given = getattr(self, field.name)
            if isinstance(given, Schedule):
                hyper |= schedules.flat(field.name, given)
            else:
                hyper[field.name] = float(given)
        return hyper


def number(setting: float | Schedule) -> float:
    """A setting in the arithmetic. Raises: InvalidArgumentError for a schedule."""
    if isinstance(setting, Schedule):
        raise InvalidArgumentError(f"schedule {setting} has no number yet; use rule.at(step)")
    return setting


def mix(before: Array, sample: Array, decay: float, out: Array, spare: Array) -> None:
    """A moving mean: out = decay before + (1 - decay) sample.

    `spare` is working space, and may be `sample` where that is needed no more. `out` shares memory
    with none of them."""
    np.multiply(sample, 1.0 - decay, out=spare)
    np.multiply(before, decay, out=out)
    np.add(out, spare, out=out)


def descend(value: Array, step: Array, rate: float, out: Array) -> None:
    """value - rate step; `out` may be `step`."""
    np.multiply(step, rate, out=out)
    np.subtract(value, out, out=out)
