"""One encoder layer: residual wiring around attention and feed-forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.attention import Attention
from bertblocks.flax.nn.convolution import get_span_convolution
from bertblocks.flax.nn.gate import get_gate
from bertblocks.flax.nn.mlp import MLP, get_mlp
from bertblocks.flax.nn.norm import Norm, get_norm
from bertblocks.flax.nn.position import BlockPosition, get_block_position
from bertblocks.flax.numerics import upcast
from bertblocks.nn.block import NORM_POSITIONS
from bertblocks.nn.initialization import NGPT_BASE_SCALE
from bertblocks.nn.ngpt import NGPT_ALPHA
from bertblocks.nn.norm import get_norm_scale, get_skip_scale
from bertblocks.nn.parametrization import get_attention_scale

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

LayerOutput = tuple[Array, Array | None]


class Residual(nnx.Module):
    """The path around one sublayer: where its norms sit and how it joins the residual stream."""

    def __init__(
        self,
        norm_pos: str,
        make_norm: Callable[[], Norm],
        skip_scale: float,
        branch_scale: float,
        norm_scale: float,
        skip_pre_norm: bool,
    ) -> None:
        before, after, self.norm_inside = NORM_POSITIONS[norm_pos]
        self.pre_norm = make_norm() if before and not skip_pre_norm else None
        self.post_norm = make_norm() if after else None
        self.skip_scale, self.branch_scale = skip_scale, branch_scale
        self.norm_scale = norm_scale if before else 1.0

    def enter(self, x: Array) -> Array:
        normed = x if self.pre_norm is None else self.pre_norm(x)
        return normed if self.norm_scale == 1.0 else normed * self.norm_scale

    def join(self, x: Array, branch: Array) -> Array:
        if self.post_norm is not None and self.norm_inside:
            branch = self.post_norm(branch)
        joined = x * self.skip_scale + branch * self.branch_scale
        return joined if self.post_norm is None or self.norm_inside else self.post_norm(joined)


class Block(nnx.Module):
    """Attention, then feed-forward; or, if parallel, both on the same normalized input."""

    def __init__(
        self, attention: Attention, mlp: MLP, attention_residual: Residual, mlp_residual: Residual | None
    ) -> None:
        self.attention = attention
        self.attention_residual = attention_residual
        self.mlp = mlp
        self.mlp_residual = mlp_residual

    def __call__(
        self,
        x: Array,
        layout: RowLayout,
        shared_position: BlockPosition | None,
        rngs: nnx.Rngs | None,
        output_weights: bool,
    ) -> LayerOutput:
        normed = self.attention_residual.enter(x)
        branch, weights = self.attention(normed, layout, shared_position, rngs, output_weights)
        if self.mlp_residual is None:
            return self.attention_residual.join(x, branch + self.mlp(normed, rngs)), weights
        x = self.attention_residual.join(x, branch)
        return self.mlp_residual.join(x, self.mlp(self.mlp_residual.enter(x), rngs)), weights


# ---------------------------------------------------------------------- nGPT


def unit(x: Array) -> Array:
    """Projects x onto the unit sphere."""
    precise = upcast(x)
    squares = jnp.square(precise).sum(-1, keepdims=True)
    # the square root has no gradient at 0, where torch's norm has the gradient 0
    length = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1.0)), 0.0)
    return (precise / (length + 1e-8)).astype(x.dtype)


class NGPTAttention(Attention):
    """Attention between unit queries and keys under a learned scale (Loshchilov et al., 2024)."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.sqk = nnx.Param(jnp.full(self.num_heads * self.head_dim, NGPT_BASE_SCALE))

    def apply_positions(self, q: Array, k: Array, position: BlockPosition, layout: RowLayout) -> tuple[Array, Array]:
        q, k = position.rotate(q, k, layout)
        scale = (self.sqk / NGPT_BASE_SCALE).reshape(self.num_heads, self.head_dim)
        return (scale * unit(q)).astype(q.dtype), (scale * unit(k)).astype(k.dtype)


class NGPTBlock(nnx.Module):
    """Moves along the unit sphere towards each sublayer's output, by a learned step per hidden unit."""

    def __init__(self, hidden_size: int, attention: Attention, mlp: MLP) -> None:
        self.attention = attention
        self.mlp = mlp
        self.attention_alpha = nnx.Param(jnp.full(hidden_size, NGPT_BASE_SCALE))
        self.mlp_alpha = nnx.Param(jnp.full(hidden_size, NGPT_BASE_SCALE))

    @staticmethod
    def step(x: Array, branch: Array, alpha: Array) -> Array:
        start = unit(x)
        rate = jnp.abs(alpha * (NGPT_ALPHA / NGPT_BASE_SCALE))
        return unit(start + rate * (unit(branch) - start))

    def __call__(
        self,
        x: Array,
        layout: RowLayout,
        shared_position: BlockPosition | None,
        rngs: nnx.Rngs | None,
        output_weights: bool,
    ) -> LayerOutput:
        branch, weights = self.attention(x, layout, shared_position, rngs, output_weights)
        x = self.step(x, branch, self.attention_alpha[...])
        return self.step(x, self.mlp(x, rngs), self.mlp_alpha[...]), weights


# ---------------------------------------------------------------------- factories


def get_attention(config: BertBlocksConfig, is_local: bool) -> Attention:
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
        position=get_block_position(config, is_local),
        half_window=config.local_attention_window_size // 2 if is_local else None,
        num_global_tokens=config.num_global_tokens if is_local else 0,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        scale=get_attention_scale(config),
        qk_norm_weight=config.norm_weight,
        gate=get_gate(config),
        qk_norm_fn=config.qk_norm_fn,
        qk_norm_across_heads=config.qk_norm_across_heads,
        has_sinks=config.attention_sinks,
        span_convolution=get_span_convolution(config),
    )


def get_block(config: BertBlocksConfig, index: int) -> Block | NGPTBlock:
    """Builds layer `index` of an encoder."""
    is_local = config.layer_types[index] == "local"
    config = config.for_layer(index)
    attention = get_attention(config, is_local)
    if config.ngpt:
        return NGPTBlock(config.hidden_size, attention, get_mlp(config))

    def residual(norm_pos: str, skip_pre_norm: bool = False) -> Residual:
        scales = get_skip_scale(config), config.residual_scale, get_norm_scale(config, index)
        return Residual(norm_pos, lambda: get_norm(config), *scales, skip_pre_norm)

    attention_residual = residual(config.attention_norm_pos, index == 0 and not config.first_attention_norm)
    mlp_residual = None if config.parallel_block else residual(config.mlp_norm_pos)
    return Block(attention, get_mlp(config), attention_residual, mlp_residual)
