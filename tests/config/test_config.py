"""The config: defaults, implied keys, errors, and saving."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig

from bertblocks import (
    AttentionBackend,
    BertBlocksConfig,
    BertBlocksForMaskedLM,
    BertBlocksModel,
    ConfigError,
    preset_names,
    register_activation,
    register_backend,
    register_mlp,
    register_norm,
    register_position,
)
from bertblocks.nn.activation import ACTIVATIONS
from bertblocks.nn.backends import BACKENDS
from bertblocks.nn.mlp import GLU, MLP, MLPS
from bertblocks.nn.norm import NORMS, LayerNorm, RMSNorm
from bertblocks.nn.position import BLOCK_POSITIONS, EMBEDDING_POSITIONS, BlockPosition, EmbeddingPosition
from tests.helpers import tiny_config

KEYS = set(BertBlocksConfig.__annotations__) - {"model_type"}

#: The names that the project's documents use for its keys.
CANONICAL_KEYS = {
    "norm_pos", "norm_fn", "mlp_type", "hidden_act", "attention_backend", "num_attention_heads", "num_kv_heads",
    "qk_norm", "local_attention", "local_attention_window_size", "embd_pos_enc_kind", "block_pos_enc_kind",
    "hidden_size", "num_hidden_layers", "intermediate_size", "max_position_embeddings", "vocab_size",
    "type_vocab_size", "kernel_backend", "ngpt",
}  # fmt: skip


# ---------------------------------------------------------------------- defaults and implied keys


def test_the_default_is_bert_base() -> None:
    """The values of `bert-base-uncased`."""
    config = BertBlocksConfig()
    expected = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "hidden_act": "gelu",
        "mlp_type": "mlp",
        "norm_fn": "layer",
        "norm_pos": "post",
        "norm_eps": 1e-12,
        "norm_bias": True,
        "embedding_norm": True,
        "final_norm": False,
        "embd_pos_enc_kind": "learned",
        "block_pos_enc_kind": "none",
        "position_offset": 0,
        "attention_qkv_bias": True,
        "attention_out_bias": True,
        "mlp_in_bias": True,
        "mlp_out_bias": True,
        "qk_norm": False,
        "local_attention": False,
        "embedding_dropout": 0.1,
        "attention_dropout": 0.1,
        "attention_output_dropout": 0.1,
        "mlp_dropout": 0.0,
        "mlp_output_dropout": 0.1,
        "initializer_range": 0.02,
        "pooler": True,
        "tie_word_embeddings": True,
        "decoder_bias": True,
        "ngpt": False,
    }
    assert {key: getattr(config, key) for key in expected} == expected
    assert config.model_type == "bertblocks"


def test_documented_names_are_config_keys() -> None:
    assert CANONICAL_KEYS <= KEYS


ROPE = {"block_pos_enc_kind": "rope"}


@pytest.mark.parametrize(
    ("options", "implied"),
    [
        ({}, {"norm_pos": "post", "mlp_type": "mlp", "hidden_act": "gelu", "init_kind": "trunc_normal"}),
        ({}, {"num_kv_heads": 12, "head_dim": 64, "layer_types": ["global"] * 12, "mlm_head_act": "gelu"}),
        ({"norm_pos": "pre"}, {"final_norm": True}),
        ({"norm_pos": "sandwich"}, {"final_norm": True}),
        ({"norm_pos": "post"}, {"final_norm": False}),
        ({"norm_pos": "pre_and_post"}, {"final_norm": False}),
        ({"norm_pos": "none"}, {"final_norm": False}),
        ({"norm_pos": "pre", "final_norm": False}, {"final_norm": False}),
        ({"norm_pos": "post", "final_norm": True}, {"final_norm": True}),
        ({"num_attention_heads": 6}, {"num_kv_heads": 6, "head_dim": 128}),
        ({"num_attention_heads": 6, "num_kv_heads": 2}, {"num_kv_heads": 2, "head_dim": 128}),
        ({"num_attention_heads": 5, "head_dim": 32}, {"num_kv_heads": 5, "head_dim": 32}),
        ({"hidden_act": "silu"}, {"mlm_head_act": "silu"}),
        ({**ROPE, "rope_theta": 500.0}, {"local_rope_theta": 500.0}),
        ({**ROPE, "rope_theta": 500.0, "local_rope_theta": 7.0}, {"local_rope_theta": 7.0}),
        ({"local_attention": True, "num_hidden_layers": 3}, {"layer_types": ["local"] * 3}),
        (
            {"local_attention": True, "global_attention_every_n_layers": 3, "num_hidden_layers": 7},
            {"layer_types": ["global", "local", "local", "global", "local", "local", "global"]},
        ),
        (
            {"local_attention": True, "global_attention_every_n_layers": 1, "num_hidden_layers": 2},
            {"layer_types": ["global", "global"]},
        ),
        (
            {"ngpt": True},
            {
                "norm_pos": "none",
                "mlp_type": "glu",
                "hidden_act": "silu",
                "embedding_norm": False,
                "final_norm": False,
                "init_kind": "ngpt",
                "tie_word_embeddings": False,
                "ngpt_renormalize": True,
                "ngpt_logit_scale": False,
            },
        ),
    ],
    ids=str,
)
def test_implied_keys_follow_from_other_keys(options: Any, implied: Any) -> None:
    config = BertBlocksConfig(**options)
    assert {key: getattr(config, key) for key in implied} == implied


def test_every_implied_key_gets_a_value() -> None:
    """Every key whose type excludes None has a value in a built config."""
    optional = {"pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "mask_token_id"}
    optional |= {"rope_scaling", "local_rope_scaling", "global_attention_every_n_layers", "layer_overrides", "family"}
    optional |= {
        "mlm_head_size",
        "quantization",
        "disentangled_num_buckets",
        "output_embedding_size",
        "final_norm_bias",
    }
    for config in (BertBlocksConfig(), BertBlocksConfig(ngpt=True)):
        assert {key for key in KEYS if getattr(config, key) is None} <= optional


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("hidden_sise", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("norm_func", "norm_fn"),
        ("norm_position", "norm_pos"),
        ("atention_backend", "attention_backend"),
    ],
)
def test_an_unknown_key_raises_and_suggests_the_nearest(key: Any, meant: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        BertBlocksConfig(**{key: 17})
    assert repr(key) in str(raised.value)
    assert "17" in str(raised.value)
    assert repr(meant) in str(raised.value)


def test_an_unknown_key_unlike_any_other_raises_without_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="'zzz'") as raised:
        BertBlocksConfig(zzz=1)
    assert "did you mean" not in str(raised.value)


def test_a_config_of_another_model_type_raises() -> None:
    with pytest.raises(ConfigError, match=r"model_type is 'bert'.*'bertblocks'.*from_huggingface"):
        BertBlocksConfig(model_type="bert")


def assert_raises(options: dict, key: str, *works: str) -> None:
    """The message names the key, its value and what would work."""
    with pytest.raises(ConfigError) as raised:
        BertBlocksConfig(**options)
    message = str(raised.value)
    named = f"{key} is {options[key]!r}" if key in options else key
    for part in (named, *works):
        assert part in message, f"{part!r} is not in {message!r}"


#: The blocks that keys in these tests belong to.
CHOOSES = {
    "norm_num_groups": {"norm_fn": "group"},
    **dict.fromkeys(("rope_theta", "local_rope_theta", "partial_rotary_factor", "rope_scaling"), ROPE),
}


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("hidden_size", "768", "int"),
        ("hidden_size", 768.0, "int"),
        ("num_hidden_layers", True, "int"),
        ("num_attention_heads", "12", "int"),
        ("num_kv_heads", 4.0, "int"),
        ("head_dim", "64", "int"),
        ("pad_token_id", "0", "int"),
        ("norm_eps", "1e-6", "float"),  # as YAML 1.1 reads 1e-6
        ("norm_eps", True, "float"),
        ("attention_dropout", None, "float"),
        ("norm_bias", 1, "bool"),
        ("pooler", "yes", "bool"),
        ("norm_fn", 3, "str"),
        ("hidden_act", ["gelu"], "str"),
        ("layer_types", "global", "list[str]"),
        ("layer_types", [1] * 12, "list[str]"),
        ("layer_types", [["global"]] * 12, "list[str]"),
        ("rope_scaling", "yarn", "dict[str"),
        ("layer_overrides", [{}], "dict[int"),
        ("layer_overrides", {"first": {}}, "dict[int"),
        ("layer_overrides", {1: "silu"}, "dict[int"),
        ("global_attention_every_n_layers", 2.5, "int"),
        ("global_attention_every_n_layers", "3", "int"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_raises(key: Any, value: Any, kind: Any) -> None:
    assert_raises({**CHOOSES.get(key, {}), key: value}, key, kind)


def test_a_wrong_type_in_a_key_that_implies_others_raises() -> None:
    assert_raises(
        {"local_attention": True, "global_attention_every_n_layers": "3"}, "global_attention_every_n_layers", "int"
    )


@pytest.mark.parametrize(
    ("key", "value", "works"),
    [
        ("norm_fn", "layr", ["layer", "rms", "group", "deep", "dynamic_tanh", "did you mean 'layer'"]),
        ("norm_pos", "prenorm", ["pre", "post", "pre_and_post", "sandwich", "none"]),
        ("mlp_type", "gluu", ["mlp", "glu", "did you mean 'glu'"]),
        ("hidden_act", "gelo", ["gelu", "silu", "relu", "did you mean 'gelu'"]),
        ("mlm_head_act", "sillu", ["did you mean 'silu'"]),
        ("classifier_head_act", "tan", ["did you mean 'tanh'"]),
        ("embd_pos_enc_kind", "sinusoid", ["learned", "none", "did you mean 'sinusoidal'"]),
        ("embd_pos_enc_kind", "rope", ["learned", "sinusoidal", "none"]),
        ("block_pos_enc_kind", "rotary", ["rope", "alibi", "none"]),
        ("attention_backend", "flas", ["auto", "sdpa", "eager", "did you mean 'flash'"]),
        ("kernel_backend", "triton", ["auto", "liger", "torch"]),
        ("init_kind", "megatrn", ["trunc_normal", "did you mean 'megatron'"]),
        ("classifier_pooling", "avg", ["cls", "last", "mean", "max"]),
        ("classifier_head", "linear", ["pooler", "dense", "none"]),
        ("problem_type", "classification", ["regression", "single_label_classification"]),
    ],
)
def test_an_unknown_choice_raises_and_lists_the_choices(key: Any, value: Any, works: Any) -> None:
    assert_raises({key: value}, key, *works)


SIZES = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_kv_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "norm_num_groups", "embedding_size", "num_hidden_groups",
]  # fmt: skip
COUNTS = ["type_vocab_size", "position_offset", "num_global_tokens"]
POSITIVE = ["norm_eps", "rope_theta", "local_rope_theta", "initializer_range", "initializer_cutoff_factor"]
POSITIVE += ["attention_scale", "embedding_scale", "residual_scale"]
DROPOUTS = [
    "embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_dropout", "mlp_output_dropout",
    "classifier_dropout", "classifier_head_dropout", "token_classifier_dropout", "qa_dropout",
]  # fmt: skip
SHARES = ["partial_rotary_factor", "diffusion_min_time"]
TOKENS = ["pad_token_id", "mask_token_id"]  # the two that models use
NAN = float("nan")


@pytest.mark.parametrize(
    ("key", "value", "works"),
    [
        *((key, value, "at least 1") for key in SIZES for value in (0, -1)),
        *((key, -1, "must not be negative") for key in COUNTS),
        *((key, value, "greater than 0") for key in POSITIVE for value in (0.0, -1.0, NAN)),
        *((key, value, "at least 0 and less than 1") for key in DROPOUTS for value in (-0.1, 1.0, NAN)),
        *((key, value, "greater than 0 and at most 1") for key in SHARES for value in (0.0, 1.5, NAN)),
        *((key, value, "vocabulary of 30522") for key in TOKENS for value in (-1, 30522)),
    ],
)
def test_a_number_out_of_range_raises(key: Any, value: Any, works: Any) -> None:
    assert_raises({**CHOOSES.get(key, {}), key: value}, key, works)


@pytest.mark.parametrize(
    ("options", "key", "works"),
    [
        # ---- sizes that do not divide
        ({"num_kv_heads": 5}, "num_kv_heads", ["divide num_attention_heads = 12"]),
        ({"num_attention_heads": 10}, "num_attention_heads", ["divide hidden_size = 768", "head_dim"]),
        ({"norm_fn": "group", "norm_num_groups": 7}, "norm_num_groups", ["divide hidden_size = 768"]),
        # ---- norms
        ({"norm_fn": "deep", "norm_pos": "pre"}, "norm_pos", ["'deep'", "'post'"]),
        ({"first_attention_norm": False}, "first_attention_norm", ["norm before attention", "'post'"]),
        ({"first_attention_norm": False, "norm_pos": "none"}, "first_attention_norm", ["'none'"]),
        # ---- positions
        (
            {"block_pos_enc_kind": "rope", "num_attention_heads": 256},
            "partial_rotary_factor",
            ["even number", "head_dim is 3"],
        ),
        (
            {"block_pos_enc_kind": "rope", "partial_rotary_factor": 0.33},
            "partial_rotary_factor",
            ["even number", "head_dim is 64"],
        ),
        (
            {"block_pos_enc_kind": "rope", "partial_rotary_factor": 0.01},  # of 64 units, none
            "partial_rotary_factor",
            ["head_dim is 64"],
        ),
        (
            {"position_offset": 2, "embd_pos_enc_kind": "sinusoidal"},
            "position_offset",
            ["embd_pos_enc_kind 'learned'", "'sinusoidal'"],
        ),
        ({"position_offset": 512}, "position_offset", ["less than max_position_embeddings = 512"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling", ["'rope'", "'none'"]),
        (
            {"block_pos_enc_kind": "alibi", "local_rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "local_rope_scaling",
            ["'rope'", "'alibi'"],
        ),
        (
            {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "yarm", "factor": 2.0}},
            "rope_scaling",
            ["linear", "dynamic", "llama3", "did you mean 'yarn'"],
        ),
        ({"block_pos_enc_kind": "rope", "rope_scaling": {"factor": 2.0}}, "rope_scaling", ["rope_type", "yarn"]),
        ({"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "yarn"}}, "rope_scaling", ["factor"]),
        (
            {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "yarn", "factor": "four"}},
            "rope_scaling",
            ["factor"],
        ),
        (
            {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "betafast": 1}},
            "rope_scaling",
            ["did you mean 'beta_fast'"],
        ),
        (
            {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "rope_scaling",
            ["low_freq_factor"],
        ),
        (
            {"block_pos_enc_kind": "rope", "rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_scaling",
            ["long_factor"],
        ),
        # ---- layers
        (
            {"layer_types": ["global"] * 3},
            "layer_types",
            ["num_hidden_layers = 12", "not 3"],
        ),
        (
            {"layer_types": ["global", "windowed"], "num_hidden_layers": 2},
            "layer_types",
            ["'global' or 'local'", "'windowed'"],
        ),
        ({"layer_types": ["global", "local"], "num_hidden_layers": 2}, "local_attention", ["False", "must be true"]),
        (
            {"local_attention": True, "global_attention_every_n_layers": 0},
            "global_attention_every_n_layers",
            ["at least 1", "null"],
        ),
        ({"global_attention_every_n_layers": 2}, "global_attention_every_n_layers", ["local_attention true"]),
        (
            {"local_attention": True, "local_attention_window_size": 0},
            "local_attention_window_size",
            ["at least 1"],
        ),
        ({"num_global_tokens": 1}, "num_global_tokens", ["local_attention true"]),
        ({"layer_overrides": {12: {"qk_norm": True}}}, "layer_overrides", ["layer 12", "0 to 11"]),
        ({"layer_overrides": {-1: {"qk_norm": True}}}, "layer_overrides", ["layer -1", "0 to 11"]),
        ({"layer_overrides": {1: {"vocab_size": 9}}}, "layer_overrides", ["layer 1", "'vocab_size'"]),
        ({"layer_overrides": {1: {"hidden_size": 9}}}, "layer_overrides", ["layer 1", "'hidden_size'"]),
        ({"layer_overrides": {1: {"hiden_act": "silu"}}}, "layer_overrides", ["did you mean 'hidden_act'"]),
        ({"layer_overrides": {1: {"hidden_act": "sillu"}}}, "hidden_act", ["'sillu'", "did you mean 'silu'"]),
        ({"layer_overrides": {1: {"intermediate_size": "9"}}}, "intermediate_size", ["'9'", "int"]),
        ({"layer_overrides": {1: {"num_kv_heads": 5}}}, "num_kv_heads", ["5", "num_attention_heads = 12"]),
        ({"layer_overrides": {1: {"norm_fn": "deep", "norm_pos": "pre"}}}, "norm_pos", ["'pre'", "'post'"]),
        # ---- narrow embeddings and shared layers
        (
            {"embedding_size": 128, "embedding_projection": False},
            "embedding_projection",
            ["must be true", "embedding_size = 128", "hidden_size = 768"],
        ),
        ({"embedding_size": 128, "mlm_head_dense": False}, "mlm_head_dense", ["must be true", "embedding_size = 128"]),
        (
            {"output_embedding_size": 128},
            "tie_word_embeddings",
            ["must be false", "output_embedding_size = 128", "embedding_size = 768"],
        ),
        (
            {"output_embedding_size": 128, "tie_word_embeddings": False, "mlm_head_dense": False},
            "mlm_head_dense",
            ["must be true", "output_embedding_size = 128"],
        ),
        ({"final_norm_bias": False}, "final_norm_bias", ["requires final_norm true"]),
        ({"qk_norm_across_heads": True}, "qk_norm_across_heads", ["belongs to qk_norm true"]),
        ({"qk_norm": True, "qk_norm_fn": "group"}, "qk_norm_fn", ["'group'", "rms, layer"]),
        ({"embedding_size": 40, "norm_fn": "group"}, "norm_num_groups", ["divide embedding_size = 40"]),
        ({"num_hidden_groups": 13}, "num_hidden_groups", ["at most num_hidden_layers = 12"]),
        (
            {"num_hidden_groups": 6, "norm_pos": "pre", "first_attention_norm": False},
            "first_attention_norm",
            ["does not share its weights"],
        ),
        (
            {"num_hidden_groups": 6, "local_attention": True, "global_attention_every_n_layers": 3},
            "layer_types",
            ["layers 0 and 1 share their weights", "the same type"],
        ),
        (
            {"num_hidden_groups": 6, "layer_overrides": {3: {"hidden_act": "silu"}}},
            "layer_overrides",
            ["layers 2 and 3 share their weights", "same overrides"],
        ),
        # ---- heads
        ({"classifier_pooling": "mean"}, "classifier_pooling", ["'pooler'", "'dense' or 'none'"]),
        ({"classifier_head_on_tokens": True}, "classifier_head_on_tokens", ["'dense'", "'pooler'"]),
        ({"qa_head": "question_awar"}, "qa_head", ["did you mean 'question_aware'"]),
        ({"question_token_id": 3}, "question_token_id", ["belongs to qa_head 'question_aware'"]),
        (
            {"qa_head": "question_aware", "question_token_id": 99_999},
            "question_token_id",
            ["within the vocabulary of 30522"],
        ),
        # ---- nGPT
        ({"ngpt_logit_scale": True}, "ngpt_logit_scale", ["ngpt true"]),
        ({"ngpt": True, "norm_pos": "pre"}, "norm_pos", ["ngpt requires 'none'"]),
        ({"ngpt": True, "final_norm": True}, "final_norm", ["ngpt requires False"]),
        ({"ngpt": True, "parallel_block": True}, "parallel_block", ["ngpt requires False"]),
        ({"ngpt": True, "mlp_type": "mlp"}, "mlp_type", ["ngpt requires 'glu'"]),
        ({"ngpt": True, "qk_norm": True}, "qk_norm", ["ngpt requires False"]),
        ({"ngpt": True, "tie_word_embeddings": True}, "tie_word_embeddings", ["ngpt requires False"]),
        ({"ngpt": True, "num_kv_heads": 4}, "num_kv_heads", ["ngpt requires 12"]),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_contradictory_keys_raise(options: Any, key: Any, works: Any) -> None:
    assert_raises(options, key, *works)


def test_all_layers_are_checked_if_the_first_has_overrides() -> None:
    assert_raises({"num_kv_heads": 5, "layer_overrides": {0: {"num_kv_heads": 4}}}, "num_kv_heads", "12")


def test_a_later_layer_may_lack_a_pre_norm_if_the_first_skips_its_own() -> None:
    config = tiny_config(norm_pos="pre", first_attention_norm=False, layer_overrides={2: {"norm_pos": "post"}})
    layers = BertBlocksModel(config).encoder.layers
    assert isinstance(layers[0].attention_residual.pre_norm, nn.Identity)
    assert isinstance(layers[1].attention_residual.pre_norm, LayerNorm)
    assert isinstance(layers[2].attention_residual.post_norm, LayerNorm)


def test_an_unknown_preset_raises_and_suggests_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'modernbert-bse'.*did you mean 'modernbert-base'.*bert-base"):
        BertBlocksConfig.from_preset("modernbert-bse")


# ---------------------------------------------------------------------- attributes


def test_setting_an_unknown_attribute_raises() -> None:
    config = BertBlocksConfig()
    with pytest.raises(ConfigError, match=r"'hidden_sise'.*did you mean 'hidden_size'"):
        config.hidden_sise = 1
    assert not hasattr(config, "hidden_sise")


def test_a_bad_value_set_later_raises_when_a_model_is_built_or_the_config_saved(tmp_path: Path) -> None:
    config = tiny_config()
    config.norm_fn = "nonsense"
    with pytest.raises(ConfigError, match="norm_fn is 'nonsense'"):
        BertBlocksModel(config)
    with pytest.raises(ConfigError, match="norm_fn is 'nonsense'"):
        config.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_options_of_from_pretrained_are_checked(tmp_path: Path) -> None:
    BertBlocksConfig().save_pretrained(tmp_path)
    assert BertBlocksConfig.from_pretrained(tmp_path, norm_fn="rms").norm_fn == "rms"
    assert BertBlocksConfig.from_pretrained(tmp_path, norm_fn="dynamictanh").norm_fn == "dynamic_tanh"
    assert BertBlocksConfig.from_pretrained(tmp_path, norm_kind="both").norm_pos == "pre_and_post"
    with pytest.raises(ConfigError, match="norm_fn is 'nonsense'"):
        BertBlocksConfig.from_pretrained(tmp_path, norm_fn="nonsense")
    with pytest.raises(ConfigError, match=r"'hidden_sise'.*did you mean 'hidden_size'"):
        BertBlocksConfig.from_pretrained(tmp_path, hidden_sise=64)


@pytest.mark.parametrize(("name", "meaning"), [("eager", "eager"), ("sdpa", "sdpa"), ("flash_attention_2", "flash")])
def test_attn_implementation_sets_the_backend_on_loading(name: Any, meaning: Any, tmp_path: Path) -> None:
    BertBlocksConfig().save_pretrained(tmp_path)
    assert BertBlocksConfig.from_pretrained(tmp_path, attn_implementation=name).attention_backend == meaning


# ---------------------------------------------------------------------- aliases

ALIASES = [
    ("norm_kind", "pre", "norm_pos", "pre"),
    ("norm_kind", "both", "norm_pos", "pre_and_post"),
    ("norm_pos", "both", "norm_pos", "pre_and_post"),
    ("norm_fn", "dynamictanh", "norm_fn", "dynamic_tanh"),
    ("norm_qk", True, "qk_norm", True),
    ("emb_pos_enc_kind", "sinusoidal", "embd_pos_enc_kind", "sinusoidal"),
    ("num_blocks", 3, "num_hidden_layers", 3),
    ("max_sequence_length", 99, "max_position_embeddings", 99),
    ("actv_fn", "silu", "hidden_act", "silu"),
    ("attn_implementation", "eager", "attention_backend", "eager"),
    ("attn_implementation", "flash_attention_2", "attention_backend", "flash"),
    ("attention_backend", "flash_attention_2", "attention_backend", "flash"),
]


@pytest.mark.parametrize(("alias", "value", "key", "meaning"), ALIASES, ids=str)
@pytest.mark.parametrize("source", ["constructor", "preset", "json"])
def test_an_alias_is_read_and_never_written(
    source: Any, alias: Any, value: Any, key: Any, meaning: Any, tmp_path: Path
) -> None:
    if source == "constructor":
        config = BertBlocksConfig(**{alias: value})
    elif source == "preset":
        config = BertBlocksConfig.from_preset("bert-base", **{alias: value})
    else:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "bertblocks", alias: value}))
        config = BertBlocksConfig.from_pretrained(tmp_path)
    assert getattr(config, key) == meaning
    for written in (config.to_dict(), json.loads(config.to_json_string()), config.to_diff_dict()):
        assert written[key] == meaning
        assert alias == key or alias not in written


@pytest.mark.parametrize(("alias", "value", "key", "meaning"), [row for row in ALIASES if row[0] != row[2]], ids=str)
@pytest.mark.parametrize("alias_first", [True, False])
def test_an_alias_next_to_its_key_raises(alias_first: Any, alias: Any, value: Any, key: Any, meaning: Any) -> None:
    pair = [(alias, value), (key, meaning)]
    with pytest.raises(ConfigError, match=f"'{alias}'.*'{key}'"):
        BertBlocksConfig(**dict(pair if alias_first else reversed(pair)))


@pytest.mark.parametrize(("alias", "value", "key", "meaning"), ALIASES, ids=str)
def test_an_alias_means_the_same_when_set_as_an_attribute(alias: Any, value: Any, key: Any, meaning: Any) -> None:
    config = BertBlocksConfig()
    setattr(config, alias, value)
    assert getattr(config, key) == meaning


def test_a_layer_override_may_use_an_alias() -> None:
    config = BertBlocksConfig(layer_overrides={1: {"norm_kind": "both", "actv_fn": "silu"}})
    assert config.layer_overrides == {1: {"norm_pos": "pre_and_post", "hidden_act": "silu"}}


# ---------------------------------------------------------------------- round trip


@st.composite
def valid_options(draw: Any) -> dict:
    """Draws options that are valid together."""
    heads = draw(st.sampled_from([1, 2, 4, 6]))
    layers = draw(st.integers(1, 5))
    is_ngpt = draw(st.booleans())
    options: dict = {
        "num_attention_heads": heads,
        "hidden_size": heads * draw(st.sampled_from([4, 8, 64])),
        "num_hidden_layers": layers,
        "intermediate_size": draw(st.integers(1, 99)),
        "vocab_size": draw(st.integers(10, 99)),
        "type_vocab_size": draw(st.integers(0, 2)),
        "pad_token_id": draw(st.none() | st.integers(0, 9)),
        "mask_token_id": draw(st.none() | st.integers(0, 9)),
        "norm_fn": draw(st.sampled_from(["layer", "rms", "dynamic_tanh"])),
        "norm_eps": draw(st.floats(1e-12, 1e-3)),
        "norm_bias": draw(st.booleans()),
        "hidden_act": draw(st.sampled_from(["gelu", "silu", "relu2", "gelu_new"])),
        "ngpt": is_ngpt,
        "attention_dropout": draw(st.floats(0, 1, exclude_max=True)),
        "initializer_range": draw(st.floats(1e-4, 1.0)),
        "attention_backend": draw(st.sampled_from(["auto", "sdpa", "eager", "flash"])),
        "unpad": draw(st.booleans()),
        "pooler": draw(st.booleans()),
        "classifier_head": draw(st.sampled_from(["dense", "none"])),
        "classifier_pooling": draw(st.sampled_from(["cls", "last", "mean", "max"])),
        "num_labels": draw(st.integers(1, 5)),
    }
    if not is_ngpt:
        options["norm_pos"] = draw(st.sampled_from(["pre", "post", "pre_and_post", "sandwich", "none"]))
        options["mlp_type"] = draw(st.sampled_from(["mlp", "glu"]))
        options["num_kv_heads"] = draw(st.sampled_from([n for n in (1, 2, 3, heads) if heads % n == 0]))
        options["parallel_block"] = draw(st.booleans())
        options["tie_word_embeddings"] = draw(st.booleans())
        options["final_norm"] = draw(st.booleans())
        options["qk_norm"] = draw(st.booleans())
    if draw(st.booleans()):
        options["block_pos_enc_kind"] = "rope"
        options["embd_pos_enc_kind"] = "none"
        options["rope_theta"] = draw(st.floats(100, 1e6))
        options["partial_rotary_factor"] = draw(st.sampled_from([0.5, 1.0]))
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["linear", "dynamic", "yarn"]))
            options["rope_scaling"] = {"rope_type": kind, "factor": draw(st.floats(1, 8))}
    else:
        options["position_offset"] = draw(st.integers(0, 3))
    if draw(st.booleans()):
        options["local_attention"] = True
        options["local_attention_window_size"] = draw(st.integers(1, 200))
        if draw(st.booleans()):
            options["layer_types"] = draw(
                st.lists(st.sampled_from(["global", "local"]), min_size=layers, max_size=layers)
            )
        else:
            options["global_attention_every_n_layers"] = draw(st.none() | st.integers(1, 4))
    if draw(st.booleans()):
        indices = st.integers(0, layers - 1)
        override = st.fixed_dictionaries(
            {}, optional={"hidden_act": st.sampled_from(["silu", "relu"]), "intermediate_size": st.integers(1, 50)}
        )
        options["layer_overrides"] = draw(st.dictionaries(indices, override, max_size=3))
    return options


@settings(max_examples=50, deadline=None)
@given(options=valid_options())
def test_a_config_survives_json_and_lists_every_key(options: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = BertBlocksConfig(**options)
    folder = tmp_path_factory.mktemp("config")
    config.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written.keys() >= KEYS
    assert written["model_type"] == "bertblocks"
    from_folder = BertBlocksConfig.from_pretrained(folder)
    from_dict = BertBlocksConfig.from_dict(config.to_dict())
    for back in (from_folder, from_dict, BertBlocksConfig(**config.to_dict())):
        assert {key: getattr(back, key) for key in options} == options
        assert {key: getattr(back, key) for key in KEYS} == {key: getattr(config, key) for key in KEYS}
    assert from_folder.to_json_string() == config.to_json_string()


def test_auto_config_reads_what_was_saved(tmp_path: Path) -> None:
    BertBlocksConfig.from_preset("mini", norm_fn="rms").save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is BertBlocksConfig
    assert (config.norm_fn, config.hidden_size) == ("rms", 64)


def test_labels_survive_the_round_trip(tmp_path: Path) -> None:
    labels = {0: "no", 1: "maybe", 2: "yes"}
    config = BertBlocksConfig(id2label=labels, label2id={name: index for index, name in labels.items()})
    config.save_pretrained(tmp_path)
    back = BertBlocksConfig.from_pretrained(tmp_path)
    assert (back.num_labels, back.id2label, back.label2id) == (3, labels, {"no": 0, "maybe": 1, "yes": 2})


# ---------------------------------------------------------------------- layers that differ


@pytest.mark.parametrize(
    "layer_types",
    [["global", "local", "local"], ["full_attention", "sliding_attention", "sliding_attention"]],
    ids=["our spelling", "transformers' spelling"],
)
def test_layer_types_decide_windows_and_thetas(layer_types: Any) -> None:
    config = tiny_config(
        layer_types=layer_types,
        local_attention=True,
        block_pos_enc_kind="rope",
        rope_theta=1000.0,
        local_rope_theta=10.0,
    )
    assert config.layer_types == ["global", "local", "local"]
    attentions = [layer.attention for layer in BertBlocksModel(config).encoder.layers]
    assert [attention.pattern.half_window for attention in attentions] == [None, 4, 4]
    assert [attention.position.theta for attention in attentions] == [1000.0, 10.0, 10.0]


def test_layer_types_override_global_attention_every_n_layers() -> None:
    """A saved config contains both."""
    config = tiny_config(
        layer_types=["local", "local", "global"], local_attention=True, global_attention_every_n_layers=2
    )
    assert config.layer_types == ["local", "local", "global"]


OVERRIDES = {
    "norm_fn": ("rms", lambda layer: isinstance(layer.mlp_residual.post_norm, RMSNorm)),
    "norm_pos": ("pre", lambda layer: isinstance(layer.attention_residual.pre_norm, LayerNorm)),
    "norm_eps": (0.5, lambda layer: layer.attention_residual.post_norm.eps == 0.5),
    "norm_bias": (False, lambda layer: layer.attention_residual.post_norm.bias is None),
    "parallel_block": (True, lambda layer: layer.mlp_residual is None),
    "mlp_type": ("glu", lambda layer: type(layer.mlp) is GLU and layer.mlp.up.out_features == 48),
    "hidden_act": ("relu", lambda layer: isinstance(layer.mlp.activation, nn.ReLU)),
    "intermediate_size": (7, lambda layer: layer.mlp.up.out_features == 7 and layer.mlp.down.in_features == 7),
    "mlp_in_bias": (False, lambda layer: layer.mlp.up.bias is None),
    "mlp_out_bias": (False, lambda layer: layer.mlp.down.bias is None),
    "num_attention_heads": (2, lambda layer: (layer.attention.num_heads, layer.attention.head_dim) == (2, 16)),
    "num_kv_heads": (1, lambda layer: layer.attention.qkv.out_features == (4 + 1 + 1) * 8),
    "head_dim": (6, lambda layer: layer.attention.out.in_features == 4 * 6),
    "qk_norm": (True, lambda layer: isinstance(layer.attention.query_norm, RMSNorm)),
    "attention_qkv_bias": (False, lambda layer: layer.attention.qkv.bias is None),
    "attention_out_bias": (False, lambda layer: layer.attention.out.bias is None),
    "block_pos_enc_kind": ("alibi", lambda layer: layer.attention.pattern.has_bias),
    "rope_theta": (77.0, lambda layer: layer.attention.position.theta == 77.0),
    "partial_rotary_factor": (0.5, lambda layer: layer.attention.position.rotary_dim == 4),
    "rope_interleaved": (True, lambda layer: layer.attention.position.interleaved),
    "rope_scaling": (
        {"rope_type": "linear", "factor": 2.0},
        lambda layer: layer.attention.position.scaling["factor"] == 2.0,
    ),
    "attention_dropout": (0.5, lambda layer: layer.attention.dropout == 0.5),
    "attention_output_dropout": (0.5, lambda layer: layer.attention.out_dropout.p == 0.5),
    "mlp_dropout": (0.5, lambda layer: layer.mlp.dropout.p == 0.5),
    "mlp_output_dropout": (0.5, lambda layer: layer.mlp.out_dropout.p == 0.5),
}


def has_override(key: str, layer: nn.Module) -> bool:
    try:
        return bool(OVERRIDES[key][1](layer))
    except (AttributeError, TypeError):  # the part to look at is not even there
        return False


@pytest.mark.parametrize("key", OVERRIDES)
def test_layer_overrides_change_only_their_layer(key: Any, tmp_path: Path) -> None:
    """The same holds for JSON, where the number of a layer is a string."""
    value, _ = OVERRIDES[key]
    tiny_config(block_pos_enc_kind="rope", layer_overrides={"1": {key: value}}).save_pretrained(tmp_path)
    config = BertBlocksConfig.from_pretrained(tmp_path)
    assert config.layer_overrides == {1: {key: value}}
    model = BertBlocksModel(config)
    assert [has_override(key, layer) for layer in model.encoder.layers] == [False, True, False]
    assert model(torch.tensor([[5, 6, 7]])).last_hidden_state.isfinite().all()


@pytest.mark.parametrize(
    ("key", "value", "read"),
    [
        ("local_attention_window_size", 2, lambda attention: attention.pattern.half_window == 1),
        ("num_global_tokens", 3, lambda attention: attention.pattern.num_global_tokens == 3),
        ("local_rope_theta", 77.0, lambda attention: attention.position.theta == 77.0),
        (
            "local_rope_scaling",
            {"rope_type": "linear", "factor": 2.0},
            lambda attention: attention.position.scaling is not None,
        ),
    ],
)
def test_a_local_layer_may_have_its_own_window_and_positions(key: Any, value: Any, read: Any) -> None:
    config = tiny_config(local_attention=True, block_pos_enc_kind="rope", layer_overrides={1: {key: value}})
    model = BertBlocksModel(config)
    assert [read(layer.attention) for layer in model.encoder.layers] == [False, True, False]


# ---------------------------------------------------------------------- presets


def build_on_meta(model_class: Any, config: BertBlocksConfig) -> Any:
    with torch.device("meta"):
        return model_class(config)


def unique_parameters(model: nn.Module) -> int:
    """A tied matrix counts once."""
    return sum({id(parameter): parameter.numel() for parameter in model.parameters()}.values())


@pytest.mark.parametrize(
    ("name", "model_class", "low", "high"),
    [
        ("bert-base", BertBlocksModel, 109_482_240, 109_482_240),
        ("bert-large", BertBlocksModel, 335_141_888, 335_141_888),
        ("roberta-base", BertBlocksForMaskedLM, 124_697_433, 124_697_433),
        ("modernbert-base", BertBlocksForMaskedLM, 149_655_232, 149_655_232),
        ("modernbert-large", BertBlocksForMaskedLM, 395_881_664, 395_881_664),
        ("modernbert-embed-base", BertBlocksModel, 149_014_272, 149_014_272),
        ("mini", BertBlocksForMaskedLM, 200_000, 500_000),
        ("mini", BertBlocksModel, 200_000, 500_000),
        ("mini-bert", BertBlocksModel, 5_424, 5_424),
        *(
            (f"ettin-{name}", BertBlocksForMaskedLM, 0.95 * size, 1.05 * size)
            for name, size in {
                "17m": 17e6, "32m": 32e6, "68m": 68e6, "150m": 150e6, "400m": 400e6, "1b": 1.03e9,
            }.items()
        ),
    ],
)  # fmt: skip
def test_a_preset_has_the_published_number_of_parameters(name: Any, model_class: Any, low: Any, high: Any) -> None:
    assert low <= unique_parameters(build_on_meta(model_class, BertBlocksConfig.from_preset(name))) <= high


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_builds_and_runs_when_made_small(name: Any) -> None:
    build_on_meta(BertBlocksForMaskedLM, BertBlocksConfig.from_preset(name))
    small = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 4}
    config = BertBlocksConfig.from_preset(name, **small)
    out = BertBlocksForMaskedLM(config).eval()(torch.tensor([[5, 6, 7]]))
    assert out.logits.shape == (1, 3, config.vocab_size)
    assert out.logits.isfinite().all()


def test_preset_overrides_change_only_their_keys() -> None:
    plain = BertBlocksConfig.from_preset("modernbert-base")
    changed = BertBlocksConfig.from_preset("modernbert-base", norm_fn="rms", num_hidden_layers=5)
    assert changed.layer_types == ["global", "local", "local", "global", "local"]
    differing = {key for key in KEYS if getattr(plain, key) != getattr(changed, key)}
    assert differing == {"norm_fn", "num_hidden_layers", "num_hidden_groups", "layer_types"}


def test_modernbert_equals_the_published_model() -> None:
    """The keys that differ from BERT have the values of the paper and of the published config."""
    config = BertBlocksConfig.from_preset("modernbert-base")
    assert config.layer_types == ["global" if index % 3 == 0 else "local" for index in range(22)]
    assert (config.rope_theta, config.local_rope_theta) == (160_000.0, 10_000.0)
    assert (config.local_attention_window_size, config.max_position_embeddings) == (128, 8192)
    assert (config.norm_pos, config.norm_fn, config.norm_eps, config.final_norm) == ("pre", "layer", 1e-5, True)
    assert (config.mlp_type, config.hidden_act, config.intermediate_size) == ("glu", "gelu", 1152)
    model = build_on_meta(BertBlocksForMaskedLM, config)
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert biases == ["decoder.bias"]
    assert isinstance(model.model.encoder.layers[0].attention_residual.pre_norm, nn.Identity)


# ---------------------------------------------------------------------- registered blocks


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes names that a test registers."""
    for registry in (NORMS, ACTIVATIONS, MLPS, BLOCK_POSITIONS, EMBEDDING_POSITIONS, BACKENDS):
        monkeypatch.setattr(registry, "_blocks", dict(registry._blocks))


