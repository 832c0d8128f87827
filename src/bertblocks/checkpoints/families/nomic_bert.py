"""Nomic BERT (Nussbaum et al., 2024) and GTE (Zhang et al., 2024): BERT with RoPE and a gated feed-forward network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bertblocks.checkpoints.families.bert import read_rest as read_bert_rest
from bertblocks.checkpoints.families.bert import write_rest as write_bert_rest
from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.checkpoints.families.rope import read_rope, write_rope
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError

KEYS: dict[str, str | None] = {
    "hidden_act": "hidden_act",
    "norm_eps": "layer_norm_eps",
    "type_vocab_size": "type_vocab_size",
    "attention_dropout": "attention_probs_dropout_prob",
}
FIXED = {
    "mlp_type": "glu",
    "mlp_in_bias": False,
    "embd_pos_enc_kind": "none",
    "block_pos_enc_kind": "rope",
}


def never(config: BertBlocksConfig) -> bool:
    """For rules that only read: published files fuse tensors that transformers keeps separate."""
    return False


def gate_first(config: BertBlocksConfig) -> Tensor:
    """Row order of GTE's files, where the gate is the second half of the up projection."""
    rows = torch.arange(2 * config.intermediate_size)
    return rows.roll(config.intermediate_size)


ATTENTION, MLP = "encoder.layers.{i}.attention", "encoder.layers.{i}.mlp"
ENCODER_RULES = (
    rule("embedding.token", "embeddings.word_embeddings"),
    rule("embedding.token_type", "embeddings.token_type_embeddings"),
    rule("embedding.norm", "embeddings.LayerNorm"),
    rule(
        f"{ATTENTION}.qkv",
        "layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.k_proj",
        "layers.{i}.self_attn.v_proj",
    ),
    rule(f"{ATTENTION}.out", "layers.{i}.self_attn.o_proj"),
    rule(f"{ATTENTION}_residual.post_norm", "layers.{i}.post_attention_layernorm"),
    rule(f"{MLP}.up", "layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
    rule(f"{MLP}.down", "layers.{i}.mlp.down_proj"),
    rule(f"{MLP}_residual.post_norm", "layers.{i}.post_mlp_layernorm"),
    rule("pooler.dense", "pooler.dense"),
)
IGNORED = (r"position_ids$", r"inv_freq$", r"^pooler\.")

#: Keys of Nomic's own configs, which transformers ignores, and ours.
NOMIC_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "norm_eps",
    "attn_pdrop": "attention_dropout",
    "rotary_emb_base": "rope_theta",
}
#: Other keys of Nomic's own configs, and the only values that BertBlocks supports.
NOMIC_VALUES = {
    "activation_function": "swiglu",
    "causal": False,
    "embd_pdrop": 0.0,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "moe_every_n_layers": 0,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "resid_pdrop": 0.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_rms_norm": False,
}
#: The same for GTE's own configs.
GTE_VALUES = {"layer_norm_type": "layer_norm", "logn_attention_scale": False, "position_embedding_type": "rope"}


def check_values(theirs: Any, values: dict[str, Any]) -> None:
    """Raises an error for a key with an unsupported value; keys may be absent."""
    for key, value in values.items():
        if getattr(theirs, key, value) != value:
            raise ConfigError(
                f"{key} is {getattr(theirs, key)!r} in this {theirs.model_type} config; BertBlocks supports "
                f"{value!r} only."
            )


def read_rest(theirs: Any) -> dict[str, Any]:
    theta, scaling = read_rope(theirs.rope_parameters)
    return {**read_bert_rest(theirs), "rope_theta": theta, "rope_scaling": scaling}


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {**write_bert_rest(ours), "rope_parameters": write_rope(ours.rope_theta, ours.rope_scaling)}


# ---------------------------------------------------------------------- Nomic BERT


def read_nomic(theirs: Any) -> dict[str, Any]:
    check_values(theirs, NOMIC_VALUES)
    published = {ours: getattr(theirs, key, None) for key, ours in NOMIC_KEYS.items()}
    options = {ours: value for ours, value in published.items() if value is not None}
    # Nomic's own size keys imply head_dim
    head_dim = None if {"hidden_size", "num_attention_heads"} & set(options) else theirs.head_dim
    return {**read_rest(theirs), "head_dim": head_dim, "tie_word_embeddings": theirs.tie_word_embeddings, **options}


