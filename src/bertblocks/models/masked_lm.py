"""Masked language modelling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.model import BertBlocksModel
from bertblocks.nn.head import get_mlm_head
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import is_untouched
from bertblocks.nn.numerics import upcast
from bertblocks.nn.ops.cross_entropy import linear_cross_entropy
from bertblocks.nn.ops.liger import liger
from bertblocks.nn.ops.linear import cast_dtype, is_captured

#: The label of tokens that are not scored.
IGNORE = -100


class LanguageModel(BertBlocksPreTrainedModel):
    """An encoder with a decoder to the vocabulary, tied to the token embeddings if the config says so."""

    _tied_weights_keys = {"decoder.weight": "model.embedding.token.weight"}
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch

    def __init__(self, config: BertBlocksConfig, add_pooler: bool = False) -> None:
        super().__init__(config)
        self.model = BertBlocksModel(config, add_pooler)
        self.head = get_mlm_head(config)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size, bias=config.decoder_bias)
        self.logit_scale = nn.Parameter(torch.ones(config.vocab_size)) if config.ngpt_logit_scale else None
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.decoder = new_embeddings

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> nn.Embedding:
        embeddings = super().resize_token_embeddings(new_num_tokens, *args, **options)
        if self.logit_scale is not None:
            old = self.logit_scale.data[: self.config.vocab_size]
            self.logit_scale = nn.Parameter(F.pad(old, (0, self.config.vocab_size - len(old)), value=1.0))
        return embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, hidden]` -> `[rows, vocabulary]`."""
        logits = self.decoder(hidden if self.head is None else self.head(hidden))
        return logits if self.logit_scale is None else logits * self.logit_scale

    def summed_loss(self, hidden: Tensor, labels: Tensor, row_weights: Tensor | None = None) -> Tensor:
        """The sum of cross-entropies of labelled rows, each times its weight, without keeping their logits."""
        kernels = liger(self.config.kernel_backend, hidden)
        if kernels is not None and self.logit_scale is None and row_weights is None:
            hidden = hidden if self.head is None else self.head(hidden)
            return kernels.linear_cross_entropy(hidden, self.decoder.weight, self.decoder.bias, labels)
        dtype = cast_dtype(hidden)
        # gradients that are made in the forward pass come too early for the scale that fp16 needs
        if not is_untouched(self.decoder, nn.Linear) or is_captured() or dtype == torch.float16:
            losses = F.cross_entropy(upcast(self.logits(hidden)), labels, reduction="none")
            return losses.sum() if row_weights is None else losses @ row_weights.to(losses)
        hidden = hidden if self.head is None else self.head(hidden)
        weight: Tensor = self.decoder.weight
        bias: Tensor | None = self.decoder.bias
        if self.logit_scale is not None:
            weight = weight * self.logit_scale[:, None]
            bias = None if bias is None else bias * self.logit_scale
        return linear_cross_entropy(hidden, weight, bias, labels, row_weights, dtype)

    def masked_loss(
        self, logits: Tensor | None, targets: Tensor, hidden: Tensor, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The sum of cross-entropies over labelled tokens and their number.

        It is taken from the logits of all tokens or, without them, from the hidden states of the labelled `rows`.
        """
        count = (targets != IGNORE).sum()
        if logits is None:
            assert rows is not None
            return self.summed_loss(hidden, targets[rows]), count
        return F.cross_entropy(upcast(logits), targets, ignore_index=IGNORE, reduction="sum"), count

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.decoder and self.config.tie_word_embeddings:
            if self.decoder.bias is not None:
                init.zeros_(self.decoder.bias)  # its weight is about to be the embeddings'
            return
        super()._init_weights(module)
        if module is self and self.logit_scale is not None:
            init.ones_(self.logit_scale)


def labelled_rows(layout: SequenceLayout, labels: Tensor) -> Tensor:
    """The tokens that are scored."""
    return (layout.real_labels(labels, IGNORE) != IGNORE).nonzero().squeeze(1)


class BertBlocksForMaskedLM(LanguageModel):
    """Predicts hidden tokens.

    In training, with `labels`, only labelled rows reach the head and `logits` is None unless `return_logits=True`; in
    evaluation the full logits are returned beside the loss.

    Example:
        >>> import torch
        >>> model = BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini"))
        >>> labels = torch.tensor([[-100, 9, -100]])
        >>> out = model.train()(torch.tensor([[5, 3, 7]]), labels=labels)
        >>> out.loss.shape, out.logits is None
        (torch.Size([]), True)
        >>> model.eval()(torch.tensor([[5, 3, 7]]), labels=labels).logits.shape
        torch.Size([1, 3, 2048])
    """

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
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
    ) -> MaskedLMOutput:
        want_logits = return_logits if return_logits is not None else labels is None or not self.training
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
            rows=None if labels is None or want_logits else partial(labelled_rows, labels=labels),
        )
        hidden, layout = encoded.hidden, encoded.layout
        logits = self.logits(hidden) if want_logits else None
        loss = None
        if labels is not None:
            total, count = self.masked_loss(logits, layout.real_labels(labels, IGNORE), hidden, encoded.rows)
            loss = total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return MaskedLMOutput(
            loss=loss,
            logits=None if logits is None else layout.scatter(logits),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
