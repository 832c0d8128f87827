"""An endless stream of packed rows with random access, so that resuming is exact and takes constant time.

Documents are cut into chunks, never truncated. Each epoch of a source visits its chunks in a new order, given by a
keyed permutation. A *pool* takes the next chunks of every source and packs them into rows by best fit. All of it is a
function of (seed, phase, pool), so a checkpoint only stores a `Position`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bertblocks.data.hashing import UInt64, combine, draw, permute
from bertblocks.data.packing import best_fit

#: How many rows are packed together. A larger pool packs tighter and takes longer to pack again on resume.
POOL_ROWS = 1024
#: Chunks per pool are fixed-point numbers with this many fractional bits, so shares are exact in the long run.
FRACTION_BITS = 32


class Documents(Protocol):
    """Tokenized documents without special tokens, such as a `TokenStore`."""

    @property
    def lengths(self) -> NDArray: ...

    def __getitem__(self, index: int) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class StreamSource:
    """Documents, their weight in the mixture of sources, and the minimum length of a document.

    Weights are shares of tokens, relative to those of the other sources.
    """

    documents: Documents
    weight: float = 1.0
    min_tokens: int = 1


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
Row = list[DocumentChunk]


@dataclass(frozen=True)
class Position:
    """The pool of the next row, and its number in the pool."""

    pool: int = 0
    row: int = 0


class _ChunkIndex:
    """Finds the chunks of a source by arithmetic on the lengths of its documents.

    A document is cut into chunks of a number of tokens that is drawn for it with `key`, from `least` to `capacity`.
    """

    def __init__(self, source: StreamSource, capacity: int, name: str, least: int, key: UInt64) -> None:
        lengths = np.asarray(source.documents.lengths)
        self.documents = source.documents
        self.chosen = np.flatnonzero(lengths >= max(source.min_tokens, 1))
        if not len(self.chosen):
            raise ValueError(
                f"{name} has no document of at least {max(source.min_tokens, 1)} tokens; lower min_tokens or add texts."
            )
        self.lengths = lengths[self.chosen].astype(np.int64)
        self.capacities: NDArray = np.broadcast_to(np.int64(capacity), self.lengths.shape)
        if least < capacity:
            self.capacities = least + (draw(key, self.chosen) % np.uint64(capacity - least + 1)).astype(np.int64)
        self.first = np.concatenate([[0], np.cumsum(-(-self.lengths // self.capacities))])
        self.count = int(self.first[-1])
        self.tokens = int(self.lengths.sum())

    def spans(self, chunks: NDArray[np.int64]) -> tuple[NDArray, NDArray, NDArray]:
        """The document of each chunk, its start in the document, and its number of tokens."""
        rank = np.searchsorted(self.first, chunks, side="right") - 1
        start = (chunks - self.first[rank]) * self.capacities[rank]
        return self.chosen[rank], start, np.minimum(self.lengths[rank] - start, self.capacities[rank])


@dataclass(frozen=True)
class _Pool:
    """The chunks of a pool, and the rows that they are packed into."""

    chunks: list[list[int]]  # of each: source, epoch, index, document, start in the document, tokens
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
    ) -> None:
        if length <= overhead:
            raise ValueError(f"length is {length}; with {overhead} special tokens it must be at least {overhead + 1}.")
        self.length, self.overhead, self.seed, self.phase = length, overhead, seed, phase
        least = length if min_length is None else min_length
        if not overhead < least <= length:
            raise ValueError(f"min_length is {min_length}; it must be from {overhead + 1} to length, {length}.")
        self.sources = [
            _ChunkIndex(
                source,
                length - overhead,
                f"Source {number}",
                least - overhead,
                combine("lengths", seed, phase, number),
            )
            for number, source in enumerate(sources)
        ]
        self._rates = _chunks_per_pool(self.sources, sources, pool_rows * length, overhead)
        self._pool_number = -1
        self._pool: _Pool | None = None

    def take(self, position: Position, count: int) -> tuple[list[Row], Position]:
        """The next `count` rows, and the position after them."""
        rows: list[Row] = []
        number, row = position.pool, position.row
        while len(rows) < count:
            pool = self._get_pool(number)
            end = min(row + count - len(rows), len(pool.rows))
            rows.extend(self._read(pool, index) for index in range(row, end))
            number, row = (number + 1, 0) if end == len(pool.rows) else (number, end)
        return rows, Position(number, row)

    def _get_pool(self, number: int) -> _Pool:
        if self._pool is None or self._pool_number != number:
            self._pool, self._pool_number = self._pack(number), number
        return self._pool

    def _pack(self, pool: int) -> _Pool:
        parts: list[tuple[NDArray, ...]] = []
        for number, (source, rate) in enumerate(zip(self.sources, self._rates, strict=True)):
            indices = np.arange(_start(rate, pool), _start(rate, pool + 1))
            epoch, rank = np.divmod(indices, source.count)
            # the key "pieces" is part of the order of existing runs
            chunk = permute(rank, source.count, combine("pieces", self.seed, self.phase, number, epoch))
            parts.append((np.full_like(chunk, number), epoch, chunk, *source.spans(chunk)))
        chunks = np.concatenate([np.stack(part, axis=1) for part in parts])
        packed = best_fit(chunks[:, -1] + self.overhead, self.length)
        # best fit puts long chunks first: rows are shuffled so that every batch has short and long ones
        order = permute(np.arange(len(packed)), len(packed), combine("rows", self.seed, self.phase, pool))
        rows = [packed[number] for number in order.tolist()]
        before = sum(_start(rate, pool) for rate in self._rates)
        stream_indices = before + np.cumsum([0, *map(len, rows[:-1])])
        return _Pool(chunks.tolist(), rows, stream_indices.tolist())

    def _read(self, pool: _Pool, row: int) -> Row:
        chunks = []
        for stream_index, chunk in enumerate(pool.rows[row], start=pool.stream_indices[row]):
            source, epoch, index, document, start, size = pool.chunks[chunk]
            ids = self.sources[source].documents[document][start : start + size]
            chunks.append(DocumentChunk(ids, source, index, epoch, stream_index))
        return chunks


def sample_documents(sources: Sequence[Documents], tokens: int, seed: int) -> Row:
    """Documents with `tokens` tokens in total, from all sources alike, in an order that depends only on the seed.

    Only the last document of a source may be truncated. The index of each chunk is that of its document, so random
    draws do not depend on how the documents are cut later.
    """
    sample: Row = []
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
    indices: list[_ChunkIndex], sources: Sequence[StreamSource], slots: int, overhead: int
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
