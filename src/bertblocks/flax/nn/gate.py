"""What the output of attention passes through before its projection."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from flax import nnx
from jax import Array

from bertblocks.core.registry import Registry
from bertblocks.flax.nn.linear import Linear

if TYPE_CHECKING:
    from typing_extensions import Self

    from bertblocks.config import BertBlocksConfig

GATES: Registry[Any] = Registry("attention_gate", reserved=("none",))
register_gate = GATES.register


@register_gate("headwise")
class HeadwiseGate(nnx.Module):
    """y * sigmoid(x W) with one number per head."""

    def __init__(self, hidden_size: int, num_heads: int, size: int) -> None:
        self.projection = Linear(hidden_size, num_heads * size, bias=False)
        self.size = size

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> Self:
        return cls(config.hidden_size, config.num_attention_heads, 1)

    def __call__(self, attended: Array, x: Array, values: Array) -> Array:
        """`[rows, length, heads, head_dim]`, `[rows, length, hidden]`, `[rows, length, kv_heads, head_dim]`."""
        gates = jax.nn.sigmoid(self.projection(x)).astype(attended.dtype)
        return attended * gates.reshape(*attended.shape[:3], self.size)


@register_gate("elementwise")
class ElementwiseGate(HeadwiseGate):
    """y * sigmoid(x W) with one number per head and unit."""

    @classmethod
    def from_config(cls, config: BertBlocksConfig) -> Self:
        return cls(config.hidden_size, config.num_attention_heads, config.head_dim)


def get_gate(config: BertBlocksConfig) -> Any:
    return None if config.attention_gate == "none" else GATES[config.attention_gate].from_config(config)
