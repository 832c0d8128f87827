"""Folders of embedding models: an encoder, a pooling, and modules behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.sentence_transformers.modules import (
    MODULES,
    PROMPTS,
    READERS,
    ROLES,
    TRANSFORMER,
    read_max_length,
    read_modules,
    read_prompts,
    save_folder,
    write_layer,
    write_modules,
)
from bertblocks.core.registry import nearest
from bertblocks.core.storage import read_json, write_json
from bertblocks.models import BertBlocksModel
from bertblocks.nn.embedding_head import EmbeddingNorm, Normalize

#: Our poolings by sentence-transformers' names and by those of its older files, in its order of concatenation.
POOLINGS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weighted_mean",
    "pooling_mode_lasttoken": "last",
}


@dataclass(frozen=True)
class EmbeddingSettings:
    """How a checkpoint makes embeddings, with the defaults for a folder without modules.json."""

    pooling: str = "mean"
    max_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    #: The modules behind the pooling, except a last one that scales embeddings to length 1.
    layers: tuple[nn.Module, ...] = ()

    def find_prompt(self, prompt: str | None, name: str | None) -> str:
        """The text in front of every text: `prompt`, which may be a name, the prompt called `name`, or the default."""
        if prompt is not None and name is not None:
            raise ValueError(f"prompt is {prompt!r} and prompt_name is {name!r}; give one of them.")
        known = {**ROLES, **self.prompts}
        if name is not None and name not in known:
            raise ValueError(f"prompt_name is {name!r}; it must be one of {', '.join(known)}{nearest(name, known)}.")
        if name is not None:
            return known[name]
        if prompt is None:
            return "" if self.default_prompt is None else known[self.default_prompt]
        return self.prompts.get(prompt, prompt)


def read_settings(folder: Path) -> EmbeddingSettings:
    """Reads `modules.json` and the files it leads to. A module that BertBlocks cannot run is an error."""
    path = folder / MODULES
    if not path.is_file():
        return EmbeddingSettings()
    pooling: str | None = None
    layers: list[nn.Module] = []
    for kind, name in read_modules(path):
        if kind not in ("Transformer", "Pooling", *READERS):
            raise ValueError(
                f"{path} has a {kind} module; BertBlocks makes embeddings with Transformer, Pooling, "
                f"{', '.join(READERS)}."
            )
        if (kind == "Pooling") != (pooling is None) and kind != "Transformer":
            raise ValueError(f"{path}: the {kind} module {name!r} must follow the only Pooling module.")
        if kind == "Pooling":
            pooling = read_pooling(folder / name / "config.json")
        elif kind != "Transformer":
            layers.append(READERS[kind](folder / name))
    while layers and isinstance(layers[-1], Normalize):
        layers.pop()
    prompts, default = read_prompts(folder / PROMPTS)
    return EmbeddingSettings(pooling or "mean", read_max_length(folder), prompts, default, tuple(layers))


def read_pooling(path: Path) -> str:
    """The pooling of a module's config; several are joined by "+"."""
    values = read_json(path)
    named = values.get("pooling_mode")
    if named is None:
        modes = [mode for key, mode in OLD_POOLINGS.items() if values.get(key) is True]
        unknown = [key for key in values if key.startswith("pooling_mode_") and key not in OLD_POOLINGS]
        wrong = next((key for key in unknown if values[key] is True), None if modes else "missing")
    else:
        given = [str(mode) for mode in named] if isinstance(named, list) and named else [str(named)]
        modes = [POOLINGS[mode] for mode in given if mode in POOLINGS]
        wrong = next((mode for mode in given if mode not in POOLINGS), None)
    if wrong is not None:
        raise ValueError(f"{path}: the pooling is {wrong}; it must be one or several of {', '.join(POOLINGS)}.")
    if values.get("include_prompt") is False:
        raise ValueError(f"{path}: include_prompt is false; BertBlocks always pools over the prompt too.")
    return "+".join(modes)


# ---------------------------------------------------------------------- writing


def save_embedder(
    model: BertBlocksModel, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: EmbeddingSettings
) -> None:
    """Writes a folder that sentence-transformers opens."""
    width = model.config.hidden_size
    save_folder(model, folder, tokenizer, lambda scratch: write_settings(scratch, settings, width))


def write_settings(folder: Path, settings: EmbeddingSettings, width: int) -> None:
    """Writes what `read_settings` reads, for hidden states of `width` numbers, with embeddings that are normalized."""
    write_json(folder / TRANSFORMER, {"max_seq_length": settings.max_length, "do_lower_case": False})
    if settings.prompts or settings.default_prompt is not None:
        prompts = {"prompts": settings.prompts, "default_prompt_name": settings.default_prompt}
        write_json(folder / PROMPTS, prompts)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    write_pooling(folder / "1_Pooling" / "config.json", settings.pooling.split("+"), width)
    for number, layer in enumerate((*settings.layers, Normalize()), start=2):
        kind = "LayerNorm" if isinstance(layer, EmbeddingNorm) else type(layer).__name__
        modules.append((f"{number}_{kind}", kind))
        write_layer(layer, folder / f"{number}_{kind}")
    write_modules(folder, modules)


def write_pooling(path: Path, modes: Sequence[str], width: int) -> None:
    """Writes the keys of older versions, unless their order of concatenation is another one."""
    old: dict[str, Any] = {key: mode in modes for key, mode in OLD_POOLINGS.items()}
    if list(modes) != [mode for mode in OLD_POOLINGS.values() if mode in modes]:
        names = {ours: theirs for theirs, ours in POOLINGS.items()}
        old = {"pooling_mode": [names[mode] for mode in modes]}
    write_json(path, {"word_embedding_dimension": width, **old})
