"""Shortcuts from the input of the encoder to its layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

from bertblocks.core.registry import Registry

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

INPUT_MIXING: Registry[Any] = Registry("input_mixing")
VALUE_EMBEDDING: Registry[Any] = Registry("value_embedding")


@INPUT_MIXING.register(True)
class InputMixing(nn.Module):
    """a x + b x0 in front of a layer, with x0 the encoder's input; a starts at 1 and b at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 0.0]))

    def init_parameters(self, config: BertBlocksConfig) -> None:
        init.copy_(self.weight, torch.tensor([1.0, 0.0]))

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        a, b = self.weight.to(x.dtype)
        return a * x + b * start


@VALUE_EMBEDDING.register(True)
class ValueEmbedding(nn.Module):
    """v + E[id]: every layer has a table of values for the tokens of the vocabulary."""

    def __init__(self, vocab_size: int, num_kv_heads: int, head_dim: int, pad_token_id: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab_size, num_kv_heads * head_dim, padding_idx=pad_token_id)
        self.num_kv_heads = num_kv_heads

    def forward(self, values: Tensor, token_ids: Tensor | None) -> Tensor:
        if token_ids is None:
            raise ValueError("inputs_embeds are given; value_embedding needs input_ids.")
        return values + self.table(token_ids).unflatten(-1, (self.num_kv_heads, -1)).to(values.dtype)


def get_value_embedding(config: BertBlocksConfig) -> ValueEmbedding | None:
    if not config.value_embedding:
        return None
    return ValueEmbedding(config.vocab_size, config.num_kv_heads, config.head_dim, config.pad_token_id)
