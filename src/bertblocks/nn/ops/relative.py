"""Scores with vectors of distances and their gradients, in place, for attention in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bertblocks.nn.relative import BLOCK, RelativeVectors, distance_slice, select_distances, skew


class _Part(NamedTuple):
    """Some tokens of a chunk, and the distances to the tokens that they meet, from one of the two sides."""

    tokens: slice
    met: Tensor  # [heads, head_dim, distances]
    #: The slice of `met` among all vectors, and how many of its first and last distances are beyond the reach.
    inside: slice
    before: int
    after: int


def _parts(vectors: Tensor, reach: int, shape: torch.Size, offset: int) -> Iterator[_Part]:
    """Cut the tokens of scores `[heads, rows, tokens, others]` into blocks; several rows stay together."""
    _, rows, num_tokens, others = shape
    block = BLOCK if rows == 1 else max(num_tokens, 1)
    for start in range(0, num_tokens, block):
        size = min(block, num_tokens - start)
        met = select_distances(vectors, reach, size, others, offset - start)
        yield _Part(slice(start, start + size), met, *distance_slice(reach, size, others, offset - start))


def buffer_size(heads: int, rows: int, num_queries: int, num_keys: int) -> int:
    """Return the number of elements that the functions below need in their buffer."""
    blocks = [(min(n, BLOCK) if rows == 1 else n, others) for n, others in _both(num_queries, num_keys)]
    return heads * rows * max(n * (n + others - 1) for n, others in blocks)


def _both(num_queries: int, num_keys: int) -> tuple[tuple[int, int], tuple[int, int]]:
    return (num_queries, num_keys), (num_keys, num_queries)


def write_scores(
    scores: Tensor,  # [heads, rows, queries, keys]
    q: Tensor,  # [heads, rows * queries, head_dim]
    k: Tensor,  # [heads, rows * keys, head_dim]
    relative: RelativeVectors,
    offset: int,  # of the first key after the first query
    scale: float,
    buffer: Tensor,
) -> None:
    """Write the scores with vectors of distances, without those between tokens."""
    sides = ((q, relative.keys, scores, offset), (k, relative.queries, scores.transpose(2, 3), -offset))
    is_empty = True
    for x, vectors, into, shift in sides:
        if vectors is None:
            continue
        rows, others = into.shape[1], into.shape[3]
        for part in _parts(vectors, relative.reach, into.shape, shift):
            tokens = x[:, part.tokens] if rows == 1 else x
            products = _view(buffer, tokens, part.met)
            torch.baddbmm(products, tokens, part.met, beta=0, alpha=scale, out=products)
            part_into, met = into[:, :, part.tokens], skew(products.unflatten(1, (rows, -1)), others)
            part_into.copy_(met) if is_empty else part_into.add_(met)
        is_empty = False


def add_gradients(
    gradient: Tensor,  # of the scores, [heads, rows, queries, keys]
    q: Tensor,
    k: Tensor,
    relative: RelativeVectors,
    offset: int,
    scale: float,
    buffer: Tensor,
    into: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
) -> None:
    """Add the gradients of `q`, `k`, `relative.keys` and `relative.queries` to the tensors in `into`."""
    q_into, k_into, keys_into, queries_into = into
    sides = (
        (q, relative.keys, gradient, offset, q_into, keys_into),
        (k, relative.queries, gradient.transpose(2, 3), -offset, k_into, queries_into),
    )
    for x, vectors, above, shift, x_into, vectors_into in sides:
        if vectors is None or vectors_into is None:
            continue
        rows, others = above.shape[1], above.shape[3]
        for part in _parts(vectors, relative.reach, above.shape, shift):
            tokens, tokens_into = (y[:, part.tokens] if rows == 1 else y for y in (x, x_into))
            products = _view(buffer, tokens, part.met).zero_()
            skew(products.unflatten(1, (rows, -1)), others).copy_(above[:, :, part.tokens])
            tokens_into.baddbmm_(products, part.met.transpose(1, 2), alpha=scale)
            inside = products[..., part.before : products.shape[2] - part.after]
            vectors_into[..., part.inside].baddbmm_(tokens.transpose(1, 2), inside, alpha=scale)


def _view(buffer: Tensor, tokens: Tensor, met: Tensor) -> Tensor:
    shape = (*tokens.shape[:2], met.shape[2])
    return buffer[: shape[0] * shape[1] * shape[2]].view(shape)
