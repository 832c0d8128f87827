"""Masked language modelling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

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
from bertblocks.nn.initialization import init_module
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import is_untouched
from bertblocks.nn.ops.cross_entropy import cross_entropy, linear_cross_entropy
from bertblocks.nn.ops.liger import liger
from bertblocks.nn.ops.linear import cast_dtype, is_captured
from bertblocks.nn.ops.sparse_pooling import pool_logits, sparse_pooling
from bertblocks.nn.parametrization import get_decoder_scale
from bertblocks.nn.quantized import QuantizedLinear
from bertblocks.nn.sparse_head import SparseHead

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions

#: The label of tokens and sequences that do not enter the loss.
IGNORE = -100


@dataclass
class LanguageModelOutput(MaskedLMOutput):
    """Logits and the loss, or the sparse vectors of sequences and of bags of tokens."""

    vectors: Tensor | None = None  # [sequences, vocabulary]
    bag_vectors: Tensor | None = None  # [bags, vocabulary]


class LanguageModel(BertBlocksPreTrainedModel):
    """An encoder with a decoder to the vocabulary, which is tied to the token embeddings if the config says so."""

    _tied_weights_keys = {"decoder.weight": "model.embedding.token.weight"}
    accepts_loss_kwargs = True  # the Trainer passes num_items_in_batch

    def __init__(self, config: BertBlocksConfig, add_pooling_layer: bool = False) -> None:
        super().__init__(config)
        self.model = BertBlocksModel(config, add_pooling_layer)
        self.head = get_mlm_head(config)
        self.decoder = nn.Linear(config.decoder_size, config.vocab_size, bias=config.decoder_bias)
        self.decoder_scale = get_decoder_scale(config)
        self.logit_scale = nn.Parameter(torch.ones(config.vocab_size)) if config.ngpt_logit_scale else None
        #: What makes sparse vectors, set by fine-tuning. They then take the place of logits.
        self.sparse_head: SparseHead | None = None
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

    def decoder_input(self, hidden: Tensor) -> Tensor:
        """Returns what the decoder reads."""
        hidden = hidden if self.head is None else self.head(hidden)
        return hidden if self.decoder_scale == 1.0 else hidden * self.decoder_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """`[tokens, hidden]` -> `[tokens, vocabulary]`."""
        logits = self.decoder(self.decoder_input(hidden))
        return logits if self.logit_scale is None else logits * self.logit_scale

    def fused_loss(
        self, hidden: Tensor, labels: Tensor, token_weights: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor:
        """Returns the summed cross-entropy of tokens, each times its weight, without storing their logits."""
        kernels = liger(self.config.kernel_backend, hidden)
        if kernels is not None and self.logit_scale is None and token_weights is None:
            hidden = self.decoder_input(hidden)
            return kernels.linear_cross_entropy(hidden, self.decoder.weight, self.decoder.bias, labels, z_loss)
        dtype = cast_dtype(hidden)
        # the fused loss computes gradients in the forward pass, before the loss scale that fp16 needs is known
        if not is_untouched(self.decoder, nn.Linear) or is_captured() or dtype == torch.float16:
            losses = cross_entropy(self.logits(hidden), labels, z_loss)
            return losses.sum() if token_weights is None else losses @ token_weights.to(losses)
        hidden = self.decoder_input(hidden)
        weight, bias = self._scaled_decoder()
        return linear_cross_entropy(hidden, weight, bias, labels, token_weights, dtype, z_loss)

    def _scaled_decoder(self) -> tuple[Tensor, Tensor | None]:
        weight: Tensor = self.decoder.weight
        bias: Tensor | None = self.decoder.bias
        if self.logit_scale is not None:
            weight = weight * self.logit_scale[:, None]
            bias = None if bias is None else bias * self.logit_scale
        return weight, bias

    def sparse_vectors(self, hidden: Tensor, lengths: Sequence[int], sparse_head: SparseHead) -> Tensor:
        """`[tokens, hidden]` -> `[sequences, vocabulary]`, without storing the logits of all tokens."""
        pooling, activation = sparse_head.pooling, sparse_head.activation
        decoder: nn.Module = self.decoder
        if isinstance(decoder, QuantizedLinear):
            return pool_logits(hidden, self.logits, decoder.out_features, lengths, pooling, activation)
        dtype = cast_dtype(hidden)
        hidden = self.decoder_input(hidden)
        weight, bias = self._scaled_decoder()
        return sparse_pooling(hidden, weight, bias, lengths, pooling, activation, dtype)

    def summed_loss(
        self,
        logits: Tensor | None,
        labels: Tensor,
        hidden: Tensor,
        token_indices: Tensor | None,
        z_loss: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy of flat tokens and the number of labelled ones.

        It is computed from the logits of all tokens or, without them, from the hidden states of the labelled tokens at
        `token_indices`.
        """
        count = (labels != IGNORE).sum()
        if logits is None:
            assert token_indices is not None
            return self.fused_loss(hidden, labels[token_indices], z_loss=z_loss), count
        return cross_entropy(logits, labels, z_loss, IGNORE).sum(), count

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.decoder and self.config.tie_word_embeddings:
            if self.decoder.bias is not None:
                init.zeros_(self.decoder.bias)  # the weight will be the embeddings'
            return
        init_module(module, self.config, is_decoder=module is self.decoder)
        if module is self and self.logit_scale is not None:
            init.ones_(self.logit_scale)


