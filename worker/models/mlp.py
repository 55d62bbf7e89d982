"""A network with one hidden layer: relu(x @ W1 + b1) @ W2 + b2, a classifier or a regression."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paramserver.layout import Array
from worker.data import Batch, DataSpec
from worker.models.losses import cross_entropy, r2, squared_error


class MLP:
    """Variables `hidden/weight` (features, hidden), `hidden/bias` (hidden,),
    `output/weight` (hidden, outputs) and `output/bias` (outputs,).

    With classes: an output a class, mean cross-entropy. Without: one output, mean squared error."""

    def __init__(
        self, spec: DataSpec, hidden: int = 128, dtype: npt.DTypeLike = np.float32
    ) -> None:
        self._sizes = (spec.features, hidden, spec.classes or 1)
        self._classifies = spec.classes is not None
        self._dtype = np.dtype(dtype)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Normal weights that keep the deviation of a layer's input (He), and zero biases."""
        features, hidden, outputs = self._sizes

        def weights(rows: int, columns: int, gain: float) -> Array:
            values = rng.standard_normal((rows, columns)) * np.sqrt(gain / rows)
            return np.asarray(values, self._dtype)

        return {
            "hidden/weight": weights(features, hidden, 2),
            "hidden/bias": np.zeros(hidden, self._dtype),
            "output/weight": weights(hidden, outputs, 1),
            "output/bias": np.zeros(outputs, self._dtype),
        }

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        """The mean loss and its gradients."""
        x = np.asarray(batch.x, params["hidden/weight"].dtype)
        hidden, output = self._forward(params, x)
        loss, slope = self._loss(output, batch.y)
        back: Array = slope @ params["output/weight"].T
        back *= hidden > 0
        return loss, {
            "hidden/weight": x.T @ back,
            "hidden/bias": np.add.reduce(back, axis=0),
            "output/weight": hidden.T @ slope,
            "output/bias": np.add.reduce(slope, axis=0),
        }

    def evaluate(self, params: Mapping[str, Array], batch: Batch) -> dict[str, float]:
        """`loss`, and `accuracy` of a classifier or `r2` of a regression."""
        output = self._forward(params, np.asarray(batch.x, params["hidden/weight"].dtype))[1]
        if self._classifies:
            quality = {"accuracy": float(np.mean(output.argmax(axis=1) == batch.y))}
        else:
            quality = {"r2": r2(output[:, 0], batch.y)}
        return {"loss": self._loss(output, batch.y)[0], **quality}

    def _forward(self, params: Mapping[str, Array], x: Array) -> tuple[Array, Array]:
        """The hidden layer (rows, hidden) and the output (rows, outputs), both fresh."""
        hidden: Array = x @ params["hidden/weight"]
        hidden += params["hidden/bias"]
        np.maximum(hidden, 0, out=hidden)
        output: Array = hidden @ params["output/weight"]
        output += params["output/bias"]
        return hidden, output

    def _loss(self, output: Array, y: npt.NDArray[np.generic]) -> tuple[float, Array]:
        """The loss and its slope in the output (rows, outputs), which it overwrites."""
        if self._classifies:
            return cross_entropy(output, y)
        loss, slope = squared_error(output[:, 0], y)
        return loss, slope[:, np.newaxis]
