"""Fused attention on CUDA: one kernel call for all sequences of a batch, chosen by what GPU and layer allow."""

from __future__ import annotations

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionContext
from bertblocks.nn.backends.flex import flex
from bertblocks.nn.backends.kernels import AttentionCall, choose_kernel, explain
from bertblocks.nn.layout import to_device
from bertblocks.nn.ops.gpu import Gpu, describe_gpu


def varlen(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """torch's own kernel, without split keys, so that a sequence's result does not depend on the batch."""
    from torch.nn.attention.varlen import varlen_attn

    layout = context.layout
    return varlen_attn(  # type: ignore[return-value]
        q,
        k,
        v,
        layout.cu_seqlens,
        layout.cu_seqlens,
        layout.max_length,
        layout.max_length,
        scale=context.scale,
        window_size=_window(context),
        enable_gqa=q.shape[1] != k.shape[1],
        num_splits=1,
    )


def flash_attn(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """flash-attn 2, for dropout and ALiBi. Its gradients are deterministic if torch's are."""
    from flash_attn import flash_attn_varlen_func

    layout, slopes = context.layout, context.pattern.slopes
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
        causal=context.pattern.is_causal,
        window_size=_window(context),
        alibi_slopes=None
        if slopes is None
        else layout.memo(("slopes", slopes), lambda: to_device(torch.tensor(slopes), q.device)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _window(context: AttentionContext) -> tuple[int, int]:
    """Return how far a query sees to either side; -1 is without a limit."""
    pattern = context.pattern
    reach = -1 if pattern.half_window is None else pattern.half_window
    return reach, 0 if pattern.is_causal else reach


RUN = {"varlen": varlen, "flash_attn": flash_attn, "flex": flex}


class FlashBackend(AttentionBackend):
    """Runs each call with the first kernel of `KERNELS` that can; a `fallback` takes what none of them can run."""

    def __init__(self, fallback: AttentionBackend | None = None, gpu: Gpu | None = None) -> None:
        self.fallback, self.gpu = fallback, gpu

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        gpu = self.gpu or describe_gpu(q.device)
        call = AttentionCall.read(q, context)
        name = choose_kernel(call, gpu)
        if name is not None:
            return RUN[name](q, k, v, context)
        if self.fallback is not None:
            return self.fallback.attend(q, k, v, context)
        reason = explain(call, gpu, q.device)
        raise ValueError(f"attention_backend is 'flash' but {reason}. Use 'auto', 'sdpa' or 'eager'.")