def labelled_tokens(layout: SequenceLayout, labels: Tensor, indices: Tensor | None = None) -> Tensor:
    """Returns the flat indices of the tokens that enter the loss, which the caller may know already."""
    if indices is not None:
        return indices
    return (layout.real_labels(labels, IGNORE) != IGNORE).nonzero().squeeze(1)


class BertBlocksForMaskedLM(LanguageModel):
    """Predicts masked tokens.

    In training, with `labels`, only labelled tokens reach the head, and `logits` is None unless `return_logits=True`.
    In evaluation the loss comes with the logits of all tokens.

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
        num_items_in_batch: Tensor | int | None = None,
        return_logits: bool | None = None,
        z_loss: float = 0.0,
        bags: tuple[Tensor, int] | None = None,
        scored_tokens: Tensor | None = None,
        **options: Unpack[EncoderOptions],
    ) -> LanguageModelOutput:
        """Returns logits and, given `labels`, the summed loss divided by the number of labels.

        `scored_tokens` are the flat indices of the labelled tokens, if the caller knows them; looking for them waits
        for a GPU.

        `num_items_in_batch` replaces that number. `z_loss` times the square of the softmax's log denominator is added
        to each token's loss, which keeps logits from drifting (Chowdhery et al., 2022). With a `sparse_head`, it
        returns the vectors of sequences instead, and those of `bags`, given as `SparseHead.weigh` takes them.
        """
        want_logits = return_logits if return_logits is not None else labels is None or not self.training
        encoded = self.model.encode(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            **options,
            token_indices=None
            if labels is None or want_logits
            else partial(labelled_tokens, labels=labels, indices=scored_tokens),
        )
        hidden, layout = encoded.hidden, encoded.layout
        if self.sparse_head is not None:
            real = hidden if layout.key_mask is None else hidden[layout.key_mask.flatten()]
            vectors = self.sparse_vectors(real, layout.read_lengths(), self.sparse_head)
            weighed = None if bags is None else self.sparse_head.weigh(*bags, self.config.vocab_size)
            return LanguageModelOutput(vectors=vectors, bag_vectors=weighed)
        logits = self.logits(hidden) if want_logits else None
        loss = None
        if labels is not None:
            flat_labels = layout.real_labels(labels, IGNORE)
            total, count = self.summed_loss(logits, flat_labels, hidden, encoded.token_indices, z_loss)
            total = encoded.add_router_loss(total, count)
            loss = total / (count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch)
        return LanguageModelOutput(
            loss=cast(Any, loss),
            logits=None if logits is None else layout.scatter(logits),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
