"""DeBERTa v1, v2 and v3 (He et al., 2021; 2023) as transformers stores them: the last two share a `model_type`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.nn.disentangled import DISENTANGLED_SCORES

LAYER = "encoder.layer.{i}"
SELF, OURS = f"{LAYER}.attention.self", "encoder.layers.{i}.attention"


def reject(theirs: Any, key: str, reason: str) -> None:
    raise ConfigError(f"{key} is {getattr(theirs, key)!r} in this {theirs.model_type} config; {reason}.")


def read_rest(theirs: Any) -> dict[str, Any]:
    dropout, hidden = theirs.hidden_dropout_prob, theirs.hidden_size
    for key in ("pooler_hidden_size", "attention_head_size"):
        units = getattr(theirs, key, None)
        times = theirs.num_attention_heads if key == "attention_head_size" else 1
        if units is not None and units * times != hidden:
            reject(theirs, key, f"BertBlocks supports {hidden // times} only")
    if getattr(theirs, "talking_head", False):
        reject(theirs, "talking_head", "BertBlocks does not mix heads")
    embedding_size = getattr(theirs, "embedding_size", hidden)
    cls_dropout = getattr(theirs, "cls_dropout", None)
    return {
        **read_positions(theirs),
        "embedding_size": embedding_size,
        "embedding_projection_bias": embedding_size == hidden,
        "embedding_norm_after_projection": embedding_size != hidden,
        # the newer masked-LM head multiplies with the embeddings, whatever the config says
        "tie_word_embeddings": theirs.tie_word_embeddings or not theirs.legacy,
        "embedding_dropout": dropout,
        "attention_output_dropout": dropout,
        "mlp_output_dropout": dropout,
        "token_classifier_dropout": dropout,
        "classifier_dropout": dropout if cls_dropout is None else cls_dropout,
    }


def read_positions(theirs: Any) -> dict[str, Any]:
    embedded = {"embd_pos_enc_kind": "learned" if theirs.position_biased_input else "none"}
    scores = theirs.pos_att_type or []
    if not theirs.relative_attention:
        if scores:
            reject(theirs, "pos_att_type", "without relative_attention it only scales scores; it must be empty")
        return embedded
    if not scores or not set(scores) <= set(DISENTANGLED_SCORES):
        reject(theirs, "pos_att_type", f"with relative_attention it must hold {' or '.join(DISENTANGLED_SCORES)}")
    distance = theirs.max_relative_positions
    return {
        **embedded,
        "block_pos_enc_kind": "disentangled",
        "disentangled_scores": list(scores),
        "disentangled_max_distance": distance if distance > 0 else theirs.max_position_embeddings,
    }


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    is_relative = ours.block_pos_enc_kind == "disentangled"
    at_limit = not is_relative or ours.disentangled_max_distance == ours.max_position_embeddings
    values = {
        "legacy": is_legacy(ours),
        "tie_word_embeddings": ours.tie_word_embeddings,
        "hidden_dropout_prob": ours.embedding_dropout,
        "position_biased_input": ours.embd_pos_enc_kind == "learned",
        "relative_attention": is_relative,
        "pos_att_type": ours.disentangled_scores if is_relative else None,
        "max_relative_positions": -1 if at_limit else ours.disentangled_max_distance,
    }
    if ours.embedding_size != ours.hidden_size:
        values["embedding_size"] = ours.embedding_size
    if ours.classifier_dropout != ours.embedding_dropout:
        values["cls_dropout"] = ours.classifier_dropout
    return values


def is_legacy(config: BertBlocksConfig) -> bool:
    """True if the masked-LM head needs transformers' older layout, which has a decoder matrix of its own."""
    return not config.tie_word_embeddings or config.embedding_size != config.hidden_size


def is_new(config: BertBlocksConfig) -> bool:
    return not is_legacy(config)


def heads_first(config: BertBlocksConfig) -> Tensor:
    """The rows of v1's projection, which holds queries, keys and values of one head after the other."""
    heads, size = config.num_attention_heads, config.head_dim
    return torch.arange(3 * heads * size).view(heads, 3, size).transpose(0, 1).flatten()


