"""Position encodings, added to the embeddings or applied inside attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from bertblocks.core.keys import Key, Problem
from bertblocks.core.registry import Registry
from bertblocks.nn.initialization import draw_normal
from bertblocks.nn.layout import SequenceLayout, to_device

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

EMBEDDING_POSITIONS: Registry[Any] = Registry("embd_pos_enc_kind", reserved=("none",))
BLOCK_POSITIONS: Registry[Any] = Registry("block_pos_enc_kind", reserved=("none",))


def register_position(name: str, level: str = "block") -> Callable[[Any], Any]:
    """Decorator that registers a `BlockPosition` (level "block") or an `EmbeddingPosition` (level "embedding")."""
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

    def forward(self, positions: Tensor) -> Tensor:  # [tokens] -> [tokens, embedding]
        raise TypeError(f"{type(self).__name__} must define forward(positions)")


@register_position("learned", level="embedding")
class LearnedPosition(EmbeddingPosition):
    """A learned table. RoBERTa and NeoBERT count from an offset; the row before it is for padding."""

    keys: ClassVar[dict[str, Key]] = {
        "position_offset": Key(
            int,
            0,
            "First learned position: 0 in BERT, pad_token_id + 1 in RoBERTa, 1 in NeoBERT.",
            least=0,
            most=2**24,
        )
    }

    def __init__(self, num_positions: int, hidden_size: int, offset: int = 0) -> None:
        super().__init__()
        self.table = nn.Embedding(num_positions, hidden_size, padding_idx=offset - 1 if offset else None)

    @classmethod
    def check(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        rows = config.max_position_embeddings
        yield (
            "position_offset",
            config.position_offset >= rows,
            f"it must be less than max_position_embeddings = {rows}",
        )

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> LearnedPosition:
        return cls(config.max_position_embeddings, config.embedding_size, config.position_offset)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table(positions)


@register_position("sinusoidal", level="embedding")
class SinusoidalPosition(EmbeddingPosition):
    """Sines on even units and cosines on odd ones (Vaswani et al., 2017), for any length."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> SinusoidalPosition:
        return cls(config.embedding_size)

    def forward(self, positions: Tensor) -> Tensor:
        units = torch.arange(0, self.hidden_size, 2, device=positions.device, dtype=torch.float32)
        angles = positions[:, None].float() * torch.exp(units * (-math.log(10_000.0) / self.hidden_size))
        return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, : self.hidden_size]


# ---------------------------------------------------------------------- block level


