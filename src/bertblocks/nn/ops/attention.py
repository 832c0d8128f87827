"""Attention in chunks: some queries against some keys, as plain products into one buffer of scores.

On a 2-core Zen 4 with 12 heads of 64, this is 1.5 to 1.8 times as fast as scaled_dot_product_attention for a sequence
of 4 to 150 tokens and 1.1 to 1.2 times up to 384. Chunks of one sequence may share keys, so a local layer computes 64
queries at a time against the keys around them. Short sequences, whose calls cost more than their products, are joined.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from bertblocks.nn.ops.dropout import draw_factors
from bertblocks.nn.ops.relative import add_gradients, buffer_size, write_scores
from bertblocks.nn.relative import RelativeVectors

#: How many random numbers dropout draws at a time: a call costs as much as several thousand of them.
DRAWN_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class AttentionChunk:
    """Queries and the keys they see: a sequence, a part of one, or consecutive sequences that a mask keeps apart."""

    queries: slice
    keys: slice
    #: Added to the scores, `[heads or 1, queries, keys]`.
    mask: Tensor | None = None
    #: True for a sequence so long that torch's fused kernel wins; only without gradients.
    is_long: bool = False
    #: The chunks of the joined sequences, if this one joins several.
    sequences: tuple[AttentionChunk, ...] = ()

    rows = 1

    @property
    def owns_keys(self) -> bool:
        """False for a part of a sequence, which shares its keys with other parts."""
        return self.keys == self.queries

    def num_scores(self, heads: int) -> int:
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        return 0 if self.is_long else heads * queries * keys

    def select_queries(self, x: Tensor) -> Tensor:
        """`[heads, tokens, d]` -> `[heads, queries, d]`."""
        return x[:, self.queries]

    def select_keys(self, x: Tensor) -> Tensor:
        """`[heads, tokens, d]` -> `[heads, keys, d]`."""
        return x[:, self.keys]

    def write_queries(self, into: Tensor, values: Tensor) -> None:
        into[:, self.queries].copy_(values)

    def add_keys(self, into: Tensor, values: Tensor) -> None:
        if self.owns_keys:
            self.write_queries(into, values)
        else:
            into[:, self.keys].add_(values)

    def scores(self, queries: Tensor, keys: Tensor, scale: float, out: Tensor) -> Tensor:
        if self.mask is None:
            return torch.baddbmm(out, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=out)
        return torch.baddbmm(self.mask.expand(out.shape), queries, keys.transpose(1, 2), alpha=scale, out=out)


@dataclass(frozen=True, eq=False)
class SequenceBatch:
    """Short sequences of equal length, each attending to itself."""

    tokens: slice
    rows: int
    length: int
    #: Added to the scores, broadcast to `[rows, heads, length, length]`.
    mask: Tensor | None = None

    owns_keys = True
    sequences = ()

    @property
    def queries(self) -> slice:
        return self.tokens

    keys = queries

    def num_scores(self, heads: int) -> int:
        return self.rows * heads * self.length**2

    def select_queries(self, x: Tensor) -> Tensor:
        """`[heads, tokens, d]` -> `[rows * heads, length, d]`."""
        return x[:, self.tokens].unflatten(1, (self.rows, -1)).transpose(0, 1).flatten(0, 1)

    select_keys = select_queries

    def write_queries(self, into: Tensor, values: Tensor) -> None:
        into[:, self.tokens].unflatten(1, (self.rows, -1)).transpose(0, 1).copy_(values.unflatten(0, (self.rows, -1)))

    add_keys = write_queries

    def scores(self, queries: Tensor, keys: Tensor, scale: float, out: Tensor) -> Tensor:
        torch.baddbmm(out, queries, keys.transpose(1, 2), beta=0, alpha=scale, out=out)
        if self.mask is not None:
            out.unflatten(0, (self.rows, -1)).add_(self.mask)
        return out


Chunk = AttentionChunk | SequenceBatch


@dataclass(frozen=True)
class WeightDropout:
    """Dropout on attention weights. The seed reproduces the masks, so the backward pass need not store them."""

    rate: float
    seed: int

    def masks(self, q: Tensor, chunks: Sequence[Chunk]) -> Callable[[Tensor], Tensor]:
        """Return a function that gives the factors on the weights of each chunk in turn."""
        generator = torch.Generator().manual_seed(self.seed)
        counts = [chunk.num_scores(q.shape[1]) for chunk in chunks]
        left, drawn = sum(counts), q.new_empty(0)
        buffer = q.new_empty(min(left, max(DRAWN_AT_ONCE, *counts)))

        def factors(weights: Tensor) -> Tensor:
            nonlocal left, drawn
            if len(drawn) < weights.numel():
                drawn = draw_factors(buffer[:left], self.rate, generator)
            mine, drawn = drawn.split((weights.numel(), len(drawn) - weights.numel()))
            left -= weights.numel()
            return mine.view(weights.shape)

        return factors


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chunks: Sequence[Chunk],
    scale: float,
    dropout_rate: float = 0.0,
    relative: RelativeVectors | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from the queries of all chunks, which together cover all tokens; q, k and v are `[tokens, heads, d]`.

    Chunks must not be long if there are `relative` vectors. `sinks` `[heads]` are logits that join each softmax.

    A mask does not hide NaN or infinity, because 0 * NaN is NaN. If any appear, joined sequences are computed again one
    by one, so that none of them affects another.
    """
    dropout = WeightDropout(dropout_rate, int(torch.randint(2**62, ()))) if dropout_rate else None
    if torch.is_grad_enabled():
        keys, queries, reach = (
            (None, None, 0) if relative is None else (relative.keys, relative.queries, relative.reach)
        )
        return ChunkedAttention.apply(q, k, v, keys, queries, sinks, reach, chunks, scale, dropout)
    out = _attend(q, k, v, relative, sinks, chunks, scale, dropout)
    if _is_isolated(chunks, out):
        return out
    return _attend(q, k, v, relative, sinks, _separate(chunks), scale, dropout)


