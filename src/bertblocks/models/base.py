"""The base class of all models: initialization, complete loading, quantization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.core.tensor_files import INDEX, SINGLE, add_checksums, verify_weights
from bertblocks.models.heads import find_fresh_heads, is_head_tensor
from bertblocks.models.quantization import MIN_COSINE, quantize, replace_layers
from bertblocks.nn.initialization import init_module
from bertblocks.nn.linear import Linear
from bertblocks.nn.rope import RotaryPosition
from bertblocks.nn.shortcut import ValueEmbedding

if TYPE_CHECKING:
    from typing_extensions import Self


class BertBlocksPreTrainedModel(PreTrainedModel):
    """Base of all models. They are transformers models, so tools for those work with them."""

    if TYPE_CHECKING:  # transformers leaves the types of these open

        @property
        def base_model(self) -> Any: ...

        def to(self, *args: Any, **options: Any) -> Self: ...  # type: ignore[override]

    config_class = BertBlocksConfig
    config: BertBlocksConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_sdpa = True

    def __init__(self, config: BertBlocksConfig) -> None:
        config.validate()
        super().__init__(config)

    def _init_weights(self, module: nn.Module) -> None:
        init_module(module, self.config)

    def post_init(self) -> None:
        super().post_init()
        if self.config.quantization is not None:
            replace_layers(self)
            self.requires_grad_(False).eval()

    def quantize(
        self, method: str = "int8", samples: Mapping[str, Tensor] | None = None, min_cosine: float = MIN_COSINE
    ) -> Self:
        """Converts the linear layers to int8 for inference, in place; see `bertblocks.models.quantization.quantize`.

        Raises `QuantizationError` and leaves the model unchanged if the outputs for `samples` (by default random ids)
        differ too much.

        Example:
            >>> from bertblocks import BertBlocksModel
            >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini")).quantize("int8")
            >>> model(torch.tensor([[5, 6, 7]])).last_hidden_state.shape
            torch.Size([1, 3, 64])
        """
        quantize(self, method, samples, min_cosine)
        return self

    def train(self, mode: bool = True) -> Self:
        if mode and self.config.quantization is not None:
            raise RuntimeError("An int8 model cannot be trained: train the fp32 model, then quantize it.")
        return super().train(mode)

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, *_: Any, **__: Any) -> Any:
        """Maps transformers' choice of attention kernels to `config.attention_backend`."""
        if attn_implementation == self.config._attn_implementation:
            return attn_implementation
        before = self.config.attention_backend
        self.config._attn_implementation = attn_implementation
        try:
            self.config.validate()
        except ConfigError as error:
            self.config.attention_backend = before
            # transformers' words, which its tools look for
            raise ValueError(
                f'Specified `attn_implementation="{attn_implementation}"` is not supported: {error}'
            ) from error
        return self.config._attn_implementation

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> nn.Embedding:
        """As in transformers, but raises an error if special tokens in use would be removed."""
        for key in ("pad_token_id", "mask_token_id"):
            token = getattr(self.config, key)
            if new_num_tokens is not None and token is not None and token >= new_num_tokens:
                raise ValueError(
                    f"{key} is {token}; a vocabulary of {new_num_tokens} does not contain it: set {key} first."
                )
        tokens = super().resize_token_embeddings(new_num_tokens, *args, **options)
        for module in self.modules():
            if isinstance(module, ValueEmbedding):
                module.table = self._get_resized_embeddings(module.table, tokens.num_embeddings)
        return tokens

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """As in transformers, but a damaged, incomplete or foreign checkpoint raises an error.

        Weights that carry checksums are verified, unless the environment variable `BERTBLOCKS_VERIFY` is 0. A head that
        the checkpoint lacks as a whole is initialized, and transformers reports it, so that a pretrained encoder can be
        fine-tuned. Pickled weights are never read.
        """
        if options.get("use_safetensors") is False:
            raise ValueError("use_safetensors is False; BertBlocks reads only safetensors, never pickles.")
        options["use_safetensors"] = True
        want_info = options.pop("output_loading_info", False)
        may_resize = options.pop("ignore_mismatched_sizes", False)
        variant, folder = options.get("variant"), _find_folder(pretrained_model_name_or_path, options)
        if folder is not None:
            verify_weights(folder, variant)
        try:
            loaded: Any = super().from_pretrained(
                pretrained_model_name_or_path,
                *args,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
        except SafetensorError as error:
            raise OSError(f"{pretrained_model_name_or_path}: the safetensors file is damaged ({error}).") from error
        if folder is None and (folder := _find_cached(pretrained_model_name_or_path, options)) is not None:
            verify_weights(folder, variant)
        model, info = loaded
        if info["mismatched_keys"] and not may_resize:
            name, found, wanted = min(info["mismatched_keys"])
            raise RuntimeError(
                f"{pretrained_model_name_or_path}: {name} has shape {list(found)}; its config asks for {list(wanted)}. "
                "ignore_mismatched_sizes=True initializes such weights instead."
            )
        if pretrained_model_name_or_path is not None:  # otherwise the caller gives a state dict and gets a report
            _check_complete(model, info, pretrained_model_name_or_path)
        if model.config.quantization is not None:
            model.requires_grad_(False)  # loading creates new parameters
        return (model, info) if want_info else model

    def written(self) -> dict[str, BertBlocksPreTrainedModel]:
        """The models that a training run writes, by the names of their folders."""
        return {"model": self}

    def written_weights(self, name: str) -> dict[str, Tensor]:
        """The weights of a written model that differ from those it is trained with."""
        return {}

    def set_rope_theta(self, theta: float) -> None:
        """Changes the RoPE theta of the global layers, for training on longer texts; local layers keep theirs.

        A global layer whose theta is in `layer_overrides` keeps it, too.

        Example:
            >>> from bertblocks import BertBlocksModel
            >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini", block_pos_enc_kind="rope"))
            >>> model.set_rope_theta(160_000)
            >>> model.config.rope_theta, model.encoder.layers[0].attention.position.theta
            (160000.0, 160000.0)
        """
        config, encoder = self.config, self.base_model.encoder
        positions = {}
        for group, layer in enumerate(encoder.layers):
            index, position = encoder.order.index(group), layer.attention.position
            if isinstance(position, RotaryPosition) and config.layer_types[index] == "global":
                positions[index] = position
        if not theta > 0:
            raise ValueError(f"rope_theta is {theta}; it must be larger than 0.")
        if not positions:
            raise ValueError(f"Cannot set rope_theta to {theta:g}: the model has no global layer with RoPE.")
        local_theta = config.local_rope_theta
        config.rope_theta = float(theta)
        config.local_rope_theta = local_theta  # it would follow the global theta otherwise
        for index, position in positions.items():
            position.theta = config.for_layer(index).rope_theta

    def set_causal(self, causal: bool) -> None:
        """Hides later tokens in all layers, or shows them; a layer with `causal` in `layer_overrides` keeps its value.

        Example:
            >>> from bertblocks import BertBlocksModel
            >>> model = BertBlocksModel(BertBlocksConfig.from_preset("mini", causal=True))
            >>> model.set_causal(False)
            >>> model.config.causal, model.encoder.layers[0].attention.pattern.is_causal
            (False, False)
        """
        self.config.causal = causal
        self.config.validate()
        encoder = self.base_model.encoder
        for group, layer in enumerate(encoder.layers):
            is_causal = self.config.for_layer(encoder.order.index(group)).causal
            layer.attention.pattern = dataclasses.replace(layer.attention.pattern, is_causal=is_causal)

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, *args: Any, **options: Any) -> None:
        """As in transformers, but the weights carry checksums and are flushed to disk.

        `BERTBLOCKS_VERIFY=0` turns this off. Weights that `push_to_hub=True` uploads do not have them.
        """
        super().save_pretrained(save_directory, is_main_process, *args, **options)
        if is_main_process and Path(save_directory).is_dir():
            add_checksums(Path(save_directory), options.get("variant"))

    @torch.no_grad()
    def renormalize_weights(self) -> None:
        """Projects nGPT's matrices back onto the unit sphere along the hidden dimension; call it after each step.

        Does nothing unless `ngpt` and `ngpt_renormalize` are set in the config.
        """
        if not (self.config.ngpt and self.config.ngpt_renormalize):
            return
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes = isinstance(module, Linear) and module.role in ("out", "embedding")
                module.weight /= module.weight.norm(dim=0 if writes else 1, keepdim=True).clamp(min=1e-8)


