"""Masked language models with one more layer in training, which reconstructs the text: RetroMAE and enhanced MLM."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils.generic import ModelOutput

from bertblocks.models.masked_lm import IGNORE, BertBlocksForMaskedLM, LanguageModel, labelled_tokens
from bertblocks.models.training_model import RandomAttentionLayer, TrainingModel
from bertblocks.nn.layout import SequenceLayout


@dataclass
class DecoderOutput(ModelOutput):
    """The summed losses of the encoder's masked tokens, if it has any, and of the decoder's tokens."""

    encoder_total: Tensor | None = None
    decoder_total: Tensor | None = None


class MaskedLMWithDecoder(TrainingModel):
    """A masked language model with a layer on top that only training needs."""

    def __init__(self, encoder: BertBlocksForMaskedLM) -> None:
        super().__init__(copy.deepcopy(encoder.config))
        self.encoder, self.decoder = encoder, RandomAttentionLayer(encoder)

    @property
    def language_model(self) -> LanguageModel:
        return self.encoder

    def set_rope_theta(self, theta: float) -> None:
        super().set_rope_theta(theta)
        layer: Any = self.encoder.model.encoder.layers[self.decoder.model_layer]
        self.decoder.block.attention.position.theta = layer.attention.position.theta

    def decoder_loss(
        self, hidden: Tensor, layout: SequenceLayout, labels: Tensor, token_indices: Tensor | None
    ) -> Tensor:
        """Returns the summed loss of the tokens that have a label, whose indices the caller may know."""
        indices = labelled_tokens(layout, labels, token_indices)
        return self.encoder.fused_loss(hidden[indices], labels[indices])


class EnhancedMaskedLM(MaskedLMWithDecoder):
    """Encodes a text without masks; the decoder then predicts each token from a random share of the others' states.

    So is the "enhanced masked language modeling" of coral-nlp's BertBlocks. Nothing is hidden from the encoder, so a
    token's own state and its neighbours' states may tell what it is.
    """

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        labels: Tensor,
        seeds: Tensor,
        hidden_share: float,
        scored_tokens: Tensor | None = None,
    ) -> DecoderOutput:
        encoded = self.encoder.model.encode(input_ids, cu_seqlens=cu_seqlens)
        hidden = self.decoder(encoded.hidden, input_ids, encoded.layout, seeds.tolist(), hidden_share)
        total = self.decoder_loss(hidden, encoded.layout, labels, scored_tokens)
        return DecoderOutput(None, encoded.add_router_loss(total, (labels != IGNORE).sum()))


class RetroMAE(MaskedLMWithDecoder):
    """Encodes a masked text into the vector of its first token, from which the decoder reconstructs it.

    The decoder is RetroMAE's enhanced decoding (Xiao et al., 2022): its queries are the vector plus positions; its keys
    and values are the embeddings of the whole text, of which each query sees a random share and never its own token.
    """

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        labels: Tensor,
        decoder_labels: Tensor,
        seeds: Tensor,
        hidden_share: float,
        scored_tokens: Tensor | None = None,
        decoder_tokens: Tensor | None = None,
    ) -> DecoderOutput:
        def firsts_and_labelled(layout: SequenceLayout) -> Tensor:
            return torch.cat([layout.first_tokens, labelled_tokens(layout, labels, scored_tokens)])

        model = self.encoder.model
        encoded = model.encode(input_ids, cu_seqlens=cu_seqlens, token_indices=firsts_and_labelled)
        layout, indices = encoded.layout, encoded.token_indices
        assert indices is not None
        firsts, hidden = encoded.hidden.split([layout.num_sequences, len(indices) - layout.num_sequences])
        encoder_total = self.encoder.fused_loss(hidden, labels[indices[layout.num_sequences :]])
        encoder_total = encoded.add_router_loss(encoder_total, len(hidden))
        original = torch.where(labels == IGNORE, input_ids, labels)
        memory = model.embedding(original, None, None, layout.positions, layout)
        memory = memory.index_copy(0, layout.first_tokens, firsts.to(memory.dtype))
        queries = firsts[layout.sequence_ids]
        if model.embedding.position is not None:
            positions = model.embedding.position(layout.positions)
            projection = model.embedding.projection
            queries = queries + (positions if projection is None else projection(positions)).to(queries.dtype)
        decoded = self.decoder(queries, original, layout, seeds.tolist(), hidden_share, memory)
        decoder_total = self.decoder_loss(decoded, layout, decoder_labels, decoder_tokens)
        return DecoderOutput(encoder_total, decoder_total)
