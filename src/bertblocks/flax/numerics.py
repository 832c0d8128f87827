"""Numerically careful functions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def upcast(x: Array) -> Array:
    """Converts half precision to fp32 and leaves other types unchanged."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x


def lowest(dtype: jnp.dtype) -> float:
    """Returns the lowest finite number of a type. Unlike -inf, it gives no NaN in a softmax over nothing."""
    return float(jnp.finfo(dtype).min)


def cross_entropy(logits: Array, labels: Array, counted: Array) -> Array:
    """Returns the mean cross-entropy over the last axis of the `counted` entries; 0 if there are none."""
    chosen = jnp.where(counted, labels, 0)
    log_probabilities = jax.nn.log_softmax(upcast(logits))
    losses = -jnp.take_along_axis(log_probabilities, chosen[..., None], axis=-1)[..., 0]
    return jnp.where(counted, losses, 0.0).sum() / jnp.maximum(counted.sum(), 1)
