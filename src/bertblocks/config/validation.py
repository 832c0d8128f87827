"""Validation of configs: types, ranges, choices, and combinations of keys."""

from __future__ import annotations

import contextlib
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.dataclasses import type_validator

from bertblocks.config.blocks import SLOTS, block_keys, chosen_blocks, why_unused, write_name
from bertblocks.core.keys import Key, Problem, keys_of
from bertblocks.core.messages import InputError, short_repr
from bertblocks.core.registry import nearest
from bertblocks.nn.activation import activation_names
from bertblocks.nn.backends import BACKENDS
from bertblocks.nn.block import NORM_POSITIONS
from bertblocks.nn.initialization import INITIALIZATIONS

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

CHOICES: dict[str, typing.Callable[[], list[str]]] = {
    **{slot: registry.choices for slot, registry in SLOTS.items() if list(registry) != [True]},
    "norm_pos": lambda: list(NORM_POSITIONS),
    "attention_norm_pos": lambda: list(NORM_POSITIONS),
    "mlp_norm_pos": lambda: list(NORM_POSITIONS),
    "hidden_act": activation_names,
    "mlm_head_act": activation_names,
    "input_conv_act": activation_names,
    "classifier_head_act": activation_names,
    "attention_backend": lambda: ["auto", *BACKENDS.names()],
    "kernel_backend": lambda: ["auto", "liger", "torch"],
    "quantization": lambda: ["int8"],
    "init_kind": INITIALIZATIONS.names,
    "classifier_pooling": lambda: ["cls", "last", "mean", "max"],
    "classifier_head": lambda: ["pooler", "dense", "none"],
    "problem_type": lambda: ["regression", "single_label_classification", "multi_label_classification"],
}

#: The smallest and the largest value of every size; None where another check sets the lower limit. The upper limits are
#: far beyond any model: they keep a typo or a hostile file from exhausting the memory.
SIZES: dict[str, tuple[int | None, int]] = {
    "vocab_size": (1, 2**24),
    "hidden_size": (1, 2**20),
    "embedding_size": (1, 2**20),
    "output_embedding_size": (1, 2**20),
    "num_hidden_layers": (1, 1_000),
    "num_hidden_groups": (1, 1_000),
    "num_attention_heads": (1, 10_000),
    "num_kv_heads": (1, 10_000),
    "head_dim": (1, 2**20),
    "intermediate_size": (1, 2**22),
    "max_position_embeddings": (1, 2**24),
    "type_vocab_size": (0, 2**20),
    "task_type_vocab_size": (0, 2**20),
    "num_global_tokens": (0, 2**24),
    "local_attention_window_size": (None, 2**24),
    "input_conv_size": (0, 2**12),
    "input_conv_groups": (1, 2**20),
    "mlm_head_size": (None, 2**20),
    "num_labels": (1, 1_000_000),
}

#: The most values or characters in the value of one key.
MAX_VOLUME = 2**24

#: Keys that `layer_overrides` can set for one layer; blocks declare theirs.
LAYER_KEYS = {
    "norm_fn",
    "norm_pos",
    "attention_norm_pos",
    "mlp_norm_pos",
    "norm_eps",
    "norm_bias",
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
    "residual_scale",
    "residual_fn",
    "attention_scale",
    "attention_fn",
    "attention_sinks",
    "attention_gate",
    "span_convolution",
    "input_mixing",
    "value_embedding",
    "attention_qkv_bias",
    "attention_key_bias",
    "attention_out_bias",
    "block_pos_enc_kind",
    "causal",
    "local_attention_window_size",
    "num_global_tokens",
    "attention_dropout",
    "attention_output_dropout",
    "mlp_dropout",
    "mlp_output_dropout",
}

#: Keys whose value is greater than 0.
POSITIVE_KEYS = (
    "norm_eps",
    "initializer_range",
    "embedding_initializer_range",
    "initializer_cutoff_factor",
    "embedding_scale",
    "residual_scale",
    "attention_scale",
)

#: Keys that only affect local layers.
LOCAL_LAYER_KEYS = {"local_attention_window_size", "num_global_tokens"}


class ConfigError(InputError):
    """An invalid config. The message names the key, its value, and what would work."""


def check_config(config: BertBlocksConfig) -> None:
    """Raise `ConfigError` for types, values and combinations that do not describe an encoder."""
    check_types(config)
    _check_values(config)
    _check_layer_keys(config)
    _check_combinations(config, _model_combinations(config))
    layers = [config.for_layer(index) for index in config.layer_overrides or {}]
    for block in dict.fromkeys(block for layer in (config, *layers) for _, block in chosen_blocks(layer)):
        _check_combinations(config, getattr(block, "check_model", lambda _: ())(config))
    for layer in layers:
        check_types(layer)
        _check_values(layer)
        _check_combinations(layer, _layer_combinations(layer))
    if len(layers) < config.num_hidden_layers:
        _check_combinations(config, _layer_combinations(config))


def check_declarations(config_class: type[BertBlocksConfig]) -> None:
    """Raise an error if a block declares a key of every config, or differs from another block about a shared key."""
    general = own_keys(config_class)
    seen: dict[str, tuple[str, Key]] = {}
    for slot, registry in SLOTS.items():
        for block in registry:
            title = f"{slot} {write_name(block)}"
            for name, key in keys_of(registry[block]).items():
                first, declared = seen.setdefault(name, (title, key))
                why = "every config has" if name in general else f"{first} declares differently"
                if name in general or key != declared:
                    raise ConfigError(f"{title} declares the key {name!r}, which {why}.")


def check_types(config: BertBlocksConfig, implied: bool = True) -> None:
    """Check that every value has its key's type; before implied keys are filled in (`implied=False`), None passes."""
    for key, kind in (config.key_types() if implied else own_keys(type(config))).items():
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


def check_choices(values: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Check that each of `keys` that has a value in `values` names something that exists."""
    for key in keys:
        value, choices = values.get(key), CHOICES[key]() if key in CHOICES else None
        if value is not None and choices is not None and value not in choices:
            reject(key, value, f"it must be one of {', '.join(choices)}{nearest(value, choices)}")


def _check_values(config: BertBlocksConfig) -> None:
    check_choices(vars(config), CHOICES)
    check_sizes(config)
    for key in POSITIVE_KEYS:
        if not 0 < getattr(config, key) < math.inf:
            reject_key(config, key, "it must be greater than 0")
    if not 0 < config.diffusion_min_time <= 1:
        reject_key(config, "diffusion_min_time", "it must be greater than 0 and at most 1")
    for key in own_keys(type(config)):
        value = getattr(config, key)
        if key.endswith("dropout") and not isinstance(value, bool) and not 0 <= value < 1:
            reject_key(config, key, "it must be at least 0 and less than 1")
        if key in ("pad_token_id", "mask_token_id") and value is not None and not 0 <= value < config.vocab_size:
            reject_key(config, key, f"it must lie within the vocabulary of {config.vocab_size}, or be null")
    for key, only in (("is_encoder_decoder", False), ("chunk_size_feed_forward", 0)):
        if getattr(config, key) != only:
            reject_key(config, key, f"it must be {only!r}: transformers defines this key, but it has no meaning here")
    chosen = config.block_keys()
    for key, declared in block_keys().items():
        if key in vars(config) and key not in chosen:
            reject_key(config, key, why_unused(key, vars(config)))
        if key in chosen and (problem := declared.problem(getattr(config, key))) is not None:
            reject_key(config, key, problem)


def _check_layer_keys(config: BertBlocksConfig) -> None:
    if len(config.layer_types) != config.num_hidden_layers:
        count = f"num_hidden_layers = {config.num_hidden_layers} layers, not {len(config.layer_types)}"
        reject_key(config, "layer_types", f"it must list {count}")
    if wrong := [kind for kind in config.layer_types if kind not in ("global", "local")]:
        reject_key(config, "layer_types", f"every entry must be 'global' or 'local', not {short_repr(wrong[0])}")
    last = config.num_hidden_layers - 1
    declared = block_keys()
    known = {*LAYER_KEYS, *(name for name, key in declared.items() if key.per_layer)}
    for index, overrides in (config.layer_overrides or {}).items():
        if not 0 <= index <= last:
            reject_key(config, "layer_overrides", f"it names layer {short_repr(index)}; layers are 0 to {last}")
        if unknown := [key for key in overrides if key not in known]:
            why = f"which cannot be set per layer{nearest(unknown[0], known)}"
            reject_key(config, "layer_overrides", f"layer {index} sets {short_repr(unknown[0])}, {why}")
        kind, layer = config.layer_types[index], config.for_layer(index)
        used = {name for _, block in chosen_blocks(layer) for name in keys_of(block)}
        for key in overrides:
            if key in declared and key not in used:
                why = why_unused(key, vars(layer))
                reject_key(config, "layer_overrides", f"layer {index} sets {short_repr(key)}; {why}")
            only = "local" if key in LOCAL_LAYER_KEYS else declared[key].layer_type if key in declared else None
            if only not in (None, kind):
                reject_key(config, "layer_overrides", f"layer {index} is {kind}, where {key!r} has no effect")


def _model_combinations(c: BertBlocksConfig) -> Iterator[Problem]:
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
    first = c.for_layer(0).attention_norm_pos
    no_norm = not c.first_attention_norm and first not in ("pre", "pre_and_post", "sandwich")
    yield (
        "first_attention_norm",
        no_norm,
        f"false requires a norm before attention, but attention_norm_pos is {first!r}",
    )
    layers = [c.for_layer(index) for index in range(c.num_hidden_layers)] if c.norm_scaling else []
    before = any(NORM_POSITIONS[pos][0] for x in layers for pos in (x.attention_norm_pos, x.mlp_norm_pos))
    why = f"it requires a norm before a sublayer, but norm_pos is {c.norm_pos!r}; use 'pre' or 'sandwich'"
    yield "norm_scaling", c.norm_scaling and not before, why
    is_shared = c.norm_scaling and c.num_hidden_groups < c.num_hidden_layers
    yield "norm_scaling", is_shared, "it requires layers that do not share their weights, because it depends on depth"
    yield "token_dropout", c.token_dropout and c.mask_token_id is None, "it requires mask_token_id"
    reads_first = c.classifier_head == "pooler" and c.classifier_pooling != "cls"
    yield "classifier_pooling", reads_first, "classifier_head 'pooler' reads the first token; use 'dense' or 'none'"
    no_head = c.classifier_head_on_tokens and c.classifier_head != "dense"
    yield "classifier_head_on_tokens", no_head, f"it requires classifier_head 'dense', not {c.classifier_head!r}"
    no_head = c.classifier_head_before_pooling and c.classifier_head != "dense"
    yield "classifier_head_before_pooling", no_head, f"it requires classifier_head 'dense', not {c.classifier_head!r}"
    no_width = c.mlm_head_size is not None and (c.mlm_head_size < 1 or not c.mlm_head_dense)
    yield "mlm_head_size", no_width, "it must be at least 1 and requires mlm_head_dense true"
    yield "mlm_head_glu", c.mlm_head_glu and not c.mlm_head_dense, "it requires mlm_head_dense true"
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


def _embedding_combinations(c: BertBlocksConfig) -> Iterator[Problem]:
    """Constraints on embeddings that are not as wide as the layers."""
    size, differs = c.embedding_size, c.embedding_size != c.hidden_size
    sizes = f"embedding_size = {size} differs from hidden_size = {c.hidden_size}"
    yield "embedding_projection", differs and not c.embedding_projection, f"it must be true because {sizes}"
    after = c.embedding_norm_after_projection and not (c.embedding_projection and c.embedding_norm)
    why = "it requires embedding_norm and embedding_projection true"
    yield "embedding_norm_after_projection", after, why
    no_projection = not c.embedding_projection_bias and not c.embedding_projection
    yield "embedding_projection_bias", no_projection, "false requires embedding_projection true"
    width = c.decoder_size
    if width != size:
        sizes = f"output_embedding_size = {width} differs from hidden_size = {c.hidden_size}"
    differs = width != c.hidden_size
    yield "mlm_head_dense", differs and not c.mlm_head_dense, f"it must be true because {sizes}"
    unequal = f"false, because output_embedding_size = {width} differs from embedding_size = {size}"
    yield "tie_word_embeddings", c.tie_word_embeddings and width != size, f"it must be {unequal}"
    useless = not c.final_norm and c.final_norm_bias is not None
    yield "final_norm_bias", useless, "it requires final_norm true"


def _sharing_combinations(c: BertBlocksConfig) -> Iterator[Problem]:
    """Constraints on layers that share their weights."""
    key, layers = "num_hidden_groups", c.num_hidden_layers
    yield key, c.num_hidden_groups > layers, f"it must be at most num_hidden_layers = {layers}"
    groups = [c.layer_group(layer) for layer in range(layers)]
    unused = sorted(set(groups)) != list(range(c.num_hidden_groups))
    why = f"layer_sharing {c.layer_sharing!r} must use every set of weights, but uses {short_repr(groups)}"
    yield key, unused, why
    no_norm = not c.first_attention_norm and groups.count(groups[0]) > 1
    yield "first_attention_norm", no_norm, "false requires a first layer that does not share its weights"
    overrides = c.layer_overrides or {}
    for following, group in enumerate(groups):
        layer = groups.index(group)
        why = f"num_hidden_groups = {c.num_hidden_groups} makes layers {layer} and {following} share their weights"
        differ = c.layer_types[layer] != c.layer_types[following]
        yield "layer_types", differ, f"{why}, so they must have the same type"
        differ = overrides.get(layer, {}) != overrides.get(following, {})
        yield "layer_overrides", differ, f"{why}, so they must have the same overrides"


def _layer_combinations(c: BertBlocksConfig) -> Iterator[Problem]:
    """Constraints between keys of each layer."""
    heads, hidden = c.num_attention_heads, c.hidden_size
    yield "num_kv_heads", heads % c.num_kv_heads, f"it must divide num_attention_heads = {heads}"
    shares = heads * (2 if c.span_convolution else 1)
    uneven: Any = hidden % shares and c.head_dim == hidden // shares
    twice = ", twice with span_convolution" if c.span_convolution else ""
    yield "num_attention_heads", uneven, f"it must divide hidden_size = {hidden}{twice}, or head_dim must be set"
    apart = c.parallel_block and c.mlp_norm_pos != c.attention_norm_pos
    why = f"it must be attention_norm_pos = {c.attention_norm_pos!r} in a parallel block, which has one norm for both"
    yield "mlp_norm_pos", apart, why
    key_only = c.attention_key_bias and not c.attention_qkv_bias
    yield "attention_key_bias", key_only, "it requires attention_qkv_bias true"
    yield "num_global_tokens", c.num_global_tokens and not c.local_attention, "it requires local_attention true"
    yield (
        "num_global_tokens",
        c.num_global_tokens and c.causal,
        "it must be 0 with causal, which hides later tokens",
    )
    for slot, block in chosen_blocks(c):
        for key, (value, reason) in getattr(block, "requires", {}).items():
            yield key, getattr(c, key) != value, f"{write_choice(c, slot)} requires {value!r}, because {reason}"
        yield from getattr(block, "check", lambda _: ())(c)


def write_choice(config: BertBlocksConfig, slot: str) -> str:
    """Name a chosen block: "norm_fn 'deep'", or only the key if it is true or false."""
    name = getattr(config, slot)
    return slot if name is True else f"{slot} {write_name(name)}"


def _check_combinations(config: BertBlocksConfig, combinations: Iterable[Problem]) -> None:
    for key, wrong, reason in combinations:
        if wrong:
            reject_key(config, key, reason)


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
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not isinstance(found, torch.dtype):
        raise ConfigError(f"dtype is {short_repr(dtype)}; it must be a torch dtype such as 'float32' or 'bfloat16'.")


def reject_key(config: BertBlocksConfig, key: str, reason: str) -> typing.NoReturn:
    reject(key, getattr(config, key), reason)


def reject(key: str, value: Any, reason: str) -> typing.NoReturn:
    raise ConfigError(f"{key} is {short_repr(value)}; {reason}.")


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
