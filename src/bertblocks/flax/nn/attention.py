"""Self-attention: projections, query/key normalization and rotation around masked softmax."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.convolution import SpanConvolution
from bertblocks.flax.nn.linear import Linear, dropout
from bertblocks.flax.nn.norm import NORMS, Norm
from bertblocks.flax.nn.position import BlockPosition
from bertblocks.flax.nn.softmax import Softmax


class AttentionSinks(nnx.Module):
    """A learned logit per head that joins the softmax over a query's keys."""

    def __init__(self, num_heads: int) -> None:
        self.logits = nnx.Param(jnp.zeros(num_heads))


class Attention(nnx.Module):
    """Multi-head attention with grouped key/value heads over rows of packed or padded sequences."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        dropout: float,
        out_dropout: float,
        position: BlockPosition | None,
        half_window: int | None,
        num_global_tokens: int,
        qk_norm_eps: float | None,
        scale: float,
        qk_norm_weight: str,
        gate: Any,
        qk_norm_fn: str,
        qk_norm_across_heads: bool,
        has_sinks: bool,
        span_convolution: SpanConvolution | None,
    ) -> None:
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv = Linear(hidden_size, (num_heads + 2 * num_kv_heads) * head_dim, qkv_bias)
        mixed_size = num_heads * head_dim * (1 if span_convolution is None else 2)
        self.out = Linear(mixed_size, hidden_size, out_bias, writes=True)
        self.span_convolution = span_convolution
        self.qk_norm_across_heads = qk_norm_across_heads
        self.query_norm, self.key_norm = (
            None if qk_norm_eps is None else NORMS[qk_norm_fn](count * head_dim, qk_norm_eps, False, qk_norm_weight)
            for count in ((num_heads, num_kv_heads) if qk_norm_across_heads else (1, 1))
        )
        self.position = position
        self.half_window = half_window
        self.num_global_tokens = num_global_tokens
        self.scale = scale
        self.gate = gate
        self.sinks = AttentionSinks(num_heads) if has_sinks else None
        self.dropout = dropout
        self.out_dropout = out_dropout

    def apply_positions(self, q: Array, k: Array, position: BlockPosition, layout: RowLayout) -> tuple[Array, Array]:
        """Normalizes queries and keys and applies RoPE."""
        return position.rotate(self.normalize(q, self.query_norm), self.normalize(k, self.key_norm), layout)

    def normalize(self, x: Array, norm: Norm | None) -> Array:
        if norm is None:
            return x
        return norm(x.reshape(*x.shape[:2], -1)).reshape(x.shape) if self.qk_norm_across_heads else norm(x)

    def __call__(
        self,
        x: Array,  # [rows, length, hidden]
        layout: RowLayout,
        shared_position: BlockPosition | None,
        rngs: nnx.Rngs | None,
        output_weights: bool = False,
    ) -> tuple[Array, Array | None]:
        position = shared_position if self.position is None else self.position
        assert position is not None
        heads = self.qkv(x).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(heads, [self.num_heads, self.num_heads + self.num_kv_heads], axis=2)
        convolved = None
        if self.span_convolution is not None:
            convolved = self.span_convolution(x, q.reshape(*x.shape[:2], -1), layout)
        q, k = self.apply_positions(q, k, position, layout)
        # query heads that share a key/value head are adjacent
        q = q.reshape(*x.shape[:2], self.num_kv_heads, -1, self.head_dim)
        sinks = None if self.sinks is None else self.sinks.logits[...]
        softmax = Softmax(position, self.half_window, self.num_global_tokens, self.scale, self.dropout, sinks)
        attended, weights = softmax(q, k, v, layout, None if rngs is None else rngs(), output_weights)
        if self.gate is not None:
            attended = self.gate(attended.reshape(*x.shape[:2], self.num_heads, self.head_dim), x, v)
        mixed = attended.reshape(*x.shape[:2], -1)
        if convolved is not None:
            mixed = jnp.concatenate((mixed, convolved), axis=-1)
        return dropout(self.out(mixed), self.out_dropout, rngs), weights
