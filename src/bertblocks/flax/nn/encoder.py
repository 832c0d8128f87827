"""The stack of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flax import nnx
from jax import Array

from bertblocks.flax.layout import RowLayout
from bertblocks.flax.nn.block import get_block
from bertblocks.flax.nn.norm import get_norm
from bertblocks.flax.nn.position import get_shared_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


class EncoderOutput(NamedTuple):
    """Hidden states of all slots; the tuples are those of transformers and None unless requested."""

    last_hidden_state: Array  # [rows, length, hidden]
    #: The embeddings, then every layer's output; the last entry is `last_hidden_state`, after the final norm.
    hidden_states: tuple[Array, ...] | None
    #: Per layer `[rows, heads, length, length]`.
    attentions: tuple[Array, ...] | None


class Encoder(nnx.Module):
    """A stack of layers, then the final norm if there is one.

    The layers of a group (`num_hidden_groups`) are one module that runs several times.
    """

    def __init__(self, config: BertBlocksConfig) -> None:
        self.order = tuple(config.layer_group(index) for index in range(config.num_hidden_layers))
        self.position = get_shared_position(config)
        self.layers = nnx.List(
            [get_block(config, self.order.index(group)) for group in range(config.num_hidden_groups)]
        )
        self.final_norm = get_norm(config.for_final_norm()) if config.final_norm else None

    def __call__(
        self,
        x: Array,  # [rows, length, hidden]
        layout: RowLayout,
        rngs: nnx.Rngs | None,
        output_hidden_states: bool,
        output_attentions: bool,
    ) -> EncoderOutput:
        states: list[Array] = [x]
        attentions: list[Array] = []
        for group in self.order:
            x, weights = self.layers[group](x, layout, self.position, rngs, output_attentions)
            states.append(x)
            if weights is not None:
                attentions.append(weights)
        if self.final_norm is not None:
            x = states[-1] = self.final_norm(x)
        return EncoderOutput(
            x, tuple(states) if output_hidden_states else None, tuple(attentions) if output_attentions else None
        )
