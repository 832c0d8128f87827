"""The own Triton kernel for batches of short sequences, which runs if it is asked for by name."""

from __future__ import annotations

from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionContext
from bertblocks.nn.backends.graph import is_opaque
from bertblocks.nn.backends.kernels import HALF
from bertblocks.nn.ops.gpu import describe_gpu, why_not_triton

LONGEST, LARGEST_HEAD = 128, 64
#: The bytes of shared memory that the gradients of the longest sequences need, according to Triton's compiler.
SHARED_MEMORY = 114_712


def why_not_short(q: Tensor, context: AttentionContext) -> str | None:
    """Return why the kernel cannot run a call, or None if it can."""
    gpu = describe_gpu(q.device)
    if gpu is None:
        return f"the model is on {q.device.type}, and Triton needs CUDA"
    if (reason := why_not_triton(gpu)) is not None:
        return reason
    if q.dtype not in HALF:
        return f"the model computes in {str(q.dtype).removeprefix('torch.')}, and the kernel in float16 and bfloat16"
    longest = LONGEST if gpu.shared_memory >= SHARED_MEMORY else LONGEST // 2
    if context.layout.max_length > longest:
        length = context.layout.max_length
        return f"the batch has a sequence of {length} tokens, and the kernel takes {longest} on {gpu.name}"
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
