"""flash-attn's variable-length kernel, for CUDA in fp16 or bf16."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionContext, AttentionPattern
from bertblocks.nn.layout import SequenceLayout


@cache
def flash_attn_installed() -> bool:
    return importlib.util.find_spec("flash_attn") is not None


def why_not_flash(
    device: torch.device, dtype: torch.dtype, layout: SequenceLayout, pattern: AttentionPattern
) -> str | None:
    """Return why flash-attn cannot run this, or None if it can."""
    if device.type != "cuda":
        return f"the model is on {device.type} and flash-attn needs CUDA"
    if not flash_attn_installed():
        return "the package flash-attn is not installed"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"the model is in {str(dtype).removeprefix('torch.')} and flash-attn needs float16 or bfloat16"
    if layout.key_mask is not None:
        return "the batch keeps its padding (unpad=False, a mask with holes), which flash-attn cannot hide"
    if pattern.num_global_tokens and pattern.half_window is not None:
        return "a local layer has num_global_tokens, which flash-attn does not support"
    if pattern.has_bias and pattern.slopes is None:
        return f"flash-attn supports no bias except ALiBi, and the layer has {type(pattern.position).__name__}"
    if pattern.is_relative:
        return (
            f"flash-attn cannot add the scores of {type(pattern.position).__name__}, which depend on queries and keys"
        )
    if pattern.has_sinks:
        return "the layer has attention_sinks, which flash-attn cannot add to its softmax"
    return None


class FlashBackend(AttentionBackend):
    """The kernel handles windows, ALiBi, grouped heads and dropout; anything else raises an error that names it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        layout, pattern = context.layout, context.pattern
        if (reason := why_not_flash(q.device, q.dtype, layout, pattern)) is not None:
            raise ValueError(f"attention_backend is 'flash' but {reason}; use 'auto', 'sdpa' or 'eager'.")
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
            dropout_p=context.dropout,
            softmax_scale=context.scale,
            causal=pattern.is_causal,
            window_size=(reach, 0 if pattern.is_causal and reach >= 0 else reach),
            alibi_slopes=None if pattern.slopes is None else torch.tensor(pattern.slopes, device=q.device),
        )
