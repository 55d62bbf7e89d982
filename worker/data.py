"""What a worker learns from: data sets, each worker's part of one, and its batches. No gRPC here.

A batch is a pure function of (seed, index, clock): a worker that starts again at a clock reads on
exactly where that clock was, and no position needs saving.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.errors import ConfigError
from paramserver.layout import some

#: One row id per row.
Ids = npt.NDArray[np.intp]

DEFAULT_DATA = "line"


@dataclass(frozen=True)
class DataSpec:
    """What a model must know of the data: `features` columns, `classes` (None: a regression)."""

    features: int
    classes: int | None = None


@dataclass(frozen=True, eq=False)
class Batch:
    """Some rows: x (rows, features) float32; y (rows,), float32 targets or intp labels.

    `ids` (rows,) says which rows of the training set they are (None: not drawn from one)."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    ids: Ids | None = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set and a test set of one kind. The arrays are shared, never written.

    Raises: ConfigError for a set without rows, or one that `spec` does not describe."""

    name: str
    spec: DataSpec
    train: Batch
    test: Batch

    def __post_init__(self) -> None:
        for part, rows in (("training", self.train), ("test", self.test)):
            where = f"the {part} set of data {self.name!r}"
            if not len(rows.y) or not len(rows.x):
                raise ConfigError(f"{where} is empty; nothing can be learned from it")
            wanted = (len(rows.y), self.spec.features)
            if rows.x.shape != wanted or rows.y.ndim != 1:
                raise ConfigError(
                    f"{where} has x {rows.x.shape} and y {rows.y.shape}; "
                    f"its spec asks for x {wanted} and y {wanted[:1]}"
                )
            bad = ~(np.isfinite(rows.x).all(axis=1) & np.isfinite(rows.y))
            if bad.any():
                raise ConfigError(f"{where} is not finite in row {int(bad.argmax())}")
            if (classes := self.spec.classes) is not None:
                self._check_labels(where, rows.y, classes)

    def _check_labels(self, where: str, y: npt.NDArray[Any], classes: int) -> None:
        if y.dtype.kind not in "iu":
            raise ConfigError(f"{where} has labels of {y.dtype}; they must be integers")
        wrong = (y < 0) | (y >= classes)
        if wrong.any():
            row = int(wrong.argmax())
            raise ConfigError(
                f"{where} has label {y[row]} in row {row}; classes are 0..{classes - 1}"
            )


def load_data(name: str = DEFAULT_DATA, seed: int = 0) -> Dataset:
    """Loads a data set: a built-in name, or `package.module:Attribute`.

    The attribute is a Dataset, or a callable (seed) -> Dataset; it is imported, never evaluated.
    `seed` decides the split (and the noise of `line`), so every worker of a job must give the same;
    with 0 `diabetes` and `digits` are split like the published reference results.

    Raises: ConfigError if there is no such data, or a package it needs is missing."""
    check_seed(seed)
    if ":" not in name:
        if name not in DATASETS:
            raise ConfigError(
                f"--data {name!r} is not known; choose {some(DATASETS)} or package.module:Attribute"
            )
        return DATASETS[name](seed)
    found = find(name, "--data")
    dataset = call(found, seed, f"--data {name!r}", "the seed") if callable(found) else found
    if not isinstance(dataset, Dataset):
        raise ConfigError(
            f"--data {name!r} gives an object of type {type(dataset).__name__}; "
            "it must be a worker.data.Dataset"
        )
    return dataset


def line(seed: int = 0) -> Dataset:
    """y = 2 x + noise (standard deviation 0.1), x in [-1, 1]: 100 rows to train on, 50 to test."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (150, 1))
    y = 2 * x[:, 0] + rng.normal(0, 0.1, 150)
    order = np.arange(150)
    return Dataset("line", DataSpec(1), *(_rows(x, y, ids) for ids in (order[:100], order[100:])))


