"""Models: gradients against finite differences, training against known answers, and bad names."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paramserver.errors import ConfigError
from paramserver.layout import Array
from worker.data import Batch, Batches, Dataset, DataSpec, least_squares, load_data
from worker.models import MLP, MODELS, Evaluates, Linear, Model, Softmax, evaluate, load_model
from worker.models.losses import cross_entropy, r2

REGRESSION, CLASSES = DataSpec(5), DataSpec(5, 3)

CASES: dict[str, tuple[Callable[..., Any], DataSpec]] = {
    "linear": (Linear, REGRESSION),
    "softmax": (Softmax, CLASSES),
    "mlp": (lambda spec, dtype: MLP(spec, 7, dtype), CLASSES),
    "mlp-regression": (lambda spec, dtype: MLP(spec, 7, dtype), REGRESSION),
}


def some_batch(spec: DataSpec, rows: int = 6) -> Batch:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((rows, spec.features)).astype(np.float32)
    if spec.classes is None:
        return Batch(x, rng.standard_normal(rows).astype(np.float32))
    return Batch(x, rng.integers(spec.classes, size=rows).astype(np.intp))


def some_params(model: Model) -> dict[str, Array]:
    """Read-only, as they come from a pull, and nowhere zero."""
    rng = np.random.default_rng(4)
    params = model.init(rng)
    for name, value in params.items():
        params[name] = value + rng.standard_normal(value.shape).astype(value.dtype)
        params[name] = np.asarray(params[name])
        params[name].flags.writeable = False
    return params


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_the_slopes_of_the_loss(case: str) -> None:
    make, spec = CASES[case]
    model, batch = make(spec, dtype=np.float64), some_batch(spec)
    params = some_params(model)
    _, grads = model.loss_and_grads(params, batch)
    step = 1e-6
    for name, value in params.items():
        slopes = np.empty(value.shape)
        for at in np.ndindex(value.shape):
            losses = []
            for sign in (1, -1):
                moved = value.copy()
                moved[at] += sign * step
                losses.append(model.loss_and_grads({**params, name: moved}, batch)[0])
            slopes[at] = (losses[0] - losses[1]) / (2 * step)
        np.testing.assert_allclose(grads[name], slopes, rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("case", CASES)
def test_gradients_look_like_their_variables(case: str, dtype: type[np.floating]) -> None:
    make, spec = CASES[case]
    model, batch = make(spec, dtype=dtype), some_batch(spec)
    params = some_params(model)
    loss, grads = model.loss_and_grads(params, batch)
    assert type(loss) is float
    assert list(grads) == list(params)
    for name, value in params.items():
        assert isinstance(grads[name], np.ndarray)
        assert (grads[name].shape, grads[name].dtype) == (value.shape, np.dtype(dtype))
        assert not np.shares_memory(grads[name], value)
    again = model.loss_and_grads(params, some_batch(spec))[1]
    for name, value in grads.items():
        assert np.array_equal(again[name], value)


@pytest.mark.parametrize("case", CASES)
def test_evaluate_agrees_with_the_loss_and_writes_nothing(case: str) -> None:
    make, spec = CASES[case]
    model, batch = make(spec, dtype=np.float32), some_batch(spec)
    params = some_params(model)
    for array in (batch.x, batch.y):
        array.flags.writeable = False
    metrics = evaluate(model, params, batch)
    assert isinstance(model, Evaluates)
    assert set(metrics) == {"loss", "r2" if spec.classes is None else "accuracy"}
    assert metrics["loss"] == pytest.approx(model.loss_and_grads(params, batch)[0], rel=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_init_follows_the_generator_alone(case: str) -> None:
    make, spec = CASES[case]
    model = make(spec, dtype=np.float32)
    first, same = (model.init(np.random.default_rng(1)) for _ in range(2))
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert all(value.dtype == np.float32 for value in first.values())


def test_losses_by_hand() -> None:
    linear = Linear(DataSpec(1))
    params = {"weight": np.array([2], np.float32), "bias": np.array(1, np.float32)}
    batch = Batch(np.array([[1.0], [2.0]], np.float32), np.array([2.0, 5.0], np.float32))
    loss, grads = linear.loss_and_grads(params, batch)
    assert loss == 0.5
    assert grads["weight"].tolist() == [1.0]
    assert grads["bias"] == 1.0
    assert linear.evaluate(params, batch) == {"loss": 0.5, "r2": pytest.approx(1 - 0.5 / 2.25)}
    assert cross_entropy(np.zeros((2, 4)), np.array([0, 3]))[0] == pytest.approx(np.log(4))


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    loss, slope = cross_entropy(np.array([[1e4, -1e4], [0, 1e30]], np.float32), np.array([1, 1]))
    assert loss == pytest.approx(1e4)
    assert slope.tolist() == [[0.5, -0.5], [0, 0]]


def test_r2_of_a_constant_target_is_zero() -> None:
    assert r2(np.array([1.0, 2.0]), np.array([3.0, 3.0])) == 0


# --- training


def train(
    data: Dataset, model: Model, rate: float, steps: int, batch_size: int, workers: int = 1
) -> tuple[dict[str, Array], list[float]]:
    """Plain SGD on the average gradient of `workers`, as a sync round does it."""
    parts = [Batches(data, batch_size, 0, index, workers) for index in range(workers)]
    params = model.init(np.random.default_rng(0))
    losses = []
    for clock in range(steps):
        done = [model.loss_and_grads(params, batches.batch(clock)) for batches in parts]
        losses.append(sum(loss for loss, _ in done) / workers)
        for name, value in params.items():
            mean = sum(grads[name] for _, grads in done) / workers
            params[name] = np.asarray(value - rate * mean, value.dtype)
    return params, losses


@pytest.mark.parametrize("case", CASES)
def test_the_loss_falls(case: str) -> None:
    make, spec = CASES[case]
    batch = some_batch(spec, rows=40)
    data = Dataset("some", spec, batch, batch)
    _, losses = train(data, make(spec, dtype=np.float32), 0.05, 60, batch_size=40)
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < 0.95 * losses[0]


def test_line_is_learned_with_the_defaults() -> None:
    params, _ = train(load_data(), Linear(DataSpec(1)), 0.1, 200, batch_size=32)
    assert params["weight"] == pytest.approx([2], abs=0.05)
    assert params["bias"] == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("workers", [1, 2])
def test_diabetes_comes_to_the_exact_answer(workers: int) -> None:
    pytest.importorskip("sklearn")
    data = load_data("diabetes")
    model, exact = load_model("linear", data.spec), least_squares(data)
    params, _ = train(data, model, 0.1, 100, batch_size=353, workers=workers)
    assert evaluate(model, params, data.test)["r2"] == pytest.approx(exact.r2, abs=0.001)
    assert params["weight"] == pytest.approx(exact.weight, abs=0.01)
    params, _ = train(data, model, 0.05, 200, batch_size=64, workers=workers)
    assert evaluate(model, params, data.test)["r2"] == pytest.approx(exact.r2, abs=0.01)


@pytest.mark.parametrize(
    ("name", "steps", "accuracy"), [("softmax", 600, 0.96), ("mlp", 400, 0.96)]
)
def test_digits_are_told_apart(name: str, steps: int, accuracy: float) -> None:
    pytest.importorskip("sklearn")
    data = load_data("digits")
    model = load_model(name, data.spec)
    params, _ = train(data, model, 0.1, steps, batch_size=64)
    assert evaluate(model, params, data.test)["accuracy"] >= accuracy


# --- names


OWN = """
class Counting:
    def __init__(self, spec):
        self.spec = spec
    def init(self, rng):
        return {}
    def loss_and_grads(self, params, batch):
        return 0.5, {}

