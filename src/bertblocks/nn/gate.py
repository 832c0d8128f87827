"""What the output of attention passes through before its projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bertblocks.core.registry import Registry
from bertblocks.nn.linear import Linear

if TYPE_CHECKING:
    from typing_extensions import Self

    from bertblocks.config import BertBlocksConfig

GATES: Registry[Any] = Registry("attention_gate", reserved=("none",))
register_gate = GATES.register


class AttentionGate(nn.Module):
    """Changes the output of attention, given its input and its values."""

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> AttentionGate:
        raise TypeError(f"{cls.__name__} must define from_config(config)")

    def forward(
        self,
        attended: Tensor,  # [tokens, heads, head_dim]
        x: Tensor,  # [tokens, hidden]
        values: Tensor,  # [tokens, kv_heads, head_dim]
    ) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define forward(attended, x, values)")


@register_gate("headwise")
class HeadwiseGate(AttentionGate):
    """y * sigmoid(x W) with one number per head (Qiu et al., 2025)."""

    evidence = "Proposed for decoders (arXiv 2505.06708); BertBlocks has not compared it in encoders."

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.projection = Linear(hidden_size, self.size(num_heads, head_dim), bias=False, role="gate")

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> Self:
        return cls(config.hidden_size, config.num_attention_heads, config.head_dim)

    @staticmethod
    def size(num_heads: int, head_dim: int) -> int:
        return num_heads

    def forward(self, attended: Tensor, x: Tensor, values: Tensor) -> Tensor:
        gates = torch.sigmoid(self.projection(x)).to(attended.dtype)
        return attended * gates.unflatten(-1, (self.num_heads, -1))


@register_gate("elementwise")
class ElementwiseGate(HeadwiseGate):
    """y * sigmoid(x W) with one number per head and unit (Qiu et al., 2025)."""

    evidence = "As headwise, with one more matrix as large as the output projection."

    @staticmethod
    def size(num_heads: int, head_dim: int) -> int:
        return num_heads * head_dim


def get_gate(config: BertBlocksConfig) -> AttentionGate | None:
    return None if config.attention_gate == "none" else GATES[config.attention_gate].from_config(config)
