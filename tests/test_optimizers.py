"""Every update rule through one suite, in float32 and float64, and what drives the rules."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer_cases import (
    CASES,
    MORE_CASES,
    PEERS,
    REFERENCE,
    START,
    VARIANTS,
    Case,
    Peer,
    Vector,
    run_reference,
)

from paramserver.errors import ConfigError, InvalidArgumentError
from paramserver.optimizers import (
    BLOCK,
    RULES,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Array,
    Ftrl,
    Momentum,
    Optimizer,
    RMSProp,
    Scratch,
    Within,
    Yogi,
    apply,
    from_hyper,
    from_name,
    mean_into,
    new_slots,
    step,
)

SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)

every_dtype = pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["f4", "f8"])
every_rule = pytest.mark.parametrize("rule", VARIANTS.values(), ids=VARIANTS.keys())


def near(actual: Array, expected: Any) -> bool:
    """Within the rounding of the array's dtype and of the 12 digits the references have."""
    rtol, atol = (2e-6, 1e-7) if actual.dtype == np.float32 else (1e-11, 1e-12)
    return np.allclose(actual, expected, rtol=rtol, atol=atol)


@dataclass
class State:
    """Arrays for one update of `n` elements: read-only inputs, outputs full of NaN."""

    value: Array
    slots: list[Array]
    grads: list[Array]
    out_value: Array
    out_slots: list[Array]

    @classmethod
    def random(cls, rule: Optimizer, n: int, dtype: Any, grads: int = 1, seed: int = 0) -> State:
        rng = np.random.default_rng(seed)

        def array() -> Array:
            made = rng.standard_normal(n).astype(dtype)
            made.flags.writeable = False
            return made

        slots = [np.abs(array()) for _ in rule.slots]
        for slot in slots:
            slot.flags.writeable = False
        spare = [np.full(n, np.nan, dtype) for _ in range(1 + len(slots))]
        return cls(array(), slots, [array() for _ in range(grads)], spare[0], spare[1:])

    def outputs(self) -> list[Array]:
        return [self.out_value, *self.out_slots]

    def apply(
        self,
        rule: Optimizer,
        t: int = 3,
        part: slice = slice(None),
        weights: Sequence[float] | None = None,
        scratch: Scratch | None = None,
    ) -> list[Array]:
        apply(
            rule,
            t,
            [grad[part] for grad in self.grads],
            self.value[part],
            [slot[part] for slot in self.slots],
            self.out_value[part],
            [slot[part] for slot in self.out_slots],
            scratch or Scratch(self.value.dtype),
            weights,
        )
        return self.outputs()

    def whole(self, rule: Optimizer, t: int = 3) -> list[Array]:
        """The same update as one block, whatever its length."""
        outs = [np.empty_like(self.value) for _ in range(1 + len(self.slots))]
        scratch = [np.empty_like(self.value) for _ in range(rule.scratch)]
        rule.update(t, self.grads[0], self.value, self.slots, outs[0], outs[1:], scratch)
        return outs


def same_bits(left: Sequence[Array], right: Sequence[Array]) -> bool:
    return [a.tobytes() for a in left] == [b.tobytes() for b in right]


# The numbers.


@every_dtype
@pytest.mark.parametrize("case", [*CASES, *MORE_CASES], ids=lambda case: case.name)
def test_published_numbers(case: Case, dtype: Any) -> None:
    value = np.array(case.start, dtype)
    slots = new_slots(case.rules[0], value)
    for t, (rule, grad) in enumerate(zip(case.rules, case.grads, strict=True), 1):
        value, slots = step(rule, t, np.array(grad, dtype), value, slots)
        if t in case.after:
            assert near(value, case.after[t]), t
    assert value.dtype == dtype
    by_name = dict(zip(case.rules[0].slots, slots, strict=True))
    for name, expected in case.slots.items():
        assert near(by_name[name], expected), name
    if case.unlike is not None:
        assert not near(value, case.unlike)


