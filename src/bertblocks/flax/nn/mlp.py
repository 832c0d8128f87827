"""Feed-forward networks."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from bertblocks.core.registry import Registry
from bertblocks.flax.nn.activation import get_activation
from bertblocks.flax.nn.linear import GroupedLinear, Linear, dropout

if TYPE_CHECKING:
    from typing_extensions import Self

    from bertblocks.config import BertBlocksConfig


MLPS: Registry[type[nnx.Module]] = Registry("mlp_type")
register_mlp = MLPS.register


@register_mlp("mlp")
class MLP(nnx.Module):
    """down(act(up(x))), with dropout before and after the down projection."""

    #: Matrices that the up projection stacks.
    num_up = 1

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        in_bias: bool,
        out_bias: bool,
        dropout: float,
        out_dropout: float,
    ) -> None:
        self.up = Linear(hidden_size, self.num_up * intermediate_size, in_bias)
        self.down = Linear(intermediate_size, hidden_size, out_bias, writes=True)
        self.activation = get_activation(activation)
        self.dropout = dropout
        self.out_dropout = out_dropout

    @classmethod
    def from_config(cls, config: BertBlocksConfig, **options: Any) -> Self:
        return cls(
            config.hidden_size,
            config.intermediate_size,
            activation=config.hidden_act,
            in_bias=config.mlp_in_bias,
            out_bias=config.mlp_out_bias,
            dropout=config.mlp_dropout,
            out_dropout=config.mlp_output_dropout,
            **options,
        )

    def hidden(self, up: Array) -> Array:
        return self.activation(up)

    def __call__(self, x: Array, rngs: nnx.Rngs | None) -> Array:
        hidden = dropout(self.hidden(self.up(x)), self.dropout, rngs)
        return dropout(self.down(hidden), self.out_dropout, rngs)


@register_mlp("glu")
class GLU(MLP):
    """Gated linear unit (Shazeer, 2020): the activation is on the first half of the up projection."""

    num_up = 2

    def hidden(self, up: Array) -> Array:
        gate, value = jnp.split(up, 2, axis=-1)
        return self.activation(gate) * value


@register_mlp("grouped")
class GroupedMLP(MLP):
    """An mlp with block-diagonal projections, as in ConvBERT medium-small (Jiang et al., 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, groups: int, **options: Any) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.up = GroupedLinear(hidden_size, intermediate_size, options["in_bias"], groups)
        self.down = GroupedLinear(intermediate_size, hidden_size, options["out_bias"], groups)

    @classmethod
    def from_config(cls, config: BertBlocksConfig, **options: Any) -> Self:
        return super().from_config(config, groups=config.mlp_groups, **options)


class NGPTMLP(GLU):
    """The GLU of nGPT, whose up projection has a learned scale (Loshchilov et al., 2024)."""

    def __init__(self, hidden_size: int, intermediate_size: int, **options: Any) -> None:
        super().__init__(hidden_size, intermediate_size, **options)
        self.suv = nnx.Param(jnp.ones(2 * intermediate_size))
        self.gain = math.sqrt(hidden_size)

    def hidden(self, up: Array) -> Array:
        return super().hidden(up * (self.gain * self.suv))


def get_mlp(config: BertBlocksConfig) -> Any:
    """The feed-forward network that a config names, or nGPT's own."""
    mlp_class: Any = NGPTMLP if config.ngpt else MLPS[config.mlp_type]
    return mlp_class.from_config(config)
