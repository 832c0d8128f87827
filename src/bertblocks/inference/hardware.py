"""What this machine runs best: device, threads, dtype, and how many tokens at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from bertblocks.core.cpu import allowed_cpus
from bertblocks.nn.ops.cpu import has_bf16_units

CORE_TOKENS, GPU_TOKENS = 1024, 32768


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_threads() -> int:
    """As many as torch would take, but no more than this process may use: torch does not see a container's limit."""
    return max(1, min(torch.get_num_threads(), allowed_cpus()))


def choose_token_budget(device: torch.device, threads: int) -> int:
    """Enough to keep the cores busy; more does not help a CPU, whose caches then overflow."""
    return min(CORE_TOKENS * max(threads, 2), GPU_TOKENS) if device.type == "cpu" else GPU_TOKENS


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has units for it, float32 elsewhere; by its flags, so that results do not vary."""
    return torch.bfloat16 if has_bf16_units(device) else torch.float32


@contextlib.contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """torch's threads for the time of a block; the caller's number is put back."""
    before = torch.get_num_threads()
    if threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
