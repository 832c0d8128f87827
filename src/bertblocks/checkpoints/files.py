"""Storage of weights: safetensors in a folder or on the hub, and pickles only where the caller allows them."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertblocks.core.storage import read_json, why_unreadable, write_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
#: Weights beyond this size are written as several files.
MAX_SHARD_BYTES = 5 * 10**9
#: The key of a checksum in the metadata of a safetensors file. Other libraries that rewrite the file leave it out.
CHECKSUM = "bertblocks_sha256"
#: The environment variable that turns the verification of checksums off if it is 0.
VERIFY = "BERTBLOCKS_VERIFY"

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

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.md", *(["*.bin"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(text, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises errors of many libraries
        reason = str(error).strip().partition("\n")[0][:200].rstrip(".") or type(error).__name__
        raise FileNotFoundError(
            f"{text} is not a folder, and it could not be downloaded from the Hugging Face hub: {reason}."
        ) from error


def find_weights(folder: Path, allow_pickle: bool = False) -> list[Path]:
    """The files that hold a folder's weights, all of which are in the folder itself and can be read."""
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        files = _read_index(folder / INDEX)
    elif allow_pickle and (folder / PICKLE).is_file():
        files = [PICKLE]
    elif allow_pickle and (folder / PICKLE_INDEX).is_file():
        files = _read_index(folder / PICKLE_INDEX)
    else:
        pickles = [path.name for path in folder.glob("*.bin")]
        hint = f"; {pickles[0]} is a pickle, which is not read unless pickles are allowed" if pickles else ""
        raise FileNotFoundError(f"{folder} has no {SINGLE}{hint}.")
    for name in files:
        if not os.access(folder / name, os.R_OK):
            raise PermissionError(f"{folder / name} cannot be read: permission denied.")
    return [folder / name for name in files]


def _read_index(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from tensor names to file names.")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index} names {name}, which is not a file in that folder.")
    return names


def read_tensors(folder: Path, allow_pickle: bool = False, on_share: OnShare = lambda share: None) -> dict[str, Tensor]:
    """All tensors of a folder's weights."""
    files = find_weights(folder, allow_pickle)
    total = sum(path.stat().st_size for path in files)
    tensors: dict[str, Tensor] = {}
    for path in files:
        tensors.update(_read_pickle(path) if path.suffix == ".bin" else read_safetensors(path))
        on_share(min(sum(tensor.nbytes for tensor in tensors.values()) / max(total, 1), 1.0))
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. If it carries a checksum, they are verified."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            expected = (file.metadata() or {}).get(CHECKSUM)
    except SafetensorError as error:
        raise OSError(f"{path} is damaged: {error}.") from error
    if expected is not None and os.environ.get(VERIFY) != "0" and checksum_of(tensors) != expected:
        raise OSError(f"{path} is damaged: its checksum is wrong. Set {VERIFY}=0 to load it anyway.")
    return tensors


def checksum_of(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the names, types, shapes and values of tensors."""

    def hash_tensor(name: str) -> bytes:
        tensor = tensors[name]
        digest = hashlib.sha256(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.digest()

    # hashing releases the GIL
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256(b"".join(pool.map(hash_tensor, sorted(tensors)))).hexdigest()


def _read_pickle(path: Path) -> dict[str, Tensor]:
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


def save_tensors(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> None:
    """Writes one safetensors file. A failed write is an OSError that names the file."""
    try:
        save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written: {error}.") from error
