"""Values and messages: there and back, and what a message may not say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from paramserver import convert
from paramserver.consistency import Async, Ssp, Sync
from paramserver.cut_off import CutOffStep
from paramserver.errors import ConfigError, InvalidArgumentError, ParamServerError
from paramserver.job import Job
from paramserver.layout import Variable, plan
from paramserver.membership import Departure, LastPush, Member, Roster
from paramserver.optimizers import SGD, Adam, Momentum
from paramserver.push import PushHeader, PushResult
from paramserver.state import Remembered, ShardState
from paramserver.v1 import job_pb2, parameter_pb2, tensor_pb2

BIG = 2**64 - 1

ROSTER = Roster(
    number=7,
    session=BIG,
    members=(Member("worker:0", BIG, 3), Member("worker:1", 1)),
    departed=(Departure("worker:2", 5, 9, "lease of 10 s ended"),),
    open=True,
    complete=True,
    last_pushes=(LastPush("worker:0", BIG, 12),),
    last_step=200,
    rounds=12,
)
JOB = Job(Sync(3, 2), Momentum(0.5, nesterov=True), 200, b"model", {"data": "diabetes"})
VARIABLES = (
    Variable("w", "float32", (2, 3), 0, 0, 5),
    Variable("b", "float64", (), 1, 0, 5),
    Variable("none", "float32", (0,), 0, 6, 5),
)
STATE = ShardState(
    BIG,
    1,
    2,
    JOB,
    VARIABLES,
    version=9,
    global_step=8,
    rounds=7,
    remembered=(Remembered("worker:0", BIG, 9, 10),),
    members=(Member("worker:0", BIG, 3),),
    cut_off=(CutOffStep("worker:1", 1, 4, -1),),
)


@pytest.mark.parametrize(
    ("to_proto", "from_proto", "value"),
    [
        (convert.roster_to_proto, convert.roster_from_proto, ROSTER),
        (convert.roster_to_proto, convert.roster_from_proto, Roster()),
        (convert.job_to_proto, convert.job_from_proto, JOB),
        (convert.job_to_proto, convert.job_from_proto, Job()),
        (convert.state_to_proto, convert.state_from_proto, STATE),
        (convert.variable_to_proto, convert.variable_from_proto, VARIABLES[0]),
        (convert.member_to_proto, convert.member_from_proto, Member("worker:0", BIG, 3)),
        (convert.last_push_to_proto, convert.last_push_from_proto, LastPush("worker:0", 1, 2)),
        (convert.cut_off_to_proto, convert.cut_off_from_proto, CutOffStep("worker:1", 1, 4, -1)),
        (
            convert.push_header_to_proto,
            convert.push_header_from_proto,
            PushHeader(BIG, "worker:0", 1, 2, 3, 4, 5, 6),
        ),
        *(
            (
                convert.push_result_to_proto,
                convert.push_result_from_proto,
                PushResult(reason == "applied", reason, 4, 3, 2),
            )
            for reason in ("applied", "job_complete")
        ),
        (convert.sequences_to_proto, convert.sequences_from_proto, {("worker:0", BIG): 4}),
        *(
            (convert.consistency_to_proto, convert.consistency_from_proto, rule)
            for rule in (Sync(4), Sync(4, 2), Ssp(0), Ssp(3), Async())
        ),
        *(
            (convert.optimizer_to_proto, convert.optimizer_from_proto, rule)
            for rule in (SGD(0.5), Momentum(), Adam(1e-4))
        ),
    ],
)
def test_there_and_back(
    to_proto: Callable[[Any], Any], from_proto: Callable[[Any], Any], value: Any
) -> None:
    message = to_proto(value)
    if not isinstance(message, list):
        message = type(message).FromString(message.SerializeToString())
    assert from_proto(message) == value


def test_a_layout_there_and_back() -> None:
    layout = plan(
        [
            Variable("w", "float32", (2, 3)),
            Variable("none", "float32", (0, 2)),
            Variable("b", "float64", (), updates=4),
            Variable("v", "float32", (5,)),
        ]
    )
    message = convert.layout_to_proto(layout, Adam())
    assert [list(group.slots) for group in message.groups] == [["m", "v"]] * 2
    assert message.groups[0].optimizer.kind == "adam"
    read = convert.layout_from_proto(message)
    assert read == layout
    assert read.ranges(["v", "b"]) == layout.ranges(["v", "b"])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: setattr(m.variables[0], "group", 3), "no such group"),
        (lambda m: setattr(m.variables[0], "dtype", 2), "no such group of its dtype"),
        (lambda m: setattr(m.variables[0], "dtype", 0), "variable 'a' has dtype number 0"),
        (lambda m: setattr(m.variables[0], "offset", -1), "overlaps"),
        (lambda m: setattr(m.variables[1], "offset", 1), "overlaps"),
        (lambda m: setattr(m.variables[1], "offset", 9), "beyond"),
        (lambda m: setattr(m.groups[0], "size", 3), "beyond"),
        (lambda m: setattr(m.groups[0], "dtype", 7), "group 0 has dtype number 7"),
        (lambda m: setattr(m.variables[0], "name", "c"), "fingerprint"),
        (lambda m: setattr(m.variables[0], "name", "../x y"), "variable name"),
        (lambda m: setattr(m.variables[0], "updates", -1), "-1 updates"),
        (lambda m: m.variables[0].shape.extend([1] * 1000), "at most 32 axes"),
        (lambda m: m.variables[0].shape.append(-1), "none negative"),
        (lambda m: m.variables[0].shape.extend([2**40, 2**40]), "beyond any shard"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(change: Callable[[Any], Any], says: str) -> None:
    layout = plan([Variable("a", "float32", (2,)), Variable("b", "float32", (2,))])
    message = convert.layout_to_proto(layout, SGD())
    change(message)
    with pytest.raises(InvalidArgumentError, match=says):
        convert.layout_from_proto(message)


@pytest.mark.parametrize(
    ("message", "kind", "says"),
    [
        (job_pb2.Job(), InvalidArgumentError, "mode number 0 is unknown"),
        (job_pb2.Job(consistency={"mode": 1}), ConfigError, "workers >= 1"),
        (job_pb2.Job(consistency={"mode": 3}, optimizer={"kind": "magic"}), ConfigError, "magic"),
        (
            job_pb2.Job(consistency={"mode": 3}, optimizer={"kind": "sgd"}, last_step=-1),
            ConfigError,
            "last_step",
        ),
    ],
)
def test_a_job_that_cannot_be_is_refused(
    message: job_pb2.Job, kind: type[ParamServerError], says: str
) -> None:
    with pytest.raises(kind, match=says):
        convert.job_from_proto(message)


def test_a_push_with_negative_numbers_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="push has clock -1"):
        convert.push_header_from_proto(parameter_pb2.PushHeader(clock=-1))


def test_news_is_there_or_not() -> None:
    assert convert.roster_in(parameter_pb2.Caller()) is None
    caller = parameter_pb2.Caller(roster=convert.roster_to_proto(ROSTER))
    assert convert.roster_in(caller) == ROSTER


def test_every_dtype_and_mode_is_known() -> None:
    for number in tensor_pb2.DType.values()[1:]:
        variable = Variable("v", convert.dtype_from_proto(number, "v"), ())
        assert convert.variable_to_proto(variable).dtype == number
    for mode in job_pb2.Consistency.Mode.values()[1:]:
        convert.consistency_from_proto(job_pb2.Consistency(mode=mode, workers=1))
