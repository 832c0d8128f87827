"""What this CPU can do and how much of it the process may use. Imports no torch, so it can run before torch does."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import platform
from collections.abc import Iterator
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
#: The CPUID leaf that describes AMX tiles.
TILE_LEAF = 0x1D
#: oneDNN's name for the largest instruction set below AMX.
BELOW_AMX = "AVX512_CORE_FP16"
#: How many compiled operations oneDNN keeps, 1,024 by default. Every shape needs its own, of about half a megabyte, so
#: ragged batches in fp32 would fill the cache with what is not used again. A step of training in bf16 needs about 20,
#: and its counts of rows come back.
CACHED_PRIMITIVES = 256
#: glibc's numbers of two limits: free memory at the end of the heap above the first returns to the system, and a block
#: above the second is requested from the system alone.
TRIM, ALONE = -1, -3
#: The largest values that glibc sets by itself.
OWN_LIMITS = {TRIM: 2**26, ALONE: 2**25}


@cache
def cpu_info() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; empty where that file does not exist."""
    if platform.machine() not in ("x86_64", "AMD64", "aarch64") or not CPUINFO.is_file():
        return {}
    first = CPUINFO.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_flags() -> frozenset[str]:
    """The instruction sets by Linux' names: x86's flags or ARM's features."""
    info = cpu_info()
    return _words(info.get("flags") or info.get("Features", ""))


@cache
def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def is_intel() -> bool:
    return cpu_info().get("vendor_id") == "GenuineIntel"


def has_amx() -> bool:
    """True if the CPU has working AMX tiles for bf16."""
    return "amx_bf16" in cpu_flags() and not is_amx_broken()


def is_amx_broken() -> bool:
    """True if the CPU reports AMX but does not describe its tiles, as on some virtual machines.

    oneDNN then configures tiles of size 0, and the first bf16 product ends the process with an illegal instruction.
    """
    level = cpu_info().get("cpuid level", "")
    return "amx_tile" in cpu_flags() and level.isdigit() and int(level) < TILE_LEAF


def configure_onednn() -> None:
    """Keep oneDNN from using AMX where that would crash, and bound its cache. It reads both once, at its first use."""
    if is_amx_broken():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", BELOW_AMX)
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(CACHED_PRIMITIVES))


def allowed_cpus() -> int:
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
def kept_memory() -> Iterator[None]:
    """Keep freed memory for the next allocation inside the block, and return it to the system afterwards.

    A training step needs the same large tensors as the one before. With glibc's limits the system takes back and
    clears many of them each time: 13,400 page faults in a step of MiniLM on 32 texts in place of 1,600. Other C
    libraries than glibc are left alone.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "malloc_trim"):
        yield
        return
    for limit in OWN_LIMITS:
        library.mallopt(limit, 2**31 - 1)
    try:
        yield
    finally:
        for limit, value in OWN_LIMITS.items():
            library.mallopt(limit, value)
        library.malloc_trim(0)
