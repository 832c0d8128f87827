"""Vectors on disk: numbers of four sizes, and exact search over them in blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol, get_args

import numpy as np

from bertblocks.search.ranking import TopK

Precision = Literal["float32", "float16", "int8", "binary"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
#: Vectors that are scored at once, which fit into the cache, and queries that they are scored against.
BLOCK_ROWS, BLOCK_QUERIES = 1024, 256


def pack(vectors: np.ndarray, precision: Precision) -> tuple[np.ndarray, np.ndarray]:
    """Converts float32 `[n, dimensions]` to what is stored, and the factor `[n]` that turns it back.

    int8 maps the largest number of each vector to 127. Binary keeps the signs, in packed bits.

    Example:
        >>> pack(np.array([[0.5, -1.0]], np.float32), "int8")[0]
        array([[  64, -127]], dtype=int8)
    """
    vectors = np.asarray(vectors, np.float32)
    ones = np.ones(len(vectors), np.float32)
    if precision == "int8":
        scales = np.maximum(np.abs(vectors).max(axis=1, initial=0), 1e-12) / 127
        return np.rint(vectors / scales[:, None]).astype(np.int8), scales.astype(np.float32)
    if precision == "binary":
        return np.packbits(vectors > 0, axis=1), ones / np.sqrt(max(vectors.shape[1], 1), dtype=np.float32)
    return vectors.astype(precision), ones


def unpack(stored: np.ndarray, scales: np.ndarray, precision: Precision, dimensions: int) -> np.ndarray:
    """The float32 vectors `[n, dimensions]` of what `pack` stored; float32 itself is not copied."""
    if precision == "float32":
        return stored
    if precision == "binary":
        signs = np.unpackbits(stored, axis=1, count=dimensions).astype(np.float32) * 2 - 1
        return signs * scales[:, None]
    vectors = stored.astype(np.float32)
    return vectors * scales[:, None] if precision == "int8" else vectors


class VectorRows(Protocol):
    """The rows of a segment, as exact search needs them."""

    def __len__(self) -> int: ...

    def vectors(self, rows: slice | np.ndarray) -> np.ndarray: ...

    def numbers(self, rows: slice) -> np.ndarray: ...

    def removed_in(self, start: int, stop: int) -> np.ndarray: ...


def search_exactly(segments: Iterable[tuple[VectorRows, int]], queries: np.ndarray, best: TopK) -> None:
    """Scores every row of each segment, from the given row on, against the queries `[n, dimensions]`.

    Only one block of vectors is in memory at a time.
    """
    for segment, first in segments:
        for start in range(first, len(segment), BLOCK_ROWS):
            stop = min(start + BLOCK_ROWS, len(segment))
            rows = slice(start, stop)
            block, numbers = segment.vectors(rows), segment.numbers(rows)
            removed = segment.removed_in(start, stop)
            for first_query in range(0, len(queries), BLOCK_QUERIES):
                scores = queries[first_query : first_query + BLOCK_QUERIES] @ block.T  # [queries, rows]
                scores[:, removed] = -np.inf
                best.add_block(first_query, numbers, scores)
