"""Batches of queries and documents for multi-vector encoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

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

    seen: Tensor | None = None  # [sequences], tokens that are attended to
    kept: Tensor | None = None  # [tokens], whether a token gets a vector
    keys: Tensor | None = None  # [sequences], hashes of texts
    gains: Tensor | None = None  # [documents]
    sizes: Tensor | None = None  # [queries], the number of documents of each

    @classmethod
    def from_features(cls, features: Sequence[MultiFeature]) -> MultiBatch:
        queries, documents = [own.query for own in features], [part for own in features for part in own.documents]
        segments = [*queries, *documents]
        sequences = [segment.sequence for segment in segments]
        flat = FlatBatch.from_sequences([own.ids for own in sequences], [own.types for own in sequences])
        kept = torch.zeros(len(flat.input_ids), dtype=torch.bool)
        starts = flat.cu_seqlens.tolist()
        places = [start + i for start, own in zip(starts, segments, strict=False) for i in own.token_indices or ()]
        kept[places] = True
        keys = [*(own.keys[0] for own in features), *(key for own in features for key in own.keys[1:])]
        return cls(
            flat.input_ids,
            flat.cu_seqlens,
            flat.token_type_ids,
            torch.tensor([target for own in features for target in own.targets]),
            counts={"loss": len(features)},
            seen=torch.tensor([segment.seen for segment in segments]),
            kept=kept,
            keys=torch.tensor(keys),
            gains=torch.tensor([gain for own in features for gain in own.gains]),
            sizes=torch.tensor([len(own.documents) for own in features]),
        )

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        """The number of vectors of each query and of each document."""
        assert self.kept is not None
        assert self.sizes is not None
        totals = torch.cat((self.kept.new_zeros(1, dtype=torch.long), self.kept.cumsum(0)))
        counts = totals[self.cu_seqlens.long()].diff().tolist()
        return counts[: len(self.sizes)], counts[len(self.sizes) :]


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
    return is_relevant.index_put((torch.arange(len(own), device=own.device), own), torch.zeros((), dtype=torch.bool))
