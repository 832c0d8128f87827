"""One encoder layer: residual wiring around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from bertblocks.nn.attention import Attention, take
from bertblocks.nn.backends.base import AttentionBackend
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.mlp import get_mlp
from bertblocks.nn.norm import DeepNorm, get_norm
from bertblocks.nn.numerics import upcast
from bertblocks.nn.position import BlockPosition, get_block_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

LayerOutput = tuple[Tensor, list[Tensor] | None]

#: For every norm position: is there a norm before the sublayer, after it, and is the latter inside the residual branch?
NORM_POSITIONS: dict[str, tuple[bool, bool, bool]] = {
    "pre": (True, False, False),  # x + f(N x)
    "post": (False, True, False),  # N(x + f(x))
    "pre_and_post": (True, True, False),  # N'(x + f(N x))
    "sandwich": (True, True, True),  # x + N'(f(N x))
    "none": (False, False, False),  # x + f(x)
}


class Residual(nn.Module):
    """The path around one sublayer: where its norms sit and how it joins the residual stream."""

    def __init__(
        self, norm_pos: str, make_norm: Callable[[], nn.Module], scale: float = 1.0, skip_pre_norm: bool = False
    ) -> None:
        super().__init__()
        before, after, self.norm_inside = NORM_POSITIONS[norm_pos]
        self.pre_norm = make_norm() if before and not skip_pre_norm else nn.Identity()
        self.post_norm = make_norm() if after else nn.Identity()
        self.scale = scale

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        residual = x if self.scale == 1.0 else x * self.scale
        if self.norm_inside:
            return residual + self.post_norm(branch)
        return self.post_norm(residual + branch)


class Block(GradientCheckpointingLayer):
    """Attention, then feed-forward; or, if parallel, both on the same normalised input.

    With `rows`, the output is that of those tokens alone: after attention no token needs another.
    """

    def __init__(
        self, attention: Attention, mlp: nn.Module, attention_residual: Residual, mlp_residual: Residual | None
    ) -> None:
        super().__init__()
        self.attention = attention
        self.attention_residual = attention_residual
        self.mlp = mlp
        self.mlp_residual = mlp_residual

    def forward(
        self,
        x: Tensor,
        layout: SequenceLayout,
        backend: AttentionBackend,
        output_weights: bool = False,
        rows: Tensor | None = None,
    ) -> LayerOutput:
        normed = self.attention_residual.pre_norm(x)
        branch, weights = self.attention(normed, layout, backend, output_weights, rows)
        x = take(x, rows)
        if self.mlp_residual is None:
            return self.attention_residual.join(x, branch + self.mlp(take(normed, rows))), weights
        x = self.attention_residual.join(x, branch)
        return self.mlp_residual.join(x, self.mlp(self.mlp_residual.pre_norm(x))), weights


# ---------------------------------------------------------------------- nGPT

#: Start value of nGPT's learned scales, as NeoBERT sets it.
NGPT_BASE_SCALE = 960**-0.5
NGPT_ALPHA = 0.05


def unit(x: Tensor) -> Tensor:
    """x on the unit sphere."""
    precise = upcast(x)
    return (precise / (precise.norm(dim=-1, keepdim=True) + 1e-8)).to(x.dtype)


class NGPTAttention(Attention):
    """Attention between unit queries and keys under a learned scale (Loshchilov et al., 2024)."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.sqk = nn.Parameter(torch.full((self.sizes[0],), NGPT_BASE_SCALE))
        self.scale = self.head_dim**0.5

    def place(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        q, k = self.position.rotate(q, k, layout)
        scale = (self.sqk / NGPT_BASE_SCALE).view(self.num_heads, self.head_dim)
        return (scale * unit(q)).to(q.dtype), (scale * unit(k)).to(k.dtype)


class NGPTBlock(GradientCheckpointingLayer):
    """Moves along the unit sphere towards each sublayer's answer, by a learned step per hidden unit."""

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
        self,
        x: Tensor,
        layout: SequenceLayout,
        backend: AttentionBackend,
        output_weights: bool = False,
        rows: Tensor | None = None,
    ) -> LayerOutput:
        branch, weights = self.attention(x, layout, backend, output_weights, rows)
        x = self.step(take(x, rows), branch, self.attention_alpha)
        return self.step(x, self.mlp(x), self.mlp_alpha), weights


# ---------------------------------------------------------------------- factories


def get_attention(config: BertBlocksConfig, is_local: bool, shared_position: BlockPosition | None = None) -> Attention:
    attention_class = NGPTAttention if config.ngpt else Attention
    return attention_class(
        config.hidden_size,
        config.num_attention_heads,
        config.num_kv_heads,
        config.head_dim,
        qkv_bias=config.attention_qkv_bias,
        out_bias=config.attention_out_bias,
        dropout=config.attention_dropout,
        out_dropout=config.attention_output_dropout,
        position=get_block_position(config, is_local, shared_position),
        half_window=config.local_attention_window_size // 2 if is_local else None,
        num_global_tokens=config.num_global_tokens if is_local else 0,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
    )


def get_block(config: BertBlocksConfig, index: int, shared_position: BlockPosition | None = None) -> Block | NGPTBlock:
    """Layer `index` of the encoder that a config describes."""
    is_local = config.layer_types[index] == "local"
    config = config.for_layer(index)
    attention = get_attention(config, is_local, shared_position)
    if config.ngpt:
        assert isinstance(attention, NGPTAttention)
        return NGPTBlock(config.hidden_size, attention, get_mlp(config))

    scale = DeepNorm.residual_scale(config.num_hidden_layers) if config.norm_fn == "deep" else 1.0

    def residual(skip_pre_norm: bool = False) -> Residual:
        return Residual(config.norm_pos, lambda: get_norm(config), scale, skip_pre_norm)

    attention_residual = residual(skip_pre_norm=index == 0 and not config.first_attention_norm)
    return Block(attention, get_mlp(config), attention_residual, None if config.parallel_block else residual())
