"""ModernBERT (Warner et al., 2024), which also covers Ettin and mmBERT, and the decoder with the same blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.checkpoints.families.rope import read_layers, write_layers
from bertblocks.config import BertBlocksConfig

#: transformers uses the masked-LM head in classifiers too.
CLASSIFIER_HEAD = (rule("classifier_head.dense", "head.dense"), rule("classifier_head.norm", "head.norm"))


def read_rest(theirs: Any) -> dict[str, Any]:
    return {
        **read_layers(theirs),
        "attention_out_bias": theirs.attention_bias,
        "attention_output_dropout": theirs.attention_dropout,
        "mlp_out_bias": theirs.mlp_bias,
        "mlm_head_act": theirs.classifier_activation,
        "mlm_head_bias": theirs.classifier_bias,
    }


MODERNBERT = Family(
    name="modernbert",
    config_class="ModernBertConfig",
    model_classes={
        "base": "ModernBertModel",
        "masked-lm": "ModernBertForMaskedLM",
        "sequence-classification": "ModernBertForSequenceClassification",
        "token-classification": "ModernBertForTokenClassification",
        "question-answering": "ModernBertForQuestionAnswering",
    },
    aliases={"ModernBertForMultipleChoice": "sequence-classification"},
    prefix="model",
    keys={
        "hidden_act": "hidden_activation",
        "norm_eps": "norm_eps",
        "norm_bias": "norm_bias",
        "initializer_cutoff_factor": "initializer_cutoff_factor",
        "cls_token_id": "cls_token_id",
        "sep_token_id": "sep_token_id",
        "local_attention_window_size": "local_attention",
        "attention_qkv_bias": "attention_bias",
        "mlp_in_bias": "mlp_bias",
        "embedding_dropout": "embedding_dropout",
        "attention_dropout": "attention_dropout",
        "mlp_dropout": "mlp_dropout",
        "decoder_bias": "decoder_bias",
        "classifier_pooling": "classifier_pooling",
        "classifier_dropout": "classifier_dropout",
        "classifier_head_act": "classifier_activation",
        "classifier_head_bias": "classifier_bias",
    },
    fixed={
        "type_vocab_size": 0,
        "norm_pos": "pre",
        "first_attention_norm": False,
        "mlp_type": "glu",
        "embd_pos_enc_kind": "none",
        "block_pos_enc_kind": "rope",
        "mlp_output_dropout": 0.0,
        "init_kind": "megatron",
        "pooler": False,
        "classifier_head": "dense",
        "classifier_head_norm": True,
        "classifier_head_on_tokens": True,
    },
    required={},
    read_rest=read_rest,
    write_rest=write_layers,
    encoder_rules=(
        rule("embedding.token", "embeddings.tok_embeddings"),
        rule("embedding.norm", "embeddings.norm"),
        rule("encoder.layers.{i}.attention_residual.pre_norm", "layers.{i}.attn_norm"),
        rule("encoder.layers.{i}.attention.qkv", "layers.{i}.attn.Wqkv"),
        rule("encoder.layers.{i}.attention.out", "layers.{i}.attn.Wo"),
        rule("encoder.layers.{i}.mlp_residual.pre_norm", "layers.{i}.mlp_norm"),
        rule("encoder.layers.{i}.mlp.up", "layers.{i}.mlp.Wi"),
        rule("encoder.layers.{i}.mlp.down", "layers.{i}.mlp.Wo"),
        rule("encoder.final_norm", "final_norm"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (rule("head.dense", "head.dense"), rule("head.norm", "head.norm"), rule("decoder", "decoder")),
        "sequence-classification": (*CLASSIFIER_HEAD, rule("classifier", "classifier")),
        "token-classification": (*CLASSIFIER_HEAD, rule("tagger", "classifier")),
        "question-answering": (*CLASSIFIER_HEAD, rule("spans", "classifier")),
    },
)


def read_decoder(theirs: Any) -> dict[str, Any]:
    # half of their window is on either side, of which the decoder has one, and it counts the token itself
    return {**read_rest(theirs), "local_attention_window_size": 2 * (theirs.local_attention // 2 - 1)}


def write_decoder(ours: BertBlocksConfig) -> dict[str, Any]:
    return {**write_layers(ours), "local_attention": ours.local_attention_window_size + 2}


NOT_IN_DECODERS = ("classifier_pooling", "local_attention_window_size", "classifier_head_on_tokens")
MODERNBERT_DECODER = replace(
    MODERNBERT,
    name="modernbert-decoder",
    aliases={},
    config_class="ModernBertDecoderConfig",
    model_classes={
        "base": "ModernBertDecoderModel",
        "masked-lm": "ModernBertDecoderForCausalLM",
        "sequence-classification": "ModernBertDecoderForSequenceClassification",
    },
    keys={
        **{ours: name for ours, name in MODERNBERT.keys.items() if ours not in NOT_IN_DECODERS},
        "classifier_bias": "classifier_bias",
    },
    fixed={
        **{key: value for key, value in MODERNBERT.fixed.items() if key not in NOT_IN_DECODERS},
        "causal": True,
        "classifier_pooling": "last",
    },
    read_rest=read_decoder,
    write_rest=write_decoder,
    encoder_rules=(
        *(entry for entry in MODERNBERT.encoder_rules if not entry.ours.endswith("qkv")),
        rule("encoder.layers.{i}.attention.qkv", *(f"layers.{{i}}.attn.{part}_proj" for part in "qkv")),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.norm"),
            rule("decoder", "decoder"),
        ),
        "sequence-classification": (*CLASSIFIER_HEAD, rule("classifier", "classifier")),
    },
)
