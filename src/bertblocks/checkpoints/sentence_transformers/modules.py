"""What all folders of sentence-transformers share: the list of modules, prompts, and modules with weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.embedding_head import ACTIVATIONS, Dense, EmbeddingNorm, Normalize
from bertblocks.text.tokenizers import save_tokenizer

MODULES, TRANSFORMER, PROMPTS = "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"
#: Prompts that every checkpoint has, empty unless its files say otherwise.
ROLES = {"query": "", "document": ""}
#: The feature that modules read and write unless their files say otherwise.
EMBEDDING = "sentence_embedding"
MAX_SIZE = 2**20
#: What a folder holds, by the model type that sentence-transformers and PyLate write.
KINDS = {
    "SentenceTransformer": "embedder",
    "CrossEncoder": "cross-encoder",
    "SparseEncoder": "sparse-encoder",
    "MultiVectorEncoder": "multi-vector",
    "ColBERT": "multi-vector",
}
#: Modules that only one kind of model has.
TELLING_MODULES = {
    "SpladePooling": "sparse-encoder",
    "MLMTransformer": "sparse-encoder",
    "MultiVectorMask": "multi-vector",
    "LogitScore": "cross-encoder",
}
#: Files and keys of config.json that only one kind of model has, for folders without modules.json.
COLBERT_FILE, COLBERT_CLASS = "artifact.metadata", "HF_ColBERT"
#: The tensor of Stanford's ColBERT that projects the hidden states of tokens.
PROJECTION = "linear.weight"
CROSS_ENCODER_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")
#: Keys that only PyLate writes.
PYLATE_KEYS = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens")


def check_role(role: str | None) -> str | None:
    """Returns a role that texts can have, or None, and rejects anything else."""
    if role not in (None, *ROLES):
        raise ValueError(f"role is {role!r}; it must be one of {', '.join(ROLES)}{nearest(str(role), ROLES)}.")
    return role


def find_kind(folder: Path) -> str | None:
    """What the files of a folder say it holds: one of the values of `KINDS`, or None for a plain checkpoint."""
    values = read_if_any(folder / PROMPTS)
    named = values.get("model_type")
    if isinstance(named, str) and named in KINDS:
        return KINDS[named]
    if any(key in values for key in PYLATE_KEYS):
        return "multi-vector"
    if (folder / MODULES).is_file():
        kinds = [kind for kind, _ in read_modules(folder / MODULES)]
        return next((TELLING_MODULES[kind] for kind in kinds if kind in TELLING_MODULES), "embedder")
    config = read_if_any(folder / "config.json")
    names = config.get("architectures")
    if (folder / COLBERT_FILE).is_file() or (isinstance(names, list) and COLBERT_CLASS in names):
        return "multi-vector"
    return "cross-encoder" if any(key in config for key in CROSS_ENCODER_KEYS) else None


def read_modules(path: Path) -> list[tuple[str, str]]:
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


def read_if_any(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def read_prompts(path: Path) -> tuple[dict[str, str], str | None]:
    values = read_if_any(path)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise ValueError(f"{path}: prompts must map names to texts.")
    if default is not None and not isinstance(default, str):
        raise ValueError(f"{path}: default_prompt_name is {default!r}; it must be a name or null.")
    if default is not None and default not in (known := {**ROLES, **prompts}):
        raise ValueError(f"{path}: default_prompt_name is {default!r}; it must be one of {', '.join(known)}.")
    return prompts, default


def read_max_length(folder: Path) -> int | None:
    """The tokens that the encoder reads at most, if its file says so."""
    length = read_if_any(folder / TRANSFORMER).get("max_seq_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise ValueError(f"{folder / TRANSFORMER}: max_seq_length is {length!r}; it must be a positive whole number.")
    return length


# ---------------------------------------------------------------------- modules behind the pooling


def read_dense(folder: Path, source: str = EMBEDDING, target: str = EMBEDDING) -> nn.Module:
    """A dense module between two named features: from `source` to `target`."""
    path = folder / "config.json"
    values = read_json(path)
    _check_names(path, values, source, target)
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"{path}: activation_function is {values['activation_function']!r}; it must be one of torch.nn's "
            f"{', '.join(ACTIVATIONS)}."
        )
    sizes = read_size(path, values, "in_features"), read_size(path, values, "out_features")
    with torch.device("meta"):
        layer = Dense(*sizes, values.get("bias") is not False, activation, values.get("use_residual") is True)
    return load_weights(layer, folder)


def _read_norm(folder: Path) -> nn.Module:
    path = folder / "config.json"
    with torch.device("meta"):
        layer = EmbeddingNorm(read_size(path, read_json(path), "dimension"))
    return load_weights(layer, folder)


def read_normalize(folder: Path, source: str = EMBEDDING) -> nn.Module:
    _check_names(folder / "config.json", read_if_any(folder / "config.json"), source, source)
    return Normalize()


#: Readers of modules behind the pooling, by the names of their classes.
READERS = {"Dense": read_dense, "LayerNorm": _read_norm, "Normalize": read_normalize}


def _check_names(path: Path, values: dict[str, Any], source: str, target: str) -> None:
    given = values.get("module_input_name") or source
    names = {"module_input_name": given, "module_output_name": values.get("module_output_name") or given}
    for (key, name), wanted in zip(names.items(), (source, target), strict=True):
        if name != wanted:
            raise ValueError(f"{path}: {key} is {name!r}; it must be {wanted!r}.")


def read_size(path: Path, values: dict[str, Any], key: str) -> int:
    size = values.get(key)
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
        raise ValueError(f"{path}: {key} is {size!r}; it must be a whole number from 1 to {MAX_SIZE:,}.")
    return size


def load_weights(layer: nn.Module, folder: Path) -> nn.Module:
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


def write_layer(layer: nn.Module, folder: Path, **names: str) -> None:
    """Writes the config and weights of a module; `names` are keys of the features that it reads and writes."""
    if isinstance(layer, Normalize):
        if names:
            write_json(folder / "config.json", names)
        return
    if isinstance(layer, Dense):
        activation = type(layer.activation)
        values = {
            "in_features": layer.in_size,
            "out_features": layer.out_size,
            "bias": layer.linear.bias is not None,
            "activation_function": f"{activation.__module__}.{activation.__name__}",
            **({"use_residual": True} if layer.has_residual else {}),
            **names,
        }
    else:
        values = {"dimension": layer.out_size}
    write_json(folder / "config.json", values)
    save_tensors({name: tensor.contiguous().cpu() for name, tensor in layer.state_dict().items()}, folder / SINGLE)


def save_folder(
    model: BertBlocksPreTrainedModel,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    write_settings: Callable[[Path], None],
) -> None:
    """Writes a checkpoint, its tokenizer and the files of its kind; all of them or none.

    It needs BertBlocks only if no family can hold the model. Modules behind the encoder have files of their own.
    """
    encoder = model.base_model
    head, encoder.embedding_head = encoder.embedding_head, None
    try:
        with atomic_entries(folder) as scratch:
            save_native(model, scratch)
            save_tokenizer(tokenizer, scratch)
            write_settings(scratch)
    finally:
        encoder.embedding_head = head


def write_modules(folder: Path, modules: Sequence[tuple[str, str]]) -> None:
    """Writes the folder of every module and its kind: a class of `sentence_transformers.models`, or one by its path."""
    write_json(
        folder / MODULES,
        [
            {
                "idx": index,
                "name": str(index),
                "path": path,
                "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
            }
            for index, (path, kind) in enumerate(modules)
        ],
    )
