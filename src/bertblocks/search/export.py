"""Vectors as parquet, which other engines load as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bertblocks.core.requirements import require_packages
from bertblocks.search.index import SearchIndex
from bertblocks.search.manifest import SearchIndexError
from bertblocks.text.table_files import check_ending, write_table


def export_index(index: SearchIndex, output: str | Path) -> int:
    """Writes `id`, `text`, `vector` (a fixed-size list of float32) and the other columns of every document.

    Returns the number of documents. A column with the name of one of the three is renamed.
    """
    output = Path(output)
    check_ending(output, [".parquet"])
    if output.exists():
        raise FileExistsError(f"{output} already exists; delete it, or choose another file.")
    if index.manifest.model is None:
        raise SearchIndexError(f"{index.folder} has no dense vectors to export.")
    require_packages(["pyarrow"], "Exporting an index")
    import pyarrow as pa

    def records() -> Iterator[dict[str, Any]]:
        for document, vector in index.documents():
            own = {"id": document.id, "text": document.text, "vector": vector}
            others = {f"document_{name}" if name in own else name: cell for name, cell in document.columns.items()}
            yield {**own, **others}

    vector = pa.list_(pa.float32(), index.manifest.dimensions)
    return write_table(output, records, {"id": pa.string(), "text": pa.string(), "vector": vector})
