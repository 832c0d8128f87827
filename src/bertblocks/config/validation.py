"""Validation of configs: types, ranges, choices, and combinations of keys."""

from __future__ import annotations

import contextlib
import itertools
import math
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import type_validator

from bertblocks.core.messages import InputError, short_repr
from bertblocks.core.registry import nearest
from bertblocks.nn.activation import activation_names
from bertblocks.nn.backends import BACKENDS
from bertblocks.nn.block import NORM_POSITIONS
from bertblocks.nn.disentangled import DISENTANGLED_SCORES
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
    "input_conv_act": activation_names,
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

#: The smallest and the largest value of every size; None where another check sets the lower limit. The upper limits are
#: far beyond any model: they keep a typo or a hostile file from exhausting the memory.
SIZES: dict[str, tuple[int | None, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "embedding_size": (1, 2**20),
    "num_hidden_layers": (1, 10_000),
    "num_hidden_groups": (1, 10_000),
    "num_attention_heads": (1, 10_000),
    "num_kv_heads": (1, 10_000),
    "head_dim": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "max_position_embeddings": (1, 2**24),
    "norm_num_groups": (1, 2**20),
    "type_vocab_size": (0, 2**20),
    "position_offset": (0, 2**24),
    "num_global_tokens": (0, 2**24),
    "local_attention_window_size": (None, 2**24),
    "relative_attention_num_buckets": (None, 2**20),
    "relative_attention_max_distance": (None, 2**24),
    "disentangled_max_distance": (1, 2**24),
    "disentangled_num_buckets": (2, 2**20),
    "input_conv_size": (0, 2**12),
    "input_conv_groups": (1, 2**20),
    "mlm_head_size": (None, 2**20),
    "num_labels": (1, 1_000_000),
}

#: The most values or characters in the value of one key.
MAX_VOLUME = 2**24

#: The kinds of RoPE scaling in transformers, with the keys that each requires.
ROPE_SCALINGS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
#: Keys that each kind accepts in addition.
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

#: Keys that `layer_overrides` can set for one layer.
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
    "attention_key_bias",
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

#: Keys that only affect local layers.
LOCAL_LAYER_KEYS = {"local_attention_window_size", "num_global_tokens", "local_rope_theta", "local_rope_scaling"}

#: Keys that only affect global layers.
GLOBAL_LAYER_KEYS = {"rope_theta", "rope_scaling"}

#: The values that nGPT requires, and why.
NGPT_VALUES = {
    "norm_pos": ("none", "its blocks project onto the unit sphere instead"),
    "final_norm": (False, "its last hidden state is already on the unit sphere"),
    "parallel_block": (False, "its two steps along the sphere are sequential"),
    "mlp_type": ("glu", "its feed-forward network is a scaled GLU"),
    "qk_norm": (False, "its queries and keys are already unit vectors"),
    "tie_word_embeddings": (False, "its output matrix is normalised separately from the embeddings"),
}


class ConfigError(InputError):
    """An invalid config. The message names the key, its value, and what would work."""


def check_config(config: BertBlocksConfig) -> None:
    """Raise `ConfigError` for types, values and combinations that do not describe an encoder."""
    check_types(config)
    _check_values(config)
    _check_layer_keys(config)
    _check_combinations(config, _model_combinations(config))
    layers = [config.for_layer(index) for index in config.layer_overrides or {}]
    for layer in layers:
        check_types(layer)
        _check_values(layer)
        _check_combinations(layer, _layer_combinations(layer))
    if len(layers) < config.num_hidden_layers:
        _check_combinations(config, _layer_combinations(config))


def check_types(config: BertBlocksConfig, implied: bool = True) -> None:
    """Check that every value has its key's type; before implied keys are filled in (`implied=False`), None passes."""
    for key, kind in own_keys(type(config)).items():
        value = getattr(config, key)
        if implied or value is not None:
            check_type(key, value, kind)


def check_type(key: str, value: Any, kind: Any) -> None:
    if not fits(value, kind):
        name = kind.__name__ if isinstance(kind, type) else kind
        raise ConfigError(f"{key} is {short_repr(value)}; it must be of type {name}.")


def check_volume(key: str, value: Any) -> None:
    """Check that a value is small enough to process; YAML aliases can make it larger than memory."""
    waiting, volume = [value], 0
    while waiting:
        item = waiting.pop()
        volume += len(item) if isinstance(item, (str, bytes)) else 1
        if volume > MAX_VOLUME:
            raise ConfigError(f"{short_repr(key)} is {short_repr(value)}; it must hold at most {MAX_VOLUME:,} values.")
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple, set)):
            waiting += item


