"""Attention backends and the choice between them."""

from __future__ import annotations

import torch

from bertblocks.core.registry import Registry
from bertblocks.nn.backends.base import AttentionBackend, AttentionContext, AttentionPattern
from bertblocks.nn.backends.cpu import CpuBackend
from bertblocks.nn.backends.eager import EagerBackend
from bertblocks.nn.backends.flash import FlashBackend
from bertblocks.nn.backends.sdpa import SdpaBackend
from bertblocks.nn.backends.short import TritonBackend
from bertblocks.nn.layout import is_capturing
from bertblocks.nn.ops.gpu import describe_gpu

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention_backend", reserved=("auto",))
register_backend = BACKENDS.register
register_backend("eager")(EagerBackend)
register_backend("sdpa")(SdpaBackend)
register_backend("flash")(FlashBackend)
register_backend("cpu")(CpuBackend)
register_backend("triton")(TritonBackend)


def get_backend(name: str, device: torch.device) -> AttentionBackend:
    """Return a backend by name.

    "auto" is cpu on a CPU. On CUDA, each layer runs on flash if it can and on sdpa otherwise; other devices, and
    captured graphs, run on sdpa.
    """
    if name == "auto" and device.type == "cuda" and not is_capturing():
        return FlashBackend(SdpaBackend(), describe_gpu(device))
    if name == "auto":
        name = "cpu" if device.type == "cpu" else "sdpa"
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
