"""Reads the input of a model, padded or packed, as flat tokens with their layout."""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from bertblocks.config import BertBlocksConfig
from bertblocks.nn.layout import SequenceLayout, is_data_hidden


class EncoderOptions(TypedDict, total=False):
    """Keyword arguments of every model's `forward` that transformers' data collators do not produce.

    They are stated once, like transformers' own `TransformersKwargs`. The tensors of a padded batch stay named
    parameters of each `forward`, because the Trainer and pipelines look for them in its signature.
    """

    #: Cumulative lengths of packed sequences: `[0, n1, n1 + n2, ...]`.
    cu_seqlens: Tensor | None
    #: Lengths of the sequences packed into each row: `[batch, segments]`, padded with zeros.
    packed_seqlens: Tensor | None
    output_hidden_states: bool | None
    output_attentions: bool | None
    #: Whether the mask hides tokens of the sequence instead of padding: they see the others and are not seen.
    has_unseen_tokens: bool


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
        has_unseen_tokens: bool = False,
    ) -> None:
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        shape = tuple(input_ids.shape if input_ids is not None else inputs_embeds.shape[:-1])  # type: ignore[union-attr]
        device = (input_ids if input_ids is not None else inputs_embeds).device  # type: ignore[union-attr]
        self.layout = read_layout(
            shape, device, attention_mask, cu_seqlens, packed_seqlens, config.unpad, has_unseen_tokens
        )
        self.token_ids = None if input_ids is None else self._read("input_ids", input_ids, vocab_size, "vocab_size")
        self.embeddings = None if inputs_embeds is None else self.layout.gather(inputs_embeds)
        self.token_types = self._read_types(token_type_ids, config)
        self.positions = self._read_positions(position_ids, config)

    def _read(self, name: str, ids: Tensor, limit: int, limit_key: str) -> Tensor:
        """Returns flat ids, checked against the size of their table where that needs no device sync."""
        if ids.dtype not in (torch.int64, torch.int32):
            dtype = str(ids.dtype).removeprefix("torch.")
            raise ValueError(f"{name} has the dtype {dtype}; it must be int64 or int32.")
        flat = self.layout.gather(ids)
        if flat.device.type == "cpu" and flat.numel() and not is_data_hidden(flat):
            low, high = flat.aminmax()
            if low < 0 or high >= limit:
                wrong = int(low if low < 0 else high)
                raise ValueError(f"{name} holds {wrong}; it must be at least 0 and less than {limit_key} = {limit}.")
        return flat

    def _read_types(self, token_type_ids: Tensor | None, config: BertBlocksConfig) -> Tensor | None:
        """Returns flat token types. A model without types ignores them: BERT's tokenizers give them for every pair."""
        if token_type_ids is None or not config.type_vocab_size:
            return None
        return self._read("token_type_ids", token_type_ids, config.type_vocab_size, "type_vocab_size")

    def _read_positions(self, position_ids: Tensor | None, config: BertBlocksConfig) -> Tensor:
        """Returns indices into the position table. RoPE uses the caller's positions too."""
        if position_ids is None:
            longest = self.layout.max_length + config.position_offset
            if config.embd_pos_enc_kind == "learned" and longest > config.max_position_embeddings:
                raise ValueError(
                    f"The longest sequence has {self.layout.max_length} tokens; max_position_embeddings = "
                    f"{config.max_position_embeddings} leaves room for "
                    f"{config.max_position_embeddings - config.position_offset}."
                )
            if config.position_offset and self.layout.key_mask is not None and not self.layout.has_unseen_tokens:
                # RoBERTa and NeoBERT count real tokens only
                counted = self.layout.key_mask.cumsum(dim=1).flatten() - 1
                return counted.clamp(min=0) + config.position_offset
            return self.layout.positions + config.position_offset
        if config.embd_pos_enc_kind == "none" and config.block_pos_enc_kind in ("none", "alibi", "t5"):
            raise ValueError("position_ids are given, but this model has no position encoding that uses them.")
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
    has_unseen_tokens: bool = False,
) -> SequenceLayout:
    """Returns how an input of `shape` forms sequences."""
    given = {"attention_mask": attention_mask, "cu_seqlens": cu_seqlens, "packed_seqlens": packed_seqlens}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} are given; each alone defines the sequences: pass only one of them.")
    if cu_seqlens is not None:
        if len(shape) != 1 and not (len(shape) == 2 and shape[0] == 1):
            raise ValueError(f"cu_seqlens goes with flat input of shape [tokens] or [1, tokens], not {list(shape)}.")
        return SequenceLayout.from_cu_seqlens(cu_seqlens, shape, device)
    if len(shape) != 2 or 0 in shape:
        raise ValueError(
            f"Input has shape {list(shape)}; it must be [batch, length] with at least one token, or flat with "
            "cu_seqlens."
        )
    if packed_seqlens is not None:
        return SequenceLayout.from_packed_rows(packed_seqlens, (shape[0], shape[1]), device)
    if attention_mask is None:
        return SequenceLayout.from_shape(shape[0], shape[1], device)
    layout = SequenceLayout.from_mask(attention_mask, unpad, has_unseen_tokens, device)
    if layout.shape != shape:
        raise ValueError(
            f"attention_mask has shape {list(layout.shape)} and the input {list(shape)}; they must be equal."
        )
    return layout
