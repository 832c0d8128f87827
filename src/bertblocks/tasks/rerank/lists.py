"""The lists of documents that a reranker learns from and is scored on: one list per query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from bertblocks.data.hashing import combine, permute
from bertblocks.tasks.retrieval.examples import RetrievalExample

#: Documents of other queries that take the place of negatives if the data has none.
RANDOM_NEGATIVES = 30


def merge_rows(examples: Sequence[RetrievalExample]) -> list[RetrievalExample]:
    """Joins the rows of each query into one list, relevant documents first.

    A document that several rows have counts once, with the highest of its targets.

    Example:
        >>> rows = [RetrievalExample("q", (text,), (gain,), (gain,), "line 2") for text, gain in (("a", 0), ("b", 1))]
        >>> merge_rows(rows)[0].documents
        ('b', 'a')
    """
    merged: dict[str, dict[str, tuple[float, float]]] = {}
    places: dict[str, str] = {}
    for example in examples:
        own = merged.setdefault(example.query, {})
        places.setdefault(example.query, example.place)
        for document, values in zip(example.documents, zip(example.gains, example.targets, strict=True), strict=True):
            own[document] = max(values, own.get(document, values))
    lists = []
    for query, own in merged.items():
        documents = sorted(own, key=lambda document: own[document][0] <= 0)
        gains, targets = zip(*(own[document] for document in documents), strict=True)
        lists.append(RetrievalExample(query, tuple(documents), targets, gains, places[query]))
    return lists


def add_random_negatives(examples: Sequence[RetrievalExample]) -> list[RetrievalExample]:
    """Adds documents of other queries to each list, the same ones in every run."""
    pool = list(dict.fromkeys(document for example in examples for document in example.documents))
    extended = []
    for example in examples:
        count = min(RANDOM_NEGATIVES + len(example.documents), len(pool))
        drawn = permute(np.arange(count), len(pool), combine("negatives", _number(example.query)))
        others = [pool[index] for index in drawn.tolist() if pool[index] not in example.documents][:RANDOM_NEGATIVES]
        zeros = (0.0,) * len(others)
        extended.append(
            replace(
                example,
                documents=(*example.documents, *others),
                targets=example.targets + zeros,
                gains=example.gains + zeros,
            )
        )
    return extended


def shuffle(documents: Sequence[str]) -> list[str]:
    """Puts documents in an order that says nothing about their relevance, so that equal scores gain nothing."""
    return sorted(documents, key=_number)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest(), "big")
