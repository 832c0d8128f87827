"""The text tower of CLIP (Radford et al., 2021): a causal encoder whose last token stands for the text."""

from __future__ import annotations

from bertblocks.checkpoints.families.family import Family, rule

LAYER, OURS = "encoder.layers.{i}", "encoder.layers.{i}"

CLIP_TEXT = Family(
    name="clip_text_model",
    config_class="CLIPTextConfig",
    model_classes={"base": "CLIPTextModel"},
    prefix="text_model",
    keys={
        "tie_word_embeddings": None,
        "hidden_act": "hidden_act",
        "norm_eps": "layer_norm_eps",
        "attention_dropout": "attention_dropout",
    },
    fixed={
        "causal": True,
        "type_vocab_size": 0,
        "norm_pos": "pre",
        "embedding_norm": False,
        "pooler": False,
        "classifier_pooling": "last",
        "classifier_head": "none",
        "embedding_dropout": 0.0,
        "attention_output_dropout": 0.0,
        "mlp_output_dropout": 0.0,
    },
    required={},
    read_rest=lambda theirs: {},
    write_rest=lambda ours: {},
    encoder_rules=(
        rule("embedding.token", "embeddings.token_embedding"),
        rule("embedding.position.table", "embeddings.position_embedding"),
        rule(f"{OURS}.attention_residual.pre_norm", f"{LAYER}.layer_norm1"),
        rule(f"{OURS}.attention.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
        rule(f"{OURS}.attention.out", f"{LAYER}.self_attn.out_proj"),
        rule(f"{OURS}.mlp_residual.pre_norm", f"{LAYER}.layer_norm2"),
        rule(f"{OURS}.mlp.up", f"{LAYER}.mlp.fc1"),
        rule(f"{OURS}.mlp.down", f"{LAYER}.mlp.fc2"),
        rule("encoder.final_norm", "final_layer_norm"),
    ),
    head_rules={"base": ()},
    aliases={"CLIPTextModelWithProjection": "base"},
    ignored=(r"position_ids$",),
)
