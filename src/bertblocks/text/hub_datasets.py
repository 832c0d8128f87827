"""Datasets of the `datasets` library, by name or as a saved folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from bertblocks.text.records import DataError


@lru_cache(maxsize=4)
def load_dataset(name: str, split: str | None = None) -> Any:
    """A dataset named `NAME`, `NAME:CONFIG`, `NAME:SPLIT` or `NAME:CONFIG:SPLIT`; NAME may be a folder.

    `NAME@REVISION` is a fixed version of a dataset on the hub. A single part after the name is a config if the dataset
    has one of that name, else a split. A split in the name comes before `split`, and both before "train".
    """
    with dataset_errors(name):
        import datasets

        datasets.disable_progress_bars()
        path, *parts = name.split(":")
        if is_saved_dataset(path):
            loaded = datasets.load_from_disk(path)
            is_split = isinstance(loaded, datasets.DatasetDict)
            return loaded[parts[-1] if parts else split or "train"] if is_split else loaded
        path, config, split, revision = _parse(name, split)
        return datasets.load_dataset(path, config, split=split, **revision)


@lru_cache(maxsize=4)
def stream_dataset(name: str, split: str | None = None) -> tuple[Any, list[Any]]:
    """A dataset, named as in `load_dataset`, that is read over the network as it is needed; nothing is stored.

    Also returns its files with their versions, which change when its contents do.
    """
    with dataset_errors(name):
        import datasets

        path, config, split, revision = _parse(name, split)
        builder = datasets.load_dataset_builder(path, config, **revision)
        files = (builder.config.data_files or {}).get(split, [])
        versions = getattr(files, "origin_metadata", [])
        return builder.as_streaming_dataset(split), [list(files), [list(version) for version in versions]]


def _parse(name: str, split: str | None) -> tuple[str, str | None, str, dict[str, str]]:
    """The path, config, split and revision that a name means."""
    import datasets

    path, *parts = name.split(":")
    path, _, version = (path, "", "") if Path(path).exists() else path.partition("@")
    revision = {"revision": version} if version else {}
    if len(parts) > 2:
        raise DataError(f"The dataset {name!r} has {len(parts)} parts after its name; write NAME:CONFIG:SPLIT.")
    if len(parts) == 1:
        parts = [*parts, ""] if parts[0] in datasets.get_dataset_config_names(path, **revision) else ["", *parts]
    config, named_split = parts or ("", "")
    return path, config or None, named_split or split or "train", revision


@contextmanager
def dataset_errors(name: str) -> Iterator[None]:
    """Turns the errors of `datasets` into one sentence that names the dataset."""
    try:
        import datasets  # noqa: F401
    except ImportError as error:
        raise DataError(f"{name}: datasets need `datasets`; install it with `pip install datasets`.") from error
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except DataError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, HfHubHTTPError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{name}: no such file, and `datasets` cannot load it: {reason}") from error


def is_saved_dataset(folder: str) -> bool:
    """Whether `datasets` saved this folder."""
    return Path(folder, "state.json").is_file() or Path(folder, "dataset_dict.json").is_file()
