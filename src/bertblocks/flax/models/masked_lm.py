"""Masked language modelling."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.config import BertBlocksConfig
from bertblocks.flax.inputs import IGNORE, Inputs, Options
from bertblocks.flax.models.base import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.models.model import EncoderParts
from bertblocks.flax.nn.head import Decoder, get_mlm_head
from bertblocks.flax.numerics import cross_entropy
from bertblocks.flax.outputs import TokenOutput
from bertblocks.flax.reading import read_token_labels
from bertblocks.nn.parametrization import get_decoder_scale


class FlaxBertBlocksForMaskedLM(FlaxBertBlocksPreTrainedModel):
    """Predicts masked tokens; with `labels`, the loss is the mean over those that are not -100.

    Example:
        >>> model = FlaxBertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini", num_hidden_layers=1))
        >>> out = model([[5, 3, 7]], labels=[[-100, 9, -100]])
        >>> out.loss.shape, out.logits.shape
        ((), (1, 3, 2048))
    """

    task: ClassVar[str] = "masked-lm"
    label_names: ClassVar[tuple[str, ...]] = ("labels",)

    def build(self, config: BertBlocksConfig) -> None:
        self.model = EncoderParts(config, add_pooling_layer=False)
        self.head = get_mlm_head(config)
        size, vocabulary = config.decoder_size, config.vocab_size
        self.decoder = Decoder(size, vocabulary, config.decoder_bias, is_tied=config.tie_word_embeddings)
        self.decoder_scale = get_decoder_scale(config)
        self.logit_scale = nnx.Param(jnp.ones(vocabulary)) if config.ngpt_logit_scale else None

    def logits(self, hidden: Array, rngs: nnx.Rngs | None) -> Array:
        hidden = (hidden if self.head is None else self.head(hidden, rngs)) * self.decoder_scale
        logits = self.decoder(hidden, self.model.embedding.token.weight[...])
        return logits if self.logit_scale is None else logits * self.logit_scale

    def read_labels(self, labels: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
        return read_token_labels(labels, inputs, self.config.vocab_size, "vocab_size")

    def forward(self, inputs: Inputs, options: Options) -> TokenOutput:
        rngs = inputs.rngs()
        encoded = self.model.encode(inputs, options, rngs)
        logits = self.logits(encoded.hidden, rngs)
        loss = None
        if "labels" in inputs.labels:
            labels = inputs.labels["labels"]
            loss = cross_entropy(logits, labels, (labels != IGNORE) & encoded.layout.real)
        return TokenOutput(
            loss=loss,
            logits=encoded.layout.zero_padding(logits),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