def check_sizes(config: BertBlocksConfig) -> None:
    """Check every size that is set; this runs before anything is allocated by size."""
    for key in SIZES.keys() & own_keys(type(config)).keys():
        if getattr(config, key) is not None:
            check_size(key, getattr(config, key))


def check_size(key: str, value: int) -> None:
    least, most = SIZES[key]
    if least is not None and value < least:
        reason = "it must not be negative" if least == 0 else f"it must be at least {least}"
        raise ConfigError(f"{key} is {short_repr(value)}; {reason}.")
    if value > most:
        raise ConfigError(f"{key} is {short_repr(value)}; it must be at most {most:,}.")


def _check_values(config: BertBlocksConfig) -> None:
    for key, choices in CHOICES.items():
        value = getattr(config, key)
        if value is not None and value not in choices():
            _reject(config, key, f"it must be one of {', '.join(choices())}{nearest(value, choices())}")
    check_sizes(config)
    for key in ("norm_eps", "rope_theta", "local_rope_theta", "initializer_range", "initializer_cutoff_factor"):
        if not 0 < getattr(config, key) < math.inf:
            _reject(config, key, "it must be greater than 0")
    for key in ("partial_rotary_factor", "diffusion_min_time"):
        if not 0 < getattr(config, key) <= 1:
            _reject(config, key, "it must be greater than 0 and at most 1")
    for key in own_keys(type(config)):
        value = getattr(config, key)
        if key.endswith("dropout") and not isinstance(value, bool) and not 0 <= value < 1:
            _reject(config, key, "it must be at least 0 and less than 1")
        if key in ("pad_token_id", "mask_token_id") and value is not None and not 0 <= value < config.vocab_size:
            _reject(config, key, f"it must lie within the vocabulary of {config.vocab_size}, or be null")
    for key, only in (("is_encoder_decoder", False), ("chunk_size_feed_forward", 0)):
        if getattr(config, key) != only:
            _reject(config, key, f"it must be {only!r}: transformers defines this key, but it has no meaning here")
    for key in ("rope_scaling", "local_rope_scaling"):
        if getattr(config, key) is not None:
            _check_scaling(config, key)


def _check_scaling(config: BertBlocksConfig, key: str) -> None:
    scaling = getattr(config, key)
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_SCALINGS:
        _reject(config, key, f"its rope_type must be one of {', '.join(ROPE_SCALINGS)}{nearest(kind, ROPE_SCALINGS)}")
    needed, known = ROPE_SCALINGS[kind], {*ROPE_SCALINGS[kind], *OPTIONAL_SCALING_KEYS.get(kind, ())}
    if not set(needed) <= set(scaling):
        _reject(config, key, f"rope_type {kind!r} requires {' and '.join(needed)}")
    for name, value in scaling.items():
        if name != "rope_type" and name not in known:
            _reject(config, key, f"rope_type {kind!r} does not take {name!r}{nearest(name, known)}")
        numbers = value if isinstance(value, list) else [value]
        if name != "rope_type" and not all(fits(number, float | bool | None) for number in numbers):
            _reject(config, key, f"its {name} must be a number")
        if name == "factor" and not value > 0:
            _reject(config, key, "its factor must be greater than 0")


