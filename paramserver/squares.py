"""Update rules that divide by the root of accumulated squares: Adagrad, Adadelta, RMSProp, FTRL.

Each element then has a rate of its own. The formulas are elementwise: g the gradient, w the value,
the rest slots. No gRPC or threads here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from paramserver.errors import ConfigError
from paramserver.ranges import Decay, Epsilon, Weight, Within
from paramserver.rule import Array, Optimizer, Rate, descend, mix, number

#: The least divisor where a formula has no epsilon: 0 / 0 is 0.
_TINY = 1e-30


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al. 2011); slot `n` starts at initial_accumulator.

        n = n + g^2
        w = w - learning_rate g / (sqrt(n) + epsilon)

    Epsilon is added to the root, outside it, as in PyTorch, which starts n at 0.
    (TensorFlow 1 starts it at 0.1 and has no epsilon.)"""

    kind: ClassVar[str] = "adagrad"
    slots: ClassVar[tuple[str, ...]] = ("n",)

    learning_rate: Rate = 0.01
    initial_accumulator: Weight = 0.1
    epsilon: Epsilon = 1e-10

    def slot_fill(self, slot: str) -> float:
        return self.initial_accumulator

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
        (n,) = out_slots
        np.square(grad, out=n)
        np.add(slots[0], n, out=n)
        np.sqrt(n, out=out_value)
        np.add(out_value, self.epsilon, out=out_value)
        np.divide(grad, out_value, out=out_value)
        descend(value, out_value, rate, out_value)


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta (Zeiler 2012); slots `s` (squared gradients) and `d` (squared steps) start at 0.

        s = decay s + (1 - decay) g^2
        x = sqrt(d + epsilon) / sqrt(s + epsilon) g
        d = decay d + (1 - decay) x^2
        w = w - learning_rate x

    Epsilon is inside both roots; under the upper one it is what makes the first step. The paper has
    no rate: that is a rate of 1, as in PyTorch (TensorFlow's default of 0.001 hardly moves)."""

    kind: ClassVar[str] = "adadelta"
    slots: ClassVar[tuple[str, ...]] = ("s", "d")
    scratch: ClassVar[int] = 1

    learning_rate: Rate = 1.0
    decay: Decay = 0.95
    epsilon: Epsilon = 1e-6

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
        (s, d), (spare,) = out_slots, scratch
        np.square(grad, out=out_value)
        mix(slots[0], out_value, self.decay, s, out_value)
        np.add(slots[1], self.epsilon, out=out_value)
        np.add(s, self.epsilon, out=spare)
        np.divide(out_value, spare, out=out_value)
        np.sqrt(out_value, out=out_value)
        np.multiply(out_value, grad, out=out_value)
        np.square(out_value, out=spare)
        mix(slots[1], spare, self.decay, d, spare)
        descend(value, out_value, rate, out_value)


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp (Tieleman & Hinton 2012); slot `s` starts at initial_square.

        s = decay s + (1 - decay) g^2
        x = g / (sqrt(s) + epsilon)              or, with epsilon_inside, g / sqrt(s + epsilon)
        w = w - learning_rate x

    Epsilon is added to the root, outside it, as in PyTorch; epsilon_inside puts it under the root,
    as TensorFlow has it (and TensorFlow 1 starts s at 1). centered (Graves 2013) keeps the mean
    gradient in slot `c`, from 0, and divides by the root of the variance, which rounding never
    makes negative:

        c = decay c + (1 - decay) g,   and s - c^2 (0 at least) takes the place of s in x

    momentum keeps slot `a`, from 0, in accumulator form, the rate outside:

        a = momentum a + x,   and w = w - learning_rate a

    A slot exists only where its setting does."""

    kind: ClassVar[str] = "rmsprop"
    slots: ClassVar[tuple[str, ...]] = ("s",)

    learning_rate: Rate = 0.001
    decay: Decay = 0.9
    momentum: Decay = 0.0
    epsilon: Epsilon = 1e-8
    centered: bool = False
    epsilon_inside: bool = False
    initial_square: Weight = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # Hides the class's slots, which are those of the default settings.
        slots = ("s",) + ("c",) * self.centered + ("a",) * (self.momentum > 0)
        object.__setattr__(self, "slots", slots)

    def slot_fill(self, slot: str) -> float:
        return self.initial_square if slot == "s" else 0.0

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
        square = out_slots[0]
        np.square(grad, out=out_value)
        mix(slots[0], out_value, self.decay, square, out_value)
        if self.centered:
            mix(slots[1], grad, self.decay, out_slots[1], out_value)
            np.square(out_slots[1], out=out_value)
            np.subtract(square, out_value, out=out_value)
            square = np.maximum(out_value, 0.0, out=out_value)
        if self.epsilon_inside:
            np.add(square, self.epsilon, out=out_value)
            np.sqrt(out_value, out=out_value)
        else:
            np.sqrt(square, out=out_value)
            np.add(out_value, self.epsilon, out=out_value)
        np.divide(grad, out_value, out=out_value)
        if self.momentum:
            np.multiply(slots[-1], self.momentum, out=out_slots[-1])
            np.add(out_slots[-1], out_value, out=out_slots[-1])
            descend(value, out_slots[-1], rate, out_value)
        else:
            descend(value, out_value, rate, out_value)


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """FTRL-Proximal (McMahan et al. 2013), in TensorFlow's convention, learning-rate power -1/2.

        n' = n + g^2
        z  = z + g + 2 l2_shrinkage w - (sqrt(n') - sqrt(n)) / learning_rate w
        w  = (sign(z) l1 - z) / (sqrt(n') / learning_rate + 2 l2)    if |z| > l1, else 0

    Slot `n` starts at initial_accumulator, 0.1 as in TensorFlow; slot `z` at 0. (The paper's L2 has
    no factor 2, its rate is alpha, and it adds beta to the root.) There is no epsilon: where the
    divisor would be 0, so is z, and w is 0. l2_shrinkage pulls like a penalty of the loss, but is
    no part of n. The code takes sqrt(n') - sqrt(n) as g^2 / (sqrt(n') + sqrt(n)), which cancels
    nothing.

    w is a function of z and n alone, so what a variable was initialized to is forgotten with its
    first update, and a rate changed later scales all weights: therefore no schedule is accepted
    (the division by sqrt(n) is one). With l1 = l2 = 0 and w from 0 it is Adagrad."""

    kind: ClassVar[str] = "ftrl"
    slots: ClassVar[tuple[str, ...]] = ("n", "z")
    scratch: ClassVar[int] = 2

    learning_rate: Annotated[
        float, Within(1e-30, 1e30, "a finite number above 0, and no schedule")
    ] = 0.1
    initial_accumulator: Weight = 0.1
    l1: Weight = 0.0
    l2: Weight = 0.0
    l2_shrinkage: Weight = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.l2_shrinkage and not (self.l2 or self.initial_accumulator):
            raise ConfigError(
                "optimizer ftrl: l2_shrinkage divides by 0 before there was a gradient; give l2 or "
                "initial_accumulator above 0 as well"
            )

    def slot_fill(self, slot: str) -> float:
        return self.initial_accumulator if slot == "n" else 0.0

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
        (n, z), (root, spare) = out_slots, scratch
        np.square(grad, out=spare)
        np.add(slots[0], spare, out=n)
        np.sqrt(n, out=root)
        np.sqrt(slots[0], out=out_value)
        np.add(out_value, root, out=out_value)
        np.maximum(out_value, _TINY, out=out_value)
        np.divide(spare, out_value, out=spare)
        np.divide(spare, self.learning_rate, out=spare)
        if self.l2_shrinkage:
            np.subtract(spare, 2.0 * self.l2_shrinkage, out=spare)
        np.multiply(spare, value, out=spare)
        np.add(slots[1], grad, out=z)
        np.subtract(z, spare, out=z)

        np.divide(root, self.learning_rate, out=root)
        if self.l2:
            np.add(root, 2.0 * self.l2, out=root)
        np.maximum(root, _TINY, out=root)
        # z brought to within l1 of 0, less z: 0 where it was there already.
        np.clip(z, -self.l1, self.l1, out=out_value)
        np.subtract(out_value, z, out=out_value)
        np.divide(out_value, root, out=out_value)
