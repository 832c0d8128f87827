"""Checkpoints of other libraries, in and out."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from bertblocks.checks import ConfigError
from bertblocks.config import BertBlocksConfig
from bertblocks.families.bert import BERT
from bertblocks.families.family import Family
from bertblocks.families.files import read_checkpoint
from bertblocks.families.modernbert import MODERNBERT
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.models.base import HEAD_PARTS
from bertblocks.models.initialization import init_module
from bertblocks.registry import nearest

#: Parts that a checkpoint may lack as a whole.
FRESH_PARTS = {"model.pooler", *HEAD_PARTS}

FAMILIES: dict[str, Family] = {family.name: family for family in (BERT, MODERNBERT)}


def family_of_config(config: PreTrainedConfig) -> Family:
    return _family(config.model_type)


def _family(name: Any) -> Family:
    if not isinstance(name, str) or name not in FAMILIES:
        raise ConfigError(
            f"model_type is {name!r}; BertBlocks reads the families {', '.join(FAMILIES)}{nearest(name, FAMILIES)}."
        )
    return FAMILIES[name]


def read_config(values: dict[str, Any]) -> BertBlocksConfig:
    """The architecture of a config.json in BertBlocks' own keys (with or without `model_type`) or a family's."""
    name = values.get("model_type", BertBlocksConfig.model_type)
    if name == BertBlocksConfig.model_type:
        return BertBlocksConfig.from_dict(values)
    return _family(name).read_config(_family(name).parse_config(values))


def from_huggingface(source: PreTrainedModel | str | Path, task: str | None = None) -> BertBlocksPreTrainedModel:
    """A BertBlocks model with the weights of a transformers model, a checkpoint folder, or a hub id.

    `task` is base, masked-lm, sequence-classification, token-classification or question-answering; by default the task
    of the source. A head that the source does not have is made fresh, with a warning that names it.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> theirs = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
        >>> type(from_huggingface(theirs)).__name__
        'BertBlocksModel'
    """
    if isinstance(source, PreTrainedModel):
        config, architecture, label = source.config, type(source).__name__, type(source).__name__
        # copies: the two models must not share memory
        tensors = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
        family = family_of_config(config)
    else:
        values, tensors = read_checkpoint(source)
        family = _family(values.get("model_type", "none"))
        config = family.parse_config(values)
        architecture, label = (config.architectures or [family.model_classes["base"]])[0], str(source)
    task = task or _task_of(family, architecture)
    if task not in family.model_classes:
        raise ValueError(
            f"task is {task!r}; it must be one of {', '.join(family.model_classes)}"
            f"{nearest(task, family.model_classes)}."
        )
    return _load(family, config, tensors, task, label)


def _task_of(family: Family, architecture: str) -> str:
    task = family.task_of(architecture)
    if task is None:
        known = ", ".join([*family.model_classes.values(), *family.aliases])
        raise ValueError(f"The architecture is {architecture!r}; of the {family.name} family BertBlocks reads {known}.")
    return task


def _load(
    family: Family, theirs: PreTrainedConfig, tensors: dict[str, Tensor], task: str, label: str
) -> BertBlocksPreTrainedModel:
    config = family.read_config(theirs)
    config.pooler = config.pooler and _has_pooler(tensors)
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
    model.tie_weights()
    return model.eval()


def _has_pooler(tensors: dict[str, Tensor]) -> bool:
    return any(".pooler." in f".{name}" for name in tensors)


def _fresh_parts(model: BertBlocksPreTrainedModel, missing: dict[str, str], label: str) -> list[nn.Module]:
    """The heads to be made anew; anything else that is missing, or a head missing in part, is an error."""
    parts = {}
    needed = set(model.state_dict()) - set(model.all_tied_weights_keys)
    for name, source in missing.items():
        owner = "model.pooler" if name.startswith("model.pooler.") else name.split(".")[0]
        siblings = {other for other in needed if other.startswith(owner + ".")}
        if owner not in FRESH_PARTS or not siblings <= set(missing):
            raise ValueError(f"{label}: the checkpoint lacks {source!r}; nothing was loaded.")
        parts[owner] = model.get_submodule(owner)
    if parts:
        warnings.warn(f"{label} has no {', '.join(sorted(parts))}: made fresh, to be trained.", stacklevel=4)
    return list(parts.values())


def to_huggingface(model: BertBlocksPreTrainedModel, family: str | None = None) -> PreTrainedModel:
    """The transformers model with the same weights; refused by name if no family can hold the architecture.

    Example:
        >>> from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM
        >>> type(to_huggingface(BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini")))).__name__
        'ModernBertForMaskedLM'
    """
    if family is not None:
        return _export(model, _family(family))
    refusals: list[str] = []
    for candidate in FAMILIES.values():
        try:
            return _export(model, candidate)
        except ConfigError as error:
            refusals.append(f"{candidate.name}: {error}")
    raise ConfigError("No family can hold this model. " + " ".join(refusals))


def _export(model: BertBlocksPreTrainedModel, family: Family) -> PreTrainedModel:
    task = next((name for name, kind in TASK_MODELS.items() if kind is type(model)), None)
    if task is None or task not in family.model_classes:
        raise ConfigError(f"{type(model).__name__} has no class in the {family.name} family.")
    config = family.write_config(model.config)
    tied = set(model.all_tied_weights_keys)
    ours = {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if name not in tied}
    theirs = family.write_weights(ours, model.config, task)
    exported = family.make_model(config, task, model.config.pooler)
    missing, unexpected = exported.load_state_dict(theirs, strict=False, assign=True)
    wrong = [*unexpected, *(name for name in missing if name not in exported.all_tied_weights_keys)]
    if wrong:
        raise ConfigError(f"{wrong[0]} does not fit transformers' {type(exported).__name__}.")
    exported.tie_weights()
    return exported.eval()
