"""Attention of short sequences with gradients, in the C kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertblocks.nn.ops.int8 import AttentionCall, Kernel


class CompiledAttention(torch.autograd.Function):
    """softmax(q k^T) v with dropout on the weights. The backward pass computes the weights and the dropout again."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, call: AttentionCall, rate: float, seed: int
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.options = kernel, call, rate, seed
        return kernel.attention_with_dropout(q, k, v, call, rate, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        kernel, *options = ctx.options
        return *kernel.attention_gradients(*ctx.saved_tensors, gradient, *options), None, None, None, None
