"""Models that order the documents of a search again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertblocks.search.documents import Hit
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.rerank.predictions import Ranked


@dataclass(frozen=True)
class Reranker:
    """Orders documents with a predictor that reads query and document together."""

    predictor: Any

    def __call__(self, queries: Sequence[str], found: Sequence[Sequence[Hit]], top_k: int) -> list[list[Hit]]:
        """The best `top_k` documents of each query, with the reranker's scores."""
        ranked = self._rank(queries, [[hit.text for hit in hits] for hits in found])
        return [
            [replace(hits[entry.index], score=entry.score) for entry in row[:top_k]]
            for hits, row in zip(found, ranked, strict=True)
        ]

    def score(self, queries: Sequence[str], documents: Sequence[Sequence[str]]) -> list[list[float]]:
        """The score of each document of each query."""
        return [
            [entry.score for entry in sorted(row, key=lambda entry: entry.index)]
            for row in self._rank(queries, documents)
        ]

    def _rank(self, queries: Sequence[str], documents: Sequence[Sequence[str]]) -> list[list[Ranked]]:
        """The documents of each query, best first; a query may have none."""
        some = [index for index, texts in enumerate(documents) if texts]
        ranked = self.predictor.rerank([queries[index] for index in some], [documents[index] for index in some])
        found = dict(zip(some, ranked, strict=True))
        return [found.get(index, []) for index in range(len(documents))]


def open_reranker(source: str | Path, **options: Any) -> Reranker:
    return Reranker(Predictor(source, **options))
