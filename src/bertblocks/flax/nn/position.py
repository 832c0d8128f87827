"""Position encodings: those added to the embeddings, and those that act inside attention."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from jax import Array

from bertblocks.core.registry import Registry
from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.linear import Table
from bertblocks.flax.numerics import upcast
from bertblocks.nn.position import alibi_slopes, relative_buckets
from bertblocks.nn.rope import RotaryPosition as TorchRotary

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

EMBEDDING_POSITIONS: Registry[Any] = Registry("embd_pos_enc_kind", reserved=("none",))
BLOCK_POSITIONS: Registry[Any] = Registry("block_pos_enc_kind", reserved=("none",))


def register_position(name: str, level: str = "block") -> Callable[[Any], Any]:
    """Decorator that registers the JAX version of a position encoding."""
    return {"block": BLOCK_POSITIONS, "embedding": EMBEDDING_POSITIONS}[level].register(name)


# ---------------------------------------------------------------------- embedding level


@register_position("learned", level="embedding")
class LearnedPosition(nnx.Module):
    """A learned table. RoBERTa and NeoBERT count from an offset; the row before it belongs to padding."""

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        self.table = Table(num_positions, hidden_size, padding=offset - 1 if offset else None)

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> LearnedPosition:
        return cls(config.max_position_embeddings, config.embedding_size, config.position_offset)

    def __call__(self, positions: Array) -> Array:
        return self.table(positions)


@register_position("sinusoidal", level="embedding")
class SinusoidalPosition(nnx.Module):
    """Sines on even units and cosines on odd ones (Vaswani et al., 2017), for any length."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> SinusoidalPosition:
        return cls(config.embedding_size)

    def __call__(self, positions: Array) -> Array:
        units = jnp.arange(0, self.hidden_size, 2, dtype=jnp.float32)
        angles = positions[..., None] * jnp.exp(units * (-math.log(10_000.0) / self.hidden_size))
        both = jnp.stack((jnp.sin(angles), jnp.cos(angles)), axis=-1)
        return both.reshape(*positions.shape, -1)[..., : self.hidden_size]


# ---------------------------------------------------------------------- block level


class BlockPosition(nnx.Module):
    """How attention sees positions: it rotates queries and keys, or adds a bias. This base class does neither."""

    def rotate(self, q: Array, k: Array, layout: RowLayout) -> tuple[Array, Array]:
        """Rotates queries and keys `[rows, length, heads, d]`."""
        return q, k

    def bias(self, distance: Array) -> Array | None:
        """Returns the bias on scores by `distance` = key - query: `[heads, *distance.shape]`."""
        return None


@register_position("alibi")
class ALiBi(BlockPosition):
    """Scores fall linearly with distance, with a slope per head (Press et al., 2022)."""

    def __init__(self, num_heads: int, is_learned: bool = False) -> None:
        self.slopes = alibi_slopes(num_heads)
        self.learned_slopes = nnx.Param(jnp.asarray(self.slopes)) if is_learned else None

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> ALiBi:
        return cls(config.num_attention_heads, config.alibi_learned)

    def bias(self, distance: Array) -> Array:
        slopes = jnp.asarray(self.slopes) if self.learned_slopes is None else self.learned_slopes[...]
        return -slopes.reshape(-1, *(1,) * distance.ndim) * jnp.abs(distance)


@register_position("t5")
class T5Position(BlockPosition):
    """A learned bias per head and bucket of distance, as in T5 (Raffel et al., 2020) and MPNet."""

    def __init__(self, num_heads: int, num_buckets: int, max_distance: int) -> None:
        self.max_distance = max_distance
        self.table = nnx.Param(jnp.zeros((num_buckets, num_heads)))

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> T5Position:
        buckets, reach = config.relative_attention_num_buckets, config.relative_attention_max_distance
        return cls(config.num_attention_heads, buckets, reach)

    def bias(self, distance: Array) -> Array:
        # larger distances share the last bucket of their side
        reach, table = self.max_distance, self.table[...]
        buckets = relative_buckets(torch.arange(-reach, reach + 1), table.shape[0], reach).numpy()
        return jnp.moveaxis(table[jnp.asarray(buckets)[jnp.clip(distance, -reach, reach) + reach]], -1, 0)


