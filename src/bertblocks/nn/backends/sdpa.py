"""torch's scaled_dot_product_attention on any device, without padding and without n x n work in local layers."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.backends.base import (
    AttentionBackend,
    AttentionContext,
    AttentionPattern,
    merge_heads,
    repeat_kv,
    split_heads,
)
from bertblocks.nn.backends.graph import is_opaque, ragged_attention
from bertblocks.nn.layout import SequenceLayout, is_capturing, is_symbolic
from bertblocks.nn.ops.attention import add_sink_key

#: A per-head bias with more elements than this is built for a few queries at a time.
MAX_BIAS_ELEMENTS = 2**26


class SdpaBackend(AttentionBackend):
    """Makes one call for a rectangle and cuts local layers into blocks.

    On a CPU it loops over the sequences of a ragged batch. On other devices, where launching a kernel per sequence
    costs more than padding, it pads them to a rectangle.
    """

    #: Number of queries that share a slab of keys in a local layer.
    block_size = 64

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        layout = context.layout
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        if layout.rectangle is not None:
            rows = layout.rectangle[0]
            q, k, v = (split_heads(x, rows) for x in (q, k, v))
            return merge_heads(self._attend(q, k, v, context))
        if is_capturing() and is_opaque(context.pattern, context.dropout):
            reach = -1 if context.pattern.half_window is None else context.pattern.half_window
            return ragged_attention(q, k, v, layout.cu_seqlens, context.scale, reach, context.pattern.is_causal)
        if q.device.type != "cpu":
            return self._attend_padded(q, k, v, context)
        outputs = []
        # split instead of slicing: the gradient of a slice is as large as the whole tensor
        for sequence in zip(*(x.split(layout.lengths) for x in (q, k, v)), strict=True):
            if len(sequence[0]):
                sequence_q, sequence_k, sequence_v = (split_heads(x, 1) for x in sequence)
                outputs.append(merge_heads(self._attend(sequence_q, sequence_k, sequence_v, context)))
        return torch.cat(outputs) if outputs else q

    def _attend_padded(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        padded, slots = context.layout.memo("padded", lambda: pad_layout(context.layout))
        assert padded.rectangle is not None
        rows, length = padded.rectangle
        context = dataclasses.replace(context, layout=padded)
        if padded.key_mask is None:
            return self.attend(q, k, v, context)
        q, k, v = (x.new_zeros(rows * length, *x.shape[1:]).index_copy(0, slots, x) for x in (q, k, v))
        return self.attend(q, k, v, context).index_select(0, slots)

    def is_banded(self, length: int, pattern: AttentionPattern) -> bool:
        """A block costs about twice as much per score as a full matrix, so blocks pay off beyond two slabs of keys."""
        if pattern.half_window is None or is_symbolic(length):
            return False
        return length > 2 * (self.block_size + 2 * pattern.half_window)

    def _fits_one_mask(self, length: int, heads: int, pattern: AttentionPattern) -> bool:
        if self.is_banded(length, pattern):
            return False
        return not pattern.adds_scores or heads * length * length <= MAX_BIAS_ELEMENTS

    def _attend(
        self,
        q: Tensor,  # [rows, heads, length, d]
        k: Tensor,
        v: Tensor,
        context: AttentionContext,
    ) -> Tensor:
        layout, pattern, length = context.layout, context.pattern, q.shape[2]
        if self.is_banded(length, pattern):
            return self._banded(q, k, v, context)
        is_plain = not pattern.adds_scores and layout.key_mask is None and context.sinks is None
        if pattern.is_causal and pattern.half_window is None and is_plain:
            dropout, scale = context.dropout, context.scale
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scale)
        if self._fits_one_mask(length, q.shape[1], pattern):
            mask = _add_relative(self._shared_mask(q, layout, pattern, length), q, k, 0, context)
            return _sdpa(q, k, v, mask, layout.key_mask, context)
        chunks = []
        rows = q.shape[0] if pattern.is_relative else 1
        size = max(1, MAX_BIAS_ELEMENTS // (rows * q.shape[1] * length))
        for start in range(0, length, size):
            queries = slice(start, min(start + size, length))

            def compute(queries: slice = queries) -> Tensor:
                return make_mask(q, pattern, queries, length)

            # autograd would keep a mask for every layer, so they share one
            key = ("sdpa chunk", pattern.memo_key(), queries.start, length, q.dtype)
            mask = layout.memo(key, compute) if torch.is_grad_enabled() and pattern.is_constant else compute()
            chunk = q[:, :, queries]
            mask = _add_relative(mask, chunk, k, -start, context)
            chunks.append(_sdpa(chunk, k, v, mask, layout.key_mask, context))
        return torch.cat(chunks, dim=2)

    def _shared_mask(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, length: int) -> Tensor | None:
        """Return the mask of a whole sequence, or None if every key is seen without a bias.

        Distances do not depend on the length, so all sequences and layers share slices of the longest sequence's mask.
        """
        if pattern.sees_all(length) and not pattern.has_bias:
            return None
        if not pattern.is_constant:
            return make_mask(q, pattern, slice(0, length), length)
        heads, key = q.shape[1], pattern.memo_key()

        def find_longest() -> int:
            return max(n for n in (length, *layout.lengths) if self._fits_one_mask(n, heads, pattern))

        longest = layout.memo(("sdpa longest", key, heads), find_longest)
        whole = layout.memo(("sdpa full", key, q.dtype), lambda: make_mask(q, pattern, slice(0, longest), longest))
        return whole[:, :length, :length]

    def _banded(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """Attend from blocks of queries to the slab of keys within reach: O(length x window)."""
        layout, pattern = context.layout, context.pattern
        assert pattern.half_window is not None
        rows, heads, length, size = q.shape
        block, reach, num_global = self.block_size, pattern.half_window, min(pattern.num_global_tokens, length)
        blocks = -(-length // block)
        slab = block + 2 * reach
        tail = blocks * block - length

        q_blocks = F.pad(q, (0, 0, 0, tail)).unflatten(2, (blocks, block)).transpose(1, 2)
        k_slabs, v_slabs = (  # [rows, blocks, heads, slab, d]
            F.pad(x, (0, 0, reach, reach + tail)).unfold(2, slab, block).permute(0, 2, 1, 4, 3) for x in (k, v)
        )

        def compute() -> Tensor:  # [rows * blocks, heads or 1, block, slab]
            return self._band_mask(q, pattern, length, blocks).repeat(rows, 1, 1, 1)

        key = ("sdpa band", pattern.memo_key(), length, q.dtype)
        mask = layout.memo(key, compute) if pattern.is_constant else compute()
        key_mask = None
        if layout.key_mask is not None:
            slabs = F.pad(layout.key_mask, (reach, reach + tail)).unfold(1, slab, block)  # [rows, blocks, slab]
            key_mask = torch.cat((layout.key_mask[:, None, :num_global].expand(-1, blocks, -1), slabs), dim=2)
            key_mask = key_mask.flatten(0, 1)
        if context.relative is not None:
            relative = context.relative.scores(q_blocks.flatten(0, 1), k_slabs.flatten(0, 1), -reach)
            if num_global:
                front = F.pad(context.relative.scores(q, k[:, :, :num_global]), (0, 0, 0, tail))
                front = front.unflatten(2, (blocks, block)).transpose(1, 2).flatten(0, 1)
                relative = torch.cat((front, relative), dim=3)
            mask = mask + relative * context.scale
        if num_global:
            k_slabs, v_slabs = (
                torch.cat((x[:, None, :, :num_global].expand(-1, blocks, -1, -1, -1), slabs), dim=3)
                for x, slabs in ((k, k_slabs), (v, v_slabs))
            )
        out = _sdpa(q_blocks.flatten(0, 1), k_slabs.flatten(0, 1), v_slabs.flatten(0, 1), mask, key_mask, context)
        out = out.view(rows, blocks, heads, block, size).transpose(1, 2).flatten(2, 3)[:, :, :length]
        if not num_global:
            return out
        whole = AttentionPattern(position=pattern.position)
        global_mask = make_mask(q, whole, slice(0, num_global), length) if whole.has_bias else None
        global_mask = _add_relative(global_mask, q[:, :, :num_global], k, 0, context)
        global_rows = _sdpa(q[:, :, :num_global], k, v, global_mask, layout.key_mask, context)
        return torch.cat((global_rows, out[:, :, num_global:]), dim=2)

    def _band_mask(self, q: Tensor, pattern: AttentionPattern, length: int, blocks: int) -> Tensor:
        """The mask `[blocks, heads or 1, block, globals + slab]` of the window, the sequence's ends and the bias."""
        assert pattern.half_window is not None
        block, reach, num_global = self.block_size, pattern.half_window, min(pattern.num_global_tokens, length)
        starts = torch.arange(blocks, device=q.device)[:, None, None] * block
        queries = starts + torch.arange(block, device=q.device)[:, None]  # [blocks, block, 1]
        keys = starts - reach + torch.arange(block + 2 * reach, device=q.device)  # [blocks, 1, slab]
        # global tokens have their own columns in front
        near = pattern.is_near(queries, keys)
        visible = near & (keys >= num_global) & (keys < length)
        if num_global:
            front = torch.arange(num_global, device=q.device).expand(blocks, 1, -1)
            keys = torch.cat((front, keys), dim=2)
            visible = torch.cat((visible.new_ones(blocks, block, num_global), visible), dim=2)
        bias = pattern.bias(queries, keys, q.dtype)  # [heads, blocks, block, slab]
        # rows past the end of the sequence are dropped later; they see everything so that softmax stays defined
        visible = visible | (queries >= length)
        return _additive(visible, bias, q.dtype).transpose(0, 1)


