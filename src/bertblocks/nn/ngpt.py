"""nGPT: hidden states that move along the unit sphere (Loshchilov et al., 2024), in NeoBERT's form."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from bertblocks.nn.attention import Attention, ForwardContext
from bertblocks.nn.layout import SequenceLayout, index_tokens
from bertblocks.nn.numerics import upcast

#: Initial value of nGPT's learned scales, as in NeoBERT.
NGPT_BASE_SCALE = 960**-0.5
#: Initial step size along the sphere.
NGPT_ALPHA = 0.05


def unit(x: Tensor) -> Tensor:
    """Scale vectors to unit length."""
    precise = upcast(x)
    return (precise / (precise.norm(dim=-1, keepdim=True) + 1e-8)).to(x.dtype)


class NGPTAttention(Attention):
    """Attention between unit queries and keys with a learned scale."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sqk = nn.Parameter(torch.full((self.sizes[0],), NGPT_BASE_SCALE))
        self.scale = self.head_dim**0.5 * self.position.score_scale

    def normalize_queries(self, q: Tensor) -> Tensor:
        scale = (self.sqk / NGPT_BASE_SCALE).view(self.num_heads, self.head_dim)
        return (scale * unit(q)).to(q.dtype)

    def normalize_keys(self, k: Tensor) -> Tensor:
        return self.normalize_queries(k)  # they share their scale

    def apply_positions(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        q, k = self.position.rotate(q, k, layout)
        return self.normalize_queries(q), self.normalize_keys(k)


class NGPTBlock(GradientCheckpointingLayer):
    """Moves along the unit sphere towards each sublayer's output, by a learned step per hidden unit."""

    def __init__(self, hidden_size: int, attention: NGPTAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp
        self.attention_alpha = nn.Parameter(torch.full((hidden_size,), NGPT_BASE_SCALE))
        self.mlp_alpha = nn.Parameter(torch.full((hidden_size,), NGPT_BASE_SCALE))

    @staticmethod
    def step(x: Tensor, branch: Tensor, alpha: Tensor) -> Tensor:
        start = unit(x)
        rate = (alpha * (NGPT_ALPHA / NGPT_BASE_SCALE)).abs()
        return unit(start + rate * (unit(branch) - start))

    def forward(
        self, x: Tensor, context: ForwardContext, token_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        branch, weights = self.attention(x, context, token_indices)
        x = self.step(index_tokens(x, token_indices), branch, self.attention_alpha)
        return self.step(x, self.mlp(x), self.mlp_alpha), weights
