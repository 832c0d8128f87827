"""The stack of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from bertblocks.backends import get_backend
from bertblocks.blocks.attention import pad_weights
from bertblocks.blocks.block import get_block
from bertblocks.blocks.norm import get_norm
from bertblocks.layout import SequenceLayout

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


@dataclass
class EncoderOutput:
    """Flat hidden states; the lists are filled when asked for, as transformers defines them."""

    last_hidden_state: Tensor  # [tokens, hidden]
    #: The embeddings, then every layer's output; the last entry is `last_hidden_state`, after the final norm.
    hidden_states: list[Tensor] | None
    #: Per layer `[rows, heads, length, length]`.
    attentions: list[Tensor] | None


class Encoder(nn.Module):
    """Layers one after the other, then the final norm if there is one."""

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__()
        self.config = config
        layers = [get_block(config, index) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.patterns = [layer.attention.pattern for layer in layers]
        self.final_norm = get_norm(config) if config.final_norm else None

    def forward(
        self,
        x: Tensor,  # [tokens, hidden]
        layout: SequenceLayout,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> EncoderOutput:
        backend = get_backend(self.config.attention_backend, x.device, x.dtype, layout, self.patterns)
        hidden_states = [x] if output_hidden_states else None
        attentions: list[Tensor] | None = [] if output_attentions else None
        for layer in self.layers:
            x, weights = layer(x, layout, backend, output_attentions)
            if hidden_states is not None:
                hidden_states.append(x)
            if attentions is not None:
                attentions.append(pad_weights(weights, layout))
        if self.final_norm is not None:
            x = self.final_norm(x)
            if hidden_states is not None:
                hidden_states[-1] = x
        return EncoderOutput(x, hidden_states, attentions)
