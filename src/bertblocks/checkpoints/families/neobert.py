"""NeoBERT (Le Breton et al., 2025) as on the hub, and its fork with learned positions, LayerNorm, GELU and nGPT.

transformers has no class for it, so the config class is ours. A config.json without the keys `rope`, `rms_norm`,
`hidden_act` and `ngpt` describes the official model: RoPE, RMSNorm, SwiGLU, and an untied decoder with a bias.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
import yaml
from torch import Tensor
from transformers import PreTrainedConfig

from bertblocks.checkpoints.families.family import Family, rule
from bertblocks.config import BertBlocksConfig
from bertblocks.config.config import HOUSEKEEPING
from bertblocks.config.validation import ConfigError, check_type, own_keys
from bertblocks.core.registry import nearest
from bertblocks.nn.initialization import NGPT_BASE_SCALE

PREFIX = "model"
LAYER = "transformer_encoder.{i}"


class NeoBERTConfig(PreTrainedConfig):
    """The keys of NeoBERT's config.json that affect what a model computes, with the defaults of the official class."""

    model_type: ClassVar[str] = "neobert"

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 28
    num_attention_heads: int = 12
    #: The width of the feed-forward network; SwiGLU uses two thirds of it.
    intermediate_size: int = 3072
    max_length: int = 1024
    norm_eps: float = 1e-6
    pad_token_id: int | None = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    #: The dropout on attention weights and on both residual branches.
    dropout: float = 0.0
    #: The dropout before and after the dense layer of a classifier.
    classifier_dropout: float = 0.1
    #: The bound of a uniform distribution in NeoBERT, and a standard deviation here; it affects new weights only.
    decoder_init_range: float = 0.02
    tie_word_embeddings: bool = False
    #: A key of ours: NeoBERT's classes fix this in their code.
    decoder_bias: bool = True
    # the fork's keys
    rope: bool | None = None
    rms_norm: bool | None = None
    hidden_act: str | None = None
    ngpt: bool | None = None
    #: The initial value of nGPT's scales.
    base_scale: float = NGPT_BASE_SCALE
    attn_backend: str | None = None
    kernel_backend: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Omits the fork's keys that are not set, because its class reads null as false."""
        return {key: value for key, value in super().to_dict().items() if value is not None or key not in OPTIONAL_KEYS}


#: Keys that only the fork's files have.
FORK_KEYS = ("rope", "rms_norm", "hidden_act", "ngpt")
OPTIONAL_KEYS = (*FORK_KEYS, "attn_backend", "kernel_backend")
#: Other spellings of keys, which are read but not written.
KEY_ALIASES = {"max_position_embeddings": "max_length", "dropout_prob": "dropout"}
#: Keys that follow from others, or that affect only NeoBERT's own code or its initialization.
UNREAD_KEYS = {
    "classifier_init_range",
    "dim_head",
    "embedding_init_range",
    "flash_attention",
    "from_hub",
    "kwargs",
    "model_type",
    "name",
    "pretrained_model_name_or_path",
    "swiglu_packed",
    "trust_remote_code",
}
ATTENTION_BACKENDS = {"sdpa": "sdpa", "flash_attn_varlen": "flash"}

# ---------------------------------------------------------------------- config


def prepare(values: dict[str, Any], tensors: dict[str, Tensor] | None) -> dict[str, Any]:
    """The values of a config.json in one spelling, completed by what the checkpoint's tensors show.

    Two matrices that differ are not tied, whatever `tie_word_embeddings` says: some of the fork's files get it wrong.
    """
    values = _canonical(values)
    is_fork = any(values.get(key) is not None for key in FORK_KEYS)
    is_ngpt = bool(values.get("ngpt"))
    values.setdefault("tie_word_embeddings", is_fork and not is_ngpt)
    values.setdefault("decoder_bias", not is_fork)
    if tensors is None:
        return values
    plain = {name.removeprefix(PREFIX + "."): tensor for name, tensor in tensors.items()}
    decoder, embedding = plain.get("decoder.weight"), plain.get("encoder.weight")
    if decoder is not None:
        is_same = embedding is not None and torch.equal(decoder, embedding)
        values["tie_word_embeddings"] = is_same and not is_ngpt
    if decoder is not None or "decoder.bias" in plain:
        values["decoder_bias"] = "decoder.bias" in plain
    if not values.get("architectures"):
        values["architectures"] = [_architecture(tensors, values["tie_word_embeddings"])]
    return values