@register_position("rope")
class RotaryPosition(BlockPosition):
    """Rotary embedding (Su et al., 2021) with all frequency scalings of the torch module."""

    def __init__(self, settings: dict[str, Any], interleaved: bool) -> None:
        # text, because static attributes must be comparable: they are part of the key of compiled code
        self.settings = json.dumps(settings)
        self.rotary_dim = int(settings["head_dim"] * settings["partial_factor"])
        self.interleaved = interleaved

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> RotaryPosition:
        settings = {
            "head_dim": config.head_dim,
            "theta": config.local_rope_theta if is_local else config.rope_theta,
            "partial_factor": config.partial_rotary_factor,
            "scaling": config.local_rope_scaling if is_local else config.rope_scaling,
            "max_positions": config.max_position_embeddings,
            "frequency_dtype": config.rope_frequency_dtype,
        }
        return cls(settings, config.rope_interleaved)

    def angles(self, layout: RowLayout) -> tuple[Array, float]:
        """Returns the angles `[rows, length, pairs]` and the factor on their sines and cosines."""
        settings = json.loads(self.settings)
        rotary = TorchRotary(**{**settings, "frequency_dtype": getattr(torch, settings["frequency_dtype"])})
        frequencies, factor = rotary.frequencies()
        positions, length = layout.positions[..., None].astype(jnp.float32), layout.positions.shape[1]
        if length <= rotary.longest_unchanged():
            return positions * jnp.asarray(frequencies.numpy()), factor
        # frequencies depend on the length of the sequence, so there is a row for every length
        unchanged = int(rotary.longest_unchanged())
        longer = [rotary.frequencies(number)[0].numpy() for number in range(unchanged + 1, length + 1)]
        rows = jnp.asarray(np.stack([*[frequencies.numpy()] * (unchanged + 1), *longer]))
        return positions * rows[layout.spread(layout.members.sum(-1))], factor

    def rotate(self, q: Array, k: Array, layout: RowLayout) -> tuple[Array, Array]:
        angles, factor = self.angles(layout)
        cos, sin = (jnp.cos(angles) * factor)[:, :, None], (jnp.sin(angles) * factor)[:, :, None]
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: Array, cos: Array, sin: Array) -> Array:
        part, rest = upcast(x[..., : self.rotary_dim]), x[..., self.rotary_dim :]
        if self.interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            rotated = jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(part.shape)
        else:
            a, b = jnp.split(part, 2, axis=-1)
            rotated = jnp.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
        return jnp.concatenate((rotated.astype(x.dtype), rest), axis=-1)


def get_embedding_position(config: BertBlocksConfig) -> LearnedPosition | SinusoidalPosition | None:
    if config.embd_pos_enc_kind == "none":
        return None
    return EMBEDDING_POSITIONS[config.embd_pos_enc_kind].from_config(config)


def get_shared_position(config: BertBlocksConfig) -> T5Position | None:
    """Returns the table that all layers of kind "t5" share, or None."""
    kinds = {config.for_layer(index).block_pos_enc_kind for index in range(config.num_hidden_layers)}
    return T5Position.from_config(config, False) if config.relative_attention_shared and "t5" in kinds else None


def get_block_position(config: BertBlocksConfig, is_local: bool) -> BlockPosition | None:
    """Returns the position of a layer, or None if it uses the shared one of the encoder."""
    if config.block_pos_enc_kind == "none":
        return BlockPosition()
    if config.block_pos_enc_kind == "t5" and config.relative_attention_shared:
        return None
    return BLOCK_POSITIONS[config.block_pos_enc_kind].from_config(config, is_local)
