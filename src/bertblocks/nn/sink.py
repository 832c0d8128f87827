"""A logit that attention can spend its weight on instead of a key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from bertblocks.core.registry import Registry
from bertblocks.nn.initialization import draw_normal

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

ATTENTION_SINKS: Registry[Any] = Registry("attention_sinks")


@ATTENTION_SINKS.register(True)
class AttentionSinks(nn.Module):
    """A learned logit s per head that joins the softmax over a query's keys, softmax([s, scores]), without a value."""

    requires: ClassVar[dict[str, tuple[Any, str]]] = {
        "attention_fn": ("softmax", "the logit joins a softmax"),
    }

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(num_heads))

    def init_parameters(self, config: BertBlocksConfig) -> None:
        draw_normal(self.logits, config.initializer_range, config)

    def extra_repr(self) -> str:
        return f"heads={len(self.logits)}"


def get_attention_sinks(config: BertBlocksConfig) -> AttentionSinks | None:
    return AttentionSinks(config.num_attention_heads) if config.attention_sinks else None
