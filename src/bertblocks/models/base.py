"""What all models share: reading a batch, initialisation, and loading that never ends half done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.models.initialization import init_module
from bertblocks.models.quantization import MIN_COSINE, quantize, replace_layers
from bertblocks.nn.layout import SequenceLayout
from bertblocks.nn.linear import Linear

if TYPE_CHECKING:
    from typing_extensions import Self

#: Parts of task models, which a checkpoint of another task may have or lack as a whole.
HEAD_PARTS = {"pooler", "head", "classifier_head", "decoder", "logit_scale", "classifier", "tagger", "spans", "order"}


class BertBlocksPreTrainedModel(PreTrainedModel):
    """Base of all models: a transformers model, so everything that works with those works with these."""

    config_class = BertBlocksConfig
    config: BertBlocksConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True

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
        """Makes this model one for inference with int8 linear layers, in place; see `bertblocks.models.quantization.quantize`.

        Refused, with the model left as it was, where `samples` (random ids by default) come out too differently.

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

    def _check_and_adjust_attn_implementation(self, attn_implementation: str | None, **_: Any) -> str | None:
        """transformers' choice of kernels is `config.attention_backend` here."""
        before = self.config.attention_backend
        self.config._attn_implementation = attn_implementation
        try:
            self.config.validate()
        except ConfigError:
            self.config.attention_backend = before
            raise
        return None

    def resize_token_embeddings(self, new_num_tokens: int | None = None, *args: Any, **options: Any) -> nn.Embedding:
        """As transformers' own, but special tokens that are in use cannot be cut off."""
        for key in ("pad_token_id", "mask_token_id"):
            token = getattr(self.config, key)
            if new_num_tokens is not None and token is not None and token >= new_num_tokens:
                raise ValueError(f"{key} is {token}; a vocabulary of {new_num_tokens} would not hold it: set it first.")
        return super().resize_token_embeddings(new_num_tokens, *args, **options)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args, **options):  # type: ignore[override]
        """As transformers' own, but all or nothing: a damaged, incomplete or foreign checkpoint is an error.

        A head that the checkpoint does not have at all is made fresh (transformers reports which), so that a pretrained
        encoder can be fine-tuned. Pickled weights are never read.
        """
        if options.get("use_safetensors") is False:
            raise ValueError("use_safetensors is False; BertBlocks reads safetensors only, never pickles.")
        options["use_safetensors"] = True
        want_info = options.pop("output_loading_info", False)
        try:
            model, info = super().from_pretrained(
                pretrained_model_name_or_path, *args, output_loading_info=True, **options
            )
        except SafetensorError as error:
            raise OSError(f"{pretrained_model_name_or_path}: its safetensors file is damaged ({error}).") from error
        except RuntimeError as error:
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise OSError(
                f"{pretrained_model_name_or_path}: its weights have other shapes than its config asks for."
            ) from error
        _refuse_partial_load(model, info, pretrained_model_name_or_path)
        if model.config.quantization is not None:
            model.requires_grad_(False)  # transformers makes parameters anew
        return (model, info) if want_info else model

    @torch.no_grad()
    def renormalize_weights(self) -> None:
        """Puts nGPT's matrices back on the unit sphere along the hidden dimension; to be called after each step.

        Does nothing unless the config says `ngpt` and `ngpt_renormalize`.
        """
        if not (self.config.ngpt and self.config.ngpt_renormalize):
            return
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                writes = isinstance(module, Linear) and module.role in ("out", "embedding")
                module.weight /= module.weight.norm(dim=0 if writes else 1, keepdim=True).clamp(min=1e-8)


def _refuse_partial_load(model: PreTrainedModel, info: dict[str, Any], source: object) -> None:
    """Raises unless the encoder is complete and each head is loaded whole or not at all."""
    prefix = model.base_model_prefix + "."

    def part(key: str) -> str:
        return key.removeprefix(prefix).split(".")[0]

    expected = set(model.state_dict())
    missing = set(info["missing_keys"])
    for key in sorted(missing):
        siblings = {other for other in expected if part(other) == part(key)}
        if part(key) not in HEAD_PARTS or not siblings <= missing:
            raise OSError(
                f"{source}: the checkpoint lacks {key!r} ({len(missing)} missing in all); nothing was loaded."
            )
        if model.config.quantization is not None and part(key) != "pooler":
            raise OSError(
                f"{source}: the {model.config.quantization} checkpoint has no {part(key)!r}, and a fresh one could not "
                "be trained: train the head first, then quantize."
            )
    for key in sorted(info["unexpected_keys"]):
        if part(key) not in HEAD_PARTS:
            raise OSError(
                f"{source}: the checkpoint has {key!r}, which its config has no place for; nothing was loaded."
            )


# ---------------------------------------------------------------------- input