@every_dtype
@every_rule
def test_agrees_with_the_formula_in_plain_floats(rule: Optimizer, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    grads = rng.standard_normal((20, 7)).astype(dtype)
    start = rng.standard_normal(7).astype(dtype)
    value: Array = start
    slots = new_slots(rule, value)
    for t, grad in enumerate(grads, 1):
        value, slots = step(rule, t, grad, value, slots)
    expected, expected_slots = run_reference(rule, grads.tolist(), start.tolist())
    rtol, atol = (2e-5, 1e-6) if dtype is np.float32 else (1e-12, 1e-13)
    np.testing.assert_allclose(value, expected, rtol, atol)
    for slot, reference in zip(slots, zip(*expected_slots, strict=True), strict=True):
        np.testing.assert_allclose(slot, reference, rtol, atol)


def run(rule: Optimizer, grads: Sequence[Vector], start: Vector, dtype: Any = np.float64) -> Array:
    """The last value of a run."""
    value: Array = np.array(start, dtype)
    slots = new_slots(rule, value)
    for t, grad in enumerate(grads, 1):
        value, slots = step(rule, t, np.array(grad, dtype), value, slots)
    return value


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.module}-{peer.ours.kind}")
def test_agrees_with_other_libraries(peer: Peer) -> None:
    module = pytest.importorskip(peer.module)
    grads = np.random.default_rng(2).standard_normal((30, len(START))).tolist()
    theirs = peer.run(module, peer.make, grads)
    np.testing.assert_allclose(run(peer.ours, grads, START), theirs, 1e-9, 1e-12)


@every_dtype
def test_ftrl_without_penalties_is_adagrad(dtype: Any) -> None:
    grads = np.random.default_rng(3).standard_normal((50, 7)).tolist()
    for initial in (0.0, 0.1):
        adagrad = run(Adagrad(0.3, initial, 1e-30), grads, [0.0] * 7, dtype)
        ftrl = run(Ftrl(0.3, initial), grads, [0.0] * 7, dtype)
        rtol = 1e-4 if dtype is np.float32 else 1e-11
        np.testing.assert_allclose(ftrl, adagrad, rtol, rtol / 10)


def test_ftrl_is_exactly_zero_up_to_l1() -> None:
    value = run(Ftrl(0.1, l1=0.05), [(0.03, -0.07, 0.01)], (0.0, 0.0, 0.0))
    assert value[0] == value[2] == 0 and value[1] > 0


@every_dtype
def test_weight_decay_is_not_lost_in_rounding(dtype: Any) -> None:
    rule = AdamW(1e-3, weight_decay=2e-3)
    value = run(rule, [[0.0] * 64] * 1000, [1.0 + i / 64 for i in range(64)], dtype)
    lost = np.array([1.0 + i / 64 for i in range(64)]) - value
    expected = (1 + np.arange(64) / 64) * (1 - (1 - 2e-6) ** 1000)
    assert abs(lost.sum() / expected.sum() - 1) < 0.02


def test_every_kind_takes_part() -> None:
    assert set(RULES) == {rule.kind for rule in VARIANTS.values()} == set(REFERENCE)
    assert set(RULES) == {case.rules[0].kind for case in CASES}
    assert all(kind == rule.kind for kind, rule in RULES.items())


@every_dtype
def test_counting_is_exact(dtype: Any) -> None:
    value, ones = np.zeros(4, dtype), np.ones(4, dtype)
    for t in range(1, 2001):
        value, _ = step(SGD(0.5), t, ones, value, ())
        assert (value == -0.5 * t).all()


@pytest.mark.parametrize("t", [1, 300, 2**31 + 3, 2**53])
def test_update_numbers_have_no_end(t: int) -> None:
    state = State.random(Adam(), 5, np.float32)
    assert all(np.isfinite(out).all() for out in state.apply(Adam(), t))


@every_dtype
@every_rule
def test_zero_gradients_are_harmless(rule: Optimizer, dtype: Any) -> None:
    """Before any gradient and after one. Only decay and FTRL move what has no gradient yet."""
    start, zero, some = (1.0, -2.0, 0.0), (0.0, 0.0, 0.0), (0.5, -1.0, 0.0)
    moved = run(rule, [zero], start, dtype)
    if rule.kind == "ftrl":
        assert (np.abs(moved) <= np.abs(start)).all()
    elif not getattr(rule, "weight_decay", 0.0):
        assert (moved == start).all()
    for grads in ([zero] * 3, [some, zero, zero], [zero, some, zero]):
        assert np.isfinite(run(rule, grads, start, dtype)).all()