def run(config: BertBlocksConfig) -> torch.Tensor:
    return BertBlocksModel(config).eval()(torch.tensor([[5, 6, 7, 8]])).last_hidden_state[0]


def test_a_registered_norm_is_used_for_every_norm(registries: Any) -> None:
    @register_norm("constant")
    class Constant(nn.Module):
        def __init__(self, size: int, eps: float, bias: bool) -> None:
            super().__init__()
            self.size, self.eps, self.bias = size, eps, bias

        def forward(self, x: Any) -> Any:
            return torch.full_like(x, 3.0)

    config = tiny_config(norm_fn="constant", norm_eps=0.25, norm_bias=False)
    assert torch.equal(run(config), torch.full((4, 32), 3.0))
    norms = [module for module in BertBlocksModel(config).modules() if isinstance(module, Constant)]
    assert len(norms) == 1 + 2 * 3  # of the embeddings, and two in each layer
    assert {(norm.size, norm.eps, norm.bias) for norm in norms} == {(32, 0.25, False)}


def test_a_registered_norm_keeps_its_initial_values(registries: Any) -> None:
    @register_norm("quiet")
    class QuietNorm(nn.Module):
        def __init__(self, size: int, eps: float, bias: bool) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.full((size,), 0.125))

        def forward(self, x: Any) -> Any:
            return x * self.weight

    model = BertBlocksModel(tiny_config(norm_fn="quiet"))
    assert torch.equal(model.embedding.norm.weight, torch.full((32,), 0.125))


