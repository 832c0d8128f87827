"""A tiny transformers config of every family, for the tests that run over all of them.

A family that is registered without a case here fails `test_every_family_has_a_case`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import (
    AlbertConfig,
    BertConfig,
    BertGenerationConfig,
    CamembertConfig,
    CLIPTextConfig,
    ConvBertConfig,
    Data2VecTextConfig,
    DebertaConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ErnieConfig,
    EsmcConfig,
    EsmConfig,
    EuroBertConfig,
    Gemma3TextConfig,
    GteConfig,
    IBertConfig,
    JinaEmbeddingsV3Config,
    LlamaConfig,
    MegatronBertConfig,
    MistralConfig,
    ModernBertConfig,
    ModernBertDecoderConfig,
    MPNetConfig,
    MT5Config,
    NomicBertConfig,
    PreTrainedConfig,
    Qwen3Config,
    RemBertConfig,
    RobertaConfig,
    RobertaPreLayerNormConfig,
    RoFormerConfig,
    SplinterConfig,
    T5Config,
    UltrabertConfig,
    UMT5Config,
    XLMRobertaConfig,
    XLMRobertaXLConfig,
)

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
    """How to build a tiny config for sequences of up to 300 tokens."""

    make_config: Callable[..., PreTrainedConfig]
    #: Options that turn dropout off, so that gradients can be compared.
    no_dropout: dict[str, Any] = field(default_factory=dict)
    #: Other configs of the family that outputs must agree on too, each a set of options.
    variants: tuple[dict[str, Any], ...] = ()
    #: Outputs of transformers that BertBlocks does not have.
    other_outputs: frozenset[str] = frozenset({"past_key_values"})
    #: Whether transformers' last hidden state comes after the final norm, as in BertBlocks.
    normalizes_last_state: bool = True
    #: Restores weights that are not free, after the tests have changed all of them at random.
    restore: Callable[[Any], None] = lambda model: None


def roberta_case(config_class: Callable[..., PreTrainedConfig], **sizes: Any) -> FamilyCase:
    """Padding is 0 as in the batches of the tests, so positions start at 1."""
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 320}
    return FamilyCase(
        make_config=lambda **options: config_class(**{**SIZES, **sizes, **special, **options}),
        no_dropout={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 1},
            {"classifier_dropout": 0.3, "max_position_embeddings": 151},
        ),
    )


def restore_bert(model: Any) -> None:
    """An untied decoder has its own bias and does not use the other one."""
    if hasattr(model, "cls"):
        model.cls.predictions.bias.copy_(model.cls.predictions.decoder.bias)


def restore_roformer(model: Any) -> None:
    """A table of sines and cosines."""
    restore_bert(model)
    table = model.base_model.encoder.embed_positions
    table.weight.copy_(table.create_weight())


def hide_padding_from_convolutions(model: Any) -> None:
    """In ConvBERT of transformers, the convolutions of the last tokens read padding; here they read zeros."""
    real: list[torch.Tensor] = []

    def remember(module: Any, arguments: Any, options: Any) -> None:
        ids = options.get("input_ids", arguments[0] if arguments else None)
        mask = options.get("attention_mask", arguments[1] if len(arguments) > 1 else None)
        real[:] = [torch.ones(ids.shape) if mask is None else mask.float()]

    model.base_model.register_forward_pre_hook(remember, with_kwargs=True)
    for layer in model.base_model.encoder.layer:
        attention = layer.attention.self
        attention.key_conv_attn_layer.register_forward_pre_hook(lambda _, args: (args[0] * real[0][:, None],))
        attention.conv_out_layer.register_forward_hook(lambda _, args, out: out * real[0][..., None])


def show_later_tokens(model: Any) -> None:
    """If a config asks for it, makes a decoder of transformers bidirectional by a mask for every pair of tokens."""
    if getattr(model.config, "is_causal", True):
        return

    def widen(module: Any, arguments: Any, options: Any) -> Any:
        mask = options["attention_mask"]  # [rows, length]
        index, window = torch.arange(mask.shape[1]), getattr(model.config, "sliding_window", None) or mask.shape[1]
        visible = (mask[:, None, None] == 1) & ((index[:, None] - index).abs() < window)
        return arguments, {**options, "attention_mask": torch.where(visible, 0.0, torch.finfo(torch.float32).min)}

    model.base_model.register_forward_pre_hook(widen, with_kwargs=True)


def llama_case(config_class: Callable[..., PreTrainedConfig], *variants: dict[str, Any]) -> FamilyCase:
    # without a norm on the embeddings hidden states grow, and rounding errors with them
    options = {"pad_token_id": 0, "initializer_range": 0.1, "num_key_value_heads": 2, "head_dim": 8}
    options["max_position_embeddings"] = 320
    return FamilyCase(
        make_config=lambda **more: config_class(**{**SIZES, **options, **more}),
        no_dropout={"classifier_dropout": 0.0},
        variants=({"is_causal": False, "rms_norm_eps": 1e-3}, *variants),
        restore=show_later_tokens,
    )


def t5_case(config_class: Callable[..., PreTrainedConfig]) -> FamilyCase:
    sizes = {"vocab_size": 90, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 4, "num_heads": 4}
    return FamilyCase(
        make_config=lambda **options: config_class(**{**sizes, "relative_attention_max_distance": 60, **options}),
        no_dropout={"dropout_rate": 0.0},
        variants=(
            {"feed_forward_proj": "relu", "d_kv": 12, "layer_norm_epsilon": 1e-3, "classifier_dropout": 0.3},
            {"feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 16, "dropout_rate": 0.2},
        ),
    )


GEMMA = {
    "initializer_range": 0.1,
    "use_bidirectional_attention": True,
    "sliding_window": 32,
    "query_pre_attn_scalar": 12,
}


def gemma_config(**options: Any) -> PreTrainedConfig:
    """The third layer sees all tokens."""
    values = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 320, **GEMMA, **options}
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    return Gemma3TextConfig(**{"layer_types": kinds[: values["num_hidden_layers"]], **values})


NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

DEBERTA_OPTIONS = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "legacy": False,
    "max_position_embeddings": 320,
}
#: Buckets grow from a distance of 16 on, and the last one begins within the longest sequence of the tests.
DEBERTA_V3_OPTIONS = {"position_buckets": 32, "norm_rel_ebd": "layer_norm", "share_att_key": True}

FAMILY_CASES: dict[str, FamilyCase] = {
    "distilbert": FamilyCase(
        make_config=lambda **options: DistilBertConfig(
            **{
                **{key: SIZES[key] for key in SIZES if key != "intermediate_size"},
                "hidden_dim": SIZES["intermediate_size"],
                "max_position_embeddings": 320,
                **options,
            }
        ),
        no_dropout={"dropout": 0.0, "attention_dropout": 0.0, "qa_dropout": 0.0, "seq_classif_dropout": 0.0},
        variants=(
            {"activation": "relu", "pad_token_id": 5, "tie_word_embeddings": False},
            {"dropout": 0.2, "attention_dropout": 0.3, "qa_dropout": 0.4, "seq_classif_dropout": 0.5},
            {"sinusoidal_pos_embds": True},
        ),
    ),
    "electra": FamilyCase(
        make_config=lambda **options: ElectraConfig(
            **{**SIZES, "embedding_size": 20, "max_position_embeddings": 320, **options}
        ),
        no_dropout=NO_DROPOUT,
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "embedding_size": 32},
            {"embedding_size": 48, "classifier_dropout": 0.3, "tie_word_embeddings": False},
        ),
    ),
    "convbert": FamilyCase(
        make_config=lambda **options: ConvBertConfig(
            **{**SIZES, "embedding_size": 20, "max_position_embeddings": 320, "pad_token_id": 0, **options}
        ),
        no_dropout=NO_DROPOUT,
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "conv_kernel_size": 3, "embedding_size": 32},
            {"num_attention_heads": 2, "head_ratio": 4, "classifier_dropout": 0.3, "tie_word_embeddings": False},
            {"num_groups": 2},
        ),
        restore=hide_padding_from_convolutions,
    ),
    "albert": FamilyCase(
        make_config=lambda **options: AlbertConfig(
            **{**SIZES, "embedding_size": 20, "max_position_embeddings": 320, **options}
        ),
        no_dropout={"classifier_dropout_prob": 0.0},
        variants=(
            {"num_hidden_groups": 2, "hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3},
            {"num_hidden_groups": 3, "embedding_size": 32, "hidden_dropout_prob": 0.2, "classifier_dropout_prob": 0.3},
            {"num_hidden_groups": 4, "embedding_size": 48},
        ),
    ),
    "bert": FamilyCase(
        make_config=lambda **options: BertConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        no_dropout=NO_DROPOUT,
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3},
            {"tie_word_embeddings": False, "classifier_dropout": 0.3},
        ),
        restore=restore_bert,
    ),
    "ernie": FamilyCase(
        make_config=lambda **options: ErnieConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        no_dropout=NO_DROPOUT,
        variants=(
            {"use_task_id": True, "task_type_vocab_size": 5, "hidden_act": "relu"},
            {"tie_word_embeddings": False, "classifier_dropout": 0.3},
        ),
        restore=restore_bert,
    ),
    "bert-generation": FamilyCase(
        make_config=lambda **options: BertGenerationConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        variants=({"hidden_act": "relu", "layer_norm_eps": 1e-3, "hidden_dropout_prob": 0.3},),
    ),
    "rembert": FamilyCase(
        make_config=lambda **options: RemBertConfig(
            **{
                **SIZES,
                "input_embedding_size": 20,
                "output_embedding_size": 28,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "max_position_embeddings": 320,
                **options,
            }
        ),
        no_dropout={"classifier_dropout_prob": 0.0},
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "output_embedding_size": 48},
            {"input_embedding_size": 32, "output_embedding_size": 32, "hidden_dropout_prob": 0.3},
        ),
    ),
    "splinter": FamilyCase(
        make_config=lambda **options: SplinterConfig(
            **{**SIZES, "question_token_id": 7, "max_position_embeddings": 320, **options}
        ),
        no_dropout=NO_DROPOUT,
        variants=({"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "hidden_dropout_prob": 0.3},),
    ),
    "roformer": FamilyCase(
        make_config=lambda **options: RoFormerConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        no_dropout=NO_DROPOUT,
        variants=(
            {"embedding_size": 20, "type_vocab_size": 3, "layer_norm_eps": 1e-3},
            {"hidden_act": "relu", "tie_word_embeddings": False, "hidden_dropout_prob": 0.3},
        ),
        restore=restore_roformer,
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
    "roberta": roberta_case(RobertaConfig),
    "xlm-roberta": roberta_case(XLMRobertaConfig),
    "camembert": roberta_case(CamembertConfig),
    "roberta-prelayernorm": roberta_case(RobertaPreLayerNormConfig),
    "data2vec-text": roberta_case(Data2VecTextConfig),
    # without a norm on the embeddings hidden states grow, and rounding errors with them
    "xlm-roberta-xl": roberta_case(XLMRobertaXLConfig, initializer_range=0.1),
    "ibert": replace(
        roberta_case(IBertConfig),
        variants=({"layer_norm_eps": 1e-3, "type_vocab_size": 1, "max_position_embeddings": 151},),
    ),
    "megatron-bert": FamilyCase(
        make_config=lambda **options: MegatronBertConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        no_dropout=NO_DROPOUT,
        variants=({"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "pad_token_id": 5},),
    ),
    "mpnet": FamilyCase(
        make_config=lambda **options: MPNetConfig(**{**SIZES, "max_position_embeddings": 320, **options}),
        no_dropout=NO_DROPOUT,
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "max_position_embeddings": 152},
            {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3, "bos_token_id": 7},
        ),
    ),
    "esm": FamilyCase(
        make_config=lambda **options: EsmConfig(
            **{
                **SIZES,
                "pad_token_id": 0,
                "mask_token_id": 3,
                "position_embedding_type": "rotary",
                "token_dropout": True,
                "emb_layer_norm_before": False,
                # without a norm on the embeddings hidden states grow, and rounding errors with them
                "initializer_range": 0.1,
                "max_position_embeddings": 320,
                **options,
            }
        ),
        no_dropout=NO_DROPOUT,
        variants=(
            {"position_embedding_type": "absolute", "emb_layer_norm_before": True, "layer_norm_eps": 1e-3},
            {"token_dropout": False, "rope_theta": 300.0, "mask_token_id": None, "hidden_dropout_prob": 0.2},
        ),
    ),
    "esmc": FamilyCase(
        make_config=lambda **options: EsmcConfig(
            **{
                **SIZES,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "mask_token_id": 3,
                # without a norm on the embeddings hidden states grow, and rounding errors with them
                "initializer_range": 0.1,
                **options,
            }
        ),
        no_dropout={"classifier_dropout": 0.0},
        variants=(
            {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "classifier_dropout": 0.3},
            {"rope_parameters": {"rope_theta": 300.0}, "num_hidden_layers": 3, "mask_token_id": None},
        ),
    ),
    "eurobert": FamilyCase(
        make_config=lambda **options: EuroBertConfig(
            **{
                **SIZES,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                "mask_token_id": 3,
                # without a norm on the embeddings hidden states grow, and rounding errors with them
                "initializer_range": 0.1,
                **options,
            }
        ),
        variants=(
            {"classifier_pooling": "bos", "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
            {"classifier_pooling": "mean"},
            {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "num_key_value_heads": 1},
            {"hidden_act": "gelu", "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 300.0}},
        ),
    ),
    "ultrabert": FamilyCase(
        make_config=lambda **options: UltrabertConfig(
            **{**SIZES, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1, "sliding_window": 64, **options}
        ),
        variants=(
            {"classifier_pooling": "mean", "sliding_window": 9, "num_key_value_heads": 2},
            {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rms_norm_eps": 1e-3},
            {"attention_windows": [32, None, 32, 32], "rope_theta": [7.0, 500.0, 7.0, 7.0], "hidden_act": "gelu"},
        ),
    ),
    "nomic_bert": FamilyCase(
        make_config=lambda **options: NomicBertConfig(**{**SIZES, "bos_token_id": 1, "eos_token_id": 2, **options}),
        no_dropout={"hidden_dropout_prob": 0.0},
        variants=(
            {"hidden_act": "gelu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "classifier_dropout": 0.3},
            {"head_dim": 12, "rope_parameters": {"rope_theta": 300.0}, "hidden_dropout_prob": 0.2},
        ),
    ),
    "gte": FamilyCase(
        make_config=lambda **options: GteConfig(**{**SIZES, "pad_token_id": 0, **options}),
        no_dropout={"hidden_dropout_prob": 0.0},
        variants=(
            {"hidden_act": "silu", "layer_norm_eps": 1e-3, "type_vocab_size": 0, "classifier_dropout": 0.3},
            {"tie_word_embeddings": False, "rope_parameters": {"rope_theta": 300.0}, "head_dim": 12},
        ),
    ),
    "jina_embeddings_v3": FamilyCase(
        make_config=lambda **options: JinaEmbeddingsV3Config(
            **{**SIZES, "pad_token_id": 0, "max_position_embeddings": 320, **options}
        ),
        no_dropout=NO_DROPOUT,
        variants=(
            {"hidden_act": "relu", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "classifier_dropout": 0.3},
            {"rope_parameters": {"rope_theta": 300.0}},
        ),
    ),
    "llama": llama_case(
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": {"rope_theta": 300.0}},
    ),
    "mistral": llama_case(MistralConfig, {"sliding_window": 20}, {"sliding_window": None, "is_causal": False}),
    "qwen3": llama_case(
        Qwen3Config,
        {"attention_bias": True, "head_dim": 12, "tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "modernbert-decoder": FamilyCase(
        make_config=lambda **options: ModernBertDecoderConfig(
            **{**SIZES, **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0), **options}
        ),
        variants=(
            {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
            {"local_attention": 34, "classifier_activation": "relu", "decoder_bias": False},
        ),
    ),
    "clip_text_model": FamilyCase(
        make_config=lambda **options: CLIPTextConfig(
            **{**SIZES, "pad_token_id": 0, "eos_token_id": 3, "max_position_embeddings": 320, **options}
        ),
        variants=({"hidden_act": "gelu", "layer_norm_eps": 1e-3},),
        other_outputs=frozenset({"pooler_output"}),
        normalizes_last_state=False,
    ),
    "t5": t5_case(T5Config),
    "mt5": t5_case(MT5Config),
    "umt5": t5_case(UMT5Config),
    "gemma3_text": FamilyCase(
        make_config=gemma_config,
        variants=(
            {"use_bidirectional_attention": False, "sliding_window": 20, "attention_bias": True},
            {"layer_types": ["full_attention"] * 4, "tie_word_embeddings": False, "rms_norm_eps": 1e-3},
        ),
    ),
    "deberta": FamilyCase(
        make_config=lambda **options: DebertaConfig(**{**SIZES, **DEBERTA_OPTIONS, **options}),
        no_dropout=NO_DROPOUT,
        variants=(
            {"max_relative_positions": 40, "pos_att_type": ["c2p"], "position_biased_input": True},
            {"pos_att_type": "p2c", "type_vocab_size": 2, "cls_dropout": 0.3, "pooler_hidden_act": "tanh"},
            {"relative_attention": False, "pos_att_type": None, "position_biased_input": True, "embedding_size": 16}
            | {"legacy": True},
        ),
    ),
    "deberta-v2": FamilyCase(
        make_config=lambda **options: DebertaV2Config(**{**SIZES, **DEBERTA_OPTIONS, **DEBERTA_V3_OPTIONS, **options}),
        no_dropout=NO_DROPOUT,
        variants=(
            # v2 xlarge: a convolution, and absolute positions next to relative ones
            {"conv_kernel_size": 3, "conv_act": "gelu", "position_biased_input": True, "max_relative_positions": 140},
            {"conv_kernel_size": 5, "conv_groups": 4, "share_att_key": False, "norm_rel_ebd": "none"},
            {"position_buckets": -1, "max_relative_positions": 40, "share_att_key": False, "pos_att_type": ["p2c"]},
            {"pos_att_type": ["c2p"], "position_buckets": 300, "embedding_size": 16, "legacy": True},
        ),
    ),
}
