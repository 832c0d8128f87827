"""Linear layers, embedding tables and dropout."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class Linear(nnx.Module):
    """A linear layer whose weight is `[out, in]` as in torch, so files need no transposition.

    `writes` marks a layer whose output is or joins the residual stream; nGPT normalizes it along the other dimension.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool, writes: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((out_features, in_features)))
        self.bias = nnx.Param(jnp.zeros(out_features)) if bias else None
        self.writes = writes

    def __call__(self, x: Array) -> Array:
        y = jnp.einsum("...i,oi->...o", x, self.weight[...])
        return y if self.bias is None else y + self.bias


class GroupedLinear(Linear):
    """A block-diagonal linear layer, whose weight has the columns of one group: `[out, in / groups]`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, groups: int) -> None:
        super().__init__(in_features // groups, out_features, bias)
        self.groups = groups

    def __call__(self, x: Array) -> Array:
        weight = self.weight[...].reshape(self.groups, -1, self.weight.shape[1])
        parts = x.reshape(*x.shape[:-1], self.groups, -1)
        y = jnp.einsum("...gi,goi->...go", parts, weight).reshape(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Table(nnx.Module):
    """An embedding table. The row `padding`, if set, gets no gradient from lookups."""

    def __init__(self, rows: int, size: int, padding: int | None = None) -> None:
        self.weight = nnx.Param(jnp.zeros((rows, size)))
        self.padding = padding

    def __call__(self, index: Array) -> Array:
        """Returns rows, or NaN for an index outside of the table, because compiled code cannot raise errors."""
        rows = self.weight[...]
        found = rows[jnp.clip(index, 0, rows.shape[0] - 1)]
        if self.padding is not None:
            found = jnp.where((index == self.padding)[..., None], jax.lax.stop_gradient(found), found)
        exists = (index >= 0) & (index < rows.shape[0])
        return jnp.where(exists[..., None], found, jnp.nan)


def dropout(x: Array, rate: float, rngs: nnx.Rngs | None) -> Array:
    """Applies dropout; does nothing without `rngs`."""
    if rngs is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(rngs(), 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)
