"""The best documents for each query, and one ranking made of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

#: The constant of reciprocal rank fusion in the paper.
RANK_CONSTANT = 60


@dataclass(frozen=True)
class Ranking:
    """Numbers of documents, best first, and their scores."""

    numbers: np.ndarray  # int64
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)


class TopK:
    """Collects the `k` best documents of each query. Of equal scores, the document added first to the index wins."""

    def __init__(self, queries: int, k: int) -> None:
        self.k = k
        empty = Ranking(np.zeros(0, np.int64), np.zeros(0, np.float32))
        self.rankings = [empty] * queries
        #: The score that a document must reach; below the lowest number until there are `k` documents.
        self._least = np.full(queries, np.finfo(np.float32).min, np.float32)

    def add_block(self, first: int, numbers: np.ndarray, scores: np.ndarray) -> None:
        """Adds documents with their scores `[queries, documents]` for the queries from `first` on."""
        best = np.fmax.reduce(scores, axis=1)
        for query in np.flatnonzero(best >= self._least[first : first + len(scores)]).tolist():
            self.add(first + query, numbers, scores[query])

    def add(self, query: int, numbers: np.ndarray, scores: np.ndarray) -> None:
        """Adds documents with their scores, in any order; those with a score of NaN or -inf do not count."""
        known = self.rankings[query]
        kept = np.flatnonzero(scores >= self._least[query])
        if len(kept) > self.k:
            kept = kept[scores[kept] >= np.partition(scores[kept], -self.k)[-self.k]]
        if not len(kept):
            return
        numbers = np.concatenate([known.numbers, numbers[kept]])
        scores = np.concatenate([known.scores, scores[kept]])
        order = np.lexsort((numbers, -scores))[: self.k]
        self.rankings[query] = Ranking(numbers[order], scores[order])
        if len(order) == self.k:
            self._least[query] = self.rankings[query].scores[-1]


def fuse(rankings: Sequence[Ranking], k: int) -> Ranking:
    """Reciprocal rank fusion (Cormack et al., 2009): a document scores the sum of 1 / (60 + rank) over the rankings.

    Example:
        >>> first = Ranking(np.array([4, 2]), np.array([0.9, 0.8]))
        >>> second = Ranking(np.array([2, 7]), np.array([5.0, 1.0]))
        >>> fuse([first, second], 2).numbers
        array([2, 4])
    """
    numbers, where = np.unique(np.concatenate([ranking.numbers for ranking in rankings]), return_inverse=True)
    weights = np.concatenate([1 / (RANK_CONSTANT + 1 + np.arange(len(ranking))) for ranking in rankings])
    scores = np.bincount(where, weights, minlength=len(numbers))
    order = np.lexsort((numbers, -scores))[:k]
    return Ranking(numbers[order].astype(np.int64), scores[order])
