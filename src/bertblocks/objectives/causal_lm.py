"""Causal language modeling: every token is predicted from the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import ChunkTokens, Objective, cumulative_lengths, enclose, labelled_indices
from bertblocks.text.vocabulary import Vocabulary


class CausalLanguageModeling(Objective):
    """Labels each token with the next one. The model is a masked LM whose attention is causal meanwhile.

    The [SEP] at the end is not predicted, because it ends a chunk and not necessarily a text.
    """

    overhead = 2
    is_causal = True

    def __init__(self, vocabulary: Vocabulary, z_loss: float = 0.0) -> None:
        self.vocabulary, self.z_loss = vocabulary, z_loss

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        tokens, vocabulary = ChunkTokens.from_rows(rows, seed), self.vocabulary
        ids = enclose(tokens.ids, tokens.lengths, vocabulary.cls, vocabulary.sep)
        # a token's label is one place before it: that of the first token is at [CLS]
        labels = np.roll(enclose(tokens.ids, tokens.lengths, IGNORE, IGNORE), -1)
        return FlatBatch(
            input_ids=torch.from_numpy(ids),
            cu_seqlens=cumulative_lengths(tokens.lengths + self.overhead),
            counts={"causal_lm": len(tokens.ids)},
            labels=torch.from_numpy(labels),
            scored_tokens=labelled_indices(labels),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        out = model(
            input_ids=batch.input_ids,
            cu_seqlens=batch.cu_seqlens,
            labels=batch.labels,
            scored_tokens=batch.scored_tokens,
            num_items_in_batch=1,
            return_logits=False,
            z_loss=self.z_loss,
        )
        return {"causal_lm": out.loss}