class EncoderInput:
    """Model input as flat tokens with their layout."""

    def __init__(
        self,
        config: BertBlocksConfig,
        vocab_size: int,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        token_type_ids: Tensor | None,
        position_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        packed_seqlens: Tensor | None,
    ) -> None:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        shape = tuple(input_ids.shape if input_ids is not None else inputs_embeds.shape[:-1])  # type: ignore[union-attr]
        device = (input_ids if input_ids is not None else inputs_embeds).device  # type: ignore[union-attr]
        self.layout = read_layout(shape, device, attention_mask, cu_seqlens, packed_seqlens, config.unpad)
        self.token_ids = None if input_ids is None else self._read("input_ids", input_ids, vocab_size, "vocab_size")
        self.embeddings = None if inputs_embeds is None else self.layout.gather(inputs_embeds)
        self.token_types = self._read_types(token_type_ids, config)
        self.positions = self._read_positions(position_ids, config)

    def _read(self, name: str, ids: Tensor, limit: int, limit_key: str) -> Tensor:
        """Flat ids, checked against their table where that costs no device synchronisation."""
        flat = self.layout.gather(ids)
        if flat.device.type == "cpu" and flat.numel() and not torch.compiler.is_compiling():
            low, high = flat.aminmax()
            if low < 0 or high >= limit:
                wrong = int(low if low < 0 else high)
                raise ValueError(f"{name} holds {wrong}; it must be at least 0 and less than {limit_key} = {limit}.")
        return flat

    def _read_types(self, token_type_ids: Tensor | None, config: BertBlocksConfig) -> Tensor | None:
        if token_type_ids is None:
            return None
        if config.type_vocab_size:
            return self._read("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")
        if not torch.compiler.is_compiling() and bool(self.layout.gather(token_type_ids).any()):
            raise ValueError("token_type_ids holds other types than 0, and type_vocab_size is 0: this model has none.")
        return None

    def _read_positions(self, position_ids: Tensor | None, config: BertBlocksConfig) -> Tensor:
        """Rows of the position table. RoPE turns by the same numbers when the caller gives them."""
        if position_ids is None:
            longest = self.layout.max_length + config.position_offset
            if config.embd_pos_enc_kind == "learned" and longest > config.max_position_embeddings:
                raise ValueError(
                    f"The longest sequence has {self.layout.max_length} tokens; max_position_embeddings = "
                    f"{config.max_position_embeddings} leaves room for "
                    f"{config.max_position_embeddings - config.position_offset}."
                )
            if config.position_offset and self.layout.key_mask is not None:
                # RoBERTa and NeoBERT count real tokens only
                counted = self.layout.key_mask.cumsum(dim=1).flatten() - 1
                return counted.clamp(min=0) + config.position_offset
            return self.layout.positions + config.position_offset
        if config.embd_pos_enc_kind == "none" and config.block_pos_enc_kind in ("none", "alibi", "t5"):
            raise ValueError("position_ids are given, but this model has no positions that would use them.")
        shape = self.layout.shape
        if position_ids.shape not in (shape, (1, shape[-1]), shape[-1:]):
            raise ValueError(f"position_ids has shape {list(position_ids.shape)}; it must be {list(shape)}.")
        position_ids = position_ids.view(shape[-1]) if len(shape) == 1 else position_ids.expand(shape)
        if config.embd_pos_enc_kind == "learned":
            flat = self._read("position_ids", position_ids, config.max_position_embeddings, "max_position_embeddings")
        else:
            flat = self.layout.gather(position_ids)
        self.layout.positions = flat
        return flat


def read_layout(
    shape: tuple[int, ...],
    device: torch.device,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    packed_seqlens: Tensor | None,
    unpad: bool,
) -> SequenceLayout:
    given = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "packed_seqlens": packed_seqlens}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(
            f"{' and '.join(names)} are given; each of them says by itself what the sequences are: keep one."
        )
    if cu_seqlens is not None:
        if len(shape) != 1 and not (len(shape) == 2 and shape[0] == 1):
            raise ValueError(f"cu_seqlens goes with flat input of shape [tokens] or [1, tokens], not {list(shape)}.")
        return SequenceLayout.from_cu_seqlens(cu_seqlens.to(device), shape)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"Input has shape {list(shape)}; it must be [batch, length] with at least one token, or flat with "
            "cu_seqlens."
        )
    if packed_seqlens is not None:
        return SequenceLayout.from_packed_rows(packed_seqlens.to(device), (shape[0], shape[1]))
    if attention_mask is None:
        return SequenceLayout.from_shape(shape[0], shape[1], device)
    layout = SequenceLayout.from_mask(attention_mask.to(device), unpad)
    if layout.shape != shape:
        raise ValueError(
            f"attention_mask has shape {list(layout.shape)} and the input {list(shape)}; they must be equal."
        )
    return layout
