"""BERT's pretraining: masked tokens and the order of two segments at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import ModelOutput, can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.masked_lm import IGNORE, LanguageModel, labelled_rows
from bertblocks.nn.head import keep_firsts, pool
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast


@dataclass
class PreTrainingOutput(ModelOutput):
    """Scores under transformers' names, the mean loss, and the sum of each of its two terms.

    The sums are for callers who divide by the counts of a larger batch than this one.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    #: The sum of cross-entropies over labelled tokens, and over labelled sequences.
    masked_lm_total: Tensor | None = None
    order_total: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class BertBlocksForPreTraining(LanguageModel):
    """A masked-LM head on every token and, on the pooled first token, whether two segments are in order (0) or not (1).

    The order of segments is ALBERT's objective (Lan et al., 2019); the head is also that of BERT's next-sentence one.
    A checkpoint opens as `BertBlocksForMaskedLM` too, which has no place for the pooler and the second head.

    Example:
        >>> import torch
        >>> model = BertBlocksForPreTraining(BertBlocksConfig.from_preset("mini")).train()
        >>> ids, labels = torch.tensor([[5, 3, 7]]), torch.tensor([[-100, 9, -100]])
        >>> out = model(ids, labels=labels, order_labels=torch.tensor([1]))
        >>> torch.equal(out.loss, out.masked_lm_total + out.order_total)  # one token, one sequence
        True
    """

    accepts_loss_kwargs = False  # the Trainer's one count cannot divide two sums

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config, add_pooler=True)
        self.order = Linear(config.hidden_size, 2, bias=True, role="classifier")
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
        order_labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packed_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_logits: bool | None = None,
    ) -> PreTrainingOutput:
        """`labels` and `order_labels`, one for each sequence, are -100 where nothing is scored; either may be left out.

        `loss` is the mean over labelled tokens plus the mean over labelled sequences.
        """
        want_logits = return_logits if return_logits is not None else labels is None or not self.training
        only_scored = labels is not None and not want_logits

        def scored_and_first(layout: SequenceLayout) -> Tensor:
            assert labels is not None
            return torch.cat([labelled_rows(layout, labels), layout.first_tokens])

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
            rows=scored_and_first if only_scored else None,
        )
        hidden, layout = encoded.hidden, encoded.layout
        rows = encoded.rows
        if rows is None:
            firsts = pool(hidden, layout, "cls")
        else:
            scored = max(len(hidden) - layout.num_sequences, 0)
            rows, hidden, firsts = rows[:scored], hidden[:scored], keep_firsts(hidden[scored:], layout)
        assert self.model.pooler is not None
        order_logits = self.order(self.model.pooler(firsts))  # [sequences, 2]
        logits = self.logits(hidden) if want_logits else None
        terms: list[Tensor] = []
        masked_total = order_total = None
        if labels is not None:
            masked_total, count = self.masked_loss(logits, layout.real_labels(labels, IGNORE), hidden, rows)
            terms.append(masked_total / count.clamp(min=1))
        if order_labels is not None:
            if order_labels.shape != (layout.num_sequences,):
                raise ValueError(
                    f"order_labels has shape {list(order_labels.shape)}; it must be [{layout.num_sequences}]."
                )
            order_total = F.cross_entropy(upcast(order_logits), order_labels, ignore_index=IGNORE, reduction="sum")
            terms.append(order_total / (order_labels != IGNORE).sum().clamp(min=1))
        return PreTrainingOutput(
            loss=sum(terms[1:], terms[0]) if terms else None,
            prediction_logits=None if logits is None else layout.scatter(logits),
            seq_relationship_logits=order_logits,
            masked_lm_total=masked_total,
            order_total=order_total,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
