"""Masked softmax attention, for all queries at once, for blocks of queries, or for one row after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.position import BlockPosition
from bertblocks.flax.numerics import lowest

#: The number of queries in a block.
BLOCK_SIZE = 64
#: The largest number of scores of one row that are held at once.
MAX_SCORES = 2**26


class TokenLocations(NamedTuple):
    """The location of some tokens of every row."""

    columns: Array  # [tokens]
    segment_ids: Array  # [rows, tokens]
    #: The index of each token within its sequence.
    indexes: Array  # [rows, tokens]


@dataclass(frozen=True)
class Softmax:
    """The attention of one layer: its pattern, scale and dropout."""

    position: BlockPosition
    #: The largest distance of a key that a query attends to; None: all keys of the sequence.
    half_window: int | None
    #: The first tokens of a sequence attend to all others, and all others to them, regardless of the window.
    num_global_tokens: int
    scale: float
    dropout: float
    #: A logit per head that joins the softmax over the keys of each query.
    sinks: Array | None = None

    def visible(self, queries: TokenLocations, keys: TokenLocations) -> Array:
        """Returns the keys that each query attends to: `[rows, queries, keys]`."""
        seen = (queries.segment_ids[:, :, None] == keys.segment_ids[:, None]) & (keys.segment_ids > 0)[:, None]
        if self.half_window is None:
            return seen
        near = jnp.abs(queries.columns[:, None] - keys.columns) <= self.half_window
        if self.num_global_tokens:
            is_global = queries.indexes[:, :, None] < self.num_global_tokens
            near = near | is_global | (keys.indexes[:, None] < self.num_global_tokens)
        return seen & near

    def attend(
        self,
        q: Array,  # [rows, queries, kv_heads, heads per kv_head, d]
        k: Array,  # [rows, keys, kv_heads, d]
        v: Array,
        queries: TokenLocations,
        keys: TokenLocations,
        dropout_key: Array | None,
    ) -> tuple[Array, Array]:
        """Returns the output, shaped like q, and the weights `[rows, kv_heads, heads per kv_head, queries, keys]`."""
        # heads before tokens, and weights divided by their sum after the product: a quarter less time on a CPU
        q, k, v = jnp.moveaxis(q, 1, 3), jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
        scores = jnp.einsum("rghqd,rgkd->rghqk", q, k, preferred_element_type=jnp.float32) * self.scale
        bias = self.position.bias(keys.columns - queries.columns[:, None])
        if bias is not None:
            scores = scores + bias.reshape(*scores.shape[1:])
        seen = self.visible(queries, keys)[:, None, None]
        scores = jnp.where(seen, scores, lowest(scores.dtype))
        highest = scores.max(axis=-1, keepdims=True)
        sinks = None
        if self.sinks is not None:
            sinks = self.sinks.astype(scores.dtype).reshape(*scores.shape[1:3], 1, 1)
            highest = jnp.maximum(highest, sinks)
        highest = jax.lax.stop_gradient(highest)
        weights = jnp.exp(scores - highest)
        total = weights.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total = total + jnp.exp(sinks - highest)
        share = jnp.where(seen.any(axis=-1, keepdims=True), 1 / total, 0)  # a query without keys gets 0
        dropped = weights.astype(q.dtype)
        if dropout_key is not None and self.dropout:
            keep = jax.random.bernoulli(dropout_key, 1 - self.dropout, weights.shape)
            dropped = jnp.where(keep, dropped / (1 - self.dropout), 0).astype(q.dtype)
        mixed = jnp.einsum("rghqk,rgkd->rghqd", dropped, v, preferred_element_type=jnp.float32) * share
        return jnp.moveaxis(mixed, 3, 1).astype(q.dtype), (weights * share).astype(q.dtype)

    def reach(self) -> int | None:
        """Returns the largest distance of a key on either side; None if it is not limited."""
        return None if self.num_global_tokens else self.half_window

    def goes_by_blocks(self, length: int, heads: int) -> bool:
        """Whether a window excludes most keys, or all scores would not fit."""
        reach = self.reach()
        is_narrow = reach is not None and length > 2 * (BLOCK_SIZE + 2 * reach)
        return is_narrow or heads * length * length > MAX_SCORES

    def attend_by_blocks(self, q: Array, k: Array, v: Array, layout: RowLayout, dropout_key: Array | None) -> Array:
        """Attends in blocks of queries, each to the keys in its reach; the backward pass recomputes them."""
        length, heads = q.shape[1], q.shape[2] * q.shape[3]
        blocks = -(-length // BLOCK_SIZE)
        reach = self.reach()
        margin = 0 if reach is None else reach
        width = length if reach is None else BLOCK_SIZE + 2 * reach
        tail = blocks * BLOCK_SIZE - length
        q, segment_ids, index = (_pad(x, 0, tail) for x in (q, layout.segment_ids, layout.index))
        after = 0 if reach is None else margin + tail
        k, v, key_segments, key_index = (_pad(x, margin, after) for x in (k, v, layout.segment_ids, layout.index))

        def attend_block(block: tuple[Array, Array | None]) -> Array:
            start, key = block
            first = jnp.zeros_like(start) if reach is None else start
            q_block, segments_block, index_block = (_cut(x, start, BLOCK_SIZE) for x in (q, segment_ids, index))
            k_slab, v_slab, segments_slab, index_slab = (_cut(x, first, width) for x in (k, v, key_segments, key_index))
            queries = TokenLocations(start + jnp.arange(BLOCK_SIZE), segments_block, index_block)
            keys = TokenLocations(first - margin + jnp.arange(width), segments_slab, index_slab)
            return self.attend(q_block, k_slab, v_slab, queries, keys, key)[0]

        starts = jnp.arange(blocks) * BLOCK_SIZE
        keys = None if dropout_key is None else jax.random.split(dropout_key, blocks)
        together = max(1, MAX_SCORES // (heads * BLOCK_SIZE * width))
        done = jax.lax.map(jax.checkpoint(attend_block), (starts, keys), batch_size=min(together, blocks))
        return jnp.moveaxis(done, 0, 1).reshape(q.shape)[:, :length]

    def attend_by_rows(self, q: Array, k: Array, v: Array, layout: RowLayout, dropout_key: Array | None) -> Array:
        """Attends in one row after the other, so that on a CPU the scores of a row stay in the caches."""
        columns = jnp.arange(q.shape[1])

        def attend_row(row: tuple[Array, Array, Array, Array, Array, Array | None]) -> Array:
            q, k, v, segments, index = (x[None] for x in row[:5])
            tokens = TokenLocations(columns, segments, index)
            return self.attend(q, k, v, tokens, tokens, row[5])[0][0]

        keys = None if dropout_key is None else jax.random.split(dropout_key, len(q))
        return jax.lax.map(attend_row, (q, k, v, layout.segment_ids, layout.index, keys))

    def __call__(
        self, q: Array, k: Array, v: Array, layout: RowLayout, dropout_key: Array | None, output_weights: bool
    ) -> tuple[Array, Array | None]:
        length, heads = q.shape[1], q.shape[2] * q.shape[3]
        if not output_weights and self.goes_by_blocks(length, heads):
            return self.attend_by_blocks(q, k, v, layout, dropout_key), None
        if not output_weights and len(q) > 1 and jax.default_backend() == "cpu":
            return self.attend_by_rows(q, k, v, layout, dropout_key), None
        tokens = TokenLocations(jnp.arange(length), layout.segment_ids, layout.index)
        attended, weights = self.attend(q, k, v, tokens, tokens, dropout_key)
        return attended, weights.reshape(-1, heads, length, length) if output_weights else None


def _pad(x: Array, before: int, after: int) -> Array:
    """Pads the second axis with zeros."""
    return jnp.pad(x, ((0, 0), (before, after), *((0, 0),) * (x.ndim - 2)))


def _cut(x: Array, start: Array, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis=1)
