"""Objectives that reconstruct a text in a decoder: RetroMAE (Xiao et al., 2022) and enhanced masked LM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertblocks.data.flat_batch import FlatBatch
from bertblocks.data.hashing import combine
from bertblocks.data.stream import Row
from bertblocks.models.masked_lm import IGNORE
from bertblocks.objectives.base import ChunkTokens, Objective, cumulative_lengths, enclose, labelled_indices
from bertblocks.objectives.masked_lm import MaskedLanguageModeling
from bertblocks.text.vocabulary import Vocabulary


class RetroMAE(Objective):
    """Masks tokens for the encoder; the decoder then predicts every token of the text.

    The model is `models.RetroMAE`. Which tokens its decoder hides follows from `decoder_rate` and a seed of each chunk.
    """

    def __init__(self, masking: MaskedLanguageModeling, decoder_rate: float = 0.5) -> None:
        self.masking, self.overhead, self.decoder_rate = masking, masking.overhead, decoder_rate

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        batch, tokens = self.masking.batch(rows, seed, progress), ChunkTokens.from_rows(rows, seed)
        labels = all_labels(tokens, self.masking.vocabulary)
        decoder_tokens = labelled_indices(labels)
        return replace(
            batch,
            counts={"encoder": batch.counts["masked_lm"], "decoder": len(decoder_tokens)},
            decoder_labels=torch.from_numpy(labels),
            decoder_tokens=decoder_tokens,
            seeds=attention_seeds(tokens),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        targets = (batch.labels, batch.decoder_labels)
        tokens = (batch.scored_tokens, batch.decoder_tokens)
        out = model(batch.input_ids, batch.cu_seqlens, *targets, batch.seeds, self.decoder_rate, *tokens)
        return {"encoder": out.encoder_total, "decoder": out.decoder_total}


class EnhancedMaskedLM(Objective):
    """Hides nothing from the encoder, and predicts every token in the decoder of `models.EnhancedMaskedLM`."""

    overhead = 2

    def __init__(self, vocabulary: Vocabulary, decoder_rate: float = 0.5) -> None:
        self.vocabulary, self.decoder_rate = vocabulary, decoder_rate

    def batch(self, rows: Sequence[Row], seed: int, progress: float = 0.0) -> FlatBatch:
        tokens, vocabulary = ChunkTokens.from_rows(rows, seed), self.vocabulary
        labels = all_labels(tokens, vocabulary)
        scored_tokens = labelled_indices(labels)
        return FlatBatch(
            input_ids=torch.from_numpy(enclose(tokens.ids, tokens.lengths, vocabulary.cls, vocabulary.sep)),
            cu_seqlens=cumulative_lengths(tokens.lengths + self.overhead),
            counts={"decoder": len(scored_tokens)},
            labels=torch.from_numpy(labels),
            scored_tokens=scored_tokens,
            seeds=attention_seeds(tokens),
        )

    def losses(self, model: nn.Module, batch: FlatBatch) -> dict[str, Tensor]:
        inputs = (batch.input_ids, batch.cu_seqlens, batch.labels, batch.seeds)
        out = model(*inputs, self.decoder_rate, batch.scored_tokens)
        return {"decoder": out.decoder_total}


def all_labels(tokens: ChunkTokens, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """The ids of all tokens that are not special."""
    labels = np.where(vocabulary.is_special[tokens.ids], IGNORE, tokens.ids)
    return enclose(labels, tokens.lengths, IGNORE, IGNORE)


def attention_seeds(tokens: ChunkTokens) -> Tensor:
    """A seed for each chunk, from which a model draws the tokens that it hides from each other."""
    return torch.from_numpy((combine(tokens.keys, "attention") >> np.uint64(1)).astype(np.int64))
