"""Sparse vectors: the tokens of the vocabulary that a text is about, each with a weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class SparseVector:
    """The entries of a vector that are not 0.

    Example:
        >>> query = SparseVector(np.array([3, 7], np.int32), np.array([1.0, 2.0], np.float32))
        >>> document = SparseVector(np.array([7, 9], np.int32), np.array([0.5, 4.0], np.float32))
        >>> query.dot(document), len(query)
        (1.0, 2)
    """

    #: int32, ascending.
    indices: np.ndarray
    #: float32.
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def dot(self, other: SparseVector) -> float:
        """Returns the score of a document for a query."""
        _, own, theirs = np.intersect1d(self.indices, other.indices, assume_unique=True, return_indices=True)
        return float(self.values[own].astype(np.float64) @ other.values[theirs].astype(np.float64))

    def top(self, count: int | None) -> SparseVector:
        """Returns the vector with its `count` largest entries; None keeps all."""
        if count is None or len(self) <= count:
            return self
        kept = np.sort(np.argsort(-np.abs(self.values), kind="stable")[:count])
        return SparseVector(self.indices[kept], self.values[kept])


def from_dense(row: np.ndarray) -> SparseVector:
    indices = np.flatnonzero(row)
    return SparseVector(indices.astype(np.int32), row[indices].astype(np.float32))


def merge(vectors: Sequence[SparseVector]) -> SparseVector:
    """Returns the largest value of each entry.

    Example:
        >>> windows = [from_dense(np.array([0.0, 1.0, 2.0])), from_dense(np.array([0.5, 0.0, 3.0]))]
        >>> merge(windows).indices.tolist(), merge(windows).values.tolist()
        ([0, 1, 2], [0.5, 1.0, 3.0])
    """
    if len(vectors) == 1:
        return vectors[0]
    indices, places = np.unique(np.concatenate([vector.indices for vector in vectors]), return_inverse=True)
    values = np.zeros(len(indices), np.float32)
    np.maximum.at(values, places, np.concatenate([vector.values for vector in vectors]))
    return SparseVector(indices.astype(np.int32), values)


def search(
    queries: Sequence[SparseVector], documents: Sequence[SparseVector], top_k: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, for each query, the numbers and the scores of the `top_k` documents with the largest dot products.

    The search is exact: it adds up the documents' entries of every token of a query. Documents with equal scores keep
    their order.
    """
    sizes = [len(document) for document in documents]
    tokens = np.concatenate([np.zeros(0, np.int32), *(document.indices for document in documents)])
    order = np.argsort(tokens, kind="stable")
    owners = np.repeat(np.arange(len(documents)), sizes)[order]
    values = np.concatenate([np.zeros(0, np.float32), *(document.values for document in documents)])[order]
    tokens = tokens[order]
    found = []
    for query in queries:
        starts, stops = np.searchsorted(tokens, query.indices), np.searchsorted(tokens, query.indices, side="right")
        scores = np.zeros(len(documents), np.float64)
        for weight, start, stop in zip(query.values, starts, stops, strict=True):
            scores[owners[start:stop]] += float(weight) * values[start:stop]
        best = np.argsort(-scores, kind="stable")[:top_k]
        found.append((best, scores[best]))
    return found


def sparsity(queries: Sequence[SparseVector], documents: Sequence[SparseVector]) -> dict[str, float]:
    """The mean number of entries that are not 0, and FLOPS: how many of them a query and a document share on average.

    Example:
        >>> first, second = from_dense(np.array([0.0, 1.0, 1.0])), from_dense(np.array([1.0, 0.0, 1.0]))
        >>> sparsity([first], [first, second])
        {'query_active_dims': 2.0, 'document_active_dims': 2.0, 'flops': 1.5}
    """
    sides = [np.concatenate([vector.indices for vector in vectors]) for vectors in (queries, documents)]
    size = 1 + max((int(side.max()) for side in sides if len(side)), default=0)
    counts = [np.bincount(side, minlength=size) for side in sides]
    of_queries, of_documents = counts[0] / len(queries), counts[1] / len(documents)
    return {
        "query_active_dims": float(of_queries.sum()),
        "document_active_dims": float(of_documents.sum()),
        "flops": float(of_queries @ of_documents),
    }