def pad_layout(layout: SequenceLayout) -> tuple[SequenceLayout, Tensor]:
    """Return a ragged layout as a rectangle, and the slot of every token in it."""
    rows, length = layout.num_sequences, layout.max_length
    padded = SequenceLayout.from_shape(rows, length, layout.device)
    slots = layout.sequence_ids * length + layout.indices
    if any(own != length for own in layout.lengths):
        padded.key_mask = torch.arange(length, device=layout.device) < layout.length_tensor[:, None]
    return padded, slots


def make_mask(q: Tensor, pattern: AttentionPattern, queries: slice, num_keys: int) -> Tensor:
    """Return the additive mask `[heads or 1, queries, keys]` of some queries of a pattern."""
    i = torch.arange(queries.start, queries.stop, device=q.device)[:, None]
    j = torch.arange(num_keys, device=q.device)
    return _additive(pattern.visible(i, j), pattern.bias(i, j, q.dtype), q.dtype)


def _additive(visible: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return 0 or the bias where visible and -inf elsewhere, with heads as the first dimension."""
    base = torch.zeros((1, *visible.shape), dtype=dtype, device=visible.device) if bias is None else bias
    return base.masked_fill(~visible, float("-inf"))


def _add_relative(mask: Tensor | None, q: Tensor, k: Tensor, offset: int, context: AttentionContext) -> Tensor | None:
    """Add the scores with vectors of distances to a mask; keys begin `offset` after queries."""
    if context.relative is None:
        return mask
    scores = context.relative.scores(q, k, offset) * context.scale
    return scores if mask is None else scores + mask


def _sdpa(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key_mask: Tensor | None, context: AttentionContext
) -> Tensor:
    """Attend in one call, with padding keys hidden and 0 for a query that sees nothing."""
    scale, dropout, size = context.scale, context.dropout, v.shape[-1]
    if context.sinks is not None:
        q, k, v = add_sink_key(q, k, v, context.sinks, scale)
        mask = None if mask is None else F.pad(mask, (0, 1))
        key_mask = None if key_mask is None else F.pad(key_mask, (0, 1), value=True)
    if mask is not None and mask.dim() == 3:
        mask = mask[None]  # torch's fused kernel needs four dimensions
    if key_mask is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scale)
        return out[..., :size]
    keys = key_mask[:, None, None]  # [rows, 1, 1, keys]
    visible = keys if mask is None else keys & (mask > float("-inf"))
    sees_any = visible.any(dim=-1, keepdim=True)
    # softmax over nothing is undefined, so a query without keys sees all of them and its result is dropped
    base = q.new_zeros(()) if mask is None else mask.masked_fill(mask == float("-inf"), 0.0)
    combined = base.masked_fill(~visible & sees_any, float("-inf"))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=combined, dropout_p=dropout, scale=scale)
    return out[..., :size] * sees_any
