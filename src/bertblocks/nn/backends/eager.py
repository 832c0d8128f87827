"""Plain matrix products: the reference for all other backends, and the only one that returns attention weights."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionContext, merge_heads, repeat_kv, split_heads
from bertblocks.nn.numerics import upcast


class EagerBackend(AttentionBackend):
    """Supports every pattern and layout: a rectangle in one call, ragged sequences one by one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        return self.attend_with_weights(q, k, v, context)[0]

    def attend_with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the attended values and, for each non-empty sequence, its weights `[heads, length, length]`."""
        layout = context.layout
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if layout.rectangle is not None:
            q, k, v = (split_heads(x, layout.rectangle[0]) for x in (q, k, v))
            out, weights = _attend(q, k, v, context)
            return merge_heads(out), list(weights)
        outputs, all_weights = [], []
        for tokens in layout.slices():
            sequence_q, sequence_k, sequence_v = (split_heads(x[tokens], 1) for x in (q, k, v))
            out, weights = _attend(sequence_q, sequence_k, sequence_v, context)
            outputs.append(merge_heads(out))
            all_weights.append(weights[0])
        return torch.cat(outputs) if outputs else q, all_weights


def _attend(
    q: Tensor,  # [rows, heads, length, d]
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
) -> tuple[Tensor, Tensor]:
    pattern, key_mask = context.pattern, context.layout.key_mask
    index = torch.arange(q.shape[2], device=q.device)
    scores = upcast(q @ k.transpose(-2, -1)) * context.scale
    if (bias := pattern.bias(index[:, None], index, scores.dtype)) is not None:
        scores = scores + bias
    visible = pattern.visible(index[:, None], index)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    # the lowest finite number instead of -inf: softmax over a query that sees nothing must not give NaN
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    weights = scores.softmax(dim=-1).masked_fill(~visible, 0.0).to(q.dtype)
    return F.dropout(weights, context.dropout) @ v, weights
