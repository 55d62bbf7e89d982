"""Update rules with at most a moving mean of the gradient: SGD, Momentum, Lion. No gRPC here.

The formulas are elementwise: g the gradient, w the value, the rest slots. Each names its source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserver.ranges import Decay, Weight
from paramserver.rule import Array, Optimizer, Rate, descend, mix, number


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent: w = w - learning_rate g. (Robbins & Monro 1951.)"""

    kind: ClassVar[str] = "sgd"

    learning_rate: Rate = 0.1

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
        descend(value, grad, number(self.learning_rate), out_value)


@dataclass(frozen=True)
class Momentum(Optimizer):
    """Gradient descent with momentum, accumulator form; slot `a` starts at 0.

        a = momentum a + g
        w = w - learning_rate a                      plain (Polyak 1964)
        w = w - learning_rate (g + momentum a)       nesterov (Sutskever et al. 2013)

    The rate stands outside the accumulator, as in TensorFlow 1 and PyTorch: a changed rate acts in
    full on the very next update. (The velocity form, v = momentum v - learning_rate g, would carry
    the old rate on.)"""

    kind: ClassVar[str] = "momentum"
    slots: ClassVar[tuple[str, ...]] = ("a",)

    learning_rate: Rate = 0.01
    momentum: Decay = 0.9
    nesterov: bool = False

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
        rate = number(self.learning_rate)
        (a,) = out_slots
        np.multiply(slots[0], self.momentum, out=a)
        np.add(a, grad, out=a)
        if self.nesterov:
            np.multiply(a, self.momentum, out=out_value)
            np.add(grad, out_value, out=out_value)
            descend(value, out_value, rate, out_value)
        else:
            descend(value, a, rate, out_value)


@dataclass(frozen=True)
class Lion(Optimizer):
    """Lion, the sign of an interpolated momentum (Chen et al. 2023); slot `m` starts at 0.

        w = w - learning_rate (sign(beta1 m + (1 - beta1) g) + weight_decay w)
        m = beta2 m + (1 - beta2) g

    The direction is taken with the m of before, and sign(0) = 0. There is no epsilon. Every element
    moves by the rate itself, so a good rate is 3 to 10 times smaller than Adam's. The decay is
    decoupled from the gradient, as AdamW's."""

    kind: ClassVar[str] = "lion"
    slots: ClassVar[tuple[str, ...]] = ("m",)
    scratch: ClassVar[int] = 1

    learning_rate: Rate = 0.0001
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    weight_decay: Weight = 0.0

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
        rate = number(self.learning_rate)
        (m,), (spare,) = out_slots, scratch
        mix(slots[0], grad, self.beta1, out_value, spare)
        np.sign(out_value, out=out_value)
        if self.weight_decay:
            np.multiply(value, self.weight_decay, out=spare)
            np.add(out_value, spare, out=out_value)
        descend(value, out_value, rate, out_value)
        mix(slots[0], grad, self.beta2, m, spare)
