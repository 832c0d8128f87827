"""MPNet (Song et al., 2020) as transformers stores it: RoBERTa without token types and with T5's attention biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.family import check_absolute_positions, rule
from bertblocks.checkpoints.families.roberta import ROBERTA
from bertblocks.config import BertBlocksConfig

LAYER = "encoder.layer.{i}"
#: The padding id that positions count from, whatever the config says.
PADDING = 1


def read_rest(theirs: Any) -> dict[str, Any]:
    check_absolute_positions(theirs)
    places = (
        "embedding_dropout",
        "attention_output_dropout",
        "mlp_output_dropout",
        "classifier_head_dropout",
        "classifier_dropout",
    )
    return dict.fromkeys(places, theirs.hidden_dropout_prob)


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": ours.embedding_dropout}


MPNET = replace(
    ROBERTA,
    name="mpnet",
    config_class="MPNetConfig",
    model_classes={task: name.replace("Roberta", "MPNet") for task, name in ROBERTA.model_classes.items()},
    prefix="mpnet",
    keys={
        "hidden_act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    fixed={
        **ROBERTA.fixed,
        "type_vocab_size": 0,
        "position_offset": PADDING + 1,
        "block_pos_enc_kind": "t5",
        "relative_attention_num_buckets": 32,
    },
    # the model in transformers always uses 32 buckets
    required={"pad_token_id": PADDING, "relative_attention_num_buckets": 32},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.position.table", "embeddings.position_embeddings"),
        rule("embedding.norm", "embeddings.LayerNorm"),
        rule("encoder.position.table", "encoder.relative_attention_bias.weight"),
        rule("encoder.layers.{i}.attention.qkv", *(f"{LAYER}.attention.attn.{part}" for part in "qkv")),
        rule("encoder.layers.{i}.attention.out", f"{LAYER}.attention.attn.o"),
        rule("encoder.layers.{i}.attention_residual.post_norm", f"{LAYER}.attention.LayerNorm"),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.intermediate.dense"),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.output.dense"),
        rule("encoder.layers.{i}.mlp_residual.post_norm", f"{LAYER}.output.LayerNorm"),
        rule("pooler.dense", "pooler.dense"),
    ),
)
