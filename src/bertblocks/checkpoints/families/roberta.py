"""RoBERTa (Liu et al., 2019), XLM-RoBERTa and its XL, CamemBERT, data2vec, and RoBERTa with norms before the sublayers.

All of them are BERT with positions that count from the padding id, and with different heads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.bert import BERT, write_rest
from bertblocks.checkpoints.families.bert import read_rest as read_bert_rest
from bertblocks.checkpoints.families.family import Family, Rule, check_absolute_positions, rule
from bertblocks.config.validation import ConfigError

LAYER = "encoder.layer.{i}"

#: Norms before attention, before the feed-forward network, and after the last layer.
PRE_NORM_RULES = (
    rule("encoder.layers.{i}.attention_residual.pre_norm", f"{LAYER}.attention.LayerNorm"),
    rule("encoder.layers.{i}.mlp_residual.pre_norm", f"{LAYER}.intermediate.LayerNorm"),
    rule("encoder.final_norm", "LayerNorm"),
)


def read_rest(theirs: Any) -> dict[str, Any]:
    check_absolute_positions(theirs)
    if theirs.pad_token_id is None:
        raise ConfigError(
            f"pad_token_id is None in this {theirs.model_type} config; positions count from it, so it must be set."
        )
    options = read_bert_rest(theirs)
    return {
        **options,
        "classifier_head_dropout": options["classifier_dropout"],
        "position_offset": theirs.pad_token_id + 1,
    }


def read_xl(theirs: Any) -> dict[str, Any]:
    # its feed-forward network has no dropout
    return {**read_rest(theirs), "mlp_output_dropout": 0.0}


def make_family(
    name: str, class_stem: str, prefix: str, encoder_rules: tuple[Rule, ...], fixed: dict[str, Any]
) -> Family:
    """A family with RoBERTa's architecture, possibly with different norms."""
    return Family(
        name=name,
        config_class=f"{class_stem}Config",
        model_classes={
            "base": f"{class_stem}Model",
            "masked-lm": f"{class_stem}ForMaskedLM",
            "sequence-classification": f"{class_stem}ForSequenceClassification",
            "token-classification": f"{class_stem}ForTokenClassification",
            "question-answering": f"{class_stem}ForQuestionAnswering",
        },
        prefix=prefix,
        pooler_option="add_pooling_layer",
        keys=BERT.keys,
        # the masked-LM head uses gelu, whatever the layers use
        fixed={"mlm_head_act": "gelu", "classifier_head": "dense", **fixed},
        required=BERT.required,
        read_rest=read_rest,
        write_rest=write_rest,
        encoder_rules=encoder_rules,
        head_rules={
            "base": (),
            "masked-lm": (
                rule("head.dense", "lm_head.dense"),
                rule("head.norm", "lm_head.layer_norm"),
                rule("decoder.weight", "lm_head.decoder.weight"),
                rule("decoder.bias", "lm_head.bias"),
                # an untied decoder uses this bias
                rule("decoder.bias", "lm_head.decoder.bias"),
            ),
            "sequence-classification": (
                rule("classifier_head.dense", "classifier.dense"),
                rule("classifier", "classifier.out_proj"),
            ),
            "token-classification": (rule("tagger", "classifier"),),
            "question-answering": (rule("spans", "qa_outputs"),),
        },
        ignored=(r"position_ids$", r"^pooler\."),
        renamed=BERT.renamed,
    )


ROBERTA = make_family("roberta", "Roberta", "roberta", BERT.encoder_rules, {})
XLM_ROBERTA = make_family("xlm-roberta", "XLMRoberta", "roberta", BERT.encoder_rules, {})
CAMEMBERT = make_family("camembert", "Camembert", "roberta", BERT.encoder_rules, {})
DATA2VEC_TEXT = make_family("data2vec-text", "Data2VecText", "data2vec_text", BERT.encoder_rules, {})
WITHOUT_POST_NORMS = tuple(entry for entry in BERT.encoder_rules if not entry.ours.endswith("post_norm"))
ROBERTA_PRELAYERNORM = make_family(
    "roberta-prelayernorm",
    "RobertaPreLayerNorm",
    "roberta_prelayernorm",
    (*WITHOUT_POST_NORMS, *PRE_NORM_RULES),
    {"norm_pos": "pre"},
)
XLM_ROBERTA_XL = replace(
    make_family("xlm-roberta-xl", "XLMRobertaXL", "roberta", (), {"norm_pos": "pre", "embedding_norm": False}),
    read_rest=read_xl,
    encoder_rules=(
        *(entry for entry in WITHOUT_POST_NORMS if entry.ours != "embedding.norm"),
        rule("encoder.layers.{i}.attention_residual.pre_norm", f"{LAYER}.attention.self_attn_layer_norm"),
        rule("encoder.layers.{i}.mlp_residual.pre_norm", f"{LAYER}.LayerNorm"),
        rule("encoder.final_norm", "encoder.LayerNorm"),
    ),
)
