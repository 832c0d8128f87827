"""Checkpoints of other libraries, in and out."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bertblocks.checkpoints.families import FAMILIES, family_of_config, get_family
from bertblocks.checkpoints.families.family import Family
from bertblocks.checkpoints.files import MAX_SHARD_BYTES, OnShare, read_checkpoint, write_tensors
from bertblocks.config import BertBlocksConfig
from bertblocks.config.validation import ConfigError
from bertblocks.core.registry import nearest
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.models.heads import find_fresh_heads
from bertblocks.models.initialization import init_module

#: Tensors that follow from a config, which old checkpoints hold.
BUFFERS = r"(position_ids|inv_freq|freqs_cis)$"


def read_config(values: dict[str, Any] | PreTrainedConfig) -> BertBlocksConfig:
    """The architecture of a transformers config, or of a config.json in BertBlocks' own keys or a family's."""
    if isinstance(values, PreTrainedConfig):
        return family_of_config(values).read_config(values)
    name = values.get("model_type", BertBlocksConfig.model_type)
    if name == BertBlocksConfig.model_type:
        return BertBlocksConfig.from_dict(values)
    return get_family(name).read_config(get_family(name).parse_config(values))


def from_huggingface(
    source: PreTrainedModel | str | Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
) -> BertBlocksPreTrainedModel:
    """A BertBlocks model with the weights of a transformers model, a checkpoint folder, or a hub id.

    `task` is base, masked-lm, sequence-classification, token-classification or question-answering; by default the task
    of the source. A head that the source does not have is made fresh, with a warning that names it. Weights keep their
    precision unless `dtype` says otherwise; half precision is several times slower than fp32 on most CPUs. Pickled
    weights are refused unless `allow_pickle`, which reads tensors only and nothing that could run.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> theirs = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
        >>> type(from_huggingface(theirs)).__name__
        'BertBlocksModel'
    """
    return read_model(source, task, dtype, allow_pickle)


def read_model(
    source: PreTrainedModel | str | Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    on_share: OnShare = lambda share: None,
) -> BertBlocksPreTrainedModel:
    """As `from_huggingface`, telling how far it is."""
    if isinstance(source, PreTrainedModel):
        config, architecture, label = source.config, type(source).__name__, type(source).__name__
        # copies: the two models must not share memory
        tensors = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
        family = family_of_config(config)
        if not family.in_transformers:
            config = family.parse_config(config.to_dict(), tensors)
    else:
        values, tensors = read_checkpoint(source, allow_pickle, on_share)
        family = get_family(values.get("model_type", "none"))
        config = family.parse_config(values, tensors)
        architecture, label = (config.architectures or [family.model_classes["base"]])[0], str(source)
    is_whole = task is None
    task = task or _task_of(family, architecture)
    if task not in family.model_classes:
        raise ValueError(
            f"task is {task!r}; it must be one of {', '.join(family.model_classes)}"
            f"{nearest(task, family.model_classes)}."
        )
    model, unused = _load(family, config, tensors, task, label)
    tied = getattr(source, "all_tied_weights_keys", {})  # read under their other name
    unread = [name for name in unused if name not in tied and not re.search(BUFFERS, name)]
    parts = sorted({".".join(name.split(".")[:2]) for name in unread})
    if parts and is_whole:
        warnings.warn(f"{label} also has {', '.join(parts)}, which are not read.", stacklevel=3)
    return model if dtype is None else model.to(dtype)


def _task_of(family: Family, architecture: str) -> str:
    task = family.task_of(architecture)
    if task is None:
        known = ", ".join([*family.model_classes.values(), *family.aliases])
        raise ValueError(f"The architecture is {architecture!r}; of the {family.name} family BertBlocks reads {known}.")
    return task


def _load(
    family: Family, theirs: PreTrainedConfig, tensors: dict[str, Tensor], task: str, label: str
) -> tuple[BertBlocksPreTrainedModel, set[str]]:
    """The model, and the tensors that had no part in it."""
    config = family.read_config(theirs)
    config.pooler = config.pooler and _has_pooler(tensors)
    for key, value in family.read_options(tensors, config).items():
        setattr(config, key, value)
    with torch.device("meta"):
        model = TASK_MODELS[task](config)
    tied = set(model.all_tied_weights_keys)
    expected = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    state, missing, unused = family.read_weights(tensors, list(expected), config, task)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{label}: {name} has shape {list(tensor.shape)}; its config asks for {list(expected[name].shape)}."
            )
    fresh = _fresh_parts(model, missing, label)
    family.refuse_unused(unused, label)
    model.load_state_dict(state, strict=False, assign=True)
    for part in fresh:
        part.to_empty(device="cpu")
        for module in part.modules():
            init_module(module, config)
        part.to(model.get_input_embeddings().weight.dtype)
    model.tie_weights()
    return model.eval(), unused


def _has_pooler(tensors: dict[str, Tensor]) -> bool:
    return any(".pooler." in f".{name}" for name in tensors)


def _fresh_parts(model: BertBlocksPreTrainedModel, missing: dict[str, str], label: str) -> list[nn.Module]:
    """Returns the heads to initialize; raises if the encoder or a head is incomplete."""
    fresh, required = find_fresh_heads(model, missing)
    if required:
        raise ValueError(f"{label}: the checkpoint lacks {missing[required[0]]!r}; nothing was loaded.")
    if fresh:
        warnings.warn(f"{label} has no {', '.join(fresh)}: made fresh, to be trained.", stacklevel=4)
    return [model.get_submodule(head) for head in fresh]


def to_huggingface(model: BertBlocksPreTrainedModel, family: str | None = None) -> PreTrainedModel:
    """The transformers model with the same weights; refused by name if no family can hold the architecture.

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
    """Writes the checkpoint folder of a family, also of one that is not in transformers, and returns its name."""

    def save(model: BertBlocksPreTrainedModel, candidate: Family) -> str:
        config, tensors = to_family(model, candidate)
        config.dtype = model.dtype
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        write_tensors(tensors, path, max_shard_bytes, on_share)
        # the config makes the folder complete, so it comes last and at once
        config.to_json_file(path / "config.json.tmp")
        os.replace(path / "config.json.tmp", path / "config.json")
        return candidate.name

    return _first_family(model, family, save)


Result = TypeVar("Result")


def _first_family(
    model: BertBlocksPreTrainedModel, name: str | None, convert: Callable[[BertBlocksPreTrainedModel, Family], Result]
) -> Result:
    """The model converted to the named family, or else to the first one that does not refuse."""
    if name is not None:
        return convert(model, get_family(name))
    refusals: list[str] = []
    # siblings hold the same architectures: the one it came from is the first choice
    for candidate in sorted(FAMILIES.values(), key=lambda candidate: candidate.name != model.config.family):
        try:
            return convert(model, candidate)
        except ConfigError as error:
            refusals.append(f"{candidate.name}: {error}")
    raise ConfigError("No family can hold this model. " + " ".join(refusals))


def to_family(model: BertBlocksPreTrainedModel, family: Family) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
    """A model's config and tensors in a family's terms."""
    task = _task(model, family)
    config = family.write_config(model.config)
    config.architectures = [family.model_classes[task]]
    tied = set(model.all_tied_weights_keys)
    ours = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in tied}
    extra = family.extra_tensors(model.config, model.dtype, task)
    return config, {**family.write_weights(ours, model.config, task), **extra}


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
    wrong = [*unexpected, *(name for name in missing if name not in exported.all_tied_weights_keys)]
    if wrong:
        raise ConfigError(f"{wrong[0]} does not fit transformers' {type(exported).__name__}.")
    exported.tie_weights()
    return exported.eval()
