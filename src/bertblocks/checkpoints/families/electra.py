"""ELECTRA (Clark et al., 2020), generator or discriminator: BERT with embeddings narrower than its layers."""

from __future__ import annotations

from typing import Any

from bertblocks.checkpoints.families.bert import BERT, write_rest
from bertblocks.checkpoints.families.bert import read_rest as read_bert_rest
from bertblocks.checkpoints.families.family import Family, check_absolute_positions, rule


def read_rest(theirs: Any) -> dict[str, Any]:
    check_absolute_positions(theirs)
    options = read_bert_rest(theirs)
    return {**options, "classifier_head_dropout": options["classifier_dropout"]}


ELECTRA = Family(
    name="electra",
    config_class="ElectraConfig",
    model_classes={
        "base": "ElectraModel",
        "masked-lm": "ElectraForMaskedLM",
        "replaced-token-detection": "ElectraForPreTraining",
        "sequence-classification": "ElectraForSequenceClassification",
        "token-classification": "ElectraForTokenClassification",
        "question-answering": "ElectraForQuestionAnswering",
    },
    prefix="electra",
    keys={**BERT.keys, "embedding_size": "embedding_size"},
    # both heads use gelu, whatever the layers use
    fixed={"mlm_head_act": "gelu", "pooler": False, "classifier_head": "dense", "classifier_head_act": "gelu"},
    required=BERT.required,
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        *(entry for entry in BERT.encoder_rules if not entry.ours.startswith("pooler")),
        rule("embedding.projection", "embeddings_project"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "generator_predictions.dense"),
            rule("head.norm", "generator_predictions.LayerNorm"),
            rule("decoder", "generator_lm_head"),
        ),
        "replaced-token-detection": (
            rule("detector_head.dense", "discriminator_predictions.dense"),
            rule("detector", "discriminator_predictions.dense_prediction"),
        ),
        "sequence-classification": (
            rule("classifier_head.dense", "classifier.dense"),
            rule("classifier", "classifier.out_proj"),
        ),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    ignored=(r"position_ids$",),
)
