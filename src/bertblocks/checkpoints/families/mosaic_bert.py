"""MosaicBERT (Portes et al., 2023), DNABERT-2 and Jina BERT v2: BERT with ALiBi and a gated feed-forward network.

Their authors publish them with the `model_type` "bert" and code of their own; other keys tell them from BERT.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import BertConfig

from bertblocks.checkpoints.families.bert import ATTENTION, BERT
from bertblocks.checkpoints.families.bert import read_rest as read_bert_rest
from bertblocks.checkpoints.families.bert import write_rest as write_bert_rest
from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError

LAYER, OURS = "encoder.layer.{i}", "encoder.layers.{i}"
FIXED = {"mlp_type": "glu", "mlp_in_bias": False, "embd_pos_enc_kind": "none", "block_pos_enc_kind": "alibi"}
REPLACED = ("position.table", ".mlp.up", ".mlp.down", "mlp_residual.post_norm")
ENCODER_RULES = (
    *(entry for entry in BERT.encoder_rules if not entry.ours.endswith(REPLACED)),
    rule(f"{OURS}.mlp.up", f"{LAYER}.mlp.gated_layers"),
    rule(f"{OURS}.mlp.down", f"{LAYER}.mlp.wo"),
    rule(f"{OURS}.mlp_residual.post_norm", f"{LAYER}.mlp.layernorm"),
)


class MosaicBertConfig(BertConfig):
    """BERT's keys, and the length up to which MosaicBERT's code prepares ALiBi."""

    alibi_starting_size: int = 512


class JinaBertConfig(BertConfig):
    """BERT's keys, and the kind of feed-forward network."""

    position_embedding_type: str = "alibi"
    feed_forward_type: str = "geglu"
    emb_pooler: str | None = "mean"


def read_rest(theirs: Any) -> dict[str, Any]:
    # dropout is inside the feed-forward network instead of after it
    return {**read_bert_rest(theirs), "mlp_dropout": theirs.hidden_dropout_prob, "mlp_output_dropout": 0.0}


def is_mosaic_bert(values: dict[str, Any]) -> bool:
    return values.get("model_type") == "bert" and "alibi_starting_size" in values


MOSAIC_BERT = Family(
    name="mosaic-bert",
    config_class=MosaicBertConfig,
    matches=is_mosaic_bert,
    model_classes={
        "base": "BertModel",
        "masked-lm": "BertForMaskedLM",
        "sequence-classification": "BertForSequenceClassification",
    },
    prefix="bert",
    keys={ours: name for ours, name in BERT.keys.items() if ours != "norm_eps"},
    fixed={**FIXED, "norm_eps": 1e-12},
    # the masked-LM head uses these values, whatever the config says
    required={**BERT.required, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    read_rest=read_rest,
    write_rest=write_bert_rest,
    encoder_rules=(
        *(entry for entry in ENCODER_RULES if not entry.ours.endswith("qkv")),
        rule(f"{OURS}.attention.qkv", f"{ATTENTION}.self.Wqkv"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "cls.predictions.transform.dense"),
            rule("head.norm", "cls.predictions.transform.LayerNorm"),
            rule("decoder", "cls.predictions.decoder"),
        ),
        "sequence-classification": (rule("classifier", "classifier"),),
    },
    ignored=BERT.ignored,
    derived=(r"encoder\.alibi$",),
    renamed=BERT.renamed,
)

#: The activation of each kind of gated feed-forward network.
GATES = {"geglu": "gelu", "reglu": "relu"}


def read_jina(theirs: Any) -> dict[str, Any]:
    kind = theirs.feed_forward_type
    if kind not in GATES:
        raise ConfigError(
            f"feed_forward_type is {kind!r} in this jina-bert-v2 config; BertBlocks supports {' and '.join(GATES)}."
        )
    return {**read_rest(theirs), "hidden_act": GATES[kind]}


def write_jina(ours: BertBlocksConfig) -> dict[str, Any]:
    kinds = {name: kind for kind, name in GATES.items()}
    return {**write_bert_rest(ours), "feed_forward_type": kinds.get(ours.hidden_act, "geglu")}


JINA_BERT = replace(
    MOSAIC_BERT,
    name="jina-bert-v2",
    config_class=JinaBertConfig,
    matches=lambda values: values.get("model_type") == "bert" and values.get("position_embedding_type") == "alibi",
    model_classes={task: f"Jina{name}" for task, name in BERT.model_classes.items() if task != "pretraining"},
    keys={"mlm_head_act" if ours == "hidden_act" else ours: name for ours, name in BERT.keys.items()},
    fixed=FIXED,
    required={**BERT.required, "position_embedding_type": "alibi"},
    read_rest=read_jina,
    write_rest=write_jina,
    encoder_rules=ENCODER_RULES,
    head_rules={task: rules for task, rules in BERT.head_rules.items() if task != "pretraining"},
)
