"""Grows a larger model from the weights of a smaller one (Net2Net; Chen et al., 2015).

Width: units are tiled, so unit u of the larger model copies unit u modulo the smaller width. Queries, keys, values and
the halves of a GLU are tiled separately, and attention heads stay whole. Weights that read a unit with several copies
are divided by the number of copies. A model that grows only in width, by whole multiples, therefore computes the same
function. Other widths shift the statistics of norms, and ALiBi's slopes and nGPT's gain depend on the width.

Depth: each layer copies the layer of the same kind (global or local) at the same relative depth. A layer that runs
twice changes the function, but far less than a new layer does.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from bertblocks.config import BertBlocksConfig
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.mlp import MLPS, NGPTMLP
from bertblocks.nn.parametrization import get_decoder_scale

Model = TypeVar("Model", bound=BertBlocksPreTrainedModel)

#: Keys that must be equal in both models, because they decide what a weight means.
SAME_KEYS = (
    "vocab_size",
    "type_vocab_size",
    "head_dim",
    "norm_fn",
    "norm_pos",
    "attention_norm_pos",
    "mlp_norm_pos",
    "parallel_block",
    "mlp_type",
    "num_experts",
    "experts_per_token",
    "expert_type",
    "shared_expert",
    "normalize_expert_weights",
    "hidden_act",
    "embd_pos_enc_kind",
    "block_pos_enc_kind",
    "position_offset",
    "rope_interleaved",
    "partial_rotary_factor",
    "relative_attention_num_buckets",
    "qk_norm",
    "qk_norm_fn",
    "qk_norm_across_heads",
    "ngpt",
    "ngpt_logit_scale",
    "embedding_norm",
    "embedding_projection",
    "embedding_projection_bias",
    "embedding_norm_after_projection",
    "final_norm",
    "final_norm_bias",
    "norm_bias",
    "norm_weight",
    "norm_scaling",
    "attention_fn",
    "attention_sinks",
    "layer_sharing",
    "attention_gate",
    "input_mixing",
    "value_embedding",
    "embedding_scale",
    "timestep_embedding",
    "residual_scale",
    "residual_fn",
    "attention_scale",
    "parametrization",
    "disentangled_scores",
    "disentangled_num_buckets",
    "disentangled_norm",
    "disentangled_share_projections",
    "span_convolution",
    "span_conv_size",
    "input_conv_size",
    "input_conv_groups",
    "input_conv_act",
    "attention_qkv_bias",
    "attention_key_bias",
    "attention_out_bias",
    "mlp_in_bias",
    "mlp_out_bias",
    "tie_word_embeddings",
    "mlm_head_dense",
    "mlm_head_glu",
    "mlm_head_act",
    "mlm_head_bias",
    "mlm_head_norm",
    "decoder_bias",
)
#: Keys that may grow.
SIZE_KEYS = (
    "hidden_size",
    "embedding_size",
    "decoder_size",
    "num_hidden_layers",
    "num_hidden_groups",
    "num_attention_heads",
    "num_kv_heads",
    "intermediate_size",
    "max_position_embeddings",
)
#: The axis of each dimension of a parameter, by the end of its name; "<" marks an input dimension.
AXES: dict[str, str] = {
    r"embedding\.(token|token_type)\.weight": "same embedding",
    r"embedding\.position\.table\.weight": "positions embedding",
    r"embedding\.norm\.(weight|bias)": "normed",
    r"embedding\.projection\.weight": "hidden <embedding",
    r"embedding\.projection\.bias": "hidden",
    r"position\.table": "same heads",
    r"encoder\.position\.table\.weight": "distances hidden",
    r"attention\.position\.query\.weight": "queries <hidden",
    r"attention\.position\.key\.weight": "keys <hidden",
    r"attention\.(position\.query\.bias|query_bias)": "queries",
    r"attention\.(position\.key\.bias|value_bias)": "keys",
    r"convolution\.conv\.weight": "hidden <channels same",
    r"convolution\.conv\.bias": "hidden",
    r"(encoder\.position|convolution)\.norm\.(weight|bias)": "hidden",
    r"attention\.qkv\.weight": "qkv <hidden",
    r"attention\.qkv\.bias": "qkv",
    r"attention\.out\.weight": "hidden <mixed",
    r"span_convolution\.depthwise\.weight": "hidden same same",
    r"span_convolution\.(pointwise|value)\.weight": "queries <hidden",
    r"span_convolution\.(pointwise|value)\.bias": "queries",
    r"span_convolution\.kernel\.weight": "kernels <queries",
    r"span_convolution\.kernel\.bias": "kernels",
    r"attention\.query_norm\.weight": "normed_queries",
    r"attention\.key_norm\.weight": "normed_keys",
    r"attention\.sqk": "queries",
    r"attention\.sinks\.logits": "heads",
    r"mlp(\.experts\.\d+|\.shared)?\.up\.weight": "up <hidden",
    r"mlp(\.experts\.\d+|\.shared)?\.(up\.bias|suv)": "up",
    r"mlp(\.experts\.\d+|\.shared)?\.down\.weight": "hidden <inner",
    r"mlp\.router\.weight": "same <hidden",
    r"mlp(\.experts\.\d+|\.shared)?\.down\.bias": "hidden",
    r"(attention\.out|(pooler|classifier_head|detector_head)\.dense)\.bias": "hidden",
    r"(attention|mlp)_alpha": "hidden",
    r"(pooler|classifier_head|detector_head)\.dense\.weight": "hidden <hidden",
    r"(pre_norm|post_norm|final_norm|(classifier_head|detector_head)\.norm)\.(weight|bias)": "hidden",
    r"norm\.alpha": "same",
    r"\bhead\.inner\.weight": "head <hidden",
    r"\bhead\.inner\.bias": "head",
    r"\bhead\.dense\.weight": "dense <head",
    r"\bhead\.dense\.bias": "dense",
    r"\bhead\.norm\.(weight|bias)": "output",
    r"\bdecoder\.weight": "same <output",
    r"\b(order|classifier|tagger|spans|detector)\.weight": "same <hidden",
    r"\b(decoder\.bias|logit_scale|(order|classifier|tagger|spans|detector)\.bias)": "same",
}
#: The config key for the size of an axis that is tiled directly.
SIZE_OF = {
    "hidden": "hidden_size",
    "embedding": "embedding_size",
    "output": "decoder_size",
    "inner": "intermediate_size",
    "heads": "num_attention_heads",
}
FIRST_NORM = ("attention_residual.pre_norm.weight", "attention_residual.pre_norm.bias")
LAYER = re.compile(r"(encoder\.layers\.)(\d+)(\..+)")


@torch.no_grad()
def grow(small: Model, config: BertBlocksConfig, noise: float = 0.01) -> Model:
    """A model of `config`, for the same task as `small`, that starts from its weights.

    Copies of a unit get equal gradients and would stay copies forever. `noise`, relative to the standard deviation of
    each matrix, breaks the symmetry.

    Example:
        >>> from bertblocks import BertBlocksForMaskedLM
        >>> small = BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")).eval()
        >>> wide = BertBlocksConfig.from_preset("mini", hidden_size=128, num_attention_heads=8, intermediate_size=192)
        >>> large = grow(small, wide, noise=0.0).eval()
        >>> ids = torch.tensor([[5, 6, 7]])
        >>> torch.allclose(large(ids).logits, small(ids).logits, atol=1e-4)
        True
    """
    check_growth(small.config, config)
    large: Model = type(small)(config)
    weights = small.state_dict()
    depth = depth_map(small, large)
    for name, parameter in large.named_parameters():
        origin, old, new = name, small.config, config
        if (layer := LAYER.search(name)) is not None:
            group = int(layer[2])
            origin = LAYER.sub(rf"\g<1>{depth[group]}\g<3>", name)
            old, new = _layer_config(small, depth[group]), _layer_config(large, group)
        if origin not in weights and name.endswith(FIRST_NORM):
            continue  # the first layer may lack this norm, which then keeps its initial ones
        if origin not in weights:
            raise ValueError(f"{name} has no counterpart in the smaller model.")
        parameter.copy_(tile(weights[origin], axes_of(name), old, new, noise))
    _rescale_tied_decoder(large, small.config)
    large.renormalize_weights()
    return large


def tile(weight: Tensor, axes: list[str], old: BertBlocksConfig, new: BertBlocksConfig, noise: float) -> Tensor:
    """Tiles a weight of the smaller model to the size of the larger."""
    tiled = weight
    for dimension, axis in enumerate(axes):
        if axis == "same":
            continue
        index = unit_map(axis.lstrip("<"), old, new)
        tiled = tiled.index_select(dimension, index)
        if axis.startswith("<"):
            copies = torch.bincount(index)[index]
            tiled = tiled / copies.view(-1, *(1,) * (tiled.dim() - dimension - 1))
    if any(axis.startswith("<") for axis in axes) and tiled.shape != weight.shape:
        tiled = tiled + noise * tiled.std() * torch.randn_like(tiled)
    return tiled


def check_growth(small: BertBlocksConfig, large: BertBlocksConfig) -> None:
    """Raises an error that names a key if `large` is not a larger model of the same kind."""
    for key in SAME_KEYS:
        if getattr(small, key) != getattr(large, key):
            reason = "heads stay whole" if key == "head_dim" else "they must be equal"
            raise ValueError(
                f"{key} is {getattr(large, key)!r} in the larger model and {getattr(small, key)!r} in the smaller: "
                f"{reason}."
            )
    if get_decoder_scale(small) != get_decoder_scale(large):
        raise ValueError(
            f"parametrization is {large.parametrization!r}, whose decoder reads hidden states scaled by width; "
            "such a model can grow in depth, and in width together with mup_base_hidden_size."
        )
    for key in SIZE_KEYS:
        if getattr(large, key) < getattr(small, key):
            raise ValueError(
                f"{key} is {getattr(large, key)}; it must be at least {getattr(small, key)}, as in the smaller model."
            )
    queries = torch.arange(large.num_attention_heads)
    grouped = queries // (large.num_attention_heads // large.num_kv_heads) % small.num_kv_heads
    expected = queries % small.num_attention_heads // (small.num_attention_heads // small.num_kv_heads)
    if not torch.equal(grouped, expected):
        raise ValueError(
            f"num_kv_heads is {large.num_kv_heads} for {large.num_attention_heads} heads and was "
            f"{small.num_kv_heads} for {small.num_attention_heads}; copies of a query head need copies of its keys, so "
            "keep the number of query heads per key/value head."
        )


def depth_map(small: BertBlocksPreTrainedModel, large: BertBlocksPreTrainedModel) -> list[int]:
    """For each set of layer weights of the larger model, the index of the one in the smaller model that it copies.

    That is the nearest layer of the same kind at the same relative depth, if possible one with the same parameters. So
    the first layer copies the first and the last copies the last, if their kinds are equal.
    """
    old, new = _kinds(small), _kinds(large)
    mapped = []
    for index, (kind, names) in enumerate(new):
        depth = index * (len(old) - 1) / max(len(new) - 1, 1)
        candidates = [
            (bool(names - old_names), abs(number - depth), number)
            for number, (old_kind, old_names) in enumerate(old)
            if old_kind == kind
        ]
        if not candidates:
            raise ValueError(f"Layer {index} is {kind}, but the smaller model has no {kind} layer to copy.")
        mapped.append(min(candidates)[2])
    return mapped


def unit_map(axis: str, old: BertBlocksConfig, new: BertBlocksConfig) -> Tensor:
    """For each unit along an axis of the larger model, the unit of the smaller model that it copies."""
    if axis == "positions":
        first = old.position_offset  # rows before it are for padding
        rows = _tile(old.max_position_embeddings - first, new.max_position_embeddings - first)
        return torch.cat([torch.arange(first), rows + first])
    if axis == "distances":
        if old.disentangled_max_distance != new.disentangled_max_distance:
            raise ValueError(
                f"disentangled_max_distance is {new.disentangled_max_distance} in the larger model and "
                f"{old.disentangled_max_distance} in the smaller: they must be equal."
            )
        return torch.arange(2 * (old.disentangled_num_buckets or old.disentangled_max_distance))
    if axis == "channels":
        if old.input_conv_groups > 1 and old.hidden_size != new.hidden_size:
            raise ValueError(f"input_conv_groups is {old.input_conv_groups}; only a convolution with 1 group can grow.")
        return _tile(old.hidden_size // old.input_conv_groups, new.hidden_size // new.input_conv_groups)
    if axis == "normed":
        axis = "hidden" if old.embedding_norm_after_projection else "embedding"
    if axis == "head":
        return _tile(old.mlm_head_size or old.hidden_size, new.mlm_head_size or new.hidden_size)
    if axis == "dense":
        units = unit_map("output", old, new)
        return torch.cat([units, units + getattr(old, SIZE_OF["output"])]) if old.mlm_head_glu else units
    if axis == "up":
        if old.mlp_type == "grouped":
            raise ValueError("mlp_type is 'grouped'; only full projections can grow.")
        kind = old.expert_type if old.mlp_type == "moe" else old.mlp_type
        parts = NGPTMLP.num_up if old.ngpt else getattr(MLPS[kind], "num_up", 1)
        inner = _tile(old.intermediate_size, new.intermediate_size)
        return torch.cat([inner + part * old.intermediate_size for part in range(parts)])
    if axis in ("normed_queries", "normed_keys"):
        if not old.qk_norm_across_heads:
            return torch.arange(old.head_dim)
        axis = axis.removeprefix("normed_")
    if axis == "kernels":
        return _tile_heads(old.num_attention_heads, new.num_attention_heads, old.span_conv_size)
    if axis in ("queries", "keys", "qkv", "mixed"):
        queries = _tile_heads(old.num_attention_heads, new.num_attention_heads, old.head_dim)
        keys = _tile_heads(old.num_kv_heads, new.num_kv_heads, old.head_dim)
        first_key = old.num_attention_heads * old.head_dim
        if axis == "mixed":
            return torch.cat([queries, queries + first_key]) if old.span_convolution else queries
        if axis != "qkv":
            return queries if axis == "queries" else keys
        first_value = first_key + old.num_kv_heads * old.head_dim
        return torch.cat([queries, keys + first_key, keys + first_value])
    key = SIZE_OF[axis]
    return _tile(getattr(old, key), getattr(new, key))


def axes_of(name: str) -> list[str]:
    """The axes of a parameter."""
    for pattern, axes in AXES.items():
        if re.search(rf"{pattern}$", name):
            return axes.split()
    raise ValueError(f"{name} has no entry in AXES, so it cannot grow.")


def _rescale_tied_decoder(large: BertBlocksPreTrainedModel, small: BertBlocksConfig) -> None:
    """Divides the norm before a tied decoder, because dividing the decoder would change the embeddings too."""
    if not large.config.tie_word_embeddings or not hasattr(large, "decoder"):
        return
    norm: Any = large.base_model.encoder.final_norm if large.head is None else cast(Any, large.head).norm
    index = _tile(small.embedding_size, large.config.embedding_size)
    for parameter in () if norm is None else (norm.weight, norm.bias):
        if parameter is not None:
            parameter /= torch.bincount(index)[index]


def _layer_config(model: BertBlocksPreTrainedModel, group: int) -> BertBlocksConfig:
    return model.config.for_layer(model.base_model.encoder.order.index(group))


def _kinds(model: BertBlocksPreTrainedModel) -> list[tuple[str, set[str]]]:
    """The kind and the parameters of each set of layer weights."""
    encoder = model.base_model.encoder
    return [
        (model.config.layer_types[encoder.order.index(group)], {name for name, _ in layer.named_parameters()})
        for group, layer in enumerate(encoder.layers)
    ]


def _tile(old: int, new: int) -> Tensor:
    return torch.arange(new) % old


def _tile_heads(old: int, new: int, head_dim: int) -> Tensor:
    return (_tile(old, new)[:, None] * head_dim + torch.arange(head_dim)).flatten()
