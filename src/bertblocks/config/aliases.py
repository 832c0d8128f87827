"""Other spellings of keys and values, and what is no key of BertBlocks but may stand on a config."""

from __future__ import annotations

from typing import Any

from bertblocks.config.validation import ConfigError

#: Other spellings of keys, read and never written.
KEY_ALIASES = {
    "norm_kind": "norm_pos",
    "norm_qk": "qk_norm",
    "emb_pos_enc_kind": "embd_pos_enc_kind",
    "num_blocks": "num_hidden_layers",
    "max_sequence_length": "max_position_embeddings",
    "actv_fn": "hidden_act",
    "attn_implementation": "attention_backend",
}
#: Other spellings of values, likewise.
VALUE_ALIASES = {
    "norm_pos": {"both": "pre_and_post"},
    "norm_fn": {"dynamictanh": "dynamic_tanh"},
    "attention_backend": {"flash_attention_2": "flash"},
}
#: transformers' names of the kinds of layers, and back.
LAYER_TYPE_ALIASES = {"full_attention": "global", "sliding_attention": "local"}
LAYER_TYPE_NAMES = {kind: name for name, kind in LAYER_TYPE_ALIASES.items()}

#: What transformers, its Trainer and its friends keep on any config, beside the keys below.
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


#: What `from_pretrained` takes beside keys.
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
    """Aliases of keys and values replaced; a key may be given once."""
    canonical: dict[str, Any] = {}
    for key, value in options.items():
        name = KEY_ALIASES.get(key, key)
        if name in canonical or (name != key and name in options):
            raise ConfigError(f"{key!r} is another name of {name!r}, and both are given; keep {name!r}.")
        canonical[name] = canonical_value(name, value)
    return canonical


def canonical_value(key: str, value: Any) -> Any:
    return VALUE_ALIASES.get(key, {}).get(value, value) if isinstance(value, str) else value
