"""Masked language modeling with terms on the mean vector of each text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.stream import Row
from bertblocks.objectives.base import ChunkTokens, Objective
from bertblocks.objectives.masked_lm import MaskedLanguageModeling


class MaskedLMWithPooledTerms(Objective):
    """Adds up to two terms to masked language modeling. The model is `models.MaskedLMWithPooledTerms`.

    `bag_of_subwords` weights the binary cross-entropy, over the vocabulary, of which tokens occur in a text. `isotropy`
    weights the squared cosines of different texts in a forward pass: it is the only term that depends on how a global
    batch is split.
    """

    def __init__(self, masking: MaskedLanguageModeling, bag_of_subwords: float = 0.0, isotropy: float = 0.0) -> None:
        self.masking, self.bag_of_subwords, self.isotropy = masking, bag_of_subwords, isotropy
        self.overhead = masking.overhead

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        batch, tokens = self.masking.batch(rows, seed, progress), ChunkTokens.from_rows(rows, seed)
        texts, counts = len(tokens.lengths), dict(batch.counts)
        bags = None
        if self.bag_of_subwords:
            ordinary = ~self.masking.vocabulary.is_special[tokens.ids]
            chunk_indices = np.repeat(np.arange(texts), tokens.lengths)
            bags = torch.from_numpy(np.unique(np.stack([chunk_indices, tokens.ids])[:, ordinary], axis=1))
            counts["bag_of_subwords"] = texts
        if self.isotropy:
            counts["isotropy"] = texts * (texts - 1)
        return replace(batch, counts=counts, bags=bags)

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            batch.input_ids, batch.cu_seqlens, batch.labels, batch.bags, self.masking.z_loss, batch.scored_tokens
        )
        losses = {"masked_lm": out.masked_lm_total}
        if self.bag_of_subwords:
            losses["bag_of_subwords"] = self.bag_of_subwords * out.bag_total
        if self.isotropy:
            losses["isotropy"] = self.isotropy * out.isotropy_total
        return losses
