"""ModernBERT (Warner et al., 2024), which also covers Ettin and mmBERT."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.checkpoints.families.rope import read_layers, write_layers

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
