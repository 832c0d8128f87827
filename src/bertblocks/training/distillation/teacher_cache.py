"""Outputs of a teacher on disk, so that no text goes through it twice."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from bertblocks.core.log import logger
from bertblocks.core.storage import PARTIAL, checksum
from bertblocks.core.tensor_files import CHECKSUM, checksum_of, read_safetensors, save_tensors

#: Outputs per file. A run that is stopped loses at most these.
PART_SIZE = 2048
#: Files of a checkpoint that decide what the model computes.
ENDINGS = (".safetensors", ".json", ".txt", ".model")


def hash_teacher(folder: Path, *parts: object) -> str:
    """A key for the outputs of a checkpoint: its files, and how it is run."""
    files = sorted(path for pattern in ("*", "*_*/*") for path in folder.glob(pattern) if path.suffix in ENDINGS)
    listing = "".join(f"{path.relative_to(folder).as_posix()} {checksum(path)}\n" for path in files)
    return hashlib.sha256(f"{listing}{parts!r}".encode()).hexdigest()[:32]


class TeacherCache:
    """A folder of safetensors files with checksums, each with some inputs' hashes and the teacher's outputs for them.

    Files appear whole or not at all and are never changed, so several runs can share a cache. A damaged file is deleted
    and its outputs are computed again.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     cache = TeacherCache(Path(folder))
        ...     first = cache.get(["a", "bc", "a"], lambda texts: (np.float32([len(text)]) for text in texts))
        ...     again = TeacherCache(Path(folder)).get(["bc"], lambda texts: iter(()))
        >>> first.tolist(), again.tolist()
        ([[1.0], [2.0], [1.0]], [[2.0]])
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        #: How many different inputs of the last call were there already, and how many were computed.
        self.found = self.computed = 0

    def get(self, inputs: Sequence[str], compute: Callable[[list[str]], Iterable[np.ndarray]]) -> CachedOutputs:
        """The output for each input. `compute` yields the outputs of those that the folder lacks, in their order."""
        keys = np.array([_hash(text) for text in inputs], dtype="S16")
        outputs = CachedOutputs(self._read(), keys)
        missing = np.flatnonzero(outputs.parts == 0)
        wanted = np.sort(missing[np.unique(keys[missing], return_index=True)[1]])
        self.computed, self.found = len(wanted), len(np.unique(keys)) - len(wanted)
        if len(wanted):
            results = iter(compute([inputs[index] for index in wanted]))
            for start in range(0, len(wanted), PART_SIZE):
                part = wanted[start : start + PART_SIZE]
                self._write(keys[part], np.stack(list(islice(results, len(part)))))
            outputs = CachedOutputs(self._read(), keys)
        return outputs

    def _read(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The hashes and values of all files."""
        found = []
        for path in sorted(self.folder.glob("part-*.safetensors")):
            try:
                tensors = read_safetensors(path)
                found.append((_view(tensors["hashes"].numpy()), tensors["values"].numpy()))
            except (OSError, KeyError, ValueError) as error:
                logger.warning(f"{path} is damaged, so it is deleted and computed again ({error}).")
                path.unlink(missing_ok=True)
        return found

    def _write(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        hashes = np.frombuffer(keys.tobytes(), np.uint8).reshape(len(keys), 16)
        tensors = {"hashes": torch.from_numpy(hashes.copy()), "values": torch.from_numpy(values)}
        digest = checksum_of(tensors)
        temporary = self.folder / f".{digest[:16]}{PARTIAL}"
        save_tensors(tensors, temporary, {CHECKSUM: digest})
        temporary.replace(self.folder / f"part-{digest[:16]}.safetensors")


class CachedOutputs:
    """The outputs of a list of inputs, read by index. `parts` is 0 for an input without one."""

    def __init__(self, files: list[tuple[np.ndarray, np.ndarray]], keys: np.ndarray) -> None:
        hashes = [np.zeros(1, "S16"), *(own for own, _ in files)]  # no input has the first, so there always is one
        self.values = [np.zeros(0), *(values for _, values in files)]
        known = np.concatenate(hashes)
        order = np.argsort(known, kind="stable")
        places = order[np.searchsorted(known[order], keys).clip(max=len(known) - 1)]
        sizes = [len(own) for own in hashes]
        self.parts = np.where(known[places] == keys, np.repeat(np.arange(len(sizes)), sizes)[places], 0)
        self.rows = np.concatenate([np.arange(size) for size in sizes])[places]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        return np.stack([self.values[self.parts[index]][self.rows[index]] for index in indices])

    def tolist(self) -> list[object]:
        return self[np.arange(len(self))].tolist()


def _view(hashes: np.ndarray) -> np.ndarray:
    if hashes.dtype != np.uint8 or hashes.ndim != 2 or hashes.shape[1] != 16:
        raise ValueError("its hashes have the wrong shape")
    return np.ascontiguousarray(hashes).view("S16").ravel()


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
