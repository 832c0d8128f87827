"""Records an evaluation in a folder: its scores, its predictions, and the page that shows them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertblocks.core.environment import hash_files
from bertblocks.core.messages import InputError
from bertblocks.core.storage import write_json, write_json_lines
from bertblocks.reports.evaluation import prediction_file
from bertblocks.reports.report import write_report
from bertblocks.reports.runs import KINDS, read_run, write_facts

RECORD = KINDS["evaluate"][0]


def require_record_folder(folder: Path) -> None:
    """Raises an error unless the folder is new, empty, or holds an earlier evaluation, which is replaced."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--report is {folder}, which is a file; give a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / RECORD).is_file():
        raise InputError(
            f"--report is {folder}, which holds files that are not of an evaluation; choose another folder."
        )


def record_evaluation(
    folder: Path, values: Mapping[str, Any], predictions: Sequence[Sequence[Mapping[str, Any]]], data: str | None
) -> Path:
    """Writes the values and the predictions of each model, and last the page."""
    for number, records in enumerate(predictions):
        write_json_lines(folder / prediction_file(number), records)
    write_facts(folder, folder.name, hash_files([data]))
    write_json(folder / RECORD, dict(values))
    return write_report([read_run(folder)])
