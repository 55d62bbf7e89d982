"""Update rules: how a gradient changes a variable and its slots. No gRPC or threads here.

A rule is a frozen dataclass of settings and one elementwise function over a *block*: it reads the
current arrays, writes spare ones, and keeps nothing. `apply` drives it over arrays of any length in
blocks that stay in the processor's cache; it is the arithmetic of a push (`Shard.feed`). A new rule
is one more dataclass, named in `RULES`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, ClassVar, Self, get_type_hints

import numpy as np
import numpy.typing as npt

from paramserver.errors import ConfigError, InvalidArgumentError

Array = npt.NDArray[np.floating]

#: Elements in a block. All the blocks of one Adam update (float32) fill half of a 2 MiB cache.
BLOCK = 32_768

_CACHE_LINE = 64


@dataclass(frozen=True)
class Within:
    """What a setting may be: a number with low <= number < high. NaN never is."""

    low: float
    high: float
    text: str

    def __contains__(self, number: float) -> bool:
        return self.low <= number < self.high


Rate = Annotated[float, Within(0.0, 1e30, "a finite number, 0 or more")]
Decay = Annotated[float, Within(0.0, 1.0, "at least 0 and below 1")]
#: Never 0, nor 0 once it is float32 and scaled: a zero gradient must not divide 0 by 0.
Epsilon = Annotated[float, Within(1e-30, 1e30, "a finite number, 1e-30 or more")]


@dataclass(frozen=True)
class Optimizer(ABC):
    """An update rule with its settings: a value, safe to share between threads.

    Settings are Python floats (or flags), whatever number they were given as: a NumPy scalar would
    pull float32 arithmetic up to float64. Constructing one raises ConfigError for a setting out of
    its range."""

    #: The rule's name on the wire and on the command line.
    kind: ClassVar[str]
    #: Names of the arrays kept beside a variable, each of its shape and dtype, in `update`'s order.
    slots: ClassVar[tuple[str, ...]] = ()
    #: Scratch blocks that `update` needs.
    scratch: ClassVar[int] = 0

    def __post_init__(self) -> None:
        for name, allowed in _settings(type(self)).items():
            object.__setattr__(self, name, _checked(self.kind, name, getattr(self, name), allowed))

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
        input. Nothing is allocated, nothing blocks."""

    def slot_fill(self, slot: str) -> float:
        """What a slot holds before the first update."""
        return 0.0

    def at(self, step: int) -> Self:
        """The rule with its settings as they are at the granted step number `step`."""
        return self

    def hyper(self) -> dict[str, float]:
        """All settings by name, flags as 0 or 1: the wire form, which `from_hyper` reads."""
        return {field.name: float(getattr(self, field.name)) for field in fields(self)}


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
        np.multiply(grad, self.learning_rate, out=out_value)
        np.subtract(value, out_value, out=out_value)


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
        (a,) = out_slots
        np.multiply(slots[0], self.momentum, out=a)
        np.add(a, grad, out=a)
        if self.nesterov:
            np.multiply(a, self.momentum, out=out_value)
            np.add(grad, out_value, out=out_value)
            np.multiply(out_value, self.learning_rate, out=out_value)
        else:
            np.multiply(a, self.learning_rate, out=out_value)
        np.subtract(value, out_value, out=out_value)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam, as Algorithm 1 of Kingma & Ba (2015) has it; slots `m` and `v` start at 0.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        w = w - learning_rate m^ / (sqrt(v^) + epsilon)
        where m^ = m / (1 - beta1^t), v^ = v / (1 - beta2^t)

    Epsilon is added to the root of the corrected v^, outside it. (The paper's faster "epsilon hat"
    form adds it to sqrt(v) instead, as TensorFlow does; a large epsilon tells the two apart.) The
    slots hold the uncorrected moments. The code expands the fraction by r = sqrt(1 - beta2^t), the
    same number for one pass less: m^ / (sqrt(v^) + epsilon) = m^ r / (sqrt(v) + epsilon r)."""

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
        m, v = out_slots
        root = math.sqrt(1.0 - self.beta2**t)
        step = self.learning_rate * root / (1.0 - self.beta1**t)

        np.multiply(slots[1], self.beta2, out=v)
        np.square(grad, out=out_value)
        np.multiply(out_value, 1.0 - self.beta2, out=out_value)
        np.add(v, out_value, out=v)

        np.multiply(grad, 1.0 - self.beta1, out=out_value)
        np.multiply(slots[0], self.beta1, out=m)
        np.add(m, out_value, out=m)

        np.sqrt(v, out=out_value)
        np.add(out_value, self.epsilon * root, out=out_value)
        np.divide(m, out_value, out=out_value)
        np.multiply(out_value, step, out=out_value)
        np.subtract(value, out_value, out=out_value)


#: Every rule by its kind: what the wire and the command line may name.
RULES: Mapping[str, type[Optimizer]] = {rule.kind: rule for rule in (SGD, Momentum, Adam)}


def from_hyper(kind: str, hyper: Mapping[str, float]) -> Optimizer:
    """The rule of this kind with these settings; what `hyper` leaves out keeps its default.

    Raises: ConfigError for an unknown kind or setting (listing the known ones) or a value out of
    its range."""
    rule = RULES.get(kind)
    if rule is None:
        raise ConfigError(
            f"unknown optimizer {kind[:80]!r}; choose one of {', '.join(sorted(RULES))}"
        )
    known = _settings(rule)
    for name in hyper:
        if name not in known:
            raise ConfigError(
                f"optimizer {kind} has no setting {name[:80]!r}; it has {', '.join(known)}"
            )
    return rule(**hyper)


def from_name(name: str, **settings: float | None) -> Optimizer:
    """`from_hyper` for a command line: `from_name("adam", learning_rate=0.01)`.

    Case does not matter, and a setting that is None was not given. Raises: ConfigError."""
    return from_hyper(name.lower(), {k: v for k, v in settings.items() if v is not None})


class Scratch:
    """Block buffers of one dtype, allocated once and used again. One thread at a time."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self._blocks: list[Array] = []

    def blocks(self, count: int, size: int) -> list[Array]:
        """`count` different `(size,)` arrays, size <= BLOCK; the next call hands out the same."""
        while len(self._blocks) < count:
            raw = np.empty(BLOCK * self.dtype.itemsize + _CACHE_LINE, np.uint8)
            start = -raw.ctypes.data % _CACHE_LINE
            self._blocks.append(raw[start : start + BLOCK * self.dtype.itemsize].view(self.dtype))
        return [block[:size] for block in self._blocks[:count]]


