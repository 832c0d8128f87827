"""In which precision matrices are multiplied."""

from __future__ import annotations

import contextlib

import torch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wanted: str, device: torch.device) -> str:
    """The precision of a run: `auto` is bf16 on GPUs that have it and fp32 elsewhere."""
    if wanted != "auto":
        return wanted
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])
