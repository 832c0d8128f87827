"""The own Triton kernel for batches of short sequences, which runs if it is asked for by name."""

from __future__ import annotations

import importlib.util

from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionContext
from bertblocks.nn.backends.graph import is_opaque

LONGEST, LARGEST_HEAD = 128, 128


def why_not_short(q: Tensor, context: AttentionContext) -> str | None:
    """Return why the kernel cannot run a call, or None if it can."""
    if not q.is_cuda:
        return f"the model is on {q.device.type}, and Triton needs CUDA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if context.layout.max_length > LONGEST:
        return f"the batch has a sequence of {context.layout.max_length} tokens, and the kernel takes {LONGEST}"
    if q.shape[-1] > LARGEST_HEAD:
        return f"the head size is {q.shape[-1]}, and the kernel takes {LARGEST_HEAD}"
    if context.layout.key_mask is not None:
        return "the batch keeps its padding (unpad=False, a mask with holes)"
    if not is_opaque(context.pattern, context.dropout):
        return "the kernel has no dropout, biases, sinks and global tokens"
    return None


class TritonBackend(AttentionBackend):
    """Runs sequences of up to 128 tokens in one program per head; raises an error that names what it cannot run."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        if (reason := why_not_short(q, context)) is not None:
            raise ValueError(f"attention_backend is 'triton' but {reason}; use 'auto'.")
        from bertblocks.nn.ops.short_attention import short_attention

        layout, pattern = context.layout, context.pattern
        reach = -1 if pattern.half_window is None else pattern.half_window
        return short_attention(q, k, v, layout.cu_seqlens, layout.max_length, context.scale, reach, pattern.is_causal)
