"""Reads models and checkpoints of transformers' families into BertBlocks models."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel

from bertblocks.checkpoints.families import family_of_config, find_family
from bertblocks.checkpoints.families.family import Family
from bertblocks.checkpoints.files import OnShare, read_checkpoint
from bertblocks.checkpoints.report import LoadReport
from bertblocks.checkpoints.sentence_transformers.modules import COLBERT_CLASS, PROJECTION
from bertblocks.config.validation import ConfigError
from bertblocks.core.registry import nearest
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.models.heads import find_fresh_heads
from bertblocks.nn.initialization import init_module

#: What torch and transformers raise for config values that they do not check.
UNEXPECTED = (RuntimeError, OverflowError, TypeError, AttributeError, KeyError, IndexError, ZeroDivisionError)
#: Tensors of old checkpoints that follow from the config.
BUFFERS = r"(position_ids|inv_freq|freqs_cis)$"


def from_huggingface(
    source: PreTrainedModel | str | Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    adapter: str | None = None,
) -> BertBlocksPreTrainedModel:
    """A BertBlocks model with the weights of a transformers model, a checkpoint folder, or a hub id.

    `task` is base, masked-lm, pretraining, sequence-classification, token-classification or question-answering. By
    default it is the task of the source. If the source lacks the head of a task that you ask for, the head is
    initialized, and a warning is logged. Weights keep their precision unless you give a `dtype`; half precision is
    several times slower than fp32 on most CPUs. Pickled weights need `allow_pickle`, which reads tensors and never runs
    code. `adapter` names one of the LoRA adapters in the checkpoint, such as "retrieval.query" of Jina v3, which is
    merged into the weights; without it the model is the one that all adapters change.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> theirs = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2))
        >>> type(from_huggingface(theirs)).__name__
        'BertBlocksModel'
    """
    model, report = read_model(source, task, dtype, allow_pickle, adapter=adapter)
    report.log(with_unread=task is None)
    return model


def read_model(
    source: PreTrainedModel | str | Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    on_share: OnShare = lambda share: None,
    adapter: str | None = None,
) -> tuple[BertBlocksPreTrainedModel, LoadReport]:
    """Does the work of `from_huggingface`, and returns the report instead of logging it."""
    if isinstance(source, PreTrainedModel):
        config, architecture, label = source.config, type(source).__name__, type(source).__name__
        # clones, so the two models do not share memory
        tensors = {name: tensor.detach().clone() for name, tensor in source.state_dict().items()}
        family = family_of_config(config)
        if not family.in_transformers:
            config = family.parse_config(config.to_dict(), tensors)
    else:
        values, tensors = read_checkpoint(source, allow_pickle, on_share)
        family = find_family(values)
        config = family.parse_config(values, tensors)
        names, label = config.architectures or [family.model_classes["base"]], str(source)
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise ValueError(f"{label}: architectures is {names!r}; it must be a list with the name of a class.")
        architecture = names[0]
    if family.merge_adapter is not None:
        tensors = family.merge_adapter(tensors, config, adapter)
    elif adapter is not None:
        raise ValueError(f"adapter is {adapter!r}; checkpoints of the {family.name} family have no adapters.")
    is_colbert = architecture == COLBERT_CLASS  # an encoder, and a projection that is read with the settings
    named_task = task or ("base" if is_colbert else _task_of(family, architecture))
    if named_task not in family.model_classes:
        raise ValueError(
            f"task is {named_task!r}; it must be one of {', '.join(family.model_classes)}"
            f"{nearest(named_task, family.model_classes)}."
        )
    if architecture.endswith("ForMultipleChoice") and named_task == "sequence-classification":
        config = copy.deepcopy(config)
        config.num_labels = 1  # each option has one score
    for candidate in [task] if task else smaller_tasks(named_task):
        model, fresh, unused = _load(family, config, tensors, candidate, label)
        if not fresh:
            break
    tied = getattr(source, "all_tied_weights_keys", {})  # read under their other name
    derived = "|".join((BUFFERS, *family.derived, *([rf"^{PROJECTION}$"] if is_colbert else [])))
    unread = [name for name in unused if name not in tied and not re.search(derived, name)]
    parts = sorted({".".join(name.split(".")[:2]) for name in unread})
    report = LoadReport(label, family.name, candidate, named_task, tuple(fresh), tuple(parts))
    return model if dtype is None else model.to(dtype), report


def first_line(error: BaseException) -> str:
    """The first line of an error message, without its period and at most 300 characters long."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300].rstrip(".")


def smaller_tasks(task: str) -> list[str]:
    """The tasks to read a checkpoint as, in this order, if its config names `task`: it may lack the heads."""
    return {"base": ["base"], "pretraining": ["pretraining", "masked-lm", "base"]}.get(task, [task, "base"])


def _task_of(family: Family, architecture: str) -> str:
    task = family.task_of(architecture)
    if task is None:
        known = ", ".join([*family.model_classes.values(), *family.aliases])
        raise ValueError(f"The architecture is {architecture!r}; of the {family.name} family BertBlocks reads {known}.")
    return task


def _load(
    family: Family, theirs: PreTrainedConfig, tensors: dict[str, Tensor], task: str, label: str
) -> tuple[BertBlocksPreTrainedModel, list[str], set[str]]:
    """The model, the names of its newly initialized parts, and the tensors that it does not use."""
    config = family.read_config(theirs)
    config.pooler = config.pooler and _has_pooler(tensors)
    for key, value in family.read_options(tensors, config).items():
        setattr(config, key, value)
    try:
        with torch.device("meta"), _NoNormal():
            model = TASK_MODELS[task](config)
    except UNEXPECTED as error:
        raise ConfigError(f"{label}: this config does not describe a model: {first_line(error)}.") from error
    expected = model.state_dict()
    state, missing, unused = family.read_weights(tensors, list(expected), config, task)
    for name, origin in model.all_tied_weights_keys.items():
        missing.pop(name, None)
        copy = state.pop(name, None)
        if copy is not None and (origin not in state or not torch.equal(copy, state[origin])):
            unused |= family.sources_of(name, config, task)
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(
                f"{label}: {name} has shape {list(tensor.shape)}; its config asks for {list(expected[name].shape)}."
            )
    fresh = _fresh_parts(model, missing, label)
    family.check_unused(unused, label, task)
    model.load_state_dict(state, strict=False, assign=True)
    for part in fresh.values():
        part.to_empty(device="cpu")
        for module in part.modules():
            init_module(module, config)
        part.to(cast(Any, model.get_input_embeddings()).weight.dtype)
    model.tie_weights()
    return model.eval(), sorted(fresh), unused


class _NoNormal(TorchFunctionMode):
    """Leaves tensors without memory alone: torch would import its compiler to draw normal numbers for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        return options["tensor"] if func is nn.init.normal_ else func(*args, **options)


def _has_pooler(tensors: dict[str, Tensor]) -> bool:
    return any(".pooler." in f".{name}" for name in tensors)


def _fresh_parts(model: BertBlocksPreTrainedModel, missing: dict[str, str], label: str) -> dict[str, nn.Module]:
    """The heads that the checkpoint lacks as a whole, by name; any other missing tensor is an error."""
    fresh, required = find_fresh_heads(model, missing)
    if required:
        raise ValueError(f"{label}: the checkpoint lacks {missing[required[0]]!r}; nothing was loaded.")
    return {head: model.get_submodule(head) for head in fresh}
