"""An inverted index of sparse vectors: for each term the documents that have it, and exact search over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bertblocks.search.ranking import TopK


class SparseVector(Protocol):
    """The terms of a text, ascending, and their weights."""

    @property
    def indices(self) -> np.ndarray: ...

    @property
    def values(self) -> np.ndarray: ...


class PostingRows(Protocol):
    """A segment, as sparse search needs it."""

    def __len__(self) -> int: ...

    def numbers(self, rows: slice) -> np.ndarray: ...

    def removed_in(self, start: int, stop: int) -> np.ndarray: ...

    def postings(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]: ...


def invert(rows: np.ndarray, terms: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sorts entries (row, term, value) by term: where each term's entries begin, and the rows and values of all.

    Example:
        >>> starts, rows, _ = invert(np.array([0, 0, 1]), np.array([1, 3, 1]), np.array([0.5, 1.0, 2.0]))
        >>> starts.tolist(), rows.tolist()
        ([0, 0, 2, 2, 3], [0, 1, 0])
    """
    order = np.lexsort((rows, terms))
    starts = np.zeros(int(terms.max(initial=-1)) + 2, np.int64)
    np.cumsum(np.bincount(terms, minlength=len(starts) - 1), out=starts[1:])
    return starts, rows[order].astype(np.int32), values[order].astype(np.float32)


def invert_vectors(vectors: Sequence[SparseVector]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The postings of documents in the order of their rows."""
    rows = np.repeat(np.arange(len(vectors)), [len(vector.indices) for vector in vectors])
    terms = np.concatenate([np.zeros(0, np.int64), *(vector.indices for vector in vectors)]).astype(np.int64)
    values = np.concatenate([np.zeros(0, np.float32), *(vector.values for vector in vectors)])
    return invert(rows, terms, values)


def entries(starts: np.ndarray, rows: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries (row, term, value) of postings: what `invert` got."""
    return np.asarray(rows), np.repeat(np.arange(len(starts) - 1), np.diff(starts)), np.asarray(values)


def search_postings(segments: Sequence[PostingRows], queries: Sequence[SparseVector], best: TopK) -> None:
    """Computes the dot product of each query with every document that shares a term with it."""
    for segment in segments:
        starts, rows, values = segment.postings()
        numbers = segment.numbers(slice(0, len(segment)))
        removed = segment.removed_in(0, len(segment))
        for number, query in enumerate(queries):
            scores = np.zeros(len(segment), np.float32)
            for term, weight in zip(query.indices.tolist(), query.values.tolist(), strict=True):
                if term < len(starts) - 1:
                    entry = slice(int(starts[term]), int(starts[term + 1]))
                    scores[rows[entry]] += weight * values[entry]
            scores[scores == 0] = -np.inf  # shares no term with the query
            scores[removed] = -np.inf
            best.add(number, numbers, scores)
