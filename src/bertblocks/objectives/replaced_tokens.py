"""Replaced token detection (Clark et al., 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.stream import Row
from bertblocks.objectives.base import Objective
from bertblocks.objectives.masked_lm import MaskedLanguageModeling


class ReplacedTokens(Objective):
    """Masks tokens for the generator; the discriminator then judges every token of the filled text.

    The model is `GeneratorAndDiscriminator`. `weight` multiplies the loss of the discriminator.
    """

    def __init__(self, masking: MaskedLanguageModeling, weight: float = 50.0) -> None:
        self.masking, self.weight = masking, weight
        self.overhead = masking.overhead

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        batch = self.masking.batch(rows, seed, progress)
        counts = {"generator": batch.counts["masked_lm"], "discriminator": batch.input_ids.numel()}
        return replace(batch, counts=counts)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            labels=batch.labels,
            scored_tokens=batch.scored_tokens,
        )
        return {"generator": out.generator_total, "discriminator": self.weight * out.discriminator_total}
