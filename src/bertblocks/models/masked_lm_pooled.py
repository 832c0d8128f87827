"""Masked language modeling with two terms on the mean vector of each text: its bag of subwords, and isotropy."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from bertblocks.models.masked_lm import BertBlocksForMaskedLM, LanguageModel, labelled_tokens
from bertblocks.models.training_model import TrainingModel
from bertblocks.nn.head import pool
from bertblocks.nn.numerics import upcast


@dataclass
class PooledOutput(ModelOutput):
    """The summed loss of labelled tokens, that of texts, and the summed squared cosines of pairs of texts."""

    masked_lm_total: Tensor | None = None
    bag_total: Tensor | None = None
    isotropy_total: Tensor | None = None


class MaskedLMWithPooledTerms(TrainingModel):
    """A masked language model whose mean vectors are trained too, after coral-nlp's BertBlocks.

    With `predicts_bags`, the mean vector of a text predicts which tokens occur in it, through the token embeddings and
    a bias per token that only training needs.
    """

    def __init__(self, encoder: BertBlocksForMaskedLM, predicts_bags: bool) -> None:
        super().__init__(copy.deepcopy(encoder.config))
        config = encoder.config
        if predicts_bags and config.embedding_size != config.hidden_size:
            raise ValueError(
                f"bag_of_subwords needs embeddings as wide as the layers, but embedding_size is "
                f"{config.embedding_size} and hidden_size {config.hidden_size}."
            )
        self.encoder = encoder
        self.bag_bias = nn.Parameter(torch.zeros(config.vocab_size)) if predicts_bags else None

    @property
    def language_model(self) -> LanguageModel:
        return self.encoder

    def forward(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        labels: Tensor,
        bags: Tensor | None,
        z_loss: float = 0.0,
        scored_tokens: Tensor | None = None,
    ) -> PooledOutput:
        encoded = self.encoder.model.encode(input_ids, cu_seqlens=cu_seqlens)
        indices = labelled_tokens(encoded.layout, labels, scored_tokens)
        masked_lm_total = self.encoder.fused_loss(encoded.hidden[indices], labels[indices], z_loss=z_loss)
        masked_lm_total = encoded.add_router_loss(masked_lm_total, len(indices))
        vectors = pool(upcast(encoded.hidden), encoded.layout, "mean")
        bag_total = None
        if self.bag_bias is not None:
            assert bags is not None
            table: Tensor = self.encoder.model.embedding.token.weight
            logits = upcast(F.linear(vectors * self.encoder.decoder_scale, table, self.bag_bias))
            # the binary cross-entropy of a token is softplus(logit), minus the logit if the token occurs
            bag_total = (F.softplus(logits).sum() - logits[bags[0], bags[1]].sum()) / logits.shape[1]
        return PooledOutput(masked_lm_total, bag_total, squared_cosines(vectors))


def squared_cosines(vectors: Tensor) -> Tensor:
    """Returns the sum over all ordered pairs of different vectors.

    Example:
        >>> squared_cosines(torch.tensor([[1.0, 0.0], [3.0, 0.0], [0.0, 2.0]])).item()
        2.0
    """
    directions = F.normalize(vectors, dim=-1)
    return (directions @ directions.T).square().sum() - directions.square().sum(dim=-1).square().sum()
