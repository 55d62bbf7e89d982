"""Adam and its relatives: rules with moving means of the gradient and of its size. No gRPC here.

    m = beta1 m + (1 - beta1) g         the mean gradient, slot `m`
    v = beta2 v + (1 - beta2) g^2       the mean square, slot `v`
    m^ = m / (1 - beta1^t),  v^ = v / (1 - beta2^t)

Both start at 0, which m^ and v^ correct; the slots hold the uncorrected ones. Epsilon is added to
the root of the corrected v^, outside it, everywhere. The code expands the fraction by
r = sqrt(1 - beta2^t), the same number for one pass less:
m^ / (sqrt(v^) + epsilon) = m^ r / (sqrt(v) + epsilon r).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from paramserver.ranges import Decay, Epsilon, Weight
from paramserver.rule import Array, Optimizer, Rate, descend, mix, number


def _mean_square(before: Array, grad: Array, decay: float, out: Array, spare: Array) -> None:
    np.square(grad, out=spare)
    mix(before, spare, decay, out, spare)


def _over_root(mean: Array, square: Array, epsilon: float, out: Array) -> None:
    """mean / (sqrt(square) + epsilon); `out` is neither."""
    np.sqrt(square, out=out)
    np.add(out, epsilon, out=out)
    np.divide(mean, out, out=out)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as Algorithm 1 of Kingma & Ba (2015) has it.

        w = w - learning_rate m^ / (sqrt(v^) + epsilon)

    (The paper's faster "epsilon hat" form adds epsilon to sqrt(v) instead, as TensorFlow does; a
    large epsilon tells the two apart.)"""

    kind: ClassVar[str] = "adam"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    learning_rate: Rate = 0.001
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8

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
        rate, root = number(self.learning_rate), math.sqrt(1.0 - self.beta2**t)
        m, v = out_slots
        _mean_square(slots[1], grad, self.beta2, v, out_value)
        mix(slots[0], grad, self.beta1, m, out_value)
        _over_root(m, v, self.epsilon * root, out_value)
        descend(value, out_value, rate * root / (1.0 - self.beta1**t), out_value)


