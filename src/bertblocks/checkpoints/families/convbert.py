"""ConvBERT (Jiang et al., 2020): ELECTRA with dynamic convolutions of spans next to fewer heads of attention."""

from __future__ import annotations

import dataclasses
from typing import Any

from bertblocks.checkpoints.families.bert import ATTENTION
from bertblocks.checkpoints.families.electra import ELECTRA
from bertblocks.checkpoints.families.family import rule
from bertblocks.config import BertBlocksConfig

OURS, THEIRS = "encoder.layers.{i}.attention.span_convolution", f"{ATTENTION}.self"
#: The published models have half as many heads of attention as their config says.
HEAD_RATIO = 2


def read_rest(theirs: Any) -> dict[str, Any]:
    heads = max(theirs.num_attention_heads // theirs.head_ratio, 1)
    return {
        **ELECTRA.read_rest(theirs),
        "num_attention_heads": heads,
        "head_dim": theirs.hidden_size // heads // 2,
        "classifier_head_act": theirs.hidden_act,
        "mlp_type": "grouped" if theirs.num_groups > 1 else "mlp",
        "mlp_groups": theirs.num_groups,
    }


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    heads = {"num_attention_heads": HEAD_RATIO * ours.num_attention_heads, "head_ratio": HEAD_RATIO}
    return {**ELECTRA.write_rest(ours), **heads, "num_groups": num_groups(ours)}


def num_groups(ours: BertBlocksConfig) -> int:
    return ours.mlp_groups if ours.mlp_type == "grouped" else 1


CONVBERT = dataclasses.replace(
    ELECTRA,
    name="convbert",
    config_class="ConvBertConfig",
    model_classes={
        "base": "ConvBertModel",
        "masked-lm": "ConvBertForMaskedLM",
        "sequence-classification": "ConvBertForSequenceClassification",
        "token-classification": "ConvBertForTokenClassification",
        "question-answering": "ConvBertForQuestionAnswering",
    },
    prefix="convbert",
    keys={**ELECTRA.keys, "num_attention_heads": None, "span_conv_size": "conv_kernel_size"},
    fixed={**ELECTRA.fixed, "span_convolution": True},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        *(entry for entry in ELECTRA.encoder_rules if ".mlp." not in entry.ours),
        rule("encoder.layers.{i}.mlp.up", "encoder.layer.{i}.intermediate.dense", groups=num_groups),
        rule("encoder.layers.{i}.mlp.down", "encoder.layer.{i}.output.dense", groups=num_groups),
        rule(f"{OURS}.depthwise", f"{THEIRS}.key_conv_attn_layer.depthwise"),
        rule(f"{OURS}.pointwise.weight", f"{THEIRS}.key_conv_attn_layer.pointwise.weight", is_column=True),
        rule(f"{OURS}.pointwise.bias", f"{THEIRS}.key_conv_attn_layer.bias", is_column=True),
        rule(f"{OURS}.kernel", f"{THEIRS}.conv_kernel_layer"),
        rule(f"{OURS}.value", f"{THEIRS}.conv_out_layer"),
    ),
)
