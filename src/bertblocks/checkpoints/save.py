"""Writes BertBlocks models: as checkpoints in their own format or a family's, and as transformers models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from bertblocks.checkpoints.families import FAMILIES, get_family
from bertblocks.checkpoints.families.family import Family
from bertblocks.checkpoints.files import MAX_SHARD_BYTES, OnShare, write_tensors
from bertblocks.checkpoints.fold import to_standard
from bertblocks.config.validation import ConfigError
from bertblocks.core.storage import atomic_entries
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel


def to_huggingface(model: BertBlocksPreTrainedModel, family: str | None = None) -> PreTrainedModel:
    """The transformers model with the same weights. Raises an error if no family can hold the architecture.

    Example:
        >>> from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM
        >>> type(to_huggingface(BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")))).__name__
        'ModernBertForMaskedLM'
    """
    return _first_family(model, family, _export)


def save_huggingface(
    model: BertBlocksPreTrainedModel,
    folder: str | Path,
    family: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_share: OnShare = lambda share: None,
) -> str:
    """Writes the checkpoint folder of a family, in transformers or not, and returns the family's name."""

    def save(model: BertBlocksPreTrainedModel, candidate: Family) -> str:
        config, tensors = to_family(model, candidate)
        _save(config, tensors, model.dtype, Path(folder), max_shard_bytes, on_share)
        return candidate.name

    return _first_family(model, family, save)


def save_native(model: BertBlocksPreTrainedModel, folder: Path) -> None:
    """Writes the format of a family that transformers reads, or BertBlocks' own if no family can hold the model."""
    try:
        save_huggingface(model, folder)
    except ConfigError:
        save_model(model, folder)


def save_model(
    model: BertBlocksPreTrainedModel,
    folder: str | Path,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_share: OnShare = lambda share: None,
) -> None:
    """Writes a checkpoint folder in BertBlocks' own format, as `model.save_pretrained` does."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    tensors = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    for name, origin in model.all_tied_weights_keys.items():
        # an int8 decoder has its own weights even if the config ties them
        if tensors[name].data_ptr() == tensors[origin].data_ptr():
            del tensors[name]
    _save(config, tensors, model.dtype, Path(folder), max_shard_bytes, on_share)


def _save(
    config: PreTrainedConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    folder: Path,
    max_shard_bytes: int,
    on_share: OnShare,
) -> None:
    config.dtype = dtype
    # the config makes the folder complete, so it moves in last
    with atomic_entries(folder, last="config.json") as scratch:
        write_tensors(tensors, scratch, max_shard_bytes, on_share)
        config.save_pretrained(scratch)


Result = TypeVar("Result")


def _first_family(
    model: BertBlocksPreTrainedModel, name: str | None, convert: Callable[[BertBlocksPreTrainedModel, Family], Result]
) -> Result:
    """The model converted to the named family, or else to the first one that can hold it."""
    if name is not None:
        return convert(model, get_family(name))
    reasons: list[str] = []
    # several families can hold the same architecture, so the model's own comes first
    for candidate in sorted(FAMILIES.values(), key=lambda candidate: candidate.name != model.config.family):
        try:
            return convert(model, candidate)
        except ConfigError as error:
            reasons.append(f"{candidate.name}: {error}")
    raise ConfigError("No family can hold this model. " + " ".join(reasons))


def to_family(model: BertBlocksPreTrainedModel, family: Family) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """A model's config and tensors in a family's terms."""
    task = _task(model, family)
    standard, tensors = to_standard(model)
    config = family.write_config(standard)
    config.architectures = [family.model_classes[task]]
    extra = family.extra_tensors(standard, model.dtype, task)
    return config, {**family.write_weights(tensors, standard, task), **extra}


def _task(model: BertBlocksPreTrainedModel, family: Family) -> str:
    task = next((name for name, kind in TASK_MODELS.items() if kind is type(model)), None)
    if task is None or task not in family.model_classes:
        raise ConfigError(f"{type(model).__name__} has no class in the {family.name} family.")
    return task


def _export(model: BertBlocksPreTrainedModel, family: Family) -> PreTrainedModel:
    config, tensors = to_family(model, family)
    theirs = {name: tensor.clone() for name, tensor in tensors.items()}  # the two models must not share memory
    exported = family.make_model(config, _task(model, family), model.config.pooler)
    missing, unexpected = exported.load_state_dict(theirs, strict=False, assign=True)
    # buffers that the family does not write have their first value
    needed = {name for name, _ in exported.named_parameters()} - set(exported.all_tied_weights_keys)
    wrong = [*unexpected, *(name for name in missing if name in needed)]
    if wrong:
        raise ConfigError(f"{wrong[0]} does not fit transformers' {type(exported).__name__}.")
    exported.tie_weights()
    return exported.eval()
