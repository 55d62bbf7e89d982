"""Optimizers by name: every update rule, and how a rule is read from a message or a command line.

Where things are: `rule` says what a rule is, `rules`, `squares` and `moments` are the rules,
`schedules` what a learning rate can be, `blocks` the arithmetic over whole arrays. A new rule is
one more dataclass, named in `RULES`. No gRPC or threads here.
"""

from __future__ import annotations

from collections.abc import Mapping

from paramserver import schedules
from paramserver.blocks import BLOCK, Scratch, apply, mean_into, new_slots, step
from paramserver.errors import ConfigError
from paramserver.moments import Adam, Adamax, AdamW, AMSGrad, Nadam, Yogi
from paramserver.ranges import Decay, Epsilon, Weight, Within, settings
from paramserver.rule import Array, Optimizer, Rate
from paramserver.rules import SGD, Lion, Momentum
from paramserver.schedules import Schedule
from paramserver.squares import Adadelta, Adagrad, Ftrl, RMSProp

__all__ = [
    "BLOCK",
    "RULES",
    "SGD",
    "AMSGrad",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Array",
    "Decay",
    "Epsilon",
    "Ftrl",
    "Lion",
    "Momentum",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "Rate",
    "Scratch",
    "Weight",
    "Within",
    "Yogi",
    "apply",
    "from_hyper",
    "from_name",
    "mean_into",
    "new_slots",
    "step",
]

#: Every rule by its kind: what the wire and the command line may name.
RULES: Mapping[str, type[Optimizer]] = {
    rule.kind: rule
    for rule in (
        *(SGD, Momentum, Lion),
        *(Adagrad, Adadelta, RMSProp, Ftrl),
        *(Adam, AdamW, AMSGrad, Adamax, Nadam, Yogi),
    )
}


def from_hyper(kind: str, hyper: Mapping[str, float]) -> Optimizer:
    """The rule of this kind with these settings; what `hyper` leaves out keeps its default.

    A schedule is several settings, such as "learning_rate.cosine.steps". Raises: ConfigError for an
    unknown kind or setting (listing the known ones) or a value out of its range."""
    rule = RULES.get(kind)
    if rule is None:
        raise ConfigError(
            f"unknown optimizer {kind[:80]!r}; choose one of {', '.join(sorted(RULES))}"
        )
    known = settings(rule)
    numbers: dict[str, float | Schedule] = {}
    scheduled: dict[str, dict[str, float]] = {}
    for name, number in hyper.items():
        setting, dot, entry = name.partition(".")
        if setting not in known:
            raise ConfigError(
                f"optimizer {kind} has no setting {name[:80]!r}; it has {', '.join(known)}"
            )
        if dot:
            scheduled.setdefault(setting, {})[entry] = number
        else:
            numbers[setting] = number
    for setting, entries in scheduled.items():
        if setting in numbers:
            raise ConfigError(
                f"optimizer {kind}: {setting} is a number and a schedule; give one of them"
            )
        numbers[setting] = schedules.from_flat(setting, entries)
    return rule(**numbers)


def from_name(name: str, **settings: float | str | None) -> Optimizer:
    """`from_hyper` for a command line: `from_name("adam", learning_rate="cosine:0.01:1000")`.

    Case does not matter, a setting that is None was not given, and text is read by
    `schedules.parse`. Raises: ConfigError."""
    hyper: dict[str, float] = {}
    for setting, given in settings.items():
        value = schedules.parse(given) if isinstance(given, str) else given
        if value is None:
            continue
        more = schedules.flat(setting, value) if isinstance(value, Schedule) else {setting: value}
        if twice := hyper.keys() & more.keys():
            raise ConfigError(f"the optimizer's {min(twice)} is given twice; give it once")
        hyper |= more
    return from_hyper(name.lower(), hyper)
