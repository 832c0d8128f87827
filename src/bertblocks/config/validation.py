"""What a config may hold, and why it is refused."""

from __future__ import annotations

import itertools
import math
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from bertblocks.core.registry import nearest
from bertblocks.nn.activation import activation_names
from bertblocks.nn.backends import BACKENDS
from bertblocks.nn.block import NORM_POSITIONS
from bertblocks.nn.mlp import MLPS
from bertblocks.nn.norm import NORMS
from bertblocks.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS, FREQUENCY_DTYPES

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
    "rope_frequency_dtype": lambda: list(FREQUENCY_DTYPES),
    "attention_backend": lambda: ["auto", *BACKENDS.names()],
    "kernel_backend": lambda: ["auto", "liger", "torch"],
    "quantization": lambda: ["int8"],
    "init_kind": lambda: ["trunc_normal", "normal", "megatron", "xavier", "kaiming", "deepnet", "ngpt"],
    "classifier_pooling": lambda: ["cls", "mean", "max"],
    "classifier_head": lambda: ["pooler", "dense", "none"],
    "problem_type": lambda: ["regression", "single_label_classification", "multi_label_classification"],
}

POSITIVE_SIZES = (
    "vocab_size",
    "hidden_size",
    "embedding_size",
    "num_hidden_layers",
    "num_hidden_groups",
    "num_attention_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "norm_num_groups",
)

