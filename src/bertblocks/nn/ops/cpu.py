"""What runs fast on this CPU, decided by its flags so that results do not vary from run to run."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from bertblocks.core.cpu import has_amx, is_intel


@cache
def is_onednn_faster() -> bool:
    """True on x86 CPUs with AVX512 that are not Intel's: MKL has AVX512 kernels for Intel only."""
    cpu = torch.cpu.get_capabilities()
    is_intel_cpu = "intel" in str(cpu.get("cpu_name", "")).lower()
    return torch.backends.mkldnn.is_available() and bool(cpu.get("avx512_f")) and not is_intel_cpu


def has_fast_bf16_products() -> bool:
    """True if AVX512 multiplies bf16 numbers faster than fp32 ones.

    Intel's does not: 154 against 274 GFLOP/s in fp32 on a Sapphire Rapids without AMX.
    """
    return torch.cpu._is_avx512_bf16_supported() and not is_intel()


def has_bf16_units(device: torch.device) -> bool:
    """True if the device multiplies bf16 matrices faster than fp32 ones."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and (has_fast_bf16_products() or has_amx())


def is_half_slow(x: Tensor) -> bool:
    """True if attention's many small products run slower in x's half precision than in fp32."""
    is_half = x.dtype in (torch.bfloat16, torch.float16)
    return is_half and x.device.type == "cpu" and not torch.compiler.is_compiling() and not has_amx()


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Treat denormal numbers as 0 inside the block: they can slow an x86 CPU down tenfold.

    The setting applies to this thread and the threads it starts, and is restored afterwards.
    """
    was_flushing = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)
