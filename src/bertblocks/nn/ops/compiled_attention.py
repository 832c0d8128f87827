"""Attention of short sequences with gradients, in the C kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertblocks.nn.ops.kernel_arguments import AttentionCall
from bertblocks.nn.ops.kernels import Kernel


class CompiledAttention(torch.autograd.Function):
    """softmax(q k^T) v with dropout on the weights, of q, k and v or of one tensor that holds all three.

    The backward pass computes the weights and the dropout again.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, kernel: Kernel, call: AttentionCall, rate: float, seed: int, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.options = kernel, call, rate, seed
        return kernel.attention_with_dropout(*call.split(tensors), call, rate, seed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        kernel, call, rate, seed = ctx.options
        tensors = ctx.saved_tensors
        results = [torch.empty(x.shape, dtype=x.dtype) for x in tensors]
        kernel.attention_gradients(call.split(tensors), call.split(results), gradient, call, rate, seed)
        return None, None, None, None, *results
