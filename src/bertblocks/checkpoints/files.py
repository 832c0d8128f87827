"""Checkpoint files on disk or on the hub: JSON and safetensors; pickles only where they are asked for."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertblocks.core.storage import read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Weights beyond this are written as several files.
MAX_SHARD_BYTES = 5 * 10**9
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


#: Told the share of a step that is done.
OnShare = Callable[[float], None]


def read_checkpoint(
    source: str | Path, allow_pickle: bool = False, on_share: OnShare = lambda share: None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config values and tensors of a checkpoint folder or hub id."""
    folder = find_checkpoint(source, allow_pickle)
    return read_json(folder / "config.json"), read_tensors(folder, allow_pickle, on_share)


def find_checkpoint(source: str | Path, allow_pickle: bool = False) -> Path:
    """A folder as it is; a hub id downloaded."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    text = str(source)
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"{text} is no folder with a checkpoint.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md", *(["*.bin"] if allow_pickle else [])]
    return Path(snapshot_download(text, allow_patterns=patterns))


def read_tensors(folder: Path, allow_pickle: bool = False, on_share: OnShare = lambda share: None) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors file or files; of its pickles only where that is allowed."""
    if (folder / SINGLE).is_file():
        files, index = [SINGLE], SINGLE
    elif (folder / INDEX).is_file():
        files, index = _files_of(folder / INDEX), INDEX
    elif allow_pickle and (folder / PICKLE).is_file():
        files, index = [PICKLE], PICKLE
    elif allow_pickle and (folder / PICKLE_INDEX).is_file():
        files, index = _files_of(folder / PICKLE_INDEX), PICKLE_INDEX
    else:
        pickles = [path.name for path in folder.glob("*.bin")]
        hint = f"; {pickles[0]} is a pickle, which is not read unless pickles are allowed" if pickles else ""
        raise FileNotFoundError(f"{folder} holds no {SINGLE}{hint}.")
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise FileNotFoundError(f"{folder / index} names {name}, which is not there.")
    total, done = sum((folder / name).stat().st_size for name in files), 0
    for name in files:
        path = folder / name
        for key, tensor in _read_pickle(path).items() if path.suffix == ".bin" else _read_safetensors(path):
            tensors[key] = tensor
            done += tensor.nbytes
            on_share(done / max(total, 1))
    return tensors


def _files_of(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensors to files.")
    return sorted(set(weight_map.values()))


def _read_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                yield key, file.get_tensor(key)
    except SafetensorError as error:
        raise OSError(f"{path} is damaged: {error}.") from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Tensors only: `weights_only` refuses anything that could run."""
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise OSError(f"{path} is damaged or holds more than tensors: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise OSError(f"{path} holds more than named tensors.")
    return tensors


def write_tensors(
    tensors: dict[str, Tensor], folder: Path, max_shard_bytes: int, on_share: OnShare = lambda share: None
) -> None:
    """One safetensors file, or several with an index where they would be larger than a shard may be."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    written: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in written:
            tensor = tensor.clone()  # safetensors takes no memory twice
        written.add(tensor.data_ptr())
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_tensors(shards[0], folder / SINGLE)
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / file)
        weight_map.update(dict.fromkeys(shard, file))
        on_share(number / len(shards))
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """One safetensors file; a write that the system refuses is an OSError that names it."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}.") from error
