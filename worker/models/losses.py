"""What a prediction costs, and the slope of that cost. No parameters here.

Both take the predictions as an array that is the caller's own and write into it: the slope comes
back in the same memory, so that a step makes no copy it does not need.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.layout import Array


def squared_error(prediction: Array, y: npt.NDArray[Any]) -> tuple[float, Array]:
    """Mean of (prediction - y)^2 over (rows,), and its slope 2 (prediction - y) / rows.

    Overwrites `prediction` with the slope."""
    slope = np.subtract(prediction, y, out=prediction)
    loss = float(slope @ slope) / len(y)
    slope *= 2 / len(y)
    return loss, slope


def cross_entropy(logits: Array, labels: npt.NDArray[Any]) -> tuple[float, Array]:
    """Mean of -log softmax(logits)[label] over (rows, classes), and its slope in the logits.

    Overwrites `logits` with the slope (softmax - one-hot) / rows. Large logits do not overflow."""
    rows = len(logits)
    own = np.arange(rows), labels
    logits -= np.maximum.reduce(logits, axis=1, keepdims=True)
    chosen = logits[own]
    slope = np.exp(logits, out=logits)
    sums = np.add.reduce(slope, axis=1, keepdims=True)
    loss = float(np.add.reduce(np.log(sums), axis=None) - np.add.reduce(chosen)) / rows
    sums *= rows
    slope /= sums
    slope[own] -= 1 / rows
    return loss, slope


def r2(prediction: Array, y: npt.NDArray[Any]) -> float:
    """The share of the variance of y (rows,) that the prediction explains; 0 if y is constant."""
    variance = float(np.var(y, dtype=np.float64))
    wrong = float(np.mean(np.square(prediction - y, dtype=np.float64)))
    return 1 - wrong / variance if variance else 0.0
