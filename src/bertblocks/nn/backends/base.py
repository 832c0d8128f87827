"""The interface of attention backends, and the helpers they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bertblocks.nn.layout import SequenceLayout, is_capturing, is_symbolic
from bertblocks.nn.position import BlockPosition
from bertblocks.nn.relative import RelativeVectors


@dataclass(frozen=True, eq=False)
class AttentionPattern:
    """Which keys a query sees inside its sequence, and the bias on their scores."""

    #: Queries see keys up to this distance; None means all keys of the sequence.
    half_window: int | None = None
    #: The first tokens of a sequence see all of it and are seen by all of it, whatever the window.
    num_global_tokens: int = 0
    position: BlockPosition | None = None
    #: Queries see no later keys.
    is_causal: bool = False
    #: Each softmax has one more logit, which the context of a call has.
    has_sinks: bool = False

    @property
    def has_bias(self) -> bool:
        return self.position is not None and self.position.has_bias

    @property
    def is_relative(self) -> bool:
        """True if tokens meet vectors of distances, which the context of a call has."""
        return self.position is not None and self.position.is_relative

    @property
    def adds_scores(self) -> bool:
        """True if scores are more than the products of queries and keys."""
        return self.has_bias or self.is_relative

    @property
    def has_plain_scores(self) -> bool:
        """True if scores are products alone, and only a window hides some."""
        return not (self.is_causal or self.num_global_tokens or self.adds_scores or self.has_sinks)

    @property
    def slopes(self) -> tuple[float, ...] | None:
        return None if self.position is None else self.position.slopes

    @property
    def is_constant(self) -> bool:
        """True if layers may share masks, because no bias in them is being learned."""
        return self.position is None or not self.has_bias or self.position.bias_key() is not None

    def sees_all(self, length: int) -> bool:
        """True if the window hides nothing in a sequence of this length."""
        if self.half_window is not None and (is_symbolic(length) or length > self.half_window + 1):
            return False
        return not (self.is_causal and (is_symbolic(length) or length > 1))

    def visible(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys each query sees, by their indices in the sequence; the two arguments broadcast."""
        if self.half_window is None:
            if self.is_causal:
                return keys <= queries
            return torch.ones(torch.broadcast_shapes(queries.shape, keys.shape), dtype=torch.bool, device=keys.device)
        near = self.is_near(queries, keys)
        if self.num_global_tokens:
            near = near | (queries < self.num_global_tokens) | (keys < self.num_global_tokens)
        return near

    def is_near(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Which keys are within the window of each query."""
        assert self.half_window is not None
        near = (queries - keys).abs() <= self.half_window
        return near & (keys <= queries) if self.is_causal else near

    def bias(self, queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The bias on scores as `[heads, queries, keys]`, or None if there is none."""
        if not self.has_bias:
            return None
        assert self.position is not None
        return self.position.bias(keys - queries).to(dtype)

    def memo_key(self) -> tuple:
        """Equal for constant patterns with the same masks."""
        bias_key = self.position.bias_key() if self.position is not None and self.has_bias else None
        return (self.half_window, self.num_global_tokens, self.is_causal, bias_key)


@dataclass(frozen=True, eq=False)
class AttentionContext:
    """Everything a backend needs to know about one attention call, besides its queries, keys and values."""

    layout: SequenceLayout
    pattern: AttentionPattern
    #: Factor on the scores.
    scale: float
    #: Dropout rate of the attention weights; 0 in evaluation.
    dropout: float = 0.0
    #: The vectors of distances, if the pattern is relative.
    relative: RelativeVectors | None = None
    #: Turns scores and which of them are visible into weights; None for softmax. Only the eager backend reads it.
    weigh: Callable[[Tensor, Tensor], Tensor] | None = None
    #: A logit per head that joins the softmax over the keys of each query.
    sinks: Tensor | None = None

    @property
    def is_inference(self) -> bool:
        """True without gradients and dropout, so that a kernel needs to keep nothing for a backward pass."""
        return not torch.is_grad_enabled() and not self.dropout


class AttentionBackend(ABC):
    """One way to compute attention over the sequences of a layout."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, head_dim]
        context: AttentionContext,
    ) -> Tensor:
        """Return the attended values `[tokens, heads, head_dim]`; a query that sees no key gets 0."""


def split_heads(x: Tensor, rows: int) -> Tensor:
    """`[rows * length, heads, d]` -> `[rows, heads, length, d]`, a view."""
    return x.view(rows, -1, *x.shape[1:]).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """`[rows, heads, length, d]` -> `[rows * length, heads, d]`."""
    x = x.transpose(1, 2)
    if is_capturing():  # the graph may run with a kernel whose output has other strides
        x = x.clone(memory_format=torch.contiguous_format)
    return x.flatten(0, 1)


def repeat_kv(x: Tensor, num_heads: int) -> Tensor:
    """Repeat each key/value head for its query heads: `[tokens, kv_heads, d]` -> `[tokens, heads, d]`."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)
