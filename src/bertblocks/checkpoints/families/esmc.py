"""ESM C (2024), encoders of proteins, as transformers stores them. The layout of their authors is read too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from bertblocks.checkpoints.families.esm import ESM
from bertblocks.checkpoints.families.eurobert import FIXED, KEYS, read_biases
from bertblocks.checkpoints.families.family import rule
from bertblocks.checkpoints.families.llama import QWEN3
from bertblocks.checkpoints.families.roberta import ROBERTA
from bertblocks.checkpoints.families.rope import read_rope, write_rope
from bertblocks.config import BertBlocksConfig

#: The arguments of the authors' class, and transformers' names.
SIZES = {"d_model": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
#: The authors' names of tensors, and transformers'. Two of them are stacked.
PUBLISHED = {
    r"^embed\.": "embed_tokens.",
    r"^transformer\.norm\.": "norm.",
    r"^transformer\.blocks\.": "layers.",
    r"\.attn\.layernorm_qkv\.0\.": ".input_layernorm.",
    r"\.attn\.layernorm_qkv\.1\.": ".self_attn.qkv_proj.",
    r"\.attn\.q_ln\.": ".self_attn.q_norm.",
    r"\.attn\.k_ln\.": ".self_attn.k_norm.",
    r"\.attn\.out_proj\.": ".self_attn.o_proj.",
    r"\.ffn\.0\.": ".post_attention_layernorm.",
    r"\.ffn\.1\.": ".mlp.gate_up_proj.",
    r"\.ffn\.3\.": ".mlp.down_proj.",
    r"^sequence_head\.0\.": "lm_head.dense.",
    r"^sequence_head\.2\.": "lm_head.layer_norm.",
    r"^sequence_head\.3\.": "lm_head.decoder.",
}


def prepare(values: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    """Fills in what the authors' class computes from its sizes. ESM++ has the same tensors and other classes."""
    if not is_published(values):
        return values
    values = {SIZES.get(key, key): value for key, value in values.items() if key != "model_type"}
    width, names = values.get("hidden_size"), values.get("architectures")
    if isinstance(width, int):
        values.setdefault("intermediate_size", (width * 8 // 3 + 255) // 256 * 256)
    if isinstance(names, list):
        return {**values, "architectures": [str(name).replace("ESMplusplus", "Esmc") for name in names]}
    return {**values, "architectures": ["EsmcForMaskedLM"]}


def is_published(values: dict[str, Any]) -> bool:
    is_esmc = values.get("model_type") == "esmc" and "d_model" in values
    return is_esmc or values.get("model_type") == "ESMplusplus"


def read_rest(theirs: Any) -> dict[str, Any]:
    theta, scaling = read_rope(theirs.rope_parameters)
    dropout = theirs.classifier_dropout or 0.0
    return {
        **read_biases(theirs),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "residual_scale": residual_scale(theirs.num_hidden_layers),
        **dict.fromkeys(("classifier_dropout", "classifier_head_dropout"), dropout),
    }


def residual_scale(num_layers: int) -> float:
    return (num_layers / 36) ** -0.5


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {
        "rope_parameters": write_rope(ours.rope_theta, ours.rope_scaling),
        "classifier_dropout": ours.classifier_dropout,
    }


ESMC = replace(
    QWEN3,
    name="esmc",
    matches=is_published,
    config_class="EsmcConfig",
    model_classes={task: name.replace("Esm", "Esmc", 1) for task, name in ESM.model_classes.items()},
    prefix="esmc",
    prefixes={},
    keys={
        **{ours: name for ours, name in KEYS.items() if ours != "norm_eps"},
        "mask_token_id": "mask_token_id",
    },
    fixed={
        **FIXED,
        "norm_fn": "layer",
        "norm_bias": True,
        "norm_eps": 1e-5,
        "final_norm_bias": False,
        "qk_norm": True,
        "qk_norm_fn": "layer",
        "qk_norm_across_heads": True,
        "mlm_head_act": "gelu",
        "classifier_head": "dense",
    },
    required={"tie_word_embeddings": False},
    prepare=prepare,
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        *QWEN3.encoder_rules,
        rule("encoder.layers.{i}.attention.qkv", "layers.{i}.self_attn.qkv_proj", when=lambda config: False),
        rule("encoder.layers.{i}.mlp.up", "layers.{i}.mlp.gate_up_proj", when=lambda config: False),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.layer_norm"),
            rule("decoder", "lm_head.decoder"),
        ),
        "sequence-classification": ROBERTA.head_rules["sequence-classification"],
        "token-classification": (rule("tagger", "score"),),
    },
    renamed=PUBLISHED,
)
