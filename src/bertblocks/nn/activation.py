"""Activations: all of transformers' and those a user registers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS, ACT2FN

from bertblocks.core.registry import Registry, nearest
from bertblocks.nn.linear import is_untouched
from bertblocks.nn.ops.kernels import GELU, GELU_TANH, RELU, SILU, kernel_for
from bertblocks.nn.ops.units import CompiledUnits

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


def activate(up: Tensor, activation: nn.Module, gated: bool) -> Tensor:
    """Apply an activation, or a gated unit if `up` holds gates and values; in the C kernel if it can."""
    number = KERNEL_ACTIVATIONS.get(type(activation)) if is_untouched(activation, type(activation)) else None
    if number is not None and up.is_contiguous() and (kernel := kernel_for(up)) is not None:
        if torch.is_grad_enabled() and up.requires_grad:
            return CompiledUnits.apply(up, kernel, number, gated)
        return kernel.activate(up, number, gated)
    if not gated:
        return activation(up)
    gate, value = up.chunk(2, dim=-1)
    return activation(gate) * value
