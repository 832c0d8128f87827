"""Megatron-BERT (Shoeybi et al., 2019): BERT with norms before the sublayers and none after the embeddings."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.family import Family, check_absolute_positions, rule
from bertblocks.config import BertBlocksConfig

#: The dropouts that hidden_dropout_prob sets.
DROPOUTS = ("embedding_dropout", "attention_output_dropout", "mlp_output_dropout", "classifier_dropout")
BERT_NORMS = ("embedding.norm", "post_norm")


def read_rest(theirs: Any) -> dict[str, Any]:
    check_absolute_positions(theirs)
    return dict.fromkeys(DROPOUTS, theirs.hidden_dropout_prob)


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": ours.embedding_dropout}


MEGATRON_BERT = Family(
    name="megatron-bert",
    config_class="MegatronBertConfig",
    model_classes={
        "base": "MegatronBertModel",
        "masked-lm": "MegatronBertForMaskedLM",
        "pretraining": "MegatronBertForPreTraining",
        "sequence-classification": "MegatronBertForSequenceClassification",
        "token-classification": "MegatronBertForTokenClassification",
        "question-answering": "MegatronBertForQuestionAnswering",
    },
    aliases={"MegatronBertForMultipleChoice": "sequence-classification"},
    prefix=BERT.prefix,
    pooler_option=BERT.pooler_option,
    keys=BERT.keys,
    fixed={"norm_pos": "pre", "embedding_norm": False},
    required=BERT.required,
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        *(entry for entry in BERT.encoder_rules if not entry.ours.endswith(BERT_NORMS)),
        rule("encoder.layers.{i}.attention_residual.pre_norm", "encoder.layer.{i}.attention.ln"),
        rule("encoder.layers.{i}.mlp_residual.pre_norm", "encoder.layer.{i}.ln"),
        rule("encoder.final_norm", "encoder.ln"),
    ),
    head_rules=BERT.head_rules,
    ignored=BERT.ignored,
)
