"""The endless sequence of a source's chunks: shuffled in every epoch, from short to long documents, or part by part."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.storage import atomic_file, lock_folder
from bertblocks.data.hashing import combine, draw, permute
from bertblocks.data.parts import TokenParts
from bertblocks.data.tokens import BLOCKS, Numbers, TokenDocuments

#: Bits for the number of a chunk in its part.
CHUNK_BITS = 32
#: Documents whose chunks are counted together, and how many blocks are read at once when all of them are.
BLOCK, READ_BLOCKS = 1024, 1024
#: From this number of documents on, the counts of a store are kept in its folder.
KEPT_FROM = 10_000_000
#: The most documents that a curriculum sorts.
SORTED_DOCUMENTS = 40_000_000


class Documents(Protocol):
    """Tokenized documents without special tokens, such as `TokenStore.train`."""

    @property
    def lengths(self) -> Numbers: ...

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
    """Finds the chunks of documents by arithmetic on their lengths.

    It keeps the number of chunks before each block of documents. The chunks of a block are counted when one of them is
    asked for, so memory and time do not grow with the number of documents.
    """

    def __init__(self, documents: Documents, min_tokens: int, sizes: ChunkSizes, name: str) -> None:
        self.documents, self.sizes, self.least = documents, sizes, max(min_tokens, 1)
        self.first, self.tokens = self._load_blocks()
        self.count = int(self.first[-1])
        if not self.count:
            raise ValueError(f"{name} has no document of at least {self.least} tokens; lower min_tokens or add texts.")

    def spans(self, chunks: NDArray[np.int64]) -> tuple[NDArray, NDArray, NDArray]:
        """The document of each chunk, its start in the document, and its number of tokens."""
        if not len(chunks):
            return chunks, chunks, chunks
        blocks = np.unique(np.searchsorted(self.first, chunks, side="right") - 1)
        parts = [self._read(block * BLOCK, (block + 1) * BLOCK) for block in blocks.tolist()]
        sizes = list(map(len, parts))
        lengths = np.concatenate(parts)
        documents = np.concatenate([np.arange(size) for size in sizes]) + np.repeat(blocks * BLOCK, sizes)
        counts = self.count_chunks(documents, lengths)
        stop = np.cumsum(counts)
        before = np.concatenate([[0], stop])[np.cumsum([0, *sizes[:-1]])]
        stop += np.repeat(self.first[blocks] - before, sizes)
        rank = np.searchsorted(stop, chunks, side="right")
        capacities = self.sizes.draw(documents[rank])
        start = (chunks - stop[rank] + counts[rank]) * capacities
        return documents[rank], start, np.minimum(lengths[rank] - start, capacities)

    def count_chunks(self, documents: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The number of chunks of each document; 0 for those that are too short."""
        sizes = self.sizes
        capacities = sizes.most if sizes.least == sizes.most else sizes.draw(documents)
        return np.where(lengths >= self.least, -(-lengths // capacities), 0)

    def _read(self, start: int, stop: int) -> NDArray[np.int64]:
        return np.asarray(self.documents.lengths[start:stop]).astype(np.int64)

    def _load_blocks(self) -> tuple[NDArray[np.int64], int]:
        """The chunks before each block and all tokens, which are kept in a file if there are many documents."""
        documents, sizes = self.documents, self.sizes
        if not isinstance(documents, TokenDocuments) or len(documents) < KEPT_FROM:
            return self._count_blocks()
        folder, key = documents.store.folder, (() if sizes.least == sizes.most else sizes.key)
        described = (documents.store.fingerprint, documents.split, self.least, sizes.most, sizes.least, *key)
        file = folder / f"{BLOCKS}{blake2b(repr(described).encode(), digest_size=8).hexdigest()}.npz"
        lock = lock_folder(folder, wait=True)  # one process counts while the others wait
        try:
            if not file.is_file():
                first, tokens = self._count_blocks()
                try:
                    with atomic_file(file) as target:
                        np.savez(target, first=first, tokens=tokens)
                except OSError:
                    return first, tokens  # the folder is read-only
            with np.load(file, allow_pickle=False) as values:
                return values["first"], int(values["tokens"])
        finally:
            os.close(lock)

    def _count_blocks(self) -> tuple[NDArray[np.int64], int]:
        starts = range(0, len(self.documents.lengths), BLOCK * READ_BLOCKS)
        with ThreadPoolExecutor(allowed_cpus()) as pool:  # numpy releases the GIL
            parts = list(pool.map(self._count_part, starts))
        counts = np.concatenate([np.zeros(1, dtype=np.int64), *(counts for counts, _ in parts)])
        return np.cumsum(counts), sum(tokens for _, tokens in parts)

    def _count_part(self, start: int) -> tuple[NDArray[np.int64], int]:
        """The chunks of each of some blocks, and their tokens."""
        lengths = np.asarray(self.documents.lengths[start : start + BLOCK * READ_BLOCKS])
        most = self.sizes.most
        if self.least == 1 and self.sizes.least == most:  # most corpora: in the numbers of the file, in few passes
            chunks = (lengths + (most - 1)) // most
        else:
            chunks = self.count_chunks(np.arange(start, start + len(lengths)), lengths.astype(np.int64))
            lengths = lengths[lengths >= self.least]
        blocks = np.add.reduceat(chunks, np.arange(0, len(chunks), BLOCK), dtype=np.int64)
        return blocks, int(lengths.sum(dtype=np.int64))


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
    each grade: a part of them, or all of them several times. It stays in the last grade afterwards. Memory: 24 bytes
    per document.
    """

    def __init__(self, index: ChunkIndex, *key: int, grades: int, total: int) -> None:
        super().__init__(index, *key)
        self.grades, self.total = min(grades, index.count), max(total, 1)
        if (found := len(index.documents.lengths)) > SORTED_DOCUMENTS:
            raise ValueError(
                f"A curriculum sorts at most {SORTED_DOCUMENTS:,} documents in memory, and a source has {found:,}; "
                "remove curriculum, or give phases of their own to sources of short and of long documents."
            )
        lengths = np.asarray(index.documents.lengths[:]).astype(np.int64)
        sizes = index.count_chunks(np.arange(found), lengths)
        by_length = np.argsort(lengths, kind="stable")
        self.chunk_of = (np.cumsum(sizes) - sizes)[by_length]
        self.sorted_first = np.concatenate([[0], np.cumsum(sizes[by_length])])

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
        return epochs, self.chunk_of[rank] + places - self.sorted_first[rank]


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
        documents = documents.first.train
    return ChunkIndex(documents, source.min_tokens, sizes, name)


def get_order(source: StreamSource, index: ChunkIndex, grades: int, total: int, key: tuple[int, ...]) -> ChunkOrder:
    """The order of a source's chunks. With more than one grade, short documents come first in `total` chunks."""
    if isinstance(source.documents, TokenParts):
        return PartedChunks(source.documents, source.min_tokens, index.sizes, *key)
    return GradedChunks(index, *key, grades=grades, total=total) if grades > 1 else ShuffledChunks(index, *key)
