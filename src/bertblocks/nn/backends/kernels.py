"""Which GPU kernel runs an attention call: a table of kernels, each with the reasons why it cannot.

Nothing here touches a device, so the choice can be tested, and planned, without one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionContext, AttentionPattern
from bertblocks.nn.ops.gpu import FLASH_IMPLEMENTATIONS, Gpu, why_not_triton

#: flash-attn has ALiBi and deterministic gradients together since this version.
FLASH_ATTN = (2, 4, 1)
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class AttentionCall:
    """What the choice of a kernel depends on."""

    pattern: AttentionPattern
    dtype: torch.dtype
    head_dim: int
    has_dropout: bool = False
    #: Whether padding is hidden by a mask instead of dropped.
    has_key_mask: bool = False

    @classmethod
    def read(cls, q: Tensor, context: AttentionContext) -> AttentionCall:
        has_key_mask = context.layout.key_mask is not None
        return cls(context.pattern, q.dtype, q.shape[-1], context.dropout > 0, has_key_mask)

    @property
    def position(self) -> str:
        return type(self.pattern.position).__name__

    @property
    def has_global_tokens(self) -> bool:
        return self.pattern.num_global_tokens > 0 and self.pattern.half_window is not None


def _why_not_flash(call: AttentionCall, gpu: Gpu) -> str | None:
    """What every flash-attention kernel needs."""
    if gpu.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, and {gpu.name} has {gpu.write_capability()}"
    if call.dtype not in HALF:
        return f"it needs float16 or bfloat16, and the model computes in {str(call.dtype).removeprefix('torch.')}"
    if call.head_dim > 256 or call.head_dim % 8:
        return f"it needs head sizes up to 256 that are multiples of 8, and the layer's is {call.head_dim}"
    if call.has_key_mask:
        return "it cannot hide padding, which the batch keeps (unpad=False, a mask with holes)"
    if call.has_global_tokens:
        return "it has no global tokens (num_global_tokens)"
    if call.pattern.is_relative:
        return f"it cannot add the scores of {call.position}, which depend on queries and keys"
    if call.pattern.has_sinks:
        return "it has no attention_sinks"
    return None


def _why_not_varlen(call: AttentionCall, gpu: Gpu) -> str | None:
    if gpu.is_rocm:
        return "BertBlocks uses it on NVIDIA GPUs only"
    if not gpu.has_varlen:
        return f"it needs torch 2.13 or newer, and this is {torch.__version__}"
    if (reason := _why_not_flash(call, gpu)) is not None:
        return reason
    majors = FLASH_IMPLEMENTATIONS.get(gpu.implementation, ("", "", (gpu.capability[0],)))[2]
    if gpu.capability[0] not in majors:
        return f"torch is switched to {gpu.implementation}, which does not run on {gpu.name}"
    if gpu.implementation == "FA4" and call.head_dim > 128:
        return f"torch is switched to FA4, which has head sizes up to 128, and the layer's is {call.head_dim}"
    if call.has_dropout:
        return "it has no dropout (attention_dropout)"
    return f"it has no bias on scores, and the layer has {call.position}" if call.pattern.has_bias else None


def _why_not_flash_attn(call: AttentionCall, gpu: Gpu) -> str | None:
    if gpu.flash_attn is None:
        other = "; flash-attn-4 is another package, without dropout and ALiBi" if gpu.has_flash_attn_4 else ""
        return f"the package flash-attn (version 2) is not installed{other}"
    if gpu.flash_attn < FLASH_ATTN:
        have, least = (".".join(map(str, version)) for version in (gpu.flash_attn, FLASH_ATTN))
        return f"it needs flash-attn {least} or newer, and {have} is installed"
    if (reason := _why_not_flash(call, gpu)) is not None:
        return reason
    if call.pattern.has_bias and call.pattern.slopes is None:
        return f"its only bias is ALiBi with fixed slopes, and the layer has {call.position}"
    return None


def _why_not_flex(call: AttentionCall, gpu: Gpu) -> str | None:
    if not (call.pattern.adds_scores or call.pattern.has_sinks or call.has_global_tokens):
        return "sdpa runs a layer without biases, sinks and global tokens, and compiles nothing for it"
    if call.has_key_mask:
        return "sdpa runs a batch that keeps its padding, in one call too"
    if (reason := why_not_triton(gpu)) is not None:
        return reason
    if call.dtype == torch.float64:
        return "it has no float64"
    if not 16 <= call.head_dim <= 256:
        return f"it needs head sizes from 16 to 256, and the layer's is {call.head_dim}"
    return "it has no dropout (attention_dropout)" if call.has_dropout else None


#: In order of preference: the kernel, what it is, and why it cannot run a call.
KERNELS: dict[str, tuple[str, Callable[[AttentionCall, Gpu], str | None]]] = {
    "varlen": ("torch's varlen_attn", _why_not_varlen),
    "flash_attn": ("flash-attn", _why_not_flash_attn),
    "flex": ("FlexAttention", _why_not_flex),
}


def choose_kernel(call: AttentionCall, gpu: Gpu | None) -> str | None:
    """Return the first kernel that runs a call, or None if none does."""
    if gpu is None:
        return None
    return next((name for name, (_, why_not) in KERNELS.items() if why_not(call, gpu) is None), None)


def explain(call: AttentionCall, gpu: Gpu | None, device: torch.device) -> str:
    """Say why no kernel runs a call."""
    if gpu is None:
        return f"the model is on {device.type}, and flash needs CUDA"
    reasons = ((label, why_not(call, gpu)) for label, why_not in KERNELS.values())
    return "no kernel runs this layer: " + "; ".join(f"{label}: {reason}" for label, reason in reasons if reason)
