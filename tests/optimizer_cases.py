"""What the optimizer suite compares with: known numbers, and each rule once more in plain floats.

Nothing here uses NumPy or the product's arithmetic. A new rule joins with an entry in `VARIANTS`,
one in `REFERENCE`, and a `Case` with numbers from its paper or another implementation. `PEERS` are
other libraries, for whoever has them installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from paramserver.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    AMSGrad,
    Ftrl,
    Lion,
    Momentum,
    Nadam,
    Optimizer,
    RMSProp,
    Yogi,
)

Vector = Sequence[float]

START: Vector = (1.0, -2.0, 0.5)
G1: Vector = (0.1, -0.2, 0.3)
G2: Vector = (0.2, 0.1, -0.4)
G3: Vector = (-0.3, 0.05, 0.0)


@dataclass(frozen=True)
class Case:
    """A run with known results: `rules[i]` applies `grads[i]`; `after[t]` is the value after t.

    It begins at `start`, with fresh slots.

    `slots` are those after the last step, `unlike` a last value of another convention."""

    name: str
    rules: Sequence[Optimizer]
    after: Mapping[int, Vector]
    grads: Sequence[Vector] = (G1, G2, G3)
    slots: Mapping[str, Vector] = field(default_factory=dict)
    unlike: Vector | None = None
    start: Vector = START


_MOMENTUM = Momentum(0.1, momentum=0.9)
_NESTEROV = Momentum(0.1, momentum=0.9, nesterov=True)
_MEAN: Vector = (-0.0039, -0.0022, -0.0117)
_MEAN_SQUARE: Vector = (1.3994001e-4, 5.241004e-5, 2.4966009e-4)


def _rmsprop(inside: bool, initial: float) -> RMSProp:
    return RMSProp(0.01, epsilon=1e-3, epsilon_inside=inside, initial_square=initial)


#: All from `START`.
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
        slots={"m": _MEAN, "v": _MEAN_SQUARE},
    ),
    Case(
        "adam, epsilon 0.1: Algorithm 1, not epsilon hat",
        [Adam(0.1, epsilon=0.1)] * 3,
        {3: (0.895424924637, -1.913523612086, 0.451194064681)},
        slots={"m": _MEAN, "v": _MEAN_SQUARE},
        unlike=(0.991265606526, -1.991878973849, 0.496017742225),
    ),
    Case(
        "adagrad, from 0",
        [Adagrad(0.1, initial_accumulator=0.0, epsilon=1e-10)] * 3,
        {3: (0.890735653592, -1.966543148594, 0.480000000017)},
        slots={"n": (0.14, 0.0525, 0.25)},
    ),
    Case(
        "adadelta",
        [Adadelta(1.0, decay=0.95, epsilon=1e-6)] * 3,
        {3: (0.996690892068, -1.999982683223, 0.500633674484)},
        slots={
            "s": (0.00685125, 0.002405, 0.01166125),
            "d": (4.77313227132e-06, 1.42053598859e-06, 2.14035027805e-06),
        },
    ),
    Case(
        "rmsprop, epsilon outside",
        [_rmsprop(False, 0.0)] * 3,
        {3: (0.966862145576, -1.990833565878, 0.494308431990)},
        slots={"s": (0.01341, 0.00439, 0.02169)},
        unlike=(0.976592861992, -1.991889237914, 0.495247776124),
    ),
    Case(
        "rmsprop, epsilon inside",
        [_rmsprop(True, 0.0)] * 3,
        {3: (0.976592861992, -1.991889237914, 0.495247776124)},
        unlike=(0.966862145576, -1.990833565878, 0.494308431990),
    ),
    Case(
        "rmsprop, epsilon outside, from 1",
        [_rmsprop(False, 1.0)] * 3,
        {3: (1.000212249752, -1.999588608177, 0.501231688882)},
    ),
    Case(
        "rmsprop, epsilon inside, from 1",
        [_rmsprop(True, 1.0)] * 3,
        {3: (1.000212325423, -1.999588390717, 0.501232288635)},
    ),
    Case(
        "rmsprop, centered, momentum, epsilon inside",
        [RMSProp(0.01, 0.9, 0.9, epsilon=1e-3, centered=True, epsilon_inside=True)] * 3,
        {3: (0.909407032499, -1.952436124845, 0.462907532769)},
        slots={"s": (0.01341, 0.00439, 0.02169), "c": _MEAN},
    ),
    Case(
        "rmsprop, centered, momentum, epsilon outside",
        [RMSProp(0.01, 0.9, 0.9, epsilon=1e-3, centered=True)] * 3,
        {3: (0.879556408368, -1.946383909543, 0.459472262736)},
        slots={"c": _MEAN, "a": (2.82462795268, -0.595162215263, 0.358138624596)},
    ),
    Case(
        "ftrl with everything",
        [Ftrl(0.1, initial_accumulator=0.1, l1=0.2, l2=0.5, l2_shrinkage=0.01)] * 3,
        {3: (0.0, -0.180977402169, 0.074053060450)},
        slots={
            "n": (0.24, 0.1525, 0.35),
            "z": (-0.134347130187, 1.087716750488, -0.712156874255),
        },
    ),
    Case(
        "adamw",
        [AdamW(0.1, weight_decay=0.1)] * 3,
        {3: (0.783395896537, -1.810081753827, 0.421255443423)},
        slots={"m": _MEAN, "v": _MEAN_SQUARE},
    ),
    Case(
        "amsgrad",
        [AMSGrad(0.1, beta2=0.5)] * 3,
        {3: (0.817554075375, -1.868846298397, 0.431122127689)},
        slots={"v": (0.05625, 0.00875, 0.05125), "v_max": (0.05625, 0.02, 0.1025)},
    ),
    Case(
        "adamax",
        [Adamax(0.1, epsilon=1e-3)] * 3,
        {3: (0.829835101015, -1.875481715274, 0.428172051603)},
        slots={"m": _MEAN, "u": (0.301, 0.200598201, 0.400599)},
    ),
    Case(
        "nadam, beta1 the same at every step",
        [Nadam(0.1)] * 3,
        {3: (0.781118024526, -1.878716152456, 0.434992452298)},
        slots={"m": _MEAN, "v": _MEAN_SQUARE},
    ),
    Case(
        "lion",
        [Lion(0.01, weight_decay=0.1)] * 3,
        {3: (0.987032989, -2.004015988, 0.5085114895)},
        slots={"m": (-3.99e-5, -4.702e-4, -1.0197e-3)},
    ),
    Case(
        "yogi",
        [Yogi(0.1, beta2=0.5)] * 3,
        {3: (0.822927272002, -1.864512592003, 0.428444406524)},
        slots={"m": _MEAN, "v": (0.070001, 0.013751, 0.125001)},
    ),
]


def _constant(
    name: str, rule: Optimizer, start: Vector, grad: Vector, steps: int, value: Vector
) -> Case:
    """The same gradient at every step."""
    return Case(name, [rule] * steps, {steps: value}, [grad] * steps, start=start)


_FTRL, _FTRL_L1, _FTRL_L2 = Ftrl(3.0), Ftrl(3.0, l1=0.001), Ftrl(3.0, l1=0.001, l2=2.0)
_FTRL_SHRINKAGE = Ftrl(3.0, l1=0.001, l2=2.0, l2_shrinkage=0.1)
_ADAGRAD = Adagrad(3.0, initial_accumulator=0.1, epsilon=1e-30)
_LARGE, _SMALL = (0.1, 0.2), (0.01, 0.02)

#: From elsewhere. FTRL's and Adagrad's are those of TensorFlow's public tests.
MORE_CASES = [
    _constant("adagrad, 0.1", _ADAGRAD, (1, 2), (0.1, 0.1), 3, (-1.602609731856, -0.602609731856)),
    _constant("adagrad, 0.01", _ADAGRAD, (3, 4), (0.01, 0.01), 3, (2.715679118580, 3.715679118580)),
    Case(
        "adagrad, a row named twice: its gradients are summed",
        [_ADAGRAD] * 3,
        {3: (1.0, -2.296985311981)},
        [(0.0, 0.2)] * 3,
        slots={"n": (0.1, 0.22)},
        unlike=(1.0, -2.928990126834),
        start=(1.0, 2.0),
    ),
    _constant("ftrl from 0", _FTRL, (0, 0), _LARGE, 3, (-2.602609731856, -4.296985311981)),
    _constant("ftrl from 0, small", _FTRL, (0, 0), _SMALL, 3, (-0.284320881420, -0.566948941473)),
    _constant("ftrl", _FTRL, (1, 2), _LARGE, 3, (-2.556072321101, -3.987293821438)),
    _constant("ftrl, small", _FTRL, (4, 3), _SMALL, 3, (-0.282322380171, -0.560966881682)),
    _constant("ftrl, l1", _FTRL_L1, (1, 2), _LARGE, 10, (-7.667188626900, -10.912737921786)),
    _constant("ftrl, l1, small", _FTRL_L1, (4, 3), _SMALL, 10, (-0.934607432200, -1.861472726561)),
    _constant("ftrl, l1 and l2", _FTRL_L2, (1, 2), _LARGE, 10, (-0.240599347864, -0.468293500611)),
    _constant(
        "ftrl, l1 and l2, small", _FTRL_L2, (4, 3), _SMALL, 10, (-0.024061474919, -0.048305094523)
    ),
    _constant(
        "ftrl, shrinkage", _FTRL_SHRINKAGE, (1, 2), _LARGE, 10, (-0.225789957534, -0.443457954944)
    ),
    _constant(
        "ftrl, shrinkage, small",
        _FTRL_SHRINKAGE,
        (4, 3),
        _SMALL,
        10,
        (-0.143784937206, -0.132294741132),
    ),
    Case(
        "adam, rows without a gradient decay and move",
        [Adam(0.1)] * 3,
        {
            3: (
                *(0.756020466746, 0.815267465891),
                *(2.0, 2.0),
                *(3.035089733056, 2.727956297194),
            )
        },
        [(0.1, 0.2, 0, 0, -0.1, 0.3), (0, 0, 0, 0, 0.2, 0.2), (0.3, -0.1, 0, 0, 0, 0)],
        unlike=(0.821211941810, 0.877135969195, 2.0, 2.0, 3.063389639612, 2.802964794330),
        start=(1, 1, 2, 2, 3, 3),
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
    "adagrad": Adagrad(0.1),
    "adagrad, from 0": Adagrad(0.1, initial_accumulator=0.0),
    "adadelta": Adadelta(),
    "adadelta, large epsilon": Adadelta(0.5, decay=0.8, epsilon=0.1),
    "rmsprop": RMSProp(0.01),
    "rmsprop, momentum": RMSProp(0.01, momentum=0.8, initial_square=1.0),
    "rmsprop, inside": RMSProp(0.01, decay=0.8, epsilon=0.01, epsilon_inside=True),
    "rmsprop, centered": RMSProp(0.01, epsilon=0.01, centered=True),
    "rmsprop, all": RMSProp(0.01, 0.9, 0.8, 0.01, True, True, 0.5),
    "ftrl": Ftrl(0.1),
    "ftrl, from 0": Ftrl(0.1, initial_accumulator=0.0),
    "ftrl, all": Ftrl(0.1, l1=0.5, l2=0.1, l2_shrinkage=0.02),
    "adamw": AdamW(0.01),
    "adamw, strong": AdamW(0.01, beta1=0.8, beta2=0.95, epsilon=0.1, weight_decay=0.5),
    "amsgrad": AMSGrad(0.01),
    "amsgrad, short memory": AMSGrad(0.01, beta2=0.6, epsilon=0.1),
    "adamax": Adamax(),
    "adamax, short memory": Adamax(0.01, beta2=0.6, epsilon=0.1),
    "nadam": Nadam(),
    "nadam, no memory": Nadam(0.01, beta1=0.0, beta2=0.0),
    "lion": Lion(),
    "lion, decay": Lion(0.01, beta1=0.8, beta2=0.95, weight_decay=0.5),
    "yogi": Yogi(),
    "yogi, short memory": Yogi(0.01, beta2=0.6, initial_accumulator=0.0),
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


def _adagrad(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    n = slots[0] + g**2
    return w - h["learning_rate"] * g / (math.sqrt(n) + h["epsilon"]), (n,)


def _adadelta(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    s = h["decay"] * slots[0] + (1 - h["decay"]) * g**2
    x = math.sqrt(slots[1] + h["epsilon"]) / math.sqrt(s + h["epsilon"]) * g
    d = h["decay"] * slots[1] + (1 - h["decay"]) * x**2
    return w - h["learning_rate"] * x, (s, d)


def _rmsprop_step(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    s = h["decay"] * slots[0] + (1 - h["decay"]) * g**2
    new = [s]
    spread = s
    if h["centered"]:
        new.append(h["decay"] * slots[1] + (1 - h["decay"]) * g)
        spread = max(s - new[1] ** 2, 0.0)
    if h["epsilon_inside"]:
        x = g / math.sqrt(spread + h["epsilon"])
    else:
        x = g / (math.sqrt(spread) + h["epsilon"])
    if h["momentum"]:
        x += h["momentum"] * slots[-1]
        new.append(x)
    return w - h["learning_rate"] * x, tuple(new)


def _ftrl(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    rate, l1 = h["learning_rate"], h["l1"]
    n = slots[0] + g**2
    z = slots[1] + g + 2 * h["l2_shrinkage"] * w
    z -= (math.sqrt(n) - math.sqrt(slots[0])) / rate * w
    if abs(z) <= l1:
        return 0.0, (n, z)
    return (math.copysign(l1, z) - z) / (math.sqrt(n) / rate + 2 * h["l2"]), (n, z)


def _means(g: float, slots: Scalars, h: Mapping[str, float]) -> tuple[float, float]:
    m = h["beta1"] * slots[0] + (1 - h["beta1"]) * g
    return m, h["beta2"] * slots[1] + (1 - h["beta2"]) * g * g


def _toward(t: int, m: float, v: float, h: Mapping[str, float]) -> float:
    m_hat = m / (1 - h["beta1"] ** t)
    v_hat = v / (1 - h["beta2"] ** t)
    return m_hat / (math.sqrt(v_hat) + h["epsilon"])


def _adam(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    m, v = _means(g, slots, h)
    return w - h["learning_rate"] * _toward(t, m, v, h), (m, v)


def _adamw(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    m, v = _means(g, slots, h)
    decayed = w * (1 - h["learning_rate"] * h["weight_decay"])
    return decayed - h["learning_rate"] * _toward(t, m, v, h), (m, v)


def _amsgrad(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    m, v = _means(g, slots, h)
    v_max = max(slots[2], v)
    return w - h["learning_rate"] * _toward(t, m, v_max, h), (m, v, v_max)


def _adamax(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    m, _ = _means(g, slots, h)
    u = max(h["beta2"] * slots[1], abs(g) + h["epsilon"])
    return w - h["learning_rate"] / (1 - h["beta1"] ** t) * m / u, (m, u)


def _nadam(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    beta1 = h["beta1"]
    m, v = _means(g, slots, h)
    ahead = beta1 * m / (1 - beta1 ** (t + 1)) + (1 - beta1) * g / (1 - beta1**t)
    v_hat = v / (1 - h["beta2"] ** t)
    return w - h["learning_rate"] * ahead / (math.sqrt(v_hat) + h["epsilon"]), (m, v)


def _lion(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    c = h["beta1"] * slots[0] + (1 - h["beta1"]) * g
    sign = (c > 0) - (c < 0)
    m = h["beta2"] * slots[0] + (1 - h["beta2"]) * g
    return w - h["learning_rate"] * (sign + h["weight_decay"] * w), (m,)


def _yogi(
    t: int, g: float, w: float, slots: Scalars, h: Mapping[str, float]
) -> tuple[float, Scalars]:
    m, _ = _means(g, slots, h)
    grows = (slots[1] < g * g) - (slots[1] > g * g)
    v = slots[1] + (1 - h["beta2"]) * grows * g * g
    return w - h["learning_rate"] * _toward(t, m, v, h), (m, v)


#: One element's update as the formula is printed: (t, g, w, slots, settings) -> (w, slots).
REFERENCE: Mapping[
    str, Callable[[int, float, float, Scalars, Mapping[str, float]], tuple[float, Scalars]]
] = {
    "sgd": _sgd,
    "momentum": _momentum,
    "lion": _lion,
    "adagrad": _adagrad,
    "adadelta": _adadelta,
    "rmsprop": _rmsprop_step,
    "ftrl": _ftrl,
    "adam": _adam,
    "adamw": _adamw,
    "amsgrad": _amsgrad,
    "adamax": _adamax,
    "nadam": _nadam,
    "yogi": _yogi,
}


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


def run_torch(torch: Any, make: Callable[..., Any], grads: Sequence[Vector]) -> list[float]:
    """The last values of a run from `START` with an optimizer of `torch.optim`."""
    value = torch.nn.Parameter(torch.tensor(START, dtype=torch.float64))
    optimizer = make(torch.optim, [value])
    for grad in grads:
        value.grad = torch.tensor(grad, dtype=torch.float64)
        optimizer.step()
    values: list[float] = value.tolist()
    return values


def run_optax(optax: Any, make: Callable[..., Any], grads: Sequence[Vector]) -> list[float]:
    """The same with one of optax."""
    jax = import_module("jax")
    jax.config.update("jax_enable_x64", True)
    value, optimizer = jax.numpy.array(START), make(optax)
    state = optimizer.init(value)
    for grad in grads:
        updates, state = optimizer.update(jax.numpy.array(grad), state, value)
        value = optax.apply_updates(value, updates)
    values: list[float] = value.tolist()
    return values


@dataclass(frozen=True)
class Peer:
    """An optimizer of another library with our convention, and how that library is run."""

    module: str
    run: Callable[..., list[float]]
    make: Callable[..., Any]
    ours: Optimizer


_TORCH: Sequence[tuple[Callable[..., Any], Optimizer]] = [
    (lambda o, p: o.SGD(p, 0.1), SGD(0.1)),
    (lambda o, p: o.SGD(p, 0.1, 0.8), Momentum(0.1, 0.8)),
    (lambda o, p: o.SGD(p, 0.1, 0.8, nesterov=True), Momentum(0.1, 0.8, nesterov=True)),
    (lambda o, p: o.Adagrad(p, 0.1, initial_accumulator_value=0.1), Adagrad(0.1)),
    (lambda o, p: o.Adadelta(p, 1.0, 0.95), Adadelta()),
    (lambda o, p: o.RMSprop(p, 0.01, 0.9, 0.1), RMSProp(0.01, epsilon=0.1)),
    (
        lambda o, p: o.RMSprop(p, 0.01, 0.9, 0.1, momentum=0.8, centered=True),
        RMSProp(0.01, momentum=0.8, epsilon=0.1, centered=True),
    ),
    (lambda o, p: o.Adam(p, 0.1, eps=0.1), Adam(0.1, epsilon=0.1)),
    (lambda o, p: o.AdamW(p, 0.1, weight_decay=0.2), AdamW(0.1, weight_decay=0.2)),
    (lambda o, p: o.Adam(p, 0.1, (0.9, 0.5), amsgrad=True), AMSGrad(0.1, beta2=0.5)),
    (lambda o, p: o.Adamax(p, 0.1, eps=0.1), Adamax(0.1, epsilon=0.1)),
]
_OPTAX: Sequence[tuple[Callable[..., Any], Optimizer]] = [
    (lambda o: o.rmsprop(0.01, 0.9, 0.1), RMSProp(0.01, epsilon=0.1, epsilon_inside=True)),
    (lambda o: o.nadam(0.1), Nadam(0.1)),
    (lambda o: o.lion(0.1, weight_decay=0.2), Lion(0.1, weight_decay=0.2)),
    (
        lambda o: o.chain(o.scale_by_yogi(initial_accumulator_value=0.0), o.scale(-0.1)),
        Yogi(0.1, initial_accumulator=0.0),
    ),
]
PEERS = [
    *(Peer("torch", run_torch, make, ours) for make, ours in _TORCH),
    *(Peer("optax", run_optax, make, ours) for make, ours in _OPTAX),
]