#: transformers' scalings of RoPE with what each needs and what it may have.
ROPE_SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
OPTIONAL_SCALING_KEYS: dict[str, tuple[str, ...]] = {
    "yarn": (
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "llama3": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "attention_factor", "factor"),
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

GLOBAL_LAYER_KEYS = {"rope_theta", "rope_scaling"}

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
    """Refuses types, values and combinations that make no encoder."""
    check_types(config)
    _check_values(config)
    _check_layer_keys(config)
    _refuse_first(config, _model_combinations(config))
    layers = [config.for_layer(index) for index in config.layer_overrides or {}]
    for layer in layers:
        check_types(layer)
        _check_values(layer)
        _refuse_first(layer, _layer_combinations(layer))
    if len(layers) < config.num_hidden_layers:
        _refuse_first(config, _layer_combinations(config))


def check_types(config: BertBlocksConfig, implied: bool = True) -> None:
    """Refuses values of another type than their key's; before keys are `implied`, None passes."""
    for key, kind in own_keys(type(config)).items():
        value = getattr(config, key)
        if implied or value is not None:
            check_type(key, value, kind)


def check_type(key: str, value: Any, kind: Any) -> None:
    if not fits(value, kind):
        name = kind.__name__ if isinstance(kind, type) else kind
        raise ConfigError(f"{key} is {value!r}; it must be of type {name}.")


def _check_values(config: BertBlocksConfig) -> None:
    for key, choices in CHOICES.items():
        value = getattr(config, key)
        if value is not None and value not in choices():
            _refuse(config, key, f"it must be one of {', '.join(choices())}{nearest(value, choices())}")
    for key in POSITIVE_SIZES:
        if getattr(config, key) < 1:
            _refuse(config, key, "it must be at least 1")
    for key in ("type_vocab_size", "position_offset", "num_global_tokens"):
        if getattr(config, key) < 0:
            _refuse(config, key, "it must not be negative")
    for key in ("norm_eps", "rope_theta", "local_rope_theta", "initializer_range", "initializer_cutoff_factor"):
        if not 0 < getattr(config, key) < math.inf:
            _refuse(config, key, "it must be greater than 0")
    for key in ("partial_rotary_factor", "diffusion_min_time"):
        if not 0 < getattr(config, key) <= 1:
            _refuse(config, key, "it must be greater than 0 and at most 1")
    for key in own_keys(type(config)):
        value = getattr(config, key)
        if key.endswith("dropout") and not isinstance(value, bool) and not 0 <= value < 1:
            _refuse(config, key, "it must be at least 0 and less than 1")
        if key in ("pad_token_id", "mask_token_id") and value is not None and not 0 <= value < config.vocab_size:
            _refuse(config, key, f"it must lie within the vocabulary of {config.vocab_size}, or be null")
    for key, only in (("is_encoder_decoder", False), ("chunk_size_feed_forward", 0)):
        if getattr(config, key) != only:
            _refuse(config, key, f"it must be {only!r}: transformers has this key, an encoder here has no use for it")
    for key in ("rope_scaling", "local_rope_scaling"):
        if getattr(config, key) is not None:
            _check_scaling(config, key)


def _check_scaling(config: BertBlocksConfig, key: str) -> None:
    scaling = getattr(config, key)
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        _refuse(config, key, f"its rope_type must be one of {', '.join(ROPE_SCALINGS)}{nearest(kind, ROPE_SCALINGS)}")
    needed, known = ROPE_SCALINGS[kind], {*ROPE_SCALINGS[kind], *OPTIONAL_SCALING_KEYS.get(kind, ())}
    if not set(needed) <= set(scaling):
        _refuse(config, key, f"rope_type {kind!r} needs {' and '.join(needed)}")
    for name, value in scaling.items():
        if name != "rope_type" and name not in known:
            _refuse(config, key, f"rope_type {kind!r} has no {name!r}{nearest(name, known)}")
        numbers = value if isinstance(value, list) else [value]
        if name != "rope_type" and not all(fits(number, float | bool | None) for number in numbers):
            _refuse(config, key, f"its {name} must be a number")
        if name == "factor" and not value > 0:
            _refuse(config, key, "its factor must be greater than 0")


def _check_layer_keys(config: BertBlocksConfig) -> None:
    if len(config.layer_types) != config.num_hidden_layers:
        count = f"num_hidden_layers = {config.num_hidden_layers} layers, not {len(config.layer_types)}"
        _refuse(config, "layer_types", f"it must name {count}")
    if wrong := [kind for kind in config.layer_types if kind not in ("global", "local")]:
        _refuse(config, "layer_types", f"every entry must be 'global' or 'local', not {wrong[0]!r}")
    last = config.num_hidden_layers - 1
    for index, overrides in (config.layer_overrides or {}).items():
        if not 0 <= index <= last:
            _refuse(config, "layer_overrides", f"it names layer {index!r}; layers are 0 to {last}")
        for key, value in overrides.items():
            if key not in LAYER_KEYS:
                why = f"which no layer can have of its own{nearest(key, LAYER_KEYS)}"
                _refuse(config, "layer_overrides", f"layer {index} has {key!r}, {why}")
            kind = config.layer_types[index]
            if key in (LOCAL_LAYER_KEYS if kind == "global" else GLOBAL_LAYER_KEYS):
                _refuse(config, "layer_overrides", f"layer {index} is {kind}, where {key!r} means nothing")
            if key == "norm_fn" and (value == "deep") != (config.norm_fn == "deep"):
                _refuse(
                    config, "layer_overrides", "norm_fn 'deep' holds for all layers, in position 'post', or for none"
                )


#: A key, whether it is wrong, and why.
Combination = tuple[str, Any, str]


def _model_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """What one key asks of another in the model as a whole."""
    every = "global_attention_every_n_layers"
    yield "local_attention", "local" in c.layer_types and not c.local_attention, "it must be true for local layers"
    number = c.global_attention_every_n_layers
    yield every, number is not None and number < 1, "it must be at least 1, or null for local layers only"
    yield every, number is not None and not c.local_attention, "it goes with local_attention true"
    is_local = c.local_attention
    yield "local_attention_window_size", is_local and c.local_attention_window_size < 1, "it must be at least 1"
    first = c.for_layer(0).norm_pos
    no_norm = not c.first_attention_norm and first not in ("pre", "pre_and_post", "sandwich")
    yield "first_attention_norm", no_norm, f"false goes with a norm before attention, and norm_pos is {first!r}"
    kinds = {c.for_layer(index).block_pos_enc_kind for index in range(c.num_hidden_layers)}
    for key in ("rope_scaling", "local_rope_scaling"):
        no_rope = getattr(c, key) is not None and "rope" not in kinds
        yield key, no_rope, f"it goes with block_pos_enc_kind 'rope', which is {c.block_pos_enc_kind!r} here"
        rounded = getattr(c, key) is not None and c.rope_frequency_dtype != "float32"
        yield "rope_frequency_dtype", rounded, f"it must be 'float32' with {key}"
    no_rope = c.rope_frequency_dtype != "float32" and "rope" not in kinds
    yield "rope_frequency_dtype", no_rope, f"it goes with block_pos_enc_kind 'rope', not {c.block_pos_enc_kind!r}"
    yield "token_dropout", c.token_dropout and c.mask_token_id is None, "it needs mask_token_id"
    yield from _relative_combinations(c)
    no_table = c.position_offset and c.embd_pos_enc_kind != "learned"
    yield "position_offset", no_table, f"it goes with embd_pos_enc_kind 'learned', not {c.embd_pos_enc_kind!r}"
    rows = c.max_position_embeddings
    yield "position_offset", c.position_offset >= rows, f"it must be less than max_position_embeddings = {rows}"
    reads_first = c.classifier_head == "pooler" and c.classifier_pooling != "cls"
    yield "classifier_pooling", reads_first, "classifier_head 'pooler' reads the first token; use 'dense' or 'none'"
    no_head = c.classifier_head_on_tokens and c.classifier_head != "dense"
    yield "classifier_head_on_tokens", no_head, f"it goes with classifier_head 'dense', not {c.classifier_head!r}"
    no_head = c.classifier_head_before_pooling and c.classifier_head != "dense"
    yield "classifier_head_before_pooling", no_head, f"it goes with classifier_head 'dense', not {c.classifier_head!r}"
    no_width = c.mlm_head_size is not None and (c.mlm_head_size < 1 or not c.mlm_head_dense)
    yield "mlm_head_size", no_width, "it must be at least 1 and goes with mlm_head_dense true"
    yield "ngpt_logit_scale", c.ngpt_logit_scale and not c.ngpt, "it goes with ngpt true"
    yield from _embedding_combinations(c)
    yield from _sharing_combinations(c)


def _embedding_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """What embeddings of another width than the layers ask for."""
    size, differs = c.embedding_size, c.embedding_size != c.hidden_size
    sizes = f"embedding_size = {size} and hidden_size = {c.hidden_size}"
    yield "embedding_projection", differs and not c.embedding_projection, f"it must be true between {sizes}"
    yield "mlm_head_dense", differs and not c.mlm_head_dense, f"it must be true between {sizes}"
    uneven = c.norm_fn == "group" and differs and (size % c.norm_num_groups or size == c.norm_num_groups)
    yield "norm_num_groups", uneven, f"it must divide embedding_size = {size} into groups of at least 2"


def _sharing_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """What layers that share their weights ask for."""
    key, layers = "num_hidden_groups", c.num_hidden_layers
    yield key, c.num_hidden_groups > layers, f"it must be at most num_hidden_layers = {layers}"
    if c.num_hidden_groups >= layers:
        return
    no_norm = not c.first_attention_norm
    yield "first_attention_norm", no_norm, "false goes with a first layer that shares its weights with no other"
    overrides = c.layer_overrides or {}
    for one, two in itertools.pairwise(range(layers)):
        if c.layer_group(one) == c.layer_group(two):
            why = f"layers {one} and {two} share their weights by num_hidden_groups = {c.num_hidden_groups}"
            yield "layer_types", c.layer_types[one] != c.layer_types[two], f"{why}, so they must be of one type"
            differ = overrides.get(one, {}) != overrides.get(two, {})
            yield "layer_overrides", differ, f"{why}, so they must have the same overrides"


def _relative_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """What T5's buckets of distances ask for."""
    buckets, key = c.relative_attention_num_buckets, "relative_attention_num_buckets"
    yield key, buckets < 4 or buckets % 2, "it must be even and at least 4"
    exact = buckets // 4
    too_near = c.relative_attention_max_distance <= exact
    yield "relative_attention_max_distance", too_near, f"it must be more than {exact}, a quarter of {key}"
    layers = [c.for_layer(index) for index in range(c.num_hidden_layers)]
    heads = {layer.num_attention_heads for layer in layers if layer.block_pos_enc_kind == "t5"}
    uneven = c.relative_attention_shared and not heads <= {c.num_attention_heads}
    why = f"it must be false for layers of kind 't5' that have not num_attention_heads = {c.num_attention_heads}"
    yield "relative_attention_shared", uneven, why


def _layer_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """What one key asks of another in each layer."""
    heads, hidden = c.num_attention_heads, c.hidden_size
    yield "num_kv_heads", heads % c.num_kv_heads, f"it must divide num_attention_heads = {heads}"
    uneven: Any = hidden % heads and c.head_dim == hidden // heads
    yield "num_attention_heads", uneven, f"it must divide hidden_size = {hidden}, or head_dim must be another"
    uneven = c.norm_fn == "group" and (hidden % c.norm_num_groups or hidden == c.norm_num_groups)
    yield "norm_num_groups", uneven, f"it must divide hidden_size = {hidden} into groups of at least 2"
    not_post = c.norm_fn == "deep" and c.norm_pos != "post"
    yield "norm_pos", not_post, "norm_fn 'deep' works in position 'post' only"
    is_rope, turned = c.block_pos_enc_kind == "rope", int(c.head_dim * c.partial_rotary_factor)
    uneven = is_rope and (turned % 2 or not turned)
    yield "partial_rotary_factor", uneven, f"an even number of units must turn, and head_dim is {c.head_dim}"
    wrong = c.rope_interleaved and not is_rope and not c.layer_overrides
    yield "rope_interleaved", wrong, f"it goes with block_pos_enc_kind 'rope', not {c.block_pos_enc_kind!r}"
    yield "num_global_tokens", c.num_global_tokens and not c.local_attention, "it goes with local_attention true"
    is_flash = c.attention_backend == "flash"
    why = "attention_backend 'flash' has no global tokens; 'sdpa' and 'eager' do"
    yield "num_global_tokens", is_flash and c.num_global_tokens, why
    if c.ngpt:
        yield from _ngpt_combinations(c)


def _ngpt_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    for key, (value, reason) in NGPT_VALUES.items():
        yield key, getattr(c, key) != value, f"ngpt needs {value!r}, because {reason}"
    heads = c.num_attention_heads
    why = f"ngpt needs {heads}, because queries and keys share their scale"
    yield "num_kv_heads", c.num_kv_heads != heads, why


def _refuse_first(config: BertBlocksConfig, combinations: Iterator[Combination]) -> None:
    for key, wrong, reason in combinations:
        if wrong:
            _refuse(config, key, reason)


def check_labels(options: dict[str, Any]) -> None:
    """Refuses label keys that transformers would stumble over; their meaning is transformers' own."""
    count, names = options.get("num_labels"), options.get("id2label")
    if count is not None and (not fits(count, int) or count < 1):
        raise ConfigError(f"num_labels is {count!r}; it must be a whole number of at least 1.")
    if names is not None and (not isinstance(names, dict) or not names):
        raise ConfigError(f"id2label is {names!r}; it must map label numbers to names.")
    if count is not None and names is not None and len(names) != count:
        raise ConfigError(f"num_labels is {count}; id2label names {len(names)} labels: they must agree.")
    dtype = options.get("dtype", options.get("torch_dtype"))
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype is {dtype!r}; it must be a type of torch such as 'float32' or 'bfloat16'.")


def _refuse(config: BertBlocksConfig, key: str, reason: str) -> typing.NoReturn:
    raise ConfigError(f"{key} is {getattr(config, key)!r}; {reason}.")


def own_keys(config_class: type[BertBlocksConfig]) -> dict[str, Any]:
    """BertBlocks' own keys and their types, without those of transformers."""
    return {key: kind for key, kind in config_class.__annotations__.items() if key != "model_type"}


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; whole numbers pass as floats, booleans not as numbers."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return any(fits(value, option) for option in typing.get_args(kind))
    if kind is Any:
        return True
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if origin is list:
        return isinstance(value, list) and all(fits(item, typing.get_args(kind)[0]) for item in value)
    if origin is dict:
        key_kind, value_kind = typing.get_args(kind)
        return isinstance(value, dict) and all(fits(k, key_kind) and fits(v, value_kind) for k, v in value.items())
    return isinstance(value, kind)
