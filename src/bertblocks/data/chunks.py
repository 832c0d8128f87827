"""The endless sequence of a source's chunks: shuffled in every epoch, from short to long documents, or part by part."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bertblocks.data.hashing import combine, draw, permute
from bertblocks.data.parts import TokenParts

#: Bits for the number of a chunk in its part.
CHUNK_BITS = 32


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

    documents: Documents | TokenParts
    weight: float = 1.0
    min_tokens: int = 1


@dataclass(frozen=True)
class ChunkSizes:
    """The tokens of a document's chunks: `most`, or a number from `least` on that `key` draws for each document."""

    most: int
    least: int
    key: tuple[int | str, ...]

    def draw(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.least == self.most:
            return np.broadcast_to(np.int64(self.most), documents.shape)
        return self.least + (draw(combine(*self.key), documents) % np.uint64(self.most - self.least + 1)).astype(
            np.int64
        )


class ChunkIndex:
    """Finds the chunks of documents by arithmetic on their lengths."""

    def __init__(self, documents: Documents, min_tokens: int, sizes: ChunkSizes, name: str) -> None:
        lengths = np.asarray(documents.lengths)
        least = max(min_tokens, 1)
        self.documents, self.sizes = documents, sizes
        self.chosen = np.flatnonzero(lengths >= least)
        if not len(self.chosen):
            raise ValueError(f"{name} has no document of at least {least} tokens; lower min_tokens or add texts.")
        self.lengths = lengths[self.chosen].astype(np.int64)
        self.capacities = sizes.draw(self.chosen)
        self.first = np.concatenate([[0], np.cumsum(-(-self.lengths // self.capacities))])
        self.count = int(self.first[-1])
        self.tokens = int(self.lengths.sum())

    def spans(self, chunks: NDArray[np.int64]) -> tuple[NDArray, NDArray, NDArray]:
        """The document of each chunk, its start in the document, and its number of tokens."""
        rank = np.searchsorted(self.first, chunks, side="right") - 1
        start = (chunks - self.first[rank]) * self.capacities[rank]
        return self.chosen[rank], start, np.minimum(self.lengths[rank] - start, self.capacities[rank])


#: The part and the chunk in it that come next; meaningless for a source without parts.
Cursor = tuple[int, int]


class ChunkOrder(ABC):
    """The order in which a source's chunks come."""

    @abstractmethod
    def take(self, first: int, stop: int, cursor: Cursor) -> tuple[NDArray[np.int64], Cursor]:
        """The chunks of a range, or as many from a cursor on, and the cursor after them.

        The columns are epoch, index in the epoch, part, document, start in the document, and tokens.
        """

    @abstractmethod
    def read(self, part: int, document: int) -> NDArray[np.int32]:
        """The ids of a document."""


class ShuffledChunks(ChunkOrder):
    """Every epoch visits all chunks in a new order, given by a keyed permutation that is not stored."""

    def __init__(self, index: ChunkIndex, *key: int) -> None:
        self.index, self.count, self.key = index, index.count, key

    def take(self, first: int, stop: int, cursor: Cursor) -> tuple[NDArray[np.int64], Cursor]:
        epoch, chunk = self._order(np.arange(first, stop))
        return np.stack([epoch, chunk, np.zeros_like(chunk), *self.index.spans(chunk)], axis=1), cursor

    def _order(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        epoch, rank = np.divmod(numbers, self.count)
        # the key "pieces" is part of the order of existing runs
        return epoch, permute(rank, self.count, combine("pieces", *self.key, epoch))

    def read(self, part: int, document: int) -> NDArray[np.int32]:
        return self.index.documents[document]


class GradedChunks(ShuffledChunks):
    """Chunks of short documents first (a curriculum by length), shuffled within grades of equal numbers of chunks.

    Over its first `total` chunks the order goes once from the first grade to the last, and visits as many chunks of
    each grade: a part of them, or all of them several times. It stays in the last grade afterwards. Memory: 16 bytes
    per document.
    """

    def __init__(self, index: ChunkIndex, *key: int, grades: int, total: int) -> None:
        super().__init__(index, *key)
        self.grades, self.total = min(grades, index.count), max(total, 1)
        self.by_length = np.argsort(index.lengths, kind="stable")
        sizes = np.diff(index.first)[self.by_length]
        self.sorted_first = np.concatenate([[0], np.cumsum(sizes)])

    def _order(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        grades = np.minimum(numbers * self.grades // self.total, self.grades - 1)
        epochs, places = np.empty_like(numbers), np.empty_like(numbers)
        for grade in np.unique(grades).tolist():
            mine = grades == grade
            low, high = grade * self.count // self.grades, (grade + 1) * self.count // self.grades
            begun = -(-grade * self.total // self.grades)
            epochs[mine], rank = np.divmod(numbers[mine] - begun, high - low)
            places[mine] = low + permute(rank, high - low, combine("grade", *self.key, grade, epochs[mine]))
        rank = np.searchsorted(self.sorted_first, places, side="right") - 1
        return epochs, self.index.first[self.by_length[rank]] + places - self.sorted_first[rank]


class PartedChunks(ChunkOrder):
    """One part of a streamed source after another. The chunks of a part are shuffled."""

    def __init__(self, parts: TokenParts, min_tokens: int, sizes: ChunkSizes, *key: int) -> None:
        self.parts, self.min_tokens, self.sizes, self.key = parts, min_tokens, sizes, key
        self._indices: dict[int, ChunkIndex] = {}

    def take(self, first: int, stop: int, cursor: Cursor) -> tuple[NDArray[np.int64], Cursor]:
        part, chunk = cursor
        for old in [number for number in self._indices if number < part]:
            del self._indices[old]
        taken, missing = [np.zeros((0, 6), dtype=np.int64)], stop - first
        while missing:
            index = self._index(part)
            epoch, rank = self.parts.order.epoch_and_rank(part)
            numbers = np.arange(chunk, min(chunk + missing, index.count))
            chunks = permute(numbers, index.count, combine("part", *self.key, part))
            same = [np.full_like(chunks, value) for value in (epoch, part)]
            taken.append(np.stack([same[0], (rank << CHUNK_BITS) + chunks, same[1], *index.spans(chunks)], axis=1))
            missing -= len(numbers)
            part, chunk = (part + 1, 0) if chunk + len(numbers) == index.count else (part, chunk + len(numbers))
        return np.concatenate(taken), (part, chunk)

    def read(self, part: int, document: int) -> NDArray[np.int32]:
        return self._index(part).documents[document]

    def _index(self, part: int) -> ChunkIndex:
        if part not in self._indices:
            name = f"Part {part} of source {self.parts.name}"
            sizes = replace(self.sizes, key=(*self.sizes.key, part))
            self._indices[part] = ChunkIndex(self.parts.open(part), self.min_tokens, sizes, name)
        return self._indices[part]


def get_index(source: StreamSource, sizes: ChunkSizes, name: str) -> ChunkIndex:
    """The chunks of a source; of a streamed one those of its first part, whatever has been read since."""
    documents = source.documents
    if isinstance(documents, TokenParts):
        documents, _ = documents.first.split()
    return ChunkIndex(documents, source.min_tokens, sizes, name)


def get_order(source: StreamSource, index: ChunkIndex, grades: int, total: int, key: tuple[int, ...]) -> ChunkOrder:
    """The order of a source's chunks. With more than one grade, short documents come first in `total` chunks."""
    if isinstance(source.documents, TokenParts):
        return PartedChunks(source.documents, source.min_tokens, index.sizes, *key)
    return GradedChunks(index, *key, grades=grades, total=total) if grades > 1 else ShuffledChunks(index, *key)
