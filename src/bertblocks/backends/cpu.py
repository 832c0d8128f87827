"""What is fastest on a CPU: short sequences and windows as plain products, long global ones by torch's fused kernel."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bertblocks.backends.base import AttentionPattern, repeat_kv
from bertblocks.backends.sdpa import SdpaBackend, make_mask
from bertblocks.functions.attention import Group, Piece, attend_pieces
from bertblocks.layout import SequenceLayout

#: The length beyond which torch's fused kernel is faster than plain products.
LONGEST_PIECE = 512
#: The length up to which rows of a rectangle are copied together and taken at once; beyond it the kernel is faster.
LONGEST_TOGETHER = 64
#: The same for ragged sequences, which take longer to copy; the calls saved make 32 texts of 5 to 28 tokens 1.4 times
#: as fast, 1.6 with gradients.
LONGEST_GATHERED = 16
#: Ragged lengths that round up to the same multiple of this are taken together.
ALIKE = 8
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

    def _pieces(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern) -> list[Piece | Group] | None:
        """The pieces of a batch, shared by all layers alike; None if some of it has to go sdpa's way."""
        if q.device.type != "cpu" or torch.compiler.is_compiling():
            return None
        if layout.key_mask is not None or not pattern.is_constant or not len(q):
            return None
        # under autograd a long sequence goes another way
        key = ("pieces", pattern.memo_key(), q.shape[1], q.dtype, torch.is_grad_enabled())
        return layout.memo(key, lambda: self._cut(q, layout, pattern))

    def _cut(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern) -> list[Piece | Group] | None:
        rows, length = layout.rectangle or (1, 0)
        if rows > 1 and not self.is_banded(length, pattern):
            if length > LONGEST_TOGETHER:
                return None
            mask, most = self._shared_mask(q, layout, pattern, length), _rows_at_once(length, q.shape[1])
            return [
                Group(slice(first * length, last * length), last - first, length, mask)
                for first, last in itertools.pairwise([*range(0, rows, most), rows])
            ]
        pieces: list[Piece | Group] = []
        short: dict[int, list[slice]] = {}
        for tokens in layout.slices():
            size = tokens.stop - tokens.start
            if self.is_banded(size, pattern):
                if pattern.num_global_tokens or pattern.has_bias:
                    return None
                pieces += self._blocks(q, layout, pattern, tokens)
            elif size <= LONGEST_GATHERED and pattern.sees_all(size):
                short.setdefault(-(-size // ALIKE), []).append(tokens)
            elif size <= LONGEST_PIECE:
                pieces.append(Piece(tokens, tokens, self._shared_mask(q, layout, pattern, size)))
            elif torch.is_grad_enabled() or pattern.has_bias or not pattern.sees_all(size):
                return None
            else:
                pieces.append(Piece(tokens, tokens, is_long=True))
        for rounded, alike in short.items():
            most = _rows_at_once(rounded * ALIKE, q.shape[1])
            for first in range(0, len(alike), most):
                pieces.append(self._group(q, layout, pattern, alike[first : first + most]))
        return pieces

    def _group(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, sequences: list[slice]
    ) -> Piece | Group:
        """Short sequences of about one length, padded to the longest of them."""
        starts = torch.tensor([tokens.start for tokens in sequences])[:, None]
        lengths = torch.tensor([tokens.stop - tokens.start for tokens in sequences])[:, None]
        longest = int(lengths.max())
        mask = self._shared_mask(q, layout, pattern, longest)
        if len(sequences) == 1:
            return Piece(sequences[0], sequences[0], mask)
        positions = torch.arange(longest)
        tokens = (starts + positions.minimum(lengths - 1)).flatten()
        is_real = positions < lengths
        if bool(is_real.all()):
            return Group(tokens, len(sequences), longest, mask)
        hidden = q.new_zeros(is_real.shape).masked_fill(~is_real, float("-inf"))[:, None, None]
        mask = hidden if mask is None else mask + hidden
        return Group(tokens, len(sequences), longest, mask, is_real.flatten().nonzero()[:, 0])

    def _blocks(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, tokens: slice) -> list[Piece]:
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
            pieces.append(Piece(slice(start, stop), slice(first, last), mask[:, : stop - start, seen]))
        return pieces


def _rows_at_once(length: int, heads: int) -> int:
    return max(1, MOST_SCORES // (heads * length**2))
