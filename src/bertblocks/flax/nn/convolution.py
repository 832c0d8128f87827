"""The dynamic convolution of ConvBERT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.linear import Linear

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


class Depthwise(nnx.Module):
    """A convolution of each hidden unit by itself."""

    def __init__(self, hidden_size: int, kernel_size: int) -> None:
        self.weight = nnx.Param(jnp.zeros((hidden_size, 1, kernel_size)))

    def __call__(self, x: Array, layout: RowLayout) -> Array:
        kernel = self.weight[...][:, 0]  # [hidden, kernel]
        reach = kernel.shape[1] // 2
        near = (neighbours(x, layout, place - reach) * kernel[:, place] for place in range(kernel.shape[1]))
        return sum(near, jnp.zeros_like(x))


class SpanConvolution(nnx.Module):
    """Averages the values around each token by weights that depend on its query (Jiang et al., 2020)."""

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int, kernel_size: int) -> None:
        size = num_heads * head_dim
        self.num_heads, self.kernel_size = num_heads, kernel_size
        self.depthwise = Depthwise(hidden_size, kernel_size)
        self.pointwise = Linear(hidden_size, size, bias=True)
        self.kernel = Linear(size, num_heads * kernel_size, bias=True)
        self.value = Linear(hidden_size, size, bias=True)

    def __call__(self, x: Array, queries: Array, layout: RowLayout) -> Array:
        """`[rows, length, hidden]` and `[rows, length, heads * head_dim]` -> `[rows, length, heads * head_dim]`."""
        logits = self.kernel(self.pointwise(self.depthwise(x, layout)) * queries)
        weights = jax.nn.softmax(logits.reshape(*x.shape[:2], self.num_heads, self.kernel_size))
        values, total = self.value(x), jnp.zeros_like(queries).reshape(*x.shape[:2], self.num_heads, -1)
        for place in range(self.kernel_size):
            near = neighbours(values, layout, place - self.kernel_size // 2).reshape(total.shape)
            total = total + near * weights[..., place, None]
        return total.reshape(queries.shape)


def neighbours(x: Array, layout: RowLayout, offset: int) -> Array:
    """For each token the vector `offset` places after it, or 0 where that is not a token of its sequence."""
    columns = jnp.arange(x.shape[1]) + offset
    ids = jnp.roll(layout.segment_ids, -offset, axis=1)
    exists = (ids == layout.segment_ids) & (ids > 0) & (columns >= 0) & (columns < x.shape[1])
    return jnp.where(exists[..., None], jnp.roll(x, -offset, axis=1), 0.0)


def get_span_convolution(config: BertBlocksConfig) -> SpanConvolution | None:
    if not config.span_convolution:
        return None
    return SpanConvolution(config.hidden_size, config.num_attention_heads, config.head_dim, config.span_conv_size)
