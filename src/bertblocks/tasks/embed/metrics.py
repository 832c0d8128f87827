"""Metrics of retrieval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bertblocks.tasks.base import Scores


def retrieval_scores(ranked: Sequence[Sequence[str]], relevant: Sequence[set[str]], at: Sequence[int]) -> Scores:
    """Computes the mean recall@k and NDCG@k of ranked documents, with one ranking per query.

    Example:
        >>> retrieval_scores([["a", "b"]], [{"b"}], at=[1, 2])
        {'recall@1': 0.0, 'ndcg@1': 0.0, 'recall@2': 1.0, 'ndcg@2': 0.6309297535714575}
    """
    scores: Scores = {}
    for k in at:
        recalls, gains = [], []
        for documents, wanted in zip(ranked, relevant, strict=True):
            hits = np.array([document in wanted for document in documents[:k]], dtype=np.float64)
            discounts = 1 / np.log2(np.arange(2, k + 2))
            ideal = discounts[: min(len(wanted), k)].sum()
            recalls.append(hits.sum() / len(wanted))
            gains.append((hits * discounts[: len(hits)]).sum() / ideal)
        scores[f"recall@{k}"] = float(np.mean(recalls))
        scores[f"ndcg@{k}"] = float(np.mean(gains))
    return scores
