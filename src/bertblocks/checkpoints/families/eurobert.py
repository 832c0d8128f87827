"""EuroBERT (Boizard et al., 2025), and UltraBERT, whose layers differ in windows and thetas."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.family import Family, qkv_sizes, rule
from bertblocks.checkpoints.families.rope import read_layers, read_rope, write_layers, write_rope
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError

#: Their classifier_pooling, and our classifier_pooling and classifier_head_before_pooling. "late" averages the scores
#: of tokens, which equals the score of the average after the dense layer.
POOLINGS = {"bos": ("cls", False), "mean": ("mean", False), "late": ("mean", True)}

KEYS: dict[str, str | None] = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_act": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "attention_qkv_bias": "attention_bias",
    "mlp_in_bias": "mlp_bias",
    "attention_dropout": "attention_dropout",
}
FIXED = {
    "type_vocab_size": 0,
    "norm_fn": "rms",
    "norm_pos": "pre",
    "norm_bias": False,
    "embedding_norm": False,
    "mlp_type": "glu",
    "embd_pos_enc_kind": "none",
    "block_pos_enc_kind": "rope",
    "embedding_dropout": 0.0,
    "attention_output_dropout": 0.0,
    "mlp_output_dropout": 0.0,
    "pooler": False,
}
ENCODER_RULES = (
    rule("embedding.token", "embed_tokens"),
    rule("encoder.layers.{i}.attention_residual.pre_norm", "layers.{i}.input_layernorm"),
    rule(
        "encoder.layers.{i}.attention.qkv",
        "layers.{i}.self_attn.q_proj",
        "layers.{i}.self_attn.k_proj",
        "layers.{i}.self_attn.v_proj",
        sizes=qkv_sizes,
    ),
    rule("encoder.layers.{i}.attention.out", "layers.{i}.self_attn.o_proj"),
    rule("encoder.layers.{i}.mlp_residual.pre_norm", "layers.{i}.post_attention_layernorm"),
    rule("encoder.layers.{i}.mlp.up", "layers.{i}.mlp.gate_proj", "layers.{i}.mlp.up_proj"),
    rule("encoder.layers.{i}.mlp.down", "layers.{i}.mlp.down_proj"),
    rule("encoder.final_norm", "norm"),
)


def read_biases(theirs: Any) -> dict[str, Any]:
    return {"attention_out_bias": theirs.attention_bias, "mlp_out_bias": theirs.mlp_bias}


# ---------------------------------------------------------------------- EuroBERT


def read_eurobert(theirs: Any) -> dict[str, Any]:
    theta, scaling = read_rope(theirs.rope_parameters)
    if theirs.classifier_pooling not in POOLINGS:
        raise ConfigError(f"classifier_pooling is {theirs.classifier_pooling!r}; it must be bos, mean or late.")
    pooling, before = POOLINGS[theirs.classifier_pooling]
    return {
        **read_biases(theirs),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "decoder_bias": theirs.mlp_bias,
        "classifier_pooling": pooling,
        "classifier_head_before_pooling": before,
    }


def write_eurobert(ours: BertBlocksConfig) -> dict[str, Any]:
    if ours.mask_token_id is None:
        raise ConfigError("mask_token_id is None; a eurobert checkpoint must have one.")
    names = {kinds: name for name, kinds in POOLINGS.items()}
    return {
        "rope_parameters": write_rope(ours.rope_theta, ours.rope_scaling),
        "classifier_pooling": names.get((ours.classifier_pooling, ours.classifier_head_before_pooling), "late"),
    }


EUROBERT = Family(
    name="eurobert",
    config_class="EuroBertConfig",
    model_classes={
        "base": "EuroBertModel",
        "masked-lm": "EuroBertForMaskedLM",
        "sequence-classification": "EuroBertForSequenceClassification",
        "token-classification": "EuroBertForTokenClassification",
    },
    prefix="model",
    keys={**KEYS, "mask_token_id": "mask_token_id"},
    fixed={
        **FIXED,
        "mlm_head_dense": False,
        "classifier_dropout": 0.0,
        "classifier_head": "dense",
        "classifier_head_act": "gelu",
    },
    required={},
    read_rest=read_eurobert,
    write_rest=write_eurobert,
    encoder_rules=ENCODER_RULES,
    head_rules={
        "base": (),
        "masked-lm": (rule("decoder", "lm_head"),),
        "sequence-classification": (rule("classifier_head.dense", "dense"), rule("classifier", "classifier")),
        "token-classification": (rule("tagger", "classifier"),),
    },
    ignored=(r"inv_freq$",),
)


# ---------------------------------------------------------------------- UltraBERT


def read_ultrabert(theirs: Any) -> dict[str, Any]:
    # their window counts tokens on one side
    return {**read_biases(theirs), **read_layers(theirs), "local_attention_window_size": 2 * theirs.sliding_window}


def write_ultrabert(ours: BertBlocksConfig) -> dict[str, Any]:
    return {**write_layers(ours), "sliding_window": ours.local_attention_window_size // 2}


ULTRABERT = Family(
    name="ultrabert",
    config_class="UltrabertConfig",
    model_classes={
        "base": "UltrabertModel",
        "masked-lm": "UltrabertForMaskedLM",
        "sequence-classification": "UltrabertForSequenceClassification",
        "token-classification": "UltrabertForTokenClassification",
        "question-answering": "UltrabertForQuestionAnswering",
    },
    prefix="model",
    keys={
        **KEYS,
        "classifier_pooling": "classifier_pooling",
        "classifier_dropout": "classifier_dropout",
        "mlm_head_size": "prediction_head_size",
    },
    fixed={
        **FIXED,
        "mlm_head_act": "gelu_pytorch_tanh",
        "mlm_head_bias": False,
        "mlm_head_norm": False,
        "decoder_bias": False,
        "classifier_head": "none",
    },
    required={},
    read_rest=read_ultrabert,
    write_rest=write_ultrabert,
    encoder_rules=ENCODER_RULES,
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.inner", "head.linear1"),
            rule("head.dense", "head.linear2"),
            rule("decoder", "head.decoder"),
        ),
        "sequence-classification": (rule("classifier", "classifier"),),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    ignored=(r"inv_freq$",),
    renamed={r"^ultrabert\.": "", r"^cls\.": "head.decoder."},  # as published
)
