"""Activations and gated units in the C kernel, with gradients.

In bf16 torch takes six passes over the memory of a gated unit and its gradient; the kernel takes two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertblocks.nn.activation import KERNEL_ACTIVATIONS
from bertblocks.nn.linear import is_untouched
from bertblocks.nn.ops.int8 import Kernel, kernel_for


class CompiledUnits(torch.autograd.Function):
    """act(up), or act(first half of up) * second half. Only `up` is kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, up: Tensor, kernel: Kernel, activation: int, gated: bool) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(up)
        ctx.options = kernel, activation, gated
        return kernel.activate(up, activation, gated)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        kernel, activation, gated = ctx.options
        return kernel.activation_gradient(*ctx.saved_tensors, gradient, activation, gated), None, None, None


def activate(up: Tensor, activation: nn.Module, gated: bool) -> Tensor:
    """Apply an activation, or a gated unit if `up` holds gates and values; in the C kernel if it can."""
    number = KERNEL_ACTIVATIONS.get(type(activation))
    kernel = kernel_for(up) if number is not None and is_untouched(activation, type(activation)) else None
    if kernel is not None and number is not None and up.is_contiguous():
        if torch.is_grad_enabled() and up.requires_grad:
            return CompiledUnits.apply(up, kernel, number, gated)
        return kernel.activate(up, number, gated)
    if not gated:
        return activation(up)
    gate, value = up.chunk(2, dim=-1)
    return activation(gate) * value
