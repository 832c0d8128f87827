"""What a sparse encoder is trained on: a query, a relevant document and others, as numbered token sequences."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.tasks.features import Feature
from bertblocks.tasks.retrieval.examples import RetrievalExample

#: The columns of a batch's labels, which have a row for each document.
QUERY, DOCUMENT, TARGET, IS_FIRST = range(4)


@dataclass(frozen=True)
class SparseFeature:
    """A query and a list of documents, of which the first is relevant; numbers tell equal texts."""

    query: Feature
    documents: list[Feature]
    targets: list[float]
    query_number: int
    document_numbers: list[int]


def make_lists(examples: Sequence[RetrievalExample], negatives: int, has_teacher: bool) -> list[RetrievalExample]:
    """Makes one list for each relevant document, with at most `negatives` of the query's other documents.

    Rows of the same query are joined if they have labels, because those of documents that are not relevant come in rows
    of their own. A teacher's list stays as it is, up to that number.

    Example:
        >>> rows = [RetrievalExample("q", (text,), (gain,), (gain,), "line 2") for text, gain in (("a", 0), ("b", 1))]
        >>> make_lists(rows, 7, has_teacher=False)[0].documents
        ('b', 'a')
    """
    if has_teacher:
        kept = slice(negatives + 1)
        return [
            RetrievalExample(own.query, own.documents[kept], own.targets[kept], own.gains[kept], own.place)
            for own in examples
        ]
    irrelevant: dict[str, list[str]] = {}
    for example in examples:
        pairs = zip(example.documents, example.gains, strict=True)
        irrelevant.setdefault(example.query, []).extend(document for document, gain in pairs if gain <= 0)
    lists = []
    for example in examples:
        own = [document for document, gain in zip(example.documents, example.gains, strict=True) if gain <= 0]
        others = list(dict.fromkeys(own or irrelevant[example.query]))[:negatives]
        for document, gain in zip(example.documents, example.gains, strict=True):
            if gain > 0:
                targets = (1.0, *[0.0] * len(others))
                lists.append(RetrievalExample(example.query, (document, *others), targets, targets, example.place))
    return lists


def make_batch(features: Sequence[SparseFeature], has_bags: bool) -> FlatBatch:
    """Joins all queries, then all documents; with `has_bags`, queries are bags of tokens instead of sequences."""
    documents = [document for feature in features for document in feature.documents]
    sequences = documents if has_bags else [*(feature.query for feature in features), *documents]
    rows = [
        (feature.query_number, number, target, position == 0)
        for feature in features
        for position, (number, target) in enumerate(zip(feature.document_numbers, feature.targets, strict=True))
    ]
    terms = ("ranking", "document_flops", *(() if has_bags else ("query_flops",)))
    batch = FlatBatch.from_sequences(
        [sequence.ids for sequence in sequences],
        [sequence.types for sequence in sequences],
        torch.tensor(rows, dtype=torch.float64),
        dict.fromkeys(terms, len(features)),
    )
    batch = replace(batch, list_lengths=torch.tensor([len(feature.documents) for feature in features]))
    if not has_bags:
        return batch
    entries = [(number, token) for number, feature in enumerate(features) for token in sorted({*feature.query.ids})]
    return replace(batch, bags=torch.tensor(entries, dtype=torch.long).view(-1, 2).t())


def find_hidden(labels: Tensor, own: Tensor) -> Tensor:
    """The documents, `[queries, documents]`, that equal a query's own or are the own of an equal query."""
    is_own = labels[:, IS_FIRST] == 1
    equal_documents = labels[own, DOCUMENT][:, None] == labels[None, :, DOCUMENT]
    equal_queries = labels[own, QUERY][:, None] == labels[None, :, QUERY]
    return equal_documents | (equal_queries & is_own)


def inverse_frequencies(documents: Iterable[Sequence[int]], vocabulary: int) -> Tensor:
    """The weight of each token in a query, from the documents that have it, as in BM25 (Robertson et al., 1994).

    Example:
        >>> weights = inverse_frequencies([[0, 1], [0]], 3)  # log(1 + (2 - n + 0.5) / (n + 0.5))
        >>> [round(weight, 4) for weight in weights.tolist()]
        [0.1823, 0.6931, 1.7918]
    """
    counts: Counter[int] = Counter()
    total = 0
    for document in documents:
        counts.update(set(document))
        total += 1
    return torch.tensor([math.log(1 + (total - counts[i] + 0.5) / (counts[i] + 0.5)) for i in range(vocabulary)])
