"""Chooses what suits the machine: device, threads, dtype, and tokens per batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from bertblocks.core.cpu import allowed_cpus
from bertblocks.nn.ops.cpu import has_bf16_units

#: Tokens per batch for each CPU thread, and on a GPU.
CORE_TOKENS, GPU_TOKENS = 1024, 32768


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_threads() -> int:
    """Returns torch's number of threads, capped at the CPUs this process may use: torch ignores container limits."""
    return max(1, min(torch.get_num_threads(), allowed_cpus()))


def choose_token_budget(device: torch.device, threads: int) -> int:
    """Returns enough tokens to keep the cores busy. More does not help a CPU, because its caches overflow."""
    return min(CORE_TOKENS * max(threads, 2), GPU_TOKENS) if device.type == "cpu" else GPU_TOKENS


def choose_dtype(device: torch.device) -> torch.dtype:
    """Returns bfloat16 where the hardware has units for it and float32 elsewhere.

    The choice follows hardware flags rather than timings, so a machine always gives the same results.
    """
    return torch.bfloat16 if has_bf16_units(device) else torch.float32


@contextlib.contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Sets torch's number of threads inside a `with` block and restores the caller's afterwards; None keeps it."""
    before = torch.get_num_threads()
    if threads is None or threads == before:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
