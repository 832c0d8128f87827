"""RoFormer (Su et al., 2021): BERT with RoPE on pairs of neighbouring units, from a table that files repeat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.family import rule
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError

TABLE = "encoder.embed_positions.weight"
DROPOUTS = (
    "embedding_dropout",
    "attention_output_dropout",
    "mlp_output_dropout",
    "classifier_dropout",
    "classifier_head_dropout",
)


def read_rest(theirs: Any) -> dict[str, Any]:
    return {**dict.fromkeys(DROPOUTS, theirs.hidden_dropout_prob), "classifier_head_act": theirs.hidden_act}


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": ours.embedding_dropout}


def sinusoids(config: BertBlocksConfig) -> Tensor:
    """Sines, then cosines, of every position: `[positions, head_dim]`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float64)
    angles = positions[:, None] / 10_000.0**exponents
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def read_buffers(tensors: dict[str, Tensor], config: BertBlocksConfig) -> dict[str, Any]:
    """Nothing, but a table that differs from the formula is an error: BertBlocks computes it."""
    stored = tensors.get(TABLE)
    expected = sinusoids(config)
    if stored is not None and (
        stored.shape != expected.shape or not torch.allclose(stored.double(), expected, rtol=0, atol=0.01)
    ):
        raise ConfigError(f"{TABLE} does not hold sines and cosines of positions, which BertBlocks computes.")
    return {}


def write_buffers(config: BertBlocksConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    return {TABLE: sinusoids(config).float().to(dtype)}


ROFORMER = replace(
    BERT,
    name="roformer",
    aliases={},
    config_class="RoFormerConfig",
    model_classes={
        task: name.replace("Bert", "RoFormer") for task, name in BERT.model_classes.items() if task != "pretraining"
    },
    prefix="roformer",
    pooler_option=None,
    keys={**BERT.keys, "embedding_size": "embedding_size"},
    fixed={
        "embd_pos_enc_kind": "none",
        "block_pos_enc_kind": "rope",
        "rope_interleaved": True,
        "pooler": False,
        "classifier_head": "dense",
    },
    required={**BERT.required, "rotary_value": False},
    read_rest=read_rest,
    write_rest=write_rest,
    read_buffers=read_buffers,
    write_buffers=write_buffers,
    encoder_rules=(*BERT.encoder_rules, rule("embedding.projection", "embeddings_project")),
    head_rules={
        **{task: rules for task, rules in BERT.head_rules.items() if task != "pretraining"},
        "sequence-classification": (
            rule("classifier_head.dense", "classifier.dense"),
            rule("classifier", "classifier.out_proj"),
        ),
    },
    derived=(rf"^{TABLE}$",),
)
