"""GTE v1.5 and multilingual (Zhang et al., 2024), and Stella, as their authors publish them: `model_type` is "new"."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers import PreTrainedConfig

from bertblocks.checkpoints.families.bert import read_rest as read_bert_rest
from bertblocks.checkpoints.families.bert import write_rest as write_bert_rest
from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.checkpoints.families.nomic_bert import FIXED, IGNORED, KEYS, gate_first
from bertblocks.config import BertBlocksConfig

LAYER, OURS = "encoder.layer.{i}", "encoder.layers.{i}"


class NewConfig(PreTrainedConfig):
    """The keys of the published config.json that affect what a model computes."""

    model_type: ClassVar[str] = "new"

    vocab_size: int = 30528
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.0
    classifier_dropout: float | int | None = None
    max_position_embeddings: int = 2048
    type_vocab_size: int = 1
    initializer_range: float = 0.02
    layer_norm_type: str = "layer_norm"
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "rope"
    rope_theta: float | int = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    pack_qkv: bool = True
    logn_attention_scale: bool = False
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True


def read_rest(theirs: Any) -> dict[str, Any]:
    scaling = {key: value for key, value in (theirs.rope_scaling or {}).items() if value is not None}
    return {**read_bert_rest(theirs), "mlp_dropout": theirs.hidden_dropout_prob, "rope_scaling": scaling or None}


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    own: dict[str, Any] = ours.rope_scaling or {}
    scaling = {"type" if key == "rope_type" else key: value for key, value in own.items()}
    return {**write_bert_rest(ours), "rope_scaling": scaling or None}


NEW = Family(
    name="new",
    config_class=NewConfig,
    model_classes={
        "base": "NewModel",
        "masked-lm": "NewForMaskedLM",
        "sequence-classification": "NewForSequenceClassification",
        "token-classification": "NewForTokenClassification",
        "question-answering": "NewForQuestionAnswering",
    },
    prefix="new",
    keys={**KEYS, "rope_theta": "rope_theta"},
    fixed=FIXED,
    required={
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "pack_qkv": True,
        "position_embedding_type": "rope",
    },
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "embeddings.word_embeddings"),
        rule("embedding.token_type", "embeddings.token_type_embeddings"),
        rule("embedding.norm", "embeddings.LayerNorm"),
        rule(f"{OURS}.attention.qkv", f"{LAYER}.attention.qkv_proj"),
        rule(f"{OURS}.attention.out", f"{LAYER}.attention.o_proj"),
        rule(f"{OURS}.attention_residual.post_norm", f"{LAYER}.attn_ln"),
        rule(f"{OURS}.mlp.up", f"{LAYER}.mlp.up_gate_proj", row_order=gate_first),
        rule(f"{OURS}.mlp.down", f"{LAYER}.mlp.down_proj"),
        rule(f"{OURS}.mlp_residual.post_norm", f"{LAYER}.mlp_ln"),
        rule("pooler.dense", "pooler.dense"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (
            rule("head.dense", "lm_head.dense"),
            rule("head.norm", "lm_head.norm"),
            rule("decoder", "lm_head.decoder"),
        ),
        "sequence-classification": (rule("classifier", "classifier"),),
        "token-classification": (rule("tagger", "classifier"),),
        "question-answering": (rule("spans", "qa_outputs"),),
    },
    ignored=IGNORED,
)
