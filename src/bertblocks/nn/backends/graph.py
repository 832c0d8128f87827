"""Attention over a ragged batch as one opaque operation, so that a graph of a layer does not depend on lengths.

On CUDA, torch's `varlen_attn` is such an operation already; this one stands in for it on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionPattern

#: Queries of a sequence whose weights are held together.
QUERIES_AT_ONCE = 512


def _chunks(
    q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float, reach: int, is_causal: bool
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """For some queries at a time: their tokens, those of their sequence, its keys `[heads, n, d]`, and the weights."""
    pattern = AttentionPattern(None if reach < 0 else reach, is_causal=is_causal)
    groups = q.shape[1] // k.shape[1]
    for first, last in itertools.pairwise(cu_seqlens.tolist()):
        tokens = slice(first, last)
        keys = k[tokens].repeat_interleave(groups, dim=1).transpose(0, 1)
        columns = torch.arange(last - first)
        for start in range(first, last, QUERIES_AT_ONCE):
            own = slice(start, min(start + QUERIES_AT_ONCE, last))
            rows = torch.arange(own.start - first, own.stop - first)[:, None]
            scores = q[own].transpose(0, 1) @ keys.transpose(1, 2) * scale
            visible = pattern.visible(rows, columns)
            yield own, tokens, keys, scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)


@torch.library.custom_op("bertblocks::ragged_attention", mutates_args=())
def ragged_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, reach: int, is_causal: bool
) -> Tensor:
    """Attend within each sequence, up to `reach` tokens away if it is not negative."""
    groups, out = q.shape[1] // k.shape[1], torch.empty_like(q, memory_format=torch.contiguous_format)
    for own, tokens, _, weights in _chunks(q, k, cu_seqlens, scale, reach, is_causal):
        values = v[tokens].repeat_interleave(groups, dim=1).transpose(0, 1)
        out[own] = (weights @ values).transpose(0, 1)
    return out


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
    groups = q.shape[1] // k.shape[1]
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    for own, tokens, keys, weights in _chunks(q, k, cu_seqlens, scale, reach, is_causal):
        values = v[tokens].repeat_interleave(groups, dim=1).transpose(0, 1)
        queries, of_out = (x[own].transpose(0, 1) for x in (q, gradient))
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
