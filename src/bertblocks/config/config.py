"""The one config: every choice an encoder is made of, checked when it is made."""

import copy
import dataclasses
import re
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from bertblocks.config.aliases import (
    HOUSEKEEPING,
    KEY_ALIASES,
    LAYER_TYPE_ALIASES,
    LAYER_TYPE_NAMES,
    LOADING_OPTIONS,
    canonical,
    canonical_value,
)
from bertblocks.config.presets import read_preset
from bertblocks.config.validation import ConfigError, check_config, check_labels, check_type, check_types, own_keys
from bertblocks.core.registry import nearest

#: The default of keys that take the value which other keys imply.
IMPLIED: Any = None


class BertBlocksConfig(PreTrainedConfig):
    """Every choice that makes up an encoder. `BertBlocksConfig()` is BERT-base; each key is one step away from it.

    Unknown keys and values that cannot go together are refused. A key whose default is implied by others holds its
    value once the config is made, and follows when those others are changed.

    Example:
        >>> config = BertBlocksConfig(norm_pos="pre", norm_fn="rms", block_pos_enc_kind="rope", num_kv_heads=4)
        >>> config.final_norm, config.head_dim
        (True, 64)
        >>> BertBlocksConfig.from_preset("modernbert-base", num_hidden_layers=4).layer_types
        ['global', 'local', 'local', 'global']
    """

    if TYPE_CHECKING:  # a config of BertBlocks always has labels

        @property
        def num_labels(self) -> int: ...

        @num_labels.setter
        def num_labels(self, value: int) -> None: ...

    model_type: ClassVar[str] = "bertblocks"

    # ---- sizes
    #: Rows of the token embedding.
    vocab_size: int = 30522
    #: Units of a token's vector between layers.
    hidden_size: int = 768
    #: Width of the token, type and position tables. Implied: hidden_size; another is projected to it, as in ALBERT.
    embedding_size: int = IMPLIED
    #: Layers.
    num_hidden_layers: int = 12
    #: Sets of layer weights. Implied: one per layer; with fewer, runs of neighbouring layers share one, as in ALBERT.
    num_hidden_groups: int = IMPLIED
    #: Query heads of a layer.
    num_attention_heads: int = 12
    #: Key/value heads: query head h uses number h * num_kv_heads // num_attention_heads. Implied: one per query head.
    num_kv_heads: int = IMPLIED
    #: Units per head. Implied: hidden_size / num_attention_heads.
    head_dim: int = IMPLIED
    #: Width of the feed-forward network; of each half for a GLU.
    intermediate_size: int = 3072
    #: Rows of a learned position table, and the length that RoPE scaling starts from.
    max_position_embeddings: int = 512
    #: Token types; 0 for none.
    type_vocab_size: int = 2

    # ---- special tokens
    #: Padding; its embedding starts at 0 and gets no gradient.
    pad_token_id: int | None = 0
    #: The start of a text.
    bos_token_id: int | None = None
    #: The end of a text.
    eos_token_id: int | list[int] | None = None
    #: The token that a classifier reads.
    cls_token_id: int | None = None
    #: The token between two texts.
    sep_token_id: int | None = None
    #: Needed by masked diffusion, which fills it in.
    mask_token_id: int | None = None

    # ---- normalisation
    #: layer, rms, group, deep, dynamic_tanh, or a name given to `register_norm`.
    norm_fn: str = "layer"
    #: pre x + f(Nx) | post N(x + f(x)) | pre_and_post N'(x + f(Nx)) | sandwich x + N'(f(Nx)) | none x + f(x).
    #: Implied: post, or none for nGPT.
    norm_pos: str = IMPLIED
    #: Added to the variance that a norm divides by.
    norm_eps: float = 1e-12
    #: Norms add a bias.
    norm_bias: bool = True
    #: Groups of channels for norm_fn "group".
    norm_num_groups: int = 32
    #: A norm on the embeddings. Implied: yes, but not for nGPT.
    embedding_norm: bool = IMPLIED
    #: A linear layer from embedding_size to hidden_size after the embeddings. Implied: when the two differ.
    embedding_projection: bool = IMPLIED
    #: A norm after the last layer. Implied: when norm_pos is pre or sandwich.
    final_norm: bool = IMPLIED
    #: False: no norm before the first layer's attention, as in ModernBERT, which has just normalised the embeddings.
    first_attention_norm: bool = True
    #: Attention and feed-forward side by side on the same input: x + A(Nx) + F(Nx).
    parallel_block: bool = False

    # ---- feed-forward
    #: mlp, glu, or a name given to `register_mlp`. Implied: mlp, or glu for nGPT.
    mlp_type: str = IMPLIED
    #: Any activation of transformers, or a name given to `register_activation`. Implied: gelu, or silu for nGPT.
    hidden_act: str = IMPLIED
    #: A bias in the first matrix of the feed-forward network.
    mlp_in_bias: bool = True
    #: A bias in its last matrix.
    mlp_out_bias: bool = True

    # ---- positions
    #: Added to the embeddings: learned, sinusoidal, none, or a name given to `register_position`.
    embd_pos_enc_kind: str = "learned"
    #: Inside attention: rope, alibi, t5, none, or a name given to `register_position`.
    block_pos_enc_kind: str = "none"
    #: Where learned positions start counting: 0 in BERT, pad_token_id + 1 in RoBERTa, 1 in NeoBERT.
    position_offset: int = 0
    #: The base of RoPE's wavelengths.
    rope_theta: float = 10_000.0
    #: Theta of local layers. Implied: rope_theta.
    local_rope_theta: float = IMPLIED
    #: The share of each head's units that RoPE turns.
    partial_rotary_factor: float = 1.0
    #: Pairs (2k, 2k + 1) as in NeoBERT, in place of (k, k + d/2).
    rope_interleaved: bool = False
    #: The precision that RoPE's frequencies are rounded to: float32, float16 as ESM-2's may be, or bfloat16.
    rope_frequency_dtype: str = "float32"
    #: transformers' scaling of RoPE, such as {"rope_type": "yarn", "factor": 4.0}, for global layers.
    rope_scaling: dict[str, Any] | None = None
    #: The same for local layers.
    local_rope_scaling: dict[str, Any] | None = None
    #: Buckets of distances for block_pos_enc_kind "t5", both directions together.
    relative_attention_num_buckets: int = 32
    #: Where their logarithmic steps end; all that is further away shares a bucket.
    relative_attention_max_distance: int = 128
    #: One table of biases for all layers, as in T5 and MPNet; False: one for each layer.
    relative_attention_shared: bool = True

    # ---- attention
    #: A bias in the projection to queries, keys and values.
    attention_qkv_bias: bool = True
    #: A bias in the projection back.
    attention_out_bias: bool = True
    #: A learned RMSNorm over each head's queries and keys.
    qk_norm: bool = False
    #: Windows in the layers that are not global.
    local_attention: bool = False
    #: Tokens at a distance of at most half of this see one another: 128 means 64 on either side.
    local_attention_window_size: int = 128
    #: With local_attention, layer i is global if i is a multiple of this. None: all layers are local.
    global_attention_every_n_layers: int | None = None
    #: The first tokens of every sequence, which see and are seen by all, in local layers too.
    num_global_tokens: int = 0
    #: "global" or "local" for every layer. Implied by local_attention and global_attention_every_n_layers.
    layer_types: list[str] = IMPLIED
    #: Layers that differ: {3: {"hidden_act": "silu"}}.
    layer_overrides: dict[int, dict[str, Any]] | None = None

    # ---- nGPT
    #: Hidden states on the unit sphere (Loshchilov et al., 2024), in NeoBERT's form.
    ngpt: bool = False
    #: Training puts weight matrices back on the sphere after each step, by `renormalize_weights()`.
    ngpt_renormalize: bool = True
    #: A learned scale on the logits of nGPT's masked-LM head.
    ngpt_logit_scale: bool = False

    # ---- dropout
    #: After the embeddings and their norm.
    embedding_dropout: float = 0.1
    #: On attention weights.
    attention_dropout: float = 0.1
    #: On what attention adds to the residual stream.
    attention_output_dropout: float = 0.1
    #: Embeddings of mask tokens are 0, and all are scaled as dropout would be, as in ESM-2; in evaluation too.
    token_dropout: bool = False
    #: Inside the feed-forward network, before its second matrix.
    mlp_dropout: float = 0.0
    #: On what the feed-forward network adds to the residual stream.
    mlp_output_dropout: float = 0.1
    #: Before the last linear layer of a classifier.
    classifier_dropout: float = 0.1
    #: The same of a token classifier. Implied: classifier_dropout.
    token_classifier_dropout: float = IMPLIED
    #: The same for question answering. Implied: classifier_dropout after a head of its own, else 0 as in BERT.
    qa_dropout: float = IMPLIED
    #: Before the dense layer of a classifier's head.
    classifier_head_dropout: float = 0.0

    # ---- initialisation
    #: trunc_normal, normal, megatron, xavier, kaiming, deepnet, ngpt. Implied: trunc_normal, or ngpt for nGPT.
    init_kind: str = IMPLIED
    #: The standard deviation of fresh weights.
    initializer_range: float = 0.02
    #: A truncated normal is cut at this many standard deviations.
    initializer_cutoff_factor: float = 2.0

    # ---- heads
    #: BertBlocksModel ends in BERT's pooler (dense, tanh on the first token).
    pooler: bool = True
    #: BertBlocksModel can predict which tokens of a protein touch, from its attention weights, as ESM-2 does.
    contact_head: bool = False
    #: The masked-LM decoder shares its matrix with the token embedding. Implied: yes, but not for nGPT.
    tie_word_embeddings: bool = IMPLIED
    #: A dense layer, activation and norm before the masked-LM decoder.
    mlm_head_dense: bool = True
    #: Its activation. Implied: hidden_act.
    mlm_head_act: str = IMPLIED
    #: A bias in that dense layer.
    mlm_head_bias: bool = True
    #: A norm after it.
    mlm_head_norm: bool = True
    #: The width of one more dense layer in front of it, as in UltraBERT. None: no such layer.
    mlm_head_size: int | None = None
    #: A bias per vocabulary entry in the masked-LM decoder.
    decoder_bias: bool = True
    #: What a sequence classifier reads: the first token (cls), or the mean or max of all.
    classifier_pooling: str = "cls"
    #: Before the last linear layer of a sequence classifier: pooler (BERT), dense (ModernBERT, RoBERTa) or none.
    classifier_head: str = "pooler"
    #: The activation of a dense classifier head.
    classifier_head_act: str = "tanh"
    #: A bias in it.
    classifier_head_bias: bool = True
    #: A norm after it.
    classifier_head_norm: bool = False
    #: The dense head works on every token before they are pooled, as in EuroBERT.
    classifier_head_before_pooling: bool = False
    #: The dense head is used for token classification and question answering too, as in ModernBERT.
    classifier_head_on_tokens: bool = False
    #: A bias in the last linear layer of a classifier.
    classifier_bias: bool = True
    #: Masked diffusion draws its noise level from [diffusion_min_time, 1].
    diffusion_min_time: float = 1e-3

    # ---- quantization
    #: int8: linear layers with byte weights, for inference; written by `model.quantize`. None: weights as trained.
    quantization: str | None = None

    # ---- how it runs (no effect on results)
    #: The checkpoint family that it was read from, which an export goes back to first.
    family: str | None = None
    #: auto, cpu, flash, sdpa, eager, or a name given to `register_backend`.
    attention_backend: str = "auto"
    #: auto, liger, torch.
    kernel_backend: str = "auto"
    #: Padding is dropped before the first layer; False keeps it.
    unpad: bool = True

    # ------------------------------------------------------------------ making

    def __init__(self, **options: Any) -> None:
        options = canonical(options)
        options.pop("transformers_version", None)  # written anew by every save
        model_type = options.pop("model_type", self.model_type)
        if model_type != self.model_type:
            raise ConfigError(
                f"model_type is {model_type!r}; it must be {self.model_type!r} "
                "(bertblocks.from_huggingface reads checkpoints of other families)."
            )
        for key, value in options.items():
            _refuse_unknown(key, value)
        check_labels(options)
        for item in dataclasses.fields(self):
            default = None if item.default is dataclasses.MISSING else item.default
            setattr(self, item.name, options.pop(item.name, default))
        self._read_overrides()
        check_types(self, implied=False)
        self.__post_init__(**options)
        self._resolve()
        self._is_made = True
        self.validate()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "BertBlocksConfig":
        """A known architecture, changed by `overrides`. `preset_names()` lists them.

        Example:
            >>> BertBlocksConfig.from_preset("mini", norm_fn="rms").norm_fn
            'rms'
        """
        preset = read_preset(name)["config"]
        return cls(**{**preset, **canonical(overrides)})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Any:  # type: ignore[override]
        """As transformers' own, but an option that is neither a key nor about loading is refused."""
        for key, value in options.items():
            # a caller who takes back what is unused sees to it
            if key not in LOADING_OPTIONS and not options.get("return_unused_kwargs"):
                _refuse_unknown(KEY_ALIASES.get(key, key), value)
        return super().from_pretrained(pretrained_model_name_or_path, **options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """As transformers' own, but keys that override the file are as strict, and imply anew what they imply.

        Other options pass: transformers' tokenizers hand theirs to the config too.
        """
        unknown = [key for key in config_dict if not _is_known(KEY_ALIASES.get(key, key))]
        if "model_type" not in config_dict and len(unknown) > 1:
            raise ConfigError(
                f"There is no model_type, and {unknown[0]!r} and {len(unknown) - 1} more are not keys of "
                'BertBlocksConfig: if this is the config of another family, add its model_type, such as "bert".'
            )
        overrides = canonical({key: options.pop(key) for key in list(options) if _names_own_key(key)})
        check_labels(options)
        count = options.get("num_labels")
        if count is not None and count != len(config_dict.get("id2label") or ()):
            # a caller that relabels a classifier does not want the names in the file
            config_dict = {key: value for key, value in config_dict.items() if key not in ("id2label", "label2id")}
        made = super().from_dict(config_dict, **options)
        config = made[0] if isinstance(made, tuple) else made
        for key, value in overrides.items():
            setattr(config, key, value)
        config.validate()
        return made

    def to_dict(self) -> dict[str, Any]:
        """As transformers' own; kinds of layers by its names too, so that its tools can read the file."""
        values = super().to_dict()
        noted = {key for key in vars(self) if not hasattr(type(self), key) and not _is_known(key)}
        for key in ("_is_made", *noted):
            values.pop(key, None)
        values["layer_types"] = [LAYER_TYPE_NAMES.get(kind, kind) for kind in values["layer_types"]]
        return values

    def _implied(self) -> dict[str, Any]:
        """The value of every implied key that follows from the others."""
        every = self.global_attention_every_n_layers
        is_local = [self.local_attention and not (every and i % every == 0) for i in range(self.num_hidden_layers)]
        return {
            "norm_pos": "none" if self.ngpt else "post",
            "mlp_type": "glu" if self.ngpt else "mlp",
            "hidden_act": "silu" if self.ngpt else "gelu",
            "embedding_size": self.hidden_size,
            "embedding_projection": self.embedding_size not in (None, self.hidden_size),
            "num_hidden_groups": self.num_hidden_layers,
            "token_classifier_dropout": self.classifier_dropout,
            "qa_dropout": self.classifier_dropout if self.classifier_head_on_tokens else 0.0,
            "embedding_norm": not self.ngpt,
            "final_norm": (self.norm_pos or "post") in ("pre", "sandwich") and not self.ngpt,
            "init_kind": "ngpt" if self.ngpt else "trunc_normal",
            "tie_word_embeddings": not self.ngpt,
            "mlm_head_act": self.hidden_act or ("silu" if self.ngpt else "gelu"),
            "local_rope_theta": self.rope_theta,
            "num_kv_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // max(self.num_attention_heads, 1),
            "layer_types": ["local" if local else "global" for local in is_local],
        }

    def _resolve(self) -> None:
        """Fills in the keys that follow from others, and replaces other spellings of values."""
        for key, value in self._implied().items():
            if getattr(self, key) is None:
                setattr(self, key, value)
        self.layer_types = [LAYER_TYPE_ALIASES.get(kind, kind) for kind in self.layer_types]
        for key in ("rope_scaling", "local_rope_scaling"):
            scaling = getattr(self, key)
            if scaling is not None and "type" in scaling and "rope_type" not in scaling:
                scaling = {"rope_type": scaling["type"], **{k: v for k, v in scaling.items() if k != "type"}}
            setattr(self, key, None if scaling == {"rope_type": "default"} else scaling)

    def _read_overrides(self) -> None:
        """JSON knows no integer keys, and keys of layers have aliases too."""
        if not isinstance(self.layer_overrides, dict):
            return
        layers: dict[Any, Any] = {}
        for key, value in self.layer_overrides.items():
            index = int(key) if re.fullmatch(r"\d+", str(key)) else key
            if index in layers:
                raise ConfigError(f"layer_overrides names layer {index} twice; keep one.")
            layers[index] = canonical(value) if isinstance(value, dict) else value
        self.layer_overrides = layers

    def for_layer(self, index: int) -> "BertBlocksConfig":
        """This config with the overrides of one layer applied."""
        layer = copy.copy(self)
        for key, value in (self.layer_overrides or {}).get(index, {}).items():
            setattr(layer, key, value)
        return layer

    def layer_group(self, index: int) -> int:
        """Whose weights a layer has, by ALBERT's rule: its own number unless layers share them."""
        return int(index / (self.num_hidden_layers / self.num_hidden_groups))

    def validate(self) -> None:
        """Refuses types, values and combinations that make no encoder. Runs on creation, model building and saving."""
        check_config(self)

    # ------------------------------------------------------------------ fitting into transformers

    def __setattr__(self, key: str, value: Any) -> None:
        """Refuses unknown keys. What a changed key implies changes with it, where it had been left as implied."""
        key = KEY_ALIASES.get(key, key)
        value = canonical_value(key, value)
        is_made = self.__dict__.get("_is_made")
        # tools note things on a config, which are not saved; only what looks like a misspelled key is an error
        if not hasattr(type(self), key) and (not is_made or nearest(key, own_keys(type(self)), cutoff=0.8)):
            _refuse_unknown(key, value)
        if not is_made or key not in own_keys(type(self)):
            super().__setattr__(key, value)
            return
        check_type(key, value, own_keys(type(self))[key])
        before = self._implied()
        super().__setattr__(key, value)
        following = [name for name, implied in before.items() if name != key and getattr(self, name) == implied]
        for name in following:
            # anew for each: one that follows may itself imply another
            super().__setattr__(name, self._implied()[name])

    @property
    def output_attentions(self) -> bool:
        """Any backend will do: weights are computed by the eager one when they are asked for."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    @property
    def _attn_implementation(self) -> str:
        """transformers' name of `attention_backend`; backends that it does not have count as its default, sdpa."""
        return {"eager": "eager", "flash": "flash_attention_2"}.get(getattr(self, "attention_backend", "auto"), "sdpa")

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        if value is not None:
            self.attention_backend = value


def _names_own_key(key: str) -> bool:
    return KEY_ALIASES.get(key, key) in own_keys(BertBlocksConfig)


def _is_known(key: str) -> bool:
    return key in FIELD_NAMES or key in HOUSEKEEPING or key.startswith("_")


def _refuse_unknown(key: str, value: Any) -> None:
    if not _is_known(key):
        hint = nearest(key, own_keys(BertBlocksConfig))
        raise ConfigError(f"{key!r} is no key of BertBlocksConfig (its value here is {value!r}){hint}.")


FIELD_NAMES: set[str] = {item.name for item in dataclasses.fields(BertBlocksConfig)}
