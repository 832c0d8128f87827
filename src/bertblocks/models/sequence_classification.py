"""Labels or scores for whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import IGNORE
from bertblocks.models.model import BertBlocksModel
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.head import get_classifier_head, keep_firsts, pool
from bertblocks.nn.layout import SequenceLayout, to_device
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


class BertBlocksForSequenceClassification(BertBlocksPreTrainedModel):
    """Predicts one label, several labels or a score (see `problem_type`) for each sequence, padded or packed.

    Example:
        >>> import torch
        >>> config = BertBlocksConfig.from_preset("mini", num_labels=3)
        >>> model = BertBlocksForSequenceClassification(config)
        >>> model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([2])).logits.shape
        torch.Size([1, 3])
    """

    accepts_loss_kwargs = False

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = BertBlocksModel(config, add_pooling_layer=config.classifier_head == "pooler")
        self.classifier_head = get_classifier_head(config)
        self.dropout = Dropout(config.classifier_dropout)
        self.classifier = Linear(config.hidden_size, config.num_labels, config.classifier_bias, role="classifier")
        self.post_init()

    @property
    def chosen_tokens(self) -> Callable[[SequenceLayout], Tensor] | None:
        """Return the tokens that the head reads, if it reads one of each sequence: the first or the last."""
        if self.model.pooler is not None or self.config.classifier_pooling == "cls":
            return lambda layout: layout.first_tokens
        return (lambda layout: layout.last_tokens) if self.config.classifier_pooling == "last" else None

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        class_weights: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Unpack[EncoderOptions],
    ) -> SequenceClassifierOutput:
        """Returns logits and, given `labels`, the loss: the sum of `summed_loss` divided by the number of labels.

        `num_items_in_batch` replaces that number; `class_weights` are described at `summed_loss`.
        """
        encoded = self.model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            **options,
            token_indices=self.chosen_tokens,
        )
        hidden, head = encoded.hidden, self.classifier_head
        if head is not None and self.config.classifier_head_before_pooling:
            hidden, head = head(hidden), None
        if self.chosen_tokens is not None:
            pooled = keep_firsts(hidden, encoded.layout)
        else:
            pooled = pool(hidden, encoded.layout, self.config.classifier_pooling)
        if self.model.pooler is not None:
            pooled = self.model.pooler(pooled)
        if head is not None:
            pooled = head(pooled)
        logits = self.classifier(self.dropout(pooled))
        loss = None
        if labels is not None:
            total, count = self.summed_loss(logits, labels, class_weights)
            total = encoded.add_router_loss(total, count)
            loss = total / (count if num_items_in_batch is None else num_items_in_batch)
        return SequenceClassifierOutput(
            loss=cast(Any, loss), logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )

    def summed_loss(
        self, logits: Tensor, labels: Tensor, class_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | int]:
        """Returns the summed loss and the number of labels in it.

        The loss follows `problem_type`. If that is unset, one output means regression, integer labels mean one class
        per sequence, and float labels several. `class_weights` holds a weight per class: of the class's examples, or
        of its positive examples where a sequence has several labels.
        """
        logits = upcast(logits)
        weights = None if class_weights is None else to_device(class_weights.to(logits.dtype), logits.device)
        problem: str | None = self.config.problem_type
        if problem is None:
            is_class = labels.dtype in (torch.long, torch.int)
            classes = "single_label_classification" if is_class else "multi_label_classification"
            problem = "regression" if self.num_labels == 1 else classes
        if problem == "single_label_classification":
            labels = labels.view(-1)
            total = F.cross_entropy(
                logits.view(-1, self.num_labels), labels, weights, ignore_index=IGNORE, reduction="sum"
            )
            return total, (labels != IGNORE).sum()
        if labels.numel() != logits.numel():
            raise ValueError(f"labels has shape {list(labels.shape)}; for {problem} it must be {list(logits.shape)}.")
        labels = labels.view_as(logits).to(logits.dtype)
        if problem == "regression":
            return F.mse_loss(logits, labels, reduction="sum"), labels.numel()
        total = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights, reduction="sum")
        return total, labels.numel()
