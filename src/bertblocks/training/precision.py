"""The precision of matrix products."""

from __future__ import annotations

import contextlib

import torch

from bertblocks.nn.ops.cpu import has_bf16_units

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wanted: str, device: torch.device) -> str:
    """The precision of a run. `auto` means bf16 on GPUs and CPUs with bf16 units, and fp32 elsewhere."""
    if wanted != "auto":
        return wanted
    return "bf16" if has_bf16_units(device) else "fp32"


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])
