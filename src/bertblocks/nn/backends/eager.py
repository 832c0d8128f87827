"""Plain matrix products: the reference that other backends are held to, and the one that returns weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionPattern, merge_heads, repeat_kv, split_heads
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.numerics import upcast


class EagerBackend(AttentionBackend):
    """Every pattern, every layout, one sequence at a time or a rectangle at once."""

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
        return self.attend_with_weights(q, k, v, layout, pattern, scale, dropout)[0]

    def attend_with_weights(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: SequenceLayout,
        pattern: AttentionPattern,
        scale: float,
        dropout: float,
    ) -> tuple[Tensor, list[Tensor]]:
        """The values and, for each sequence that has tokens, its weights `[heads, length, length]`."""
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if layout.rectangle is not None:
            q, k, v = (split_heads(x, layout.rectangle[0]) for x in (q, k, v))
            out, weights = _attend(q, k, v, layout.key_mask, pattern, scale, dropout)
            return merge_heads(out), list(weights)
        outputs, all_weights = [], []
        for tokens in layout.slices():
            one_q, one_k, one_v = (split_heads(x[tokens], 1) for x in (q, k, v))
            out, weights = _attend(one_q, one_k, one_v, None, pattern, scale, dropout)
            outputs.append(merge_heads(out))
            all_weights.append(weights[0])
        return torch.cat(outputs) if outputs else q, all_weights


def _attend(
    q: Tensor,  # [rows, heads, length, d]
    k: Tensor,
    v: Tensor,
    key_mask: Tensor | None,  # [rows, length]
    pattern: AttentionPattern,
    scale: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    index = torch.arange(q.shape[2], device=q.device)
    scores = upcast(q @ k.transpose(-2, -1)) * scale
    if (bias := pattern.bias(index[:, None], index, scores.dtype)) is not None:
        scores = scores + bias
    visible = pattern.visible(index[:, None], index)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    # the lowest number, not -inf: a query that sees nothing then has weights to zero instead of NaN
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).masked_fill(~visible, 0.0).to(q.dtype)
    return F.dropout(weights, dropout) @ v, weights