def _canonical(values: dict[str, Any]) -> dict[str, Any]:
    """The values that are read, in one spelling. Unknown keys and wrong types are errors."""
    fields, kinds = {item.name for item in dataclasses.fields(NeoBERTConfig)}, own_keys(cast(Any, NeoBERTConfig))
    canonical: dict[str, Any] = {}
    for key, value in values.items():
        name = KEY_ALIASES.get(key, key)
        if canonical.get(name, value) != value:
            raise ConfigError(f"{name} is {canonical[name]!r}, and {key!r}, its other name, is {value!r}; keep one.")
        is_known = name in fields or name in HOUSEKEEPING or str(name).startswith("_")
        if is_known:
            check_type(name, value, kinds.get(name, Any))
            canonical[name] = value
        elif name not in UNREAD_KEYS:
            hint = nearest(key, {*fields, *KEY_ALIASES, *UNREAD_KEYS})
            raise ConfigError(f"{key!r} is not a key of a neobert config (its value is {value!r}){hint}.")
    return canonical


def _architecture(tensors: dict[str, Tensor], is_tied: bool) -> str:
    """The class of a checkpoint that does not name one. Only task models put a prefix before the encoder."""
    if "classifier.weight" in tensors:
        return "NeoBERTForSequenceClassification"
    has_prefix = any(name.startswith(PREFIX + ".") for name in tensors)
    return "NeoBERTLMHead" if "decoder.weight" in tensors or (has_prefix and is_tied) else "NeoBERT"


def swiglu_width(intermediate_size: int) -> int:
    """Two thirds, rounded up to a multiple of 8, so that three matrices cost as much as two of full width."""
    return 8 * math.ceil(int(2 * intermediate_size / 3) / 8)


def read_rest(theirs: NeoBERTConfig) -> dict[str, Any]:
    has_rope, has_rms, is_ngpt = theirs.rope is not False, theirs.rms_norm is not False, bool(theirs.ngpt)
    is_swiglu = is_ngpt or _read_choice(theirs, "hidden_act", ("swiglu", "gelu")) == "swiglu"
    if is_ngpt and not math.isclose(theirs.base_scale, NGPT_BASE_SCALE):
        raise ConfigError(f"base_scale is {theirs.base_scale!r}; nGPT in BertBlocks supports {NGPT_BASE_SCALE!r} only.")
    inner = theirs.intermediate_size
    options = {
        "intermediate_size": swiglu_width(inner) if is_swiglu and not is_ngpt else inner,
        "mlp_type": "glu" if is_swiglu else "mlp",
        "hidden_act": "silu" if is_swiglu else "gelu",
        "norm_fn": "rms" if has_rms else "layer",
        "norm_bias": not has_rms,
        "norm_pos": "none" if is_ngpt else "pre",
        "ngpt": is_ngpt,
        "block_pos_enc_kind": "rope" if has_rope else "none",
        "rope_interleaved": has_rope,
        "embd_pos_enc_kind": "none" if has_rope else "learned",
        # row 0 of the table is for padding
        "position_offset": 0 if has_rope else 1,
        "max_position_embeddings": theirs.max_length if has_rope else theirs.max_length + 1,
        "attention_dropout": theirs.dropout,
        "attention_output_dropout": theirs.dropout,
        "mlp_output_dropout": theirs.dropout,
        "classifier_head_dropout": theirs.classifier_dropout,
    }
    if theirs.attn_backend is not None:
        options["attention_backend"] = ATTENTION_BACKENDS[_read_choice(theirs, "attn_backend", ATTENTION_BACKENDS)]
    if theirs.kernel_backend is not None:
        options["kernel_backend"] = theirs.kernel_backend
    return options


def _read_choice(theirs: NeoBERTConfig, key: str, choices: Any) -> str:
    """One of `choices`, whatever its case; the first if the config does not set it."""
    value = getattr(theirs, key)
    name = next(iter(choices)) if value is None else value.lower()
    if name not in choices:
        raise ConfigError(f"{key} is {value!r}; it must be one of {', '.join(choices)}{nearest(name, choices)}.")
    return name


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    has_rope, is_glu = ours.block_pos_enc_kind == "rope", ours.mlp_type == "glu"
    names = {ours_: theirs for theirs, ours_ in ATTENTION_BACKENDS.items()}
    options = {
        "intermediate_size": ours.intermediate_size * 3 // 2 if is_glu and not ours.ngpt else ours.intermediate_size,
        "max_length": ours.max_position_embeddings - ours.position_offset,
        "dropout": ours.attention_dropout,
        "attn_backend": names.get(ours.attention_backend),
        "kernel_backend": None if ours.kernel_backend == "auto" else ours.kernel_backend,
    }
    if not is_official(ours):
        options["rope"] = has_rope
        options["rms_norm"] = ours.norm_fn == "rms"
        options["hidden_act"] = "swiglu" if is_glu else "gelu"
        options["ngpt"] = ours.ngpt
    return options


def is_official(config: BertBlocksConfig) -> bool:
    """True if the official class can run the model. All others are written in the fork's layout."""
    has_head = config.decoder_bias and not config.tie_word_embeddings
    is_plain = config.norm_fn == "rms" and config.block_pos_enc_kind == "rope" and not config.attention_dropout
    return has_head and is_plain and is_swiglu(config)


def is_swiglu(config: BertBlocksConfig) -> bool:
    return config.mlp_type == "glu" and not config.ngpt


