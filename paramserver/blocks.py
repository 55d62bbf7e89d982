"""Drives a rule over arrays of any length, block by block. No gRPC or threads here.

A block is small enough to stay in the processor's cache while a rule passes over it several times.
`apply` is the arithmetic of a push (`Update.apply`); several gradients are averaged on the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.errors import InvalidArgumentError
from paramserver.rule import Array, Optimizer

#: Elements in a block. All the blocks of one Adam update (float32) fill half of a 2 MiB cache.
BLOCK = 32_768

_CACHE_LINE = 64


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
