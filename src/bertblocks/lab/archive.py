"""A study in one file: everything that reading or repeating it needs."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from bertblocks.core.storage import PARTIAL, atomic_file, list_files, lock_folder
from bertblocks.lab.results import STUDY_FILE
from bertblocks.training.run_folder import RunFolderError

#: Weights of trained models, which a finished trial does not need again unless a measure is added.
MODEL_FILES = (".safetensors",)


def write_archive(folder: Path, target: Path, with_models: bool = False) -> int:
    """Writes the files of a study as .tar.gz and returns their number. No trial may be running."""
    if not (folder / STUDY_FILE).is_file():
        raise RunFolderError(f"{folder} does not hold a study; give a folder that `bertblocks lab run` wrote.")
    if target.exists():
        raise FileExistsError(f"{target} exists; choose another name.")
    try:
        lock = lock_folder(folder)
    except BlockingIOError as error:
        raise RunFolderError(f"A process runs the study in {folder}; wait for it to end.") from error
    try:
        files = [path for path in list_files(folder) if PARTIAL not in path.name]
        if not with_models:
            files = [path for path in files if path.suffix not in MODEL_FILES]
        with atomic_file(target) as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            for path in files:
                archive.add(path, Path(folder.resolve().name) / path.relative_to(folder))
    finally:
        os.close(lock)
    return len(files)
