"""Everything that can go wrong, as one tree. No gRPC here: `transport` maps kinds to statuses.

    ParamServerError
    ├── ConfigError               a flag, a variable of the environment or a setting is wrong
    ├── InvalidArgumentError      a request that can never be right: shape, dtype, range, NaN
    ├── NotFoundError             an unknown variable
    ├── FailedPreconditionError   not now: the shard is in another state
    │   └── NotInitializedError   the shard is empty; the chief has not been here yet
    ├── AlreadyExistsError        a live duplicate: a worker's index, another model
    ├── AbortedError              what the caller computed counts no more; pull again
    │   ├── SessionSupersededError  a restore started a new session
    │   └── LeaseLostError          the caller is no longer a member
    ├── ResourceExhaustedError    over a limit
    ├── UnavailableError          nobody answered; try again
    ├── DeadlineExceededError     nobody answered in time
    ├── UnauthenticatedError      who are you
    ├── PermissionDeniedError     not you
    └── CheckpointError           nothing on disk that can be trusted

A message names the thing and the remedy, in one line. A refusal by policy (a push after the limit)
is no error: it is a `PushResult` with `applied=False`.
"""

from __future__ import annotations

from typing import ClassVar


class ParamServerError(Exception):
    """The root: catch this to catch all of ours."""

    #: Name of the gRPC status that carries this kind.
    code: ClassVar[str] = "INTERNAL"
    #: Further facts for a program that handles it, as (lower-case key, text) pairs.
    metadata: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        """The message itself, also for the kinds that are a `KeyError` (which would quote it)."""
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(ParamServerError, ValueError):
    """A setting is wrong: names the flag or key, the value, and what is allowed."""

    code: ClassVar[str] = "INVALID_ARGUMENT"


class InvalidArgumentError(ParamServerError, ValueError):
    """A request that can never be right."""

    code: ClassVar[str] = "INVALID_ARGUMENT"


class NotFoundError(ParamServerError, KeyError):
    """An unknown variable."""

    code: ClassVar[str] = "NOT_FOUND"


class FailedPreconditionError(ParamServerError):
    """The shard is in another state than the request needs."""

    code: ClassVar[str] = "FAILED_PRECONDITION"


class NotInitializedError(FailedPreconditionError):
    """The shard is empty: started a moment ago, or restarted and not restored yet."""


class AlreadyExistsError(ParamServerError):
    """There is one already: a live worker with this index, another model."""

    code: ClassVar[str] = "ALREADY_EXISTS"


class AbortedError(ParamServerError):
    """What the caller computed counts no more; it pulls again and goes on."""

    code: ClassVar[str] = "ABORTED"


class SessionSupersededError(AbortedError):
    """A restore started a new session since the caller pulled."""


class LeaseLostError(AbortedError):
    """The caller is no member (any more): its lease ended, or it left."""


class ResourceExhaustedError(ParamServerError):
    """Over a limit; the message names it and the option that raises it."""

    code: ClassVar[str] = "RESOURCE_EXHAUSTED"


class UnavailableError(ParamServerError, ConnectionError):
    """Nobody answered; the message names the address and why."""

    code: ClassVar[str] = "UNAVAILABLE"


class DeadlineExceededError(ParamServerError, TimeoutError):
    """Nobody answered in time; the message says what was waited for."""

    code: ClassVar[str] = "DEADLINE_EXCEEDED"


class UnauthenticatedError(ParamServerError):
    """The server wants to know who calls."""

    code: ClassVar[str] = "UNAUTHENTICATED"


class PermissionDeniedError(ParamServerError):
    """The server knows who calls, and refuses."""

    code: ClassVar[str] = "PERMISSION_DENIED"


class CheckpointError(ParamServerError):
    """No checkpoint can be read or written: names the file, the key and the remedy."""

    code: ClassVar[str] = "FAILED_PRECONDITION"
