"""The input of compiled code."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jax import Array

from bertblocks.flax.layout import RowLayout

#: The label of tokens and sequences that do not enter the loss.
IGNORE = -100


class Options(NamedTuple):
    """Static arguments of compiled code."""

    max_segments: int | None
    output_hidden_states: bool
    output_attentions: bool


class Inputs(struct.PyTreeNode):
    """The arrays of a batch, each `[rows, length]` unless noted."""

    input_ids: Any = None
    attention_mask: Any = None
    token_type_ids: Any = None
    position_ids: Any = None
    inputs_embeds: Any = None  # [rows, length, embedding]
    segment_ids: Any = None
    labels: dict[str, Any] = struct.field(default_factory=dict)
    dropout_key: Any = None

    @property
    def shape(self) -> tuple[int, int]:
        ids = self.inputs_embeds if self.input_ids is None else self.input_ids
        return ids.shape[0], ids.shape[1]

    def rngs(self) -> nnx.Rngs | None:
        return None if self.dropout_key is None else nnx.Rngs(self.dropout_key)

    def is_traced(self) -> bool:
        """Whether this runs inside a function that the caller compiles, where values are not known."""
        return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(self.replace(dropout_key=None)))

    def is_spread(self) -> bool:
        """Whether the batch is sharded over several devices; such a batch is not padded."""
        leaves = jax.tree.leaves(self.replace(dropout_key=None))
        return any(isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1 for leaf in leaves)

    def is_in_reach(self) -> bool:
        """Whether this process can read the whole batch: none of it is on devices of other processes."""
        return all(leaf.is_fully_addressable for leaf in jax.tree.leaves(self) if isinstance(leaf, jax.Array))

    def layout(self, max_segments: int | None) -> RowLayout:
        if self.segment_ids is not None:
            layout = RowLayout.from_segments(self.segment_ids, max_segments or self.shape[1])
        elif self.attention_mask is not None:
            layout = RowLayout.from_mask(self.attention_mask)
        else:
            layout = RowLayout.from_mask(jnp.ones(self.shape, bool))
        if self.position_ids is None:
            return layout
        return layout.replace(positions=jnp.where(layout.real, self.position_ids, 0))

    def table_positions(self, layout: RowLayout, offset: int) -> Array:
        """Returns indices into a position table. With an offset, as in RoBERTa and NeoBERT, only real tokens count."""
        if self.position_ids is not None:
            return layout.positions
        if offset and self.attention_mask is not None:
            return jnp.where(layout.real, jnp.cumsum(layout.real, axis=1) - 1, 0) + offset
        return layout.positions + offset
