"""What a config may hold, and why it is refused."""

from __future__ import annotations

import types
import typing
from typing import TYPE_CHECKING, Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bertblocks.backends import BACKENDS
from bertblocks.blocks.activation import activation_names
from bertblocks.blocks.block import NORM_POSITIONS
from bertblocks.blocks.mlp import MLPS
from bertblocks.blocks.norm import NORMS
from bertblocks.blocks.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS
from bertblocks.registry import nearest

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

CHOICES: dict[str, typing.Callable[[], list[str]]] = {
    "norm_fn": NORMS.names,
    "norm_pos": lambda: list(NORM_POSITIONS),
    "mlp_type": MLPS.names,
    "hidden_act": activation_names,
    "mlm_head_act": activation_names,
    "classifier_head_act": activation_names,
    "embd_pos_enc_kind": lambda: [*EMBEDDING_POSITIONS.names(), "none"],
    "block_pos_enc_kind": lambda: [*BLOCK_POSITIONS.names(), "none"],
    "attention_backend": lambda: ["auto", *BACKENDS.names()],
    "kernel_backend": lambda: ["auto", "liger", "torch"],
    "init_kind": lambda: ["trunc_normal", "normal", "megatron", "xavier", "kaiming", "deepnet", "ngpt"],
    "classifier_pooling": lambda: ["cls", "mean", "max"],
    "classifier_head": lambda: ["pooler", "dense", "none"],
    "problem_type": lambda: ["regression", "single_label_classification", "multi_label_classification"],
}

#: Keys that one layer may have otherwise than the rest.
LAYER_KEYS = {
    "norm_fn",
    "norm_pos",
    "norm_eps",
    "norm_bias",
    "norm_num_groups",
    "parallel_block",
    "mlp_type",
    "hidden_act",
    "intermediate_size",
    "mlp_in_bias",
    "mlp_out_bias",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "qk_norm",
    "attention_qkv_bias",
    "attention_out_bias",
    "block_pos_enc_kind",
    "rope_theta",
    "local_rope_theta",
    "partial_rotary_factor",
    "rope_interleaved",
    "rope_scaling",
    "local_rope_scaling",
    "local_attention_window_size",
    "num_global_tokens",
    "attention_dropout",
    "attention_output_dropout",
    "mlp_dropout",
    "mlp_output_dropout",
}

LOCAL_LAYER_KEYS = {"local_attention_window_size", "num_global_tokens", "local_rope_theta", "local_rope_scaling"}

#: What nGPT fixes, and why.
NGPT_VALUES = {
    "norm_pos": ("none", "its blocks normalise to the unit sphere instead"),
    "final_norm": (False, "its last hidden state is on the unit sphere already"),
    "parallel_block": (False, "its two steps along the sphere follow one another"),
    "mlp_type": ("glu", "its feed-forward is a scaled GLU"),
    "qk_norm": (False, "its queries and keys are unit vectors already"),
    "tie_word_embeddings": (False, "its output matrix is normalised apart from the embeddings"),
}


class ConfigError(ValueError):
    """A config that cannot be: the message names the key, its value, and what would work."""


def check_config(config: BertBlocksConfig) -> None:
    """Refuses types, values and combinations that make no encoder. Runs on creation, model building and saving."""
    _check_types(config)
    _check_values(config)
    _check_layers(config)
    for index in range(config.num_hidden_layers):
        if index == 0 or (config.layer_overrides or {}).get(index):
            _check_combinations(config.for_layer(index))


def _check_types(config: BertBlocksConfig) -> None:
    for key, kind in own_keys(type(config)).items():
        if not _fits(getattr(config, key), kind):
            _refuse(
                config, key, f"it must be of type {getattr(kind, '__name__', kind) if type(kind) is type else kind}"
            )


