"""The stack of layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn

from bertblocks.nn.attention import ForwardContext
from bertblocks.nn.backends import get_backend
from bertblocks.nn.block import get_block
from bertblocks.nn.convolution import get_input_convolution
from bertblocks.nn.layout import SequenceLayout, index_tokens
from bertblocks.nn.linear import Linear
from bertblocks.nn.moe import MixtureOfExperts, Routing
from bertblocks.nn.norm import get_norm
from bertblocks.nn.position import get_shared_position

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig


@dataclass
class EncoderOutput:
    """The last hidden state, flat; the lists hold what transformers defines, in the shape of the input."""

    last_hidden_state: Tensor  # [tokens or token_indices, hidden]
    #: The embeddings, then every layer's output, the last one after the final norm; None unless requested.
    hidden_states: list[Tensor] | None
    #: `[rows, heads, length, length]` for each layer; None unless requested.
    attentions: list[Tensor] | None
    #: What each router did, in training.
    routing: list[Routing]


class Encoder(nn.Module):
    """Layers one after the other, then the final norm if there is one.

    Layers of one group (`num_hidden_groups`) are one module that runs several times.
    """

    def __init__(self, config: BertBlocksConfig) -> None:
        super().__init__()
        self.config = config
        order = self.order
        self.position = get_shared_position(config)
        self.layers = nn.ModuleList(
            get_block(config, order.index(group), self.position) for group in range(config.num_hidden_groups)
        )
        for index, layer in enumerate(self.layers):
            for module in layer.modules():
                if isinstance(module, Linear):
                    module.layer = order.index(index)
        #: Whether layers are graphs, which must find what they share in the layout.
        self.is_compiled = False
        self.convolution = get_input_convolution(config)
        self.final_norm = get_norm(config.for_final_norm()) if config.final_norm else None

    @property
    def order(self) -> list[int]:
        """For each layer, the index of its module in `layers`."""
        return [self.config.layer_group(index) for index in range(self.config.num_hidden_layers)]

    def extra_repr(self) -> str:
        order = self.order
        return "" if len(self.layers) == len(order) else f"{len(order)} layers with the weights of {len(self.layers)}"

    def forward(
        self,
        x: Tensor,  # [tokens, hidden]
        layout: SequenceLayout,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        token_indices: Tensor | None = None,
        token_ids: Tensor | None = None,  # [tokens]
    ) -> EncoderOutput:
        """Run all layers; `token_indices` selects the tokens in the last hidden state, all if None."""
        backend = get_backend(self.config.attention_backend, x.device)
        if self.is_compiled:
            layout.prepare(layer.attention.position for layer in self.layers)  # type: ignore[union-attr]
        context = ForwardContext(layout, backend, output_attentions, token_ids, start=x)
        hidden_states: list[Tensor] | None = [] if output_hidden_states else None
        attentions: list[Tensor] | None = [] if output_attentions else None
        routing: list[Routing] = []
        last = len(self.order) - 1
        for index, group in enumerate(self.order):
            if hidden_states is not None:
                x = _record(x, hidden_states, layout)
            # the last layer computes only the selected tokens, unless its whole output is requested too
            selected = token_indices if index == last and hidden_states is None else None
            before = x
            x, weights, routed = self.layers[group](x, context, selected)
            if routed is not None and self.training:
                mixture: MixtureOfExperts = self.layers[group].mlp  # type: ignore[assignment]
                real = routed if layout.key_mask is None or selected is not None else routed[layout.key_mask.flatten()]
                routing.append(mixture.assess(real))
            if index == 0 and self.convolution is not None:
                x = self.convolution(before, x, layout, selected)
            if attentions is not None:
                attentions.append(weights)
        if self.final_norm is not None:
            x = self.final_norm(x)
        if hidden_states is not None:
            x = index_tokens(_record(x, hidden_states, layout), token_indices)
        return EncoderOutput(x, hidden_states, attentions, routing)


def _record(x: Tensor, hidden_states: list[Tensor], layout: SequenceLayout) -> Tensor:
    """Append x in the shape of the input and return it flat, read from there so that gradients reach the recorded."""
    hidden_states.append(layout.scatter(x))
    return layout.gather(hidden_states[-1])