@every_dtype
@pytest.mark.parametrize("kind", RULES)
def test_settings_at_their_ends_divide_by_no_zero(kind: str, dtype: Any) -> None:
    """The smallest epsilon, the longest memory, and slots that start at 0."""
    ends = {
        name: {"epsilon": 1e-30}.get(name, math.nextafter(1.0, 0.0))
        for name in RULES[kind]().hyper()
        if name in {"epsilon", "decay", "momentum", "beta1", "beta2"}
    }
    fills = {name: 0.0 for name in RULES[kind]().hyper() if name.startswith("initial_")}
    flags = {"centered": 1.0, "epsilon_inside": 1.0} if kind == "rmsprop" else {}
    for more in ({}, flags):
        rule = from_hyper(kind, {**ends, **fills, **more})
        moved = run(rule, [[0.0] * 3] * 2, [1.0] * 3, dtype)
        assert np.isfinite(moved).all()
        assert (moved == 1).all() or kind in ("ftrl", "adamw")


def test_a_centered_mean_square_is_never_negative() -> None:
    """A gradient that stays the same has no variance; in float32 its rounding may be below 0."""
    for gradient in (100.0, 0.1, 3.3e5):
        rule = RMSProp(1e-9, centered=True, decay=0.7)
        assert np.isfinite(run(rule, [[gradient]] * 300, [1.0], np.float32)).all()


def test_slots_start_as_their_settings_say() -> None:
    fills: list[tuple[Optimizer, list[float]]] = [
        (Adagrad(), [0.1]),
        (Adagrad(initial_accumulator=2.0), [2.0]),
        (Ftrl(initial_accumulator=0.5), [0.5, 0.0]),
        (Yogi(), [0.0, 1e-6]),
        (RMSProp(), [0.0]),
        (RMSProp(initial_square=1.0, centered=True, momentum=0.5), [1.0, 0.0, 0.0]),
    ]
    for rule, expected in fills:
        assert [float(slot[0]) for slot in new_slots(rule, np.ones(1))] == expected


def test_a_slot_is_there_only_if_its_setting_is() -> None:
    assert RMSProp.slots == RMSProp().slots == ("s",)
    assert RMSProp(momentum=0.9).slots == ("s", "a")
    assert RMSProp(centered=True).slots == ("s", "c")
    assert RMSProp(centered=True, momentum=0.9).slots == ("s", "c", "a")
    assert replace(RMSProp(momentum=0.9), momentum=0.0).slots == ("s",)


# Blocks.


@every_dtype
@every_rule
@pytest.mark.parametrize("n", SIZES)
def test_block_by_block_is_the_whole_to_the_last_bit(rule: Optimizer, n: int, dtype: Any) -> None:
    state = State.random(rule, n, dtype)
    assert same_bits(state.apply(rule), state.whole(rule))
    assert all(out.dtype == dtype and np.isfinite(out).all() for out in state.outputs())


@given(
    rule=st.sampled_from(list(VARIANTS.values())),
    dtype=st.sampled_from([np.float32, np.float64]),
    n=st.integers(0, 300) | st.integers(BLOCK - 3, 2 * BLOCK + 3),
    cuts=st.lists(st.floats(0, 1), max_size=4),
    t=st.integers(1, 10**6),
    seed=st.integers(0, 2**32),
)
def test_pieces_are_the_whole_to_the_last_bit(
    rule: Optimizer, dtype: Any, n: int, cuts: list[float], t: int, seed: int
) -> None:
    state = State.random(rule, n, dtype, seed=seed)
    scratch = Scratch(dtype)
    edges = [0, *sorted(int(cut * n) for cut in cuts), n]
    for start, stop in itertools.pairwise(edges):
        state.apply(rule, t, slice(start, stop), scratch=scratch)
    assert same_bits(state.outputs(), state.whole(rule, t))


@every_dtype
@every_rule
@pytest.mark.parametrize("grads", [1, 3])
def test_inputs_stay_and_outputs_are_apart(rule: Optimizer, grads: int, dtype: Any) -> None:
    state = State.random(rule, BLOCK + 5, dtype, grads)
    inputs = [state.value, *state.slots, *state.grads]
    before = [array.tobytes() for array in inputs]
    state.apply(rule, weights=None if grads == 1 else [1, 2, 3])
    assert [array.tobytes() for array in inputs] == before
    assert not any(array.flags.writeable for array in inputs)

    value, slots = step(rule, 3, state.grads[0], state.value, state.slots)
    returned = [value, *slots]
    for i, out in enumerate(returned):
        assert out.flags.writeable
        others = [*inputs, *returned[:i]]
        assert not any(np.shares_memory(out, other) for other in others)


