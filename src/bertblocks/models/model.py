"""The encoder without a task head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils.generic import can_return_tuple

from bertblocks.config import BertBlocksConfig
from bertblocks.models.base import BertBlocksPreTrainedModel
from bertblocks.models.inputs import EncoderInput, read_layout
from bertblocks.nn.embedding import get_embedding
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.encoder import Encoder
from bertblocks.nn.head import ContactHead, Pooler, pool
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.moe import Routing
from bertblocks.nn.token_head import TokenHead

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bertblocks.models.inputs import EncoderOptions


@dataclass
class Encoded:
    """Flat hidden states with their layout, for heads, and the requested extras in the shape of the input."""

    hidden: Tensor  # [tokens, hidden], or [len(token_indices), hidden]
    layout: SequenceLayout
    #: The tokens that `hidden` holds; None for all.
    token_indices: Tensor | None
    hidden_states: tuple[Tensor, ...] | None
    attentions: tuple[Tensor, ...] | None
    #: What each router of a mixture of experts did, in training.
    routing: list[Routing]

    def add_router_loss(self, total: Tensor, count: Tensor | int) -> Tensor:
        """Adds the losses of all routers to the sum of a loss over `count` items, as if every item had them."""
        return total + count * sum(routing.loss for routing in self.routing) if self.routing else total


class BertBlocksModel(BertBlocksPreTrainedModel):
    """An encoder without a task head: hidden states and, if the config has a pooler, one vector per sequence.

    Input is a padded batch (`input_ids` with an `attention_mask` of booleans, 0/1 or additive floats) or a packed one
    (flat ids with `cu_seqlens`, or rows with `packed_seqlens`). Padding is dropped at the start and costs nothing.

    Example:
        >>> import torch
        >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini")).eval()
        >>> ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
        >>> padded = model(ids, attention_mask=ids != 0).last_hidden_state
        >>> packed = model(torch.tensor([5, 6, 7, 8, 9]), cu_seqlens=torch.tensor([0, 3, 5])).last_hidden_state
        >>> padded.shape, packed.shape, torch.allclose(padded[1, :2], packed[3:], atol=1e-6)
        (torch.Size([2, 3, 64]), torch.Size([5, 64]), True)
    """

    def __init__(self, config: BertBlocksConfig, add_pooling_layer: bool | None = None) -> None:
        super().__init__(config)
        self.embedding = get_embedding(config)
        self.encoder = Encoder(config)
        has_pooler = config.pooler if add_pooling_layer is None else add_pooling_layer
        self.pooler = Pooler(config.hidden_size) if has_pooler else None
        num_heads = (config.for_layer(index).num_attention_heads for index in range(config.num_hidden_layers))
        #: What makes embeddings, set by fine-tuning. Its result then takes the place of the pooler's.
        self.embedding_head: EmbeddingHead | TokenHead | None = None
        self.contact_head = ContactHead(sum(num_heads)) if config.contact_head else None
        #: What each router of a mixture of experts did in the last forward pass in training.
        self.routing: list[Routing] = []
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding.token

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding.token = value  # type: ignore[assignment]

    def layout(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packed_seqlens: Tensor | None = None,
    ) -> SequenceLayout:
        """Returns how a batch forms sequences, for callers that work on flat tokens."""
        shape = tuple(input_ids.shape)
        return read_layout(shape, input_ids.device, attention_mask, cu_seqlens, packed_seqlens, self.config.unpad)

    def encode(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        packed_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        token_indices: Callable[[SequenceLayout], Tensor] | None = None,
        timesteps: Tensor | None = None,
        has_unseen_tokens: bool = False,
    ) -> Encoded:
        """Runs the forward pass and leaves its result flat, for heads.

        A head that needs only some tokens passes `token_indices`, a function from the layout to their flat indices.
        `hidden` then holds these tokens in that order, and the last layer computes no others. A batch that is all
        padding has no tokens, so none are returned. `timesteps` are the noise levels of sequences, for
        `timestep_embedding`. With `has_unseen_tokens`, `hidden` has the tokens that the mask hides, too.
        """
        config = self.config
        want_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        want_attentions = config.output_attentions if output_attentions is None else output_attentions
        batch = EncoderInput(
            config,
            self.embedding.token.num_embeddings,
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            cu_seqlens,
            packed_seqlens,
            has_unseen_tokens,
        )
        layout = batch.layout
        x = self.embedding(batch.token_ids, batch.embeddings, batch.token_types, batch.positions, layout, timesteps)
        indices = None
        if token_indices is not None:
            indices = token_indices(layout) if len(x) else x.new_zeros(0, dtype=torch.long)
        out = self.encoder(x, layout, bool(want_states), bool(want_attentions), indices, batch.token_ids)
        states = tuple(out.hidden_states) if out.hidden_states else None
        attentions = tuple(out.attentions) if out.attentions else None
        if self.training:
            self.routing = [routing._replace(loss=routing.loss.detach()) for routing in out.routing]
        return Encoded(out.last_hidden_state, layout, indices, states, attentions, out.routing)

    def predict_contacts(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Predicts the probability that two tokens are in contact: `[batch, length - 2, length - 2]`.

        The first and the last token of each row are left out.
        """
        if self.contact_head is None:
            raise ValueError("contact_head is False in this model's config; set it to True to predict contacts.")
        attentions = self.encode(input_ids, attention_mask, output_attentions=True).attentions
        assert attentions is not None
        ends = self.config.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        is_end = torch.isin(input_ids, torch.tensor(ends, dtype=input_ids.dtype, device=input_ids.device))
        return self.contact_head(torch.cat(attentions, dim=1), ~is_end)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Unpack[EncoderOptions],
    ) -> BaseModelOutputWithPooling:
        encoded = self.encode(input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, **options)
        hidden, layout = encoded.hidden, encoded.layout
        pooled = None
        if self.embedding_head is not None:
            pooled = self.embedding_head(hidden, layout)
        elif self.pooler is not None:
            pooled = self.pooler(pool(hidden, layout, "cls"))
        return BaseModelOutputWithPooling(
            last_hidden_state=cast(Any, layout.scatter(hidden)),
            pooler_output=cast(Any, pooled),
            hidden_states=cast(Any, encoded.hidden_states),
            attentions=cast(Any, encoded.attentions),
        )