def write_nomic(ours: BertBlocksConfig) -> dict[str, Any]:
    # the default is true, and their files omit it
    tie = {} if ours.tie_word_embeddings else {"tie_word_embeddings": False}
    return {**write_rest(ours), "head_dim": ours.head_dim, **tie}


NOMIC_BERT = Family(
    name="nomic_bert",
    config_class="NomicBertConfig",
    model_classes={
        "base": "NomicBertModel",
        "masked-lm": "NomicBertForMaskedLM",
        "sequence-classification": "NomicBertForSequenceClassification",
        "token-classification": "NomicBertForTokenClassification",
    },
    aliases={"NomicBertForPreTraining": "masked-lm"},
    prefix="nomic_bert",
    pooler_option="add_pooling_layer",
    keys={**KEYS, "tie_word_embeddings": None},
    fixed={**FIXED, "attention_qkv_bias": False, "attention_out_bias": False, "mlp_out_bias": False},
    required={},
    read_rest=read_nomic,
    write_rest=write_nomic,
    encoder_rules=(*ENCODER_RULES, rule(f"{ATTENTION}.qkv", "layers.{i}.attn.Wqkv", when=never)),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "cls.predictions.transform.dense"),
            rule("head.norm", "cls.predictions.transform.layer_norm"),
            rule("decoder.weight", "cls.predictions.decoder.weight"),
            rule("decoder.bias", "cls.predictions.bias"),
            # an untied decoder uses this bias
            rule("decoder.bias", "cls.predictions.decoder.bias"),
        ),
        "sequence-classification": (rule("classifier", "classifier"),),
        "token-classification": (rule("tagger", "classifier"),),
    },
    ignored=IGNORED,
    renamed={
        r"^bert\.": "",
        r"\bencoder\.layers\.": "layers.",
        r"\bemb_ln\.": "embeddings.LayerNorm.",
        r"\battn\.out_proj\.": "self_attn.o_proj.",
        r"\bfc11\.": "up_proj.",
        r"\bfc12\.": "gate_proj.",
        r"\bfc2\.": "down_proj.",
        r"\bnorm1\.": "post_attention_layernorm.",
        r"\bnorm2\.": "post_mlp_layernorm.",
    },
)


# ---------------------------------------------------------------------- GTE


def read_gte(theirs: Any) -> dict[str, Any]:
    check_values(theirs, GTE_VALUES)
    options = read_rest(theirs)
    # transformers reads this key without declaring it
    head_dim = getattr(theirs, "head_dim", None)
    return {**options, "mlp_dropout": theirs.hidden_dropout_prob, "head_dim": head_dim}


def write_gte(ours: BertBlocksConfig) -> dict[str, Any]:
    is_implied = ours.head_dim == ours.hidden_size // ours.num_attention_heads
    return {**write_rest(ours), **({} if is_implied else {"head_dim": ours.head_dim})}


GTE = Family(
    name="gte",
    config_class="GteConfig",
    model_classes={
        "base": "GteModel",
        "masked-lm": "GteForMaskedLM",
        "sequence-classification": "GteForSequenceClassification",
        "token-classification": "GteForTokenClassification",
    },
    prefix="gte",
    pooler_option="add_pooling_layer",
    keys=KEYS,
    # the masked-LM head uses gelu, whatever the layers use
    fixed={**FIXED, "mlm_head_act": "gelu"},
    required={},
    read_rest=read_gte,
    write_rest=write_gte,
    encoder_rules=(
        *ENCODER_RULES,
        rule(f"{ATTENTION}.qkv", "layers.{i}.attention.qkv_proj", when=never),
        rule(f"{MLP}.up", "layers.{i}.mlp.up_gate_proj", row_order=gate_first, when=never),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.layer_norm"),
            rule("decoder", "lm_head.decoder"),
        ),
        "sequence-classification": (rule("classifier", "classifier"),),
        "token-classification": (rule("tagger", "classifier"),),
    },
    ignored=IGNORED,
    renamed={
        r"^new\.": "",
        r"\bencoder\.layer\.": "layers.",
        r"\battention\.o_proj\.": "self_attn.o_proj.",
        r"\battn_ln\.": "post_attention_layernorm.",
        r"\bmlp_ln\.": "post_mlp_layernorm.",
        r"^lm_head\.norm\.": "lm_head.layer_norm.",
    },
)
