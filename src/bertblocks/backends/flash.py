"""flash-attn's variable-length kernel: CUDA, fp16 or bf16."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from bertblocks.backends.base import AttentionBackend, AttentionPattern
from bertblocks.layout import SequenceLayout


@cache
def flash_attn_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def why_not_flash(device: torch.device, dtype: torch.dtype) -> str | None:
    """What stands in the way of flash-attn for such tensors, or None."""
    if device.type != "cuda":
        return f"the model is on {device.type} and flash-attn needs CUDA"
    if not flash_attn_installed():
        return "the package flash-attn is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the model is in {str(dtype).removeprefix('torch.')} and flash-attn needs float16 or bfloat16"
    return None


class FlashBackend(AttentionBackend):
    """Windows, ALiBi, grouped heads and dropout go into the kernel; what it cannot do is refused by name."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: SequenceLayout,
        pattern: AttentionPattern,
        scale: float,
        dropout: float,
    ) -> Tensor:
        if (reason := why_not_flash(q.device, q.dtype)) is not None:
            raise RuntimeError(f"attention_backend is 'flash' but {reason}; use 'auto' or 'sdpa'.")
        if layout.key_mask is not None:
            raise ValueError(
                "attention_backend 'flash' takes no key mask: unpad the batch (unpad=True and an attention_mask "
                "without holes) or use 'sdpa'."
            )
        if pattern.num_global_tokens and pattern.half_window is not None:
            raise ValueError("attention_backend 'flash' has no global tokens in local layers; use 'sdpa' or 'eager'.")
        slopes = pattern.position.slopes if pattern.position is not None else None
        if pattern.has_bias and slopes is None:
            raise ValueError(
                f"attention_backend 'flash' knows no bias but ALiBi, not {type(pattern.position).__name__}; "
                "use 'sdpa' or 'eager'."
            )
        from flash_attn import flash_attn_varlen_func

        reach = -1 if pattern.half_window is None else pattern.half_window
        return flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.max_length,
            max_seqlen_k=layout.max_length,
            dropout_p=dropout,
            softmax_scale=scale,
            window_size=(reach, reach),
            alibi_slopes=None if slopes is None else torch.tensor(slopes, device=q.device, dtype=torch.float32),
        )
