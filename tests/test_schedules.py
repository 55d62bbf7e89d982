"""Learning rates that change with the step: their numbers, their forms, and what is refused."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from conftest import MakeCluster
from hypothesis import given
from hypothesis import strategies as st

import paramserver as ps
from chief.flags import add_job_flags, differences, settings_from
from paramserver import convert, schedules
from paramserver.errors import ConfigError, InvalidArgumentError
from paramserver.optimizers import (
    RULES,
    SGD,
    Adam,
    Ftrl,
    Momentum,
    Scratch,
    apply,
    from_hyper,
    from_name,
)
from paramserver.schedules import (
    KINDS,
    Chain,
    Constant,
    Cosine,
    Exponential,
    Polynomial,
    Schedule,
    Step,
    WarmUp,
    flat,
    from_flat,
    parse,
)

#: One of each form, with and without what may be left out.
TEXTS: dict[str, Schedule] = {
    "constant:0.1": Constant(0.1),
    "constant:0.1:10": Constant(0.1, 10),
    "step:0.1:100:0.5": Step(0.1, 100, 0.5),
    "exponential:0.1:100:0.5": Exponential(0.1, 100, 0.5),
    "polynomial:0.1:1000": Polynomial(0.1, 1000),
    "polynomial:0.1:1000:0.001:2": Polynomial(0.1, 1000, 0.001, 2),
    "polynomial:0.1:1000:0:2": Polynomial(0.1, 1000, power=2),
    "cosine:0.1:1000": Cosine(0.1, 1000),
    "cosine:0.1:1000:1e-05": Cosine(0.1, 1000, 1e-5),
    "warmup:0.3:12345678": WarmUp(0.3, 12_345_678),
    "warmup:0.3:10:0.1": WarmUp(0.3, 10, 0.1),
    "warmup:0.1:100,cosine:0.1:900": Chain((WarmUp(0.1, 100), Cosine(0.1, 900))),
    "constant:0.5:10,constant:0.25:5,step:0.125:5:0.5": Chain(
        (Constant(0.5, 10), Constant(0.25, 5), Step(0.125, 5, 0.5))
    ),
}

every_text = pytest.mark.parametrize("text", TEXTS)

rates = st.floats(0, 1e29)
steps = st.integers(1, 2**53 - 1)
factors = st.floats(0, 1, exclude_min=True)
endings = st.one_of(
    st.builds(Constant, rates, steps),
    st.builds(Polynomial, rates, steps, rates, st.floats(0.01, 100)),
    st.builds(Cosine, rates, steps, rates),
    st.builds(WarmUp, rates, steps, rates),
)
singles = endings | st.one_of(
    st.builds(Constant, rates),
    st.builds(Step, rates, steps, factors),
    st.builds(Exponential, rates, steps, factors),
)
chains = st.builds(
    lambda parts, last: Chain((*parts, last)), st.lists(endings, min_size=1, max_size=4), singles
)
all_schedules = singles | chains


# The numbers.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("constant:0.5", {0: 0.5, 1: 0.5, 10**15: 0.5}),
        ("constant:0.5:10", {11: 0.5}),
        ("step:0.8:10:0.5", {0: 0.8, 1: 0.8, 10: 0.8, 11: 0.4, 20: 0.4, 21: 0.2, 10**6: 0.0}),
        ("exponential:0.8:10:0.25", {0: 0.8, 5: 0.4, 10: 0.2, 15: 0.1, 10**6: 0.0}),
        ("polynomial:0.8:10", {0: 0.8, 1: 0.72, 5: 0.4, 10: 0.0, 11: 0.0}),
        ("polynomial:0.9:10:0.1:2", {0: 0.9, 5: 0.3, 10: 0.1, 99: 0.1}),
        ("polynomial:0.1:10:0.9", {0: 0.1, 5: 0.5, 10: 0.9}),
        ("cosine:0.8:12", {0: 0.8, 4: 0.6, 6: 0.4, 8: 0.2, 12: 0.0, 13: 0.0}),
        ("cosine:0.9:12:0.1", {0: 0.9, 4: 0.7, 6: 0.5, 12: 0.1, 1000: 0.1}),
        ("warmup:0.8:4", {0: 0.0, 1: 0.2, 2: 0.4, 4: 0.8, 5: 0.8}),
        ("warmup:0.8:4:0.4", {1: 0.5, 4: 0.8, 5: 0.8}),
        ("constant:0.5:10,constant:0.25", {1: 0.5, 10: 0.5, 11: 0.25, 10**9: 0.25}),
        (
            "warmup:0.8:4,cosine:0.8:12,constant:0.3:2,step:0.2:1:0.5",
            {2: 0.4, 4: 0.8, 8: 0.6, 16: 0.0, 17: 0.3, 18: 0.3, 19: 0.2, 20: 0.1, 21: 0.05},
        ),
    ],
)
def test_the_rate_of_a_step(text: str, expected: dict[int, float]) -> None:
    schedule = parse(text)
    assert isinstance(schedule, Schedule)
    found = {step: schedule.at(step) for step in expected}
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_what_has_an_end_arrives_there_exactly() -> None:
    for end in (0.0, 0.1, 0.3):
        for rate in (0.1, 0.7):
            for schedule in (Cosine(rate, 7, end), Polynomial(rate, 7, end, 0.5)):
                assert schedule.at(7) == schedule.at(8) == end
            assert WarmUp(rate, 7).at(7) == rate


@given(schedule=all_schedules, step=st.integers(0, 2**62))
def test_a_rate_is_always_one_that_a_rule_takes(schedule: Schedule, step: int) -> None:
    rate = schedule.at(step)
    assert 0 <= rate < math.inf
    assert SGD(schedule).at(step) == SGD(rate)
    assert schedule.at(step) == rate


@given(parts=st.lists(endings, min_size=2, max_size=4))
def test_each_part_of_a_chain_counts_for_itself(parts: list[Schedule]) -> None:
    chain, before = Chain(tuple(parts)), 0
    for part in parts:
        for own in {1, part.length}:
            assert chain.at(before + own) == part.at(own)
        before += part.length
    assert chain.length == before
    assert chain.at(before + 1) == parts[-1].at(parts[-1].length + 1)


# The forms.


@every_text
def test_text_and_value(text: str) -> None:
    assert parse(text) == TEXTS[text]
    assert str(TEXTS[text]) == text


def test_text_is_read_leniently() -> None:
    assert parse("Cosine:1e-1:1e3, constant:0") == Chain((Cosine(0.1, 1000), Constant(0.0)))
    assert parse("0.25") == 0.25 and parse("1e-3") == 0.001


def test_every_kind_has_a_text() -> None:
    assert set(KINDS) == {text.partition(":")[0] for text in TEXTS}
    assert all(kind == schedule.kind for kind, schedule in KINDS.items())


@given(all_schedules)
def test_text_makes_the_round_trip(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule


@given(all_schedules)
def test_settings_make_the_round_trip(schedule: Schedule) -> None:
    """As they are, over the wire, and through a checkpoint's JSON."""
    rule = Momentum(schedule, 0.5, nesterov=True)
    hyper = rule.hyper()
    assert all(type(number) is float for number in hyper.values())
    assert from_hyper("momentum", hyper) == rule
    assert convert.optimizer_from_proto(convert.optimizer_to_proto(rule)) == rule
    assert from_hyper("momentum", json.loads(json.dumps(hyper))) == rule
    assert from_hyper("momentum", dict(reversed(hyper.items()))) == rule


