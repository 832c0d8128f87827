"""What this machine runs best: device, threads, dtype, and how many tokens at once."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from bertblocks.nn.numerics import has_bf16_units

CORE_TOKENS, GPU_TOKENS = 1024, 32768


def choose_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_threads() -> int:
    """As many as torch would take, but no more than this process may use: torch does not see a container's limit."""
    return max(1, min(torch.get_num_threads(), _allowed_cpus()))


def choose_token_budget(device: torch.device, threads: int) -> int:
    """Enough to keep the cores busy; more does not help a CPU, whose caches then overflow."""
    return min(CORE_TOKENS * max(threads, 2), GPU_TOKENS) if device.type == "cpu" else GPU_TOKENS


def choose_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the hardware has units for it, float32 elsewhere; by its flags, so that results do not vary."""
    return torch.bfloat16 if has_bf16_units(device) else torch.float32


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
