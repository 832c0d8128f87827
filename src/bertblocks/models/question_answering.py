"""The span of a text that answers a question."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_outputs import QuestionAnsweringModelOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.model import BertBlocksModel
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.head import get_classifier_head
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast


class BertBlocksForQuestionAnswering(BertBlocksPreTrainedModel):
    """Scores every token as the start and as the end of an answer. Padding can be neither and has the lowest score.

    Example:
        >>> import torch
        >>> model = BertBlocksForQuestionAnswering(BertBlocksConfig.from_preset("mini"))
        >>> model(torch.tensor([[5, 6, 7]])).start_logits.shape
        torch.Size([1, 3])
    """

    accepts_loss_kwargs = False

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config)
        self.model = BertBlocksModel(config, add_pooler=False)
        self.classifier_head = get_classifier_head(config) if config.classifier_head_on_tokens else None
        self.dropout = Dropout(config.qa_dropout)
        self.spans = Linear(config.hidden_size, 2, config.classifier_bias, role="classifier")
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
        cu_seqlens: Tensor | None = None,
        packed_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> QuestionAnsweringModelOutput:
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
        )
        layout = encoded.layout
        hidden = encoded.hidden if self.classifier_head is None else self.classifier_head(encoded.hidden)
        scores = self.spans(self.dropout(hidden))  # [tokens, 2]
        start, end = layout.scatter(scores, fill=torch.finfo(scores.dtype).min).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            starts, ends = (start, end) if not layout.is_packed else _by_sequence(scores, layout).unbind(-1)
            loss = (_span_loss(starts, start_positions) + _span_loss(ends, end_positions)) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start.contiguous(),
            end_logits=end.contiguous(),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )


def _by_sequence(scores: Tensor, layout: SequenceLayout) -> Tensor:
    """Packed `[tokens, 2]` -> `[sequences, longest, 2]`: positions then count from each sequence's start."""
    columns = scores.new_full((layout.num_sequences, layout.max_length, 2), torch.finfo(scores.dtype).min)
    index = torch.arange(scores.shape[0], device=scores.device) - layout.first_tokens[layout.sequence_ids]
    return columns.index_put((layout.sequence_ids, index), scores)


def _span_loss(scores: Tensor, positions: Tensor) -> Tensor:
    """Cross-entropy over a row's tokens; a position outside of the row, as a cut text gives, is not scored."""
    length = scores.shape[1]
    positions = positions.view(-1).clamp(0, length)
    return F.cross_entropy(upcast(scores), positions, ignore_index=length)
