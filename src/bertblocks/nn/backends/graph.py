"""Attention over a ragged batch as one opaque operation, so that a graph of a layer does not depend on lengths.

On CUDA, torch's `varlen_attn` is such an operation already; this one stands in for it on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionContext, AttentionPattern
from bertblocks.nn.layout import SequenceLayout

#: Queries of a sequence whose weights the backward pass holds together.
QUERIES_AT_ONCE = 512


@torch.library.custom_op("bertblocks::ragged_attention", mutates_args=())
def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, reach: int, is_causal: bool
) -> Tensor:
    """Attend within each sequence, up to `reach` tokens away if it is not negative."""
    from bertblocks.nn.backends import get_backend

    layout = SequenceLayout.from_cu_seqlens(cu_seqlens, (q.shape[0],), q.device)
    pattern = AttentionPattern(None if reach < 0 else reach, is_causal=is_causal)
    return get_backend("auto", q.device).attend(q, k, v, AttentionContext(layout, pattern, scale)).contiguous()


@torch.library.custom_op("bertblocks::ragged_attention_backward", mutates_args=())
def ragged_attention_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    reach: int,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the weights of some queries at a time again, and from them the gradients."""
    layout = SequenceLayout.from_cu_seqlens(cu_seqlens, (q.shape[0],), q.device)
    pattern = AttentionPattern(None if reach < 0 else reach, is_causal=is_causal)
    groups = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for tokens in layout.slices():
        keys, values = (x[tokens].repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))  # [heads, n, d]
        columns = torch.arange(keys.shape[1])
        for start in range(tokens.start, tokens.stop, QUERIES_AT_ONCE):
            own = slice(start, min(start + QUERIES_AT_ONCE, tokens.stop))
            queries, of_out = (x[own].transpose(0, 1) for x in (q, gradient))
            rows = torch.arange(own.start - tokens.start, own.stop - tokens.start)[:, None]
            scores = (queries @ keys.transpose(1, 2) * scale).masked_fill(~pattern.visible(rows, columns), -torch.inf)
            weights = scores.softmax(dim=-1)
            of_weights = of_out @ values.transpose(1, 2)
            of_scores = weights * (of_weights - (weights * of_weights).sum(dim=-1, keepdim=True)) * scale
            dq[own] = (of_scores @ keys).transpose(0, 1)
            dk[tokens] += _sum_groups(of_scores.transpose(1, 2) @ queries, groups)
            dv[tokens] += _sum_groups(weights.transpose(1, 2) @ of_out, groups)
    return dq, dk, dv


def _sum_groups(x: Tensor, groups: int) -> Tensor:
    """Sum the gradients of the query heads that share a key head: `[heads, n, d]` -> `[n, kv_heads, d]`."""
    return x.unflatten(0, (-1, groups)).sum(dim=1).transpose(0, 1)


@ragged_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


@ragged_attention_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens)


def _differentiate(ctx: Any, gradient: Tensor) -> Any:
    return *ragged_attention_backward(gradient, *ctx.saved_tensors, *ctx.options), None, None, None, None


ragged_attention.register_autograd(_differentiate, setup_context=_keep)


def is_opaque(pattern: AttentionPattern, dropout: float) -> bool:
    """True for patterns that `ragged_attention` and `varlen_attn` compute."""
    is_local = pattern.half_window is not None
    return not (dropout or pattern.adds_scores or pattern.has_sinks or (is_local and pattern.num_global_tokens))