def test_a_registered_activation_is_used_by_the_feed_forward(registries: Any) -> None:
    @register_activation("nothing")
    class Nothing(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.zeros_like(x)

    model = BertBlocksModel(tiny_config(hidden_act="nothing")).eval()
    layer = model.encoder.layers[0]
    x = torch.randn(5, 32)
    assert torch.equal(layer.mlp(x), layer.mlp.down.bias.expand(5, 32))
    assert run(tiny_config(hidden_act="nothing")).isfinite().all()


def test_a_registered_mlp_is_built_from_the_config(registries: Any) -> None:
    @register_mlp("doubling")
    class Doubling(MLP):
        def forward(self, x: Any) -> Any:
            return 2.0 * x

    config = tiny_config(mlp_type="doubling", norm_pos="none", intermediate_size=5)
    layer = BertBlocksModel(config).encoder.layers[0]
    assert type(layer.mlp) is Doubling
    assert layer.mlp.up.out_features == 5
    assert run(config).isfinite().all()


def test_a_registered_block_position_rotates_queries_and_biases_scores(registries: Any) -> None:
    @register_position("neighbours")
    class Neighbours(BlockPosition):
        """A bias that hides every other token."""

        has_bias = True

        @classmethod
        def from_config(cls, config: Any, is_local: Any) -> Any:
            position = cls()
            position.heads, position.is_local = config.num_attention_heads, is_local
            return position

        def bias(self, distance: Any) -> Any:
            return torch.where(distance == 0, 0.0, -1e9).expand(self.heads, *distance.shape)

    config = tiny_config(
        block_pos_enc_kind="neighbours",
        embd_pos_enc_kind="none",
        local_attention=True,
        global_attention_every_n_layers=2,
    )
    layers = BertBlocksModel(config).encoder.layers
    assert [layer.attention.position.is_local for layer in layers] == [False, True, False]
    for backend in ("eager", "sdpa"):
        model = BertBlocksModel(tiny_config(**{**config.to_dict(), "attention_backend": backend})).eval()
        together = model(torch.tensor([[5, 6, 7]])).last_hidden_state[0]
        alone = model(torch.tensor([[5], [6], [7]])).last_hidden_state[:, 0]
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_a_registered_embedding_position_is_added_to_the_embeddings(registries: Any) -> None:
    @register_position("counting", level="embedding")
    class Counting(EmbeddingPosition):
        def __init__(self, hidden_size: int) -> None:
            super().__init__()
            self.hidden_size = hidden_size

        @classmethod
        def from_config(cls, config: Any) -> Any:
            return cls(config.hidden_size)

        def forward(self, positions: Any) -> Any:
            return positions[:, None].float().expand(-1, self.hidden_size)

    config = tiny_config(embd_pos_enc_kind="counting", embedding_norm=False, type_vocab_size=0)
    model = BertBlocksModel(config).eval()
    ids = torch.tensor([[5, 6, 7]])
    start = model(ids, output_hidden_states=True).hidden_states[0][0]
    expected = model.embedding.token.weight[ids[0]] + torch.tensor([[0.0], [1.0], [2.0]])
    torch.testing.assert_close(start, expected)


def test_a_registered_backend_computes_the_attention_of_every_layer(registries: Any) -> None:
    calls = []

    @register_backend("nobody")
    class Nobody(AttentionBackend):
        def attend(self, q: Any, k: Any, v: Any, context: Any) -> Any:
            calls.append((tuple(q.shape), context.scale, context.dropout))
            return torch.zeros_like(q)

    model = BertBlocksModel(tiny_config(attention_backend="nobody", norm_pos="none", final_norm=True)).eval()
    model(torch.tensor([[5, 6, 7]]))
    assert calls == [((3, 4, 8), 8**-0.5, 0.0)] * 3


@pytest.mark.parametrize(
    ("register", "taken", "key"),
    [
        (register_norm, "rms", "norm_fn"),
        (register_mlp, "glu", "mlp_type"),
        (register_position, "rope", "block_pos_enc_kind"),
        (lambda name: register_position(name, level="embedding"), "learned", "embd_pos_enc_kind"),
        (register_backend, "sdpa", "attention_backend"),
    ],
    ids=["norm", "mlp", "block position", "embedding position", "backend"],
)
def test_registering_a_built_in_name_raises(registries: Any, register: Any, taken: Any, key: Any) -> None:
    with pytest.raises(ValueError, match=f"{key}.*'{taken}' is taken"):
        register(taken)(nn.Identity)


def test_registering_a_name_twice_raises(registries: Any) -> None:
    register_activation("mine")(nn.ReLU)
    with pytest.raises(ValueError, match="'mine' is taken"):
        register_activation("mine")(nn.Tanh)


def test_registering_the_name_of_a_transformers_activation_raises(registries: Any) -> None:
    with pytest.raises(ValueError, match="'gelu' is taken"):
        register_activation("gelu")(nn.ReLU)


def test_register_position_rejects_an_unknown_level(registries: Any) -> None:
    with pytest.raises(ValueError, match=r"level is 'layer'.*'block' or 'embedding'"):
        register_position("mine", level="layer")


def test_an_unregistered_name_raises(registries: Any) -> None:
    with pytest.raises(ConfigError, match="norm_fn is 'constant'"):
        tiny_config(norm_fn="constant")


# ---------------------------------------------------------------------- changing a config


@pytest.mark.parametrize(
    ("options", "change", "follows"),
    [
        ({}, {"norm_pos": "pre"}, {"final_norm": True}),
        ({}, {"hidden_size": 384}, {"head_dim": 32}),
        ({}, {"num_attention_heads": 6}, {"num_kv_heads": 6, "head_dim": 128}),
        ({}, {"num_hidden_layers": 2}, {"layer_types": ["global", "global"]}),
        ({"num_hidden_layers": 2}, {"local_attention": True}, {"layer_types": ["local", "local"]}),
        (ROPE, {"rope_theta": 5e5}, {"local_rope_theta": 5e5}),
        ({}, {"hidden_act": "silu"}, {"mlm_head_act": "silu"}),
        ({"num_kv_heads": 3}, {"num_attention_heads": 6}, {"num_kv_heads": 3}),
        ({"head_dim": 32}, {"hidden_size": 384}, {"head_dim": 32}),
        ({"mlm_head_act": "relu"}, {"hidden_act": "silu"}, {"mlm_head_act": "relu"}),
    ],
)
def test_implied_keys_follow_a_changed_key_unless_they_were_set(
    tmp_path: Path, options: Any, change: Any, follows: Any
) -> None:
    """Applies to attributes, to options of from_pretrained, and to models."""
    config = BertBlocksConfig(**options)
    config.save_pretrained(tmp_path)
    for key, value in change.items():
        setattr(config, key, value)
    loaded = BertBlocksConfig.from_pretrained(tmp_path, **change)
    made = BertBlocksConfig(**{**options, **change})
    for changed in (config, loaded, made):
        assert {key: getattr(changed, key) for key in follows} == follows
        changed.validate()


def test_setting_a_value_of_the_wrong_type_raises_and_changes_nothing() -> None:
    config = BertBlocksConfig()
    with pytest.raises(ConfigError, match="hidden_size is 'wide'; it must be of type int"):
        config.hidden_size = "wide"  # type: ignore[assignment]
    assert config.hidden_size == 768


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_labels": 0}, "num_labels is 0"),
        ({"num_labels": "a"}, "num_labels is 'a'"),
        ({"id2label": 5}, "id2label is 5"),
        ({"id2label": {0: "a"}, "num_labels": 3}, "num_labels is 3; id2label names 1 labels"),
        ({"dtype": "foo"}, "dtype is 'foo'"),
        ({"dtype": float("nan")}, "dtype is nan"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ],
)
def test_keys_of_transformers_are_checked_too(options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        BertBlocksConfig(**options)


def test_other_spellings_of_rope_scaling() -> None:
    rope = {"block_pos_enc_kind": "rope"}
    assert BertBlocksConfig(**rope, rope_scaling={"rope_type": "default"}).rope_scaling is None
    old = BertBlocksConfig(**rope, rope_scaling={"type": "linear", "factor": 2.0})
    assert old.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_reserved_names_cannot_be_registered() -> None:
    for register, name in ((register_backend, "auto"), (register_position, "none")):
        with pytest.raises(ValueError, match=f"the name '{name}' is taken"):
            register(name)(object)


def test_a_saved_config_contains_only_keys() -> None:
    values = BertBlocksConfig().to_dict()
    assert [key for key in values if key.startswith("_")] in ([], ["_name_or_path"])


# ---------------------------------------------------------------------- hostile sizes and values


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; it must be at most 1,000."),
        ({"num_labels": 10**8}, "num_labels is 100000000; it must be at most 1,000,000."),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000; it must be at most 16,777,216."),
        ({"head_dim": 2**64}, "head_dim is 18446744073709551616; it must be at most 1,048,576."),
        ({"hidden_size": 10**5000}, "hidden_size is an integer of 16610 bits; it must be at most 1,048,576."),
    ],
)
def test_absurd_sizes_are_rejected_before_anything_is_allocated(options: Any, message: Any) -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match=re.escape(message)):
        BertBlocksConfig(**options)
    config = BertBlocksConfig()
    for key, value in options.items():
        with pytest.raises(ConfigError, match=re.escape(message)):
            setattr(config, key, value)
    assert time.monotonic() - start < 5


def test_messages_print_at_most_500_characters_of_a_value() -> None:
    nested: list = ["x" * 1000]
    for _ in range(12):
        nested = [nested] * 9  # 9^12 strings, as YAML aliases make them
    for value in ("x" * 10**6, nested, {"key": nested}, [10**400] * 1000):
        for options in ({"hidden_size": value}, {"norm_fn": value}, {"unknown": value}, {"rope_scaling": value}):
            with pytest.raises(ConfigError) as error:
                BertBlocksConfig(**options)
            assert len(str(error.value)) < 800