def _check_values(config: BertBlocksConfig) -> None:
    for key, choices in CHOICES.items():
        value = getattr(config, key)
        if value is not None and value not in choices():
            _refuse(config, key, f"it must be one of {', '.join(choices())}{nearest(value, choices())}")
    for key in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_kv_heads",
        "head_dim",
        "intermediate_size",
        "max_position_embeddings",
        "norm_num_groups",
    ):
        if getattr(config, key) < 1:
            _refuse(config, key, "it must be at least 1")
    for key in ("type_vocab_size", "position_offset", "num_global_tokens"):
        if getattr(config, key) < 0:
            _refuse(config, key, "it must not be negative")
    for key in ("norm_eps", "rope_theta", "local_rope_theta", "initializer_range", "initializer_cutoff_factor"):
        if not getattr(config, key) > 0:
            _refuse(config, key, "it must be greater than 0")
    for key in own_keys(type(config)):
        if key.endswith("dropout") and not 0 <= getattr(config, key) < 1:
            _refuse(config, key, "it must be at least 0 and less than 1")
    for key in ("partial_rotary_factor", "diffusion_min_time"):
        if not 0 < getattr(config, key) <= 1:
            _refuse(config, key, "it must be greater than 0 and at most 1")
    for key in own_keys(type(config)):
        value = getattr(config, key)
        if key.endswith("token_id") and value is not None and not 0 <= value < config.vocab_size:
            _refuse(config, key, f"it must lie within the vocabulary of {config.vocab_size}, or be null")
    for key in ("rope_scaling", "local_rope_scaling"):
        _check_scaling(config, key)


def _check_scaling(config: BertBlocksConfig, key: str) -> None:
    scaling = getattr(config, key)
    if scaling is None:
        return
    kinds = [kind for kind in ROPE_INIT_FUNCTIONS if kind != "proportional"]
    kind = scaling.get("rope_type")
    if kind not in kinds:
        _refuse(config, key, f"its rope_type must be one of {', '.join(kinds)}{nearest(kind, kinds)}")
    if kind != "longrope" and "factor" not in scaling:
        _refuse(config, key, f"rope_type {kind!r} needs a factor")
    if config.block_pos_enc_kind != "rope":
        _refuse(config, key, f"it goes with block_pos_enc_kind 'rope', which is {config.block_pos_enc_kind!r} here")


def _check_layers(config: BertBlocksConfig) -> None:
    if len(config.layer_types) != config.num_hidden_layers:
        _refuse(
            config,
            "layer_types",
            f"it must name num_hidden_layers = {config.num_hidden_layers} layers, not {len(config.layer_types)}",
        )
    if wrong := [kind for kind in config.layer_types if kind not in ("global", "local")]:
        _refuse(config, "layer_types", f"every entry must be 'global' or 'local', not {wrong[0]!r}")
    if "local" in config.layer_types and not config.local_attention:
        _refuse(config, "local_attention", "it must be true when layer_types has local layers")
    if config.global_attention_every_n_layers is not None and config.global_attention_every_n_layers < 1:
        _refuse(config, "global_attention_every_n_layers", "it must be at least 1, or null for local layers only")
    if config.global_attention_every_n_layers is not None and not config.local_attention:
        _refuse(config, "global_attention_every_n_layers", "it goes with local_attention true")
    for index, overrides in (config.layer_overrides or {}).items():
        if not isinstance(index, int) or not 0 <= index < config.num_hidden_layers:
            _refuse(
                config, "layer_overrides", f"it names layer {index!r}; layers are 0 to {config.num_hidden_layers - 1}"
            )
        for key in overrides:
            if key not in LAYER_KEYS:
                _refuse(
                    config,
                    "layer_overrides",
                    f"layer {index} has {key!r}, which no layer can have of its own{nearest(key, LAYER_KEYS)}",
                )
            if key in LOCAL_LAYER_KEYS and config.layer_types[index] == "global":
                _refuse(config, "layer_overrides", f"layer {index} is global, where {key!r} means nothing")
    for index in config.layer_overrides or {}:
        layer = config.for_layer(index)
        _check_types(layer)
        _check_values(layer)


