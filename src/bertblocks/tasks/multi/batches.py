"""Batches of queries and documents for multi-vector encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import torch
from torch import Tensor

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.tasks.multi.sequences import TokenSegment


@dataclass(frozen=True)
class MultiFeature:
    """A query and documents as sequences, of which the first document is relevant, with hashes of their texts."""

    query: TokenSegment
    documents: tuple[TokenSegment, ...]
    targets: tuple[float, ...]
    #: Whether each document is relevant.
    gains: tuple[float, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True)
class MultiBatch(FlatBatch):
    """All queries, then all documents; the labels are the targets of the documents."""

    on_host: ClassVar[frozenset[str]] = FlatBatch.on_host | {"seen", "vectors"}

    seen: Tensor | None = None  # [sequences], tokens that are attended to
    kept: Tensor | None = None  # the indices of the tokens that get a vector
    vectors: Tensor | None = None  # [sequences], the number of these tokens
    keys: Tensor | None = None  # [sequences], hashes of texts
    gains: Tensor | None = None  # [documents]

    @classmethod
    def from_features(cls, features: Sequence[MultiFeature]) -> MultiBatch:
        queries, documents = [own.query for own in features], [part for own in features for part in own.documents]
        segments = [*queries, *documents]
        sequences = [segment.sequence for segment in segments]
        flat = FlatBatch.from_sequences([own.ids for own in sequences], [own.types for own in sequences])
        chosen = [sorted({*(own.token_indices or ())}) for own in segments]
        starts = flat.cu_seqlens.tolist()
        keys = [*(own.keys[0] for own in features), *(key for own in features for key in own.keys[1:])]
        return cls(
            flat.input_ids,
            flat.cu_seqlens,
            flat.token_type_ids,
            torch.tensor([target for own in features for target in own.targets]),
            counts={"loss": len(features)},
            list_lengths=torch.tensor([len(own.documents) for own in features]),
            seen=torch.tensor([segment.seen for segment in segments]),
            kept=torch.tensor([start + i for start, own in zip(starts, chosen, strict=False) for i in own]),
            vectors=torch.tensor([len(own) for own in chosen]),
            keys=torch.tensor(keys),
            gains=torch.tensor([gain for own in features for gain in own.gains]),
        )

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """The number of vectors of each query and of each document."""
        assert self.vectors is not None
        assert self.list_lengths is not None
        counts, queries = self.vectors.tolist(), len(self.list_lengths)
        return counts[:queries], counts[queries:]


def hash_text(text: str) -> int:
    """A number of 63 bits that stands for a text."""
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "little") >> 1


def find_false_negatives(batch_queries: Tensor, query_of: Tensor, keys: Tensor, gains: Tensor, own: Tensor) -> Tensor:
    """Returns `[queries, documents]`: documents that are relevant to a query and not the one that it should find.

    `batch_queries` are the hashes of queries, `query_of` those of each document's query, `keys` those of documents,
    and `own` is the index of each query's document.
    """
    same_query = batch_queries[:, None] == query_of
    is_relevant = same_query & (gains > 0)
    is_relevant = is_relevant | (keys[own][:, None] == keys)
    return is_relevant.scatter(1, own[:, None], False)
