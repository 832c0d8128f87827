"""Averages checkpoints of one model, such as the last ones of a training run (Izmailov et al., 2018)."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bertblocks.checkpoints.files import MAX_SHARD_BYTES, find_weights, write_tensors
from bertblocks.core.storage import atomic_folder, read_json, require_new_folder
from bertblocks.core.tensor_files import read_safetensors
from bertblocks.reports.model_card import Card, write_card

#: Keys of config.json that do not describe the model.
UNCOMPARED = {"transformers_version", "_name_or_path", "name_or_path"}
#: Files with a tokenizer's vocabulary and rules.
TOKENIZER_FILES = ("tokenizer.json", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model")
#: Files to copy. Training checkpoints have more, which do not apply to a mean.
CARRIED = (*TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
#: Keys of tokenizer.json that record settings of the last call.
CALL_SETTINGS = ("truncation", "padding")


@dataclass(frozen=True)
class Merged:
    """The outcome of a merge: the share of each source, and the size of the model."""

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

    The folders may come from any library, if their configs, their tokenizers, and the names, shapes and types of all
    tensors agree. Tensors are read one at a time, so memory holds a single model however many folders there are.
    `output` must not exist or must be empty, and appears once it is complete.
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
        for other in files[1:]:
            files[0].check_same_tensors(other)
        tensors: dict[str, Tensor] = {}
        for number, name in enumerate(files[0].names, start=1):
            tensors[name] = _mean([file.read(name) for file in files], shares, name)
            on_share(number / len(files[0].names))
    named = {str(folder): share for folder, share in zip(folders, shares, strict=True)}
    with atomic_folder(target) as scratch:
        write_tensors(tensors, scratch, max_shard_bytes)
        for name in CARRIED:
            if (folders[0] / name).is_file():
                shutil.copyfile(folders[0] / name, scratch / name)
        write_card(scratch, _card(target, named))
    return Merged(named, len(tensors), sum(tensor.numel() for tensor in tensors.values()))


def _card(target: Path, shares: dict[str, float]) -> Card:
    return Card(
        target.name,
        f"The weighted mean of {len(shares)} checkpoints of one model, merged by BertBlocks (Izmailov et al., 2018).",
        sources=[Path(folder) for folder in shares],
        relation="merge",
        limitations=["The mean was not evaluated; score it before you rely on it."],
        settings={f"share of {Path(folder).name}": f"{share:.4g}" for folder, share in shares.items()},
    )


def read_shares(folders: Sequence[Path], weights: Sequence[float] | None) -> list[float]:
    """The share of each folder; shares add up to 1 and are equal if no weights are given."""
    if len(folders) < 2:
        raise ValueError(f"{len(folders)} checkpoint is given; averaging needs at least two.")
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
        raise ValueError(f"{name} holds {first.dtype} and differs; only floating-point numbers can be averaged.")
    # in double precision, so the mean of equal numbers is exactly that number
    total = sum((tensor.double() * share for tensor, share in zip(tensors, shares, strict=True)), start=torch.zeros(()))
    if not torch.isfinite(total).all():
        raise ValueError(f"{name} has values in one of the checkpoints that are not finite.")
    return total.to(first.dtype)


class _TensorFiles:
    """The tensors of a checkpoint, read by name."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        for path in find_weights(folder):
            read_safetensors(path)  # raises an error if the file is damaged
            file = stack.enter_context(safe_open(path, framework="pt"))
            self.files.update(dict.fromkeys(file.keys(), file))
        self.names = sorted(self.files)

    def read(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)

    def check_same_tensors(self, other: _TensorFiles) -> None:
        """Raises an error that names the first tensor that only one has, or that differs in shape or type."""
        if alone := sorted(set(self.names) ^ set(other.names)):
            owner, lacking = (self, other) if alone[0] in self.files else (other, self)
            raise ValueError(f"{owner.folder} has {alone[0]}, which {lacking.folder} lacks.")
        for name in self.names:
            mine, theirs = (checkpoint.files[name].get_slice(name) for checkpoint in (self, other))
            for what, read in (("shape", lambda part: part.get_shape()), ("type", lambda part: part.get_dtype())):
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
            raise ValueError(
                f"{other / name} differs from the tokenizer of {first}: the same ids would stand for different texts."
            )


def _read_tokenizer(path: Path) -> Any:
    if not path.is_file():
        return None
    if path.suffix != ".json":
        return path.read_bytes()
    return {key: value for key, value in read_json(path).items() if key not in CALL_SETTINGS}
