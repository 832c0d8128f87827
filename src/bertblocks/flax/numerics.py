"""Care with floating point."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def upcast(x: Array) -> Array:
    """x in fp32 if it is in half precision, otherwise as it is."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def lowest(dtype: jnp.dtype) -> float:
    """The lowest number of a type: in place of -inf, so that a softmax over nothing has no NaN in it."""
    return float(jnp.finfo(dtype).min)


def cross_entropy(logits: Array, labels: Array, counted: Array) -> Array:
    """The mean over the `counted` entries of the last axis' cross-entropies; 0 if there are none."""
    chosen = jnp.where(counted, labels, 0)
    log_shares = jax.nn.log_softmax(upcast(logits))
    losses = -jnp.take_along_axis(log_shares, chosen[..., None], axis=-1)[..., 0]
    return jnp.where(counted, losses, 0.0).sum() / jnp.maximum(counted.sum(), 1)
