"""Token, token-type and position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.linear import Linear, Table, dropout
from bertblocks.flax.nn.norm import Norm, get_norm
from bertblocks.flax.nn.position import LearnedPosition, SinusoidalPosition, get_embedding_position
from bertblocks.nn.embedding import MASKED_IN_TRAINING

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


class Embedding(nnx.Module):
    """The sum of token, type and position embeddings, then norm, dropout and a projection to the hidden size."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        pad_token_id: int | None,
        type_vocab_size: int,
        position: LearnedPosition | SinusoidalPosition | None,
        norm: Norm | None,
        dropout: float,
        projection: Linear | None,
        dropped_token_id: int | None,
        scale: float = 1.0,
    ) -> None:
        self.token = Table(vocab_size, embedding_size, padding=pad_token_id)
        self.token_type = Table(type_vocab_size, embedding_size) if type_vocab_size else None
        self.position = position
        self.norm = norm
        self.dropout = dropout
        self.projection = projection
        self.dropped_token_id = dropped_token_id
        self.scale = scale

    def tokens(self, token_ids: Array, layout: RowLayout) -> Array:
        """`[rows, length]` -> `[rows, length, embedding]`."""
        x = self.token(token_ids) * self.scale
        if self.dropped_token_id is None:
            return x
        # ESM treats mask tokens like dropout: they are 0, and the other tokens of the sequence are scaled up
        masked = jnp.equal(token_ids, self.dropped_token_id)
        lengths = layout.members.sum(-1)
        visible = (layout.members & ~masked[:, None]).sum(-1)
        scale = layout.spread((1 - MASKED_IN_TRAINING) * lengths / jnp.maximum(visible, 1))
        return jnp.where(masked[..., None], 0.0, x) * scale[..., None].astype(x.dtype)

    def __call__(
        self,
        x: Array,  # [rows, length, embedding]
        token_types: Array | None,  # [rows, length], all 0 if not given
        positions: Array,  # [rows, length]
        rngs: nnx.Rngs | None,
    ) -> Array:
        if self.token_type is not None:
            x = x + (self.token_type.weight[0] if token_types is None else self.token_type(token_types))
        if self.position is not None:
            x = x + self.position(positions).astype(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = dropout(x, self.dropout, rngs)
        return x if self.projection is None else self.projection(x)  # [rows, length, hidden]


def get_embedding(config: BertBlocksConfig) -> Embedding:
    size, hidden = config.embedding_size, config.hidden_size
    return Embedding(
        config.vocab_size,
        size,
        config.pad_token_id,
        config.type_vocab_size,
        position=get_embedding_position(config),
        norm=get_norm(config, size) if config.embedding_norm else None,
        dropout=config.embedding_dropout,
        projection=Linear(size, hidden, bias=True, writes=True) if config.embedding_projection else None,
        dropped_token_id=config.mask_token_id if config.token_dropout else None,
        scale=config.embedding_scale,
    )
