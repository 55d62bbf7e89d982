"""Data sets, parts and batches: every row once, the same again, and a clear word when not."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from paramserver.errors import ConfigError
from worker.data import (
    Batch,
    Batches,
    Dataset,
    DataSpec,
    least_squares,
    load_data,
    part,
)


def dataset(rows: int) -> Dataset:
    """Rows whose one feature is their id."""
    batch = Batch(np.arange(rows, dtype=np.float32)[:, np.newaxis], np.zeros(rows, np.float32))
    return Dataset("ids", DataSpec(1), batch, batch)


def epoch_ids(batches: Batches, epoch: int) -> list[int]:
    clocks = range(epoch * batches.batches_per_epoch, (epoch + 1) * batches.batches_per_epoch)
    return [int(i) for clock in clocks for i in batches.batch(clock).x[:, 0]]


# --- trial 52: 12 rows, 3 workers, batch 2


@pytest.mark.parametrize("epochs", [1, 2])
def test_three_workers_read_every_row_once_an_epoch(epochs: int) -> None:
    def read() -> list[list[list[int]]]:
        workers = [Batches(dataset(12), 2, seed=7, index=i, workers=3) for i in range(3)]
        return [[epoch_ids(w, epoch) for w in workers] for epoch in range(epochs)]

    log = read()
    for epoch in log:
        assert sorted(i for ids in epoch for i in ids) == list(range(12))
        assert [len(ids) for ids in epoch] == [4, 4, 4]
    if epochs == 2:
        first, second = log
        assert [set(ids) for ids in first] == [set(ids) for ids in second]
        assert first != second
    assert read() == log


def test_another_seed_is_another_order() -> None:
    orders = {tuple(epoch_ids(Batches(dataset(12), 2, seed), 0)) for seed in range(5)}
    assert len(orders) == 5


# --- trial 53: more workers than rows


def test_a_worker_without_rows_is_told_so() -> None:
    shares = [part(2, 3, index) for index in range(3)]
    assert [len(share) for share in shares] == [1, 1, 0]
    idle = Batches(dataset(2), 2, index=2, workers=3)
    assert len(idle.ids) == idle.batches_per_epoch == 0
    for read in (idle.batch, idle.epoch):
        with pytest.raises(ConfigError, match=r"worker 2 has no rows .* the data has 2"):
            read(0)


@pytest.mark.parametrize("rows", [0, 1, 2, 10, 97])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_parts_are_even_and_disjoint_and_hold_everything(rows: int, workers: int) -> None:
    shares = [part(rows, workers, index) for index in range(workers)]
    sizes = [len(share) for share in shares]
    assert max(sizes) - min(sizes) <= 1
    assert sorted(np.concatenate(shares)) == list(range(rows))


def test_a_worker_beyond_the_parts_reads_one_of_them_in_its_own_order() -> None:
    second, fifth = (Batches(dataset(60), 4, seed=1, index=i, workers=3) for i in (1, 4))
    assert np.array_equal(second.ids, fifth.ids)
    assert sorted(epoch_ids(second, 0)) == sorted(epoch_ids(fifth, 0))
    assert epoch_ids(second, 0) != epoch_ids(fifth, 0)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigError, match="training set of data 'ids' is empty"):
        dataset(0)


# --- batches


def test_a_batch_follows_from_its_clock_alone() -> None:
    batches = Batches(dataset(10), 3, seed=5)
    forward = [batches.batch(clock) for clock in range(12)]
    for clock in (11, 0, 7, 3, 4, 8):
        again = Batches(dataset(10), 3, seed=5).batch(clock)
        for batch in (again, batches.batch(clock)):
            assert np.array_equal(batch.x, forward[clock].x)
            assert batch.ids is not None
            assert np.array_equal(batch.x[:, 0], batch.ids)


@pytest.mark.parametrize(
    ("rows", "size", "sizes"),
    [
        (12, 4, [4, 4, 4]),
        (5, 2, [2, 2, 1]),
        (13, 4, [4, 3, 3, 3]),
        (33, 32, [17, 16]),
        (3, 8, [3]),
    ],
)
def test_batches_of_an_epoch_are_even(rows: int, size: int, sizes: list[int]) -> None:
    batches = Batches(dataset(rows), size)
    assert batches.batches_per_epoch == len(sizes)
    assert [len(batches.batch(clock)) for clock in range(len(sizes))] == sizes
    assert sorted(epoch_ids(batches, 3)) == list(range(rows))
    assert [batches.epoch(clock) for clock in (0, len(sizes) - 1, len(sizes))] == [0, 0, 1]


def test_a_batch_is_the_callers_own() -> None:
    data = load_data()
    batches = Batches(data, 4)
    kept = batches.batch(0).x.copy()
    batches.batch(0).x[:] = 0
    assert np.array_equal(batches.batch(0).x, kept)
    ids = batches.batch(0).ids
    assert ids is not None
    assert not ids.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        data.train.x[0] = 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, not 0"),
        ({"seed": -1}, "--seed must be from 0 to 4294967295, not -1"),
        ({"seed": 1 << 32}, "--seed must be from 0 to 4294967295, not 4294967296"),
        ({"workers": 0}, "--workers must be at least 1, not 0"),
        ({"index": -1}, "--task-index must not be negative, not -1"),
    ],
)
def test_settings_that_cannot_be(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Batches(dataset(3), **arguments)


# --- data sets


def test_line_is_two_x_with_little_noise_and_follows_the_seed() -> None:
    data = load_data()
    assert (data.name, data.spec, len(data.train), len(data.test)) == ("line", DataSpec(1), 100, 50)
    assert np.abs(data.train.x).max() <= 1
    exact = least_squares(data)
    assert exact.weight == pytest.approx([2], abs=0.05)
    assert exact.bias == pytest.approx(0, abs=0.05)
    assert exact.r2 > 0.98
    assert np.array_equal(data.train.y, load_data("line", 0).train.y)
    assert not np.array_equal(data.train.y, load_data("line", 1).train.y)


def test_diabetes_is_the_reference_split_and_well_conditioned() -> None:
    pytest.importorskip("sklearn")
    data = load_data("diabetes")
    assert (data.spec, len(data.train), len(data.test)) == (DataSpec(10), 353, 89)
    assert data.train.x.flags.c_contiguous
    x = data.train.x.astype(np.float64)
    assert np.allclose(x.mean(axis=0), 0, atol=1e-5)
    assert np.allclose(x.T @ x / len(x), np.eye(10), atol=1e-4)
    assert float(np.var(data.train.y)) == pytest.approx(1, abs=1e-4)
    assert least_squares(data).r2 == pytest.approx(0.5950, abs=1e-4)


def test_digits_has_one_scale_for_all_pixels() -> None:
    pytest.importorskip("sklearn")
    data = load_data("digits")
    assert (data.spec, len(data.train), len(data.test)) == (DataSpec(64, 10), 1437, 360)
    assert float(data.train.x.mean()) == pytest.approx(0, abs=1e-4)
    assert float(data.train.x.std()) == pytest.approx(1, abs=1e-4)
    assert len(np.unique(data.train.x)) == 17
    assert data.train.y.dtype == np.intp
    assert data.train.x.flags.c_contiguous
    with pytest.raises(ConfigError, match="has classes"):
        least_squares(data)


def test_least_squares_scores_the_test_set() -> None:
    x = np.array([[0.0], [1.0], [2.0]])
    data = Dataset("d", DataSpec(1), Batch(x, 3 * x[:, 0] + 1), Batch(x, np.array([0.0, 4.0, 8.0])))
    exact = least_squares(data)
    assert exact.weight == pytest.approx([3])
    assert exact.bias == pytest.approx(1)
    assert exact.loss == pytest.approx((1 + 0 + 1) / 3)
    assert exact.r2 == pytest.approx(1 - 2 / 32)


@pytest.mark.parametrize("name", ["diabetes", "digits"])
def test_without_scikit_learn_one_line_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ConfigError) as caught:
        load_data(name)
    assert "pip install 'paramserver[examples]'" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "x", "y", "message"),
    [
        (DataSpec(2), np.zeros((3, 1)), np.zeros(3), r"x \(3, 1\) .* asks for x \(3, 2\)"),
        (DataSpec(1), np.zeros((3, 1)), np.zeros((3, 1)), r"y \(3, 1\); .* y \(3,\)"),
        (DataSpec(1), np.array([[0.0], [np.nan]]), np.zeros(2), "not finite in row 1"),
        (DataSpec(1), np.zeros((2, 1)), np.array([np.inf, 0]), "not finite in row 0"),
        (DataSpec(1, 2), np.zeros((2, 1)), np.zeros(2), "labels of float64"),
        (DataSpec(1, 2), np.zeros((2, 1)), np.array([1, 2]), "label 2 in row 1; classes are 0..1"),
        (DataSpec(1, 2), np.zeros((2, 1)), np.array([-1, 1]), "label -1 in row 0"),
    ],
)
def test_data_that_its_spec_does_not_describe(
    spec: DataSpec, x: np.ndarray, y: np.ndarray, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"training set of data 'bad' .*{message}"):
        Dataset("bad", spec, Batch(x, y), Batch(x, y))


# --- data of your own


OWN = """
import numpy as np
from worker.data import Batch, DataSpec, Dataset

def rows(seed):
    batch = Batch(np.full((4, 1), seed, np.float32), np.zeros(4, np.float32))
    return Dataset("own", DataSpec(1), batch, batch)

ready = rows(3)
number = 7

def two(seed, more):
    return ready

def nothing(seed):
    return None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_rows.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rows", raising=False)


@pytest.mark.usefixtures("own")
def test_data_of_your_own_is_a_dataset_or_a_function_of_the_seed() -> None:
    assert load_data("own_rows:ready", seed=5).train.x[0, 0] == 3
    assert load_data("own_rows:rows", seed=5).train.x[0, 0] == 5


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "'nowhere' is not known; choose 'line', 'diabetes', 'digits' or package"),
        ("own_rows:number", "gives an object of type int; it must be a worker.data.Dataset"),
        ("own_rows:nothing", "gives an object of type NoneType"),
        ("own_rows:two", "must take one argument, the seed: .*'more'"),
        ("own_rows:absent", "module 'own_rows' has no 'absent'; it has .*'rows'"),
        ("own_absent:rows", "there is no module 'own_absent'"),
    ],
)
def test_a_name_that_gives_no_data(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"--data .*{message}"):
        load_data(name)
