"""The format of sentence-transformers: a checkpoint folder with files that say how to make embeddings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.save import save_huggingface, save_model
from bertblocks.config.validation import ConfigError
from bertblocks.core.storage import atomic_entries, read_json, write_json
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.text.tokenizers import save_tokenizer

MODULES, TRANSFORMER, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
#: The poolings of BertBlocks by sentence-transformers' names, new and old.
POOLINGS = {
    "cls": "cls",
    "lasttoken": "last",
    "mean": "mean",
    "max": "max",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a checkpoint makes embeddings, with the defaults for a folder without modules.json."""

    pooling: str = "mean"
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_settings(folder: Path) -> EmbeddingSettings:
    """Reads `modules.json` and the files it leads to. A module that BertBlocks cannot run is an error."""
    path = folder / MODULES
    if not path.is_file():
        return EmbeddingSettings()
    pooling = "mean"
    for kind, name in _read_modules(path):
        if kind == "Pooling":
            pooling = _read_pooling(folder / name / "config.json")
        elif kind not in ("Transformer", "Normalize"):
            raise ValueError(
                f"{path} has a {kind} module; BertBlocks makes embeddings with Transformer, Pooling and Normalize only."
            )
    length = _read(folder / TRANSFORMER).get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{folder / TRANSFORMER}: max_seq_length is {length!r}; it must be a positive whole number.")
    values = _read(folder / PROMPTS)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ValueError(f"{folder / PROMPTS}: prompts must map names to texts.")
    if default is not None and not isinstance(default, str):
        raise ValueError(f"{folder / PROMPTS}: default_prompt_name is {default!r}; it must be a name or null.")
    return EmbeddingSettings(pooling, length, prompts, default)


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """The kind and folder of every module."""
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(modules, list):
        raise ValueError(f"{path} holds a {type(modules).__name__}, not a JSON list.")
    found = []
    for number, module in enumerate(modules):
        values = module if isinstance(module, dict) else {}
        kind, name = values.get("type"), values.get("path")
        if not isinstance(kind, str) or not isinstance(name, str):
            raise ValueError(f"{path}: module {number} must have a type and a path, both of them text.")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{path}: module {number} has path {name!r}; it must be a folder inside {path.parent}.")
        found.append((kind.rpartition(".")[2], name))
    return found


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_pooling(path: Path) -> str:
    values = read_json(path)
    named = values.get("pooling_mode")
    modes = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    if named is not None:
        modes = [str(mode) for mode in named] if isinstance(named, list) else [str(named)]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(
            f"{path}: the pooling is {' and '.join(modes) or 'missing'}; it must be cls, last, mean or max."
        )
    if values.get("include_prompt") is False:
        raise ValueError(f"{path}: include_prompt is false; BertBlocks always pools over the prompt too.")
    return POOLINGS[modes[0]]


def save_embedder(
    model: BertBlocksPreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: EmbeddingSettings
) -> None:
    """Writes a folder that sentence-transformers opens. It needs BertBlocks only if no family can hold the model."""
    with atomic_entries(folder) as scratch:
        try:
            save_huggingface(model, scratch)
        except ConfigError:
            save_model(model, scratch)
        save_tokenizer(tokenizer, scratch)
        write_settings(scratch, settings, model.config.hidden_size)


def write_settings(folder: Path, settings: EmbeddingSettings, width: int) -> None:
    """Writes what `read_settings` reads, for embeddings of `width` numbers that are normalized."""
    write_json(folder / TRANSFORMER, {"max_seq_length": settings.max_length, "do_lower_case": False})
    modes = {key: kind == settings.pooling for key, kind in POOLINGS.items() if key.startswith("pooling_mode_")}
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": width, **modes})
    if settings.prompts or settings.default_prompt is not None:
        prompts = {"prompts": settings.prompts, "default_prompt_name": settings.default_prompt}
        write_json(folder / PROMPTS, prompts)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write_json(
        folder / MODULES,
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )
