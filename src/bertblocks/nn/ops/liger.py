"""Optional Liger (Triton) kernels, used on CUDA if installed."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor


class LigerKernels:
    """The three Liger operations that speed up encoders, as plain functions."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # offset 0, Llama's casting mode, gradient not in place because x may be the residual stream
        return LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        return LigerSiLUMulFunction.apply(gate.contiguous(), up.contiguous())

    def linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, z_loss: float
    ) -> Tensor:
        """Return the sum of cross-entropies, with the term of the z-loss, without holding all logits."""
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss(lse_square_scale=z_loss, reduction="sum")(weight, hidden, labels, bias)


@cache
def liger_installed() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


def liger(kernel_backend: str, x: Tensor) -> LigerKernels | None:
    """Return the Liger kernels if `kernel_backend` selects them for this tensor, else None.

    "auto" uses them where they run, "torch" never does, and "liger" raises an error where they cannot run.
    """
    if kernel_backend == "torch" or torch.compiler.is_compiling():
        return None
    if x.is_cuda and liger_installed():
        return LigerKernels()
    if kernel_backend == "liger":
        missing = "liger-kernel is not installed" if x.is_cuda else f"the model is on {x.device.type}, not on CUDA"
        raise RuntimeError(f"kernel_backend is 'liger' but {missing}; use 'auto' or 'torch'.")
    return None
