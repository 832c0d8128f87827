"""Token, token-type and position embeddings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from bertblocks.blocks.norm import get_norm
from bertblocks.blocks.position import EmbeddingPosition, get_embedding_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


class Embedding(nn.Module):
    """The sum of what is known of each token, normalised if there is a norm."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        pad_token_id: int | None,
        type_vocab_size: int,
        position: EmbeddingPosition | None,
        norm: nn.Module | None,
        dropout: float,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, hidden_size, padding_idx=pad_token_id)
        self.token_type = nn.Embedding(type_vocab_size, hidden_size) if type_vocab_size else None
        self.position = position
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        token_ids: Tensor | None,  # [tokens]
        token_embeddings: Tensor | None,  # [tokens, hidden], in place of ids
        token_types: Tensor | None,  # [tokens], all 0 if not given
        positions: Tensor,  # [tokens]
    ) -> Tensor:
        x = self.token(token_ids) if token_embeddings is None else token_embeddings
        if self.token_type is not None:
            x = x + (self.token_type.weight[0] if token_types is None else self.token_type(token_types))
        if self.position is not None:
            x = x + self.position(positions).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


def get_embedding(config: BertBlocksConfig) -> Embedding:
    return Embedding(
        config.vocab_size,
        config.hidden_size,
        config.pad_token_id,
        config.type_vocab_size,
        position=get_embedding_position(config),
        norm=get_norm(config) if config.embedding_norm else None,
        dropout=config.embedding_dropout,
    )
