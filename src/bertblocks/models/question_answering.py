"""The span of a text that answers a question."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.model import BertBlocksModel
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.head import QuestionAwareHead, get_classifier_head, get_qa_head
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.numerics import upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


class BertBlocksForQuestionAnswering(BertBlocksPreTrainedModel):
    """Scores every token as the start and as the end of an answer. Padding gets the lowest possible score.

    Example:
        >>> import torch
        >>> model = BertBlocksForQuestionAnswering(BertBlocksConfig.from_preset("mini"))
        >>> model(torch.tensor([[5, 6, 7]])).start_logits.shape
        torch.Size([1, 3])
    """

    accepts_loss_kwargs = False

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config)
        self.model = BertBlocksModel(config, add_pooling_layer=False)
        self.classifier_head = get_classifier_head(config) if config.classifier_head_on_tokens else None
        self.dropout = Dropout(config.qa_dropout)
        self.spans = get_qa_head(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **options: Unpack[EncoderOptions],
    ) -> QuestionAnsweringModelOutput:
        """Returns start and end logits and, given both positions, half the sum of their mean losses.

        Positions count from the start of each sequence. `num_items_in_batch` replaces the number of positions by which
        each sum is divided.
        """
        encoded = self.model.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        layout = encoded.layout
        hidden = encoded.hidden if self.classifier_head is None else self.classifier_head(encoded.hidden)
        hidden = self.dropout(hidden)
        if isinstance(self.spans, QuestionAwareHead):
            scores = self.spans(hidden, layout, None if input_ids is None else layout.gather(input_ids))
        else:
            scores = self.spans(hidden)  # [tokens, 2]
        start, end = layout.scatter(scores, fill=torch.finfo(scores.dtype).min).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            starts, ends = (start, end) if not layout.is_packed else _by_sequence(scores, layout).unbind(-1)
            terms = [self.summed_loss(starts, start_positions), self.summed_loss(ends, end_positions)]
            terms = [(encoded.add_router_loss(total, count), count) for total, count in terms]
            means = [total / (count if num_items_in_batch is None else num_items_in_batch) for total, count in terms]
            loss = (means[0] + means[1]) / 2
        return QuestionAnsweringModelOutput(
            loss=cast(Any, loss),
            start_logits=start.contiguous(),
            end_logits=end.contiguous(),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def summed_loss(self, scores: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy over the tokens of each sequence and the number of positions in it.

        Positions outside of the sequence do not count; they occur where a text was truncated.
        """
        length = scores.shape[1]
        positions = positions.view(-1).clamp(0, length)
        total = F.cross_entropy(upcast(scores), positions, ignore_index=length, reduction="sum")
        return total, (positions != length).sum()


def _by_sequence(scores: Tensor, layout: SequenceLayout) -> Tensor:
    """Pads packed `[tokens, 2]` to `[sequences, longest, 2]`, where positions count from each sequence's start."""
    columns = scores.new_full((layout.num_sequences, layout.max_length, 2), torch.finfo(scores.dtype).min)
    index = torch.arange(scores.shape[0], device=scores.device) - layout.first_tokens[layout.sequence_ids]
    return columns.index_put((layout.sequence_ids, index), scores)
