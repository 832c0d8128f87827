"""Attention backends, and the choice between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bertblocks.backends.base import AttentionBackend, AttentionPattern
from bertblocks.backends.eager import EagerBackend
from bertblocks.backends.flash import FlashBackend, why_not_flash
from bertblocks.backends.sdpa import SdpaBackend
from bertblocks.registry import Registry

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

BACKENDS: Registry[type[AttentionBackend]] = Registry("attention_backend")
register_backend = BACKENDS.register
register_backend("eager")(EagerBackend)
register_backend("sdpa")(SdpaBackend)
register_backend("flash")(FlashBackend)


def get_backend(config: BertBlocksConfig, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    """The backend that a config names; "auto" is flash-attn where it can run this config, otherwise sdpa."""
    name = config.attention_backend
    if name == "auto":
        alone = config.num_global_tokens == 0 and config.block_pos_enc_kind in ("none", "rope", "alibi")
        name = "flash" if alone and why_not_flash(device, dtype) is None else "sdpa"
    return BACKENDS[name]()


__all__ = [
    "BACKENDS",
    "AttentionBackend",
    "AttentionPattern",
    "EagerBackend",
    "FlashBackend",
    "SdpaBackend",
    "get_backend",
    "register_backend",
]
