"""Attention over many short sequences in Triton: a program holds all scores of one sequence and head.

Sequences have up to 128 tokens and any lengths, with windows, causal order and grouped heads. No two programs add to
the same number, so gradients are deterministic. The numbers are checked in Triton's interpreter; the kernels have not
run on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: The longest sequence whose scores fit one program.
LONGEST = 128


@triton.jit
def _load(start, bounds, head, HEADS: tl.constexpr, SIZE: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One head of the program's sequence, the offsets of its numbers, and which of them exist."""
    first = tl.load(bounds + tl.program_id(0)).to(tl.int64)
    count = tl.load(bounds + tl.program_id(0) + 1) - first
    rows, columns = tl.arange(0, LENGTH)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (rows < count) & (columns < SIZE)
    offsets = ((first + rows) * HEADS + head) * SIZE + columns
    return tl.load(start + offsets, mask=inside, other=0.0), offsets, inside


@triton.jit
def _weights(q, k, bounds, scale, reach, CAUSAL: tl.constexpr, LENGTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """The softmax of one sequence and head. Rows past its end see themselves, so that no sum is 0."""
    count = tl.load(bounds + tl.program_id(0) + 1) - tl.load(bounds + tl.program_id(0))
    rows = tl.arange(0, LENGTH)[:, None]
    columns = tl.arange(0, LENGTH)[None, :]
    visible = (columns < count) & (tl.abs(rows - columns) <= reach)
    if CAUSAL:
        visible = visible & (columns <= rows)
    visible = visible | (rows == columns)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    q_start, k_start, v_start, out_start, bounds, scale, reach,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    q, of_q, inside = _load(q_start, bounds, head, HEADS, SIZE, LENGTH, WIDTH)
    k, _of_k, inside = _load(k_start, bounds, head // GROUPS, HEADS // GROUPS, SIZE, LENGTH, WIDTH)
    v, _of_v, inside = _load(v_start, bounds, head // GROUPS, HEADS // GROUPS, SIZE, LENGTH, WIDTH)
    weights = _weights(q, k, bounds, scale, reach, CAUSAL, LENGTH)
    out = tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    tl.store(out_start + of_q, out.to(v.dtype), mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient_start, q_start, k_start, v_start, dq_start, dk_start, dv_start, bounds, scale, reach,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    CAUSAL: tl.constexpr, LENGTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(1)
    k, of_kv, inside = _load(k_start, bounds, kv_head, HEADS // GROUPS, SIZE, LENGTH, WIDTH)
    v, of_kv, inside = _load(v_start, bounds, kv_head, HEADS // GROUPS, SIZE, LENGTH, WIDTH)
    dk = tl.zeros((LENGTH, WIDTH), dtype=tl.float32)
    dv = tl.zeros((LENGTH, WIDTH), dtype=tl.float32)
    for group in range(GROUPS):
        head = kv_head * GROUPS + group
        q, of_q, inside = _load(q_start, bounds, head, HEADS, SIZE, LENGTH, WIDTH)
        gradient, of_q, inside = _load(gradient_start, bounds, head, HEADS, SIZE, LENGTH, WIDTH)
        weights = _weights(q, k, bounds, scale, reach, CAUSAL, LENGTH)
        of_weights = tl.dot(gradient, tl.trans(v), input_precision="ieee")
        of_scores = weights * (of_weights - tl.sum(weights * of_weights, axis=1)[:, None]) * scale
        dv += tl.dot(tl.trans(weights.to(v.dtype)), gradient, input_precision="ieee")
        dk += tl.dot(tl.trans(of_scores.to(q.dtype)), q, input_precision="ieee")
        dq = tl.dot(of_scores.to(k.dtype), k, input_precision="ieee")
        tl.store(dq_start + of_q, dq.to(q.dtype), mask=inside)
    tl.store(dk_start + of_kv, dk.to(k.dtype), mask=inside)
    tl.store(dv_start + of_kv, dv.to(v.dtype), mask=inside)


class ShortAttention(torch.autograd.Function):
    """Attention over flat tokens; `reach` is the distance to which a query sees, -1 for all."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Any, k: Any, v: Any, bounds: Any, longest: int, scale: float, reach: int, is_causal: bool
    ) -> Any:
        q, k, v = (x.contiguous() for x in (q, k, v))
        heads, kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
        ctx.options = {
            "scale": scale,
            "reach": LONGEST if reach < 0 else reach,
            "HEADS": heads,
            "GROUPS": heads // kv_heads,
            "SIZE": size,
            "CAUSAL": is_causal,
            "LENGTH": max(16, triton.next_power_of_2(longest)),
            "WIDTH": max(16, triton.next_power_of_2(size)),
        }
        ctx.save_for_backward(q, k, v, bounds)
        out = torch.empty_like(q)
        with torch.cuda.device_of(q):
            _forward[len(bounds) - 1, heads](q, k, v, out, bounds, **ctx.options)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        q, k, v, bounds = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        grid = (len(bounds) - 1, k.shape[1])
        with torch.cuda.device_of(q):
            _backward[grid](gradient.contiguous(), q, k, v, dq, dk, dv, bounds, **ctx.options)
        return dq, dk, dv, None, None, None, None, None


def short_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float, reach: int, is_causal: bool
) -> Tensor:
    """Attend within sequences between `bounds`; q is `[tokens, heads, d]`, k and v `[tokens, kv_heads, d]`."""
    return ShortAttention.apply(q, k, v, bounds, longest, scale, reach, is_causal)