def diabetes(seed: int = 0) -> Dataset:
    """Disease progression from 10 measurements: 353 rows to train on, 89 to test.

    Features and target are standardised with the training rows. The features are so correlated
    that plain SGD would need thousands of steps, so each also has taken out of it what those before
    it tell. The exact fit predicts the same as before, a loss of 1 is what the mean alone would
    score, and R2 is the same in any unit."""
    raw = _sklearn("diabetes").load_diabetes()
    train, test = _split(len(raw.target), seed)
    x = _decorrelate(raw.data, raw.data[train])
    known = raw.target[train]
    y = (raw.target - known.mean()) / known.std()
    return Dataset("diabetes", DataSpec(x.shape[1]), _rows(x, y, train), _rows(x, y, test))


def digits(seed: int = 0) -> Dataset:
    """Handwritten digits of 8 x 8 pixels, 10 classes: 1437 rows to train on, 360 to test.

    Pixels are shifted and scaled together, by the mean and deviation of all training pixels."""
    raw = _sklearn("digits").load_digits()
    train, test = _split(len(raw.target), seed)
    pixels = raw.data[train].ravel()
    x = (raw.data - pixels.mean()) / pixels.std()
    y = raw.target.astype(np.intp)
    return Dataset("digits", DataSpec(x.shape[1], 10), _rows(x, y, train), _rows(x, y, test))


DATASETS: dict[str, Callable[[int], Dataset]] = {
    "line": line,
    "diabetes": diabetes,
    "digits": digits,
}


@dataclass(frozen=True, eq=False)
class LeastSquares:
    """The exact linear fit of a training set, and how it does on the test set."""

    weight: npt.NDArray[np.float64]
    bias: float
    loss: float
    r2: float