def function(spec):
    return Counting(spec)

class CallableModel(Counting):
    def __call__(self, x):
        raise AssertionError("a model is not a maker")

ready = Counting(None)
ready_callable = CallableModel(None)
number = 7

class NoGrads:
    def __init__(self, spec): ...
    def init(self, rng): ...

class NoArguments(Counting):
    def __init__(self): ...

def buggy(spec):
    return len(spec)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import own_needs_this")
    (tmp_path / "own_old.py").write_text("from math import own_new_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("attribute", ["Counting", "function", "ready", "ready_callable"])
def test_a_model_of_your_own(attribute: str) -> None:
    model = load_model(f"own_models:{attribute}", REGRESSION)
    assert isinstance(model, Model)
    assert not isinstance(model, Evaluates)
    assert evaluate(model, {}, some_batch(REGRESSION)) == {"loss": 0.5}
    if attribute in ("Counting", "function"):
        assert getattr(model, "spec", None) == REGRESSION


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "liner",
            "'liner' is not known; choose 'linear', 'softmax', 'mlp' or package.module:Attri",
        ),
        ("own_models:", "not of the form package.module:Attribute"),
        (":ready", "not of the form package.module:Attribute"),
        ("own_models:len('x')", "not of the form package.module:Attribute"),
        ("own_absent:Net", "there is no module 'own_absent'"),
        ("own_absent.deep:Net", "there is no module 'own_absent'"),
        ("own_models.deep:Net", "there is no module 'own_models.deep'"),
        ("own_broken:Net", "importing 'own_broken' failed: No module named 'own_needs_this'"),
        ("own_old:Net", "importing 'own_old' failed: cannot import name 'own_new_name'"),
        ("own_models:Absent", "module 'own_models' has no 'Absent'; it has 'Counting'"),
        ("own_models:number", "object of type int without the method init and loss_and_grads"),
        (
            "own_models:NoGrads",
            "gives an object of type NoGrads without the method loss_and_grads; a Model has",
        ),
        ("own_models:NoArguments", "must take one argument, the DataSpec: too many positional"),
    ],
)
def test_a_name_that_gives_no_model(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--model .*{message}") as caught:
        load_model(name, REGRESSION)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("own")
def test_a_fault_inside_your_code_is_not_blamed_on_the_name() -> None:
    with pytest.raises(TypeError, match="has no len"):
        load_model("own_models:buggy", REGRESSION)


def test_a_model_that_does_not_suit_the_data() -> None:
    with pytest.raises(ConfigError, match=r"'linear' is a regression .* choose softmax or mlp"):
        load_model("linear", CLASSES)
    with pytest.raises(ConfigError, match=r"'softmax' needs classes .* choose linear or mlp"):
        load_model("softmax", REGRESSION)


def test_every_built_in_model_is_one() -> None:
    specs: Mapping[str, DataSpec] = {"linear": REGRESSION, "softmax": CLASSES, "mlp": CLASSES}
    assert set(specs) == set(MODELS)
    for name, spec in specs.items():
        model = load_model(name, spec)
        assert isinstance(model, Model)
        assert isinstance(model, Evaluates)
