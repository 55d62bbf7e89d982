"""What the optimizer suite compares with: known numbers, and each rule once more in plain floats.

Nothing here uses NumPy or the product's arithmetic. A new rule joins with an entry in `VARIANTS`,
one in `REFERENCE`, and a `Case` with numbers from its paper or another implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from paramserver.optimizers import SGD, Adam, Momentum, Optimizer

Vector = Sequence[float]

START: Vector = (1.0, -2.0, 0.5)
G1: Vector = (0.1, -0.2, 0.3)
G2: Vector = (0.2, 0.1, -0.4)
G3: Vector = (-0.3, 0.05, 0.0)


@dataclass(frozen=True)
class Case:
    """A run with known results: `rules[i]` applies `grads[i]`; `after[t]` is the value after t.

    `slots` are those after the last step, `unlike` a last value of another convention."""

    name: str
    rules: Sequence[Optimizer]
    after: Mapping[int, Vector]
    grads: Sequence[Vector] = (G1, G2, G3)
    slots: Mapping[str, Vector] = field(default_factory=dict)
    unlike: Vector | None = None


_MOMENTUM = Momentum(0.1, momentum=0.9)
_NESTEROV = Momentum(0.1, momentum=0.9, nesterov=True)

CASES = [
    Case("sgd", [SGD(0.1)] * 3, {3: (1.0, -1.995, 0.51)}),
    Case(
        "momentum",
        [_MOMENTUM] * 3,
        {1: (0.99, -1.98, 0.47), 2: (0.961, -1.972, 0.483), 3: (0.9649, -1.9698, 0.4947)},
        slots={"a": (-0.039, -0.022, -0.117)},
    ),
    Case(
        "nesterov",
        [_NESTEROV] * 3,
        {
            1: (0.981, -1.962, 0.443),
            2: (0.9349, -1.9648, 0.4947),
            3: (0.96841, -1.96782, 0.50523),
        },
    ),
    Case(
        "momentum, rate 0.01 at step 3: accumulator form, not velocity form",
        [_MOMENTUM, _MOMENTUM, Momentum(0.01, momentum=0.9)],
        {3: (0.96139, -1.97178, 0.48417)},
        unlike=(0.9379, -1.9653, 0.4947),
    ),
    Case(
        "adam, Algorithm 1",
        [Adam(0.1)] * 3,
        {
            1: (0.90000001, -1.900000005, 0.400000003333),
            2: (0.803481813521, -1.873366302719, 0.419351043700),
            3: (0.810141714771, -1.867227416904, 0.434309453893),
        },
        slots={
            "m": (-0.0039, -0.0022, -0.0117),
            "v": (1.3994001e-4, 5.241004e-5, 2.4966009e-4),
        },
    ),
    Case(
        "adam, epsilon 0.1: Algorithm 1, not epsilon hat",
        [Adam(0.1, epsilon=0.1)] * 3,
        {3: (0.895424924637, -1.913523612086, 0.451194064681)},
        slots={
            "m": (-0.0039, -0.0022, -0.0117),
            "v": (1.3994001e-4, 5.241004e-5, 2.4966009e-4),
        },
        unlike=(0.991265606526, -1.991878973849, 0.496017742225),
    ),
]

#: Settings that every shared property is tried with; each kind at least once.
VARIANTS: Mapping[str, Optimizer] = {
    "sgd": SGD(0.1),
    "sgd, rate 0": SGD(0.0),
    "momentum": Momentum(0.05, momentum=0.8),
    "momentum 0": Momentum(0.05, momentum=0.0),
    "nesterov": Momentum(0.05, momentum=0.8, nesterov=True),
    "adam": Adam(0.01),
    "adam, rate 0": Adam(0.0),
    "adam, no memory": Adam(0.01, beta1=0.0, beta2=0.0),
    "adam, large epsilon": Adam(0.01, beta1=0.8, beta2=0.95, epsilon=0.5),
}

Scalars = tuple[float, ...]


def _sgd(t: int, g: float, w: float, _: Scalars, h: Mapping[str, float]) -> tuple[float, Scalars]:
    return w - h["learning_rate"] * g, ()


def _momentum(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    a = h["momentum"] * slots[0] + g
    move = g + h["momentum"] * a if h["nesterov"] else a
    return w - h["learning_rate"] * move, (a,)


def _adam(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    m = h["beta1"] * slots[0] + (1 - h["beta1"]) * g
    v = h["beta2"] * slots[1] + (1 - h["beta2"]) * g * g
    m_hat = m / (1 - h["beta1"] ** t)
    v_hat = v / (1 - h["beta2"] ** t)
    return w - h["learning_rate"] * m_hat / (math.sqrt(v_hat) + h["epsilon"]), (m, v)


#: One element's update as the formula is printed: (t, g, w, slots, settings) -> (w, slots).
REFERENCE: Mapping[
    str, Callable[[int, float, float, Scalars, Mapping[str, float]], tuple[float, Scalars]]
] = {"sgd": _sgd, "momentum": _momentum, "adam": _adam}


def run_reference(
    rule: Optimizer, grads: Sequence[Vector], start: Vector
) -> tuple[list[float], list[Scalars]]:
    """All steps of a run, element by element: the last values, and each element's slots."""
    values, slots = [], []
    for i, w in enumerate(start):
        state: Scalars = tuple(rule.slot_fill(slot) for slot in rule.slots)
        for t, grad in enumerate(grads, 1):
            w, state = REFERENCE[rule.kind](t, grad[i], w, state, rule.hyper())
        values.append(w)
        slots.append(state)
    return values, slots
