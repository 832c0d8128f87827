"""Folds the scales of a parametrization into weights, because other families' checkpoints cannot hold them."""

from __future__ import annotations

import copy
import re

from torch import Tensor

from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.parametrization import get_attention_scale, get_decoder_scale

ATTENTION = re.compile(r"(?P<prefix>.*encoder\.layers\.(?P<group>\d+)\.attention\.)qkv\.weight")


def to_standard(model: BertBlocksPreTrainedModel) -> tuple[BertBlocksConfig, dict[str, Tensor]]:
    """Return the config and the weights of the same function in the standard parametrization, without tied weights.

    The scale of attention goes into keys, or into their norm. That of the decoder goes into its matrix or, if this is
    tied to the embeddings, into the norm in front of it.
    """
    tied = set(model.all_tied_weights_keys)
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in tied}
    if model.config.parametrization == "standard":
        return model.config, tensors
    for name in list(tensors):
        if (match := ATTENTION.fullmatch(name)) is not None:
            layer = model.base_model.encoder.order.index(int(match["group"]))
            _fold_attention(tensors, match["prefix"], model.config.for_layer(layer))
    scale = get_decoder_scale(model.config)
    if isinstance(model, LanguageModel) and scale != 1.0:
        if not model.config.tie_word_embeddings:
            tensors["decoder.weight"] *= scale
        elif not _fold_norm(tensors, "head.norm.", scale, model.config):
            raise ConfigError(
                "parametrization is 'mup'; its scale fits into no weight of this tied decoder, which has no norm in "
                "front of it, so only BertBlocks' own format holds this model."
            )
    config = copy.deepcopy(model.config)
    config.parametrization = "standard"
    return config, tensors


def _fold_attention(tensors: dict[str, Tensor], prefix: str, layer: BertBlocksConfig) -> None:
    scale = get_attention_scale(layer) / layer.attention_scale
    if scale == 1.0:
        return
    if layer.qk_norm:
        if not _fold_norm(tensors, f"{prefix}key_norm.", scale, layer):
            raise ConfigError(
                "parametrization is 'mup'; its attention scale does not fit into keys whose norm has no weight, so "
                "only BertBlocks' own format holds this model."
            )
        return
    queries, keys = layer.num_attention_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    for part in ("weight", "bias"):
        if (fused := tensors.get(f"{prefix}qkv.{part}")) is not None:
            fused[queries : queries + keys] *= scale
        if (of_distances := tensors.get(f"{prefix}position.key.{part}")) is not None:
            of_distances *= scale


def _fold_norm(tensors: dict[str, Tensor], prefix: str, scale: float, config: BertBlocksConfig) -> bool:
    """Scale what a norm returns, if it has a weight."""
    weight, bias = tensors.get(f"{prefix}weight"), tensors.get(f"{prefix}bias")
    if weight is None:
        return False
    offset = 1.0 if config.norm_weight == "one_plus" else 0.0
    weight.add_(offset).mul_(scale).sub_(offset)
    if bias is not None:
        bias *= scale
    return True
