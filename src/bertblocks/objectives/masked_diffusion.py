"""Masked diffusion (Sahoo et al., 2024; Nie et al., 2025): a random share of each text is masked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import GOLDEN, combine, draw, uniform
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import ChunkTokens, Objective, cumulative_lengths, enclose, labelled_indices
from bertblocks.text.vocabulary import Vocabulary


class MaskedDiffusion(Objective):
    """Masks the tokens of each chunk with a probability t of its own; masked tokens have the weight 1/t in the loss.

    The t of a batch are spread over [min_time, 1] more evenly than random numbers, because they follow the golden-ratio
    sequence along the stream. They depend on the seed and on the chunk's index in the stream, not on how batches are
    split.
    """

    overhead = 2

    def __init__(self, vocabulary: Vocabulary, min_time: float = 1e-3) -> None:
        if not 0 < min_time < 1:
            raise ValueError(f"min_time is {min_time}; it must be above 0 and below 1.")
        self.vocabulary, self.min_time = vocabulary, min_time

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        tokens, vocabulary = ChunkTokens.from_rows(rows, seed), self.vocabulary
        spread = uniform(combine("time", seed) + tokens.stream_indices.astype(np.uint64) * GOLDEN)
        times = self.min_time + (1 - self.min_time) * spread
        ordinary = ~vocabulary.is_special[tokens.ids]
        masked = uniform(draw(tokens.token_keys("hide"), tokens.positions)) < np.repeat(times, tokens.lengths)
        masked &= ordinary
        ids = np.where(masked, vocabulary.mask, tokens.ids)
        labels = enclose(np.where(masked, tokens.ids, IGNORE), tokens.lengths, IGNORE, IGNORE)
        return FlatBatch(
            input_ids=torch.from_numpy(enclose(ids, tokens.lengths, vocabulary.cls, vocabulary.sep)),
            cu_seqlens=cumulative_lengths(tokens.lengths + self.overhead),
            counts={"masked_diffusion": int(ordinary.sum())},
            labels=torch.from_numpy(labels),
            scored_tokens=labelled_indices(labels),
            timesteps=torch.from_numpy(times.astype(np.float32)),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            labels=batch.labels,
            timesteps=batch.timesteps,
            scored_tokens=batch.scored_tokens,
            num_items_in_batch=1,
            return_logits=False,
        )
        return {"masked_diffusion": out.loss}
