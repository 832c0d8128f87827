"""Checkpoint files on disk or on the hub: JSON and safetensors, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read_checkpoint(source: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The config values and tensors of a checkpoint folder or hub id."""
    folder = find_checkpoint(source)
    return read_json(folder / "config.json"), read_tensors(folder)


def find_checkpoint(source: str | Path) -> Path:
    """A folder as it is; a hub id downloaded."""
    folder = Path(source)
    if folder.is_dir():
        return folder
    text = str(source)
    if folder.exists() or text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise FileNotFoundError(f"{text} is no folder with a checkpoint.")
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(text, allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model"]))


def read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds {type(values).__name__}, not a JSON object.")
    return values


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors file or files."""
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map", {})
        files = sorted(set(weight_map.values()))
    else:
        pickles = [path.name for path in folder.glob("*.bin")]
        hint = f"; {pickles[0]} is a pickle, which BertBlocks does not read" if pickles else ""
        raise FileNotFoundError(f"{folder} holds no {SINGLE}{hint}.")
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise FileNotFoundError(f"{folder / INDEX} names {name}, which is not there.")
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise OSError(f"{path} is damaged: {error}.") from error
    return tensors
