"""In which precision matrices are multiplied."""

from __future__ import annotations

import contextlib

import torch

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(wanted: str, device: torch.device) -> str:
    """The precision of a run: `auto` is bf16 on GPUs and CPUs with matrix units for it, and fp32 elsewhere.

    The bf16 dot products of AVX512 do not count: on a Zen 4 they made a step 1.1 to 1.3 times as fast, too little for
    what rounding takes. CPUs without them are several times slower in bf16 than in fp32.
    """
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    return "bf16" if torch.cpu.get_capabilities().get("amx_bf16") else "fp32"


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager:
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=HALF[precision])