DEBERTA = Family(
    name="deberta",
    config_class="DebertaConfig",
    model_classes={
        "base": "DebertaModel",
        "masked-lm": "DebertaForMaskedLM",
        "sequence-classification": "DebertaForSequenceClassification",
        "token-classification": "DebertaForTokenClassification",
        "question-answering": "DebertaForQuestionAnswering",
    },
    prefix="deberta",
    keys={
        "hidden_act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "type_vocab_size": "type_vocab_size",
        "attention_dropout": "attention_probs_dropout_prob",
        "classifier_head_act": "pooler_hidden_act",
        "classifier_head_dropout": "pooler_dropout",
        "tie_word_embeddings": None,
    },
    fixed={"pooler": False, "classifier_head": "dense", "attention_key_bias": False},
    required={},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.position.table", "embeddings.position_embeddings"),
        rule("embedding.token_type", "embeddings.token_type_embeddings"),
        rule("embedding.projection", "embeddings.embed_proj"),
        rule("embedding.norm", "embeddings.LayerNorm"),
        rule("encoder.position.table", "encoder.rel_embeddings"),
        rule(f"{OURS}.qkv", f"{SELF}.in_proj", row_order=heads_first),
        rule(f"{OURS}.query_bias", f"{SELF}.q_bias"),
        rule(f"{OURS}.value_bias", f"{SELF}.v_bias"),
        rule(f"{OURS}.position.key", f"{SELF}.pos_proj"),
        rule(f"{OURS}.position.query", f"{SELF}.pos_q_proj"),
        rule(f"{OURS}.out", f"{LAYER}.attention.output.dense"),
        rule(f"{OURS}_residual.post_norm", f"{LAYER}.attention.output.LayerNorm"),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.intermediate.dense"),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.output.dense"),
        rule("encoder.layers.{i}.mlp_residual.post_norm", f"{LAYER}.output.LayerNorm"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "cls.predictions.transform.dense", when=is_legacy),
            rule("head.norm", "cls.predictions.transform.LayerNorm", when=is_legacy),
            rule("decoder.weight", "cls.predictions.decoder.weight", when=is_legacy),
            rule("decoder.bias", "cls.predictions.bias", when=is_legacy),
            rule("decoder.bias", "cls.predictions.decoder.bias", when=is_legacy),
            rule("head.dense", "lm_predictions.lm_head.dense", when=is_new),
            rule("head.norm", "lm_predictions.lm_head.LayerNorm", when=is_new),
            rule("decoder.bias", "lm_predictions.lm_head.bias", when=is_new),
        ),
        "sequence-classification": (rule("classifier_head.dense", "pooler.dense"), rule("classifier", "classifier")),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    # the position table of a model that does not use it
    ignored=(r"position_ids$", r"^embeddings\.position_embeddings\."),
    renamed={r"\.gamma$": ".weight", r"\.beta$": ".bias"},
)


def read_v2(theirs: Any) -> dict[str, Any]:
    options = read_rest(theirs)
    norm, kernel = getattr(theirs, "norm_rel_ebd", "none"), getattr(theirs, "conv_kernel_size", 0)
    if norm not in ("none", "layer_norm"):
        reject(theirs, "norm_rel_ebd", "BertBlocks supports 'none' and 'layer_norm' only")
    if options.get("block_pos_enc_kind") == "disentangled":
        buckets = getattr(theirs, "position_buckets", -1)
        options["disentangled_num_buckets"] = buckets if buckets > 0 else None
        options["disentangled_norm"] = norm == "layer_norm"
        options["disentangled_share_projections"] = getattr(theirs, "share_att_key", False)
    if kernel > 0:
        options["input_conv_size"] = kernel
        options["input_conv_groups"] = getattr(theirs, "conv_groups", 1)
        options["input_conv_act"] = getattr(theirs, "conv_act", "tanh")
    return options


def write_v2(ours: BertBlocksConfig) -> dict[str, Any]:
    values = write_rest(ours)
    if values["relative_attention"]:
        values["position_buckets"] = ours.disentangled_num_buckets or -1
        values["norm_rel_ebd"] = "layer_norm" if ours.disentangled_norm else "none"
        values["share_att_key"] = ours.disentangled_share_projections
    if ours.input_conv_size:
        values["conv_kernel_size"] = ours.input_conv_size
        values["conv_groups"], values["conv_act"] = ours.input_conv_groups, ours.input_conv_act
    return values


V1_ATTENTION = ("qkv", "query_bias", "value_bias", "position.key", "position.query")

DEBERTA_V2 = replace(
    DEBERTA,
    name="deberta-v2",
    config_class="DebertaV2Config",
    model_classes={
        **{task: name.replace("Deberta", "DebertaV2") for task, name in DEBERTA.model_classes.items()},
        # v3's discriminator, which transformers does not have
        "replaced-token-detection": "ReplacedTokenDetectionModel",
    },
    aliases={"DebertaV2ForMultipleChoice": "sequence-classification"},
    fixed={"pooler": False, "classifier_head": "dense", "detector_norm": True},
    read_rest=read_v2,
    write_rest=write_v2,
    encoder_rules=(
        *(entry for entry in DEBERTA.encoder_rules if entry.ours not in [f"{OURS}.{name}" for name in V1_ATTENTION]),
        rule("encoder.position.norm", "encoder.LayerNorm"),
        rule("encoder.convolution.conv", "encoder.conv.conv"),
        rule("encoder.convolution.norm", "encoder.conv.LayerNorm"),
        rule(f"{OURS}.qkv", *(f"{SELF}.{part}_proj" for part in ("query", "key", "value"))),
        rule(f"{OURS}.position.key", f"{SELF}.pos_key_proj"),
        rule(f"{OURS}.position.query", f"{SELF}.pos_query_proj"),
    ),
    head_rules={
        **DEBERTA.head_rules,
        "replaced-token-detection": (
            rule("detector_head.norm", "mask_predictions.LayerNorm"),
            rule("detector_head.dense", "mask_predictions.dense"),
            rule("detector", "mask_predictions.classifier"),
        ),
    },
    renamed={**DEBERTA.renamed, r"^mask_predictions\.classifer\.": "mask_predictions.classifier."},
)
