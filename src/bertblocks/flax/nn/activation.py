"""The activations of transformers in JAX."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

Activation = Callable[[Array], Array]


def _gelu(x: Array) -> Array:
    return 0.5 * x * (1 + jax.lax.erf(x * 0.5**0.5))  # jax.nn.gelu takes erfc, three times as long on a CPU


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=True)


def _clipped_gelu(x: Array) -> Array:
    return jnp.clip(_gelu(x), -10, 10)


def _hardswish(x: Array) -> Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


def _laplace(x: Array) -> Array:
    """From MEGA (Ma et al., 2023)."""
    return 0.5 * (1.0 + jax.lax.erf((x - 0.707107) / (0.282095 * math.sqrt(2.0))))


def _linear(x: Array) -> Array:
    return x


def _quick_gelu(x: Array) -> Array:
    return x * jax.nn.sigmoid(1.702 * x)


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def _sqrt_softplus(x: Array) -> Array:
    return jnp.sqrt(jax.nn.softplus(x))


class PReLU(nnx.Module):
    """ReLU with a learned slope below 0."""

    def __init__(self) -> None:
        self.weight = nnx.Param(jnp.full(1, 0.25))

    def __call__(self, x: Array) -> Array:
        return jnp.where(x >= 0, x, self.weight * x)


#: Functions by transformers' names. A class is instantiated for every layer.
ACTIVATIONS: dict[str, Activation | type[PReLU]] = {
    "gelu": _gelu,
    "gelu_10": _clipped_gelu,
    "gelu_accurate": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_python": _gelu,
    "gelu_python_tanh": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "hardswish": _hardswish,
    "laplace": _laplace,
    "leaky_relu": jax.nn.leaky_relu,
    "linear": _linear,
    "mish": jax.nn.mish,
    "prelu": PReLU,
    "quick_gelu": _quick_gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sqrtsoftplus": _sqrt_softplus,
    "swish": jax.nn.silu,
    "tanh": jnp.tanh,
}


def get_activation(name: str) -> Activation:
    activation = ACTIVATIONS[name]
    return activation() if isinstance(activation, type) else activation
