"""What the shards hold together, seen from outside: nothing, one whole job, or parts of one."""

from __future__ import annotations

from collections.abc import Sequence

from paramserver import convert
from paramserver.errors import AlreadyExistsError, ConfigError
from paramserver.layout import Variable, compare_models
from paramserver.v1 import control_pb2 as pb

#: What a shard says of itself.
Status = pb.StatusResponse


def how_far(statuses: Sequence[Status]) -> str:
    """What the shards hold together: "empty", "whole" (one session), "begun" (an initialiser died
    before it came to ps:0, so nothing has ever been trained), or "broken"."""
    held = [status for status in statuses if status.initialized]
    if not held:
        return "empty"
    sessions = {status.session for status in held}
    if len(held) == len(statuses) and len(sessions) == 1:
        return "whole"
    untouched = all(not status.version for status in held)
    return "begun" if untouched and all(status.shard_index for status in held) else "broken"


def check_set(statuses: Sequence[Status]) -> None:
    """Refuses a set of servers that is not a job's set of shards. Raises: ConfigError naming what
    is missing or too much."""
    held = [status for status in statuses if status.initialized]
    for count in {status.shard_count for status in held} - {len(statuses)}:
        here = ", ".join(f"ps:{i}" for i in sorted(status.shard_index for status in held))
        raise ConfigError(
            f"--ps names {len(statuses)} servers, but a job of {count} shards is there ({here}); "
            "name all of its servers, or end them first"
        )
    if len({status.shard_index for status in held}) != len(held):
        raise ConfigError("--ps names servers of two jobs; end those of one first")


def check_model(statuses: Sequence[Status], variables: Sequence[Variable]) -> None:
    """Refuses another model than the one that is there. Raises: AlreadyExistsError naming the
    difference."""
    held = [v for status in statuses for v in convert.layout_from_proto(status.layout).variables]
    if difference := compare_models(held, variables):
        raise AlreadyExistsError(f"another model is here already: {difference}")
