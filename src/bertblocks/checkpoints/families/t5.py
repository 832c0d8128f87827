"""The encoders of T5 (Raffel et al., 2020), mT5 and UMT5, which ProtT5 and ByT5 share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.config import BertBlocksConfig

ATTENTION, MLP = "encoder.block.{i}.layer.0", "encoder.block.{i}.layer.1"
OURS = "encoder.layers.{i}"
BIAS = "SelfAttention.relative_attention_bias.weight"
#: The places of the one dropout rate. transformers has one more, after the final norm.
DROPOUTS = ("embedding_dropout", "attention_dropout", "attention_output_dropout", "mlp_dropout", "mlp_output_dropout")
NO_BIASES = dict.fromkeys(("attention_qkv_bias", "attention_out_bias", "mlp_in_bias", "mlp_out_bias"), False)


def read_rest(theirs: Any) -> dict[str, Any]:
    return {
        **dict.fromkeys(DROPOUTS, theirs.dropout_rate),
        "mlp_type": "glu" if theirs.is_gated_act else "mlp",
        "hidden_act": theirs.dense_act_fn,
    }


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    # their name of gelu_new in a gated network
    act = "gelu" if (ours.mlp_type, ours.hidden_act) == ("glu", "gelu_new") else ours.hidden_act
    return {
        "dropout_rate": ours.embedding_dropout,
        "feed_forward_proj": f"gated-{act}" if ours.mlp_type == "glu" else act,
    }


T5 = Family(
    name="t5",
    config_class="T5Config",
    model_classes={"base": "T5EncoderModel", "token-classification": "T5ForTokenClassification"},
    aliases={"T5Model": "base", "T5ForConditionalGeneration": "base", "T5WithLMHeadModel": "base"},
    prefix="transformer",
    keys={
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        "norm_eps": "layer_norm_epsilon",
        "relative_attention_num_buckets": "relative_attention_num_buckets",
        "relative_attention_max_distance": "relative_attention_max_distance",
        "token_classifier_dropout": "classifier_dropout",
        **dict.fromkeys(("max_position_embeddings", "bos_token_id", "initializer_range", "tie_word_embeddings")),
    },
    fixed={
        **NO_BIASES,
        "attention_scale": 1.0,
        "type_vocab_size": 0,
        "norm_fn": "rms",
        "norm_pos": "pre",
        "norm_bias": False,
        "embedding_norm": False,
        "embd_pos_enc_kind": "none",
        "block_pos_enc_kind": "t5",
        "pooler": False,
    },
    required={"is_decoder": False},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "shared"),
        rule("encoder.position.table", f"encoder.block.0.layer.0.{BIAS}"),
        rule(f"{OURS}.attention_residual.pre_norm", f"{ATTENTION}.layer_norm"),
        rule(f"{OURS}.attention.qkv", *(f"{ATTENTION}.SelfAttention.{part}" for part in "qkv")),
        rule(f"{OURS}.attention.out", f"{ATTENTION}.SelfAttention.o"),
        rule(f"{OURS}.mlp_residual.pre_norm", f"{MLP}.layer_norm"),
        rule(f"{OURS}.mlp.up", f"{MLP}.DenseReluDense.wi", when=lambda config: config.mlp_type == "mlp"),
        rule(
            f"{OURS}.mlp.up",
            f"{MLP}.DenseReluDense.wi_0",
            f"{MLP}.DenseReluDense.wi_1",
            when=lambda config: config.mlp_type == "glu",
        ),
        rule(f"{OURS}.mlp.down", f"{MLP}.DenseReluDense.wo"),
        rule("encoder.final_norm", "encoder.final_layer_norm"),
    ),
    head_rules={"base": (), "token-classification": (rule("tagger", "classifier"),)},
    # the embeddings under their other name
    derived=(r"^encoder\.embed_tokens\.",),
)
MT5 = replace(
    T5,
    name="mt5",
    config_class="MT5Config",
    model_classes={task: f"M{name}" for task, name in T5.model_classes.items()},
    aliases={f"M{name}": task for name, task in T5.aliases.items()},
)
UMT5 = replace(
    T5,
    name="umt5",
    config_class="UMT5Config",
    model_classes={task: f"UM{name}" for task, name in T5.model_classes.items()},
    aliases={f"UM{name}": task for name, task in T5.aliases.items()},
    fixed={**T5.fixed, "relative_attention_shared": False},
    encoder_rules=(
        *(entry for entry in T5.encoder_rules if entry.ours != "encoder.position.table"),
        rule(f"{OURS}.attention.position.table", f"{ATTENTION}.{BIAS}"),
    ),
)