def test_the_settings_are_named_as_documented() -> None:
    assert SGD(Cosine(0.1, 1000)).hyper() == {
        "learning_rate.cosine.rate": 0.1,
        "learning_rate.cosine.steps": 1000.0,
        "learning_rate.cosine.end": 0.0,
    }
    assert flat("learning_rate", Chain([WarmUp(0.1, 5), Exponential(0.1, 9, 0.5)])) == {  # type: ignore[arg-type]
        "learning_rate.1.warmup.rate": 0.1,
        "learning_rate.1.warmup.steps": 5.0,
        "learning_rate.1.warmup.start": 0.0,
        "learning_rate.2.exponential.rate": 0.1,
        "learning_rate.2.exponential.steps": 9.0,
        "learning_rate.2.exponential.factor": 0.5,
    }
    assert from_flat("learning_rate", {"cosine.rate": 1, "cosine.steps": 2}) == Cosine(1.0, 2)


def test_numbers_become_python_numbers() -> None:
    schedule = Cosine(np.float32(0.5), np.int64(10), np.float64(0.25))  # type: ignore[arg-type]
    assert [type(x) for x in vars(schedule).values()] == [float, int, float]


# Rules with a schedule.


@pytest.mark.parametrize("kind", [kind for kind in RULES if kind != "ftrl"])
def test_every_rule_is_evaluated_at_a_step(kind: str) -> None:
    rule = from_name(kind, learning_rate="step:0.8:10:0.5")
    assert rule.at(10) == from_hyper(kind, {"learning_rate": 0.8})
    assert rule.at(11) == from_hyper(kind, {"learning_rate": 0.4})
    assert rule.at(11).at(99) == rule.at(11) and rule.slots == rule.at(1).slots
    assert from_hyper(kind, rule.hyper()) == rule


