"""What a sentence-transformers folder says beside its weights: pooling, length, prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertblocks.core.storage import read_json

#: sentence-transformers' names of the ways of pooling that exist here; both its older and its newer spelling.
POOLINGS = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a checkpoint makes embeddings; the defaults are for one that does not say."""

    pooling: str = "mean"
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None


def read_settings(folder: Path) -> EmbeddingSettings:
    """From `modules.json` and the files it leads to. A module that would change the result is refused by name."""
    if not (folder / "modules.json").is_file():
        return EmbeddingSettings()
    try:
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{folder / 'modules.json'} is no valid JSON: {error}.") from error
    pooling = "mean"
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        if kind == "Pooling":
            pooling = _read_pooling(folder / module["path"] / "config.json")
        elif kind not in ("Transformer", "Normalize"):
            raise ValueError(
                f"{folder / 'modules.json'} has a {kind} module; BertBlocks makes embeddings by Transformer, Pooling "
                "and Normalize."
            )
    length = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    values = _read(folder / "config_sentence_transformers.json")
    return EmbeddingSettings(pooling, length, values.get("prompts") or {}, values.get("default_prompt_name"))


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _read_pooling(path: Path) -> str:
    values = read_json(path)
    named = values.get("pooling_mode")
    modes = [key for key, value in values.items() if key.startswith("pooling_mode_") and value is True]
    if named is not None:
        modes = [named] if isinstance(named, str) else list(named)
    if len(modes) != 1 or modes[0] not in POOLINGS:
        raise ValueError(f"{path}: the pooling is {' and '.join(modes) or 'missing'}; it must be cls, mean or max.")
    if values.get("include_prompt") is False:
        raise ValueError(f"{path}: include_prompt is false; prompts are always pooled along here.")
    return POOLINGS[modes[0]]