@every_rule
@pytest.mark.parametrize("grads", [1, 3])
def test_no_array_is_allocated(rule: Optimizer, grads: int) -> None:
    state = State.random(rule, 8 * BLOCK, np.float32, grads)
    weights = None if grads == 1 else [1, 2, 3]
    scratch = Scratch(np.float32)
    state.apply(rule, weights=weights, scratch=scratch)
    tracemalloc.start()
    try:
        state.apply(rule, weights=weights, scratch=scratch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16_384, "a block is 131,072 bytes"


@every_rule
def test_unaligned_gradients_are_as_good(rule: Optimizer) -> None:
    state = State.random(rule, BLOCK + 5, np.float32)
    expected = state.whole(rule)
    raw = np.frombuffer(b"\0" * 3 + state.grads[0].tobytes(), np.uint8)
    state.grads = [raw[3:].view(np.float32)]
    assert not state.grads[0].flags.aligned
    assert same_bits(state.apply(rule), expected)


@every_rule
def test_any_shape_in_the_wrapper(rule: Optimizer) -> None:
    for shape in [(), (0, 3), (2, 3, 4)]:
        value = np.ones(shape, np.float32)
        grad = np.full(shape, 0.5, np.float32)
        new, slots = step(rule, 1, grad, value, new_slots(rule, value))
        assert new.shape == shape
        assert [slot.shape for slot in slots] == [shape] * len(rule.slots)


@every_rule
def test_overflow_is_silent(rule: Optimizer) -> None:
    state = State.random(rule, 3, np.float32)
    state.grads = [np.array([3e38, -3e38, 1e-45], np.float32)]
    with np.errstate(all="raise"):
        state.apply(rule)


def test_scratch_hands_out_the_same_aligned_blocks() -> None:
    scratch = Scratch(np.float64)
    first, second = scratch.blocks(2, BLOCK)
    assert not np.shares_memory(first, second)
    assert first.shape == (BLOCK,) and first.dtype == np.float64 and first.flags.writeable
    (again,) = scratch.blocks(1, 10)
    assert again.shape == (10,) and again.ctypes.data == first.ctypes.data
    assert first.ctypes.data % 64 == second.ctypes.data % 64 == 0
    assert scratch.blocks(0, 10) == []


# Several gradients.


@every_dtype
def test_the_mean_of_two_workers(dtype: Any) -> None:
    value = np.array([10, 10], dtype)
    grads = [np.array([1, 2], dtype), np.array([5, -6], dtype)]
    for weights, expected in [(None, [9.7, 10.2]), ([3, 1], [9.8, 10.0]), ([2, 2], [9.7, 10.2])]:
        out = np.empty_like(value)
        apply(SGD(0.1), 1, grads, value, [], out, [], Scratch(dtype), weights)
        assert near(out, expected)


@every_dtype
@every_rule
@pytest.mark.parametrize("n", [0, 1, BLOCK, 2 * BLOCK + 7])
def test_one_update_by_the_mean(rule: Optimizer, n: int, dtype: Any) -> None:
    state = State.random(rule, n, dtype, grads=3)
    together = [out.copy() for out in state.apply(rule)]
    assert same_bits(together, state.apply(rule, weights=[3, 3, 3]))
    a, b, c = state.grads
    state.grads = [((a + b) + c) / dtype(3)]
    assert same_bits(together, state.apply(rule))


@every_dtype
@pytest.mark.parametrize("weights", [[3, 1, 2], [0.5, 0, 0.25], [1e-3, 5, 7]])
def test_the_weighted_mean(weights: list[float], dtype: Any) -> None:
    state = State.random(SGD(), BLOCK + 1, dtype, grads=3)
    out, term = np.empty_like(state.value), np.empty_like(state.value)
    mean_into(state.grads, out, term, weights)
    exact = np.average(np.asarray(state.grads, np.float64), axis=0, weights=weights)
    rtol = 1e-5 if dtype is np.float32 else 1e-12
    np.testing.assert_allclose(out, exact, rtol, rtol)


def test_the_order_given_is_the_order_summed() -> None:
    big, small = np.array([1e8], np.float32), np.array([3.0], np.float32)
    out, term = np.empty(1, np.float32), np.empty(1, np.float32)
    mean_into([small, big, -big], out, term)
    lost = out.copy()
    mean_into([big, -big, small], out, term)
    assert lost[0] == 0 and out[0] == 1
    mean_into([big, small, -big, small], out, term)
    assert out[0] == 0.75


@every_dtype
@pytest.mark.parametrize("n", [1, 2, 3, 7, 41, 49, 64, 100])
def test_equal_gradients_are_their_own_mean(n: int, dtype: Any) -> None:
    out, term = np.empty(4, dtype), np.empty(4, dtype)
    for number in (1.0, 7.0, -13.0, 0.0):
        mean_into([np.full(4, number, dtype)] * n, out, term)
        assert (out == number).all()
        mean_into([np.full(4, number, dtype)] * n, out, term, [5] * n)
        assert (out == number).all()


def test_a_single_gradient_is_used_where_it_lies() -> None:
    seen: list[Array] = []

    class Spy(SGD):
        def update(self, t: int, grad: Array, *rest: Any) -> None:
            seen.append(grad)
            super().update(t, grad, *rest)

    state = State.random(Spy(), BLOCK + 1, np.float32)
    state.apply(Spy(), weights=[4.0])
    assert [grad.size for grad in seen] == [BLOCK, 1]
    assert all(np.shares_memory(grad, state.grads[0]) for grad in seen)


# What is refused.


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, math.nan], [1, math.inf], [1, 2, 3]])
def test_weights_without_a_mean_are_refused(weights: list[float]) -> None:
    state = State.random(SGD(), 4, np.float32, grads=2)
    with pytest.raises(InvalidArgumentError, match="weights"):
        state.apply(SGD(), weights=weights)
    assert np.isnan(state.out_value).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"grads": []}, "no gradient"),
        ({"grads": [np.ones(1, np.float32)]}, r"shape \(1,\).*shape \(4,\)"),
        ({"grads": [np.ones(4)]}, "float64 array .* float32 value"),
        ({"value": np.ones((2, 2), np.float32)}, "2 axes"),
        ({"slots": []}, "1 slots; 0 are given"),
        ({"out_slots": []}, "and 0 out"),
        ({"slots": [np.ones(3, np.float32)]}, r"shape \(3,\)"),
        ({"out_value": np.ones(4)}, "float64"),
    ],
    ids=lambda x: x if isinstance(x, str) else next(iter(x)),
)
def test_arrays_that_do_not_agree_are_refused(change: dict[str, Any], words: str) -> None:
    state = State.random(Momentum(), 4, np.float32)
    vars(state).update(change)
    with pytest.raises(InvalidArgumentError, match=words):
        state.apply(Momentum(), scratch=Scratch(np.float32))