class BlockPosition(nn.Module):
    """Encodes positions in attention by rotating queries and keys, or by scores that depend on distance.

    Such a score is a bias, the same for all tokens, or the product of a token with a vector that the distance has.
    """

    #: The slope of every head in ALiBi, which flash-attn takes instead of a bias.
    slopes: tuple[float, ...] | None = None
    has_bias = False
    #: True if distances have vectors, see `relative`.
    is_relative = False
    #: Factor on the scores of content and position together.
    score_scale = 1.0
    #: True if the encoder owns the module and layers only refer to it.
    is_shared = False

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> BlockPosition:
        raise TypeError(f"{cls.__name__} must define from_config(config, is_local)")

    @classmethod
    def make_shared(cls, config: BertBlocksConfig) -> nn.Module | None:
        """Build what all layers of this kind share and the encoder owns; None for nothing."""
        return None

    @classmethod
    def from_shared(cls, config: BertBlocksConfig, is_local: bool, shared: nn.Module | None) -> BlockPosition:
        """Build a layer's position around what layers share, which may belong to another kind."""
        return cls.from_config(config, is_local)

    def rotate(self, q: Tensor, k: Tensor, layout: SequenceLayout) -> tuple[Tensor, Tensor]:
        """Rotate queries `[tokens, heads, d]` and keys `[tokens, kv_heads, d]`."""
        return q, k

    def prepare(self, layout: SequenceLayout) -> None:
        """Compute what layers share of `rotate` in a forward pass."""
        return

    def bias(self, distance: Tensor) -> Tensor:
        """Return the bias `[heads, *distance.shape]` on the scores of keys at `distance` = key - query."""
        raise TypeError(f"{type(self).__name__} has no bias")

    def relative(
        self, layout: SequenceLayout, reach: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return a query and a key for every distance query - key from -reach to reach.

        Tokens meet these keys with their queries and these queries with their keys; None for no such scores. `project`
        maps vectors `[n, hidden]` to the layer's queries `[n, heads, d]` and keys `[n, kv_heads, d]`.
        """
        raise TypeError(f"{type(self).__name__} has no vectors of distances")

    def bias_key(self) -> Hashable | None:
        """Return equal keys for layers that may share their bias within a forward pass, or None if they may not."""
        return self.slopes


@register_position("alibi")
class ALiBi(BlockPosition):
    """Scores fall linearly with distance, at a different rate per head (Press et al., 2022); symmetric for encoders."""

    keys: ClassVar[dict[str, Key]] = {
        "alibi_learned": Key(
            bool,
            False,
            "Whether training changes the slopes. No controlled study of encoders is known.",
            per_layer=True,
        )
    }
    has_bias = True

    def __init__(self, num_heads: int, is_learned: bool = False) -> None:
        super().__init__()
        slopes = alibi_slopes(num_heads)
        self.slopes = None if is_learned else slopes
        self.learned_slopes = nn.Parameter(torch.tensor(slopes)) if is_learned else None

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> ALiBi:
        return cls(config.num_attention_heads, config.alibi_learned)

    def init_parameters(self, config: BertBlocksConfig) -> None:
        if self.learned_slopes is not None:
            init.copy_(self.learned_slopes, torch.tensor(alibi_slopes(len(self.learned_slopes))))

    def bias(self, distance: Tensor) -> Tensor:
        learned = self.learned_slopes
        slopes: Tensor = to_device(torch.tensor(self.slopes), distance.device) if learned is None else learned
        return -slopes.view(-1, *(1,) * distance.dim()) * distance.abs()


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return 2^(-8(k+1)/n) for n a power of two.

    For other n, take the slopes of the next lower power of two, then every second slope of the next higher one.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * (k + 1) / power) for k in range(power)]
    finer = [2 ** (-8 * (k + 1) / (2 * power)) for k in range(0, 2 * power, 2)]
    return (*slopes, *finer[: num_heads - power])


@register_position("t5")
class T5Position(BlockPosition):
    """A learned bias per head and distance bucket, as in T5 (Raffel et al., 2020) and MPNet."""

    keys: ClassVar[dict[str, Key]] = {
        "relative_attention_num_buckets": Key(
            int, 32, "Number of distance buckets, both directions together.", most=2**20
        ),
        "relative_attention_max_distance": Key(
            int, 128, "Distance at which the logarithmic buckets end; all larger distances share one.", most=2**24
        ),
        "relative_attention_shared": Key(
            bool, True, "Whether all layers share one table of biases, as in T5 and MPNet."
        ),
    }

    has_bias = True

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, is_shared: bool = False) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.is_shared = is_shared
        self.table = nn.Parameter(torch.zeros(num_buckets, num_heads))

    @classmethod
    def make_shared(cls, config: BertBlocksConfig) -> T5Position | None:
        return cls.from_config(config, False) if config.relative_attention_shared else None

    @classmethod
    def from_shared(cls, config: BertBlocksConfig, is_local: bool, shared: nn.Module | None) -> BlockPosition:
        is_mine = config.relative_attention_shared and isinstance(shared, T5Position)
        return shared if is_mine else cls.from_config(config, is_local)  # type: ignore[return-value]

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        buckets, key = config.relative_attention_num_buckets, "relative_attention_num_buckets"
        yield key, buckets < 4 or buckets % 2, "it must be even and at least 4"
        exact = buckets // 4
        too_near = config.relative_attention_max_distance <= exact
        yield "relative_attention_max_distance", too_near, f"it must be more than {exact}, a quarter of {key}"
        layers = [config.for_layer(index) for index in range(config.num_hidden_layers)]
        heads = {layer.num_attention_heads for layer in layers if layer.block_pos_enc_kind == "t5"}
        uneven = config.relative_attention_shared and heads != {config.num_attention_heads}
        why = f"it must be false if a 't5' layer does not have num_attention_heads = {config.num_attention_heads} heads"
        yield "relative_attention_shared", uneven, why

    @classmethod
    def from_config(cls, config: BertBlocksConfig, is_local: bool) -> T5Position:
        return cls(
            config.num_attention_heads,
            config.relative_attention_num_buckets,
            config.relative_attention_max_distance,
            is_shared=config.relative_attention_shared,
        )

    def init_parameters(self, config: BertBlocksConfig) -> None:
        draw_normal(self.table, config.initializer_range, config)

    def bias(self, distance: Tensor) -> Tensor:
        # keys further away share the last bucket of their side
        reach = self.max_distance
        near = torch.arange(-reach, reach + 1, device=distance.device)
        biases = self.table[relative_buckets(near, self.table.shape[0], reach)]  # [distances, heads]
        return F.embedding(distance.clamp(-reach, reach) + reach, biases).movedim(-1, 0).contiguous()

    def bias_key(self) -> Hashable | None:
        # under autograd a shared bias would connect the graphs of checkpointed layers
        return ("t5", id(self)) if self.is_shared and not torch.is_grad_enabled() else None

    def extra_repr(self) -> str:
        buckets, heads = self.table.shape
        return f"buckets={buckets}, heads={heads}, max_distance={self.max_distance}"


def relative_buckets(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return T5's bucket for every distance key - query, in both directions.

    Half of the buckets are for later keys. In each half, the first half holds one distance per bucket, and the second
    grows logarithmically up to `max_distance`.

    Example:
        >>> relative_buckets(torch.tensor([0, -1, 1, -7, -8, -500, 500]), 32, 128).tolist()
        [0, 1, 17, 7, 8, 15, 31]
    """
    side = num_buckets // 2
    exact = side // 2
    size = distance.abs()
    steps = torch.log(size.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (side - exact)
    far = (exact + steps.long()).clamp(max=side - 1)
    return (distance > 0) * side + torch.where(size < exact, size, far)


def get_embedding_position(config: BertBlocksConfig) -> EmbeddingPosition | None:
    if config.embd_pos_enc_kind == "none":
        return None
    return EMBEDDING_POSITIONS[config.embd_pos_enc_kind].from_config(config)


def get_shared_position(config: BertBlocksConfig) -> nn.Module | None:
    """Build what all layers of one kind of position share, or return None if they share nothing."""
    shared = (BLOCK_POSITIONS[kind].make_shared(config) for kind in sorted(block_position_kinds(config)))
    return next((module for module in shared if module is not None), None)


def block_position_kinds(config: BertBlocksConfig) -> set[str]:
    """Return the kinds of positions in the layers of an encoder."""
    return {config.for_layer(index).block_pos_enc_kind for index in range(config.num_hidden_layers)} - {"none"}


def get_block_position(config: BertBlocksConfig, is_local: bool, shared: nn.Module | None = None) -> BlockPosition:
    """Build a layer's position, around what the encoder shares between layers if the layer's kind does so."""
    if config.block_pos_enc_kind == "none":
        return BlockPosition()
    return BLOCK_POSITIONS[config.block_pos_enc_kind].from_shared(config, is_local, shared)