@dataclass(frozen=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019).

        w = w - learning_rate (m^ / (sqrt(v^) + epsilon) + weight_decay w)

    The decay is no part of the gradient, so the moments do not see it. It is scaled by the rate as
    it is at the step, as in PyTorch and optax; the paper scales it by the schedule alone."""

    kind: ClassVar[str] = "adamw"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    scratch: ClassVar[int] = 1

    learning_rate: Rate = 0.001
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8
    weight_decay: Weight = 0.01

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
        rate, root = number(self.learning_rate), math.sqrt(1.0 - self.beta2**t)
        (m, v), (spare,) = out_slots, scratch
        _mean_square(slots[1], grad, self.beta2, v, out_value)
        mix(slots[0], grad, self.beta1, m, out_value)
        _over_root(m, v, self.epsilon * root, out_value)
        np.multiply(out_value, rate * root / (1.0 - self.beta1**t), out=out_value)
        # Not value times (1 - rate weight_decay): in float32 that factor is mostly rounding.
        np.multiply(value, rate * self.weight_decay, out=spare)
        np.add(out_value, spare, out=out_value)
        np.subtract(value, out_value, out=out_value)


@dataclass(frozen=True)
class AMSGrad(Optimizer):
    """Adam that divides by the largest v so far (Reddi et al. 2018); slot `v_max` starts at 0.

        v_max = max(v_max, v)
        w = w - learning_rate m^ / (sqrt(v_max / (1 - beta2^t)) + epsilon)

    The maximum is taken of the uncorrected v and corrected afterwards, as in PyTorch. (optax
    corrects first; the paper corrects neither moment.)"""

    kind: ClassVar[str] = "amsgrad"
    slots: ClassVar[tuple[str, ...]] = ("m", "v", "v_max")

    learning_rate: Rate = 0.001
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8

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
        rate, root = number(self.learning_rate), math.sqrt(1.0 - self.beta2**t)
        m, v, v_max = out_slots
        _mean_square(slots[1], grad, self.beta2, v, out_value)
        np.maximum(slots[2], v, out=v_max)
        mix(slots[0], grad, self.beta1, m, out_value)
        _over_root(m, v_max, self.epsilon * root, out_value)
        descend(value, out_value, rate * root / (1.0 - self.beta1**t), out_value)


@dataclass(frozen=True)
class Adamax(Optimizer):
    """Adam with a decaying maximum for v (Kingma & Ba 2015, Algorithm 2); slot `u` starts at 0.

        u = max(beta2 u, |g| + epsilon)
        w = w - learning_rate m^ / u

    Epsilon is added to |g|, as in PyTorch and optax, and u is never 0. (The paper has none, and
    0 / 0 where no gradient has been yet.) A maximum needs no correction."""

    kind: ClassVar[str] = "adamax"
    slots: ClassVar[tuple[str, ...]] = ("m", "u")

    learning_rate: Rate = 0.002
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8

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
        m, u = out_slots
        np.abs(grad, out=out_value)
        np.add(out_value, self.epsilon, out=out_value)
        np.multiply(slots[1], self.beta2, out=u)
        np.maximum(u, out_value, out=u)
        mix(slots[0], grad, self.beta1, m, out_value)
        np.divide(m, u, out=out_value)
        descend(value, out_value, rate / (1.0 - self.beta1**t), out_value)


@dataclass(frozen=True)
class Nadam(Optimizer):
    """Adam with Nesterov's look ahead (Dozat 2016), beta1 the same at every step.

        n = beta1 m / (1 - beta1^(t + 1)) + (1 - beta1) g / (1 - beta1^t)
        w = w - learning_rate n / (sqrt(v^) + epsilon)

    As in optax. (PyTorch and Keras let beta1 grow with the step, by a schedule of the paper.)"""

    kind: ClassVar[str] = "nadam"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")
    scratch: ClassVar[int] = 1

    learning_rate: Rate = 0.002
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 1e-8

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
        rate, root = number(self.learning_rate), math.sqrt(1.0 - self.beta2**t)
        (m, v), (ahead,) = out_slots, scratch
        _mean_square(slots[1], grad, self.beta2, v, out_value)
        mix(slots[0], grad, self.beta1, m, out_value)
        np.multiply(m, self.beta1 / (1.0 - self.beta1 ** (t + 1)), out=ahead)
        np.multiply(grad, (1.0 - self.beta1) / (1.0 - self.beta1**t), out=out_value)
        np.add(ahead, out_value, out=ahead)
        _over_root(ahead, v, self.epsilon * root, out_value)
        descend(value, out_value, rate * root, out_value)


@dataclass(frozen=True)
class Yogi(Optimizer):
    """Adam whose v grows and shrinks by at most a gradient's share (Zaheer et al. 2018).

        v = v - (1 - beta2) sign(v - g^2) g^2
        w = w - learning_rate m^ / (sqrt(v^) + epsilon)

    Slot `v` starts at initial_accumulator, the paper's 1e-6, slot `m` at 0. (optax starts both
    there.) Both are corrected as Adam's, which the paper leaves out and TensorFlow and optax do."""

    kind: ClassVar[str] = "yogi"
    slots: ClassVar[tuple[str, ...]] = ("m", "v")

    learning_rate: Rate = 0.01
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: Epsilon = 0.001
    initial_accumulator: Weight = 1e-6

    def slot_fill(self, slot: str) -> float:
        return self.initial_accumulator if slot == "v" else 0.0

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
        rate, root = number(self.learning_rate), math.sqrt(1.0 - self.beta2**t)
        m, v = out_slots
        np.square(grad, out=out_value)
        np.subtract(slots[1], out_value, out=v)
        np.sign(v, out=v)
        np.multiply(v, out_value, out=v)
        np.multiply(v, 1.0 - self.beta2, out=v)
        np.subtract(slots[1], v, out=v)
        mix(slots[0], grad, self.beta1, m, out_value)
        _over_root(m, v, self.epsilon * root, out_value)
        descend(value, out_value, rate * root / (1.0 - self.beta1**t), out_value)
