"""The mean of several checkpoints of one model, as of the end of a training (Izmailov et al., 2018)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from bertblocks.checkpoints.files import INDEX, MAX_SHARD_BYTES, SINGLE, write_tensors
from bertblocks.core.storage import atomic_folder, read_json, require_new_folder

#: Keys of a config.json that say nothing about the model.
UNCOMPARED = {"transformers_version", "_name_or_path", "name_or_path"}
#: Files that make up a tokenizer's vocabulary and rules.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model")
#: What goes with the weights; a checkpoint of a training holds more, which is not true of a mean.
CARRIED = (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
#: Settings of a call, which tokenizer.json holds beside the tokenizer.
CALL_SETTINGS = ("truncation", "padding")


@dataclass(frozen=True)
class Merged:
    """What was averaged: each source with its share, and how much of it there was."""

    shares: dict[str, float]
    tensors: int
    parameters: int


def merge(
    sources: Sequence[str | Path],
    output: str | Path,
    weights: Sequence[float] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    on_share: Callable[[float], None] = lambda share: None,
) -> Merged:
    """Writes the weighted mean of checkpoint folders to the folder `output`, with the first one's config and tokenizer.

    Folders of any library will do, as long as config, tokenizer, and the names, shapes and types of all tensors agree.
    Tensors are read one at a time, so memory holds one model however many there are. `output` must not exist or be
    empty, and appears only when it is whole.
    """
    folders = [Path(source) for source in sources]
    target = Path(output)
    shares = read_shares(folders, weights)
    require_new_folder(target)
    for folder in folders[1:]:
        _compare_configs(folders[0], folder)
        _compare_tokenizers(folders[0], folder)
    with ExitStack() as stack:
        files = [_TensorFiles(folder, stack) for folder in folders]
        for one in files[1:]:
            files[0].refuse_other(one)
        tensors: dict[str, Tensor] = {}
        for number, name in enumerate(files[0].names, start=1):
            tensors[name] = _mean([one.read(name) for one in files], shares, name)
            on_share(number / len(files[0].names))
    with atomic_folder(target) as scratch:
        write_tensors(tensors, scratch, max_shard_bytes)
        for name in CARRIED:
            if (folders[0] / name).is_file():
                shutil.copyfile(folders[0] / name, scratch / name)
    named = {str(folder): share for folder, share in zip(folders, shares, strict=True)}
    return Merged(named, len(tensors), sum(tensor.numel() for tensor in tensors.values()))


def read_shares(folders: Sequence[Path], weights: Sequence[float] | None) -> list[float]:
    """Weights that add up to 1; equal ones if none are given."""
    if len(folders) < 2:
        raise ValueError(f"{len(folders)} checkpoint is given; a mean needs at least two.")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ValueError("A checkpoint is given twice; give it a larger weight instead.")
    weights = [1.0] * len(folders) if weights is None else list(weights)
    if len(weights) != len(folders):
        raise ValueError(f"{len(weights)} weights are given for {len(folders)} checkpoints; give one for each.")
    if not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError(f"The weights are {', '.join(f'{weight:g}' for weight in weights)}; each must be above 0.")
    return [weight / sum(weights) for weight in weights]


def _mean(tensors: list[Tensor], shares: list[float], name: str) -> Tensor:
    first = tensors[0]
    if not first.is_floating_point():
        if all(torch.equal(first, other) for other in tensors[1:]):
            return first
        raise ValueError(f"{name} holds {first.dtype} and differs; only floating point numbers have a mean.")
    # in double, so that the mean of equal numbers is that number
    total = sum((tensor.double() * share for tensor, share in zip(tensors, shares, strict=True)), start=torch.zeros(()))
    if not torch.isfinite(total).all():
        raise ValueError(f"{name} holds numbers that are not finite in one of the checkpoints.")
    return total.to(first.dtype)


class _TensorFiles:
    """A checkpoint's tensors, read by name from its file or files."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.places: dict[str, Any] = {}
        for path in self._paths():
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise OSError(f"{path} cannot be read: {error}.") from error
            self.places.update(dict.fromkeys(file.keys(), file))
        self.names = sorted(self.places)

    def _paths(self) -> list[Path]:
        if (self.folder / SINGLE).is_file():
            return [self.folder / SINGLE]
        if (self.folder / INDEX).is_file():
            names = set(read_json(self.folder / INDEX).get("weight_map", {}).values())
            return [self.folder / Path(name).name for name in sorted(names)]
        raise FileNotFoundError(f"{self.folder} holds no {SINGLE}.")

    def read(self, name: str) -> Tensor:
        return self.places[name].get_tensor(name)

    def refuse_other(self, other: _TensorFiles) -> None:
        """Raises by the first tensor that only one has, or that has another shape or type."""
        if alone := sorted(set(self.names) ^ set(other.names)):
            owner, lacking = (self, other) if alone[0] in self.places else (other, self)
            raise ValueError(f"{owner.folder} has {alone[0]}, which {lacking.folder} has not.")
        for name in self.names:
            mine, theirs = (one.places[name].get_slice(name) for one in (self, other))
            for what, read in (("shape", lambda one: one.get_shape()), ("type", lambda one: one.get_dtype())):
                if read(mine) != read(theirs):
                    raise ValueError(
                        f"{name} has {what} {read(mine)} in {self.folder} and {read(theirs)} in {other.folder}."
                    )


def _compare_configs(first: Path, other: Path) -> None:
    mine, theirs = read_json(first / "config.json"), read_json(other / "config.json")
    for key in sorted({*mine, *theirs} - UNCOMPARED):
        if mine.get(key) != theirs.get(key):
            raise ValueError(f"{key} is {mine.get(key)!r} in {first} and {theirs.get(key)!r} in {other}.")


def _compare_tokenizers(first: Path, other: Path) -> None:
    for name in TOKENIZER_FILES:
        mine, theirs = (_read_tokenizer(folder / name) for folder in (first, other))
        if mine is not None and theirs is not None and mine != theirs:
            raise ValueError(f"{other / name} is not the tokenizer of {first}: the same ids would be other texts.")


def _read_tokenizer(path: Path) -> Any:
    if not path.is_file():
        return None
    if path.suffix != ".json":
        return path.read_bytes()
    return {key: value for key, value in json.loads(path.read_bytes()).items() if key not in CALL_SETTINGS}