def test_scratch_of_another_dtype_is_refused() -> None:
    state = State.random(SGD(), 4, np.float32)
    with pytest.raises(InvalidArgumentError, match="float64"):
        state.apply(SGD(), scratch=Scratch(np.float64))


@pytest.mark.parametrize("t", [0, -1])
def test_updates_count_from_1(t: int) -> None:
    with pytest.raises(InvalidArgumentError, match="counted from 1"):
        State.random(Adam(), 4, np.float32).apply(Adam(), t)


def test_the_wrapper_broadcasts_nothing() -> None:
    with pytest.raises(InvalidArgumentError, match="shapes"):
        step(SGD(), 1, np.ones((4, 3), np.float32), np.ones((3, 4), np.float32), ())


# Settings.


@every_rule
def test_settings_make_the_round_trip(rule: Optimizer) -> None:
    hyper = rule.hyper()
    assert all(type(number) is float for number in hyper.values())
    assert from_hyper(rule.kind, hyper) == rule
    assert from_hyper(rule.kind, {}) == type(rule)()
    assert rule.at(17) == rule


@pytest.mark.parametrize("kind", RULES)
def test_numpy_settings_become_python_floats(kind: str) -> None:
    rule = RULES[kind](**{name: np.float64(x) for name, x in RULES[kind]().hyper().items()})
    assert all(type(getattr(rule, field.name)) in (float, bool) for field in fields(rule))
    state = State.random(rule, 1000, np.float32)
    expected = [out.copy() for out in state.apply(RULES[kind]())]
    assert same_bits(state.apply(rule), expected)


def test_a_numpy_update_number_becomes_a_python_int() -> None:
    state = State.random(Adam(1.0), 1000, np.float32)
    expected = [out.copy() for out in state.apply(Adam(1.0), 3)]
    assert same_bits(state.apply(Adam(1.0), np.int64(3)), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [math.nan, -0.1, math.inf, "0.1", None, 10**400])
