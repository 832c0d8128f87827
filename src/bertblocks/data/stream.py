"""An endless stream of packed rows in which every row has an address, so that resuming costs nothing.

Documents are cut into pieces, never truncated. Each epoch of a source visits its pieces in an order of its own, given
by a keyed permutation. A *pool* takes the next pieces of every source and packs them by best fit into rows. All of it
follows from (seed, phase, pool), so a `Position` is all that a checkpoint has to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bertblocks.data.hashing import combine, permute
from bertblocks.data.packing import best_fit

#: Rows that are packed together. More pack tighter, and cost more to pack anew on resume.
POOL_ROWS = 1024
#: Pieces per pool are fixed-point numbers with this many bits behind the point: shares are exact in the long run.
FRACTION_BITS = 32


class Documents(Protocol):
    """Tokenized documents without special tokens; a `TokenStore`, or anything alike."""

    @property
    def lengths(self) -> NDArray: ...

    def __getitem__(self, index: int) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class StreamSource:
    """Documents, their share of all tokens (relative to the other sources'), and the least tokens one must have."""

    documents: Documents
    weight: float = 1.0
    min_tokens: int = 1


@dataclass(frozen=True)
class DocumentSlice:
    """Consecutive tokens of one document.

    `index` counts the pieces of the source, `place` the pieces of the whole stream before this one.
    """

    ids: NDArray[np.int32]
    source: int
    index: int
    epoch: int
    place: int


#: Pieces that share the slots of one row; attention never crosses from one to another.
Row = list[DocumentSlice]


@dataclass(frozen=True)
class Position:
    """The next row to take: its pool, and its number there."""

    pool: int = 0
    row: int = 0


class _Pieces:
    """Where the pieces of a source are, by arithmetic on the lengths of its documents."""

    def __init__(self, source: StreamSource, capacity: int, name: str) -> None:
        lengths = np.asarray(source.documents.lengths)
        self.documents = source.documents
        self.capacity = capacity
        self.chosen = np.flatnonzero(lengths >= max(source.min_tokens, 1))
        if not len(self.chosen):
            raise ValueError(f"{name} has no document of at least {max(source.min_tokens, 1)} tokens.")
        self.lengths = lengths[self.chosen].astype(np.int64)
        self.first = np.concatenate([[0], np.cumsum(-(-self.lengths // capacity))])
        self.count = int(self.first[-1])
        self.tokens = int(self.lengths.sum())

    def spans(self, pieces: NDArray[np.int64]) -> tuple[NDArray, NDArray, NDArray]:
        """The document of each piece, where it starts there, and how many tokens it has."""
        rank = np.searchsorted(self.first, pieces, side="right") - 1
        start = (pieces - self.first[rank]) * self.capacity
        return self.chosen[rank], start, np.minimum(self.lengths[rank] - start, self.capacity)


@dataclass(frozen=True)
class _Plan:
    """Pieces of one pool, and the rows that they are packed into."""

    pieces: list[list[int]]  # of each: source, epoch, index, document, start there, tokens
    rows: list[list[int]]
    places: list[int]  # of the first piece of each row


class PackedStream:
    """Rows of `length` slots, each piece taking `overhead` slots more than it has tokens.

    Example:
        >>> class Texts:
        ...     lengths = np.array([3, 9, 1])
        ...     def __getitem__(self, index):
        ...         return np.arange(self.lengths[index], dtype=np.int32)
        >>> stream = PackedStream([StreamSource(Texts())], length=8, overhead=2, seed=0, pool_rows=4)
        >>> rows, position = stream.take(Position(), 3)
        >>> len(rows), all(sum(len(piece.ids) + 2 for piece in row) <= 8 for row in rows)
        (3, True)
    """

    def __init__(
        self,
        sources: Sequence[StreamSource],
        length: int,
        overhead: int,
        seed: int,
        phase: int = 0,
        pool_rows: int = POOL_ROWS,
    ) -> None:
        if length <= overhead:
            raise ValueError(f"length is {length}; with {overhead} special tokens it must be at least {overhead + 1}.")
        self.length, self.overhead, self.seed, self.phase = length, overhead, seed, phase
        self.sources = [_Pieces(source, length - overhead, f"Source {number}") for number, source in enumerate(sources)]
        self._rates = _pieces_per_pool(self.sources, sources, pool_rows * length, overhead)
        self._pool = -1
        self._plan: _Plan | None = None

    def take(self, position: Position, count: int) -> tuple[list[Row], Position]:
        """The next `count` rows, and the position behind them."""
        rows: list[Row] = []
        pool, row = position.pool, position.row
        while len(rows) < count:
            plan = self._planned(pool)
            end = min(row + count - len(rows), len(plan.rows))
            rows.extend(self._read(plan, number) for number in range(row, end))
            pool, row = (pool + 1, 0) if end == len(plan.rows) else (pool, end)
        return rows, Position(pool, row)

    def _planned(self, pool: int) -> _Plan:
        if self._plan is None or self._pool != pool:
            self._plan, self._pool = self._make_plan(pool), pool
        return self._plan

    def _make_plan(self, pool: int) -> _Plan:
        parts: list[tuple[NDArray, ...]] = []
        for number, (source, rate) in enumerate(zip(self.sources, self._rates, strict=True)):
            indices = np.arange(_start(rate, pool), _start(rate, pool + 1))
            epoch, rank = np.divmod(indices, source.count)
            piece = permute(rank, source.count, combine("pieces", self.seed, self.phase, number, epoch))
            parts.append((np.full_like(piece, number), epoch, piece, *source.spans(piece)))
        pieces = np.concatenate([np.stack(part, axis=1) for part in parts])
        packed = best_fit(pieces[:, -1] + self.overhead, self.length)
        # best fit puts long pieces first: rows are shuffled so that every batch has short and long ones
        order = permute(np.arange(len(packed)), len(packed), combine("rows", self.seed, self.phase, pool))
        rows = [packed[number] for number in order.tolist()]
        before = sum(_start(rate, pool) for rate in self._rates)
        places = before + np.cumsum([0, *map(len, rows[:-1])])
        return _Plan(pieces.tolist(), rows, places.tolist())

    def _read(self, plan: _Plan, row: int) -> Row:
        pieces = []
        for place, at in enumerate(plan.rows[row], start=plan.places[row]):
            source, epoch, index, document, start, size = plan.pieces[at]
            ids = self.sources[source].documents[document][start : start + size]
            pieces.append(DocumentSlice(ids, source, index, epoch, place))
        return pieces


def _pieces_per_pool(pieces: list[_Pieces], sources: Sequence[StreamSource], slots: int, overhead: int) -> list[int]:
    """Of each source, in fixed point, so that tokens are shared by weight and a pool fills about `slots`."""
    for number, source in enumerate(sources):
        if not source.weight > 0:
            raise ValueError(f"Source {number} has the weight {source.weight}; it must be above 0.")
    per_token = [source.weight * one.count / one.tokens for source, one in zip(sources, pieces, strict=True)]
    total_slots = sum(source.weight for source in sources) + overhead * sum(per_token)
    return [int(one * slots / total_slots * 2**FRACTION_BITS) for one in per_token]


def _start(rate: int, pool: int) -> int:
    return (pool * rate) >> FRACTION_BITS
