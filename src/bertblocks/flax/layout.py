"""How rows of fixed length hold sequences, as arrays for compiled code."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import Array


class RowLayout(struct.PyTreeNode):
    """Built once per forward pass and shared by all layers.

    Compiled code has static shapes, so padding keeps its slots: no token attends to it, and its results are dropped.
    """

    #: The sequence of every token, counted from 1 in each row; 0 for padding.
    segment_ids: Array  # [rows, length]
    #: The index of every slot within its sequence.
    index: Array  # [rows, length]
    #: The positions for RoPE and for position tables: those of the caller, or `index`.
    positions: Array  # [rows, length]
    #: The largest number of sequences in a row; None if each row is one sequence.
    max_segments: int | None = struct.field(pytree_node=False)

    @classmethod
    def from_mask(cls, keep: Array) -> RowLayout:
        """One sequence per row, from its first real token on. Masked tokens inside it count for distances."""
        columns = jnp.arange(keep.shape[1])
        index = columns - jnp.argmax(keep, axis=1)[:, None]
        return cls(keep.astype(jnp.int32), index, jnp.where(keep, index, 0), None)

    @classmethod
    def from_segments(cls, segment_ids: Array, max_segments: int) -> RowLayout:
        """Several sequences per row, each a run of equal ids."""
        columns = jnp.broadcast_to(jnp.arange(segment_ids.shape[1]), segment_ids.shape)
        before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        starts = jax.lax.cummax(jnp.where(segment_ids != before, columns, 0), axis=1)
        index = columns - starts
        return cls(segment_ids, index, jnp.where(segment_ids > 0, index, 0), max_segments)

    @property
    def real(self) -> Array:
        """True for tokens, False for padding: `[rows, length]`."""
        return self.segment_ids > 0

    @property
    def members(self) -> Array:
        """Whether a token belongs to a sequence: `[rows, sequences, length]`."""
        count = 1 if self.max_segments is None else self.max_segments
        return self.segment_ids[:, None] == jnp.arange(1, count + 1)[:, None]

    def per_sequence(self, x: Array) -> Array:
        """Drops the axis of sequences from `[rows, sequences, ...]` if each row is one sequence."""
        return x[:, 0] if self.max_segments is None else x

    def spread(self, per_sequence: Array) -> Array:
        """Broadcasts one number per sequence to its tokens, with 0 for padding."""
        return jnp.where(self.members, per_sequence[..., None], 0).sum(axis=1)

    def zero_padding(self, x: Array, fill: float = 0.0) -> Array:
        """Returns x with `fill` in every slot of padding."""
        return jnp.where(self.real.reshape(*self.real.shape, *(1,) * (x.ndim - 2)), x, fill)
