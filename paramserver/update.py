"""One push on its way into the parameters, and the arithmetic of applying it. No locks, no gRPC.

Third part of the walk of one Push: `Shard.begin` makes a `Push`, the service feeds it the pieces as
they arrive, and when it is complete the shard makes an `Update` of it (of all pushes of a round, if
synchronous). `Update.run` is the arithmetic: it reads the current arrays and the pieces, writes
spare arrays, and may therefore run outside every lock. `Shard.commit` then swaps the references.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from paramserver import optimizers
from paramserver.buffers import Buffer, FlatArray
from paramserver.layout import Array, Coverage, Layout, Range, check_finite
from paramserver.optimizers import Optimizer
from paramserver.push import PushHeader


class Push:
    """A gradient that is arriving. Made by `Shard.begin`; fed by one thread; owns nothing but
    references.

    The pieces are kept as they came (read-only views of the messages), so a push costs no copy."""

    def __init__(self, header: PushHeader, layout: Layout) -> None:
        self.header = header
        self.layout = layout
        #: Why it must not be committed any more; set by the shard under its lock.
        self.cancelled = ""
        self.nbytes = 0
        self._coverage = Coverage(layout)
        self._pieces: dict[int, list[tuple[int, Array]]] = {}
        self._sorted = True

    def feed(self, piece: Range, values: Array) -> None:
        """Takes a piece of the gradient: `values` (piece.count,) of the group's dtype, kept by
        reference.

        Raises: InvalidArgumentError for a piece outside the layout, an overlap, NaN or infinity (it
        names the variable). The push is then to be aborted; nothing has changed."""
        self.layout.check(piece)
        if not piece.count:
            return
        self._coverage.add(piece)
        check_finite(self.layout, piece, values)
        pieces = self._pieces.setdefault(piece.group, [])
        if pieces and pieces[-1][0] > piece.offset:
            self._sorted = False
        pieces.append((piece.offset, values))
        self.nbytes += values.nbytes

    def finish(self) -> None:
        """Checks what has arrived, after the last piece. Raises: InvalidArgumentError."""
        self._coverage.check_whole_variables()
        if not self._sorted:
            for pieces in self._pieces.values():
                pieces.sort(key=lambda p: p[0])
            self._sorted = True

    @property
    def groups(self) -> list[int]:
        """The groups it touches."""
        return sorted(self._pieces)

    def pieces(self, group: int) -> list[tuple[int, Array]]:
        """(offset, values) of a group, sorted, disjoint."""
        return self._pieces.get(group, [])


@dataclass
class Target:
    """The arrays of one group that an update reads and writes: slot 0 the values, then the
    slots."""

    group: int
    t: int
    flats: list[FlatArray]
    current: list[Array]
    spares: list[Buffer]


@dataclass
class Update:
    """The gradients of one version, and where the next one is made. Only one exists at a time.

    `pushes` in worker-index order: they are summed in it, then divided by their number."""

    pushes: Sequence[Push]
    rule: Optimizer
    targets: list[Target]
    done: bool = False
    scratch: dict[np.dtype[np.floating], optimizers.Scratch] = field(default_factory=dict)

    def run(self) -> None:
        """Computes the next version into the spare arrays. Takes no lock; call it once.

        Each element of values and slots is read and written once, each gradient read once; what no
        gradient covers is copied over. A gradient that leaves a variable out counts as zero
        there."""
        for target in self.targets:
            dtype = target.current[0].dtype
            scratch = self.scratch.setdefault(dtype, optimizers.Scratch(dtype))
            outs = [spare.array for spare in target.spares]
            pieces = [push.pieces(target.group) for push in self.pushes]
            zero = np.zeros((), dtype)
            at = 0
            for start, stop, gradients in _segments(pieces, zero):
                self._carry_over(target, at, start)
                optimizers.apply(
                    self.rule,
                    target.t,
                    gradients,
                    target.current[0][start:stop],
                    [slot[start:stop] for slot in target.current[1:]],
                    outs[0][start:stop],
                    [out[start:stop] for out in outs[1:]],
                    scratch,
                )
                at = stop
            self._carry_over(target, at, len(outs[0]))
        self.done = True

    @staticmethod
    def _carry_over(target: Target, start: int, stop: int) -> None:
        if start < stop:
            for current, spare in zip(target.current, target.spares, strict=True):
                np.copyto(spare.array[start:stop], current[start:stop])


def _segments(
    pieces: Sequence[Sequence[tuple[int, Array]]], zero: Array
) -> Iterator[tuple[int, int, list[Array]]]:
    """Cuts several pushes' pieces of one group at all their boundaries.

    Yields (start, stop, the gradients that cover it, in the order of the pushes), ascending."""
    if len(pieces) == 1:
        for offset, values in pieces[0]:
            yield offset, offset + len(values), [values]
        return
    cuts = sorted({at for own in pieces for off, v in own for at in (off, off + len(v))})
    starts = [[off for off, _ in own] for own in pieces]
    for start, stop in itertools.pairwise(cuts):
        covered = False
        gradients = []
        for own, offsets in zip(pieces, starts, strict=True):
            i = bisect_right(offsets, start) - 1
            if i >= 0 and start < offsets[i] + len(own[i][1]):
                gradients.append(own[i][1][start - offsets[i] : stop - offsets[i]])
                covered = True
            else:
                # Zeros without memory: every element is the same one.
                gradients.append(np.broadcast_to(zero, stop - start))
        if covered:
            yield start, stop, gradients
