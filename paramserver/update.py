"""One push on its way into the parameters, and the arithmetic of applying it. No locks, no gRPC.

Third part of the walk of one Push: `Shard.begin` makes a `Push`, the service feeds it the pieces as
they arrive, and `Update` does the arithmetic: it reads the current arrays and the gradients, writes
spare arrays, and may therefore run outside every lock. A push that finds no other update in the
making is *direct*: each piece is applied as it arrives. Others are *staged*: their pieces are kept
and applied once they are complete and it is their turn (in a synchronous job: with their round).
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paramserver import optimizers
from paramserver.buffers import Buffer
from paramserver.errors import UnavailableError
from paramserver.layout import Array, Coverage, Layout, Range, check_finite
from paramserver.optimizers import Optimizer
from paramserver.push import PushHeader, PushResult


class Push:
    """A gradient that is arriving. Made by `Shard.begin`; fed by one thread.

    Direct (`update` is set): a piece costs no memory and no copy. Staged: the pieces are kept as
    they came, read-only views of the messages, so that costs no copy either."""

    def __init__(self, header: PushHeader, layout: Layout, update: Update | None = None) -> None:
        self.header = header
        self.layout = layout
        #: What applies the pieces as they arrive; None: staged.
        self.update = update
        #: Why it must not be committed any more; set by the shard under its lock.
        self.cancelled = ""
        #: What became of it, once that is known; set by the shard under its lock.
        self.result: PushResult | None = None
        #: Bytes kept.
        self.nbytes = 0
        #: Elements fed so far, for whoever waits to see whether it moves.
        self.fed = 0
        self._coverage = Coverage(layout)
        self._latest: Range | None = None
        self._pieces: dict[int, list[tuple[int, Array]]] = {}
        self._sorted = True

    def feed(self, piece: Range, values: Array) -> None:
        """Takes a piece of the gradient: `values` (piece.count,) of the group's dtype.

        Raises: InvalidArgumentError for a piece outside the layout, an overlap, NaN or infinity (it
        names the variable); UnavailableError if it was cancelled meanwhile. The push is then to be
        aborted; nothing has changed."""
        if self.cancelled:
            raise UnavailableError(f"push {self.header.sequence}: {self.cancelled}")
        self.layout.check(piece)
        if not piece.count:
            return
        self._coverage.add(piece)
        check_finite(self.layout, piece, values)
        self.fed += piece.count
        self._latest = piece
        if self.update:
            self.update.apply(piece.group, piece.offset, piece.offset + piece.count, [values])
            return
        pieces = self._pieces.setdefault(piece.group, [])
        if pieces and pieces[-1][0] > piece.offset:
            self._sorted = False
        pieces.append((piece.offset, values))
        self.nbytes += values.nbytes

    def finish(self) -> None:
        """Checks what has arrived, after the last piece. Raises: InvalidArgumentError."""
        self._coverage.check_whole_variables()
        if self.update:
            for group in self.update.touched:
                for start, stop in self._coverage.gaps(group):
                    self.update.carry_over(group, start, stop)
        if not self._sorted:
            for pieces in self._pieces.values():
                pieces.sort(key=lambda p: p[0])
            self._sorted = True

    @property
    def where(self) -> str:
        """How far it has come, for a message: ", at variable 'w'"."""
        return self.layout.near(self._latest) if self._latest else ""

    @property
    def groups(self) -> list[int]:
        """The groups it touches, if staged."""
        return sorted(self._pieces)

    def pieces(self, group: int) -> list[tuple[int, Array]]:
        """(offset, values) of a group, sorted, disjoint; staged only."""
        return self._pieces.get(group, [])


@dataclass
class Target:
    """What an update reads and writes of one group: the values, then the slots. `t` counts its
    updates from 1."""

    t: int
    current: list[Array]
    spares: list[Buffer]


class Update:
    """The next version of some groups in the making. One thread writes it, outside every lock."""

    def __init__(self, rule: Optimizer, targets: Mapping[int, Target]) -> None:
        self.rule = rule
        self.targets = targets
        #: The groups that a gradient has been applied to.
        self.touched: set[int] = set()
        #: The staged pushes it is made of, and whether they have been applied; see `run`.
        self.pushes: Sequence[Push] = ()
        self.done = False
        self._scratch: dict[np.dtype[np.floating], optimizers.Scratch] = {}

    def apply(self, group: int, start: int, stop: int, gradients: Sequence[Array]) -> None:
        """Applies the mean of `gradients`, (stop - start,) each, to that piece of a group.

        Each element of values and slots is read and written once, each gradient read once."""
        target = self.targets[group]
        dtype = target.current[0].dtype
        scratch = self._scratch.setdefault(dtype, optimizers.Scratch(dtype))
        optimizers.apply(
            self.rule,
            target.t,
            gradients,
            target.current[0][start:stop],
            [slot[start:stop] for slot in target.current[1:]],
            target.spares[0].array[start:stop],
            [spare.array[start:stop] for spare in target.spares[1:]],
            scratch,
        )
        self.touched.add(group)

    def carry_over(self, group: int, start: int, stop: int) -> None:
        """Copies what no gradient covers."""
        target = self.targets[group]
        for current, spare in zip(target.current, target.spares, strict=True):
            np.copyto(spare.array[start:stop], current[start:stop])

    def run(self) -> None:
        """Applies the staged `pushes`, in their order. Call it once.

        A gradient that leaves a variable out, where another has it, counts as zero there."""
        for group, target in self.targets.items():
            zero = np.zeros((), target.current[0].dtype)
            at = 0
            for start, stop, gradients in _segments(
                [push.pieces(group) for push in self.pushes], zero
            ):
                self.carry_over(group, at, start)
                self.apply(group, start, stop, gradients)
                at = stop
            self.carry_over(group, at, len(target.current[0]))
        self.done = True


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
