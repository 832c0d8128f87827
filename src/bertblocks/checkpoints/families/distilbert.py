"""DistilBERT (Sanh et al., 2019): BERT without token types or pooler, and with different dropouts."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.config import BertBlocksConfig

LAYER = "transformer.layer.{i}"


def read_rest(theirs: Any) -> dict[str, Any]:
    return dict.fromkeys(("embedding_dropout", "mlp_output_dropout", "token_classifier_dropout"), theirs.dropout)


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"dropout": ours.embedding_dropout}


DISTILBERT = Family(
    name="distilbert",
    config_class="DistilBertConfig",
    model_classes={
        "base": "DistilBertModel",
        "masked-lm": "DistilBertForMaskedLM",
        "sequence-classification": "DistilBertForSequenceClassification",
        "token-classification": "DistilBertForTokenClassification",
        "question-answering": "DistilBertForQuestionAnswering",
    },
    aliases={"DistilBertForMultipleChoice": "sequence-classification"},
    prefix="distilbert",
    keys={
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "attention_dropout": "attention_dropout",
        "classifier_dropout": "seq_classif_dropout",
        "qa_dropout": "qa_dropout",
    },
    # sinusoidal_pos_embds only affects initialization; the checkpoint holds the position table either way
    fixed={
        "type_vocab_size": 0,
        "norm_eps": 1e-12,
        "attention_output_dropout": 0.0,
        "pooler": False,
        "classifier_head": "dense",
        "classifier_head_act": "relu",
    },
    required={},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.position.table", "embeddings.position_embeddings"),
        rule("embedding.norm", "embeddings.LayerNorm"),
        rule(
            "encoder.layers.{i}.attention.qkv",
            f"{LAYER}.attention.q_lin",
            f"{LAYER}.attention.k_lin",
            f"{LAYER}.attention.v_lin",
        ),
        rule("encoder.layers.{i}.attention.out", f"{LAYER}.attention.out_lin"),
        rule("encoder.layers.{i}.attention_residual.post_norm", f"{LAYER}.sa_layer_norm"),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.ffn.lin1"),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.ffn.lin2"),
        rule("encoder.layers.{i}.mlp_residual.post_norm", f"{LAYER}.output_layer_norm"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "vocab_transform"),
            rule("head.norm", "vocab_layer_norm"),
            rule("decoder", "vocab_projector"),
        ),
        "sequence-classification": (
            rule("classifier_head.dense", "pre_classifier"),
            rule("classifier", "classifier"),
        ),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    ignored=(r"position_ids$",),
)
