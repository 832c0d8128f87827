"""Loads checkpoints and torch models as Flax models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.load import load_with_report
from bertblocks.config.validation import ConfigError
from bertblocks.core.registry import nearest
from bertblocks.flax.models import FLAX_TASK_MODELS, FlaxBertBlocksPreTrainedModel
from bertblocks.flax.weights import torch_weights
from bertblocks.models import TASK_MODELS, BertBlocksPreTrainedModel
from bertblocks.text.tokenizers import load_tokenizer_if_any


def load(
    path_or_id: str | Path, task: str | None = None, dtype: Any = None
) -> tuple[FlaxBertBlocksPreTrainedModel, PreTrainedTokenizerBase | None]:
    """Like `bertblocks.load`, for the same families, but returns a Flax model.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForMaskedLM
        >>> folder = tempfile.mkdtemp()
        >>> config = BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50)
        >>> BertForMaskedLM(config).save_pretrained(folder)
        >>> model, tokenizer = load(folder)
        >>> type(model).__name__, tokenizer
        ('FlaxBertBlocksForMaskedLM', None)
    """
    if task is not None:
        _check_task(task)
    folder = find_checkpoint(path_or_id)
    model, report = load_with_report(folder, task)
    report.log(with_unread=task is None)
    return from_torch(model, dtype), load_tokenizer_if_any(folder)


def from_torch(model: BertBlocksPreTrainedModel, dtype: Any = None) -> FlaxBertBlocksPreTrainedModel:
    """Returns the Flax model with a copy of a torch model's weights, converted to `dtype` if given."""
    task = next((name for name, kind in TASK_MODELS.items() if kind is type(model)), type(model).__name__)
    _check_task(task)
    return FLAX_TASK_MODELS[task](model.config, weights=torch_weights(model), dtype=dtype)


def _check_task(task: str) -> None:
    if task not in FLAX_TASK_MODELS:
        known = ", ".join(FLAX_TASK_MODELS)
        raise ConfigError(f"task is {task!r}; bertblocks.flax has {known}{nearest(task, FLAX_TASK_MODELS)}.")
