"""The fastest attention on a CPU: the C kernel for plain scores, and chunks of products otherwise."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from bertblocks.nn.backends.base import AttentionContext, AttentionPattern, repeat_kv
from bertblocks.nn.backends.sdpa import SdpaBackend, make_mask
from bertblocks.nn.layout import SequenceLayout, is_capturing, is_symbolic
from bertblocks.nn.ops.attention import AttentionChunk, Chunk, SequenceBatch, attend_chunks
from bertblocks.nn.ops.compiled_attention import CompiledAttention
from bertblocks.nn.ops.cpu import has_fast_bf16_products
from bertblocks.nn.ops.kernel_arguments import AttentionCall
from bertblocks.nn.ops.kernels import MAX_HEAD_SIZE, Kernel, kernel_for

#: Beyond this length torch's fused kernel is faster than plain products.
LONGEST_CHUNK = 512
#: Rows of a rectangle up to this length are computed together; beyond it the fused kernel is faster.
LONGEST_ROW = 64
#: Ragged sequences are joined under a mask up to this many tokens: 32 texts of 8 to 30 tokens run 1.15 to 1.27 times as
#: fast as one by one, 1.13 to 1.36 times with gradients (12 heads of 64 and of 32).
MAX_JOINED_TOKENS = 64
#: With vectors of distances, a sequence longer than this is computed for some queries at a time.
LONGEST_RELATIVE = 192
RELATIVE_BLOCK = 128
#: The longest sequence that the C kernel trains on: it holds all scores of a head.
LONGEST_TRAINED = 256
#: The most scores to compute together, so that they stay in the cache.
MAX_SCORES = 2**17


class CpuBackend(SdpaBackend):
    """Calls the C kernel where it can compute the result, and otherwise cuts a batch into chunks.

    The cases that have no such form (kept padding, learned biases) go to sdpa.
    """

    def is_banded(self, length: int, pattern: AttentionPattern) -> bool:
        """Blocks of queries pay off as soon as they see less than the whole sequence."""
        if pattern.half_window is None or is_symbolic(length):
            return False
        return length > self.block_size + 2 * pattern.half_window

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        kernel = find_attention_kernel(q, q.shape[-1], context)
        if kernel is not None and all(x.stride()[1:] == (q.shape[-1], 1) for x in (q, k, v)):
            attended = attend_in_kernel(kernel, q, k, v, context)
            if attended is not None:
                return attended
        chunks = self._chunks(q, context)
        if chunks is None:
            return super().attend(q, k, v, context)
        k, v = repeat_kv(k, q.shape[1]), repeat_kv(v, q.shape[1])
        return attend_chunks(q, k, v, chunks, context.scale, context.dropout, context.relative, context.sinks)

    def _chunks(self, q: Tensor, context: AttentionContext) -> list[Chunk] | None:
        """Return the chunks of a batch, shared by layers with equal patterns; None if sdpa must compute some of it."""
        layout, pattern = context.layout, context.pattern
        if q.device.type != "cpu" or is_capturing():
            return None
        # reentrant checkpointing runs without gradients first, and dropout must draw the same masks in both runs
        with torch.set_grad_enabled(torch.is_grad_enabled() or context.dropout > 0):
            if layout.key_mask is not None or not pattern.is_constant or not len(q):
                return None
            # long sequences are computed differently with gradients
            key = ("chunks", pattern.memo_key(), q.shape[1], q.dtype, torch.is_grad_enabled())
            return layout.memo(key, lambda: self._cut(q, layout, pattern))

    def _cut(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern) -> list[Chunk] | None:
        rows, length = layout.rectangle or (1, 0)
        if rows > 1 and not self.is_banded(length, pattern):
            if length <= LONGEST_ROW:
                return self._cut_rectangle(q, layout, pattern)
            if not pattern.is_relative:
                return None
        chunks: list[Chunk] = []
        runs: list[list[slice]] = []
        for tokens in layout.slices():
            size = tokens.stop - tokens.start
            if self.is_banded(size, pattern):
                if pattern.num_global_tokens or pattern.has_bias:
                    return None
                chunks += self._cut_blocks(q, layout, pattern, tokens)
            elif pattern.is_relative and size > LONGEST_RELATIVE:
                chunks += self._cut_queries(q, layout, pattern, tokens)
            elif size <= LONGEST_CHUNK:
                follows = bool(runs) and runs[-1][-1].stop == tokens.start
                if follows and tokens.stop - runs[-1][0].start <= MAX_JOINED_TOKENS:
                    runs[-1].append(tokens)
                else:
                    runs.append([tokens])
            elif torch.is_grad_enabled() or pattern.has_bias or not pattern.sees_all(size):
                return None
            else:
                chunks.append(AttentionChunk(tokens, tokens, is_long=True))
        return chunks + [self._join(q, layout, pattern, run) for run in runs]

    def _cut_rectangle(self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern) -> list[Chunk]:
        """Batches of whole rows."""
        assert layout.rectangle is not None
        rows, length = layout.rectangle
        mask, most = self._shared_mask(q, layout, pattern, length), max(1, MAX_SCORES // (q.shape[1] * length**2))
        return [
            SequenceBatch(slice(first * length, last * length), last - first, length, mask)
            for first, last in itertools.pairwise([*range(0, rows, most), rows])
        ]

    def _join(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, sequences: list[slice]
    ) -> AttentionChunk:
        """Join consecutive sequences into one chunk, in which each sees only itself."""
        chunks = tuple(
            AttentionChunk(tokens, tokens, self._shared_mask(q, layout, pattern, tokens.stop - tokens.start))
            for tokens in sequences
        )
        if len(chunks) == 1:
            return chunks[0]
        whole = slice(sequences[0].start, sequences[-1].stop)
        size = whole.stop - whole.start
        heads = max(1 if chunk.mask is None else len(chunk.mask) for chunk in chunks)
        mask = q.new_full((heads, size, size), float("-inf"))
        for chunk in chunks:
            inside = slice(chunk.queries.start - whole.start, chunk.queries.stop - whole.start)
            mask[:, inside, inside] = 0.0 if chunk.mask is None else chunk.mask
        return AttentionChunk(whole, whole, mask, sequences=chunks)

    def _cut_queries(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, tokens: slice
    ) -> list[AttentionChunk]:
        """Some queries at a time, with all keys."""
        starts = range(0, tokens.stop - tokens.start, RELATIVE_BLOCK)
        mask = self._shared_mask(q, layout, pattern, tokens.stop - tokens.start)
        return [
            AttentionChunk(
                slice(tokens.start + start, min(tokens.start + start + RELATIVE_BLOCK, tokens.stop)),
                tokens,
                None if mask is None else mask[:, start : start + RELATIVE_BLOCK],
            )
            for start in starts
        ]

    def _cut_blocks(
        self, q: Tensor, layout: SequenceLayout, pattern: AttentionPattern, tokens: slice
    ) -> list[AttentionChunk]:
        """Blocks of queries with the keys around them; their masks are views of one."""
        assert pattern.half_window is not None
        block, reach = self.block_size, pattern.half_window

        def compute() -> Tensor:
            return make_mask(q, pattern, slice(reach, reach + block), block + 2 * reach)

        mask = layout.memo(("cpu band", pattern.memo_key(), q.dtype), compute)
        chunks = []
        for start in range(tokens.start, tokens.stop, block):
            stop = min(start + block, tokens.stop)
            first, last = max(start - reach, tokens.start), min(stop + reach, tokens.stop)
            seen = slice(first - start + reach, last - start + reach)
            chunks.append(AttentionChunk(slice(start, stop), slice(first, last), mask[:, : stop - start, seen]))
        return chunks


def find_attention_kernel(x: Tensor, head_dim: int, context: AttentionContext) -> Kernel | None:
    """Return the C kernel if it can attend over tokens like x: scores that only a window hides."""
    if x.dtype == torch.bfloat16 and context.is_inference and not has_fast_bf16_products():
        return None
    adds_scores = context.relative is not None or context.sinks is not None or context.weigh is not None
    is_plain = context.pattern.has_plain_scores and not adds_scores and context.layout.key_mask is None
    return kernel_for(x) if is_plain and head_dim <= MAX_HEAD_SIZE else None


def attend_in_kernel(
    kernel: Kernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    context: AttentionContext,
    rotation: tuple[Tensor, Tensor] | None = None,
    qkv: Tensor | None = None,
) -> Tensor | None:
    """Attend, or return None for a sequence that is too long to train on.

    `qkv` is the tensor of which q, k and v are views, if there is one: its gradient needs no copies.
    """
    call = attention_call(q, k, context, rotation)
    if context.is_inference:
        return kernel.attention(q, k, v, call)
    if call.longest > LONGEST_TRAINED:
        return None
    seed = int(torch.randint(2**62, ())) if context.dropout else 0
    return CompiledAttention.apply(kernel, call, context.dropout, seed, *((q, k, v) if qkv is None else (qkv,)))


def attention_call(
    q: Tensor, k: Tensor, context: AttentionContext, rotation: tuple[Tensor, Tensor] | None = None
) -> AttentionCall:
    """Return the kernel's description of a call, which layers with equal patterns and rotations share."""
    layout, half_window = context.layout, context.pattern.half_window
    sizes = q.shape[1], k.shape[1], q.shape[2], context.scale

    def compute() -> AttentionCall:
        in_bf16 = q.dtype == torch.bfloat16 and has_fast_bf16_products()
        return AttentionCall(layout.read_lengths(), *sizes, half_window, in_bf16, rotation)

    tables = None if rotation is None else rotation[0].data_ptr()
    return layout.memo(("attention call", *sizes, half_window, q.dtype, tables), compute)
