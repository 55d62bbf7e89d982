"""A linear regression: prediction = x @ weight + bias."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from paramserver.errors import ConfigError
from paramserver.layout import Array
from worker.data import Batch, DataSpec
from worker.models.losses import r2, squared_error


class Linear:
    """Variables `weight` (features,) and `bias` (). Loss: the mean squared error."""

    def __init__(self, spec: DataSpec, dtype: npt.DTypeLike = np.float32) -> None:
        """Raises: ConfigError if the data has classes."""
        if spec.classes is not None:
            raise ConfigError(
                "model 'linear' is a regression and the data has classes; choose softmax or mlp"
            )
        self._features, self._dtype = spec.features, np.dtype(dtype)

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """Zeros: the loss is convex, so every start ends at the same place."""
        return {"weight": np.zeros(self._features, self._dtype), "bias": np.zeros((), self._dtype)}

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        """The mean squared error and its gradients."""
        x = np.asarray(batch.x, params["weight"].dtype)
        loss, slope = squared_error(self._predict(params, x), batch.y)
        return loss, {"weight": slope @ x, "bias": np.asarray(np.add.reduce(slope))}

    def evaluate(self, params: Mapping[str, Array], batch: Batch) -> dict[str, float]:
        """`loss`, and `r2`, the share of the variance explained."""
        prediction = self._predict(params, np.asarray(batch.x, params["weight"].dtype))
        explained = r2(prediction, batch.y)
        return {"loss": squared_error(prediction, batch.y)[0], "r2": explained}

    def _predict(self, params: Mapping[str, Array], x: Array) -> Array:
        prediction: Array = x @ params["weight"]
        prediction += params["bias"]
        return prediction