def _find_folder(source: Any, options: Mapping[str, Any]) -> Path | None:
    """The local folder of a checkpoint; None for a hub id and for a state dict."""
    return Path(source) / options.get("subfolder", "") if source is not None and Path(source).is_dir() else None


def _find_cached(source: Any, options: Mapping[str, Any]) -> Path | None:
    """The folder to which transformers has downloaded the weights of a hub id."""
    for name in (SINGLE, INDEX) if source is not None else ():
        path = Path(options.get("subfolder", "")) / name
        found = try_to_load_from_cache(
            str(source), str(path), cache_dir=options.get("cache_dir"), revision=options.get("revision")
        )
        if isinstance(found, str):
            return Path(found).parent
    return None


def _check_complete(model: PreTrainedModel, info: dict[str, Any], source: object) -> None:
    """Raises unless the encoder is complete, each head is loaded whole or not at all, and nothing is left over."""
    missing = sorted(info["missing_keys"])
    fresh, required = find_fresh_heads(model, missing)
    if "decoder" in fresh and any(name.startswith("head.") for name in set(model.state_dict()) - set(missing)):
        required = [name for name in missing if name.startswith("decoder.")]  # the two are saved together
    if required:
        raise OSError(
            f"{source}: the checkpoint lacks {required[0]!r} ({len(missing)} missing in all); nothing was loaded."
        )
    for head in fresh:
        if model.config.quantization is not None and not head.endswith("pooler"):
            raise OSError(
                f"{source}: the {model.config.quantization} checkpoint has no {head!r}, and a fresh one cannot be "
                "trained: train the head first, then quantize."
            )
    for name in sorted(info["unexpected_keys"]):
        if not is_head_tensor(name, model):
            raise OSError(
                f"{source}: the checkpoint has {name!r}, which does not belong to its config; nothing was loaded."
            )
