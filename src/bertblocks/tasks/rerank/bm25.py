"""BM25, the word overlap that every reranker should beat."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

#: The saturation of repeated words and the weight of a document's length, as in Lucene.
K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")


class BM25:
    """Scores documents by the words that they share with a query (Robertson and Zaragoza, 2009).

    Example:
        >>> bm25 = BM25(["a warm day", "a cold day", "snow"])
        >>> bm25.score("warm", "a warm day") > bm25.score("warm", "a cold day") == 0
        True
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self._counts = {document: Counter(_words(document)) for document in dict.fromkeys(documents)}
        self._frequencies = Counter(word for counts in self._counts.values() for word in counts)
        self._mean_length = sum(counts.total() for counts in self._counts.values()) / max(len(self._counts), 1)

    def score(self, query: str, document: str) -> float:
        counts = self._counts[document]
        length = K1 * (1 - B + B * counts.total() / max(self._mean_length, 1e-9))
        return sum(
            self._rarity(word) * counts[word] / (counts[word] + length) for word in _words(query) if counts[word]
        )

    def _rarity(self, word: str) -> float:
        documents, having = len(self._counts), self._frequencies[word]
        return math.log(1 + (documents - having + 0.5) / (having + 0.5))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
