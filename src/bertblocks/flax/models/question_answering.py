"""The span of a text that answers a question."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from bertblocks.config import BertBlocksConfig
from bertblocks.flax.inputs import Inputs, Options
from bertblocks.flax.layout import RowLayout
from bertblocks.flax.models.base import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.models.model import EncoderParts
from bertblocks.flax.nn.head import get_classifier_head
from bertblocks.flax.nn.linear import Linear, dropout
from bertblocks.flax.numerics import cross_entropy, lowest
from bertblocks.flax.outputs import SpanOutput
from bertblocks.flax.validation import read_ids


class FlaxBertBlocksForQuestionAnswering(FlaxBertBlocksPreTrainedModel):
    """Scores every token as the start and as the end of an answer. Padding gets the lowest possible score.

    `start_positions` and `end_positions` count from the first token of each sequence: `[rows]`, or
    `[rows, sequences]` of packed rows.

    Example:
        >>> config = BertBlocksConfig.from_preset("mini", num_hidden_layers=1)
        >>> FlaxBertBlocksForQuestionAnswering(config)([[5, 6, 7]]).start_logits.shape
        (1, 3)
    """

    task: ClassVar[str] = "question-answering"
    label_names: ClassVar[tuple[str, ...]] = ("start_positions", "end_positions")

    def build(self, config: BertBlocksConfig) -> None:
        self.model = EncoderParts(config, add_pooling_layer=False)
        self.classifier_head = get_classifier_head(config) if config.classifier_head_on_tokens else None
        self.spans = Linear(config.hidden_size, 2, config.token_classifier_bias)

    def read_labels(self, labels: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
        return {name: read_ids(name, value) for name, value in labels.items()}

    def forward(self, inputs: Inputs, options: Options) -> SpanOutput:
        rngs = inputs.rngs()
        encoded = self.model.encode(inputs, options, rngs)
        layout = encoded.layout
        hidden = encoded.hidden if self.classifier_head is None else self.classifier_head(encoded.hidden, rngs)
        scores = self.spans(dropout(hidden, self.config.qa_dropout, rngs))  # [rows, length, 2]
        scores = layout.zero_padding(scores, fill=lowest(scores.dtype))
        start, end = scores[..., 0], scores[..., 1]
        loss = None
        if set(inputs.labels) == set(self.label_names):
            starts, ends = inputs.labels["start_positions"], inputs.labels["end_positions"]
            loss = (span_loss(start, starts, layout) + span_loss(end, ends, layout)) / 2
        return SpanOutput(
            loss=loss,
            start_logits=start,
            end_logits=end,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


def span_loss(scores: Array, positions: Array, layout: RowLayout) -> Array:
    """Returns the mean cross-entropy over the tokens of each sequence; positions outside of it do not count."""
    members = layout.members  # [rows, sequences, length]
    shape = layout.per_sequence(members).shape[:-1]
    if positions.size != members.shape[0] * members.shape[1]:
        raise ValueError(f"Positions have shape {list(positions.shape)}; they must be {list(shape)}.")
    columns = jnp.argmax(members, axis=-1) + jnp.maximum(positions.reshape(members.shape[:2]), 0)
    last = members.shape[-1] - 1
    exists = jnp.take_along_axis(members, jnp.minimum(columns, last)[..., None], axis=-1)[..., 0] & (columns <= last)
    own_scores = jnp.where(members, scores[:, None], lowest(scores.dtype))
    return cross_entropy(own_scores, columns, exists)
