"""What a worker can train: the `Model` protocol, the built-in models, and how a flag names one.

No gRPC here. A model holds no parameters: they come with each call and go back as gradients, so one
model serves any number of workers. Gradients are written by hand in NumPy; a model of yours may get
them from anywhere, as long as they arrive as arrays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from paramserver.errors import ConfigError
from paramserver.layout import Array, some
from worker.data import Batch, DataSpec, call, find
from worker.models.linear import Linear
from worker.models.mlp import MLP
from worker.models.softmax import Softmax

__all__ = [
    "DEFAULT_MODEL",
    "MLP",
    "MODELS",
    "Evaluates",
    "Linear",
    "Model",
    "Softmax",
    "evaluate",
    "load_model",
]

DEFAULT_MODEL = "linear"


@runtime_checkable
class Model(Protocol):
    """What a model is. Both methods are pure: the same arguments give the same answer.

    A model may also have `evaluate` (see `Evaluates`)."""

    def init(self, rng: np.random.Generator) -> dict[str, Array]:
        """The variables at the start: name -> fresh array, float32 or float64. `rng` is the only
        source of chance. Called once for a job, by the chief."""
        ...

    def loss_and_grads(
        self, params: Mapping[str, Array], batch: Batch
    ) -> tuple[float, dict[str, Array]]:
        """The mean loss over the batch, and for every variable its gradient: same name, shape and
        dtype, a fresh array. `params` are read-only and must not be kept."""
        ...


@runtime_checkable
class Evaluates(Model, Protocol):
    """A model that knows more about its quality than the loss."""

    def evaluate(self, params: Mapping[str, Array], batch: Batch) -> dict[str, float]:
        """Metric name -> value over the batch, often the whole test set."""
        ...


MODELS: dict[str, Callable[[DataSpec], Model]] = {"linear": Linear, "softmax": Softmax, "mlp": MLP}


def load_model(name: str, spec: DataSpec) -> Model:
    """The model that `name` names: a built-in one, or `package.module:Attribute`.

    The attribute is a Model, or a callable (a class, a function) (spec) -> Model; it is imported,
    never evaluated.

    Raises: ConfigError that says what is wrong with the name, the object, or the data for it."""
    if ":" not in name:
        if name not in MODELS:
            raise ConfigError(
                f"--model {name!r} is not known; choose {some(MODELS)} or package.module:Attribute"
            )
        return MODELS[name](spec)
    model = find(name, "--model")
    what = f"--model {name!r}"
    # A class has a model's methods without being one; an object that has them is not called.
    if inspect.isclass(model) or (callable(model) and not isinstance(model, Model)):
        model = call(model, spec, what, "the DataSpec")
    methods = ("init", "loss_and_grads")
    missing = [method for method in methods if not callable(getattr(model, method, None))]
    if missing:
        raise ConfigError(
            f"{what} gives an object of type {type(model).__name__} without the method "
            f"{' and '.join(missing)}; a Model has init(rng) and loss_and_grads(params, batch)"
        )
    checked: Model = model
    return checked


def evaluate(model: Model, params: Mapping[str, Array], batch: Batch) -> dict[str, float]:
    """The model's metrics over a batch; of a model without `evaluate`, its `loss` alone."""
    if isinstance(model, Evaluates):
        return model.evaluate(params, batch)
    return {"loss": model.loss_and_grads(params, batch)[0]}