def _check_layer_keys(config: BertBlocksConfig) -> None:
    if len(config.layer_types) != config.num_hidden_layers:
        count = f"num_hidden_layers = {config.num_hidden_layers} layers, not {len(config.layer_types)}"
        _reject(config, "layer_types", f"it must list {count}")
    if wrong := [kind for kind in config.layer_types if kind not in ("global", "local")]:
        _reject(config, "layer_types", f"every entry must be 'global' or 'local', not {short_repr(wrong[0])}")
    last = config.num_hidden_layers - 1
    for index, overrides in (config.layer_overrides or {}).items():
        if not 0 <= index <= last:
            _reject(config, "layer_overrides", f"it names layer {short_repr(index)}; layers are 0 to {last}")
        for key, value in overrides.items():
            if key not in LAYER_KEYS:
                why = f"which cannot be set per layer{nearest(key, LAYER_KEYS)}"
                _reject(config, "layer_overrides", f"layer {index} sets {short_repr(key)}, {why}")
            kind = config.layer_types[index]
            if key in (LOCAL_LAYER_KEYS if kind == "global" else GLOBAL_LAYER_KEYS):
                _reject(config, "layer_overrides", f"layer {index} is {kind}, where {key!r} has no effect")
            if key == "norm_fn" and (value == "deep") != (config.norm_fn == "deep"):
                _reject(
                    config, "layer_overrides", "norm_fn 'deep' must apply to all layers, in position 'post', or to none"
                )


#: A key, whether its value is invalid, and the reason.
Combination = tuple[str, Any, str]


def _model_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """Constraints between keys of the whole model."""
    every = "global_attention_every_n_layers"
    yield (
        "local_attention",
        "local" in c.layer_types and not c.local_attention,
        "it must be true if layer_types lists local layers",
    )
    number = c.global_attention_every_n_layers
    yield every, number is not None and number < 1, "it must be at least 1, or null to make all layers local"
    yield every, number is not None and not c.local_attention, "it requires local_attention true"
    is_local = c.local_attention
    yield "local_attention_window_size", is_local and c.local_attention_window_size < 1, "it must be at least 1"
    first = c.for_layer(0).norm_pos
    no_norm = not c.first_attention_norm and first not in ("pre", "pre_and_post", "sandwich")
    yield "first_attention_norm", no_norm, f"false requires a norm before attention, but norm_pos is {first!r}"
    kinds = {c.for_layer(index).block_pos_enc_kind for index in range(c.num_hidden_layers)}
    for key in ("rope_scaling", "local_rope_scaling"):
        no_rope = getattr(c, key) is not None and "rope" not in kinds
        yield key, no_rope, f"it requires block_pos_enc_kind 'rope', not {c.block_pos_enc_kind!r}"
        rounded = getattr(c, key) is not None and c.rope_frequency_dtype != "float32"
        yield "rope_frequency_dtype", rounded, f"it must be 'float32' with {key}"
    no_rope = c.rope_frequency_dtype != "float32" and "rope" not in kinds
    yield "rope_frequency_dtype", no_rope, f"it requires block_pos_enc_kind 'rope', not {c.block_pos_enc_kind!r}"
    yield "token_dropout", c.token_dropout and c.mask_token_id is None, "it requires mask_token_id"
    yield from _relative_combinations(c)
    yield from _disentangled_combinations(c, kinds)
    no_table = c.position_offset and c.embd_pos_enc_kind != "learned"
    yield "position_offset", no_table, f"it requires embd_pos_enc_kind 'learned', not {c.embd_pos_enc_kind!r}"
    rows = c.max_position_embeddings
    yield "position_offset", c.position_offset >= rows, f"it must be less than max_position_embeddings = {rows}"
    reads_first = c.classifier_head == "pooler" and c.classifier_pooling != "cls"
    yield "classifier_pooling", reads_first, "classifier_head 'pooler' reads the first token; use 'dense' or 'none'"
    no_head = c.classifier_head_on_tokens and c.classifier_head != "dense"
    yield "classifier_head_on_tokens", no_head, f"it requires classifier_head 'dense', not {c.classifier_head!r}"
    no_head = c.classifier_head_before_pooling and c.classifier_head != "dense"
    yield "classifier_head_before_pooling", no_head, f"it requires classifier_head 'dense', not {c.classifier_head!r}"
    no_width = c.mlm_head_size is not None and (c.mlm_head_size < 1 or not c.mlm_head_dense)
    yield "mlm_head_size", no_width, "it must be at least 1 and requires mlm_head_dense true"
    yield "ngpt_logit_scale", c.ngpt_logit_scale and not c.ngpt, "it requires ngpt true"
    yield from _embedding_combinations(c)
    yield from _sharing_combinations(c)
    is_even = c.input_conv_size and c.input_conv_size % 2 == 0
    yield "input_conv_size", is_even, "it must be odd, so that as many tokens precede as follow, or 0 for none"
    uneven = c.hidden_size % c.input_conv_groups
    yield "input_conv_groups", uneven, f"it must divide hidden_size = {c.hidden_size}"
    yield (
        "input_conv_size",
        c.input_conv_size and c.ngpt,
        "it must be 0 with ngpt, whose hidden states are unit vectors",
    )


