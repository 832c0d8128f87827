"""Makes a model of fewer layers from some of the layers of a larger one (Sanh et al., 2019)."""

from __future__ import annotations

import copy
import math
from typing import TypeVar

import torch

from bertblocks.checkpoints.grow import LAYER
from bertblocks.models import BertBlocksPreTrainedModel

Model = TypeVar("Model", bound=BertBlocksPreTrainedModel)


@torch.no_grad()
def cut(model: Model, layers: int) -> Model:
    """A model of `layers` layers with the weights of evenly spaced layers of `model`, and everything else as it is.

    Example:
        >>> from bertblocks import BertBlocksConfig, BertBlocksModel
        >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini", num_hidden_layers=6))
        >>> small = cut(model, 3)
        >>> len(small.encoder.layers), torch.equal(small.embedding.token.weight, model.embedding.token.weight)
        (3, True)
    """
    kept = kept_layers(model.config.num_hidden_layers, layers)
    config = copy.deepcopy(model.config)
    types, overrides = model.config.layer_types, model.config.layer_overrides or {}
    config.num_hidden_groups = min(config.num_hidden_groups, layers)
    config.num_hidden_layers = layers
    if all(types[layer] == "global" for layer in kept):
        config.local_attention, config.global_attention_every_n_layers = False, None
    config.layer_types = [types[layer] for layer in kept]
    config.layer_overrides = {i: overrides[layer] for i, layer in enumerate(kept) if layer in overrides} or None
    config.contact_head = False  # it reads the attention of every layer
    small = type(model)(config)
    before, after = model.base_model.encoder.order, small.base_model.encoder.order
    origins = [before[kept[after.index(group)]] for group in range(len(small.base_model.encoder.layers))]
    weights = model.state_dict()
    for name, value in small.state_dict().items():
        value.copy_(weights[LAYER.sub(lambda found: f"{found[1]}{origins[int(found[2])]}{found[3]}", name)])
    return small.eval()


def kept_layers(layers: int, wanted: int) -> list[int]:
    """The evenly spaced layers that a cut keeps, with the first and the last one.

    Example:
        >>> kept_layers(6, 3), kept_layers(12, 6), kept_layers(12, 1)
        ([0, 2, 5], [0, 2, 4, 7, 9, 11], [0])
    """
    if not 1 <= wanted <= layers:
        raise ValueError(f"layers is {wanted}; the model has {layers} layers, so it must be between 1 and {layers}.")
    return [math.ceil(index * (layers - 1) / max(wanted - 1, 1) - 0.5) for index in range(wanted)]
