"""A label for every token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import TokenClassifierOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import IGNORE
from bertblocks.models.model import BertBlocksModel
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.head import get_classifier_head
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


class BertBlocksForTokenClassification(BertBlocksPreTrainedModel):
    """Tags tokens. Padding and tokens labelled -100 do not enter the loss.

    Example:
        >>> import torch
        >>> model = BertBlocksForTokenClassification(BertBlocksConfig.from_preset("mini", num_labels=5))
        >>> model(torch.tensor([[5, 6, 7]])).logits.shape
        torch.Size([1, 3, 5])
    """

    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = BertBlocksModel(config, add_pooling_layer=False)
        self.classifier_head = get_classifier_head(config) if config.classifier_head_on_tokens else None
        self.dropout = Dropout(config.token_classifier_dropout)
        self.tagger = Linear(config.hidden_size, config.num_labels, config.token_classifier_bias, role="classifier")
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Unpack[EncoderOptions],
    ) -> TokenClassifierOutput:
        """Returns logits and, given `labels`, the summed loss divided by the number of labels.

        `num_items_in_batch` replaces that number.
        """
        encoded = self.model.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        layout = encoded.layout
        hidden = encoded.hidden if self.classifier_head is None else self.classifier_head(encoded.hidden)
        logits = self.tagger(self.dropout(hidden))
        loss = None
        if labels is not None:
            total, count = self.summed_loss(logits, layout.real_labels(labels, IGNORE))
            total = encoded.add_router_loss(total, count)
            loss = total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return TokenClassifierOutput(
            loss=cast(Any, loss),
            logits=layout.scatter(logits),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def summed_loss(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy of flat tokens and the number of labelled ones."""
        total = F.cross_entropy(upcast(logits), labels, ignore_index=IGNORE, reduction="sum")
        return total, (labels != IGNORE).sum()
