"""Llama, Mistral and Qwen3 as encoders: causal as in Qwen3-Embedding, or bidirectional as in LLM2Vec.

transformers' classes are causal. `is_causal: false` in a config says that a model is not; LLM2Vec and others have
classes of their own, whose names BertBlocks recognizes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from torch import Tensor

from bertblocks.checkpoints.families.eurobert import ENCODER_RULES, FIXED, KEYS, read_biases
from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.checkpoints.families.rope import read_rope, write_rope
from bertblocks.config import BertBlocksConfig
from bertblocks.config.aliases import LAYER_TYPE_ALIASES, LAYER_TYPE_NAMES

#: The dropout before a token classifier in transformers, if the config does not say otherwise.
TAGGER_DROPOUT = 0.1
BIDIRECTIONAL = r"^(Llama|Mistral|Qwen3)(Bi|Encoder|Bidirectional)(?=Model|For)"


def prepare(values: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    names = values.get("architectures")
    if not isinstance(names, list) or not names or not re.match(BIDIRECTIONAL, str(names[0])):
        return values
    plain = re.sub(BIDIRECTIONAL, r"\1", names[0]).replace("ForMNTP", "ForCausalLM")
    return {**values, "architectures": [plain], "is_causal": False}


def read_rest(theirs: Any) -> dict[str, Any]:
    theta, scaling = read_rope(theirs.rope_parameters)
    dropout = getattr(theirs, "classifier_dropout", None)
    return {
        **read_windows(theirs),
        "causal": getattr(theirs, "is_causal", True),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "local_rope_scaling": scaling,
        "token_classifier_dropout": TAGGER_DROPOUT if dropout is None else dropout,
    }


def read_windows(theirs: Any) -> dict[str, Any]:
    window = getattr(theirs, "sliding_window", None)
    if window is None:
        return {}
    kinds = getattr(theirs, "layer_types", None) or ["sliding_attention"] * theirs.num_hidden_layers
    layer_types = [LAYER_TYPE_ALIASES.get(kind, kind) for kind in kinds]
    # their window counts the token itself, and only one side
    size = {"local_attention_window_size": 2 * (window - 1)} if "local" in layer_types else {}
    return {"layer_types": layer_types, "local_attention": "local" in layer_types, **size}


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"rope_parameters": write_rope(ours.rope_theta, ours.rope_scaling)}
    if not ours.causal:
        values["is_causal"] = False
    if ours.token_classifier_dropout != TAGGER_DROPOUT:
        values["classifier_dropout"] = ours.token_classifier_dropout
    return values


def window_of(ours: BertBlocksConfig) -> int | None:
    return ours.local_attention_window_size // 2 + 1 if ours.local_attention else None


def make_family(name: str, stem: str, keys: dict[str, str | None], fixed: dict[str, Any]) -> Family:
    return Family(
        name=name,
        config_class=f"{stem}Config",
        model_classes={
            "base": f"{stem}Model",
            "masked-lm": f"{stem}ForCausalLM",
            "sequence-classification": f"{stem}ForSequenceClassification",
            "token-classification": f"{stem}ForTokenClassification",
            "question-answering": f"{stem}ForQuestionAnswering",
        },
        prefix="model",
        prefixes={} if name == "mistral" else {"question-answering": "transformer"},
        keys=keys,
        fixed={
            **FIXED,
            "mlm_head_dense": False,
            "decoder_bias": False,
            "classifier_head": "none",
            "classifier_pooling": "last",
            "classifier_bias": False,
            "token_classifier_bias": True,
            "classifier_dropout": 0.0,
            "qa_dropout": 0.0,
            **fixed,
        },
        required={},
        prepare=prepare,
        read_rest=read_rest,
        write_rest=write_rest,
        encoder_rules=ENCODER_RULES,
        head_rules={
            "base": (),
            "masked-lm": (rule("decoder", "lm_head"),),
            "sequence-classification": (rule("classifier", "score"),),
            "token-classification": (rule("tagger", "score"),),
            "question-answering": (rule("spans", "qa_outputs"),),
        },
        ignored=(r"inv_freq$",),
    )


LLAMA = replace(
    make_family("llama", "Llama", KEYS, {}), read_rest=lambda theirs: {**read_rest(theirs), **read_biases(theirs)}
)
MISTRAL = replace(
    make_family(
        "mistral",
        "Mistral",
        {ours: name for ours, name in KEYS.items() if not ours.endswith("_bias")},
        dict.fromkeys(("attention_qkv_bias", "attention_out_bias", "mlp_in_bias", "mlp_out_bias"), False),
    ),
    write_rest=lambda ours: {**write_rest(ours), "sliding_window": window_of(ours)},
)
QWEN3 = replace(
    make_family(
        "qwen3",
        "Qwen3",
        {ours: name for ours, name in KEYS.items() if ours != "mlp_in_bias"},
        {"qk_norm": True, "mlp_in_bias": False, "mlp_out_bias": False},
    ),
    read_rest=lambda theirs: {**read_rest(theirs), "attention_out_bias": theirs.attention_bias},
    write_rest=lambda ours: {
        **write_rest(ours),
        "layer_types": [LAYER_TYPE_NAMES[kind] for kind in ours.layer_types],
        **({"use_sliding_window": True, "sliding_window": window_of(ours)} if ours.local_attention else {}),
    },
    encoder_rules=(
        *ENCODER_RULES,
        rule("encoder.layers.{i}.attention.query_norm", "layers.{i}.self_attn.q_norm"),
        rule("encoder.layers.{i}.attention.key_norm", "layers.{i}.self_attn.k_norm"),
    ),
)
