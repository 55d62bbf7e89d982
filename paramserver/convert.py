"""Values <-> messages: what a shard decided and what a job is made of. No arrays, no gRPC here.

Each value that crosses the wire has its two functions here, side by side: `x_to_proto` and
`x_from_proto`. A value checks itself; what a message can say and a value cannot is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from paramserver import optimizers
from paramserver.codec import dtype_from_proto, dtype_to_proto
from paramserver.consistency import Async, Consistency, Ssp, Sync
from paramserver.cut_off import CutOffStep
from paramserver.errors import InvalidArgumentError
from paramserver.job import Job
from paramserver.layout import Group, Layout, Variable, build, check_variable
from paramserver.membership import Departure, LastPush, Member, Roster
from paramserver.optimizers import Optimizer
from paramserver.push import PushHeader, PushResult
from paramserver.state import Remembered, ShardState
from paramserver.v1 import control_pb2, job_pb2, parameter_pb2, tensor_pb2

# -- the job -------------------------------------------------------------------------------------


def job_to_proto(job: Job) -> job_pb2.Job:
    """A job's settings."""
    return job_pb2.Job(
        consistency=consistency_to_proto(job.consistency),
        optimizer=optimizer_to_proto(job.optimizer),
        last_step=job.last_step,
        model=job.model,
        settings=job.settings,
    )


def job_from_proto(message: job_pb2.Job) -> Job:
    """A job's settings. Raises: InvalidArgumentError; ConfigError for settings that cannot be."""
    return Job(
        consistency_from_proto(message.consistency),
        optimizer_from_proto(message.optimizer),
        message.last_step,
        message.model,
        dict(message.settings),
    )


def consistency_to_proto(rule: Consistency) -> job_pb2.Consistency:
    """When pulls wait."""
    match rule:
        case Sync(workers, min_workers):
            return job_pb2.Consistency(
                mode=job_pb2.Consistency.MODE_SYNC, workers=workers, min_workers=min_workers
            )
        case Ssp(slack):
            return job_pb2.Consistency(mode=job_pb2.Consistency.MODE_SSP, slack=slack)
        case Async():
            return job_pb2.Consistency(mode=job_pb2.Consistency.MODE_ASYNC)


def consistency_from_proto(message: job_pb2.Consistency) -> Consistency:
    """When pulls wait. Raises: InvalidArgumentError for a mode it does not know; ConfigError."""
    match message.mode:
        case job_pb2.Consistency.MODE_SYNC:
            return Sync(message.workers, message.min_workers)
        case job_pb2.Consistency.MODE_SSP:
            return Ssp(message.slack)
        case job_pb2.Consistency.MODE_ASYNC:
            return Async()
    raise InvalidArgumentError(
        f"consistency mode number {message.mode} is unknown; choose sync, ssp or async"
    )


def optimizer_to_proto(rule: Optimizer) -> tensor_pb2.Optimizer:
    """An update rule and its settings."""
    return tensor_pb2.Optimizer(kind=rule.kind, hyper=rule.hyper())


def optimizer_from_proto(message: tensor_pb2.Optimizer) -> Optimizer:
    """An update rule and its settings. Raises: ConfigError for an unknown rule or setting."""
    return optimizers.from_hyper(message.kind, dict(message.hyper))


# -- the layout ----------------------------------------------------------------------------------


def variable_to_proto(variable: Variable) -> tensor_pb2.Variable:
    """A named dense array, and where it lies."""
    return tensor_pb2.Variable(
        name=variable.name,
        dtype=dtype_to_proto(variable.dtype),
        shape=variable.shape,
        group=variable.group,
        offset=variable.offset,
        updates=variable.updates,
    )


def variable_from_proto(message: tensor_pb2.Variable) -> Variable:
    """A named dense array, and where it lies.

    Raises: InvalidArgumentError for a name, dtype or shape that no shard can hold."""
    if message.updates < 0:
        raise InvalidArgumentError(f"variable {message.name!r} has {message.updates} updates")
    variable = Variable(
        message.name,
        dtype_from_proto(message.dtype, f"variable {message.name[:256]!r}"),
        tuple(message.shape),
        message.group,
        message.offset,
        message.updates,
    )
    check_variable(variable)
    return variable


