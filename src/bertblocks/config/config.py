"""The config of every encoder, validated when it is built."""

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
from bertblocks.config.blocks import SLOTS, block_keys, chosen_keys, implied_choice, why_unused
from bertblocks.config.presets import read_preset
from bertblocks.config.validation import (
    SIZES,
    ConfigError,
    check_choices,
    check_config,
    check_declarations,
    check_labels,
    check_size,
    check_sizes,
    check_type,
    check_types,
    check_volume,
    own_keys,
    reject,
)
from bertblocks.core.keys import Key
from bertblocks.core.log import logger
from bertblocks.core.messages import short_repr
from bertblocks.core.registry import nearest

#: The default of keys whose value follows from other keys.
IMPLIED: Any = None


class BertBlocksConfig(PreTrainedConfig):
    """Describes an encoder. `BertBlocksConfig()` is BERT-base; every key changes one aspect of it.

    Unknown keys and contradictory values raise `ConfigError`. A key whose default is implied by other keys gets its
    value when the config is built, and follows when those keys change.

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
    # a key of RoPE; transformers' property of this name must not hide it
    rope_scaling = None

    # ---- sizes
    #: Number of tokens in the vocabulary.
    vocab_size: int = 30522
    #: Width of the hidden states.
    hidden_size: int = 768
    #: Width of the token, type and position embeddings, projected to hidden_size if the two differ, as in ALBERT.
    #: Implied: hidden_size.
    embedding_size: int = IMPLIED
    #: Width of the masked-LM decoder's input, as in RemBERT. None means embedding_size.
    output_embedding_size: int | None = None
    #: Number of layers.
    num_hidden_layers: int = 12
    #: Number of distinct sets of layer weights. With fewer than one per layer, layers share a set, as in ALBERT.
    #: Implied: num_hidden_layers.
    num_hidden_groups: int = IMPLIED
    #: Which layers share a set: a name from the table below, or one registered with `register_sharing`.
    layer_sharing: str = "consecutive"
    #: Number of query heads.
    num_attention_heads: int = 12
    #: Number of key/value heads. Query head h uses head h * num_kv_heads // num_attention_heads. Implied:
    #: num_attention_heads.
    num_kv_heads: int = IMPLIED
    #: Width of a head. Implied: hidden_size / num_attention_heads, half of it with span_convolution.
    head_dim: int = IMPLIED
    #: Width of the feed-forward network; for a GLU, of each half.
    intermediate_size: int = 3072
    #: Number of learned positions, and the original length for RoPE scaling.
    max_position_embeddings: int = 512
    #: Number of token types; 0 for none.
    type_vocab_size: int = 2
    #: Number of task types as in ERNIE 2.0 and 3.0, whose models add the first one to all tokens; 0 for none.
    task_type_vocab_size: int = 0

    # ---- special tokens
    #: Padding token. Its embedding is initialised to 0 and gets no gradient.
    pad_token_id: int | None = 0
    #: Token at the start of a text.
    bos_token_id: int | None = None
    #: Token at the end of a text.
    eos_token_id: int | list[int] | None = None
    #: Token that a classifier reads.
    cls_token_id: int | None = None
    #: Token between two texts.
    sep_token_id: int | None = None
    #: Mask token. Masked diffusion and token_dropout require it.
    mask_token_id: int | None = None

    # ---- normalisation
    #: The norm: a name from the table below, or one registered with `register_norm`.
    norm_fn: str = "layer"
    #: pre x + f(Nx) | post N(x + f(x)) | pre_and_post N'(x + f(Nx)) | sandwich x + N'(f(Nx)) | none x + f(x).
    #: Implied: post; none for nGPT.
    norm_pos: str = IMPLIED
    #: norm_pos of attention alone, as in HybridNorm. BertBlocks has not compared it. Implied: norm_pos.
    attention_norm_pos: str = IMPLIED
    #: norm_pos of the feed-forward network alone. Implied: norm_pos.
    mlp_norm_pos: str = IMPLIED
    #: Added to the variance before a norm divides by its root.
    norm_eps: float = 1e-12
    #: Whether norms have a bias.
    norm_bias: bool = True
    #: Whether the norms in front of attention and feed-forward are multiplied by 1 / sqrt(l) in layer l, counted from 1
    #: (Sun et al., 2025). Evidence: positive for decoders with pre norms (arXiv 2502.05795); no comparison of encoders
    #: is known.
    norm_scaling: bool = False
    #: Factor on the token embeddings, before types, positions and norm; Gemma's is the root of hidden_size. It does not
    #: apply to inputs_embeds.
    embedding_scale: float = 1.0
    #: Factor on the output of attention and of the feed-forward network before it joins the residual stream, as in
    #: ESM C.
    residual_scale: float = 1.0
    #: How this output joins the residual stream: add, or a name registered with `register_residual`.
    residual_fn: str = "add"
    #: Whether a layer reads a x + b x0, a learned mixture of its input with that of the first layer. Evidence: shipped
    #: in NeoMME; no controlled study of encoders is known.
    input_mixing: bool = False
    #: Whether the embeddings are normalised. Implied: true; false for nGPT.
    embedding_norm: bool = IMPLIED
    #: Whether a linear layer projects the embeddings to hidden_size. Implied: true if embedding_size differs.
    embedding_projection: bool = IMPLIED
    #: Whether this projection has a bias.
    embedding_projection_bias: bool = True
    #: Whether the norm of the embeddings follows the projection, as in DeBERTa, instead of preceding it.
    embedding_norm_after_projection: bool = False
    #: Whether a norm follows the last layer. Implied: true if mlp_norm_pos is pre or sandwich.
    final_norm: bool = IMPLIED
    #: Whether this last norm has a bias. None means norm_bias.
    final_norm_bias: bool | None = None
    #: Whether the first layer has a norm before attention. ModernBERT has none: its embeddings are already normalised.
    first_attention_norm: bool = True
    #: Whether attention and feed-forward run in parallel on the same input: x + A(Nx) + F(Nx).
    parallel_block: bool = False

    # ---- feed-forward
    #: The network: a name from the table below, or one registered with `register_mlp`. Implied: mlp; glu for nGPT.
    mlp_type: str = IMPLIED
    #: Any activation of transformers, or a name registered with `register_activation`. Implied: gelu; silu for nGPT.
    hidden_act: str = IMPLIED
    #: Whether the up projection of the feed-forward network has a bias.
    mlp_in_bias: bool = True
    #: Whether the down projection has a bias.
    mlp_out_bias: bool = True

    # ---- positions
    #: Positions added to the embeddings: none, a name from the table below, or one registered with
    #: `register_position`.
    embd_pos_enc_kind: str = "learned"
    #: Positions inside attention: none, a name from the table below, or one registered with `register_position`.
    block_pos_enc_kind: str = "none"

    # ---- attention
    #: Whether the projection to queries, keys and values has a bias.
    attention_qkv_bias: bool = True
    #: Whether keys have a bias too. DeBERTa v1 has none. Implied: attention_qkv_bias.
    attention_key_bias: bool = IMPLIED
    #: Whether the output projection has a bias.
    attention_out_bias: bool = True
    #: How scores become weights: softmax, or a name registered with `register_attention_fn`, which the eager backend
    #: computes.
    attention_fn: str = "softmax"
    #: Whether each head has a learned logit that joins the softmax over the keys of every query, so that a query can
    #: attend to nothing. Evidence: shipped in gpt-oss, a decoder; no comparison of encoders is known.
    attention_sinks: bool = False
    #: What the output of attention passes through before its projection: none, a name from the table below, or one
    #: registered with `register_gate`.
    attention_gate: str = "none"
    #: Whether every layer adds a learned embedding of each token to its values, v + E[id], a table of vocab_size rows.
    #: Evidence: shipped in NeoMME; no controlled study of encoders is known.
    value_embedding: bool = False
    #: Factor on the products of queries and keys. T5 has 1. Implied: head_dim ** -0.5, and its inverse for nGPT.
    #: parametrization mup multiplies it.
    attention_scale: float = IMPLIED
    #: Whether a learned norm is applied to queries and keys.
    qk_norm: bool = False
    #: Whether tokens see only themselves and earlier tokens, as in decoders. `model.set_causal` changes it.
    causal: bool = False
    #: Whether layers use sliding windows, except those that global_attention_every_n_layers makes global.
    local_attention: bool = False
    #: Window size of local layers: tokens see half of this on either side, so 128 means 64 to the left and right.
    local_attention_window_size: int = 128
    #: With local_attention, layer i is global if i is a multiple of this. None makes all layers local.
    global_attention_every_n_layers: int | None = None
    #: Number of tokens at the start of every sequence that see and are seen by all others, even in local layers.
    num_global_tokens: int = 0
    #: "global" or "local" for every layer. Implied: from local_attention and global_attention_every_n_layers.
    layer_types: list[str] = IMPLIED
    #: Keys that differ in single layers: {3: {"hidden_act": "silu"}}.
    layer_overrides: dict[int, dict[str, Any]] | None = None

    # ---- convolution
    #: Kernel size of a convolution over the embeddings that is added to the output of the first layer, followed by a
    #: norm, as in DeBERTa v2. 0 for none.
    input_conv_size: int = 0
    #: Number of channel groups of this convolution.
    input_conv_groups: int = 1
    #: Activation of this convolution.
    input_conv_act: str = "tanh"

    #: Whether a dynamic convolution with as many heads runs next to attention, as in ConvBERT. Both read the same
    #: queries, and the output projection reads both. Evidence: better on GLUE than ELECTRA after less training in its
    #: paper (arXiv 2008.02496); BertBlocks has not compared it.
    span_convolution: bool = False

    # ---- nGPT
    #: Whether hidden states stay on the unit sphere (Loshchilov et al., 2024), in NeoBERT's form.
    ngpt: bool = False

    # ---- dropout
    #: Dropout after the embeddings and their norm.
    embedding_dropout: float = 0.1
    #: Dropout on attention weights.
    attention_dropout: float = 0.1
    #: Dropout on the output of attention.
    attention_output_dropout: float = 0.1
    #: Whether embeddings of mask tokens are set to 0 and the others scaled up, as in ESM-2; in evaluation too.
    token_dropout: bool = False
    #: Dropout inside the feed-forward network, before the down projection.
    mlp_dropout: float = 0.0
    #: Dropout on the output of the feed-forward network.
    mlp_output_dropout: float = 0.1
    #: Dropout before the final linear layer of a sequence classifier.
    classifier_dropout: float = 0.1
    #: Dropout before the final linear layer of a token classifier. Implied: classifier_dropout.
    token_classifier_dropout: float = IMPLIED
    #: Dropout before the final linear layer for question answering. Implied: classifier_dropout if
    #: classifier_head_on_tokens is true, otherwise 0 as in BERT.
    qa_dropout: float = IMPLIED
    #: Dropout before the dense layer of a classifier head.
    classifier_head_dropout: float = 0.0

    # ---- initialisation
    #: How matrices start, or a name registered with `register_initialization`: trunc_normal and normal with
    #: initializer_range; uniform with the same standard deviation; megatron divides it by the root of twice the number
    #: of layers for outputs; fan_in is 1 / sqrt(fan in), which mitchell divides by sqrt(2 l) for outputs of layer l;
    #: xavier, kaiming, deepnet, ngpt. Implied: trunc_normal; ngpt for nGPT.
    init_kind: str = IMPLIED
    #: Standard deviation of initial weights.
    initializer_range: float = 0.02
    #: Standard deviation of initial embeddings. 5.8e-5, that of RWKV's small embeddings (uniform up to 1e-4), needs
    #: embedding_norm. Implied: initializer_range.
    embedding_initializer_range: float = IMPLIED
    #: Number of standard deviations at which a truncated normal is cut.
    initializer_cutoff_factor: float = 2.0
    #: How scales, initial weights and learning rates follow the width: standard (they do not), or a name from the table
    #: below.
    parametrization: str = "standard"

    # ---- heads
    #: Whether BertBlocksModel has BERT's pooler (dense and tanh on the first token).
    pooler: bool = True
    #: Whether BertBlocksModel can predict contacts in a protein from its attention weights, as ESM-2 does.
    contact_head: bool = False
    #: Whether the masked-LM decoder shares its matrix with the token embedding. Implied: true; false for nGPT.
    tie_word_embeddings: bool = IMPLIED
    #: Whether a dense layer, an activation and a norm come before the masked-LM decoder.
    mlm_head_dense: bool = True
    #: Activation of the masked-LM head. Implied: hidden_act.
    mlm_head_act: str = IMPLIED
    #: Whether this dense layer is a gated linear unit, act(W x) * V x instead of act(W x), of twice its size. Evidence:
    #: upstream BertBlocks has it with feed-forward networks of type glu; no comparison is known.
    mlm_head_glu: bool = False
    #: Whether the dense layer of the masked-LM head has a bias.
    mlm_head_bias: bool = True
    #: Whether the masked-LM head has a norm.
    mlm_head_norm: bool = True
    #: Width of an additional dense layer in front of the masked-LM head, as in UltraBERT. None omits it.
    mlm_head_size: int | None = None
    #: Whether the masked-LM decoder has a bias.
    decoder_bias: bool = True
    #: Whether the head for replaced token detection reads the norm of each token plus the first one, as in DeBERTaV3,
    #: instead of each token, as in ELECTRA. Implied: true if block_pos_enc_kind is disentangled.
    detector_norm: bool = IMPLIED
    #: How a sequence classifier pools tokens: the first token (cls), the last one, or the mean or max of all.
    classifier_pooling: str = "cls"
    #: Head before the final linear layer of a sequence classifier: pooler (BERT), dense (ModernBERT, RoBERTa) or none.
    classifier_head: str = "pooler"
    #: Activation of a dense classifier head.
    classifier_head_act: str = "tanh"
    #: Whether a dense classifier head has a bias.
    classifier_head_bias: bool = True
    #: Whether a dense classifier head has a norm.
    classifier_head_norm: bool = False
    #: Whether the dense head is applied to every token before pooling, as in EuroBERT.
    classifier_head_before_pooling: bool = False
    #: Whether token classification and question answering use the dense head too, as in ModernBERT.
    classifier_head_on_tokens: bool = False
    #: Whether the final linear layer of a classifier has a bias.
    classifier_bias: bool = True
    #: Whether that of token classification and question answering has one. Implied: classifier_bias.
    token_classifier_bias: bool = IMPLIED
    #: Head for question answering: linear, or a name from the table below.
    qa_head: str = "linear"
    #: Whether the noise level of each text, embedded by sines and two matrices, is added to its tokens. Where masked
    #: diffusion does not give it, it is the share of mask tokens. Evidence: against it; Zheng et al. (2024, arXiv
    #: 2409.02908) show that training and sampling do not need the time.
    timestep_embedding: bool = False
    #: Lowest noise level of masked diffusion, which draws from [diffusion_min_time, 1].
    diffusion_min_time: float = 1e-3

    # ---- quantization
    #: int8 for linear layers with int8 weights, for inference only; set by `model.quantize`. None for float weights.
    quantization: str | None = None

    # ---- runtime (no effect on results)
    #: The checkpoint family that the model was loaded from, which is the default for an export.
    family: str | None = None
    #: auto, cpu, flash, triton, sdpa, eager, or a name registered with `register_backend`.
    attention_backend: str = "auto"
    #: Fused kernels on CUDA: auto, liger, torch.
    kernel_backend: str = "auto"
    #: Whether padding is removed before the first layer.
    unpad: bool = True

    # ------------------------------------------------------------------ construction

    def __init__(self, **options: Any) -> None:
        check_declarations(type(self))
        for key, value in options.items():
            check_volume(key, value)
        if options.get("attention_backend") == "auto" and "attn_implementation" in options:
            del options["attention_backend"]  # it leaves the choice open, and transformers' option makes it
        options = canonical(options)
        options.pop("transformers_version", None)  # every save writes the current one
        model_type = options.pop("model_type", self.model_type)
        if model_type != self.model_type:
            raise ConfigError(
                f"model_type is {short_repr(model_type)}; it must be {self.model_type!r} "
                "(bertblocks.from_huggingface reads checkpoints of other families)."
            )
        # an unknown block explains unknown keys
        check_choices({key: value for key, value in options.items() if isinstance(value, str)}, SLOTS)
        for key, value in options.items():
            _check_key(key, value)
        check_labels(options)
        given = {key: options.pop(key) for key in block_keys() if key in options}
        for item in dataclasses.fields(self):
            default = None if item.default is dataclasses.MISSING else item.default
            setattr(self, item.name, options.pop(item.name, default))
        self._read_overrides()
        check_types(self, implied=False)
        check_sizes(self)
        self.__post_init__(**options)
        self._resolve()
        self._set_block_keys(given)
        self._is_built = True
        self.validate()

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "BertBlocksConfig":
        """Build a known architecture with `overrides` applied. `preset_names()` lists the names.

        Example:
            >>> BertBlocksConfig.from_preset("mini", norm_fn="rms").norm_fn
            'rms'
        """
        overrides = canonical(overrides)
        options = {**read_preset(name)["config"], **overrides}
        unused = cls.unused_keys(options)
        return cls(**{key: value for key, value in options.items() if key in overrides or key not in unused})

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Any:  # type: ignore[override]
        """Like transformers' method, but options that are neither config keys nor loading options raise an error."""
        for key, value in options.items():
            # such a caller handles unused options
            if key not in LOADING_OPTIONS and not options.get("return_unused_kwargs"):
                _check_key(KEY_ALIASES.get(key, key), value)
        return super().from_pretrained(pretrained_model_name_or_path, **options)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> Any:
        """Like transformers' method, but keys that override the file are validated, and the keys they imply follow.

        Other options pass, because transformers' tokenizers forward theirs to the config. Keys of blocks that the file
        does not choose are left out; earlier versions wrote them all.
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
        built = super().from_dict(cls._without_unused(config_dict), **options)
        config = built[0] if isinstance(built, tuple) else built
        for key, value in overrides.items():
            setattr(config, key, value)
        config.validate()
        return built

    def to_dict(self) -> dict[str, Any]:
        """Like transformers' method, with transformers' names for layer types so that its tools can read the file."""
        values = super().to_dict()
        annotations = {key for key in vars(self) if not hasattr(type(self), key) and not _is_known(key)}
        for key in ("_is_built", *annotations):
            values.pop(key, None)
        values["layer_types"] = [LAYER_TYPE_NAMES.get(kind, kind) for kind in values["layer_types"]]
        return values

    def _implied(self) -> dict[str, Any]:
        """Return the implied value of every key that has one."""
        every = self.global_attention_every_n_layers
        is_local = [self.local_attention and not (every and i % every == 0) for i in range(self.num_hidden_layers)]
        return {
            "norm_pos": "none" if self.ngpt else "post",
            "mlp_type": implied_choice("mlp_type", vars(self)),
            "hidden_act": "silu" if self.ngpt else "gelu",
            "embedding_size": self.hidden_size,
            "embedding_projection": self.embedding_size not in (None, self.hidden_size),
            "num_hidden_groups": self.num_hidden_layers,
            "token_classifier_dropout": self.classifier_dropout,
            "token_classifier_bias": self.classifier_bias,
            "qa_dropout": self.classifier_dropout if self.classifier_head_on_tokens else 0.0,
            "embedding_norm": not self.ngpt,
            "attention_norm_pos": self.norm_pos or ("none" if self.ngpt else "post"),
            "mlp_norm_pos": self.norm_pos or ("none" if self.ngpt else "post"),
            "final_norm": (self.mlp_norm_pos or self.norm_pos or "post") in ("pre", "sandwich") and not self.ngpt,
            "embedding_initializer_range": self.initializer_range,
            "init_kind": "ngpt" if self.ngpt else "trunc_normal",
            "tie_word_embeddings": not self.ngpt,
            "mlm_head_act": self.hidden_act or ("silu" if self.ngpt else "gelu"),
            "attention_key_bias": self.attention_qkv_bias,
            "detector_norm": self.block_pos_enc_kind == "disentangled",
            "num_kv_heads": self.num_attention_heads,
            "head_dim": self._implied_head_dim(),
            "attention_scale": self._implied_scale(),
            "layer_types": ["local" if local else "global" for local in is_local],
            **{name: key.implied(self) for name, key in self.block_keys().items() if key.implied is not None},
        }

    def _implied_head_dim(self) -> int:
        return self.hidden_size // max(self.num_attention_heads, 1) // (2 if self.span_convolution else 1)

    def _implied_scale(self) -> float:
        head_dim = self.head_dim or self._implied_head_dim()
        return max(head_dim, 1) ** (0.5 if self.ngpt else -0.5)

    def _resolve(self) -> None:
        """Fill in implied keys and replace aliases of values."""
        for key, value in self._implied().items():
            if getattr(self, key) is None:
                setattr(self, key, value)
        self.layer_types = [LAYER_TYPE_ALIASES.get(kind, kind) for kind in self.layer_types]

    # ------------------------------------------------------------------ keys of blocks

    def block_keys(self) -> dict[str, Key]:
        """Return the keys that the chosen blocks declare, in any layer."""
        return chosen_keys(vars(self), self.layer_overrides)

    def key_types(self) -> dict[str, Any]:
        """Return the keys of this config and their types: those of every config, then those of its blocks."""
        return {**own_keys(type(self)), **{name: key.type for name, key in self.block_keys().items()}}

    def _set_block_keys(self, given: dict[str, Any]) -> None:
        """Set the keys of the chosen blocks; a key of another block may only have its default value."""
        chosen = self.block_keys()
        for name, value in given.items():
            if name in chosen:
                setattr(self, name, value)
                if value is not None or chosen[name].implied is None:
                    check_type(name, getattr(self, name), chosen[name].type)
            elif value not in (None, block_keys()[name].default_for(self)):
                reject(name, value, why_unused(name, vars(self)))
        self._update_block_keys()

    def _update_block_keys(self) -> None:
        """Remove keys of blocks that are no longer chosen, and give new ones their default."""
        chosen = self.block_keys()
        for name in (block_keys().keys() - chosen.keys()) & vars(self).keys():
            del self.__dict__[name]
        for name in sorted(chosen, key=lambda name: chosen[name].implied is not None):
            if vars(self).get(name) is None:
                super().__setattr__(name, chosen[name].default_for(self))

    @classmethod
    def unused_keys(cls, values: dict[str, Any]) -> set[str]:
        """Return the keys in `values` that belong to blocks which `values` do not choose."""
        choices = {slot: values.get(slot, getattr(cls, slot)) for slot in SLOTS}
        choices = {slot: implied_choice(slot, choices) if name is None else name for slot, name in choices.items()}
        return values.keys() & (block_keys().keys() - chosen_keys(choices, values.get("layer_overrides")).keys())

    @classmethod
    def _without_unused(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out keys of blocks that a saved config does not choose, and log those that are not at their default."""
        unused = cls.unused_keys(canonical(values))
        defaults = cls() if unused else None
        for name in sorted(unused):
            if values[name] not in (getattr(defaults, name), None):
                choices = {slot: values.get(slot, getattr(defaults, slot)) for slot in SLOTS}
                logger.info("%s is %s in the file, and is left out: %s.", name, values[name], why_unused(name, choices))
        return {key: value for key, value in values.items() if key not in unused}

    # ------------------------------------------------------------------ layers

    def _read_overrides(self) -> None:
        """Convert layer numbers, which JSON stores as strings, and replace aliases."""
        if not isinstance(self.layer_overrides, dict):
            return
        layers: dict[Any, Any] = {}
        for key, value in self.layer_overrides.items():
            index = int(key) if re.fullmatch(r"\d+", str(key)) else key
            if index in layers:
                raise ConfigError(f"layer_overrides names layer {index} twice; keep one entry.")
            layers[index] = canonical(value) if isinstance(value, dict) else value
        self.layer_overrides = layers

    def for_layer(self, index: int) -> "BertBlocksConfig":
        """Return this config with the overrides of one layer applied."""
        layer = copy.copy(self)
        for key, value in (self.layer_overrides or {}).get(index, {}).items():
            setattr(layer, key, value)
        return layer

    def for_final_norm(self) -> "BertBlocksConfig":
        """Return the config that the norm after the last layer is built from."""
        if self.final_norm_bias is None:
            return self
        config = copy.copy(self)
        config.norm_bias = self.final_norm_bias
        return config

    @property
    def decoder_size(self) -> int:
        """The width of the masked-LM decoder's input."""
        return self.output_embedding_size or self.embedding_size

    def layer_group(self, index: int) -> int:
        """Return the index of a layer's weights: its own unless layers share weights."""
        return SLOTS["layer_sharing"][self.layer_sharing].group(index, self.num_hidden_layers, self.num_hidden_groups)

    def validate(self) -> None:
        """Raise `ConfigError` for an invalid config. Runs when a config is built or saved and when a model is built."""
        check_config(self)

    # ------------------------------------------------------------------ integration with transformers

    def __setattr__(self, key: str, value: Any) -> None:
        """Reject unknown keys, and update the keys that this one implies unless they were set explicitly."""
        key = KEY_ALIASES.get(key, key)
        value = canonical_value(key, value)
        check_volume(key, value)
        is_built = self.__dict__.get("_is_built")
        # tools annotate configs, and annotations are not saved; only what looks like a misspelled key is an error
        block_key = block_keys().get(key)
        if block_key is not None and block_key.read is not None:
            value = block_key.read(value)
        if not hasattr(type(self), key) and (not is_built or nearest(key, _own_names(), cutoff=0.88)):
            _check_key(key, value)
        if key == "num_labels":
            check_labels({key: value})
        if not is_built or not (block_key is not None or key in own_keys(type(self))):
            super().__setattr__(key, value)
            return
        check_type(key, value, own_keys(type(self))[key] if block_key is None else block_key.type)
        if key in SIZES and value is not None:
            check_size(key, value)
        before = self._implied()
        super().__setattr__(key, value)
        following = [name for name, implied in before.items() if name != key and getattr(self, name) == implied]
        implied = self._implied()
        for name in following:
            if name in implied and getattr(self, name) != implied[name]:
                super().__setattr__(name, implied[name])
                implied = self._implied()  # an updated key may imply another
        if key in SLOTS or key == "layer_overrides":
            self._update_block_keys()

    def __getattr__(self, key: str) -> Any:
        """A key of a block that is not chosen has its default, so that code can read any key of any config."""
        declared = None if key.startswith("_") else block_keys().get(key)
        if declared is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {key!r}")
        return declared.default_for(self)

    @property
    def output_attentions(self) -> bool:
        """Works with every backend: the eager one computes the weights when they are requested."""
        return bool(self._output_attentions)

    @output_attentions.setter
    def output_attentions(self, value: bool) -> None:
        self._output_attentions = value

    @property
    def _attn_implementation(self) -> str:
        """transformers' name for `attention_backend`; backends that it does not have count as its default, sdpa."""
        return {"eager": "eager", "flash": "flash_attention_2"}.get(getattr(self, "attention_backend", "auto"), "sdpa")

    @_attn_implementation.setter
    def _attn_implementation(self, value: Any) -> None:
        if value is not None:
            self.attention_backend = value


def _names_own_key(key: str) -> bool:
    return KEY_ALIASES.get(key, key) in _own_names()


def _own_names() -> list[str]:
    return [*own_keys(BertBlocksConfig), *block_keys()]


def _is_known(key: str) -> bool:
    return key in FIELD_NAMES or key in HOUSEKEEPING or key.startswith("_") or key in block_keys()


def _check_key(key: str, value: Any) -> None:
    if not _is_known(key):
        hint = nearest(key, _own_names())
        raise ConfigError(
            f"{short_repr(key)} is not a key of BertBlocksConfig (its value is {short_repr(value)}){hint}."
        )


FIELD_NAMES: set[str] = {item.name for item in dataclasses.fields(BertBlocksConfig)}
