"""A user's gradients as they travel: checked in full, and packed in the order of a shard's layout.

Second stop in the walk of one Push. Ten thousand small variables must not cost ten thousand calls
into NumPy: neighbours are packed into one array, looked at once for NaN, and named by one range. A
large one is referred to where it lies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paramserver.codec import gradient_array
from paramserver.layout import DTYPES, Array, Layout, Range, check_finite

#: Below so many bytes a gradient is copied beside its neighbours rather than sent by itself.
SMALL_BYTES = 64 << 10


def pack(
    layout: Layout, gradients: Mapping[str, npt.ArrayLike]
) -> tuple[list[tuple[Range, Array]], int]:
    """The gradients of one shard's variables as ranges with flat arrays, in layout order, and how
    many of `gradients` are its. Costs one copy of the small ones, none of the others.

    Raises: InvalidArgumentError for a shape, a dtype, NaN or infinity, naming the variable."""
    found = 0
    runs: list[_Run] = []
    for group, members in enumerate(layout.order):
        wanted = DTYPES[layout.groups[group].dtype]
        run: _Run | None = None
        for variable in members:
            value = gradients.get(variable.name, _ABSENT)
            if value is _ABSENT:
                continue
            found += 1
            if (
                type(value) is np.ndarray
                and value.dtype == wanted
                and value.shape == variable.shape
            ):
                flat: Array = value.reshape(-1)
            else:
                flat = gradient_array(variable.name, value, variable)
            large = flat.nbytes > SMALL_BYTES
            if run is None or large or run.stop != variable.offset:
                run = _Run(group, variable.offset, variable.offset, [])
                runs.append(run)
            run.arrays.append(flat)
            run.stop += flat.size
            if large:
                run = None
    for variable in layout.empty:
        if variable.name in gradients:
            gradient_array(variable.name, gradients[variable.name], variable)
            found += 1
    parts = [run.packed() for run in runs]
    for piece, array in parts:
        check_finite(layout, piece, array)
    return parts, found


_ABSENT: Any = object()


@dataclass
class _Run:
    """Gradients of variables that lie back to back: elements start to stop of a group."""

    group: int
    start: int
    stop: int
    arrays: list[Array]

    def packed(self) -> tuple[Range, Array]:
        array = self.arrays[0] if len(self.arrays) == 1 else np.concatenate(self.arrays)
        return Range(self.group, self.start, self.stop - self.start), array
