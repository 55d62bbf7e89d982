"""What all parts of a job agree on: set once by the chief, told to everybody who joins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from paramserver.consistency import Async, Consistency
from paramserver.errors import ConfigError
from paramserver.optimizers import SGD, Optimizer


@dataclass(frozen=True)
class Job:
    """A job's settings. `last_step` 0 means no limit; `settings` is free text by name, for the
    workers."""

    consistency: Consistency = field(default_factory=Async)
    optimizer: Optimizer = field(default_factory=SGD)
    last_step: int = 0
    model: bytes = b""
    settings: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.last_step < 1 << 62:
            raise ConfigError(
                f"last_step must be between 0 (no limit) and 2^62, not {self.last_step}"
            )
