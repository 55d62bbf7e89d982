"""What a setting may be: the ranges of the numbers that rules and schedules are made of.

A setting is a field of a frozen dataclass, `Annotated` with its `Within`; a plain bool is a flag.
No gRPC or threads here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from paramserver.errors import ConfigError


@dataclass(frozen=True)
class Within:
    """What a setting may be: a number with low <= number < high. NaN never is.

    `whole`: an integer. `scheduled`: or a schedule of such numbers."""

    low: float
    high: float
    text: str
    whole: bool = False
    scheduled: bool = False

    def __contains__(self, number: float) -> bool:
        return self.low <= number < self.high and (not self.whole or number == int(number))


#: 0 or more, and finite.
Weight = Annotated[float, Within(0.0, 1e30, "a finite number, 0 or more")]
Decay = Annotated[float, Within(0.0, 1.0, "at least 0 and below 1")]
#: Never 0, nor 0 once it is float32 and scaled: a zero gradient must not divide 0 by 0.
Epsilon = Annotated[float, Within(1e-30, 1e30, "a finite number, 1e-30 or more")]


@cache
def settings(owner: type[Any]) -> Mapping[str, Within | None]:
    """The settings of a dataclass, in order, and what each may be; None for a flag."""
    hints = get_type_hints(owner, include_extras=True)
    return {
        field.name: None if hints[field.name] is bool else hints[field.name].__metadata__[0]
        for field in fields(owner)
    }


def checked(where: str, name: str, given: Any, allowed: Within | None) -> float | bool:
    """The setting as a Python number, whatever number it was given as.

    Raises: ConfigError that names `where`, the setting, and what it may be."""
    try:
        number = math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if allowed is None and number in (0.0, 1.0):
        return bool(number)
    if allowed is not None and number in allowed:
        return int(number) if allowed.whole else number
    shown = f"{given:.80}" if isinstance(given, str) else given
    text = allowed.text if allowed else "0 or 1"
    raise ConfigError(f"{where}: {name} is {shown!r}; it must be {text}")