# ---------------------------------------------------------------------- weights


def qkv_row_order(config: BertBlocksConfig) -> Tensor:
    """The order that turns rows [Q_h, K_h, V_h] per head into Q|K|V."""
    rows = torch.arange(3 * config.hidden_size).view(config.num_attention_heads, 3, -1)
    return rows.transpose(0, 1).flatten()


def gate_first(config: BertBlocksConfig) -> Tensor:
    """The row order of nGPT, where the gate is the second half."""
    return torch.arange(2 * config.intermediate_size).roll(config.intermediate_size)


NEOBERT = Family(
    name="neobert",
    config_class=NeoBERTConfig,
    model_classes={
        "base": "NeoBERT",
        "masked-lm": "NeoBERTLMHead",
        "sequence-classification": "NeoBERTForSequenceClassification",
    },
    aliases={"NormNeoBERT": "base", "NeoBERTHFForSequenceClassification": "sequence-classification"},
    prefix=PREFIX,
    keys={
        "intermediate_size": None,
        "max_position_embeddings": None,
        "initializer_range": "decoder_init_range",
        "norm_eps": "norm_eps",
        "classifier_dropout": "classifier_dropout",
        "decoder_bias": "decoder_bias",
    },
    fixed={
        "type_vocab_size": 0,
        "embedding_norm": False,
        "embedding_dropout": 0.0,
        "attention_qkv_bias": False,
        "attention_out_bias": False,
        "mlp_in_bias": False,
        "mlp_out_bias": False,
        "pooler": False,
        "mlm_head_dense": False,
        "classifier_head": "dense",
    },
    required={},
    prepare=prepare,
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(
        rule("embedding.token", "encoder"),
        rule("embedding.position.table", "positional_embedding"),
        rule("encoder.layers.{i}.attention_residual.pre_norm", f"{LAYER}.attention_norm"),
        rule("encoder.layers.{i}.attention.qkv", f"{LAYER}.qkv", row_order=qkv_row_order),
        rule("encoder.layers.{i}.attention.sqk", f"{LAYER}.sqk"),
        rule("encoder.layers.{i}.attention.out", f"{LAYER}.wo"),
        rule("encoder.layers.{i}.attention_alpha", f"{LAYER}.attn_alpha"),
        rule("encoder.layers.{i}.mlp_residual.pre_norm", f"{LAYER}.ffn_norm"),
        # the official layout, then the fork's SwiGLU, GELU and nGPT
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.ffn.w12", when=is_official),
        rule(
            "encoder.layers.{i}.mlp.up",
            f"{LAYER}.ffn.w1",
            f"{LAYER}.ffn.w2",
            when=lambda config: is_swiglu(config) and not is_official(config),
        ),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.ffn.w3", when=is_swiglu),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.ffn.0", when=lambda config: config.mlp_type == "mlp"),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.ffn.2", when=lambda config: config.mlp_type == "mlp"),
        rule("encoder.layers.{i}.mlp.up", f"{LAYER}.c_fc", row_order=gate_first, when=lambda config: config.ngpt),
        rule("encoder.layers.{i}.mlp.suv", f"{LAYER}.suv", row_order=gate_first),
        rule("encoder.layers.{i}.mlp.down", f"{LAYER}.mlp_c_proj", when=lambda config: config.ngpt),
        rule("encoder.layers.{i}.mlp_alpha", f"{LAYER}.mlp_alpha"),
        rule("encoder.final_norm", "layer_norm"),
    ),
    head_rules={
        "base": (),
        "masked-lm": (rule("decoder", "decoder"),),
        "sequence-classification": (rule("classifier_head.dense", "dense"), rule("classifier", "classifier")),
    },
    # unused tensors of older nGPT files
    ignored=(r"^freqs_cis$", r"^sz$", r"^layer_norm\.(weight|bias)$"),
)

# ---------------------------------------------------------------------- the fork's training files

#: The defaults of the fork's training for keys that its YAML file omits.
YAML_DEFAULTS = {
    "num_hidden_layers": 12,
    "max_length": 512,
    "norm_eps": 1e-5,
    "rope": True,
    "rms_norm": True,
    "hidden_act": "swiglu",
}
#: A number that YAML 1.1 reads as text, such as 1e-6.
SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def read_yaml_config(path: str | Path) -> BertBlocksConfig:
    """The architecture in the `model` section of one of the fork's training files."""
    try:
        document = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}.") from error
    sections = document if isinstance(document, dict) else {}
    if not isinstance(sections.get("model"), dict):
        hint = next((nearest(name, ["model"]) for name in sections if nearest(name, ["model"])), "")
        raise ConfigError(f"{path} has no section 'model' with the keys of a model{hint}.")
    try:
        values = {key: _number(value) for key, value in sections["model"].items()}
        return NEOBERT.read_config(NEOBERT.parse_config({**YAML_DEFAULTS, **_canonical(values)}))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, str) and SCIENTIFIC.fullmatch(value) else value
