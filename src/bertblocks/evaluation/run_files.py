"""Rankings in files, as trec_eval reads them: query, Q0, document, rank, score and the name of the run."""

from __future__ import annotations

from pathlib import Path

from bertblocks.core.storage import atomic_file
from bertblocks.text.files import read_text
from bertblocks.text.headers import is_number
from bertblocks.text.tables import DataError

#: The score of each retrieved document, by query.
Run = dict[str, dict[str, float]]


def read_run(path: Path) -> Run:
    """Reads the scores of a run file; ranks follow from them, as in trec_eval."""
    run: Run = {}
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        fields = line.split()
        if not fields:
            continue
        if len(fields) != 6 or not is_number(fields[4]):
            raise DataError(
                f"{path} line {number}: {line[:100]!r} is not a line of a run file: query, Q0, document, rank, score "
                "and name, with spaces between them."
            )
        run.setdefault(fields[0], {})[fields[2]] = float(fields[4])
    if not run:
        raise DataError(f"{path}: the file is empty.")
    return run


def write_run(path: Path, run: Run, name: str) -> None:
    """Writes a run file, best documents first."""
    name = "-".join(name.split())
    with atomic_file(path) as file:
        for query, scores in run.items():
            ranked = sorted(scores.items(), key=lambda entry: (entry[1], entry[0].encode()), reverse=True)
            for rank, (document, score) in enumerate(ranked, start=1):
                if query.split() != [query] or document.split() != [document]:
                    raise DataError(f"{path}: a run file cannot hold the ids {query!r} and {document!r}: no spaces.")
                file.write(f"{query} Q0 {document} {rank} {score!r} {name}\n".encode())
