"""Plain matrix products: the reference for all other backends.

No other backend returns attention weights or computes them by a function other than softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.backends.base import AttentionBackend, AttentionContext, merge_heads, repeat_kv, split_heads
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.numerics import upcast


class EagerBackend(AttentionBackend):
    """Supports every pattern and layout: a rectangle in one call, ragged sequences one by one."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        layout = context.layout
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if layout.rectangle is not None:
            q, k, v = (split_heads(x, layout.rectangle[0]) for x in (q, k, v))
            return merge_heads(_apply(_weigh(q, k, context), v, context))
        outputs = []
        for tokens in layout.slices():
            sequence_q, sequence_k, sequence_v = (split_heads(x[tokens], 1) for x in (q, k, v))
            outputs.append(merge_heads(_apply(_weigh(sequence_q, sequence_k, context), sequence_v, context)))
        return torch.cat(outputs) if outputs else q

    def attend_with_weights(
        self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return the attended values and the weights of all sequences as `[rows, heads, length, length]` in `dtype`.

        Rows are those of the padded batch or, for packed input, the sequences; padding has the weight 0. The values
        are computed from the returned tensor, so gradients reach it.
        """
        layout = context.layout
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if layout.rectangle is not None:
            batch_q, batch_k, batch_v = (split_heads(x, layout.rectangle[0]) for x in (q, k, v))
            weights = _Padding(layout).pad(list(_weigh(batch_q, batch_k, context)), q.shape[1], dtype)
            sequences = torch.stack(_Padding(layout).unpad(weights)).to(v.dtype)
            return merge_heads(_apply(sequences, batch_v, context)), weights
        queries, keys, values = ([split_heads(x[tokens], 1) for tokens in layout.slices()] for x in (q, k, v))
        parts = [_weigh(*pair, context)[0] for pair in zip(queries, keys, strict=True)]
        weights = _Padding(layout).pad(parts, q.shape[1], dtype)
        outputs = [
            merge_heads(_apply(part[None].to(v.dtype), value, context))
            for part, value in zip(_Padding(layout).unpad(weights), values, strict=True)
        ]
        return torch.cat(outputs) if outputs else q, weights


class RandomBackend(EagerBackend):
    """Hides the token itself and a random share of the other tokens from each query, for training objectives.

    The pairs that are hidden in a sequence follow from its seed, the same in all heads. With `sees_first`, the first
    token is never hidden.
    """

    def __init__(self, seeds: Sequence[int], hidden_share: float, sees_first: bool = False) -> None:
        self.seeds, self.hidden_share, self.sees_first = seeds, hidden_share, sees_first

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        outputs = []
        for tokens, seed in zip(context.layout.slices(), self.seeds, strict=True):
            shown = self.draw_visible(tokens.stop - tokens.start, seed, q.device)

            def weigh(scores: Tensor, visible: Tensor, shown: Tensor = shown) -> Tensor:
                return masked_softmax(scores, visible & shown, context.sinks)

            own_context = replace(context, weigh=weigh)
            sequence_q, sequence_k, sequence_v = (split_heads(x[tokens], 1) for x in (q, k, v))
            outputs.append(merge_heads(_apply(_weigh(sequence_q, sequence_k, own_context), sequence_v, own_context)))
        return torch.cat(outputs) if outputs else q

    def draw_visible(self, length: int, seed: int, device: torch.device) -> Tensor:
        """Which tokens `[length, length]` each query of a sequence sees."""
        random = torch.Generator(device).manual_seed(seed)
        visible = torch.rand(length, length, generator=random, device=device) >= self.hidden_share
        visible.fill_diagonal_(False)
        if self.sees_first:
            visible[:, 0] = True
        return visible


class _Padding:
    """Where the weights of every non-empty sequence are in a padded `[rows, heads, length, length]` tensor."""

    def __init__(self, layout: SequenceLayout) -> None:
        self.layout = layout
        self.length = layout.max_length if layout.is_packed else layout.shape[-1]
        sizes = [tokens.stop - tokens.start for tokens in layout.slices()]
        if layout.slots is None or layout.is_packed:
            self.columns = [torch.arange(size, device=layout.device) for size in sizes]
        else:
            self.columns = list((layout.slots % self.length).split(sizes))
        self.rows = [row for row, size in enumerate(layout.lengths) if size] or range(len(sizes))

    def pad(self, weights: list[Tensor], num_heads: int, dtype: torch.dtype) -> Tensor:
        rows, length = self.layout.num_sequences, self.length
        padded = torch.zeros(rows, num_heads, length, length, dtype=dtype, device=self.layout.device)
        for row, columns, weight in zip(self.rows, self.columns, weights, strict=True):
            padded[row][:, columns[:, None], columns] = weight.to(dtype)
        return padded

    def unpad(self, padded: Tensor) -> list[Tensor]:
        places = zip(self.rows, self.columns, strict=True)
        return [padded[row][:, columns[:, None], columns] for row, columns in places]


def _weigh(
    q: Tensor,  # [rows, heads, length, d]
    k: Tensor,
    context: AttentionContext,
) -> Tensor:
    pattern, key_mask = context.pattern, context.layout.key_mask
    index = torch.arange(q.shape[2], device=q.device)
    scores = upcast(q @ k.transpose(-2, -1)) * context.scale
    if (bias := pattern.bias(index[:, None], index, scores.dtype)) is not None:
        scores = scores + bias
    if context.relative is not None:
        scores = scores + upcast(context.relative.scores(q, k)) * context.scale
    visible = pattern.visible(index[:, None], index)
    if key_mask is not None:
        visible = visible & key_mask[:, None, None]
    if context.weigh is not None:
        return context.weigh(scores, visible).to(q.dtype)
    return masked_softmax(scores, visible, context.sinks).to(q.dtype)


def masked_softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the visible keys and the sink of the head; a query that sees none gets weights of 0."""
    # the lowest finite number instead of -inf: softmax over a query that sees nothing must not give NaN
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is None:
        return scores.softmax(dim=-1).masked_fill(~visible, 0.0)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1].masked_fill(~visible, 0.0)


def _apply(weights: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    return F.dropout(weights, context.dropout) @ v