def _embedding_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """Constraints on embeddings that are not as wide as the layers."""
    size, differs = c.embedding_size, c.embedding_size != c.hidden_size
    sizes = f"embedding_size = {size} differs from hidden_size = {c.hidden_size}"
    yield "embedding_projection", differs and not c.embedding_projection, f"it must be true because {sizes}"
    after = c.embedding_norm_after_projection and not (c.embedding_projection and c.embedding_norm)
    why = "it requires embedding_norm and embedding_projection true"
    yield "embedding_norm_after_projection", after, why
    no_projection = not c.embedding_projection_bias and not c.embedding_projection
    yield "embedding_projection_bias", no_projection, "false requires embedding_projection true"
    yield "mlm_head_dense", differs and not c.mlm_head_dense, f"it must be true because {sizes}"
    uneven = c.norm_fn == "group" and differs and (size % c.norm_num_groups or size == c.norm_num_groups)
    yield "norm_num_groups", uneven, f"it must divide embedding_size = {size} into groups of at least 2"


def _sharing_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """Constraints on layers that share their weights."""
    key, layers = "num_hidden_groups", c.num_hidden_layers
    yield key, c.num_hidden_groups > layers, f"it must be at most num_hidden_layers = {layers}"
    if c.num_hidden_groups >= layers:
        return
    no_norm = not c.first_attention_norm
    yield "first_attention_norm", no_norm, "false requires a first layer that does not share its weights"
    overrides = c.layer_overrides or {}
    for layer, following in itertools.pairwise(range(layers)):
        if c.layer_group(layer) == c.layer_group(following):
            why = f"num_hidden_groups = {c.num_hidden_groups} makes layers {layer} and {following} share their weights"
            differ = c.layer_types[layer] != c.layer_types[following]
            yield "layer_types", differ, f"{why}, so they must have the same type"
            differ = overrides.get(layer, {}) != overrides.get(following, {})
            yield "layer_overrides", differ, f"{why}, so they must have the same overrides"


def _relative_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """Constraints on T5's distance buckets."""
    buckets, key = c.relative_attention_num_buckets, "relative_attention_num_buckets"
    yield key, buckets < 4 or buckets % 2, "it must be even and at least 4"
    exact = buckets // 4
    too_near = c.relative_attention_max_distance <= exact
    yield "relative_attention_max_distance", too_near, f"it must be more than {exact}, a quarter of {key}"
    layers = [c.for_layer(index) for index in range(c.num_hidden_layers)]
    heads = {layer.num_attention_heads for layer in layers if layer.block_pos_enc_kind == "t5"}
    uneven = c.relative_attention_shared and not heads <= {c.num_attention_heads}
    why = f"it must be false if a 't5' layer does not have num_attention_heads = {c.num_attention_heads} heads"
    yield "relative_attention_shared", uneven, why


def _disentangled_combinations(c: BertBlocksConfig, kinds: set[str]) -> Iterator[Combination]:
    """Constraints on DeBERTa's scores between content and position."""
    names, key = c.disentangled_scores, "disentangled_scores"
    wrong = not names or len(set(names)) < len(names) or not set(names) <= set(DISENTANGLED_SCORES)
    yield key, wrong, f"it must list {' or '.join(DISENTANGLED_SCORES)}, or both"
    buckets, most = c.disentangled_num_buckets, c.disentangled_max_distance
    too_near = buckets is not None and most <= buckets // 2 + 1
    why = f"it must be more than {(buckets or 0) // 2 + 1}, one more than half of disentangled_num_buckets"
    yield "disentangled_max_distance", too_near, why
    both = "disentangled" in kinds and "t5" in kinds and c.relative_attention_shared
    why = "it must be false if some layers are 't5' and others 'disentangled', because layers can share one table only"
    yield "relative_attention_shared", both, why


