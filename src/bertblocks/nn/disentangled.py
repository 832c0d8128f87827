"""Disentangled attention (He et al., 2021): content and relative position meet in scores of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from bertblocks.core.keys import Key, Problem
from bertblocks.nn.dropout import Dropout
from bertblocks.nn.layout import SequenceLayout, index_tokens
from bertblocks.nn.linear import Linear
from bertblocks.nn.norm import get_norm
from bertblocks.nn.position import BlockPosition, block_position_kinds, register_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: The scores next to those of content with content: content with position, and position with content.
DISENTANGLED_SCORES = ("c2p", "p2c")


class RelativeEmbedding(nn.Module):
    """A learned vector for every distance or bucket of distances, which all layers share.

    Distances of `max_distance` or more share a vector. With `num_buckets` on each side, distances from half of that on
    are grouped logarithmically, as in DeBERTa v2 and v3.
    """

    def __init__(
        self,
        hidden_size: int,
        max_distance: int,
        num_buckets: int | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.max_distance, self.num_buckets = max_distance, num_buckets
        self.span = num_buckets or max_distance
        self.table = nn.Embedding(2 * self.span, hidden_size)
        self.norm = norm
        self.dropout = Dropout(dropout)

    def indices(self, distance: Tensor) -> Tensor:
        """Return the row of every distance query - key, which never falls as the distance rises."""
        if self.num_buckets is not None:
            distance = log_buckets(distance, self.num_buckets, self.max_distance)
        return (distance + self.span).clamp(0, 2 * self.span - 1)

    def rows(self, reach: int) -> tuple[int, int]:
        """Return the first row that distances up to `reach` use, and the number of such rows."""
        first, last = self.indices(torch.tensor([-reach, reach])).tolist()
        return first, last - first + 1

    def forward(self, reach: int) -> tuple[Tensor, Tensor | None]:
        """Return the vectors in use `[rows, hidden]`, and the index among them of every distance.

        The index is None if every distance has its own vector.
        """
        first, count = self.rows(reach)
        vectors = self.table.weight[first : first + count]
        if self.norm is not None:
            vectors = self.norm(vectors)
        vectors = self.dropout(vectors)
        if count == 2 * reach + 1:
            return vectors, None
        return vectors, self.indices(torch.arange(-reach, reach + 1, device=vectors.device)) - first

    def extra_repr(self) -> str:
        return f"max_distance={self.max_distance}, num_buckets={self.num_buckets}"


def log_buckets(distance: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """Return DeBERTa's bucket for every distance: itself up to half of `num_buckets`, then on a logarithmic scale.

    Example:
        >>> log_buckets(torch.tensor([0, -3, 4, 5, -10, 31, 100]), 8, 32).tolist()
        [0, -3, 4, 5, -6, 7, 9]
    """
    exact = num_buckets // 2
    size = distance.abs()
    # in this order and in single precision, so that rounding moves no distance to another bucket than in DeBERTa
    steps = torch.log(size.clamp(min=exact) / exact) / torch.log(torch.tensor((max_distance - 1) / exact))
    far = (torch.ceil(steps * (exact - 1)) + exact).long() * distance.sign()
    return torch.where(size <= exact, distance, far)


@register_position("disentangled")
class DisentangledPosition(BlockPosition):
    """Scores between tokens and relative positions, in both directions or one.

    A layer projects the relative embeddings to keys and queries, with its own matrices or with those of its tokens.
    """

    keys: ClassVar[dict[str, Key]] = {
        "disentangled_scores": Key(
            list[str],
            None,
            "The scores between content and position: c2p lets queries meet positions, and p2c lets positions meet "
            "keys. Implied: both.",
            implied=lambda _: list(DISENTANGLED_SCORES),
        ),
        "disentangled_max_distance": Key(
            int,
            None,
            "Distance from which on all distances share a vector. Implied: max_position_embeddings.",
            least=1,
            most=2**24,
            implied=lambda config: config.max_position_embeddings,
        ),
        "disentangled_num_buckets": Key(
            int | None,
            None,
            "Number of buckets on each side, as in DeBERTa v2 and v3: distances from half of it on are grouped "
            "logarithmically up to disentangled_max_distance. None gives every distance its own vector, as in DeBERTa "
            "v1.",
            least=2,
            most=2**20,
        ),
        "disentangled_norm": Key(
            bool, False, "Whether the vectors of distances are normalised, as in DeBERTa v2 and v3."
        ),
        "disentangled_share_projections": Key(
            bool,
            False,
            "Whether layers project the vectors of distances with the matrices of their tokens, as in DeBERTa v2 and "
            "v3.",
        ),
    }
    is_relative = True
    evidence = "Positive for quality: with equal data DeBERTaV3 beats ModernBERT, which is faster (arXiv 2504.08716)."

    @classmethod
    def check_model(cls, config: BertBlocksConfig) -> Iterator[Problem]:
        names = config.disentangled_scores
        wrong = not names or len(set(names)) < len(names) or not set(names) <= set(DISENTANGLED_SCORES)
        yield "disentangled_scores", wrong, f"it must list {' or '.join(DISENTANGLED_SCORES)}, or both"
        buckets, most = config.disentangled_num_buckets, config.disentangled_max_distance
        too_near = buckets is not None and most <= buckets // 2 + 1
        why = f"it must be more than {(buckets or 0) // 2 + 1}, one more than half of disentangled_num_buckets"
        yield "disentangled_max_distance", too_near, why
        both = "t5" in block_position_kinds(config) and config.relative_attention_shared
        why = "it must be false if some layers are 't5' and others 'disentangled'; layers can share one table only"
        yield "relative_attention_shared", both, why

    def __init__(
        self,
        embedding: RelativeEmbedding,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scores: Sequence[str] = DISENTANGLED_SCORES,
        query_bias: bool = True,
        key_bias: bool = True,
        own_projections: bool = True,
    ) -> None:
        super().__init__()
        object.__setattr__(self, "embedding", embedding)  # the encoder owns it, so it must not be a submodule here
        self.embedding: RelativeEmbedding
        self.num_heads, self.head_dim = num_heads, head_dim
        self.scores = tuple(scores)
        self.score_scale = 1 / math.sqrt(1 + len(self.scores))
        has_key, has_query = (own_projections and name in scores for name in DISENTANGLED_SCORES)
        self.key = Linear(hidden_size, num_kv_heads * head_dim, key_bias, role="position") if has_key else None
        self.query = Linear(hidden_size, num_heads * head_dim, query_bias, role="position") if has_query else None

    @classmethod
    def make_shared(cls, config: BertBlocksConfig) -> RelativeEmbedding:
        return RelativeEmbedding(
            config.hidden_size,
            config.disentangled_max_distance,
            config.disentangled_num_buckets,
            get_norm(config) if config.disentangled_norm else None,
            config.embedding_dropout,
        )

    @classmethod
    def from_shared(cls, config: BertBlocksConfig, is_local: bool, shared: nn.Module | None) -> DisentangledPosition:
        assert isinstance(shared, RelativeEmbedding)
        return cls(
            shared,
            config.hidden_size,
            config.num_attention_heads,
            config.num_kv_heads,
            config.head_dim,
            config.disentangled_scores,
            query_bias=config.attention_qkv_bias,
            key_bias=config.attention_key_bias,
            own_projections=not config.disentangled_share_projections,
        )

    def relative(
        self, layout: SequenceLayout, reach: int, project: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor | None, Tensor | None]:
        vectors, indices = self._embed(layout, reach)
        queries: Tensor | None
        keys: Tensor | None
        if self.key is None and self.query is None:
            queries, keys = project(vectors)
        else:
            queries, keys = (
                None if layer is None else layer(vectors).unflatten(-1, (-1, self.head_dim))
                for layer in (self.query, self.key)
            )
        return (
            index_tokens(queries, indices) if queries is not None and "p2c" in self.scores else None,
            index_tokens(keys, indices) if keys is not None and "c2p" in self.scores else None,
        )

    def _embed(self, layout: SequenceLayout, reach: int) -> tuple[Tensor, Tensor | None]:
        # under autograd a shared result would connect the graphs of checkpointed layers
        if torch.is_grad_enabled() or self.training:
            return self.embedding(reach)
        return layout.memo(("disentangled", id(self.embedding), reach), lambda: self.embedding(reach))

    def extra_repr(self) -> str:
        own = "its own projections" if self.key is not None or self.query is not None else "the tokens' projections"
        return f"{' and '.join(self.scores)} with {own}"
