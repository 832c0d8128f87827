"""Storage of weights: safetensors in a folder or on the hub, and pickles only where the caller allows them."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertblocks.core.storage import checksum, list_files, read_json, why_unreadable, write_json
from bertblocks.core.tensor_files import (
    CHECKSUM,
    INDEX,
    PARTS,
    SINGLE,
    checksum_of,
    find_safetensors,
    read_index,
    read_parts,
    read_safetensors,
    save_tensors,
)

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
#: Weights beyond this size are written as several files.
MAX_SHARD_BYTES = 5 * 10**9

#: What the names of a model's weights begin with among the parts of a training checkpoint.
WEIGHTS = "model/"

#: Files that say something about a model but do not change it.
_NOTES = (".md", ".png", ".html")

#: Called with the share of a step that is done.
OnShare = Callable[[float], None]


def read_checkpoint(
    source: str | Path, allow_pickle: bool = False, on_share: OnShare = lambda share: None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config values and tensors of a checkpoint folder or hub id."""
    folder = find_checkpoint(source, allow_pickle)
    return read_json(folder / "config.json"), read_tensors(folder, allow_pickle, on_share)


def find_checkpoint(source: str | Path, allow_pickle: bool = False) -> Path:
    """The folder of a checkpoint. A hub id is downloaded."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    text = str(source)
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        reason = "is a file" if folder.is_file() else why_unreadable(folder)
        raise FileNotFoundError(f"{text} is not a checkpoint folder: it {reason}.")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md", "artifact.metadata"]
    patterns += ["*.bin"] if allow_pickle else []
    try:
        return Path(snapshot_download(text, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of many libraries
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise FileNotFoundError(
            f"{text} is not a folder, and it could not be downloaded from the Hugging Face hub: {reason}."
        ) from error


def checkpoint_digest(folder: Path) -> str:
    """One SHA-256 over the names and contents of all files that make a checkpoint what it is."""
    digest = hashlib.sha256()
    for path in list_files(folder):
        name = path.relative_to(folder).as_posix()
        if not name.startswith(".") and not name.endswith(_NOTES):
            digest.update(f"{name}\0{checksum(path)}\n".encode())
    return digest.hexdigest()


def find_weights(folder: Path, allow_pickle: bool = False) -> list[Path]:
    """The files that hold a folder's weights, all of which are in the folder itself and can be read."""
    files = find_safetensors(folder)
    if not files and allow_pickle and (folder / PICKLE).is_file():
        files = [folder / PICKLE]
    elif not files and allow_pickle and (folder / PICKLE_INDEX).is_file():
        files = read_index(folder / PICKLE_INDEX)
    if files:
        return files
    pickles = [path.name for path in folder.glob("*.bin")]
    hint = f"; {pickles[0]} is a pickle, which is not read unless pickles are allowed" if pickles else ""
    raise FileNotFoundError(f"{folder} has no {SINGLE}{hint}.")


def read_tensors(folder: Path, allow_pickle: bool = False, on_share: OnShare = lambda share: None) -> dict[str, Tensor]:
    """All tensors of a folder's weights; also of a training checkpoint to which each process wrote its parts."""
    if (folder / PARTS).is_dir():
        parts = read_parts(folder / PARTS)
        return {name.removeprefix(WEIGHTS): part for name, part in parts.items() if name.startswith(WEIGHTS)}
    files = find_weights(folder, allow_pickle)
    total = sum(path.stat().st_size for path in files)
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors.update(read_pickle(path) if path.suffix == ".bin" else read_safetensors(path))
        on_share(min(sum(tensor.nbytes for tensor in tensors.values()) / max(total, 1), 1.0))
    return tensors


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle; `weights_only` rejects anything that could run."""
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
    """Writes one safetensors file, or shards of at most `max_shard_bytes` and their index, with checksums."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    written: set[int] = set()
    for name, tensor in tensors.items():
        if tensor.data_ptr() in written:
            tensor = tensor.clone()  # safetensors rejects tensors that share memory
        written.add(tensor.data_ptr())
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    if len(shards) == 1:
        save_tensors(shards[0], folder / SINGLE, {CHECKSUM: checksum_of(shards[0])})
        return
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_tensors(shard, folder / file, {CHECKSUM: checksum_of(shard)})
        weight_map.update(dict.fromkeys(shard, file))
        on_share(number / len(shards))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def consolidate(folder: Path, target: Path) -> Path:
    """Writes the model of a training checkpoint, of which processes wrote parts, as a folder that any library loads."""
    target.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            shutil.copy(path, target)
    write_tensors(read_tensors(folder), target, MAX_SHARD_BYTES)
    return target
