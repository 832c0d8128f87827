"""What is fastest on a CPU: short sequences and windows as plain products, long global ones by torch's fused kernel."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionPattern, repeat_kv
from bertblocks.nn.backends.sdpa import SdpaBackend, make_mask
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.ops.attention import AttentionChunk, Group, attend_pieces

#: The length beyond which torch's fused kernel is faster than plain products.
LONGEST_PIECE = 512
#: The length up to which rows of a rectangle are copied together and taken at once; beyond it the kernel is faster.
LONGEST_ROW = 64
#: Tokens up to which ragged sequences are taken together under a mask that keeps them apart: 32 texts of 8 to 30 tokens
#: are 1.15 to 1.27 times as fast as one by one, 1.13 to 1.36 with gradients (12 heads of 64, and of 32).
TOKENS_TOGETHER = 64
#: Scores of sequences that are taken together, so that they stay in the cache.
MOST_SCORES = 2**17


class CpuBackend(SdpaBackend):
    """Cuts a batch into pieces; what has no such form (padding that stays, learned biases) is sdpa's."""

    def is_banded(self, length: int, pattern: AttentionPattern) -> bool:
        """Blocks of queries pay as soon as they see less than the whole."""
        return pattern.half_window is not None and length > self.block_size + 2 * pattern.half_window

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
        pieces = self._pieces(q, layout, pattern)
        if pieces is None:
            return super().attend(q, k, v, layout, pattern, scale, dropout)
        return attend_pieces(q, repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1]), pieces, scale, dropout)

    def _pieces(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern
    ) -> list[AttentionChunk | Group] | None:
        """The pieces of a batch, shared by all layers alike; None if some of it has to go sdpa's way."""
        if q.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if layout.key_mask is not None or not pattern.is_constant or not len(q):
            return None
        # under autograd a long sequence goes another way
        key = ("pieces", pattern.memo_key(), q.shape[1], q.dtype, torch.is_grad_enabled())
        return layout.memo(key, lambda: self._cut(q, layout, pattern))

    def _cut(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern) -> list[AttentionChunk | Group] | None:
        rows, length = layout.rectangle or (1, 0)
        if rows > 1 and not self.is_banded(length, pattern):
            if length > LONGEST_ROW:
                return None
            mask, most = self._shared_mask(q, layout, pattern, length), _rows_at_once(length, q.shape[1])
            return [
                Group(slice(first * length, last * length), last - first, length, mask)
                for first, last in itertools.pairwise([*range(0, rows, most), rows])
            ]
        pieces: list[AttentionChunk | Group] = []
        runs: list[list[slice]] = []
        for tokens in layout.slices():
            size = tokens.stop - tokens.start
            if self.is_banded(size, pattern):
                if pattern.num_global_tokens or pattern.has_bias:
                    return None
                pieces += self._blocks(q, layout, pattern, tokens)
            elif size <= LONGEST_PIECE:
                follows = bool(runs) and runs[-1][-1].stop == tokens.start
                if follows and tokens.stop - runs[-1][0].start <= TOKENS_TOGETHER:
                    runs[-1].append(tokens)
                else:
                    runs.append([tokens])
            elif torch.is_grad_enabled() or pattern.has_bias or not pattern.sees_all(size):
                return None
            else:
                pieces.append(AttentionChunk(tokens, tokens, is_long=True))
        return pieces + [self._join(q, layout, pattern, run) for run in runs]

    def _join(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, sequences: list[slice]
    ) -> AttentionChunk:
        """Sequences in a row as one piece, in which each sees itself."""
        start, stop = sequences[0].start, sequences[-1].stop
        masks = [self._shared_mask(q, layout, pattern, tokens.stop - tokens.start) for tokens in sequences]
        mask = masks[0]
        if len(sequences) > 1:
            heads = max(1 if one is None else len(one) for one in masks)
            mask = q.new_full((heads, stop - start, stop - start), float("-inf"))
            for tokens, own in zip(sequences, masks, strict=True):
                place = slice(tokens.start - start, tokens.stop - start)
                mask[:, place, place] = 0.0 if own is None else own
        return AttentionChunk(slice(start, stop), slice(start, stop), mask)

    def _blocks(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, tokens: slice
    ) -> list[AttentionChunk]:
        """Blocks of queries with the keys around them; their masks are parts of one."""
        assert pattern.half_window is not None
        block, reach = self.block_size, pattern.half_window

        def compute() -> Tensor:
            return make_mask(q, pattern, slice(reach, reach + block), block + 2 * reach)

        mask = layout.memo(("cpu band", pattern.memo_key(), q.dtype), compute)
        pieces = []
        for start in range(tokens.start, tokens.stop, block):
            stop = min(start + block, tokens.stop)
            first, last = max(start - reach, tokens.start), min(stop + reach, tokens.stop)
            seen = slice(first - start + reach, last - start + reach)
            pieces.append(AttentionChunk(slice(start, stop), slice(first, last), mask[:, : stop - start, seen]))
        return pieces


def _rows_at_once(length: int, heads: int) -> int:
    return max(1, MOST_SCORES // (heads * length**2))
