"""Features: sequences of token ids with their targets, and the flat batches made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from bertblocks.data.flat_batch import FlatBatch


@dataclass(frozen=True)
class Feature:
    """One sequence as a model reads it, with its target."""

    ids: list[int]
    types: list[int]
    target: Any = None


def make_batch(features: Sequence[Feature], labels: Tensor | None, count: int) -> FlatBatch:
    """Joins features into a flat batch; the summed loss is divided by `count`."""
    ids, types = [feature.ids for feature in features], [feature.types for feature in features]
    return FlatBatch.from_sequences(ids, types, labels, {"loss": count})
