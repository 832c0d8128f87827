"""Position encodings: those added to the embeddings, and those that act inside attention."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bertblocks.layout import SequenceLayout
from bertblocks.numerics import upcast
from bertblocks.registry import Registry

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

EMBEDDING_POSITIONS: Registry[Any] = Registry("embd_pos_enc_kind")
BLOCK_POSITIONS: Registry[Any] = Registry("block_pos_enc_kind")


def register_position(name: str, level: str = "block"):
    """Decorator that names a `BlockPosition` (level "block") or an `EmbeddingPosition` (level "embedding")."""
    levels = {"block": BLOCK_POSITIONS, "embedding": EMBEDDING_POSITIONS}
    if level not in levels:
        raise ValueError(f"register_position: level is {level!r}; it must be 'block' or 'embedding'.")
    return levels[level].register(name)


# ---------------------------------------------------------------------- embedding level


class EmbeddingPosition(nn.Module):
    """Maps token positions to vectors that are added to the token embeddings."""

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> EmbeddingPosition:
        raise TypeError(f"{cls.__name__} must define from_config(config)")

    def forward(self, positions: Tensor) -> Tensor:  # [tokens] -> [tokens, hidden]
        raise TypeError(f"{type(self).__name__} must define forward(positions)")


@register_position("learned", level="embedding")
class LearnedPosition(EmbeddingPosition):
    """A table of vectors. RoBERTa and NeoBERT count from an offset; the row before it belongs to padding."""

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(num_positions, hidden_size, padding_idx=offset - 1 if offset else None)

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> LearnedPosition:
        return cls(config.max_position_embeddings, config.hidden_size, config.position_offset)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table(positions)


@register_position("sinusoidal", level="embedding")
class SinusoidalPosition(EmbeddingPosition):
    """Sines on even units, cosines on odd ones (Vaswani et al., 2017); any length."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> SinusoidalPosition:
        return cls(config.hidden_size)

    def forward(self, positions: Tensor) -> Tensor:
        units = torch.arange(0, self.hidden_size, 2, device=positions.device, dtype=torch.float32)
        angles = positions[:, None].float() * torch.exp(units * (-math.log(10_000.0) / self.hidden_size))
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.hidden_size]


# ---------------------------------------------------------------------- block level