@pytest.mark.parametrize("kind", RULES)
def test_a_rate_is_finite_and_not_negative(kind: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"{kind}: learning_rate is .* a finite number") as caught:
        from_hyper(kind, {"learning_rate": bad})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "name", "bad"),
    [
        ("momentum", "momentum", 1.0),
        ("momentum", "momentum", -0.5),
        ("momentum", "momentum", math.nan),
        ("momentum", "nesterov", 0.5),
        ("momentum", "nesterov", math.nan),
        ("momentum", "nesterov", "yes"),
        ("adam", "beta1", 1.0),
        ("adam", "beta2", 1.0),
        ("adam", "beta2", -1e-9),
        ("adam", "epsilon", 0.0),
        ("adam", "epsilon", math.nan),
        ("adam", "epsilon", 1e-50),
        ("adagrad", "initial_accumulator", -0.1),
        ("adamw", "weight_decay", -0.1),
        ("rmsprop", "decay", 1.0),
        ("rmsprop", "centered", 2.0),
        ("ftrl", "l1", -1.0),
        ("ftrl", "l2", math.inf),
        ("ftrl", "learning_rate", 0.0),
        ("lion", "beta2", 1.0),
    ],
)
def test_settings_out_of_range_are_refused(kind: str, name: str, bad: Any) -> None:
    with pytest.raises(ConfigError, match=f"optimizer {kind}: {name} is .*; it must be "):
        from_hyper(kind, {name: bad})


def test_a_shrinkage_that_would_divide_by_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ftrl: l2_shrinkage .* give l2 or initial_accumulator"):
        Ftrl(initial_accumulator=0.0, l2_shrinkage=0.1)


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown optimizer 'adamm'.* adam, .*momentum, .*sgd"):
        from_hyper("adamm", {})
    with pytest.raises(ConfigError, match="no setting 'lr'; it has learning_rate, momentum, nest"):
        from_hyper("momentum", {"lr": 0.1})
    with pytest.raises(ConfigError, match="no setting 'kind'"):
        from_hyper("sgd", {"kind": 1.0})


def test_names_from_a_command_line() -> None:
    assert from_name("Adam", learning_rate=0.01, beta1=None) == Adam(0.01)
    assert from_name("momentum", nesterov=True) == Momentum(nesterov=True)
    assert from_name("sgd") == SGD(0.1)
    with pytest.raises(ConfigError, match="unknown optimizer"):
        from_name("")


def test_a_rule_is_a_value() -> None:
    assert Adam() == Adam() and hash(Adam()) == hash(Adam()) and Adam() != Adam(0.5)
    with pytest.raises(FrozenInstanceError):
        SGD().learning_rate = 1.0  # type: ignore[misc]


# A new rule.


@dataclass(frozen=True)
class Averaged(Optimizer):
    """What the built-in rules do without: a filled slot, a scratch block, a changing rate."""

    kind: ClassVar[str] = "averaged"
    slots: ClassVar[tuple[str, ...]] = ("mean",)
    scratch: ClassVar[int] = 1

    rate: Annotated[float, Within(0.0, 10.0, "at least 0 and below 10")] = 1.0
    fill: Annotated[float, Within(-1.0, 5.0, "at least -1 and below 5")] = 4.0

    def slot_fill(self, slot: str) -> float:
        return self.fill

    def at(self, step: int) -> Averaged:
        return Averaged(self.rate / step, self.fill)

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
        (spare,) = scratch
        np.multiply(slots[0], 0.5, out=spare)
        np.add(spare, grad, out=out_slots[0])
        np.multiply(out_slots[0], self.rate, out=spare)
        np.subtract(value, spare, out=out_value)


def test_one_dataclass_is_a_rule() -> None:
    rule = Averaged(**{"rate": 2.0, "fill": 3.0})
    assert rule.hyper() == {"rate": 2.0, "fill": 3.0}
    assert rule.at(4).hyper()["rate"] == 0.5
    with pytest.raises(ConfigError, match=r"averaged: rate is 10\.0; it must be at least 0 and"):
        Averaged(rate=10.0)

    value = np.ones(3, np.float32)
    slots = new_slots(rule, value)
    assert (slots[0] == 3).all()
    new, (mean,) = step(rule, 1, np.ones(3, np.float32), value, slots)
    assert (mean == 2.5).all() and (new == -4).all()

    state = State.random(rule, 2 * BLOCK + 7, np.float32)
    expected = state.whole(rule)
    assert same_bits(state.apply(rule), expected)
    state.grads *= 4
    assert same_bits(state.apply(rule), expected)
