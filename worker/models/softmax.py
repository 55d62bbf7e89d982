"""A linear classifier: class probabilities = softmax(x @ weight + bias)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paramserver.errors import ConfigError
from paramserver.layout import Array
from worker.data import Batch, DataSpec
from worker.models.losses import cross_entropy


class Softmax:
    """Variables `weight` (features, classes) and `bias` (classes,). Loss: mean cross-entropy."""

    def __init__(self, spec: DataSpec, dtype: npt.DTypeLike = np.float32) -> None:
        """Raises: ConfigError if the data has no classes."""
        if spec.classes is None:
            raise ConfigError(
                "model 'softmax' needs classes and the data is a regression; choose linear or mlp"
            )
        self._shape, self._dtype = (spec.features, spec.classes), np.dtype(dtype)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Zeros: the loss is convex, so every start ends at the same place."""
        return {
            "weight": np.zeros(self._shape, self._dtype),
            "bias": np.zeros(self._shape[1], self._dtype),
        }

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        """The mean cross-entropy and its gradients."""
        x = np.asarray(batch.x, params["weight"].dtype)
        loss, slope = cross_entropy(self._logits(params, x), batch.y)
        return loss, {"weight": x.T @ slope, "bias": np.add.reduce(slope, axis=0)}

    def evaluate(self, params: Mapping[str, Array], batch: Batch) -> dict[str, float]:
        """`loss`, and `accuracy`, the share of rows whose likeliest class is their own."""
        logits = self._logits(params, np.asarray(batch.x, params["weight"].dtype))
        accuracy = float(np.mean(logits.argmax(axis=1) == batch.y))
        return {"loss": cross_entropy(logits, batch.y)[0], "accuracy": accuracy}

    def _logits(self, params: Mapping[str, Array], x: Array) -> Array:
        logits: Array = x @ params["weight"]
        logits += params["bias"]
        return logits
