"""ALBERT (Lan et al., 2020): BERT with narrow embeddings and layers that share weights."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.family import Family, check_absolute_positions, rule
from bertblocks.config import BertBlocksConfig

LAYER = "encoder.albert_layer_groups.{i}.albert_layers.0"


def read_rest(theirs: Any) -> dict[str, Any]:
    check_absolute_positions(theirs)
    return dict.fromkeys(("embedding_dropout", "attention_output_dropout"), theirs.hidden_dropout_prob)


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": ours.embedding_dropout}


ALBERT = Family(
    name="albert",
    config_class="AlbertConfig",
    model_classes={
        "base": "AlbertModel",
        "masked-lm": "AlbertForMaskedLM",
        "sequence-classification": "AlbertForSequenceClassification",
        "token-classification": "AlbertForTokenClassification",
        "question-answering": "AlbertForQuestionAnswering",
    },
    aliases={"AlbertForPreTraining": "masked-lm", "AlbertForMultipleChoice": "sequence-classification"},
    prefix="albert",
    pooler_option="add_pooling_layer",
    keys={
        **BERT.keys,
        "embedding_size": "embedding_size",
        "num_hidden_groups": "num_hidden_groups",
        "classifier_dropout": "classifier_dropout_prob",
    },
    # ALBERT projects embeddings even if the sizes are equal, and has no dropout after the feed-forward network
    fixed={"embedding_projection": True, "mlp_output_dropout": 0.0},
    required={"inner_group_num": 1},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        *(entry for entry in BERT.encoder_rules if entry.ours.startswith("embedding")),
        rule("embedding.projection", "encoder.embedding_hidden_mapping_in"),
        rule(
            "encoder.layers.{i}.attention.qkv",
            f"{LAYER}.attention.query",
            f"{LAYER}.attention.key",
            f"{LAYER}.attention.value",
        ),
        rule("encoder.layers.{i}.attention.out", f"{LAYER}.attention.dense"),
        rule("encoder.layers.{i}.attention_residual.post_norm", f"{LAYER}.attention.LayerNorm"),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.ffn"),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.ffn_output"),
        rule("encoder.layers.{i}.mlp_residual.post_norm", f"{LAYER}.full_layer_layer_norm"),
        rule("pooler.dense", "pooler"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "predictions.dense"),
            rule("head.norm", "predictions.LayerNorm"),
            rule("decoder.weight", "predictions.decoder.weight"),
            rule("decoder.bias", "predictions.bias"),
            # an untied decoder uses this bias
            rule("decoder.bias", "predictions.decoder.bias"),
        ),
        "sequence-classification": (rule("classifier", "classifier"),),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    ignored=(r"position_ids$", r"^sop_classifier\.", r"^pooler\."),
)
