"""Precision of floating-point arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from bertblocks.nn.layout import is_capturing


def upcast(x: Tensor) -> Tensor:
    """Convert half precision to fp32; leave other dtypes alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def add_epsilon(x: Tensor, eps: float) -> Tensor:
    """Add a small constant to a number that is 0 only if the vector that it divides is 0.

    torch's ONNX exporter drops constants below 1e-8, so that 0 / 0 would follow. Any divisor of 0 will do, and a
    captured graph has 1.
    """
    return torch.where(x == 0, 1.0, x + eps) if is_capturing() else x + eps
