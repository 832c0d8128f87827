"""Care with floating point."""

from __future__ import annotations

import torch
from torch import Tensor


def upcast(x: Tensor) -> Tensor:
    """x in fp32 if it is in half precision, otherwise as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
