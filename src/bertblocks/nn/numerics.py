"""Precision of floating-point arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """Convert half precision to fp32; leave other dtypes alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