def least_squares(dataset: Dataset) -> LeastSquares:
    """Solves a regression exactly, in float64: what a trained `linear` should come close to.

    Raises: ConfigError if the data has classes."""
    if dataset.spec.classes is not None:
        raise ConfigError(f"data {dataset.name!r} has classes; least squares needs a regression")

    def table(x: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        return np.column_stack([x, np.ones(len(x))]).astype(np.float64)

    fit = np.linalg.lstsq(table(dataset.train.x), dataset.train.y.astype(np.float64))[0]
    solution = np.asarray(fit, np.float64)
    y = dataset.test.y.astype(np.float64)
    loss = float(np.mean((table(dataset.test.x) @ solution - y) ** 2))
    variance = float(np.var(y))
    r2 = 1 - loss / variance if variance else 0.0
    return LeastSquares(solution[:-1], float(solution[-1]), loss, r2)


def part(rows: int, workers: int, index: int) -> Ids:
    """The row ids of worker `index`: every workers-th row, so shares differ by one row at most.

    The parts of indices 0..workers-1 are disjoint and together hold every row. An index beyond them
    has the part of index mod workers. With more workers than rows some parts are empty.

    Raises: ConfigError for less than one worker or a negative index."""
    if workers < 1:
        raise ConfigError(f"--workers must be at least 1, not {workers}")
    if index < 0:
        raise ConfigError(f"--task-index must not be negative, not {index}")
    return np.arange(index % workers, rows, workers, dtype=np.intp)


class Batches:
    """One worker's endless batches: its part of the training set, in a new order each epoch.

    The order of an epoch follows from (seed, epoch, index) alone, so a worker beyond `workers`
    reads its part in an order of its own. An epoch holds every row of the part exactly once, in as
    few batches as `batch_size` allows. If it does not divide the part they are cut evenly, one row
    apart at most: a last batch of a single row would weigh as much as a full one. Thread-safe."""

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 32,
        seed: int = 0,
        index: int = 0,
        workers: int = 1,
    ) -> None:
        """Raises: ConfigError for a batch size below 1, a bad seed, or what `part` refuses."""
        if batch_size < 1:
            raise ConfigError(f"--batch-size must be at least 1, not {batch_size}")
        check_seed(seed)
        self.ids = part(len(dataset.train), workers, index)
        self.batches_per_epoch = -(-len(self.ids) // batch_size)
        self._x, self._y = dataset.train.x, dataset.train.y
        self._seed, self._index = seed, index
        # (epoch, its order): replaced in one piece, so that no lock is needed.
        self._order: tuple[int, Ids] = (-1, self.ids)

    def epoch(self, clock: int) -> int:
        """The epoch, from 0, that the batch at `clock` belongs to.

        Raises: ConfigError if this worker's part is empty."""
        return clock // self._per_epoch()

    def batch(self, clock: int) -> Batch:
        """The batch of step `clock` (from 0); x and y are fresh and the caller's, ids read-only.

        Raises: ConfigError if this worker's part is empty (`batches_per_epoch` is 0)."""
        epoch, turn = divmod(clock, self._per_epoch())
        cached, order = self._order
        if cached != epoch:
            rng = np.random.default_rng((self._seed, epoch, self._index))
            order = rng.permutation(self.ids)
            order.flags.writeable = False
            self._order = (epoch, order)
        start, stop = (-(-cut * len(order) // self.batches_per_epoch) for cut in (turn, turn + 1))
        ids = order[start:stop]
        return Batch(self._x.take(ids, axis=0), self._y.take(ids), ids)

    def _per_epoch(self) -> int:
        if not self.batches_per_epoch:
            raise ConfigError(
                f"worker {self._index} has no rows to learn from: "
                f"the data has {len(self._y)}, fewer than --workers"
            )
        return self.batches_per_epoch


def check_seed(seed: int) -> None:
    """Refuses a seed that no generator takes. Raises: ConfigError."""
    if not 0 <= seed < 1 << 32:
        raise ConfigError(f"--seed must be from 0 to {(1 << 32) - 1}, not {seed}")


def find(name: str, flag: str) -> Any:
    """The object that `package.module:Attribute` names. It is imported, never evaluated.

    What the module itself raises, other than a failed import, comes through as it is.

    Raises: ConfigError that says which half of the name is wrong, or what the module lacks."""
    module_name, _, attribute = name.partition(":")
    if not all(step.isidentifier() for step in [*module_name.split("."), *attribute.split(".")]):
        raise ConfigError(f"{flag} {name!r} is not of the form package.module:Attribute")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{flag} {name!r}: there is no module {missing!r} here; "
                "install it, or start where it can be imported"
            ) from error
        raise ConfigError(f"{flag} {name!r}: importing {module_name!r} failed: {error}") from error
    try:
        return reduce(getattr, attribute.split("."), module)
    except AttributeError as error:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(
            f"{flag} {name!r}: module {module_name!r} has no {attribute!r}; it has {some(public)}"
        ) from error


def call(maker: Callable[..., Any], argument: object, what: str, meaning: str) -> Any:
    """`maker(argument)`. Raises: ConfigError if it does not take exactly one argument."""
    try:
        inspect.signature(maker).bind(argument)
    except TypeError as error:
        raise ConfigError(f"{what} must take one argument, {meaning}: {error}") from error
    except ValueError:
        pass  # some built-in callables have no signature to check
    return maker(argument)


def _sklearn(name: str) -> Any:
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError(
            f"--data {name!r} comes with scikit-learn, which cannot be imported ({error}): "
            "pip install 'paramserver[examples]'"
        ) from error


def _split(rows: int, seed: int) -> tuple[Ids, Ids]:
    """Row ids to train on and to test on, a fifth (rounded up).

    The generator is the frozen one, so that a seed gives the same split in every NumPy."""
    order = np.random.RandomState(seed).permutation(rows).astype(np.intp)
    cut = rows - -(-rows // 5)
    return order[:cut], order[cut:]


def _decorrelate(x: npt.NDArray[Any], train: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Columns of mean 0, deviation 1 and correlation 0 over the training rows.

    By Cholesky: its factor is unique, so all machines get the same (an SVD may differ)."""
    factor = np.linalg.cholesky(np.cov(train, rowvar=False, bias=True))
    return np.linalg.solve(factor, (x - train.mean(axis=0)).T).T


def _rows(x: npt.NDArray[Any], y: npt.NDArray[Any], ids: Ids) -> Batch:
    """The rows `ids`, read-only and in C order: x and targets as float32, labels as they are."""
    batch = Batch(
        np.ascontiguousarray(x[ids], np.float32),
        y[ids] if y.dtype.kind == "i" else y[ids].astype(np.float32),
    )
    for array in (batch.x, batch.y):
        array.flags.writeable = False
    return batch
