"""What this CPU can do, read before torch is imported."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
#: The CPUID leaf that describes AMX tiles.
TILE_LEAF = 0x1D
#: The largest instruction set below AMX, in oneDNN's words.
BELOW_AMX = "AVX512_CORE_FP16"


@cache
def cpu_info() -> dict[str, str]:
    """The first processor's lines in /proc/cpuinfo; empty where there is no such file."""
    if platform.machine() not in ("x86_64", "AMD64") or not CPUINFO.is_file():
        return {}
    first = CPUINFO.read_text(encoding="utf-8").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def cpu_flags() -> frozenset[str]:
    return frozenset(cpu_info().get("flags", "").split())


def is_intel() -> bool:
    return cpu_info().get("vendor_id") == "GenuineIntel"


def has_amx() -> bool:
    """True for CPUs whose AMX tiles can be used for bf16."""
    return "amx_bf16" in cpu_flags() and not is_amx_broken()


def is_amx_broken() -> bool:
    """True if the CPU claims AMX and does not describe its tiles, as on some virtual machines.

    oneDNN then configures tiles of size 0, and the first bf16 product ends the process with an illegal instruction.
    """
    level = cpu_info().get("cpuid level", "")
    return "amx_tile" in cpu_flags() and level.isdigit() and int(level) < TILE_LEAF


def avoid_broken_amx() -> None:
    """Keeps oneDNN from AMX where it would crash. It reads the variable at its first product, and never again."""
    if is_amx_broken():
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", BELOW_AMX)