def layout_to_proto(layout: Layout, rule: Optimizer) -> tensor_pb2.Layout:
    """What a shard holds, all of it updated by one rule."""
    optimizer = optimizer_to_proto(rule)
    return tensor_pb2.Layout(
        variables=map(variable_to_proto, layout.variables),
        groups=[
            tensor_pb2.Group(
                dtype=dtype_to_proto(group.dtype),
                size=group.size,
                optimizer=optimizer,
                slots=rule.slots,
            )
            for group in layout.groups
        ],
        fingerprint=layout.fingerprint,
    )


def layout_from_proto(message: tensor_pb2.Layout) -> Layout:
    """What a shard says it holds. Raises: InvalidArgumentError if that cannot be."""
    variables = tuple(map(variable_from_proto, message.variables))
    updates = {variable.group: variable.updates for variable in variables}
    groups = tuple(
        Group(dtype_from_proto(group.dtype, f"group {index}"), group.size, updates.get(index, 0))
        for index, group in enumerate(message.groups)
    )
    taken = [0] * len(groups)
    for variable in sorted(variables, key=lambda v: (v.group, v.offset)):
        where = f"variable {variable.name!r} at {variable.offset} of group {variable.group}"
        if variable.group >= len(groups) or variable.dtype != groups[variable.group].dtype:
            raise InvalidArgumentError(f"{where}: the layout has no such group of its dtype")
        if not variable.size:
            continue
        if variable.offset < taken[variable.group]:
            raise InvalidArgumentError(f"{where} overlaps another")
        taken[variable.group] = variable.offset + variable.size
        if taken[variable.group] > groups[variable.group].size:
            raise InvalidArgumentError(f"{where} is beyond its end")
    layout = build(variables, groups)
    if message.fingerprint != layout.fingerprint:
        raise InvalidArgumentError("the layout's fingerprint is not that of its variables")
    return layout


# -- who takes part ------------------------------------------------------------------------------


def member_to_proto(member: Member) -> job_pb2.Member:
    """A worker that takes part."""
    return job_pb2.Member(worker=member.worker, incarnation=member.incarnation, clock=member.clock)


def member_from_proto(message: job_pb2.Member) -> Member:
    """A worker that takes part."""
    return Member(message.worker, message.incarnation, message.clock)


def last_push_to_proto(last: LastPush) -> job_pb2.LastPush:
    """How far one worker's pushes have come."""
    return job_pb2.LastPush(
        worker=last.worker, incarnation=last.incarnation, sequence=last.sequence
    )


def last_push_from_proto(message: job_pb2.LastPush) -> LastPush:
    """How far one worker's pushes have come."""
    return LastPush(message.worker, message.incarnation, message.sequence)


def sequences_to_proto(sequences: Mapping[tuple[str, int], int]) -> list[job_pb2.LastPush]:
    """How far each worker's pushes have come, by (worker, incarnation)."""
    return [
        job_pb2.LastPush(worker=worker, incarnation=incarnation, sequence=sequence)
        for (worker, incarnation), sequence in sequences.items()
    ]


def sequences_from_proto(messages: Iterable[job_pb2.LastPush]) -> dict[tuple[str, int], int]:
    """How far each worker's pushes have come, by (worker, incarnation)."""
    return {(m.worker, m.incarnation): m.sequence for m in messages}


def roster_to_proto(roster: Roster) -> job_pb2.Roster:
    """What ps:0 decided for all shards."""
    return job_pb2.Roster(
        number=roster.number,
        session=roster.session,
        members=map(member_to_proto, roster.members),
        departed=[
            job_pb2.Departure(
                worker=gone.worker,
                incarnation=gone.incarnation,
                sequence=gone.sequence,
                reason=gone.reason,
            )
            for gone in roster.departed
        ],
        open=roster.open,
        complete=roster.complete,
        last_pushes=map(last_push_to_proto, roster.last_pushes),
        last_step=roster.last_step,
        rounds=roster.rounds,
    )


def roster_from_proto(message: job_pb2.Roster) -> Roster:
    """What ps:0 decided for all shards. Raises: InvalidArgumentError for what it cannot have
    decided."""
    roster = Roster(
        message.number,
        message.session,
        tuple(map(member_from_proto, message.members)),
        tuple(
            Departure(gone.worker, gone.incarnation, gone.sequence, gone.reason)
            for gone in message.departed
        ),
        message.open,
        message.complete,
        tuple(map(last_push_from_proto, message.last_pushes)),
        message.last_step,
        message.rounds,
    )
    roster.check()
    return roster


