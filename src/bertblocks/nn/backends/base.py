"""What every attention backend is asked to do, and what they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.position import BlockPosition


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Who may look at whom inside a sequence, and with what bias."""

    #: Keys at a distance of at most this are seen; None: all keys of the sequence.
    half_window: int | None = None
    #: The first tokens of a sequence, which see all of it and are seen by all of it, whatever the window.
    num_global_tokens: int = 0
    position: BlockPosition | None = None

    @property
    def has_bias(self) -> bool:
        return self.position is not None and self.position.has_bias

    @property
    def slopes(self) -> tuple[float, ...] | None:
        return None if self.position is None else self.position.slopes

    @property
    def is_constant(self) -> bool:
        """True if layers may share masks: they hold nothing learned, or nothing that is being learned now."""
        return self.position is None or not self.has_bias or self.position.bias_key() is not None

    def sees_all(self, length: int) -> bool:
        """True if the window hides nothing in a sequence of this length."""
        return self.half_window is None or length <= self.half_window + 1

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys (by index in the sequence) each query sees; the two broadcast."""
        if self.half_window is None:
            return torch.ones(torch.broadcast_shapes(queries.shape, keys.shape), dtype=torch.bool, device=keys.device)
        near = (queries - keys).abs() <= self.half_window
        if self.num_global_tokens:
            near = near | (queries < self.num_global_tokens) | (keys < self.num_global_tokens)
        return near

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
        """`[heads, queries, keys]`, or None when scores get no bias."""
        if not self.has_bias:
            return None
        assert self.position is not None
        return self.position.bias(keys - queries).to(dtype)

    def memo_key(self) -> tuple:
        """Equal for constant patterns with the same masks."""
        bias_key = self.position.bias_key() if self.position is not None and self.has_bias else None
        return (self.half_window, self.num_global_tokens, bias_key)


class AttentionBackend(ABC):
    """One way to compute attention over the sequences of a layout."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, head_dim]
        layout: SequenceLayout,
        pattern: AttentionPattern,
        scale: float,
        dropout: float,
    ) -> Tensor:
        """The attended values `[tokens, heads, head_dim]`; a query that may see no key gets 0."""


def split_heads(x: Tensor, rows: int) -> Tensor:
    """`[rows * length, heads, d]` -> `[rows, heads, length, d]`, a view."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`[rows, heads, length, d]` -> `[rows * length, heads, d]`."""
    return x.transpose(1, 2).flatten(0, 1)


def repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """Gives every query head its key/value head: `[tokens, kv_heads, d]` -> `[tokens, heads, d]`."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)
