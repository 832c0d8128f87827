"""Checks batches before they reach compiled code, and pads them to a bucket's length."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
import torch

from bertblocks.flax.batches import bucket_length
from bertblocks.flax.inputs import IGNORE, Inputs
from bertblocks.flax.validation import check_range, read_ids
from bertblocks.nn.layout import keep_mask

if TYPE_CHECKING:
    from bertblocks.config import BertBlocksConfig

#: Inputs that hold integers.
ID_NAMES = ("input_ids", "token_type_ids", "position_ids", "segment_ids")


def check_shapes(inputs: Inputs, config: BertBlocksConfig) -> None:
    """Raises an error for input that is invalid regardless of its values."""
    if (inputs.input_ids is None) == (inputs.inputs_embeds is None):
        raise ValueError("Give exactly one of input_ids and inputs_embeds.")
    if inputs.attention_mask is not None and inputs.segment_ids is not None:
        raise ValueError(
            "attention_mask and segment_ids are given; each alone defines the sequences: pass only one of them."
        )
    if inputs.inputs_embeds is not None and config.token_dropout:
        raise ValueError("inputs_embeds are given; token_dropout needs input_ids to find the mask tokens.")
    name = "input_ids" if inputs.inputs_embeds is None else "inputs_embeds"
    wanted = ["rows", "length"] if inputs.inputs_embeds is None else ["rows", "length", config.embedding_size]
    shape = np.shape(getattr(inputs, name))
    if len(shape) != len(wanted) or 0 in shape or (len(shape) == 3 and shape[2] != wanted[2]):
        form = ", ".join(map(str, wanted))
        raise ValueError(f"{name} has shape {list(shape)}; it must be [{form}] with at least one token.")
    for name in ("token_type_ids", "segment_ids", "position_ids"):
        other = None if getattr(inputs, name) is None else np.shape(getattr(inputs, name))
        if other not in (None, shape[:2]) and (name != "position_ids" or other not in ((1, shape[1]), (shape[1],))):
            raise ValueError(f"{name} has shape {list(other)}; it must be {list(shape[:2])} like the input.")
    if inputs.position_ids is not None and config.embd_pos_enc_kind == "none" and config.block_pos_enc_kind != "rope":
        raise ValueError("position_ids are given, but this model has no position encoding that uses them.")


def read_types(inputs: Inputs, config: BertBlocksConfig) -> Inputs:
    """Converts types without reading values, which are unknown in compiled code or on other devices."""
    arrays: dict[str, Any] = {}
    for name in ID_NAMES:
        ids = getattr(inputs, name)
        if ids is not None and not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
            raise TypeError(f"{name} holds {jnp.result_type(ids)}; inside jit it must hold integers.")
        arrays[name] = None if ids is None else jnp.asarray(ids)
    if not config.type_vocab_size:
        arrays["token_type_ids"] = None
    if inputs.position_ids is not None:
        arrays["position_ids"] = jnp.broadcast_to(arrays["position_ids"], inputs.shape)
    if inputs.attention_mask is not None:
        mask = jnp.asarray(inputs.attention_mask)
        mask = mask[:, 0, 0] if mask.ndim == 4 else mask
        is_additive = jnp.issubdtype(mask.dtype, jnp.floating) & ~(mask > 0).any()
        arrays["attention_mask"] = jnp.where(is_additive, mask == 0, mask > 0)
    return inputs.replace(**arrays)


def read_values(inputs: Inputs, config: BertBlocksConfig, max_segments: int | None) -> tuple[Inputs, int | None]:
    """Returns arrays whose values are checked as in torch, and the largest number of sequences in a row."""
    arrays: dict[str, Any] = {
        name: read_ids(name, getattr(inputs, name)) for name in ID_NAMES if getattr(inputs, name) is not None
    }
    if inputs.inputs_embeds is not None:
        arrays["inputs_embeds"] = jnp.asarray(inputs.inputs_embeds)
    if inputs.segment_ids is not None:
        arrays["segment_ids"], lengths, max_segments = _read_segments(arrays["segment_ids"], max_segments)
        real = arrays["segment_ids"] > 0
    else:
        real = arrays["attention_mask"] = _read_mask(inputs.attention_mask, inputs.shape)
        lengths = (real.shape[1] - np.argmax(real[:, ::-1], axis=1) - np.argmax(real, axis=1))[real.any(axis=1)]

    def check(name: str, limit: int, limit_key: str) -> None:
        """Checks the values of real tokens only."""
        if name in arrays:
            arrays[name] = check_range(name, np.where(real, arrays[name], 0), limit, limit_key)

    check("input_ids", config.vocab_size, "vocab_size")
    if config.type_vocab_size:
        check("token_type_ids", config.type_vocab_size, "type_vocab_size")
    else:
        arrays.pop("token_type_ids", None)  # ignored, as in torch
    if config.embd_pos_enc_kind == "learned":
        rows = config.max_position_embeddings
        check("position_ids", rows, "max_position_embeddings")
        room, longest = rows - config.position_offset, lengths.max(initial=0)
        if "position_ids" not in arrays and longest > room:
            raise ValueError(
                f"The longest sequence has {longest} tokens; max_position_embeddings = {rows} leaves room for {room}."
            )
    elif "position_ids" in arrays:
        arrays["position_ids"] = np.where(real, arrays["position_ids"], 0).astype(np.int32)
    none = dict.fromkeys((*ID_NAMES, "attention_mask", "inputs_embeds"))
    return inputs.replace(**{**none, **arrays}), max_segments


def _read_mask(mask: Any, shape: tuple[int, int]) -> np.ndarray:
    """Returns True for real tokens; without a mask, all are."""
    if mask is None:
        return np.ones(shape, bool)
    values = np.asarray(mask)
    if values.dtype.kind not in "biu":
        values = values.astype(np.float32)
    keep = keep_mask(torch.from_numpy(np.array(values))).numpy()
    if keep.shape != shape:
        raise ValueError(
            f"attention_mask has shape {list(keep.shape)} and the input {list(shape)}; they must be equal."
        )
    return keep


def _read_segments(segments: np.ndarray, max_segments: int | None) -> tuple[np.ndarray, np.ndarray, int]:
    """Returns the ids, the lengths of all sequences, and the largest number of sequences in a row."""
    if (segments < 0).any():
        raise ValueError(
            f"segment_ids holds {segments[segments < 0][0]}; sequences are numbered from 1, and 0 is padding."
        )
    highest = int(segments.max())
    if max_segments is not None and highest > max_segments:
        raise ValueError(f"segment_ids holds {highest}; it must be at most max_segments = {max_segments}.")
    names = np.arange(len(segments))[:, None] * (highest + 1) + segments  # unique for every sequence of the batch
    starts = (np.diff(segments, axis=1, prepend=0) != 0) & (segments > 0)
    runs, counts = np.unique(names[starts], return_counts=True)
    if (counts > 1).any():
        row, number = divmod(int(runs[counts > 1][0]), highest + 1)
        raise ValueError(f"segment_ids has {number} in two places of row {row}; a sequence must be contiguous.")
    lengths = np.bincount(names[segments > 0])
    return segments.astype(np.int32), lengths, max(highest, 1) if max_segments is None else max_segments


def pad_to_bucket(inputs: Inputs) -> Inputs:
    """Pads rows at the end to the length of a bucket."""
    extra = bucket_length(inputs.shape[1]) - inputs.shape[1]
    widths = ((0, 0), (0, extra))
    padded: dict[str, Any] = {
        name: np.pad(getattr(inputs, name), widths)
        for name in (*ID_NAMES, "attention_mask")
        if getattr(inputs, name) is not None
    }
    if inputs.inputs_embeds is not None:
        padded["inputs_embeds"] = jnp.pad(inputs.inputs_embeds, (*widths, (0, 0)))
    return inputs.replace(**padded)


def read_token_labels(labels: dict[str, Any], inputs: Inputs, limit: int, limit_key: str) -> dict[str, np.ndarray]:
    """Returns the labels of all tokens, padded to the bucket's length, with -100 for padding."""
    if "labels" not in labels:
        return {}
    values = read_ids("labels", labels["labels"])
    if values.shape != inputs.shape:
        raise ValueError(f"labels has shape {list(values.shape)}; it must be {list(inputs.shape)} like the input.")
    real = inputs.attention_mask if inputs.segment_ids is None else inputs.segment_ids > 0
    scored = real & (values != IGNORE)
    values = np.where(scored, check_range("labels", np.where(scored, values, 0), limit, limit_key), IGNORE)
    extra = bucket_length(inputs.shape[1]) - inputs.shape[1]
    return {"labels": np.pad(values, ((0, 0), (0, extra)), constant_values=IGNORE)}