class BlockPosition(nn.Module):
    """How attention knows order: by turning queries and keys, by adding a bias that depends on distance, or both."""

    #: ALiBi's slope of every head, which flash-attn takes in place of a bias.
    slopes: tuple[float, ...] | None = None
    has_bias = False

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> BlockPosition:
        raise TypeError(f"{cls.__name__} must define from_config(config, is_local)")

    def rotate(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Queries `[tokens, heads, d]` and keys `[tokens, kv_heads, d]`, turned."""
        return q, k

    def bias(self, distance: Tensor) -> Tensor:
        """What to add to the scores of keys at `distance` = key - query, as `[heads, *distance.shape]`."""
        raise TypeError(f"{type(self).__name__} has no bias")


@register_position("alibi")
class ALiBi(BlockPosition):
    """Scores fall linearly with distance, at a rate of each head's own (Press et al., 2022), symmetric for encoders."""

    has_bias = True

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.slopes = alibi_slopes(num_heads)

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> ALiBi:
        return cls(config.num_attention_heads)

    def bias(self, distance: Tensor) -> Tensor:
        slopes = torch.tensor(self.slopes, device=distance.device).view(-1, *(1,) * distance.dim())
        return -slopes * distance.abs()


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """2^(-8(k+1)/n) for a power of two; otherwise those of the next lower one, then every second of twice that."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    finer = [2 ** (-8 * (k + 1) / (2 * power)) for k in range(0, 2 * power, 2)]
    return (*slopes, *finer[: num_heads - power])


@register_position("rope")
class RotaryPosition(BlockPosition):
    """Rotary embedding (Su et al., 2021) with partial, interleaved and scaled forms; tables in fp32, of any length.

    Dynamic scaling depends on the length of each sequence alone, so that a text's result never depends on its batch.
    """

    def __init__(
        self,
        head_dim: int,
        theta: float,
        partial_factor: float = 1.0,
        interleaved: bool = False,
        scaling: dict[str, Any] | None = None,
        max_positions: int = 512,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.partial_factor = partial_factor
        self.rotary_dim = int(head_dim * partial_factor)
        self.interleaved = interleaved
        self.scaling = scaling
        self.max_positions = max_positions
        scaling_key = json.dumps(scaling, sort_keys=True)
        self._memo_key = ("rope", self.rotary_dim, theta, scaling_key, max_positions)

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> RotaryPosition:
        return cls(
            config.head_dim,
            config.local_rope_theta if is_local else config.rope_theta,
            partial_factor=config.partial_rotary_factor,
            interleaved=config.rope_interleaved,
            scaling=config.local_rope_scaling if is_local else config.rope_scaling,
            max_positions=config.max_position_embeddings,
        )

    def frequencies(self, length: int | None = None) -> tuple[Tensor, float]:
        """Angle per position of every pair, and the factor on the tables, for a sequence of `length`."""
        if self.scaling is None:
            exponents = torch.arange(0, self.rotary_dim, 2, dtype=torch.float32) / self.rotary_dim
            return 1.0 / (self.theta**exponents), 1.0
        parameters = {**self.scaling, "rope_theta": self.theta, "partial_rotary_factor": self.partial_factor}
        parameters.setdefault("original_max_position_embeddings", self.max_positions)
        # transformers' own formulas, given just what they read of a config
        config = SimpleNamespace(
            rope_parameters=parameters,
            head_dim=self.head_dim,
            hidden_size=self.head_dim,
            num_attention_heads=1,
            max_position_embeddings=self.max_positions,
            standardize_rope_params=lambda: None,
        )
        return ROPE_INIT_FUNCTIONS[self.scaling["rope_type"]](config, None, seq_len=length)

    def longest_unchanged(self) -> float:
        """The length up to which frequencies do not depend on a sequence's length."""
        kind = None if self.scaling is None else self.scaling["rope_type"]
        if self.scaling is not None and kind == "longrope":
            return self.scaling.get("original_max_position_embeddings", self.max_positions)
        return self.max_positions if kind == "dynamic" else math.inf

    def _angles(self, layout: SequenceLayout) -> tuple[Tensor, float]:
        if layout.max_length <= self.longest_unchanged():
            inverse, factor = self.frequencies()
            return layout.positions[:, None].float() * inverse.to(layout.device), factor
        lengths = layout.length_tensor.tolist()
        rows = {length: self.frequencies(length) for length in set(lengths)}
        factor = next(iter(rows.values()))[1]
        inverse = torch.stack([rows[length][0] for length in lengths]).to(layout.device)  # [sequences, pairs]
        return layout.positions[:, None].float() * inverse[layout.sequence_ids], factor

    def tables(self, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Cosines and sines `[tokens, 1, pairs]`, shared by all layers with the same settings."""

        def compute() -> tuple[Tensor, Tensor]:
            angles, factor = self._angles(layout)
            return (angles.cos() * factor)[:, None], (angles.sin() * factor)[:, None]

        return layout.memo(self._memo_key, compute)

    def rotate(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        cos, sin = self.tables(layout)
        return self._turn(q, cos, sin), self._turn(k, cos, sin)

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        part = upcast(x[..., : self.rotary_dim])
        if self.interleaved:
            a, b = part[..., 0::2], part[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        else:
            a, b = part.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        turned = turned.to(x.dtype)
        return turned if self.rotary_dim == self.head_dim else torch.cat((turned, x[..., self.rotary_dim :]), dim=-1)

    def extra_repr(self) -> str:
        return f"{self.rotary_dim}, theta={self.theta:g}, interleaved={self.interleaved}, scaling={self.scaling}"


def get_embedding_position(config: BertBlocksConfig) -> EmbeddingPosition | None:
    if config.embd_pos_enc_kind == "none":
        return None
    return EMBEDDING_POSITIONS[config.embd_pos_enc_kind].from_config(config)


def get_block_position(config: BertBlocksConfig, is_local: bool) -> BlockPosition:
    if config.block_pos_enc_kind == "none":
        return BlockPosition()
    return BLOCK_POSITIONS[config.block_pos_enc_kind].from_config(config, is_local)
