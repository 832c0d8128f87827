"""metrics.jsonl: the metrics of a run, one JSON object per line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bertblocks.core.storage import atomic_file


class MetricsFile:
    """Appends lines to metrics.jsonl. On resume, lines of later steps are dropped, because they will come again.

    A run that starts over drops all lines, also that of step 0.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if last_step and line["step"] <= last_step]
        with atomic_file(path) as file:
            file.writelines(json.dumps(line).encode() + b"\n" for line in kept)
        self._file = path.open("a", encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def flush(self) -> None:
        """Flushes all lines to disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a file. The file may be missing or end with a partial line."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines
