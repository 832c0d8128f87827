"""Aliases of keys and values, and the keys of transformers and its tools that a config also accepts."""

from __future__ import annotations

from typing import Any

from bertblocks.config.validation import ConfigError

#: Aliases of keys, accepted on input and never written.
KEY_ALIASES = {
    "norm_kind": "norm_pos",
    "norm_qk": "qk_norm",
    "emb_pos_enc_kind": "embd_pos_enc_kind",
    "num_blocks": "num_hidden_layers",
    "max_sequence_length": "max_position_embeddings",
    "actv_fn": "hidden_act",
    "attn_implementation": "attention_backend",
}
#: Aliases of values, likewise.
VALUE_ALIASES = {
    "norm_pos": {"both": "pre_and_post"},
    "norm_fn": {"dynamictanh": "dynamic_tanh"},
    "attention_backend": {"flash_attention_2": "flash"},
}
#: transformers' names for layer types, and the reverse.
LAYER_TYPE_ALIASES = {"full_attention": "global", "sliding_attention": "local"}
LAYER_TYPE_NAMES = {kind: name for name, kind in LAYER_TYPE_ALIASES.items()}

#: Keys that transformers, its Trainer and other tools set on any config.
HOUSEKEEPING = {
    "auto_map",
    "custom_pipelines",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "task_specific_params",
    "torch_dtype",
    "transformers_version",
    "transformers_weights",
    "use_cache",
    "experts_implementation",
}

#: Options of `from_pretrained` that are not config keys.
LOADING_OPTIONS = {
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "return_unused_kwargs",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
}


def canonical(options: dict[str, Any]) -> dict[str, Any]:
    """Replace aliases of keys and values; each key may be given only once."""
    replaced: dict[str, Any] = {}
    for key, value in options.items():
        name = KEY_ALIASES.get(key, key)
        if name in replaced or (name != key and name in options):
            raise ConfigError(f"{key!r} is an alias of {name!r}, and both are given; keep {name!r}.")
        replaced[name] = canonical_value(name, value)
    return replaced


def canonical_value(key: str, value: Any) -> Any:
    return VALUE_ALIASES.get(key, {}).get(value, value) if isinstance(value, str) else value
