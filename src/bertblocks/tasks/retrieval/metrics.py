"""Metrics of rankings, with the definitions of trec_eval."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bertblocks.tasks.base import Scores

#: The metrics that rankings are scored by unless a caller asks for others; the first chooses the best model.
METRICS = ("ndcg@10", "mrr@10", "map", "recall@10")
_NAME = re.compile(r"(ndcg|mrr|map|recall|precision)(?:@([1-9]\d*))?")


def score_ranking(ranking: Sequence[Any], gains: Mapping[Any, float], metrics: Sequence[str] = METRICS) -> Scores:
    """Scores the documents that were returned for one query, best first, by the gains of its relevant documents.

    A metric is ndcg, mrr, map, recall or precision, with `@k` for the first k documents. NDCG discounts a gain at rank
    r by log2(r + 1). The others ask only whether the gain is above 0.

    Example:
        >>> score_ranking(["b", "a", "c"], {"a": 1, "c": 1}, ["mrr@10", "map", "recall@2"])
        {'mrr@10': 0.5, 'map': 0.5833333333333333, 'recall@2': 0.5}
    """
    found = np.array([max(gains.get(document, 0), 0) for document in ranking], dtype=np.float64)
    ideal = np.sort(np.array([gain for gain in gains.values() if gain > 0], dtype=np.float64))[::-1]
    if not len(ideal):
        raise ValueError("A query without relevant documents cannot be scored.")
    return {name: _score(name, found, ideal) for name in metrics}


def rank_documents(scores: Mapping[str, float]) -> list[str]:
    """Orders documents by their scores as trec_eval does: in single precision, and equal ones by their ids, descending.

    Example:
        >>> rank_documents({"a": 0.5, "b": 2.0, "c": 0.5})
        ['b', 'c', 'a']
    """
    return sorted(scores, key=lambda name: (np.float32(scores[name]), name.encode()), reverse=True)


def mean_scores(scores: Sequence[Scores]) -> Scores:
    """Averages the scores of queries."""
    return {name: float(np.mean([own[name] for own in scores])) for name in scores[0]}


def _score(name: str, found: np.ndarray, ideal: np.ndarray) -> float:
    parts = _NAME.fullmatch(name)
    if parts is None:
        raise ValueError(f"metric is {name!r}; it must be ndcg, mrr, map, recall or precision, with or without @k.")
    kind, depth = parts[1], int(parts[2]) if parts[2] else None
    top = found[:depth]
    hits = top > 0
    if kind == "ndcg":
        return float(_discounted(top) / _discounted(ideal[:depth]))
    if kind == "mrr":
        return float(1 / (hits.argmax() + 1)) if hits.any() else 0.0
    if kind == "map":
        precisions = hits.cumsum() / np.arange(1, len(top) + 1)
        return float(precisions[hits].sum() / len(ideal))
    return float(hits.sum() / (len(ideal) if kind == "recall" else depth or max(len(top), 1)))


def _discounted(gains: np.ndarray) -> float:
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())
