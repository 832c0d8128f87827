"""BERT (Devlin et al., 2018) as transformers stores it."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.family import Family, check_absolute_positions, rule
from bertblocks.config import BertBlocksConfig

ATTENTION = "encoder.layer.{i}.attention"
MASKED_LM_RULES = (
    rule("head.dense", "cls.predictions.transform.dense"),
    rule("head.norm", "cls.predictions.transform.LayerNorm"),
    rule("decoder.weight", "cls.predictions.decoder.weight"),
    rule("decoder.bias", "cls.predictions.bias"),
    # an untied decoder uses this bias
    rule("decoder.bias", "cls.predictions.decoder.bias"),
)


def read_rest(theirs: Any) -> dict[str, Any]:
    dropout = theirs.hidden_dropout_prob
    return {
        "embedding_dropout": dropout,
        "attention_output_dropout": dropout,
        "mlp_output_dropout": dropout,
        "classifier_dropout": dropout if theirs.classifier_dropout is None else theirs.classifier_dropout,
    }


def read_bert(theirs: Any) -> dict[str, Any]:
    check_absolute_positions(theirs)
    return read_rest(theirs)


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    same = ours.classifier_dropout == ours.embedding_dropout
    return {
        "hidden_dropout_prob": ours.embedding_dropout,
        "classifier_dropout": None if same else ours.classifier_dropout,
    }


BERT = Family(
    name="bert",
    config_class="BertConfig",
    model_classes={
        "base": "BertModel",
        "masked-lm": "BertForMaskedLM",
        "pretraining": "BertForPreTraining",
        "sequence-classification": "BertForSequenceClassification",
        "token-classification": "BertForTokenClassification",
        "question-answering": "BertForQuestionAnswering",
    },
    aliases={"BertForMultipleChoice": "sequence-classification"},
    prefix="bert",
    pooler_option="add_pooling_layer",
    keys={
        "hidden_act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "type_vocab_size": "type_vocab_size",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    fixed={},  # BertBlocksConfig() is BERT
    required={"is_decoder": False, "add_cross_attention": False},
    read_rest=read_bert,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.position.table", "embeddings.position_embeddings"),
        rule("embedding.token_type", "embeddings.token_type_embeddings"),
        rule("embedding.norm", "embeddings.LayerNorm"),
        rule(
            "encoder.layers.{i}.attention.qkv",
            f"{ATTENTION}.self.query",
            f"{ATTENTION}.self.key",
            f"{ATTENTION}.self.value",
        ),
        rule("encoder.layers.{i}.attention.out", f"{ATTENTION}.output.dense"),
        rule("encoder.layers.{i}.attention_residual.post_norm", f"{ATTENTION}.output.LayerNorm"),
        rule("encoder.layers.{i}.mlp.up", "encoder.layer.{i}.intermediate.dense"),
        rule("encoder.layers.{i}.mlp.down", "encoder.layer.{i}.output.dense"),
        rule("encoder.layers.{i}.mlp_residual.post_norm", "encoder.layer.{i}.output.LayerNorm"),
        rule("pooler.dense", "pooler.dense"),
    ),
    head_rules={
        "base": (),
        "masked-lm": MASKED_LM_RULES,
        "pretraining": (*MASKED_LM_RULES, rule("order", "cls.seq_relationship")),
        "sequence-classification": (rule("classifier", "classifier"),),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    ignored=(r"position_ids$", r"^pooler\."),
    renamed={r"\.gamma$": ".weight", r"\.beta$": ".bias"},
)