def test_a_schedule_that_is_not_evaluated_is_no_number() -> None:
    value, out = np.ones(3), np.full(3, np.nan)
    for rule in (SGD(Cosine(0.1, 10)), Adam(Constant(0.1))):
        slots = [np.zeros(3) for _ in rule.slots]
        outs = [np.full(3, np.nan) for _ in rule.slots]
        with pytest.raises(InvalidArgumentError, match=r"no number yet; use rule\.at\(step\)"):
            apply(rule, 1, [value], value, slots, out, outs, Scratch(value.dtype))
        assert np.isnan([out, *outs]).all()


def test_ftrl_takes_no_schedule() -> None:
    words = r"ftrl: learning_rate is .*above 0, and no schedule"
    with pytest.raises(ConfigError, match=words):
        Ftrl(Cosine(0.1, 10))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=words):
        from_name("ftrl", learning_rate="cosine:0.1:10")


def test_only_the_rate_has_a_schedule() -> None:
    with pytest.raises(ConfigError, match=r"momentum: momentum is Constant.*below 1"):
        Momentum(0.1, Constant(0.5))  # type: ignore[arg-type]


@pytest.mark.parametrize("consistency", [ps.Async(), ps.Sync(1)], ids=str)
def test_every_shard_has_the_rate_of_the_step(
    cluster: MakeCluster, consistency: ps.Async | ps.Sync
) -> None:
    """Ten steps at 0.5 and ten at 0.25, on two shards: both at -7.5, to the last bit."""
    job = cluster(2)
    start = {name: np.zeros(3, np.float32) for name in "abcd"}
    rule = SGD(Chain((Constant(0.5, 10), Constant(0.25))))
    job.initialize(start, rule, consistency)
    assert all(job.status(i).bytes_held for i in (0, 1))
    client = job.client("worker:0")
    assert client.job().optimizer == rule
    ones = {name: np.ones(3, np.float32) for name in start}
    client.pull()
    for step in range(1, 21):
        params = client.push_pull(ones)
        expected = -0.5 * min(step, 10) - 0.25 * max(step - 10, 0)
        assert all((params[name] == expected).all() for name in start), step


# The command line.


