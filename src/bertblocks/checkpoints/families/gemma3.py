"""The text model of Gemma 3 (2025) as an encoder: bidirectional as in EmbeddingGemma, or causal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.eurobert import KEYS
from bertblocks.checkpoints.families.family import rule
from bertblocks.checkpoints.families.llama import QWEN3
from bertblocks.checkpoints.families.rope import read_layers, write_layers
from bertblocks.config import BertBlocksConfig

LAYER, OURS = "layers.{i}", "encoder.layers.{i}"
NORMS = {
    "attention_residual.pre_norm": "input_layernorm",
    "attention_residual.post_norm": "post_attention_layernorm",
    "mlp_residual.pre_norm": "pre_feedforward_layernorm",
    "mlp_residual.post_norm": "post_feedforward_layernorm",
}


def read_rest(theirs: Any) -> dict[str, Any]:
    layers = read_layers(theirs)
    # a token sees those at a smaller distance than their window
    window = {"local_attention_window_size": 2 * (theirs.sliding_window - 1)} if layers["local_attention"] else {}
    return {
        **layers,
        **window,
        "causal": not theirs.use_bidirectional_attention,
        "embedding_scale": theirs.hidden_size**0.5,
        "attention_scale": theirs.query_pre_attn_scalar**-0.5,
        "attention_out_bias": theirs.attention_bias,
    }


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    # their configs hold the whole window of a bidirectional model, and one side of a causal one
    size = ours.local_attention_window_size
    window = {"sliding_window": size // 2 + 1 if ours.causal else size} if ours.local_attention else {}
    return {
        **write_layers(ours),
        **window,
        "use_bidirectional_attention": not ours.causal,
        "query_pre_attn_scalar": round(ours.attention_scale**-2),
    }


GEMMA3 = replace(
    QWEN3,
    name="gemma3_text",
    config_class="Gemma3TextConfig",
    model_classes={
        "base": "Gemma3TextModel",
        "masked-lm": "Gemma3ForCausalLM",
        "sequence-classification": "Gemma3TextForSequenceClassification",
    },
    prefixes={},
    prepare=None,
    keys={
        **{ours: name for ours, name in KEYS.items() if ours not in ("mlp_in_bias", "hidden_act")},
        "hidden_act": "hidden_activation",
    },
    fixed={**QWEN3.fixed, "norm_pos": "sandwich", "norm_weight": "one_plus"},
    required={"final_logit_softcapping": None, "attn_logit_softcapping": None},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        *(entry for entry in QWEN3.encoder_rules if not entry.ours.endswith("pre_norm")),
        *(rule(f"{OURS}.{ours}", f"{LAYER}.{theirs}") for ours, theirs in NORMS.items()),
    ),
    head_rules={task: QWEN3.head_rules[task] for task in ("base", "masked-lm", "sequence-classification")},
)
