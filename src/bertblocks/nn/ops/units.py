"""Activations and gated units in the C kernel, with gradients.

In bf16 torch takes six passes over the memory of a gated unit and its gradient; the kernel takes two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertblocks.nn.ops.kernels import Kernel


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
