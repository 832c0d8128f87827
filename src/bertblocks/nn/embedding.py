"""Token, token-type and position embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.core.keys import Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import get_norm
from bertblocks.nn.position import EmbeddingPosition, SinusoidalPosition, get_embedding_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


#: The share of mask tokens in ESM's training data.
MASKED_IN_TRAINING = 0.15 * 0.8


class TokenDropout(nn.Module):
    """ESM's token dropout (Lin et al., 2022): mask tokens become 0, and the other tokens of a sequence are scaled up.

    The scale matches the share of tokens that were not masked in training.
    """

    def __init__(self, mask_token_id: int) -> None:
        super().__init__()
        self.mask_token_id = mask_token_id

    def forward(self, x: Tensor, token_ids: Tensor, layout: SequenceLayout) -> Tensor:
        masked = token_ids == self.mask_token_id
        counts = count_per_sequence(~masked, layout)
        scale = (1 - MASKED_IN_TRAINING) * layout.length_tensor / counts.clamp(min=1)  # [sequences]
        return x.masked_fill(masked[:, None], 0.0) * scale[layout.sequence_ids, None].to(x.dtype)

    def extra_repr(self) -> str:
        return f"mask_token_id={self.mask_token_id}"


TIMESTEP_EMBEDDING: Registry[Any] = Registry("timestep_embedding")


@TIMESTEP_EMBEDDING.register(True)
class TimestepEmbedding(nn.Module):
    """Adds B silu(A s(1000 t)) to all tokens of a sequence, where t is its noise level and s are sines and cosines.

    Without a given t, it is the share of mask tokens in the sequence.
    """

    def __init__(self, size: int, mask_token_id: int) -> None:
        super().__init__()
        self.waves = SinusoidalPosition(size)
        self.up = Linear(size, size, bias=True, role="embedding")
        self.down = Linear(size, size, bias=True, role="embedding")
        self.mask_token_id = mask_token_id

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        yield "timestep_embedding", config.mask_token_id is None, "it requires mask_token_id"

    def flops(self, num_tokens: int) -> int:
        """Count both products, which every sequence needs once."""
        return 2 * (self.up.weight.numel() + self.down.weight.numel())

    def forward(self, x: Tensor, token_ids: Tensor | None, times: Tensor | None, layout: SequenceLayout) -> Tensor:
        if times is None:
            if token_ids is None:
                raise ValueError("inputs_embeds are given; timestep_embedding needs input_ids or timesteps.")
            masked = count_per_sequence(token_ids == self.mask_token_id, layout)
            times = masked / layout.length_tensor.clamp(min=1)
        vectors = self.down(F.silu(self.up(self.waves(1000 * times).to(x.dtype))))  # [sequences, size]
        return x + vectors.index_select(0, layout.sequence_ids).to(x.dtype)


def count_per_sequence(chosen: Tensor, layout: SequenceLayout) -> Tensor:
    """Count the real tokens of each sequence that are chosen."""
    if layout.key_mask is not None:
        chosen = chosen & layout.key_mask.flatten()
    counts = torch.zeros(layout.num_sequences, device=chosen.device, dtype=torch.long)
    return counts.index_add(0, layout.sequence_ids, chosen.long())


class Embedding(nn.Module):
    """The sum of token, type and position embeddings, with an optional norm and projection to the hidden size."""

    def __init__(
        self,
        vocab_size: int,
        embedding_size: int,
        pad_token_id: int | None,
        type_vocab_size: int,
        position: EmbeddingPosition | None,
        norm: nn.Module | None,
        dropout: float,
        projection: nn.Module | None = None,
        token_dropout: TokenDropout | None = None,
        norm_is_last: bool = False,
        task_type_vocab_size: int = 0,
        scale: float = 1.0,
        timestep: TimestepEmbedding | None = None,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab_size, embedding_size, padding_idx=pad_token_id)
        self.token_type = nn.Embedding(type_vocab_size, embedding_size) if type_vocab_size else None
        self.task_type = nn.Embedding(task_type_vocab_size, embedding_size) if task_type_vocab_size else None
        self.position = position
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.projection = projection
        self.token_dropout = token_dropout
        self.norm_is_last = norm_is_last
        self.scale = scale
        self.timestep = timestep

    def forward(
        self,
        token_ids: Tensor | None,  # [tokens]
        token_embeddings: Tensor | None,  # [tokens, embedding], instead of ids
        token_types: Tensor | None,  # [tokens], 0 if None
        positions: Tensor,  # [tokens]
        layout: SequenceLayout | None = None,  # needed for token dropout, timesteps and kept padding
        times: Tensor | None = None,  # [sequences], noise levels
    ) -> Tensor:
        x = self.token(token_ids) if token_embeddings is None else token_embeddings
        if token_embeddings is None and self.scale != 1.0:
            x = x * self.scale
        if self.token_dropout is not None:
            if token_ids is None:
                raise ValueError("inputs_embeds are given; token_dropout needs input_ids to find the mask tokens.")
            x = self.token_dropout(x, token_ids, layout)
        if self.token_type is not None:
            x = x + (self.token_type.weight[0] if token_types is None else self.token_type(token_types))
        if self.position is not None:
            x = x + self.position(positions).to(x.dtype)
        if self.task_type is not None:
            x = x + self.task_type.weight[0]
        if self.timestep is not None:
            x = self.timestep(x, token_ids, times, layout)
        if layout is not None and layout.key_mask is not None and not layout.has_unseen_tokens:
            # attention masks do not hide NaN: padding that stays in the batch must be finite
            x = x.masked_fill(~layout.key_mask.flatten()[:, None], 0.0)
        if self.projection is not None and self.norm_is_last:
            x = self.projection(x)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x if self.projection is None or self.norm_is_last else self.projection(x)  # [tokens, hidden]


def get_embedding(config: BertBlocksConfig) -> Embedding:
    projection = None
    if config.embedding_projection:
        bias = config.embedding_projection_bias
        projection = Linear(config.embedding_size, config.hidden_size, bias, role="embedding")
    norm_size = config.hidden_size if config.embedding_norm_after_projection else config.embedding_size
    return Embedding(
        config.vocab_size,
        config.embedding_size,
        config.pad_token_id,
        config.type_vocab_size,
        position=get_embedding_position(config),
        norm=get_norm(config, norm_size) if config.embedding_norm else None,
        dropout=config.embedding_dropout,
        projection=projection,
        token_dropout=TokenDropout(config.mask_token_id) if config.token_dropout else None,  # type: ignore[arg-type]
        norm_is_last=config.embedding_norm_after_projection,
        task_type_vocab_size=config.task_type_vocab_size,
        scale=config.embedding_scale,
        timestep=get_timestep_embedding(config),
    )


def get_timestep_embedding(config: BertBlocksConfig) -> TimestepEmbedding | None:
    if not config.timestep_embedding:
        return None
    return TimestepEmbedding(config.embedding_size, int(config.mask_token_id))  # type: ignore[arg-type]
