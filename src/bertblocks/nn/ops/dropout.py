"""Dropout from 16 random bits per element; torch draws a random float for each.

On a 2-core Zen 4, for 516 x 384 elements, this is 6 times as fast as torch's dropout, which took a tenth of a training
step.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: The number of values of 16 bits. The rate is rounded to a multiple of 1 / STEPS.
STEPS = 2**16


def dropout(x: Tensor, rate: float) -> Tensor:
    """Set each element to 0 with probability `rate` and scale the others up to keep the mean."""
    if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing() or not 0 < rate < 1:
        return F.dropout(x, rate)
    return x * draw_factors(torch.empty(x.shape, dtype=x.dtype), rate)


def draw_factors(out: Tensor, rate: float, generator: torch.Generator | None = None) -> Tensor:
    """Fill a contiguous tensor with factors: 0 with probability `rate`, otherwise the value that makes the mean 1."""
    dropped = min(round(rate * STEPS), STEPS - 1)
    words = torch.empty(math.ceil(out.numel() / 4), dtype=torch.int64)
    words.random_(-(2**63), None, generator=generator)  # all 64 bits
    numbers = words.view(torch.int16)[: out.numel()].view(out.shape)
    torch.ge(numbers, dropped - STEPS // 2, out=out)
    return out.mul_(STEPS / (STEPS - dropped))