def _layer_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    """Constraints between keys of each layer."""
    heads, hidden = c.num_attention_heads, c.hidden_size
    yield "num_kv_heads", heads % c.num_kv_heads, f"it must divide num_attention_heads = {heads}"
    uneven: Any = hidden % heads and c.head_dim == hidden // heads
    yield "num_attention_heads", uneven, f"it must divide hidden_size = {hidden}, or head_dim must be set"
    key_only = c.attention_key_bias and not c.attention_qkv_bias
    yield "attention_key_bias", key_only, "it requires attention_qkv_bias true"
    uneven = c.norm_fn == "group" and (hidden % c.norm_num_groups or hidden == c.norm_num_groups)
    yield "norm_num_groups", uneven, f"it must divide hidden_size = {hidden} into groups of at least 2"
    not_post = c.norm_fn == "deep" and c.norm_pos != "post"
    yield "norm_pos", not_post, "norm_fn 'deep' requires 'post'"
    is_rope, turned = c.block_pos_enc_kind == "rope", int(c.head_dim * c.partial_rotary_factor)
    uneven = is_rope and (turned % 2 or not turned)
    yield "partial_rotary_factor", uneven, f"it must select an even number of units, and head_dim is {c.head_dim}"
    wrong = c.rope_interleaved and not is_rope and not c.layer_overrides
    yield "rope_interleaved", wrong, f"it requires block_pos_enc_kind 'rope', not {c.block_pos_enc_kind!r}"
    yield "num_global_tokens", c.num_global_tokens and not c.local_attention, "it requires local_attention true"
    is_flash = c.attention_backend == "flash"
    why = "attention_backend 'flash' does not support global tokens; 'sdpa' and 'eager' do"
    yield "num_global_tokens", is_flash and c.num_global_tokens, why
    if c.ngpt:
        yield from _ngpt_combinations(c)


def _ngpt_combinations(c: BertBlocksConfig) -> Iterator[Combination]:
    for key, (value, reason) in NGPT_VALUES.items():
        yield key, getattr(c, key) != value, f"ngpt requires {value!r}, because {reason}"
    heads = c.num_attention_heads
    why = f"ngpt requires {heads}, because queries and keys share their scale"
    yield "num_kv_heads", c.num_kv_heads != heads, why


def _check_combinations(config: BertBlocksConfig, combinations: Iterator[Combination]) -> None:
    for key, wrong, reason in combinations:
        if wrong:
            _reject(config, key, reason)


def check_labels(options: dict[str, Any]) -> None:
    """Check label keys that transformers defines but does not check."""
    count, names = options.get("num_labels"), options.get("id2label")
    if count is not None:
        check_type("num_labels", count, int)
        check_size("num_labels", count)
    if names is not None and (not isinstance(names, dict) or not names):
        raise ConfigError(f"id2label is {short_repr(names)}; it must map label numbers to names.")
    if count is not None and names is not None and len(names) != count:
        raise ConfigError(f"num_labels is {count}; id2label names {len(names)} labels; the two must agree.")
    dtype = options.get("dtype", options.get("torch_dtype"))
    if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ConfigError(f"dtype is {short_repr(dtype)}; it must be a torch dtype such as 'float32' or 'bfloat16'.")


def _reject(config: BertBlocksConfig, key: str, reason: str) -> typing.NoReturn:
    raise ConfigError(f"{key} is {short_repr(getattr(config, key))}; {reason}.")


def own_keys(config_class: type[BertBlocksConfig]) -> dict[str, Any]:
    """Return BertBlocks' own keys and their types, without those of transformers."""
    return {key: kind for key, kind in config_class.__annotations__.items() if key != "model_type"}


def fits(value: Any, kind: Any) -> bool:
    """True if a value has an annotated type; integers also pass as floats, booleans do not pass as integers."""
    candidates = [value, 0.0] if isinstance(value, int) and not isinstance(value, bool) else [value]
    for candidate in candidates:
        with contextlib.suppress(TypeError):
            type_validator("", candidate, kind)
            return True
    return False
