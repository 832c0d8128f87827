"""Replaced token detection (Clark et al., 2020): was this token in the text, or did a generator put it there?"""

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
from bertblocks.nn.head import get_detector_head
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


class BertBlocksForReplacedTokenDetection(BertBlocksPreTrainedModel):
    """The discriminator of ELECTRA and DeBERTaV3: one logit per token, positive for a replaced token.

    Padding and tokens labelled -100 do not enter the loss.

    Example:
        >>> import torch
        >>> model = BertBlocksForReplacedTokenDetection(BertBlocksConfig.from_preset("mini"))
        >>> model(torch.tensor([[5, 6, 7]]), labels=torch.tensor([[0, 1, 0]])).logits.shape
        torch.Size([1, 3])
    """

    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config)
        self.model = BertBlocksModel(config, add_pooling_layer=False)
        self.detector_head = get_detector_head(config)
        self.detector = Linear(config.hidden_size, 1, bias=True, role="classifier")
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
        """Returns logits `[batch, length]` and, given `labels`, the summed loss divided by the number of labels.

        Labels are 1 for replaced tokens and 0 for others. `num_items_in_batch` replaces the number of labels.
        """
        encoded = self.model.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        layout = encoded.layout
        logits = self.detector(self.detector_head(encoded.hidden, layout)).squeeze(-1)  # [tokens]
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
        is_labelled = labels != IGNORE
        logits = upcast(logits)
        targets = labels.masked_fill(~is_labelled, 0).to(logits.dtype)
        total = F.binary_cross_entropy_with_logits(logits, targets, is_labelled.to(logits.dtype), reduction="sum")
        return total, is_labelled.sum()
