"""Norms over the hidden units of one token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.core.registry import Registry
from bertblocks.flax.numerics import upcast

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


NORMS: Registry[Any] = Registry("norm_fn")
register_norm = NORMS.register


class Norm(nnx.Module):
    """Base of all norms: a learned scale and an optional bias."""

    def __init__(self, size: int, eps: float, bias: bool, weight: str = "scale") -> None:
        self.is_one_plus = weight == "one_plus"
        start = jnp.zeros(size) if self.is_one_plus else jnp.ones(size)
        self.weight = None if weight == "none" else nnx.Param(start)
        self.bias = nnx.Param(jnp.zeros(size)) if bias else None
        self.eps = eps

    @classmethod
    def from_config(cls, config: BertBlocksConfig, size: int) -> Norm:
        return cls(size, config.norm_eps, config.norm_bias, config.norm_weight)

    def scaled(self, x: Array, dtype: jnp.dtype) -> Array:
        if self.weight is not None:
            x = x * (1 + self.weight if self.is_one_plus else self.weight)
        return (x if self.bias is None else x + self.bias).astype(dtype)


@register_norm("deep")  # blocks scale the residual
@register_norm("layer")
class LayerNorm(Norm):
    """Mean and variance normalization (Ba et al., 2016)."""

    def __call__(self, x: Array) -> Array:
        return self.scaled(_standardize(upcast(x), self.eps), x.dtype)


@register_norm("rms")
class RMSNorm(Norm):
    """Root mean square normalization (Zhang and Sennrich, 2019)."""

    def __call__(self, x: Array) -> Array:
        precise = upcast(x)
        scale = jax.lax.rsqrt(jnp.square(precise).mean(-1, keepdims=True) + self.eps)
        return self.scaled(precise * scale if self.is_one_plus else (precise * scale).astype(x.dtype), x.dtype)


@register_norm("group")
class GroupNorm(Norm):
    """Normalizes groups of one token's channels separately (Wu and He, 2018)."""

    def __init__(self, size: int, eps: float, bias: bool, num_groups: int) -> None:
        super().__init__(size, eps, bias)
        self.num_groups = num_groups

    @classmethod
    def from_config(cls, config: BertBlocksConfig, size: int) -> GroupNorm:
        return cls(size, config.norm_eps, config.norm_bias, config.norm_num_groups)

    def __call__(self, x: Array) -> Array:
        groups = upcast(x).reshape(*x.shape[:-1], self.num_groups, -1)
        return self.scaled(_standardize(groups, self.eps).reshape(x.shape), x.dtype)


@register_norm("dynamic_tanh")
class DynamicTanhNorm(Norm):
    """weight * tanh(alpha x) + bias, without statistics (Zhu et al., 2025)."""

    def __init__(self, size: int, eps: float, bias: bool, weight: str = "scale") -> None:
        super().__init__(size, eps, bias, weight)
        self.alpha = nnx.Param(jnp.full(1, 0.5))

    def __call__(self, x: Array) -> Array:
        return self.scaled(jnp.tanh(self.alpha * x), x.dtype)


def _standardize(x: Array, eps: float) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + eps)


def get_norm(config: BertBlocksConfig, size: int | None = None) -> Any:
    """Builds the norm that a config names, over `hidden_size` units unless another size is given."""
    norm, size = NORMS[config.norm_fn], size or config.hidden_size
    if hasattr(norm, "from_config"):
        return norm.from_config(config, size)
    return norm(size, config.norm_eps, config.norm_bias)
