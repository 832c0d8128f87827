"""The layers between hidden states and the logits of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.activation import get_activation
from bertblocks.flax.nn.linear import Linear, dropout
from bertblocks.flax.nn.norm import Norm, get_norm
from bertblocks.flax.numerics import lowest

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


def pool(x: Array, layout: RowLayout, kind: str) -> Array:
    """Returns one vector per sequence: its first token ("cls"), or the "mean" or "max" of its real tokens.

    The shape is `[rows, hidden]`, or `[rows, sequences, hidden]` for packed rows. Empty sequences give 0.
    """
    members = layout.members  # [rows, sequences, length]
    counts = members.sum(-1)[..., None]
    if kind == "max":
        # one sequence at a time: all at once would need sequences x length x hidden
        def highest(members: Array) -> Array:
            return jnp.where(members[..., None], x, lowest(x.dtype)).max(axis=1)

        pooled = jax.lax.map(highest, jnp.moveaxis(members, 1, 0)).swapaxes(0, 1)
    else:
        chosen = members if kind == "mean" else members & (jnp.cumsum(members, axis=-1) == 1)
        weights = chosen / jnp.maximum(chosen.sum(-1, keepdims=True), 1)
        pooled = jnp.einsum("rsl,rlh->rsh", weights.astype(x.dtype), x)
    return layout.per_sequence(jnp.where(counts > 0, pooled, 0.0).astype(x.dtype))


class Pooler(nnx.Module):
    """BERT's pooler: a dense layer and tanh on the first token."""

    def __init__(self, hidden_size: int) -> None:
        self.dense = Linear(hidden_size, hidden_size, bias=True)

    def __call__(self, x: Array, layout: RowLayout) -> Array:
        return jnp.tanh(self.dense(pool(x, layout, "cls")))


class Frozen(nnx.Variable):
    """A parameter that is not trained."""


class ContactHead(nnx.Module):
    """Predicts contacts of residues by logistic regression on attention weights (Rao et al., 2021).

    It is fitted separately from the encoder, so it is frozen.
    """

    def __init__(self, num_maps: int) -> None:
        self.weight = Frozen(jnp.zeros((1, num_maps)))
        self.bias = Frozen(jnp.zeros(1))

    def __call__(self, maps: Array, keep: Array) -> Array:
        """`[rows, maps, length, length]` and tokens to keep `[rows, length]` -> `[rows, length - 2, length - 2]`."""
        maps = (maps * (keep[:, None, :, None] & keep[:, None, None]))[..., 1:-1, 1:-1]
        maps = maps + maps.swapaxes(-1, -2)
        # average product correction: subtracts what two tokens have in common with all others
        total = jnp.maximum(maps.sum((-1, -2), keepdims=True), jnp.finfo(maps.dtype).tiny)
        maps = maps - maps.sum(-1, keepdims=True) * maps.sum(-2, keepdims=True) / total
        return jax.nn.sigmoid(jnp.einsum("m,rmij->rij", self.weight[0], maps) + self.bias)


class DenseHead(nnx.Module):
    """dropout -> dense -> activation -> norm; `inner_size` adds a dense layer with activation before.

    If `is_gated`, dense and activation are a gated linear unit.
    """

    def __init__(
        self,
        hidden_size: int,
        activation: str,
        bias: bool,
        norm: Norm | None,
        dropout: float = 0.0,
        out_size: int | None = None,
        inner_size: int | None = None,
        is_gated: bool = False,
    ) -> None:
        self.dropout = dropout
        self.inner = None if inner_size is None else Linear(hidden_size, inner_size, bias)
        self.dense = Linear(inner_size or hidden_size, (out_size or hidden_size) * (2 if is_gated else 1), bias)
        self.is_gated = is_gated
        self.activation = get_activation(activation)
        self.norm = norm

    def __call__(self, x: Array, rngs: nnx.Rngs | None) -> Array:
        x = dropout(x, self.dropout, rngs)
        if self.inner is not None:
            x = self.activation(self.inner(x))
        if self.is_gated:
            gate, value = jnp.split(self.dense(x), 2, axis=-1)
            x = self.activation(gate) * value
        else:
            x = self.activation(self.dense(x))
        return x if self.norm is None else self.norm(x)


class Decoder(nnx.Module):
    """Logits over the vocabulary, by its own matrix or, if tied, by the token embeddings."""

    def __init__(self, size: int, vocab_size: int, bias: bool, is_tied: bool) -> None:
        self.weight = None if is_tied else nnx.Param(jnp.zeros((vocab_size, size)))
        self.bias = nnx.Param(jnp.zeros(vocab_size)) if bias else None

    def __call__(self, x: Array, tied_weight: Array) -> Array:
        weight = tied_weight if self.weight is None else self.weight[...]
        y = jnp.einsum("...i,oi->...o", x, weight)
        return y if self.bias is None else y + self.bias


def get_mlm_head(config: BertBlocksConfig) -> DenseHead | None:
    if not config.mlm_head_dense:
        return None
    size = config.decoder_size
    norm = get_norm(config, size) if config.mlm_head_norm else None
    return DenseHead(
        config.hidden_size,
        config.mlm_head_act,
        config.mlm_head_bias,
        norm,
        out_size=size,
        inner_size=config.mlm_head_size,
        is_gated=config.mlm_head_glu,
    )


def get_classifier_head(config: BertBlocksConfig) -> DenseHead | None:
    if config.classifier_head != "dense":
        return None
    norm = get_norm(config) if config.classifier_head_norm else None
    return DenseHead(
        config.hidden_size,
        config.classifier_head_act,
        config.classifier_head_bias,
        norm,
        dropout=config.classifier_head_dropout,
    )