class CarriesRoster(Protocol):
    """Every message that has an optional field `roster`: requests' callers, and ps:0's answers."""

    @property
    def roster(self) -> job_pb2.Roster: ...

    def HasField(self, field_name: Any) -> bool: ...


def roster_in(message: CarriesRoster) -> Roster | None:
    """The news that a message carries; None: none."""
    return roster_from_proto(message.roster) if message.HasField("roster") else None


# -- a push --------------------------------------------------------------------------------------


def push_header_to_proto(header: PushHeader) -> parameter_pb2.PushHeader:
    """Whose step a push is. The caller's news (`known_roster`, `roster`) is the client's to add."""
    return parameter_pb2.PushHeader(
        caller=parameter_pb2.Caller(
            session=header.session, worker=header.worker, incarnation=header.incarnation
        ),
        sequence=header.sequence,
        clock=header.clock,
        step=header.step,
        pulled_version=header.pulled_version,
        examples=header.examples,
    )


def push_header_from_proto(message: parameter_pb2.PushHeader) -> PushHeader:
    """Whose step a push is. Raises: InvalidArgumentError for a number that must not be negative."""
    for name in ("sequence", "clock", "step", "pulled_version", "examples"):
        if getattr(message, name) < 0:
            raise InvalidArgumentError(f"push has {name} {getattr(message, name)}, below 0")
    return PushHeader(
        message.caller.session,
        message.caller.worker,
        message.caller.incarnation,
        message.sequence,
        message.clock,
        message.step,
        message.pulled_version,
        message.examples,
    )


def push_result_to_proto(result: PushResult) -> parameter_pb2.PushResult:
    """What became of a push."""
    return parameter_pb2.PushResult(
        applied=result.applied,
        reason=_REASON_NUMBERS[result.reason],
        version=result.version,
        staleness=result.staleness,
        global_step=result.global_step,
    )


def push_result_from_proto(message: parameter_pb2.PushResult) -> PushResult:
    """What became of a push."""
    return PushResult(
        message.applied,
        _REASON_NAMES.get(message.reason, "unknown"),
        message.version,
        message.staleness,
        message.global_step,
    )


_REASON_NUMBERS = {
    "applied": parameter_pb2.PushResult.REASON_APPLIED,
    "job_complete": parameter_pb2.PushResult.REASON_JOB_COMPLETE,
}
_REASON_NAMES = {number: name for name, number in _REASON_NUMBERS.items()}
assert len(_REASON_NAMES) == len(parameter_pb2.PushResult.Reason.values()) - 1


# -- a shard's state -----------------------------------------------------------------------------


def cut_off_to_proto(step: CutOffStep) -> job_pb2.CutOffStep:
    """A step that is in on some shards only."""
    return job_pb2.CutOffStep(
        worker=step.worker, incarnation=step.incarnation, sequence=step.sequence, delta=step.delta
    )


def cut_off_from_proto(message: job_pb2.CutOffStep) -> CutOffStep:
    """A step that is in on some shards only."""
    return CutOffStep(message.worker, message.incarnation, message.sequence, message.delta)


def state_to_proto(state: ShardState) -> control_pb2.ShardState:
    """Everything about a shard but its arrays."""
    return control_pb2.ShardState(
        session=state.session,
        shard_index=state.index,
        shard_count=state.count,
        job=job_to_proto(state.job),
        variables=map(variable_to_proto, state.variables),
        version=state.version,
        global_step=state.global_step,
        rounds=state.rounds,
        remembered=[
            control_pb2.Remembered(
                worker=line.worker,
                incarnation=line.incarnation,
                sequence=line.sequence,
                clock=line.clock,
            )
            for line in state.remembered
        ],
        members=map(member_to_proto, state.members),
        cut_off=map(cut_off_to_proto, state.cut_off),
    )


def state_from_proto(message: control_pb2.ShardState) -> ShardState:
    """Everything about a shard but its arrays. Raises: InvalidArgumentError, ConfigError."""
    return ShardState(
        message.session,
        message.shard_index,
        message.shard_count,
        job_from_proto(message.job),
        tuple(map(variable_from_proto, message.variables)),
        message.version,
        message.global_step,
        message.rounds,
        tuple(
            Remembered(line.worker, line.incarnation, line.sequence, line.clock)
            for line in message.remembered
        ),
        tuple(map(member_from_proto, message.members)),
        tuple(map(cut_off_from_proto, message.cut_off)),
    )
