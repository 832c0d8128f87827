"""Scores of embeddings: the correlation of cosines with scores, and how well queries find their documents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bertblocks.tasks.base import Evaluated
from bertblocks.tasks.classify.metrics import regression_scores
from bertblocks.tasks.embed.examples import EmbeddingExample
from bertblocks.tasks.retrieval.metrics import mean_scores, score_ranking

#: How well first texts find their second texts; the last chooses the best model.
METRICS = ("recall@1", "ndcg@1", "recall@10", "ndcg@10")
#: The documents of a ranking that are scored.
DEPTH = 10
#: The vector of each different text.
Vectors = Mapping[str, np.ndarray]


def score_embeddings(examples: Sequence[EmbeddingExample], firsts: Vectors, others: Vectors) -> Evaluated:
    """Scores the embeddings, of length 1, of the first texts of examples and of their other texts."""
    score = _score_pairs if is_scored(examples) else _score_retrieval
    return score(examples, firsts, others)


def is_scored(examples: Sequence[EmbeddingExample]) -> bool:
    """Whether the examples are pairs with scores."""
    return examples[0].score is not None


def _score_pairs(examples: Sequence[EmbeddingExample], firsts: Vectors, seconds: Vectors) -> Evaluated:
    first = np.stack([firsts[example.texts[0]] for example in examples])
    second = np.stack([seconds[example.texts[1]] for example in examples])
    scores = np.array([example.score for example in examples], dtype=np.float64)
    # in double precision, so that rounding does not order pairs with equal cosines, as those of bits often are
    similarities = (first.astype(np.float64) * second).sum(axis=1).astype(np.float32)
    correlations = regression_scores(scores, similarities)
    del correlations["mse"]  # cosines and scores have different scales
    return Evaluated(
        correlations,
        lambda i: regression_scores(scores[i], similarities[i])["spearman"],
        [
            {"texts": list(example.texts[:2]), "gold": float(score), "cosine": float(cosine)}
            for example, score, cosine in zip(examples, scores, similarities, strict=True)
        ],
    )


def _score_retrieval(examples: Sequence[EmbeddingExample], queries: Vectors, documents: Vectors) -> Evaluated:
    gains: dict[str, dict[str, float]] = {query: {} for query in queries}
    for example in examples:
        gains[example.texts[0]][example.texts[1]] = 1.0
    names, targets = list(documents), np.stack(list(documents.values()))
    scores, records = [], []
    for query, vector in queries.items():
        cosines = targets @ vector
        order = np.argsort(-cosines, kind="stable")
        scores.append(score_ranking([names[i] for i in order[:DEPTH]], gains[query], METRICS))
        rank, gold = next((rank, i) for rank, i in enumerate(order) if names[i] in gains[query])
        records.append(
            {
                "query": query,
                "gold": names[gold],
                "rank": rank + 1,
                "gold_cosine": float(cosines[gold]),
                "nearest": names[order[0]],
                "nearest_cosine": float(cosines[order[0]]),
            }
        )
    by_query = np.array([own[METRICS[-1]] for own in scores])
    number = {query: position for position, query in enumerate(queries)}
    owner = np.array([number[example.texts[0]] for example in examples])
    return Evaluated(mean_scores(scores), lambda i: float(by_query[owner[i]].mean()), records)
