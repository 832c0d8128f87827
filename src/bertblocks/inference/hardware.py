"""What this machine runs best: device, threads, dtype, and how many tokens at once."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

#: Below this gain half precision is not worth its rounding.
WORTHWHILE = 1.4
CORE_TOKENS, GPU_TOKENS = 1024, 32768


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_threads() -> int:
    """As many as torch would take, but no more than this process may use: torch does not see a container's limit."""
    return max(1, min(torch.get_num_threads(), _allowed_cpus()))


def choose_token_budget(device: torch.device, threads: int) -> int:
    """Enough to keep the cores busy; more does not help a CPU, whose caches then overflow."""
    return min(CORE_TOKENS * max(threads, 2), GPU_TOKENS) if device.type == "cpu" else GPU_TOKENS


@functools.cache
def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware multiplies it faster, which on a CPU is measured; float32 elsewhere."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    claims_bfloat16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if device.type == "cpu" and claims_bfloat16:
        gain = _product_seconds(torch.float32) / _product_seconds(torch.bfloat16)
        return torch.bfloat16 if gain >= WORTHWHILE else torch.float32
    return torch.float32


def _product_seconds(dtype: torch.dtype) -> float:
    """The best of a few products of the shape that encoders have: some hundred tokens by a weight matrix."""
    x, weight = torch.ones(256, 768, dtype=dtype), torch.ones(1536, 768, dtype=dtype)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _allowed_cpus() -> int:
    """CPUs this process may run on, or the share of them that its control group grants."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for quota_file, period_file in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        with contextlib.suppress(OSError, ValueError):
            fields = " ".join(Path(file).read_text() for file in (quota_file, period_file) if file).split()
            quota, period = int(fields[0]), int(fields[1])
            if quota > 0 and period > 0:
                return min(cpus, math.ceil(quota / period))
    return cpus


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
