"""Scores of rankings: which queries can be scored, and what a model's order of documents is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from bertblocks.tasks.base import Evaluated
from bertblocks.tasks.retrieval.examples import RetrievalExample, judge
from bertblocks.tasks.retrieval.metrics import mean_scores, score_ranking
from bertblocks.text.tables import DataError


def judge_queries(examples: Sequence[RetrievalExample]) -> dict[str, dict[str, float]]:
    """Returns the gains of documents by query, of queries that have a relevant document."""
    gains = {query: own for query, own in judge(examples).items() if any(gain > 0 for gain in own.values())}
    if not gains:
        raise DataError(f"{examples[0].place}: no query has a relevant document, so there is nothing to score.")
    return gains


def evaluate_rankings(
    examples: Sequence[RetrievalExample],
    gains: Mapping[str, Mapping[str, float]],
    rankings: Iterable[Sequence[tuple[str, float]]],
    metrics: Sequence[str],
) -> Evaluated:
    """Scores the ranking of each query in `gains`: all documents with their scores, best first.

    The first of `metrics` is the one that intervals are computed for. Examples of queries that are not in `gains` are
    left out of every mean.
    """
    scores, records = [], []
    for (query, own), ranking in zip(gains.items(), rankings, strict=True):
        scores.append(score_ranking([text for text, _ in ranking], own, metrics))
        rank, gold, score = next((rank, *item) for rank, item in enumerate(ranking, 1) if own.get(item[0], 0) > 0)
        nearest, nearest_score = ranking[0]
        found = {"query": query, "gold": gold, "rank": rank, "gold_score": float(score)}
        records.append({**found, "nearest": nearest, "nearest_score": float(nearest_score)})
    by_query = np.array([own[metrics[0]] for own in scores])
    number = {query: position for position, query in enumerate(gains)}
    owner = np.array([number.get(example.query, -1) for example in examples])

    def resample(chosen: np.ndarray) -> float:
        kept = owner[chosen]
        kept = kept[kept >= 0]
        return float(by_query[kept].mean()) if len(kept) else float("nan")

    return Evaluated(mean_scores(scores), resample, records)
