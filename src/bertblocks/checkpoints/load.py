"""One call that opens any checkpoint."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import OnShare, find_checkpoint
from bertblocks.checkpoints.huggingface import read_model
from bertblocks.config import BertBlocksConfig
from bertblocks.core.registry import nearest
from bertblocks.core.storage import read_json
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.text.tokenizers import load_tokenizer_if_any


def load(
    path_or_id: str | Path, task: str | None = None, dtype: torch.dtype | None = None
) -> tuple[BertBlocksPreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model and tokenizer of a folder or hub id, of any family that BertBlocks reads or its own.

    The model is in evaluation mode. `task` is by default that of the checkpoint; a head that the checkpoint has not is
    made fresh, and named in a warning. The tokenizer is None where the folder has none.

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
    model = load_model(folder, task, dtype)
    return model, load_tokenizer_if_any(folder)


def load_model(
    folder: Path,
    task: str | None = None,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    on_share: OnShare = lambda share: None,
) -> BertBlocksPreTrainedModel:
    """The model of a folder, without its tokenizer."""
    values = read_json(folder / "config.json")
    if values.get("model_type", BertBlocksConfig.model_type) != BertBlocksConfig.model_type:
        return read_model(folder, task, dtype, allow_pickle, on_share)
    is_whole = task is None
    task = task or _task_of(values.get("architectures"), folder)
    if task not in TASK_MODELS:
        raise ValueError(f"task is {task!r}; it must be one of {', '.join(TASK_MODELS)}{nearest(task, TASK_MODELS)}.")
    options: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    model, info = TASK_MODELS[task].from_pretrained(folder, output_loading_info=True, **options)
    if fresh := sorted({key.split(".")[0] for key in info["missing_keys"]}):
        warnings.warn(f"{folder} has no {', '.join(fresh)}: made fresh, to be trained.", stacklevel=3)
    if is_whole and (unread := sorted({key.split(".")[0] for key in info["unexpected_keys"]})):
        warnings.warn(f"{folder} also has {', '.join(unread)}, which are not read.", stacklevel=3)
    return model.eval()


def _task_of(architectures: Any, folder: Path) -> str:
    tasks = {kind.__name__: name for name, kind in TASK_MODELS.items()}
    if architectures is None:
        return "base"
    if not isinstance(architectures, list) or not architectures or architectures[0] not in tasks:
        raise ValueError(f"{folder}: architectures is {architectures!r}; it must name one of {', '.join(tasks)}.")
    return tasks[architectures[0]]