def parsed(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_job_flags(parser)
    return parser.parse_args(argv)


def test_a_schedule_as_a_flag() -> None:
    text = "warmup:0.1:10,cosine:0.1:90"
    args = parsed("--optimizer", "adam", "--learning-rate", text)
    job = settings_from(args, 1).job()
    assert job.optimizer == Adam(Chain((WarmUp(0.1, 10), Cosine(0.1, 90))))
    assert differences(args, job, 1) == []
    assert differences(parsed("--learning-rate", "WarmUp:.1:10,cosine:1e-1:90:0"), job, 1) == []
    assert differences(parsed("--learning-rate", "0.1"), job, 1) == [
        f"--learning-rate 0.1 is ignored: the job has {text}"
    ]
    plain = settings_from(parsed("--learning-rate", "1e-1"), 1).job()
    assert differences(args, plain, 1)[-1] == (
        f"--learning-rate {text} is ignored: the job has 0.1"
    )


def test_a_flag_with_more_settings_of_the_schedule() -> None:
    args = parsed("--optimizer-arg", "learning_rate.cosine.rate=0.1")
    args.optimizer_arg += ["learning_rate.cosine.steps=50"]
    assert settings_from(args, 1).optimizer == SGD(Cosine(0.1, 50))
    args.learning_rate = "cosine:0.2:50"
    with pytest.raises(ConfigError, match=r"learning_rate\.cosine\.rate is given twice"):
        settings_from(args, 1)
    args.learning_rate = "0.2"
    with pytest.raises(ConfigError, match="learning_rate is a number and a schedule"):
        settings_from(args, 1)


# What is refused.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cosin:0.1:10", ["unknown schedule 'cosin'", *KINDS]),
        ("fast", ["'fast' is not a number", *KINDS]),
        ("", ["'' is not a number"]),
        ("cosine", ["'cosine' is not a number", "cosine:RATE:STEPS[:END]"]),
        ("cosine:0.1", ["lacks steps", "cosine:RATE:STEPS[:END]"]),
        ("step:0.1:10", ["lacks factor", "step:RATE:STEPS:FACTOR"]),
        ("cosine:0.1:", ["'' is not a number"]),
        ("cosine:0.1:ten", ["'ten' is not a number"]),
        ("cosine:0.1:10:0:0", ["too many numbers", "cosine:RATE:STEPS[:END]"]),
        ("cosine:nan:10", ["rate is nan", "0 or more"]),
        ("cosine:inf:10", ["rate is inf", "0 or more"]),
        ("cosine:-0.1:10", ["rate is -0.1", "0 or more"]),
        ("cosine:0.1:10:nan", ["end is nan"]),
        ("cosine:0.1:10:-1", ["end is -1.0"]),
        ("cosine:0.1:0", ["steps is 0", "whole number, 1 or more"]),
        ("cosine:0.1:2.5", ["steps is 2.5", "whole number"]),
        ("cosine:0.1:1e300", ["steps is 1e+300", "whole number"]),
        ("constant:0.1:-1", ["steps is -1", "whole number"]),
        ("step:0.1:10:0", ["factor is 0", "above 0 and at most 1"]),
        ("exponential:0.1:10:1.1", ["factor is 1.1", "above 0 and at most 1"]),
        ("polynomial:0.1:10:0:0", ["power is 0", "above 0"]),
        ("warmup:0.1:10,", ["unknown schedule ''"]),
        ("warmup:0.1:10,,cosine:0.1:10", ["unknown schedule ''"]),
        ("warmup:0.1:10,0.1", ["unknown schedule '0.1'"]),
        ("constant:0.1,cosine:0.1:10", ["part 1, constant:0.1, goes on for ever", "part 2"]),
        ("warmup:1:2,step:1:2:.5,warmup:1:2", ["part 2, step:1:2:0.5, goes on for ever"]),
        (",".join(["warmup:1:2"] * 65), ["65 parts", "2 to 64"]),
    ],
)
def test_a_wrong_text_is_answered_with_what_would_be_right(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        from_name("sgd", learning_rate=text)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"cosine": 1}, r"'learning_rate.cosine' is none of a schedule; write learning_rate.cosin"),
        ({"": 1}, "is none of a schedule"),
        ({"1.2.cosine.rate": 1}, "is none of a schedule"),
        ({"cosine.": 1}, "is none of a schedule"),
        ({"01.cosine.rate": 1}, "is none of a schedule"),
        ({"cosin.rate": 1}, "unknown schedule 'cosin'; choose one of constant:RATE"),
        ({"cosine.rate": 1}, "lacks steps"),
        ({"cosine.rate": 1, "cosine.steps": 2, "cosine.power": 1}, "no number 'power'"),
        ({"cosine.rate": 1, "warmup.steps": 2}, "of kinds 'cosine' and 'warmup'; give one"),
        ({"cosine.rate": math.nan, "cosine.steps": 2}, "rate is nan"),
        ({"1.cosine.rate": 1, "1.cosine.steps": 2}, "has 1 parts"),
        ({"1.constant.rate": 1, "3.constant.rate": 2}, r"hole: there are parts \[1, 3\]"),
        ({"2.constant.rate": 1, "3.constant.rate": 2}, "hole"),
        ({"constant.rate": 1, "1.constant.rate": 2}, r"hole: there are parts \[0, 1\]"),
        ({"1.constant.rate": 1, "2.constant.rate": 2}, "goes on for ever"),
    ],
)
def test_wrong_settings_are_refused(entries: dict[str, float], words: str) -> None:
    hyper = {f"learning_rate.{name}": float(number) for name, number in entries.items()}
    with pytest.raises(ConfigError, match=words) as caught:
        from_hyper("sgd", hyper)
    assert "\n" not in str(caught.value)


def test_a_setting_without_a_schedule_has_no_entries() -> None:
    with pytest.raises(ConfigError, match="momentum: momentum is Constant"):
        from_hyper("momentum", {"momentum.constant.rate": 0.5})
    with pytest.raises(ConfigError, match=r"no setting 'rate\.constant\.rate'; it has learning"):
        from_hyper("sgd", {"rate.constant.rate": 0.5})


@pytest.mark.parametrize("parts", [(), (Constant(0.1),), (0.1, Constant(0.1))])
def test_a_chain_is_made_of_schedules(parts: Any) -> None:
    with pytest.raises(ConfigError, match="schedule chain"):
        Chain(parts)
    with pytest.raises(ConfigError, match="schedule chain: part 1 is"):
        Chain((Chain((Constant(1, 1), Constant(1))), Constant(1)))


def test_a_schedule_is_a_value() -> None:
    for one, other in itertools.pairwise(TEXTS.values()):
        assert one != other and hash(one) == hash(parse(str(one)))
    assert schedules.Constant(1) == Constant(1.0)
