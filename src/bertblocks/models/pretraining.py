"""BERT's two pretraining heads: masked tokens and the order of two segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.generic import ModelOutput, can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.masked_lm import IGNORE, LanguageModel, labelled_tokens
from bertblocks.nn.head import keep_firsts, pool
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.numerics import upcast

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


@dataclass
class PreTrainingOutput(ModelOutput):
    """Logits under transformers' names, the mean loss, and the sum of each of its two terms.

    The sums are for callers that divide by the counts of a larger batch.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    seq_relationship_logits: Tensor | None = None
    #: The summed cross-entropy of labelled tokens and that of labelled sequences.
    masked_lm_total: Tensor | None = None
    order_total: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class BertBlocksForPreTraining(LanguageModel):
    """A masked-LM head on every token and a head on the pooled first token that predicts the order of two segments.

    Class 0 means that the segments are in order, class 1 that they are swapped: ALBERT's objective (Lan et al., 2019).
    BERT's next-sentence prediction has a head of the same shape. The checkpoint also loads as `BertBlocksForMaskedLM`,
    which ignores the pooler and the second head.

    Example:
        >>> import torch
        >>> model = BertBlocksForPreTraining(BertBlocksConfig.from_preset("mini")).train()
        >>> ids, labels = torch.tensor([[5, 3, 7]]), torch.tensor([[-100, 9, -100]])
        >>> out = model(ids, labels=labels, order_labels=torch.tensor([1]))
        >>> torch.equal(out.loss, out.masked_lm_total + out.order_total)  # one token, one sequence
        True
    """

    accepts_loss_kwargs = False  # the two sums are divided by different counts, and the Trainer passes one

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__(config, add_pooling_layer=True)
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
        return_logits: bool | None = None,
        z_loss: float = 0.0,
        scored_tokens: Tensor | None = None,
        **options: Unpack[EncoderOptions],
    ) -> PreTrainingOutput:
        """Returns logits and, given labels, the mean loss of labelled tokens plus that of labelled sequences.

        `order_labels` has one entry per sequence. A label of -100 does not enter the loss, and either kind of labels
        may be left out. `z_loss` and `scored_tokens` are those of `BertBlocksForMaskedLM`.
        """
        want_logits = return_logits if return_logits is not None else labels is None or not self.training
        only_labelled = labels is not None and not want_logits

        def labelled_and_first(layout: SequenceLayout) -> Tensor:
            assert labels is not None
            return torch.cat([labelled_tokens(layout, labels, scored_tokens), layout.first_tokens])

        encoded = self.model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            **options,
            token_indices=labelled_and_first if only_labelled else None,
        )
        hidden, layout = encoded.hidden, encoded.layout
        indices = encoded.token_indices
        if indices is None:
            firsts = pool(hidden, layout, "cls")
        else:
            labelled = max(len(hidden) - layout.num_sequences, 0)
            firsts = keep_firsts(hidden[labelled:], layout)
            indices, hidden = indices[:labelled], hidden[:labelled]
        assert self.model.pooler is not None
        order_logits = self.order(self.model.pooler(firsts))  # [sequences, 2]
        logits = self.logits(hidden) if want_logits else None
        terms: list[Tensor] = []
        masked_total = order_total = None
        if labels is not None:
            flat_labels = layout.real_labels(labels, IGNORE)
            masked_total, count = self.summed_loss(logits, flat_labels, hidden, indices, z_loss)
            masked_total = encoded.add_router_loss(masked_total, count)
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
