"""Activations: all of transformers' and those a user registers."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers.activations import ACT2CLS, ACT2FN

from bertblocks.core.registry import Registry, nearest
from bertblocks.nn.ops.int8 import GELU, GELU_TANH, RELU, SILU

ACTIVATIONS: Registry[Callable[[], nn.Module]] = Registry("hidden_act")


def register_activation(name: str) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Decorator that registers an activation: a module class, or a function that builds the module."""
    if name in ACT2CLS:
        raise ValueError(f"hidden_act: the name {name!r} is taken by transformers; choose another one.")
    return ACTIVATIONS.register(name)


def activation_names() -> list[str]:
    return [*ACTIVATIONS.names(), *ACT2CLS]


def get_activation(name: str) -> nn.Module:
    """Build an activation module by name."""
    if name in ACTIVATIONS:
        return ACTIVATIONS[name]()
    if name not in ACT2CLS:
        known = activation_names()
        raise KeyError(f"{name!r} is not an activation{nearest(name, known)}; choose one of {', '.join(known)}.")
    return ACT2FN[name]


#: The C kernel's code for every activation that it knows.
KERNEL_ACTIVATIONS: dict[type[nn.Module], int] = {
    type(get_activation(name)): number
    for name, number in {
        "relu": RELU,
        "silu": SILU,
        "gelu": GELU,
        "gelu_new": GELU_TANH,
        "gelu_fast": GELU_TANH,
        "gelu_pytorch_tanh": GELU_TANH,
    }.items()
}
