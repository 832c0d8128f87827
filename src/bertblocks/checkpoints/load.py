"""Opens any checkpoint: a folder or hub id, in BertBlocks' own format or a family's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import OnShare, find_checkpoint, find_weights
from bertblocks.checkpoints.huggingface import UNEXPECTED, first_line, read_model, smaller_tasks
from bertblocks.checkpoints.report import LoadReport
from bertblocks.config import BertBlocksConfig
from bertblocks.core.log import quiet_transformers
from bertblocks.core.registry import nearest
from bertblocks.core.storage import read_json
from bertblocks.core.tensor_files import read_names
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.text.tokenizers import load_tokenizer_if_any

OWN = BertBlocksConfig.model_type


def load(
    path_or_id: str | Path, task: str | None = None, dtype: torch.dtype | None = None
) -> tuple[BertBlocksPreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model and tokenizer of a folder or hub id, in BertBlocks' own format or that of any family it reads.

    The model is in evaluation mode. `task` defaults to the checkpoint's: the one that its config names, or base if it
    lacks that head. If it lacks the head of a task that you ask for, the head is initialized. Both are logged as
    warnings. The tokenizer is None if the folder has none.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> folder = tempfile.mkdtemp()
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> BertForMaskedLM(config).save_pretrained(folder)
        >>> model, tokenizer = load(folder)
        >>> type(model).__name__, tokenizer
        ('BertBlocksForMaskedLM', None)
    """
    folder = find_checkpoint(path_or_id)
    model, report = load_with_report(folder, task, dtype)
    report.log(with_unread=task is None)
    return model, load_tokenizer_if_any(folder)


def load_trained(
    folder: Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    on_share: OnShare = lambda share: None,
) -> tuple[BertBlocksPreTrainedModel, LoadReport]:
    """The model of a folder, for uses that do not train it: a head that the checkpoint lacks is an error."""
    model, report = load_with_report(folder, task, dtype, allow_pickle, on_share)
    if report.fresh:
        raise ValueError(f"{folder} has no trained {report.task} head: it lacks {', '.join(report.fresh)}.")
    return model, report


def load_with_report(
    folder: Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    on_share: OnShare = lambda share: None,
) -> tuple[BertBlocksPreTrainedModel, LoadReport]:
    """The model of a folder, and how it was read."""
    values = read_json(folder / "config.json")
    if values.get("model_type", OWN) != OWN:
        return read_model(folder, task, dtype, allow_pickle, on_share)
    return _read_own(folder, values, task, dtype)


def _read_own(
    folder: Path, values: dict[str, Any], task: str | None, dtype: torch.dtype | None
) -> tuple[BertBlocksPreTrainedModel, LoadReport]:
    named_task = task or _task_of(values.get("architectures"), folder)
    if named_task not in TASK_MODELS:
        raise ValueError(
            f"task is {named_task!r}; it must be one of {', '.join(TASK_MODELS)}{nearest(named_task, TASK_MODELS)}."
        )
    names = [name for path in find_weights(folder) for name in read_names(path)]
    has_pooler = any(".pooler." in f".{name}" for name in names)
    for candidate in [task] if task else smaller_tasks(named_task):
        options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        if candidate == "base" and not has_pooler:
            options["pooler"] = False  # task models do not save it
        try:
            with quiet_transformers():
                model, info = TASK_MODELS[candidate].from_pretrained(folder, output_loading_info=True, **options)
        except UNEXPECTED as error:
            raise ValueError(f"{folder} cannot be loaded: {first_line(error)}.") from error
        fresh, unread = _parts(info["missing_keys"]), _parts(info["unexpected_keys"])
        if not fresh:
            break
    return model.eval(), LoadReport(str(folder), OWN, candidate, named_task, fresh, unread)


def _parts(keys: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({key.removeprefix("model.").split(".")[0] for key in keys}))


def _task_of(architectures: Any, folder: Path) -> str:
    tasks = {kind.__name__: name for name, kind in TASK_MODELS.items()}
    if architectures is None:
        return "base"
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if not isinstance(name, str) or name not in tasks:
        raise ValueError(f"{folder}: architectures is {architectures!r}; it must name one of {', '.join(tasks)}.")
    return tasks[name]
