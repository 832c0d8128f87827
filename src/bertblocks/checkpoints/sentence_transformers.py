"""The format of sentence-transformers: a checkpoint folder with files that say how to make embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import PICKLE
from bertblocks.checkpoints.save import save_native
from bertblocks.core.registry import nearest
from bertblocks.core.storage import atomic_entries, read_json, write_json
from bertblocks.core.tensor_files import SINGLE, read_safetensors, save_tensors
from bertblocks.models import BertBlocksModel
from bertblocks.nn.embedding_head import ACTIVATIONS, Dense, EmbeddingNorm, Normalize
from bertblocks.text.tokenizers import save_tokenizer

MODULES, TRANSFORMER, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
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
#: Prompts that every checkpoint has, empty unless its files say otherwise.
ROLES = {"query": "", "document": ""}
MAX_SIZE = 2**20


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
        prompt = self.default_prompt if prompt is None else prompt
        return "" if prompt is None else self.prompts.get(prompt, prompt)


def read_settings(folder: Path) -> EmbeddingSettings:
    """Reads `modules.json` and the files it leads to. A module that BertBlocks cannot run is an error."""
    path = folder / MODULES
    if not path.is_file():
        return EmbeddingSettings()
    pooling: str | None = None
    layers: list[nn.Module] = []
    for kind, name in _read_modules(path):
        if kind not in ("Transformer", "Pooling", *READERS):
            raise ValueError(
                f"{path} has a {kind} module; BertBlocks makes embeddings with Transformer, Pooling, "
                f"{', '.join(READERS)}."
            )
        if (kind == "Pooling") != (pooling is None) and kind != "Transformer":
            raise ValueError(f"{path}: the {kind} module {name!r} must follow the only Pooling module.")
        if kind == "Pooling":
            pooling = _read_pooling(folder / name / "config.json")
        elif kind != "Transformer":
            layers.append(READERS[kind](folder / name))
    while layers and isinstance(layers[-1], Normalize):
        layers.pop()
    length = _read(folder / TRANSFORMER).get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{folder / TRANSFORMER}: max_seq_length is {length!r}; it must be a positive whole number.")
    prompts, default = _read_prompts(folder / PROMPTS)
    return EmbeddingSettings(pooling or "mean", length, prompts, default, tuple(layers))


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


def _read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    values = _read(path)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ValueError(f"{path}: prompts must map names to texts.")
    if default is not None and not isinstance(default, str):
        raise ValueError(f"{path}: default_prompt_name is {default!r}; it must be a name or null.")
    if default is not None and default not in (known := {**ROLES, **prompts}):
        raise ValueError(f"{path}: default_prompt_name is {default!r}; it must be one of {', '.join(known)}.")
    return prompts, default


def _read_pooling(path: Path) -> str:
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


# ---------------------------------------------------------------------- modules behind the pooling


def _read_dense(folder: Path) -> nn.Module:
    path = folder / "config.json"
    values = read_json(path)
    _check_names(path, values)
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{path}: activation_function is {values['activation_function']!r}; it must be one of torch.nn's "
            f"{', '.join(ACTIVATIONS)}."
        )
    sizes = _read_size(path, values, "in_features"), _read_size(path, values, "out_features")
    with torch.device("meta"):
        layer = Dense(*sizes, values.get("bias") is not False, activation, values.get("use_residual") is True)
    return _load_weights(layer, folder)


def _read_norm(folder: Path) -> nn.Module:
    path = folder / "config.json"
    with torch.device("meta"):
        layer = EmbeddingNorm(_read_size(path, read_json(path), "dimension"))
    return _load_weights(layer, folder)


def _read_normalize(folder: Path) -> nn.Module:
    _check_names(folder / "config.json", _read(folder / "config.json"))
    return Normalize()


#: Readers of modules behind the pooling, by the names of their classes.
READERS = {"Dense": _read_dense, "LayerNorm": _read_norm, "Normalize": _read_normalize}


def _check_names(path: Path, values: dict[str, Any]) -> None:
    for key in ("module_input_name", "module_output_name"):
        if values.get(key) not in (None, "sentence_embedding"):
            raise ValueError(f"{path}: {key} is {values[key]!r}; it must be 'sentence_embedding'.")


def _read_size(path: Path, values: dict[str, Any], key: str) -> int:
    size = values.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{path}: {key} is {size!r}; it must be a whole number from 1 to {MAX_SIZE:,}.")
    return size


def _load_weights(layer: nn.Module, folder: Path) -> nn.Module:
    """A module without weights yet, so that sizes in a file allocate nothing, with those of its folder."""
    path = folder / SINGLE
    if not path.is_file() and (folder / PICKLE).is_file():
        raise ValueError(
            f"{folder / PICKLE} is a pickle, which is not read; `bertblocks convert` with --allow-pickle writes "
            f"{SINGLE}."
        )
    tensors, expected = read_safetensors(path), layer.state_dict()
    for name in sorted({*tensors, *expected}):
        shapes = [list(found[name].shape) if name in found else None for found in (tensors, expected)]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{path}: {name} has shape {shapes[0]}; the module's config asks for {shapes[1]}.")
    layer.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
    return layer.eval()


# ---------------------------------------------------------------------- writing


def save_embedder(
    model: BertBlocksModel, folder: Path, tokenizer: PreTrainedTokenizerBase, settings: EmbeddingSettings
) -> None:
    """Writes a folder that sentence-transformers opens. It needs BertBlocks only if no family can hold the model."""
    head = model.embedding_head
    model.embedding_head = None  # its modules have files of their own
    try:
        with atomic_entries(folder) as scratch:
            save_native(model, scratch)
            save_tokenizer(tokenizer, scratch)
            write_settings(scratch, settings, model.config.hidden_size)
    finally:
        model.embedding_head = head


def write_settings(folder: Path, settings: EmbeddingSettings, width: int) -> None:
    """Writes what `read_settings` reads, for hidden states of `width` numbers, with embeddings that are normalized."""
    write_json(folder / TRANSFORMER, {"max_seq_length": settings.max_length, "do_lower_case": False})
    if settings.prompts or settings.default_prompt is not None:
        prompts = {"prompts": settings.prompts, "default_prompt_name": settings.default_prompt}
        write_json(folder / PROMPTS, prompts)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    _write_pooling(folder / "1_Pooling" / "config.json", settings.pooling.split("+"), width)
    for number, layer in enumerate((*settings.layers, Normalize()), start=2):
        kind = "LayerNorm" if isinstance(layer, EmbeddingNorm) else type(layer).__name__
        modules.append((f"{number}_{kind}", kind))
        _write_layer(layer, folder / f"{number}_{kind}")
    write_json(
        folder / MODULES,
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )


def _write_pooling(path: Path, modes: Sequence[str], width: int) -> None:
    """Writes the keys of older versions, unless their order of concatenation is another one."""
    old: dict[str, Any] = {key: mode in modes for key, mode in OLD_POOLINGS.items()}
    if list(modes) != [mode for mode in OLD_POOLINGS.values() if mode in modes]:
        names = {ours: theirs for theirs, ours in POOLINGS.items()}
        old = {"pooling_mode": [names[mode] for mode in modes]}
    write_json(path, {"word_embedding_dimension": width, **old})


def _write_layer(layer: nn.Module, folder: Path) -> None:
    if isinstance(layer, Normalize):
        return
    if isinstance(layer, Dense):
        activation = type(layer.activation)
        values = {
            "in_features": layer.in_size,
            "out_features": layer.out_size,
            "bias": layer.linear.bias is not None,
            "activation_function": f"{activation.__module__}.{activation.__name__}",
            **({"use_residual": True} if layer.has_residual else {}),
        }
    else:
        values = {"dimension": layer.out_size}
    write_json(folder / "config.json", values)
    save_tensors({name: tensor.contiguous().cpu() for name, tensor in layer.state_dict().items()}, folder / SINGLE)
