"""A tiny transformers config of every family, for the tests that run over all of them.

A family that is registered without a case here fails `test_every_family_has_a_case`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers import BertConfig, ModernBertConfig, PreTrainedConfig

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class FamilyCase:
    """How to make a tiny config, with room for sequences of 300 tokens."""

    make_config: Callable[..., PreTrainedConfig]
    #: Options that turn dropout off, so that gradients can be compared.
    no_dropout: dict[str, Any] = field(default_factory=dict)
    #: Other configs of the family that outputs must agree on too, each a set of options.
    variants: tuple[dict[str, Any], ...] = ()


FAMILY_CASES: dict[str, FamilyCase] = {
    "bert": FamilyCase(
        make_config=lambda **options: BertConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        no_dropout={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3},
            {"tie_word_embeddings": False, "classifier_dropout": 0.3},
        ),
    ),
    "modernbert": FamilyCase(
        make_config=lambda **options: ModernBertConfig(
            **{
                **SIZES,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "cls_token_id": 1,
                "sep_token_id": 2,
                **options,
            }
        ),
        variants=(
            {"classifier_pooling": "mean", "local_attention": 33},
            {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
            {"hidden_activation": "silu", "classifier_activation": "relu", "decoder_bias": False},
            {"tie_word_embeddings": False, "global_rope_theta": 500.0, "local_rope_theta": 7.0},
        ),
    ),
}