def apply(
    rule: Optimizer,
    t: int,
    grads: Sequence[Array],
    value: Array,
    slots: Sequence[Array],
    out_value: Array,
    out_slots: Sequence[Array],
    scratch: Scratch,
    weights: Sequence[float] | None = None,
) -> None:
    """Writes the t-th update (t counts from 1) of `value` and `slots` to the out arrays.

    All arrays are `(n,)` of one dtype, n >= 0. With several gradients the rule is applied once, to
    their mean (see `mean_into`); a single one is used where it lies. It goes block by block, and
    where arrays are cut into pieces makes no difference, to the last bit. Inputs are never written;
    no out array may share memory with an input or another. Overflow is silent, whatever `np.seterr`
    and the warning filters say: check for finite numbers before or after. Allocates only what
    `scratch` lacks. Does not block; as thread-safe as its arrays and `scratch`.

    Raises: InvalidArgumentError, before anything is written."""
    t = int(t)
    if t < 1:
        raise InvalidArgumentError(f"update number {t}: updates are counted from 1")
    _check_arrays(rule, grads, value, slots, out_value, out_slots, scratch)
    weights = _checked_weights(len(grads), weights)
    spare = rule.scratch if len(grads) == 1 else rule.scratch + 2
    with np.errstate(all="ignore"):
        for start in range(0, value.size, BLOCK):
            part = slice(start, min(start + BLOCK, value.size))
            blocks = scratch.blocks(spare, part.stop - start)
            grad = grads[0][part]
            if len(grads) > 1:
                grad, term = blocks[rule.scratch :]
                mean_into([g[part] for g in grads], grad, term, weights)
            rule.update(
                t,
                grad,
                value[part],
                [slot[part] for slot in slots],
                out_value[part],
                [slot[part] for slot in out_slots],
                blocks[: rule.scratch],
            )


