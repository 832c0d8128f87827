"""Models that order the documents of a search again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertblocks.search.documents import Hit
from bertblocks.tasks.predictor import Predictor


@dataclass(frozen=True)
class Reranker:
    """Scores documents with a predictor that reads query and document together."""

    predictor: Any

    def __call__(self, queries: Sequence[str], found: Sequence[Sequence[Hit]], top_k: int) -> list[list[Hit]]:
        """The best `top_k` documents of each query, with the reranker's scores."""
        scores = self.score(queries, [[hit.text for hit in hits] for hits in found])
        ranked = []
        for hits, row in zip(found, scores, strict=True):
            scored = [replace(hit, score=score) for hit, score in zip(hits, row, strict=True)]
            ranked.append(sorted(scored, key=lambda hit: -hit.score)[:top_k])
        return ranked

    def score(self, queries: Sequence[str], documents: Sequence[Sequence[str]]) -> list[list[float]]:
        """The score of each document of each query."""
        scores: list[list[float]] = [[0.0] * len(texts) for texts in documents]
        some = [index for index, texts in enumerate(documents) if texts]
        ranked = self.predictor.rerank([queries[index] for index in some], [list(documents[index]) for index in some])
        for index, row in zip(some, ranked, strict=True):
            for entry in row:
                scores[index][entry.index] = float(entry.score)
        return scores


def open_reranker(source: str | Path, **options: Any) -> Reranker:
    return Reranker(Predictor(source, **options))
