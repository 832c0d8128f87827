"""The encoder itself."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from bertblocks.config import BertBlocksConfig
from bertblocks.flax.inputs import Inputs, Options
from bertblocks.flax.layout import RowLayout
from bertblocks.flax.models.base import FlaxBertBlocksPreTrainedModel
from bertblocks.flax.nn.embedding import get_embedding
from bertblocks.flax.nn.encoder import Encoder
from bertblocks.flax.nn.head import ContactHead, Pooler
from bertblocks.flax.outputs import EncoderModelOutput


class Encoded(NamedTuple):
    """Hidden states with their layout, for heads, and the requested extras."""

    hidden: Array  # [rows, length, hidden]
    layout: RowLayout
    hidden_states: tuple[Array, ...] | None
    attentions: tuple[Array, ...] | None


class EncoderParts(nnx.Module):
    """Embeddings, layers, and an optional pooler and contact head; task models hold it as `model`."""

    def __init__(self, config: BertBlocksConfig, add_pooling_layer: bool) -> None:
        self.embedding = get_embedding(config)
        self.encoder = Encoder(config)
        self.pooler = Pooler(config.hidden_size) if add_pooling_layer else None
        num_heads = (config.for_layer(index).num_attention_heads for index in range(config.num_hidden_layers))
        self.contact_head = ContactHead(sum(num_heads)) if config.contact_head else None
        self.position_offset = config.position_offset

    def encode(self, inputs: Inputs, options: Options, rngs: nnx.Rngs | None) -> Encoded:
        layout = inputs.layout(options.max_segments)
        positions = inputs.table_positions(layout, self.position_offset)
        # padding must be finite: 0 times NaN would be NaN in attention
        if inputs.input_ids is None:
            tokens = layout.zero_padding(inputs.inputs_embeds)
        else:
            tokens = self.embedding.tokens(jnp.where(layout.real, inputs.input_ids, 0), layout)
        types = None if inputs.token_type_ids is None else jnp.where(layout.real, inputs.token_type_ids, 0)
        x = self.embedding(tokens, types, positions, rngs)
        out = self.encoder(x, layout, rngs, options.output_hidden_states, options.output_attentions)
        states = None if out.hidden_states is None else tuple(map(layout.zero_padding, out.hidden_states))
        return Encoded(out.last_hidden_state, layout, states, out.attentions)


class FlaxBertBlocksModel(EncoderParts, FlaxBertBlocksPreTrainedModel):
    """An encoder without a task head: hidden states and, if the config has a pooler, one vector per sequence.

    Example:
        >>> import numpy as np
        >>> model = FlaxBertBlocksModel(BertBlocksConfig.from_preset("mini", num_hidden_layers=1))
        >>> ids = np.array([[5, 6, 7], [8, 9, 0]])
        >>> padded = model(ids, attention_mask=ids != 0).last_hidden_state
        >>> packed = model([[5, 6, 7, 8, 9]], segment_ids=[[1, 1, 1, 2, 2]]).last_hidden_state
        >>> padded.shape, packed.shape, bool(np.allclose(padded[1, :2], packed[0, 3:], atol=1e-6))
        ((2, 3, 64), (1, 5, 64), True)
    """

    task: ClassVar[str] = "base"

    __init__ = FlaxBertBlocksPreTrainedModel.__init__

    def build(self, config: BertBlocksConfig) -> None:
        EncoderParts.__init__(self, config, add_pooling_layer=config.pooler)

    def forward(self, inputs: Inputs, options: Options) -> EncoderModelOutput:
        encoded = self.encode(inputs, options, inputs.rngs())
        return EncoderModelOutput(
            last_hidden_state=encoded.layout.zero_padding(encoded.hidden),
            pooler_output=None if self.pooler is None else self.pooler(encoded.hidden, encoded.layout),
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )

    def predict_contacts(self, input_ids: Any, attention_mask: Any = None) -> Array:
        """Predicts the probability that two tokens are in contact: `[rows, length - 2, length - 2]`.

        The first and the last token of each row are left out.
        """
        if self.contact_head is None:
            raise ValueError("contact_head is False in this model's config; set it to True to predict contacts.")
        attentions = self(input_ids, attention_mask, output_attentions=True).attentions
        ends = self.config.eos_token_id
        ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
        return self.contact_head(jnp.concatenate(attentions, axis=1), jnp.asarray(~np.isin(input_ids, ends)))