class ChunkedAttention(torch.autograd.Function):
    """`attend_chunks` with gradients. The backward pass recomputes the weights, so memory is linear in tokens."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Any,
        k: Any,
        v: Any,
        keys: Any,
        queries: Any,
        sinks: Any,
        reach: Any,
        chunks: Any,
        scale: Any,
        dropout: Any,
    ) -> Any:
        ctx.save_for_backward(q, k, v, keys, queries, sinks)
        relative = _relative(keys, queries, reach)
        out = _attend(q, k, v, relative, sinks, chunks, scale, dropout)
        if not _is_isolated(chunks, out):
            chunks = _separate(chunks)
            out = _attend(q, k, v, relative, sinks, chunks, scale, dropout)
        ctx.reach, ctx.chunks, ctx.scale, ctx.dropout = reach, chunks, scale, dropout
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Any) -> Any:  # type: ignore[override]
        q, k, v, keys, queries, sinks = ctx.saved_tensors
        inputs, relative = (q, k, v, gradient), _relative(keys, queries, ctx.reach)
        gradients = _gradients(inputs, relative, sinks, ctx.chunks, ctx.scale, ctx.dropout)
        # whatever is not finite reaches the gradient of the queries
        if not _is_isolated(ctx.chunks, gradients[0]):
            gradients = _gradients(inputs, relative, sinks, _separate(ctx.chunks), ctx.scale, ctx.dropout)
        return *gradients, None, None, None, None


def _relative(keys: Tensor | None, queries: Tensor | None, reach: int) -> RelativeVectors | None:
    return None if keys is None and queries is None else RelativeVectors(keys, queries, reach)


def _is_isolated(chunks: Sequence[Chunk], result: Tensor) -> bool:
    """True if no sequence can have affected another: none are joined, or all results are finite."""
    is_joined = any(chunk.sequences for chunk in chunks)
    return not is_joined or math.isfinite(result.sum(dtype=torch.float32).item())


def _separate(chunks: Sequence[Chunk]) -> list[Chunk]:
    return [part for chunk in chunks for part in chunk.sequences or (chunk,)]


class _Scores:
    """Computes the weights of one chunk after another, in a buffer for the largest."""

    def __init__(
        self, q: Tensor, relative: RelativeVectors | None, sinks: Tensor | None, chunks: Sequence[Chunk], scale: float
    ) -> None:
        self.relative, self.sinks, self.scale = relative, sinks, scale
        self.buffer = _buffer(q, chunks)
        if relative is not None:
            self.products = q.new_empty(max(buffer_size(q.shape[1], *_sizes(chunk)) for chunk in chunks))

    def weights(self, chunk: Chunk, q: Tensor, k: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
        """Return softmax(scale q k^T + mask) for the `queries` and `keys` of a chunk, selected from all q and k.

        With sinks, the weights of a query sum up to less than 1: its sink has the rest.
        """
        out = _view(self.buffer, (*queries.shape[:2], keys.shape[1]))
        if self.relative is None:
            scores = chunk.scores(queries, keys, self.scale, out)
        else:
            tokens = q[:, chunk.queries], k[:, chunk.keys]
            write_scores(_by_head(out, chunk), *tokens, self.relative, _offset(chunk), self.scale, self.products)
            scores = torch.baddbmm(out, queries, keys.transpose(1, 2), alpha=self.scale, out=out)
            if chunk.mask is not None:
                scores.unflatten(0, (chunk.rows, -1)).add_(chunk.mask)
        if self.sinks is None:
            return torch.softmax(scores, dim=-1, out=scores)
        highest = scores.amax(dim=-1, keepdim=True)
        weights = torch.softmax(scores, dim=-1, out=scores)
        # the largest weight is 1 / sum(exp(scores - highest)), which gives the logarithm of the sum over the keys
        total = highest - weights.amax(dim=-1, keepdim=True).log()
        return weights.mul_(torch.sigmoid(total - self.sinks.repeat(chunk.rows)[:, None, None]))


def _sizes(chunk: Chunk) -> tuple[int, int, int]:
    """Return the number of rows of a chunk, and of queries and keys in each."""
    num_queries, num_keys = (tokens.stop - tokens.start for tokens in (chunk.queries, chunk.keys))
    return chunk.rows, num_queries // chunk.rows, num_keys // chunk.rows


def _offset(chunk: Chunk) -> int:
    return chunk.keys.start - chunk.queries.start


def _by_head(scores: Tensor, chunk: Chunk) -> Tensor:
    """View the scores of a chunk as `[heads, rows, queries, keys]`."""
    return scores[:, None] if chunk.rows == 1 else scores.unflatten(0, (chunk.rows, -1)).transpose(0, 1)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    relative: RelativeVectors | None,
    sinks: Tensor | None,
    chunks: Sequence[Chunk],
    scale: float,
    dropout: WeightDropout | None,
) -> Tensor:
    scores = _Scores(q, relative, sinks, chunks, scale)
    factors = dropout.masks(q, chunks) if dropout else None
    result = torch.empty(q.shape, dtype=q.dtype)
    q, k, v, out = (x.transpose(0, 1) for x in (q, k, v, result))
    for chunk in chunks:
        queries, keys, values = chunk.select_queries(q), chunk.select_keys(k), chunk.select_keys(v)
        if isinstance(chunk, AttentionChunk) and chunk.is_long:
            # the kernel reads keys and values many times: 1.03 times as fast from contiguous memory
            keys, values = keys.contiguous(), values.contiguous()
            rate = dropout.rate if dropout else 0.0
            if sinks is not None:
                queries, keys, values = add_sink_key(queries, keys, values, sinks, scale)
            attended = F.scaled_dot_product_attention(queries[None], keys[None], values[None], None, rate, scale=scale)
            attended = attended[0, ..., : v.shape[-1]]
        else:
            weights = scores.weights(chunk, q, k, queries, keys)
            attended = torch.bmm(weights if factors is None else weights.mul_(factors(weights)), values)
        chunk.write_queries(out, attended)
    return result


def _gradients(
    inputs: tuple[Tensor, ...],
    relative: RelativeVectors | None,
    sinks: Tensor | None,
    chunks: Sequence[Chunk],
    scale: float,
    dropout: WeightDropout | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, the relative keys and queries, and the sinks.

    `inputs` are q, k, v and the gradient of the output.
    """
    q, k, v, gradient = inputs
    recomputed, buffer = _Scores(gradient, relative, sinks, chunks, scale), _buffer(gradient, chunks)
    factors = dropout.masks(gradient, chunks) if dropout else None
    start = torch.empty if all(chunk.owns_keys for chunk in chunks) else torch.zeros
    results = [start(x.shape, dtype=x.dtype) for x in (q, k, v)]
    of_distances = (None, None) if relative is None else (relative.keys, relative.queries)
    of_keys, of_queries, of_sinks = (None if x is None else torch.zeros_like(x) for x in (*of_distances, sinks))
    q, k, v, gradient = (x.transpose(0, 1) for x in (q, k, v, gradient))
    q_gradient, k_gradient, v_gradient = (x.transpose(0, 1) for x in results)
    for chunk in chunks:
        queries, keys, values = chunk.select_queries(q), chunk.select_keys(k), chunk.select_keys(v)
        above = chunk.select_queries(gradient)
        weights = recomputed.weights(chunk, q, k, queries, keys)
        scores = torch.bmm(above, values.transpose(1, 2), out=_view(buffer, weights.shape))
        kept = weights
        if factors is not None:
            mask = factors(weights)
            scores.mul_(mask)
            kept = weights * mask
        chunk.add_keys(v_gradient, _product(kept.transpose(1, 2), above))
        if of_sinks is not None:
            # a sink has no value, so its gradient is that of the weights times the weight that it takes from them
            taken = (1 - weights.sum(dim=-1)) * torch.linalg.vecdot(weights, scores)
            of_sinks -= taken.sum(dim=1).unflatten(0, (chunk.rows, -1)).sum(dim=0)
        torch.ops.aten._softmax_backward_data.out(scores, weights, -1, scores.dtype, grad_input=scores)
        chunk.write_queries(q_gradient, _product(scores, keys, scale))
        chunk.add_keys(k_gradient, _product(scores.transpose(1, 2), queries, scale))
        if relative is not None:
            add_gradients(
                _by_head(scores, chunk),
                q[:, chunk.queries],
                k[:, chunk.keys],
                relative,
                _offset(chunk),
                scale,
                recomputed.products,
                (q_gradient[:, chunk.queries], k_gradient[:, chunk.keys], of_keys, of_queries),
            )
    return results[0], results[1], results[2], of_keys, of_queries, of_sinks


def add_sink_key(
    q: Tensor,  # [..., heads, queries, d]
    k: Tensor,  # [..., heads, keys, d]
    v: Tensor,
    sinks: Tensor,  # [heads]
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Append a key whose score is the sink of its head for every query, and a value of 0.

    Both take one more unit, which is 1 in queries and 0 in other keys and values. So a fused kernel needs no mask for
    it, and gradients reach the sinks.
    """
    score = (sinks.to(k.dtype) / scale)[:, None, None].expand(*k.shape[:-2], 1, 1)
    key = torch.cat((torch.zeros_like(k[..., :1, :]), score), dim=-1)
    return F.pad(q, (0, 1), value=1.0), torch.cat((F.pad(k, (0, 1)), key), dim=-2), F.pad(v, (0, 1, 0, 1))


def _product(a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """Return scale * a @ b for batches of matrices, untouched by autocast."""
    out = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return torch.baddbmm(out, a, b, beta=0, alpha=scale, out=out)


def _buffer(q: Tensor, chunks: Sequence[Chunk]) -> Tensor:
    """Allocate room for the scores of the largest chunk: fresh memory for each would cost more than its products."""
    return q.new_empty(max(chunk.num_scores(q.shape[1]) for chunk in chunks))


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)
