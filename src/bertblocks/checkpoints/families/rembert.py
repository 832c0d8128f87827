"""RemBERT (Chung et al., 2021): BERT with narrow input embeddings and wide output embeddings, which are not tied."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.bert_generation import read_rest as read_dropout
from bertblocks.checkpoints.families.bert_generation import write_rest as write_dropout
from bertblocks.checkpoints.families.family import rule
from bertblocks.config import BertBlocksConfig


def read_rest(theirs: Any) -> dict[str, Any]:
    width = theirs.output_embedding_size
    return {
        **read_dropout(theirs),
        "classifier_dropout": theirs.classifier_dropout_prob,
        "output_embedding_size": None if width == theirs.input_embedding_size else width,
    }


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {**write_dropout(ours), "output_embedding_size": ours.decoder_size}


REMBERT = replace(
    BERT,
    name="rembert",
    config_class="RemBertConfig",
    model_classes={task: f"Rem{name}" for task, name in BERT.model_classes.items() if task != "pretraining"},
    aliases={"RemBertForMultipleChoice": "sequence-classification"},
    prefix="rembert",
    keys={
        **BERT.keys,
        "embedding_size": "input_embedding_size",
        "classifier_dropout": "classifier_dropout_prob",
    },
    fixed={"embedding_projection": True},
    required={**BERT.required, "tie_word_embeddings": False},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(*BERT.encoder_rules, rule("embedding.projection", "encoder.embedding_hidden_mapping_in")),
    head_rules={
        **{task: rules for task, rules in BERT.head_rules.items() if task != "pretraining"},
        "masked-lm": (
            rule("head.dense", "cls.predictions.dense"),
            rule("head.norm", "cls.predictions.LayerNorm"),
            rule("decoder", "cls.predictions.decoder"),
        ),
    },
)
