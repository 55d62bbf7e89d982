"""Which shard holds which variable. No gRPC here and no state: equal models are placed equally.

Where a job is initialised or restored, a placement is decided; everybody else goes by the layouts
that the shards answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise

from paramserver.errors import ConfigError, InvalidArgumentError
from paramserver.layout import Variable

#: One list of variables a shard, in shard order; a shard that holds none has an empty list.
Placement = list[list[Variable]]

#: Spreads variables (sorted by name, each name once) over one list a shard (at least one). Pure: it
#: depends on no hash, clock or random number.
Strategy = Callable[[Sequence[Variable], int], Placement]


def by_size(variables: Sequence[Variable], shards: int) -> Placement:
    """Largest first, each onto the shard with the fewest bytes, then variables, then lowest index.

    Variables stay whole, so no shard holds more than the mean plus (1 - 1 / shards) of the largest
    variable. One that dwarfs all others makes its shard the largest; only cutting it would help."""
    placement: Placement = [[] for _ in range(shards)]
    loads = [(0, 0, shard) for shard in range(shards)]  # (bytes, variables, shard), a heap
    for variable in sorted(variables, key=lambda v: -v.nbytes):  # stable: equal sizes by name
        load, count, shard = loads[0]
        placement[shard].append(variable)
        heapq.heapreplace(loads, (load + variable.nbytes, count + 1, shard))
    return placement


def place(variables: Sequence[Variable], shards: int, strategy: Strategy = by_size) -> Placement:
    """Spreads a model over `shards` lists, each sorted by name; the caller's order says nothing.

    Every shard gets a list, also when there are fewer variables. The lists are yours.
    Raises: ConfigError for fewer than one shard; InvalidArgumentError for a name given twice."""
    if shards < 1:
        raise ConfigError(f"cannot place variables on {shards} shards; name at least one ps")
    ordered = sorted(variables, key=lambda v: v.name)
    for one, other in pairwise(ordered):
        if one.name == other.name:
            raise InvalidArgumentError(f"variable {one.name!r} is given twice")
    return [sorted(held, key=lambda v: v.name) for held in strategy(ordered, shards)]


def describe(placement: Sequence[Sequence[Variable]]) -> list[str]:
    """Lines for the log: one a variable, by name, then one a shard with what it holds in all."""
    placed = sorted(
        ((variable, shard) for shard, held in enumerate(placement) for variable in held),
        key=lambda pair: pair[0].name,
    )
    lines = [
        f"variable={v.name} shape={v.shape} dtype={v.dtype} bytes={v.nbytes} shard=ps:{shard}"
        for v, shard in placed
    ]
    for shard, held in enumerate(placement):
        total = sum(v.nbytes for v in held)
        lines.append(f"shard=ps:{shard} variables={len(held)} bytes={total}")
    return lines
