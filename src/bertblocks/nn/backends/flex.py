"""FlexAttention over flat tokens: biases by distance, vectors of distances, sinks and global tokens in one kernel.

torch.compile makes a kernel per shape, so tokens and distances are padded to a few sizes (`bucket`), and ragged batches
of changing lengths share kernels. Padding is one more sequence, which nothing else sees.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bertblocks.nn.backends.base import AttentionContext
from bertblocks.nn.layout import SequenceLayout

#: Tokens per block of the kernel's sparsity.
BLOCK = 128


def bucket(size: int, least: int = BLOCK) -> int:
    """Round a size up to one of at most eight per power of two, multiples of `least`.

    Example:
        >>> [bucket(size) for size in (1, 128, 1000, 1100, 5000)]
        [128, 128, 1024, 1152, 5120]
    """
    step = max(least, 2 ** max((size - 1).bit_length() - 4, 0))
    return -(-size // step) * step


@cache
def compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
    """Attend over all sequences of a layout without a key mask."""
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask

    layout, tokens = context.layout, q.shape[0]
    size = bucket(tokens)
    q4, k4, v4 = (F.pad(x, (0, 0, 0, 0, 0, size - tokens)).transpose(0, 1)[None] for x in (q, k, v))
    starts, ids = layout.memo(("flex tokens", size), lambda: _token_tables(layout, size))
    pattern = context.pattern
    reach, num_global, is_causal = pattern.half_window, pattern.num_global_tokens, pattern.is_causal

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = ids[i] == ids[j]
        if reach is not None:
            inside = (i - j).abs() <= reach
            if num_global:
                inside = inside | (i - starts[i] < num_global) | (j - starts[j] < num_global)
            near = near & inside
        return near & (j <= i) if is_causal else near

    key = ("flex blocks", size, reach, num_global, is_causal)
    blocks = layout.memo(key, lambda: _block_ranges(layout, size, None if num_global else reach))
    mask = BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=is_visible, seq_lengths=(size, size))
    wants_lse = AuxRequest(lse=True) if context.sinks is not None else None
    out = compiled_flex()(
        q4,
        k4,
        v4,
        score_mod=_score_mod(q4, k4, context),
        block_mask=mask,
        scale=context.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=wants_lse,
    )
    if context.sinks is not None:
        out, aux = out
        # a sink adds exp(sink) to the denominator of the softmax
        out = out * torch.sigmoid(aux.lse - context.sinks.float()[:, None])[..., None].to(out.dtype)
    return out[0, :, :tokens].transpose(0, 1)


def _score_mod(q: Tensor, k: Tensor, context: AttentionContext) -> Callable[..., Tensor] | None:
    """What is added to the score of each pair, from tables over distances; None for nothing."""
    pattern, relative = context.pattern, context.relative
    reach = bucket(max(context.layout.max_length - 1, 1), 64)
    biases = None
    if pattern.has_bias:
        assert pattern.position is not None
        distances = torch.arange(-reach, reach + 1, device=q.device)
        biases = pattern.position.bias(distances).float()  # [heads, distances]
    tables: list[Tensor | None] = [None, None]
    if relative is not None:
        room = reach - relative.reach
        tables = [  # [heads, tokens, distances]
            None if vectors is None else F.pad(torch.einsum("hnd,hdw->hnw", x[0], vectors), (room, room))
            for x, vectors in ((q, relative.keys), (_grouped(k, q.shape[1]), relative.queries))
        ]
    of_queries, of_keys = tables
    if biases is None and relative is None:
        return None
    scale = context.scale

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = (j - i).clamp(-reach, reach)  # tokens of other sequences are masked
        if biases is not None:
            score = score + biases[h, distance + reach]
        if of_queries is not None:
            score = score + of_queries[h, i, distance + reach] * scale
        if of_keys is not None:
            score = score + of_keys[h, j, reach - distance] * scale
        return score

    return score_mod


def _grouped(k: Tensor, heads: int) -> Tensor:
    return k.repeat_interleave(heads // k.shape[1], dim=1)


def _token_tables(layout: SequenceLayout, size: int) -> tuple[Tensor, Tensor]:
    """Return the index of the first token of every token's sequence, and the sequence; padding is a sequence."""
    room = size - layout.sequence_ids.shape[0]
    ids = F.pad(layout.sequence_ids, (0, room), value=layout.num_sequences).int()
    starts = F.pad(layout.cu_seqlens, (0, 1), value=size)[: layout.num_sequences + 1]
    return starts[ids.long()], ids


def _block_ranges(layout: SequenceLayout, size: int, reach: int | None) -> tuple[Tensor, Tensor]:
    """Return the number and the indices of the blocks of keys that each block of queries may see.

    The keys of a block are contiguous: they begin with the first sequence of its first token and end with the last
    sequence of its last, or within the window around it.
    """
    starts, ids = layout.memo(("flex tokens", size), lambda: _token_tables(layout, size))
    ends = F.pad(layout.cu_seqlens[1:], (0, 1), value=size)[ids.long()]
    count = size // BLOCK
    first = torch.arange(count, device=layout.device) * BLOCK
    low, high = starts[first], ends[first + BLOCK - 1]
    if reach is not None:
        low, high = torch.maximum(low, first - reach), torch.minimum(high, first + BLOCK + reach)
    low, high = low // BLOCK, (high + BLOCK - 1) // BLOCK
    columns = torch.arange(count, device=layout.device)
    indices = (low[:, None] + columns) % count
    return (high - low).int()[None, None], indices.int()[None, None]
