"""An endless stream of packed rows with random access, so that resuming is exact and takes constant time.

Documents are cut into chunks, never truncated, and `data/chunks.py` orders the chunks of each source. A *pool* takes
the next chunks of every source and packs them into rows by best fit. All of it is a function of (seed, phase, pool) and
of how far each streamed source has come, so a checkpoint only stores a `Position`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertblocks.data.chunks import (
    ChunkIndex,
    ChunkSizes,
    Cursor,
    Documents,
    StreamSource,
    get_index,
    get_order,
)
from bertblocks.data.hashing import combine, permute
from bertblocks.data.packing import best_fit
from bertblocks.data.parts import TokenParts

#: How many rows are packed together. A larger pool packs tighter and takes longer to pack again on resume.
POOL_ROWS = 1024
#: With grades of length, a pool is at most this share of a grade.
POOLS_PER_GRADE = 2
#: Chunks per pool are fixed-point numbers with this many fractional bits, so shares are exact in the long run.
FRACTION_BITS = 32


@dataclass(frozen=True)
class DocumentChunk:
    """Consecutive tokens of one document.

    `index` is the number of the chunk in its source, `stream_index` its number in the whole stream.
    """

    ids: NDArray[np.int32]
    source: int
    index: int
    epoch: int
    stream_index: int


#: Chunks packed into one row. Attention never crosses from one to another.
Row = Sequence[DocumentChunk]


class PackedRow(Row):
    """A row that is read from disk when its chunks are used: a process uses only its own rows of a global batch."""

    def __init__(self, stream: PackedStream, pool: _Pool, number: int) -> None:
        self._stream, self._pool, self._number = stream, pool, number

    @cached_property
    def chunks(self) -> list[DocumentChunk]:
        return self._stream._read(self._pool, self._number)

    def __len__(self) -> int:
        return len(self._pool.rows[self._number])

    def __getitem__(self, index: Any) -> Any:
        return self.chunks[index]


@dataclass(frozen=True)
class Position:
    """The pool of the next row, its number in the pool, and where the pool starts in each streamed source."""

    pool: int = 0
    row: int = 0
    cursors: Mapping[str, Cursor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Pool:
    """The chunks of a pool, and the rows that they are packed into."""

    number: int
    cursors: Mapping[str, Cursor]
    next_cursors: Mapping[str, Cursor]
    chunks: list[list[int]]  # of each: source, and the columns of `ChunkOrder.take`
    rows: list[list[int]]
    stream_indices: list[int]  # of the first chunk of each row


class PackedStream:
    """Rows of `length` slots. Each chunk takes `overhead` slots for special tokens in addition to its tokens.

    With `min_length`, each document is cut at a length of its own, drawn from `min_length` to `length`.

    Example:
        >>> class Texts:
        ...     lengths = np.array([3, 9, 1])
        ...     def __getitem__(self, index):
        ...         return np.arange(self.lengths[index], dtype=np.int32)
        >>> stream = PackedStream([StreamSource(Texts())], length=8, overhead=2, seed=0, pool_rows=4)
        >>> rows, position = stream.take(Position(), 3)
        >>> len(rows), all(sum(len(chunk.ids) + 2 for chunk in row) <= 8 for row in rows)
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
        min_length: int | None = None,
        grades: int = 1,
        total_rows: int = 0,
    ) -> None:
        """With more than one of `grades`, documents come from short to long over `total_rows` rows."""
        if length <= overhead:
            raise ValueError(f"length is {length}; with {overhead} special tokens it must be at least {overhead + 1}.")
        self.length, self.overhead, self.seed, self.phase = length, overhead, seed, phase
        least = length if min_length is None else min_length
        if not overhead < least <= length:
            raise ValueError(f"min_length is {min_length}; it must be from {overhead + 1} to length, {length}.")
        if grades > 1:
            pool_rows = max(min(pool_rows, total_rows // (POOLS_PER_GRADE * grades)), 1)
        self.streamed = {
            number: source.documents.name
            for number, source in enumerate(sources)
            if isinstance(source.documents, TokenParts)
        }
        self.sources = [
            get_index(
                source,
                ChunkSizes(length - overhead, least - overhead, ("lengths", seed, phase, number)),
                f"Source {number}",
            )
            for number, source in enumerate(sources)
        ]
        self._rates = _chunks_per_pool(self.sources, sources, pool_rows * length, overhead)
        self.orders = [
            get_order(source, index, grades, _start(rate, total_rows // pool_rows), (seed, phase, number))
            for number, (source, index, rate) in enumerate(zip(sources, self.sources, self._rates, strict=True))
        ]
        self._pool: _Pool | None = None
        self._next: Future[_Pool] | None = None
        self._planner = ThreadPoolExecutor(1, thread_name_prefix="packing")

    def take(self, position: Position, count: int) -> tuple[list[Row], Position]:
        """The next `count` rows, and the position after them."""
        rows: list[Row] = []
        start = {name: position.cursors.get(name, (0, 0)) for name in self.streamed.values()}
        position = replace(position, cursors={**position.cursors, **start})
        while len(rows) < count:
            pool = self._get_pool(position)
            end = min(position.row + count - len(rows), len(pool.rows))
            rows.extend(PackedRow(self, pool, index) for index in range(position.row, end))
            is_used = end == len(pool.rows)
            position = Position(pool.number + 1, 0, pool.next_cursors) if is_used else replace(position, row=end)
        return rows, position

    def _get_pool(self, position: Position) -> _Pool:
        """The pool of a position. The one after it is planned in a thread meanwhile."""
        wanted = (position.pool, position.cursors)
        pool = self._pool
        if pool is None or (pool.number, pool.cursors) != wanted:
            pool = None if self._next is None else self._next.result()
            if pool is None or (pool.number, pool.cursors) != wanted:
                pool = self._pack(*wanted)
            self._pool, self._next = pool, None
            if not self.streamed:  # planning could wait for the tokens of the next part
                self._next = self._planner.submit(self._pack, position.pool + 1, position.cursors)
        return pool

    def _pack(self, pool: int, cursors: Mapping[str, Cursor]) -> _Pool:
        parts: list[NDArray[np.int64]] = []
        following = dict(cursors)
        for number, (order, rate) in enumerate(zip(self.orders, self._rates, strict=True)):
            name = self.streamed.get(number, "")
            taken, cursor = order.take(_start(rate, pool), _start(rate, pool + 1), cursors.get(name, (0, 0)))
            parts.append(np.insert(taken, 0, number, axis=1))
            if name:
                following[name] = cursor
        chunks = np.concatenate(parts)
        packed = best_fit(chunks[:, -1] + self.overhead, self.length)
        # best fit puts long chunks first: rows are shuffled so that every batch has short and long ones
        shuffled = permute(np.arange(len(packed)), len(packed), combine("rows", self.seed, self.phase, pool))
        rows = [packed[number] for number in shuffled.tolist()]
        before = sum(_start(rate, pool) for rate in self._rates)
        stream_indices = before + np.cumsum([0, *map(len, rows[:-1])])
        return _Pool(pool, cursors, following, chunks.tolist(), rows, stream_indices.tolist())

    def _read(self, pool: _Pool, row: int) -> list[DocumentChunk]:
        chunks = []
        for stream_index, chunk in enumerate(pool.rows[row], start=pool.stream_indices[row]):
            source, epoch, index, part, document, start, size = pool.chunks[chunk]
            ids = self.orders[source].read(part, document)[start : start + size]
            chunks.append(DocumentChunk(ids, source, index, epoch, stream_index))
        return chunks


def sample_documents(sources: Sequence[Documents], tokens: int, seed: int) -> Row:
    """Documents with `tokens` tokens in total, from all sources alike, in an order that depends only on the seed.

    Only the last document of a source may be truncated. The index of each chunk is that of its document, so random
    draws do not depend on how the documents are cut later.
    """
    sample: list[DocumentChunk] = []
    for number, documents in enumerate(sources):
        size, room = len(documents.lengths), tokens // len(sources)
        for document in permute(np.arange(size), size, combine("sample", seed, number)).tolist():
            if room <= 0:
                break
            ids = documents[document][:room]
            if len(ids):
                sample.append(DocumentChunk(ids, number, document, 0, len(sample)))
                room -= len(ids)
    return sample


def cut_chunks(documents: Sequence[DocumentChunk], capacity: int) -> Row:
    """The documents as chunks of at most `capacity` tokens."""
    return [
        replace(document, ids=document.ids[start : start + capacity])
        for document in documents
        for start in range(0, len(document.ids), capacity)
    ]


def _chunks_per_pool(
    indices: list[ChunkIndex], sources: Sequence[StreamSource], slots: int, overhead: int
) -> list[int]:
    """The chunks of each source in a pool, in fixed point: weights are shares of tokens, and a pool fills `slots`."""
    for number, source in enumerate(sources):
        if not source.weight > 0:
            raise ValueError(f"Source {number} has the weight {source.weight}; it must be above 0.")
    per_token = [source.weight * index.count / index.tokens for source, index in zip(sources, indices, strict=True)]
    total_slots = sum(source.weight for source in sources) + overhead * sum(per_token)
    return [int(rate * slots / total_slots * 2**FRACTION_BITS) for rate in per_token]


def _start(rate: int, pool: int) -> int:
    """How many chunks of a source come before a pool."""
    return (pool * rate) >> FRACTION_BITS
