"""Matrices: linear layers and tables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class Linear(nnx.Module):
    """A linear layer whose weight is `[out, in]` as torch stores it, so that files need no transposing.

    `writes` marks one that adds to the residual stream or starts it, which nGPT normalises along its other side.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, writes: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features)))
        self.bias = nnx.Param(jnp.zeros(out_features)) if bias else None
        self.writes = writes

    def __call__(self, x: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...])
        return y if self.bias is None else y + self.bias


class Table(nnx.Module):
    """Rows by number. The row `padding`, if there is one, gets no gradient from being looked up."""

    def __init__(self, rows: int, size: int, padding: int | None = None) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, size)))
        self.padding = padding

    def __call__(self, index: Array) -> Array:
        """The rows; NaN for an index that is not in the table, which compiled code cannot refuse."""
        rows = self.weight[...]
        found = rows[jnp.clip(index, 0, rows.shape[0] - 1)]
        if self.padding is not None:
            found = jnp.where((index == self.padding)[..., None], jax.lax.stop_gradient(found), found)
        exists = (index >= 0) & (index < rows.shape[0])
        return jnp.where(exists[..., None], found, jnp.nan)


def dropout(x: Array, rate: float, rngs: nnx.Rngs | None) -> Array:
    """Zeros for a share of the numbers, and the rest scaled up to make up for them; nothing without `rngs`."""
    if rngs is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rngs(), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