def _check_combinations(config: BertBlocksConfig) -> None:
    if config.num_attention_heads % config.num_kv_heads:
        _refuse(config, "num_kv_heads", f"it must divide num_attention_heads = {config.num_attention_heads}")
    if (
        config.hidden_size % config.num_attention_heads
        and config.head_dim == config.hidden_size // config.num_attention_heads
    ):
        _refuse(
            config,
            "num_attention_heads",
            f"it must divide hidden_size = {config.hidden_size}, or head_dim must be given",
        )
    if config.norm_fn == "group" and config.hidden_size % config.norm_num_groups:
        _refuse(config, "norm_num_groups", f"it must divide hidden_size = {config.hidden_size}")
    if config.norm_fn == "deep" and config.norm_pos != "post":
        _refuse(config, "norm_pos", "norm_fn 'deep' works in position 'post' only")
    if not config.first_attention_norm and config.norm_pos not in ("pre", "pre_and_post", "sandwich"):
        _refuse(
            config,
            "first_attention_norm",
            f"false goes with a norm before attention, and norm_pos is {config.norm_pos!r}",
        )
    if config.block_pos_enc_kind == "rope" and int(config.head_dim * config.partial_rotary_factor) % 2:
        _refuse(
            config,
            "partial_rotary_factor",
            f"it must leave an even number of units to turn, and head_dim is {config.head_dim}",
        )
    if config.rope_interleaved and config.block_pos_enc_kind != "rope":
        _refuse(
            config, "rope_interleaved", f"it goes with block_pos_enc_kind 'rope', not {config.block_pos_enc_kind!r}"
        )
    if config.position_offset and config.embd_pos_enc_kind != "learned":
        _refuse(
            config,
            "position_offset",
            f"it goes with embd_pos_enc_kind 'learned', which is {config.embd_pos_enc_kind!r} here",
        )
    if config.position_offset >= config.max_position_embeddings:
        _refuse(
            config,
            "position_offset",
            f"it must be less than max_position_embeddings = {config.max_position_embeddings}",
        )
    if config.local_attention and config.local_attention_window_size < 1:
        _refuse(config, "local_attention_window_size", "it must be at least 1")
    if config.num_global_tokens and not config.local_attention:
        _refuse(config, "num_global_tokens", "it goes with local_attention true")
    if config.attention_backend == "flash" and config.num_global_tokens:
        _refuse(config, "num_global_tokens", "attention_backend 'flash' has no global tokens; 'sdpa' and 'eager' do")
    if config.classifier_head == "pooler" and config.classifier_pooling != "cls":
        _refuse(
            config,
            "classifier_pooling",
            "classifier_head 'pooler' reads the first token; use 'dense' or 'none' with mean or max",
        )
    if config.classifier_head_on_tokens and config.classifier_head != "dense":
        _refuse(
            config,
            "classifier_head_on_tokens",
            f"it goes with classifier_head 'dense', which is {config.classifier_head!r} here",
        )
    if config.ngpt_logit_scale and not config.ngpt:
        _refuse(config, "ngpt_logit_scale", "it goes with ngpt true")
    if config.ngpt:
        _check_ngpt(config)


def _check_ngpt(config: BertBlocksConfig) -> None:
    for key, (value, reason) in NGPT_VALUES.items():
        if getattr(config, key) != value:
            _refuse(config, key, f"ngpt needs {value!r}, because {reason}")
    if config.num_kv_heads != config.num_attention_heads:
        _refuse(
            config,
            "num_kv_heads",
            f"ngpt needs {config.num_attention_heads}, because queries and keys share their scale",
        )


def _refuse(config: BertBlocksConfig, key: str, reason: str) -> typing.NoReturn:
    raise ConfigError(f"{key} is {getattr(config, key)!r}; {reason}.")


def own_keys(config_class: type[BertBlocksConfig]) -> dict[str, Any]:
    """BertBlocks' own keys and their types, without those of transformers."""
    return {key: kind for key, kind in config_class.__annotations__.items() if key != "model_type"}


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; whole numbers pass as floats, booleans not as numbers."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(kind))
    if kind is Any:
        return True
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return is_whole(value)
    if origin is list:
        return isinstance(value, list) and all(_fits(item, typing.get_args(kind)[0]) for item in value)
    if origin is dict:
        key_kind, value_kind = typing.get_args(kind)
        return isinstance(value, dict) and all(_fits(k, key_kind) and _fits(v, value_kind) for k, v in value.items())
    return isinstance(value, kind)
