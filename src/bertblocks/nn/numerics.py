"""Care with floating point."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from bertblocks.core.cpu import has_amx, is_intel


def upcast(x: Tensor) -> Tensor:
    """x in fp32 if it is in half precision, otherwise as it is."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@contextlib.contextmanager
def flushed_denormals() -> Iterator[None]:
    """Numbers next to 0 count as 0 meanwhile: they can make an x86 CPU ten times slower.

    The setting belongs to this thread and to threads that it starts, and is put back afterwards.
    """
    was_flushing = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)


def has_bf16_units(device: torch.device) -> bool:
    """True if bf16 products are faster than fp32; by the flags of the hardware, so that results do not vary."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Intel's AVX512 multiplies bf16 no faster than fp32: 154 against 274 GFLOP/s on a Sapphire Rapids without AMX
    has_fast_avx512 = torch.cpu._is_avx512_bf16_supported() and not is_intel()
    return device.type == "cpu" and (has_fast_avx512 or has_amx())
