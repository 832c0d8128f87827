"""ESM-2 and ESM-1b (Lin et al., 2022; Rives et al., 2021), encoders of proteins, as transformers stores them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.family import rule
from bertblocks.checkpoints.families.roberta import ROBERTA
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.nn.rope import FREQUENCY_DTYPES, RotaryPosition

LAYER = "encoder.layer.{i}"
FREQUENCIES = "rotary_embeddings.inv_freq"


def read_rest(theirs: Any) -> dict[str, Any]:
    dropout = theirs.hidden_dropout_prob
    return {
        **read_positions(theirs),
        "embedding_norm": bool(theirs.emb_layer_norm_before),
        "token_dropout": bool(theirs.token_dropout),
        "attention_output_dropout": dropout,
        "mlp_output_dropout": dropout,
        "classifier_dropout": dropout,
        "classifier_head_dropout": dropout,
    }


def read_positions(theirs: Any) -> dict[str, Any]:
    kind = theirs.position_embedding_type
    if kind == "rotary":
        # transformers keeps the frequencies in the weights and has no such key
        dtype = getattr(theirs, "rope_frequency_dtype", "float32")
        return {"embd_pos_enc_kind": "none", "block_pos_enc_kind": "rope", "rope_frequency_dtype": dtype}
    if kind != "absolute":
        raise ConfigError(
            f"position_embedding_type is {kind!r} in this esm config; BertBlocks supports 'absolute' and 'rotary' only."
        )
    if theirs.pad_token_id is None:
        raise ConfigError("pad_token_id is None in this esm config; positions count from it, so it must be set.")
    return {"position_offset": theirs.pad_token_id + 1}


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    is_rounded = ours.rope_frequency_dtype != "float32"
    return {
        "position_embedding_type": "rotary" if ours.block_pos_enc_kind == "rope" else "absolute",
        "emb_layer_norm_before": ours.embedding_norm,
        "token_dropout": ours.token_dropout,
        "hidden_dropout_prob": ours.classifier_dropout,
        **({"rope_frequency_dtype": ours.rope_frequency_dtype} if is_rounded else {}),
    }


def frequencies(config: BertBlocksConfig, dtype: str) -> Tensor:
    """The frequencies of RoPE, rounded to a precision and stored in single precision."""
    return RotaryPosition(config.head_dim, config.rope_theta, frequency_dtype=FREQUENCY_DTYPES[dtype]).frequencies()[0]


def read_buffers(tensors: dict[str, Tensor], config: BertBlocksConfig) -> dict[str, Any]:
    """The precision of the frequencies. Old checkpoints may store half precision, which transformers keeps too."""
    if config.block_pos_enc_kind != "rope" or FREQUENCIES not in tensors:
        return {}
    stored = tensors[FREQUENCIES].float()
    for dtype in FREQUENCY_DTYPES:
        if torch.equal(stored, frequencies(config, dtype)):
            return {"rope_frequency_dtype": dtype}
    raise ConfigError(
        f"{FREQUENCIES} does not match rope_theta = {config.rope_theta:g}; BertBlocks computes the frequencies from "
        "rope_theta."
    )


def write_buffers(config: BertBlocksConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    if config.block_pos_enc_kind != "rope":
        return {}
    exact = frequencies(config, config.rope_frequency_dtype)
    return {FREQUENCIES: exact.to(dtype) if dtype == FREQUENCY_DTYPES[config.rope_frequency_dtype] else exact}


ESM = replace(
    ROBERTA,
    name="esm",
    config_class="EsmConfig",
    model_classes={
        "base": "EsmModel",
        "masked-lm": "EsmForMaskedLM",
        "sequence-classification": "EsmForSequenceClassification",
        "token-classification": "EsmForTokenClassification",
    },
    prefix="esm",
    keys={
        "norm_eps": "layer_norm_eps",
        "attention_dropout": "attention_probs_dropout_prob",
        "mask_token_id": "mask_token_id",
        "rope_theta": "rope_theta",
    },
    fixed={
        **ROBERTA.fixed,
        "norm_pos": "pre",
        "hidden_act": "gelu",
        "type_vocab_size": 0,
        # transformers creates this dropout and never applies it
        "embedding_dropout": 0.0,
        "contact_head": True,
    },
    required={**BERT.required, "is_folding_model": False},
    read_rest=read_rest,
    write_rest=write_rest,
    read_buffers=read_buffers,
    write_buffers=write_buffers,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.position.table", "embeddings.position_embeddings"),
        rule("embedding.norm", "embeddings.layer_norm"),
        rule("encoder.layers.{i}.attention_residual.pre_norm", f"{LAYER}.attention.LayerNorm"),
        rule(
            "encoder.layers.{i}.attention.qkv",
            *(f"{LAYER}.attention.self.{part}" for part in ("query", "key", "value")),
        ),
        rule("encoder.layers.{i}.attention.out", f"{LAYER}.attention.output.dense"),
        rule("encoder.layers.{i}.mlp_residual.pre_norm", f"{LAYER}.LayerNorm"),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.intermediate.dense"),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.output.dense"),
        rule("encoder.final_norm", "encoder.emb_layer_norm_after"),
        rule("pooler.dense", "pooler.dense"),
        rule("contact_head", "contact_head.regression"),
    ),
    head_rules={
        **{task: rules for task, rules in ROBERTA.head_rules.items() if task != "question-answering"},
        "masked-lm": (
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.layer_norm"),
            rule("decoder.weight", "lm_head.decoder.weight"),
            rule("decoder.bias", "lm_head.bias"),
        ),
    },
    # rotary checkpoints may have an unused position table
    ignored=(*ROBERTA.ignored, r"^embeddings\.position_embeddings\.weight$", rf"^{FREQUENCIES}$"),
    # old checkpoints repeat the frequencies in every layer; transformers saves them once, as layer "*"
    renamed={
        **ROBERTA.renamed,
        r"encoder\.layer\.(\d+|\*)\.attention\.self\.rotary_embeddings\.": "rotary_embeddings.",
    },
)
