"""A label for every token."""

from __future__ import annotations

from typing import Any, ClassVar

from bertblocks.config import BertBlocksConfig
from bertblocks.flax.inputs import IGNORE, Inputs, Options
from bertblocks.flax.models.base import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.models.model import EncoderParts
from bertblocks.flax.nn.head import get_classifier_head
from bertblocks.flax.nn.linear import Linear, dropout
from bertblocks.flax.numerics import cross_entropy
from bertblocks.flax.outputs import TokenOutput
from bertblocks.flax.reading import read_token_labels


class FlaxBertBlocksForTokenClassification(FlaxBertBlocksPreTrainedModel):
    """Tags tokens. Padding and tokens labelled -100 do not enter the loss.

    Example:
        >>> config = BertBlocksConfig.from_preset("mini", num_hidden_layers=1, num_labels=5)
        >>> FlaxBertBlocksForTokenClassification(config)([[5, 6, 7]]).logits.shape
        (1, 3, 5)
    """

    task: ClassVar[str] = "token-classification"
    label_names: ClassVar[tuple[str, ...]] = ("labels",)

    def build(self, config: BertBlocksConfig) -> None:
        self.model = EncoderParts(config, add_pooling_layer=False)
        self.classifier_head = get_classifier_head(config) if config.classifier_head_on_tokens else None
        self.tagger = Linear(config.hidden_size, config.num_labels, config.token_classifier_bias)

    def read_labels(self, labels: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
        return read_token_labels(labels, inputs, self.config.num_labels, "num_labels")

    def forward(self, inputs: Inputs, options: Options) -> TokenOutput:
        rngs = inputs.rngs()
        encoded = self.model.encode(inputs, options, rngs)
        hidden = encoded.hidden if self.classifier_head is None else self.classifier_head(encoded.hidden, rngs)
        logits = self.tagger(dropout(hidden, self.config.token_classifier_dropout, rngs))
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
