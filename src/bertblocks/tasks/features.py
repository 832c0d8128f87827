"""Examples as flat batches: sequences of ids with their targets, laid end to end without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Feature:
    """One sequence as a model reads it, with what it should say about it."""

    ids: list[int]
    types: list[int]
    target: Any = None


@dataclass(frozen=True)
class FeatureBatch:
    """Flat sequences, their targets, and by what the sum of the losses is divided."""

    input_ids: Tensor  # [tokens]
    cu_seqlens: Tensor  # [sequences + 1]
    token_type_ids: Tensor | None  # [tokens]
    targets: Tensor
    counts: dict[str, int]

    @classmethod
    def of(cls, features: Sequence[Feature], targets: Tensor, count: int) -> FeatureBatch:
        lengths = torch.tensor([0, *(len(feature.ids) for feature in features)], dtype=torch.int32)
        types = torch.tensor([kind for feature in features for kind in feature.types])
        return cls(
            input_ids=torch.tensor([token for feature in features for token in feature.ids]),
            cu_seqlens=lengths.cumsum(0, dtype=torch.int32),
            # a model without token types takes none, and a single text has only the first
            token_type_ids=types if bool(types.any()) else None,
            targets=targets,
            counts={"loss": count},
        )

    def to(self, device: torch.device | str) -> FeatureBatch:
        types = None if self.token_type_ids is None else self.token_type_ids.to(device)
        return FeatureBatch(
            self.input_ids.to(device), self.cu_seqlens.to(device), types, self.targets.to(device), self.counts
        )

    @property
    def inputs(self) -> dict[str, Any]:
        """What a model's forward takes."""
        return {"input_ids": self.input_ids, "cu_seqlens": self.cu_seqlens, "token_type_ids": self.token_type_ids}
