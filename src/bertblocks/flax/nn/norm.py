"""Norms over the hidden units of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.flax.numerics import upcast

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


class Norm(nnx.Module):
    """Base of all norms: a learned scale and an optional bias."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        self.weight = nnx.Param(jnp.ones(size))
        self.bias = nnx.Param(jnp.zeros(size)) if bias else None
        self.eps = eps

    def scaled(self, x: Array, dtype: jnp.dtype) -> Array:
        x = x * self.weight
        return (x if self.bias is None else x + self.bias).astype(dtype)


class LayerNorm(Norm):
    """Mean and variance normalization (Ba et al., 2016)."""

    def __call__(self, x: Array) -> Array:
        return self.scaled(_standardize(upcast(x), self.eps), x.dtype)


class RMSNorm(Norm):
    """Root mean square normalization (Zhang and Sennrich, 2019)."""

    def __call__(self, x: Array) -> Array:
        precise = upcast(x)
        scale = jax.lax.rsqrt(jnp.square(precise).mean(-1, keepdims=True) + self.eps)
        return self.scaled((precise * scale).astype(x.dtype), x.dtype)


class GroupNorm(Norm):
    """Normalizes groups of one token's channels separately (Wu and He, 2018)."""

    def __init__(self, size: int, eps: float, bias: bool, num_groups: int) -> None:
        super().__init__(size, eps, bias)
        self.num_groups = num_groups

    def __call__(self, x: Array) -> Array:
        groups = upcast(x).reshape(*x.shape[:-1], self.num_groups, -1)
        return self.scaled(_standardize(groups, self.eps).reshape(x.shape), x.dtype)


class DynamicTanhNorm(Norm):
    """weight * tanh(alpha x) + bias, without statistics (Zhu et al., 2025)."""

    def __init__(self, size: int, eps: float, bias: bool) -> None:
        super().__init__(size, eps, bias)
        self.alpha = nnx.Param(jnp.full(1, 0.5))

    def __call__(self, x: Array) -> Array:
        return self.scaled(jnp.tanh(self.alpha * x), x.dtype)


def _standardize(x: Array, eps: float) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + eps)


#: "deep" is a LayerNorm too; blocks scale the residual with it.
NORMS: dict[str, type[Norm]] = {
    "layer": LayerNorm,
    "deep": LayerNorm,
    "rms": RMSNorm,
    "group": GroupNorm,
    "dynamic_tanh": DynamicTanhNorm,
}


def get_norm(config: BertBlocksConfig, size: int | None = None) -> Norm:
    """Builds the norm that a config names, over `hidden_size` units unless another size is given."""
    options = {"num_groups": config.norm_num_groups} if config.norm_fn == "group" else {}
    return NORMS[config.norm_fn](size or config.hidden_size, config.norm_eps, config.norm_bias, **options)
