"""Jina embeddings v3 (Sturua et al., 2024): XLM-RoBERTa with RoPE, and LoRA adapters for tasks.

transformers has the encoder. The published files have other names, the `model_type` of XLM-RoBERTa, and all adapters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from bertblocks.checkpoints.families.bert import read_rest as read_bert_rest
from bertblocks.checkpoints.families.bert import write_rest as write_bert_rest
from bertblocks.checkpoints.families.family import rule
from bertblocks.checkpoints.families.nomic_bert import never
from bertblocks.checkpoints.families.roberta import ROBERTA
from bertblocks.checkpoints.families.rope import read_rope, write_rope
from bertblocks.config import BertBlocksConfig
from bertblocks.core.registry import nearest

LAYER, OURS = "layers.{i}", "encoder.layers.{i}"
WEIGHT = ".parametrizations.weight."


def is_published(values: dict[str, Any]) -> bool:
    return values.get("model_type") == "xlm-roberta" and values.get("position_embedding_type") == "rotary"


def prepare(values: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    if not is_published(values):
        return values
    theta = values.get("rotary_emb_base", 10_000.0)
    names = values.get("architectures")
    classes = [str(name).replace("XLMRoberta", "JinaEmbeddingsV3") for name in names] if isinstance(names, list) else []
    return {
        **{key: value for key, value in values.items() if key != "position_embedding_type"},
        "model_type": JINA_V3.name,
        "architectures": [name.replace("LoRA", "Model") for name in classes] or None,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


def merge_adapter(tensors: dict[str, Tensor], config: Any, adapter: str | None) -> dict[str, Tensor]:
    """Plain weights: W + alpha / rank * B A of one adapter, or W without an adapter."""
    names = getattr(config, "lora_adaptations", None) or []
    if adapter is not None and adapter not in names:
        known = ", ".join(names) or "none"
        raise ValueError(f"adapter is {adapter!r}; the checkpoint has {known}{nearest(adapter, names)}.")
    merged = {name: tensor for name, tensor in tensors.items() if WEIGHT not in name}
    for name, tensor in tensors.items():
        stem, found, part = name.partition(WEIGHT)
        if not found or part != "original":
            continue
        if adapter is not None:
            a, b = (tensors[f"{stem}{WEIGHT}0.lora_{side}"][names.index(adapter)] for side in "AB")
            # A of an embedding has a row per token
            update = a @ b if a.shape[0] == tensor.shape[0] and b.shape[-1] == tensor.shape[1] else b @ a
            tensor = tensor + update * (config.lora_alpha / config.lora_rank)
        merged[f"{stem}.weight"] = tensor
    return merged


def read_rest(theirs: Any) -> dict[str, Any]:
    options = read_bert_rest(theirs)
    theta, scaling = read_rope(theirs.rope_parameters)
    return {
        **options,
        "classifier_head_dropout": options["classifier_dropout"],
        "rope_theta": theta,
        "rope_scaling": scaling,
    }


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {**write_bert_rest(ours), "rope_parameters": write_rope(ours.rope_theta, ours.rope_scaling)}


JINA_V3 = replace(
    ROBERTA,
    name="jina_embeddings_v3",
    config_class="JinaEmbeddingsV3Config",
    matches=is_published,
    prepare=prepare,
    merge_adapter=merge_adapter,
    model_classes={task: name.replace("Roberta", "JinaEmbeddingsV3") for task, name in ROBERTA.model_classes.items()},
    fixed={**ROBERTA.fixed, "embd_pos_enc_kind": "none", "block_pos_enc_kind": "rope"},
    required={},
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.token_type", "embeddings.token_type_embeddings"),
        rule("embedding.norm", "embeddings.LayerNorm"),
        rule(f"{OURS}.attention.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
        rule(f"{OURS}.attention.qkv", f"{LAYER}.mixer.Wqkv", when=never),
        rule(f"{OURS}.attention.out", f"{LAYER}.self_attn.o_proj"),
        rule(f"{OURS}.attention_residual.post_norm", f"{LAYER}.post_attention_layernorm"),
        rule(f"{OURS}.mlp.up", f"{LAYER}.mlp.fc1"),
        rule(f"{OURS}.mlp.down", f"{LAYER}.mlp.fc2"),
        rule(f"{OURS}.mlp_residual.post_norm", f"{LAYER}.post_mlp_layernorm"),
        rule("pooler.dense", "pooler.dense"),
    ),
    renamed={
        r"\bencoder\.layers\.": "layers.",
        r"\bemb_ln\.": "embeddings.LayerNorm.",
        r"\bmixer\.out_proj\.": "self_attn.o_proj.",
        r"\bnorm1\.": "post_attention_layernorm.",
        r"\bnorm2\.": "post_mlp_layernorm.",
    },
)
