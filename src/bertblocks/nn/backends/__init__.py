"""Attention backends and the choice between them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bertblocks.core.registry import Registry
from bertblocks.nn.backends.base import AttentionBackend, AttentionContext, AttentionPattern
from bertblocks.nn.backends.cpu import CpuBackend
from bertblocks.nn.backends.eager import EagerBackend
from bertblocks.nn.backends.flash import FlashBackend, why_not_flash
from bertblocks.nn.backends.sdpa import SdpaBackend
from bertblocks.nn.layout import SequenceLayout

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention_backend", reserved=("auto",))
register_backend = BACKENDS.register
register_backend("eager")(EagerBackend)
register_backend("sdpa")(SdpaBackend)
register_backend("flash")(FlashBackend)
register_backend("cpu")(CpuBackend)


def get_backend(
    name: str, device: torch.device, dtype: torch.dtype, layout: SequenceLayout, patterns: Sequence[AttentionPattern]
) -> AttentionBackend:
    """Return a backend by name. "auto" picks cpu on a CPU, flash where it can run every pattern, and sdpa otherwise."""
    if name == "auto" and device.type == "cpu":
        name = "cpu"
    elif name == "auto":
        reasons = (why_not_flash(device, dtype, layout, pattern) for pattern in patterns)
        name = "sdpa" if any(reasons) else "flash"
    return BACKENDS[name]()


__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionContext",
    "AttentionPattern",
    "CpuBackend",
    "EagerBackend",
    "FlashBackend",
    "SdpaBackend",
    "get_backend",
    "register_backend",
]
