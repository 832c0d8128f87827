"""Scores with vectors of distances: queries meet a key per distance, and keys meet a query per distance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

#: Tokens whose products with all distances in their reach are computed together: each of n tokens needs m of the
#: n + m - 1 distances to m others.
BLOCK = 64


@dataclass(frozen=True, eq=False)
class RelativeVectors:
    """The vectors of all distances from -reach to reach, which `BlockPosition.relative` computes for one layer.

    The score of a query at i and a key at j gets `query_i @ keys[j - i] + queries[i - j] @ key_j`, times the scale.
    """

    #: By rising distance key - query; None for no such score.
    keys: Tensor | None  # [heads, head_dim, distances], which multiplies faster than [heads, distances, head_dim]
    #: By rising distance query - key; None for no such score.
    queries: Tensor | None  # [heads, head_dim, distances]
    reach: int

    def scores(self, q: Tensor, k: Tensor, offset: int = 0) -> Tensor:
        """Return the scores `[rows, heads, queries, keys]` of `[rows, heads, n, head_dim]`, unscaled.

        `offset` is the index of the first key in the sequence minus that of the first query. Distances beyond the reach
        have the score 0.
        """
        parts = []
        if self.keys is not None:
            parts.append(self._meet(q, self.keys, k.shape[2], offset))
        if self.queries is not None:
            parts.append(self._meet(k, self.queries, q.shape[2], -offset).transpose(-2, -1))
        return sum(parts[1:], parts[0])

    def _meet(self, x: Tensor, vectors: Tensor, others: int, offset: int) -> Tensor:
        """`[rows, heads, n, d]` -> `[rows, heads, n, others]`: x at i times the vector of distance j - i + offset."""
        blocks = []
        for start in range(0, x.shape[2], BLOCK):
            block = x[:, :, start : start + BLOCK]
            met = select_distances(vectors, self.reach, block.shape[2], others, offset - start)
            blocks.append(skew(torch.einsum("rhnd,hdw->rhnw", block, met), others))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def distance_slice(reach: int, num_tokens: int, others: int, offset: int) -> tuple[slice, int, int]:
    """Which vectors `num_tokens` tokens meet in `others` tokens that begin `offset` later.

    Returns the slice of all vectors, and how many distances beyond the reach come before and after it.
    """
    first = reach + offset - (num_tokens - 1)
    last = reach + offset + others  # exclusive
    size = 2 * reach + 1
    start, stop = min(max(first, 0), size), min(max(last, 0), size)
    stop = max(start, stop)
    before = min(max(-first, 0), last - first)
    return slice(start, stop), before, (last - first) - before - (stop - start)


def select_distances(vectors: Tensor, reach: int, num_tokens: int, others: int, offset: int) -> Tensor:
    """Return the vectors `[heads, d, num_tokens + others - 1]` of `distance_slice`, with 0 beyond the reach."""
    inside, before, after = distance_slice(reach, num_tokens, others, offset)
    vectors = vectors[..., inside]
    return F.pad(vectors, (before, after)) if before or after else vectors


def skew(x: Tensor, width: int) -> Tensor:
    """Shift row i of n rows left by n - 1 - i: `[..., n, n + width - 1]` -> `[..., n, width]`, a view.

    Example:
        >>> skew(torch.tensor([[-2, -1, 0, 1, 2]] * 3), 3).tolist()
        [[0, 1, 2], [-1, 0, 1], [-2, -1, 0]]
    """
    rows, step = x.shape[-2], x.shape[-1] - 1
    if rows == 1:
        return x
    return x.flatten(-2)[..., rows - 1 : rows - 1 + rows * step].unflatten(-1, (rows, step))[..., :width]
