"""Labels or scores for whole sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.model import BertBlocksModel
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.head import get_classifier_head, keep_firsts, pool
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast


class BertBlocksForSequenceClassification(BertBlocksPreTrainedModel):
    """One label, several labels, or numbers (by `problem_type`) for each sequence, each packed one of packed input.

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
        self.model = BertBlocksModel(config, add_pooler=config.classifier_head == "pooler")
        self.classifier_head = get_classifier_head(config)
        self.dropout = Dropout(config.classifier_dropout)
        self.classifier = Linear(config.hidden_size, config.num_labels, config.classifier_bias, role="classifier")
        self.post_init()

    @property
    def by_first_token(self) -> bool:
        """True if no other token of the last layer is looked at."""
        return self.model.pooler is not None or self.config.classifier_pooling == "cls"

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packed_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> SequenceClassifierOutput:
        encoded = self.model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            packed_seqlens,
            output_hidden_states,
            output_attentions,
            rows=(lambda layout: layout.first_tokens) if self.by_first_token else None,
        )
        hidden, head = encoded.hidden, self.classifier_head
        if head is not None and self.config.classifier_head_before_pooling:
            hidden, head = head(hidden), None
        if self.by_first_token:
            pooled = keep_firsts(hidden, encoded.layout)
        else:
            pooled = pool(hidden, encoded.layout, self.config.classifier_pooling)
        if self.model.pooler is not None:
            pooled = self.model.pooler(pooled)
        if head is not None:
            pooled = head(pooled)
        logits = self.classifier(self.dropout(pooled))
        return SequenceClassifierOutput(
            loss=None if labels is None else self.loss(logits, labels),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """By `problem_type`; unset, one label means regression, whole numbers one class each, floats several."""
        logits = upcast(logits)
        problem = self.config.problem_type
        if problem is None:
            is_class = labels.dtype in (torch.long, torch.int)
            classes = "single_label_classification" if is_class else "multi_label_classification"
            problem = "regression" if self.num_labels == 1 else classes
        if problem != "single_label_classification" and labels.numel() != logits.numel():
            raise ValueError(f"labels has shape {list(labels.shape)}; for {problem} it must be {list(logits.shape)}.")
        if problem == "regression":
            return F.mse_loss(logits.squeeze(), labels.squeeze().to(logits.dtype))
        if problem == "single_label_classification":
            return F.cross_entropy(logits.view(-1, self.num_labels), labels.view(-1))
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))
