"""Hard negatives: documents that a model ranks high for a query although they do not answer it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

import numpy as np

from bertblocks.core.messages import InputError
from bertblocks.search.documents import Hit
from bertblocks.search.index import SearchIndex
from bertblocks.search.rerankers import Reranker

Sampling = Literal["top", "random"]
#: Queries that are searched at once.
BATCH_QUERIES = 64

#: Why a candidate is not a negative.
POSITIVE, DUPLICATE = "is a positive of the query", "has the text of another candidate"
MARGIN, RELATIVE = "is within the margin of the positive", "is within the relative margin of the positive"
HIGH, LOW = "is above the maximum score", "is below the minimum score"
RERANKED, SPARE = "is too good for the reranker", "is not needed"
REASONS = (POSITIVE, DUPLICATE, MARGIN, RELATIVE, HIGH, LOW, RERANKED, SPARE)


class MiningError(InputError):
    """Settings of mining that cannot be used."""


@dataclass(frozen=True)
class MiningSettings:
    """Which candidates become negatives.

    `ranks` are the first and the last place in the ranking, counted from 1 without the query's positives. A candidate
    must score at most the query's lowest positive minus `margin`, and minus the share `relative_margin` of that score
    (0.05 is TopK-PercPos 95% of NV-Retriever, Moreira et al., 2024). `rerank_margin` is the margin by the scores of a
    reranker. Of what is left, `negatives` are taken from the top or at random.
    """

    ranks: tuple[int, int] = (1, 100)
    negatives: int = 5
    margin: float | None = None
    relative_margin: float | None = None
    max_score: float | None = None
    min_score: float | None = None
    rerank_margin: float = 0.0
    sampling: Sampling = "top"
    seed: int = 0

    def __post_init__(self) -> None:
        first, last = self.ranks
        if not 1 <= first <= last:
            raise MiningError(f"ranks is {first}-{last}; it must be FIRST-LAST with 1 <= FIRST <= LAST.")
        if not 1 <= self.negatives <= last - first + 1:
            raise MiningError(
                f"negatives is {self.negatives}; it must be between 1 and {last - first + 1}, the number of ranks."
            )
        if self.sampling not in ("top", "random"):
            raise MiningError(f"sampling is {self.sampling!r}; it must be top or random.")


@dataclass(frozen=True)
class Mined:
    """A query, its positives, its negatives from the best one on, and how many candidates were rejected and why."""

    query: str
    positives: list[str]
    negatives: list[str]
    rejected: dict[str, int] = field(default_factory=dict)


class Miner:
    """Finds hard negatives for queries in an index."""

    def __init__(self, index: SearchIndex, settings: MiningSettings, reranker: Any = None) -> None:
        self.index, self.settings = index, settings
        self.reranker = None if reranker is None else index.reranker(reranker)

    def mine(self, queries: Iterable[tuple[str, Sequence[str]]]) -> Iterator[Mined]:
        """Yields the negatives of each query with its positives."""
        remaining = iter(queries)
        while batch := list(islice(remaining, BATCH_QUERIES)):
            yield from self._mine_batch(batch)

    def _mine_batch(self, batch: list[tuple[str, Sequence[str]]]) -> Iterator[Mined]:
        models = self.index.models
        vectors = np.stack(list(models.encode_all([query for query, _ in batch], "query")))
        texts = [text for _, positives in batch for text in positives]
        positive_vectors = iter(models.encode_all(texts, "document"))
        lowest = [
            min(float(vector @ positive) for positive in islice(positive_vectors, len(positives)))
            for vector, (_, positives) in zip(vectors, batch, strict=True)
        ]
        depth = self.settings.ranks[1] + max(len(positives) for _, positives in batch)
        rankings = self.index.rank_vectors(vectors, depth)
        counts: list[Counter[str]] = [Counter() for _ in batch]
        left = [
            self._filter(self.index.hits(ranking), positives, score, counted)
            for ranking, (_, positives), score, counted in zip(rankings, batch, lowest, counts, strict=True)
        ]
        if self.reranker is not None:
            left = self._filter_by_reranker(self.reranker, batch, left, counts)
        for (query, positives), hits, counted in zip(batch, left, counts, strict=True):
            chosen = self._sample(query, hits)
            counted[SPARE] += len(hits) - len(chosen)
            yield Mined(
                query, list(positives), [hit.text for hit in chosen], {key: n for key, n in counted.items() if n}
            )

    def _filter(self, hits: list[Hit], positives: Sequence[str], lowest: float, counted: Counter[str]) -> list[Hit]:
        """The candidates in the range of ranks that the scores allow."""
        own = {text.strip() for text in positives}
        others = [hit for hit in hits if hit.text.strip() not in own]
        counted[POSITIVE] += len(hits) - len(others)
        first, last = self.settings.ranks
        left = []
        seen: set[str] = set()
        for hit in others[first - 1 : last]:
            text = hit.text.strip()
            reason = DUPLICATE if text in seen else self._why_not(hit.score, lowest)
            seen.add(text)
            if reason is None:
                left.append(hit)
            else:
                counted[reason] += 1
        return left

    def _why_not(self, score: float, lowest: float) -> str | None:
        limits = self.settings
        if limits.margin is not None and score > lowest - limits.margin:
            return MARGIN
        if limits.relative_margin is not None and score > lowest - abs(lowest) * limits.relative_margin:
            return RELATIVE
        if limits.max_score is not None and score > limits.max_score:
            return HIGH
        return LOW if limits.min_score is not None and score < limits.min_score else None

    def _filter_by_reranker(
        self,
        reranker: Reranker,
        batch: list[tuple[str, Sequence[str]]],
        left: list[list[Hit]],
        counts: list[Counter[str]],
    ) -> list[list[Hit]]:
        documents = [
            [*positives, *(hit.text for hit in hits)] for (_, positives), hits in zip(batch, left, strict=True)
        ]
        scores = reranker.score([query for query, _ in batch], documents)
        kept = []
        for (_, positives), hits, row, counted in zip(batch, left, scores, counts, strict=True):
            limit = min(row[: len(positives)]) - self.settings.rerank_margin
            good = [hit for hit, score in zip(hits, row[len(positives) :], strict=True) if score <= limit]
            counted[RERANKED] += len(hits) - len(good)
            kept.append(good)
        return kept

    def _sample(self, query: str, hits: list[Hit]) -> list[Hit]:
        """The best candidates, or random ones in their order; the same for a query in every run with a seed."""
        wanted = self.settings.negatives
        if self.settings.sampling == "top" or len(hits) <= wanted:
            return hits[:wanted]
        generator = random.Random(f"{self.settings.seed} {query}")
        return [hits[position] for position in sorted(generator.sample(range(len(hits)), wanted))]