def mean_into(
    grads: Sequence[Array], out: Array, term: Array, weights: Sequence[float] | None = None
) -> None:
    """Writes the mean of one block of gradients to `out`: (g0 + g1 + ...) / n.

    The sum is taken in the order given, then divided once and correctly rounded: equal gradients of
    small integers have exactly that mean, for every n. (For a power of two it multiplies: the same
    bits, faster.) With weights it is (w0 g0 + w1 g1 + ...) / (w0 + w1 + ...), and equal
    weights are as good as none. `term` is scratch; all arrays are `(n,)` of one dtype, and neither
    `out` nor `term` shares memory with another.

    Raises: InvalidArgumentError for weights that have no mean."""
    weights = _checked_weights(len(grads), weights)
    if weights is None:
        total = float(len(grads))
        if len(grads) == 1:
            np.copyto(out, grads[0])
        else:
            np.add(grads[0], grads[1], out=out)
        for grad in grads[2:]:
            np.add(out, grad, out=out)
    else:
        total = sum(weights)
        np.multiply(grads[0], weights[0], out=out)
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            np.multiply(grad, weight, out=term)
            np.add(out, term, out=out)
    if total >= 1.0 and math.frexp(total)[0] == 0.5:
        np.multiply(out, 1.0 / total, out=out)
    else:
        np.divide(out, total, out=out)


def new_slots(rule: Optimizer, value: Array) -> tuple[Array, ...]:
    """Fresh slots for a variable, of its shape and dtype, as they are before its first update."""
    return tuple(np.full_like(value, rule.slot_fill(slot)) for slot in rule.slots)


def step(
    rule: Optimizer, t: int, grad: Array, value: Array, slots: Sequence[Array]
) -> tuple[Array, tuple[Array, ...]]:
    """One update of arrays of any shape, for tests and notebooks: (new value, new slots).

    The arrays returned are the caller's. Raises: InvalidArgumentError."""
    if any(array.shape != value.shape for array in (grad, *slots)):
        shapes = [array.shape for array in (grad, *slots)]
        raise InvalidArgumentError(f"gradient and slots have shapes {shapes}, value {value.shape}")
    out, *out_slots = (np.empty(value.shape, value.dtype) for _ in range(1 + len(slots)))
    apply(
        rule,
        t,
        [grad.reshape(-1)],
        value.reshape(-1),
        [slot.reshape(-1) for slot in slots],
        out.reshape(-1),
        [slot.reshape(-1) for slot in out_slots],
        Scratch(value.dtype),
    )
    return out, tuple(out_slots)


@cache
def _settings(rule: type[Optimizer]) -> Mapping[str, Within | None]:
    """The settings of a rule and what each may be; None for a flag."""
    hints = get_type_hints(rule, include_extras=True)
    return {
        field.name: None if hints[field.name] is bool else hints[field.name].__metadata__[0]
        for field in fields(rule)
    }


def _checked(kind: str, name: str, given: Any, allowed: Within | None) -> float | bool:
    try:
        number = math.nan if isinstance(given, str) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if allowed is None and number in (0.0, 1.0):
        return bool(number)
    if allowed is not None and number in allowed:
        return number
    text = allowed.text if allowed else "0 or 1"
    raise ConfigError(f"optimizer {kind}: {name} is {given!r}; it must be {text}")


def _checked_weights(count: int, weights: Sequence[float] | None) -> list[float] | None:
    if not count:
        raise InvalidArgumentError("no gradient to apply; give one at least")
    if weights is None:
        return None
    numbers = [float(weight) for weight in weights]
    if len(numbers) != count:
        raise InvalidArgumentError(f"{len(numbers)} weights for {count} gradients; give one each")
    if not all(0.0 <= number < math.inf for number in numbers) or not 0.0 < sum(numbers) < math.inf:
        raise InvalidArgumentError(
            f"weights {numbers}: each must be finite and 0 or more, one above 0"
        )
    return None if min(numbers) == max(numbers) else numbers


def _check_arrays(
    rule: Optimizer,
    grads: Sequence[Array],
    value: Array,
    slots: Sequence[Array],
    out_value: Array,
    out_slots: Sequence[Array],
    scratch: Scratch,
) -> None:
    """Refuses what NumPy would broadcast or convert without a word."""
    if len(slots) != len(rule.slots) or len(out_slots) != len(rule.slots):
        raise InvalidArgumentError(
            f"optimizer {rule.kind} has {len(rule.slots)} slots; "
            f"{len(slots)} are given in and {len(out_slots)} out"
        )
    if value.ndim != 1 or scratch.dtype != value.dtype:
        raise InvalidArgumentError(
            f"value has {value.ndim} axes of {value.dtype}; "
            f"it must have one, of scratch's {scratch.dtype}"
        )
    for array in (*grads, *slots, out_value, *out_slots):
        if array.shape != value.shape or array.dtype != value.dtype:
            raise InvalidArgumentError(
                f"{array.dtype} array of shape {array.shape} beside "
                f"{value.dtype} value of shape {value.shape}; they must agree"
            )
