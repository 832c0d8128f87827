"""Labels or scores for whole sequences."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from bertblocks.config import BertBlocksConfig
from bertblocks.flax.inputs import IGNORE, Inputs, Options
from bertblocks.flax.layout import RowLayout
from bertblocks.flax.models.base import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.models.model import EncoderParts
from bertblocks.flax.nn.head import get_classifier_head, pool
from bertblocks.flax.nn.linear import Linear, dropout
from bertblocks.flax.numerics import cross_entropy, upcast
from bertblocks.flax.outputs import SequenceOutput
from bertblocks.flax.validation import check_range


class FlaxBertBlocksForSequenceClassification(FlaxBertBlocksPreTrainedModel):
    """Predicts one label, several labels or a score (see `problem_type`) for each sequence, padded or packed.

    Example:
        >>> config = BertBlocksConfig.from_preset("mini", num_hidden_layers=1, num_labels=3)
        >>> model = FlaxBertBlocksForSequenceClassification(config)
        >>> model([[5, 6, 7]], labels=[2]).logits.shape
        (1, 3)
        >>> model([[5, 6, 7]], segment_ids=[[1, 2, 2]]).logits.shape
        (1, 2, 3)
    """

    task: ClassVar[str] = "sequence-classification"
    label_names: ClassVar[tuple[str, ...]] = ("labels",)

    def build(self, config: BertBlocksConfig) -> None:
        self.model = EncoderParts(config, add_pooling_layer=config.classifier_head == "pooler")
        self.classifier_head = get_classifier_head(config)
        self.classifier = Linear(config.hidden_size, config.num_labels, config.classifier_bias)

    def read_labels(self, labels: dict[str, Any], inputs: Inputs) -> dict[str, Any]:
        read = super().read_labels(labels, inputs)
        if "labels" in read and self.problem(read["labels"]) == "single_label_classification":
            values = read["labels"]
            check_range("labels", np.where(values == IGNORE, 0, values), self.config.num_labels, "num_labels")
        return read

    def problem(self, labels: Any) -> str:
        """If `problem_type` is unset, one output means regression, integers one class, floats several."""
        if self.config.problem_type is not None:
            return self.config.problem_type
        classes = "single" if jnp.issubdtype(labels.dtype, jnp.integer) else "multi"
        return "regression" if self.config.num_labels == 1 else f"{classes}_label_classification"

    def forward(self, inputs: Inputs, options: Options) -> SequenceOutput:
        rngs, config = inputs.rngs(), self.config
        encoded = self.model.encode(inputs, options, rngs)
        hidden, head = encoded.hidden, self.classifier_head
        if head is not None and config.classifier_head_before_pooling:
            hidden, head = head(hidden, rngs), None
        if self.model.pooler is not None:
            pooled = self.model.pooler(hidden, encoded.layout)
        else:
            pooled = pool(hidden, encoded.layout, config.classifier_pooling)
        if head is not None:
            pooled = head(pooled, rngs)
        logits = self.classifier(dropout(pooled, config.classifier_dropout, rngs))
        loss = self.loss(logits, inputs.labels["labels"], encoded.layout) if "labels" in inputs.labels else None
        return SequenceOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )

    def loss(self, logits: Array, labels: Array, layout: RowLayout) -> Array:
        """Returns the mean loss over the sequences of the batch."""
        problem = self.problem(labels)
        shape = logits.shape[:-1] if problem == "single_label_classification" else logits.shape
        if labels.size != np.prod(shape):
            raise ValueError(f"labels has shape {list(labels.shape)}; for {problem} it must be {list(shape)}.")
        labels, exists = labels.reshape(shape), jnp.ones(logits.shape[:-1], bool)
        if layout.max_segments is not None:
            exists = layout.members.any(-1)
        if problem == "single_label_classification":
            return cross_entropy(logits, labels, exists & (labels != IGNORE))
        logits, labels = upcast(logits), labels.astype(jnp.float32)
        is_number = problem == "regression"
        losses = jnp.square(logits - labels) if is_number else jax.nn.softplus(logits) - labels * logits
        return (losses.mean(-1) * exists).sum() / jnp.maximum(exists.sum(), 1)
