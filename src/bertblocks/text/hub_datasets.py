"""Datasets of the `datasets` library, by name or as a saved folder."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from bertblocks.text.records import DataError


@lru_cache(maxsize=4)
def load_dataset(name: str, split: str | None = None) -> Any:
    """A dataset named `NAME`, `NAME:CONFIG`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`; NAME may be a folder.

    A single part after the name is a config if the dataset has one of that name, else a split. A split in the name
    comes before `split`, and both before "train".
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: datasets need `datasets`; install it with `pip install datasets`.") from error
    from huggingface_hub.errors import HfHubHTTPError

    datasets.disable_progress_bars()
    path, *parts = name.split(":")
    if len(parts) > 2:
        raise DataError(f"The dataset {name!r} has {len(parts)} parts after its name; write NAME:CONFIG:SPLIT.")
    try:
        if is_saved_dataset(path):
            loaded = datasets.load_from_disk(path)
            is_split = isinstance(loaded, datasets.DatasetDict)
            return loaded[parts[-1] if parts else split or "train"] if is_split else loaded
        if len(parts) == 1:
            parts = [*parts, ""] if parts[0] in datasets.get_dataset_config_names(path) else ["", *parts]
        config, named_split = parts or ("", "")
        return datasets.load_dataset(path, config or None, split=named_split or split or "train")
    except (OSError, ValueError, KeyError, RuntimeError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: no such file, and `datasets` cannot load it: {reason}") from error


def is_saved_dataset(folder: str) -> bool:
    """Whether `datasets` saved this folder."""
    return Path(folder, "state.json").is_file() or Path(folder, "dataset_dict.json").is_file()
