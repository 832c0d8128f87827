"""Vectors that leave the index, read by others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from bertblocks.search.export import export_index
from bertblocks.search.index import SearchIndex
from bertblocks.search.manifest import SearchIndexError
from tests.search.helpers import random_vectors, write


@pytest.fixture
def index(fake: Path, tmp_path: Path) -> SearchIndex:
    vectors = random_vectors(50, 8)
    documents = [{"id": f"d{n}", "text": write(row), "year": 1900 + n} for n, row in enumerate(vectors)]
    documents[7]["vector"] = "a column of the same name"
    index = SearchIndex.build(tmp_path / "index", documents, model=fake)
    index.remove(["d3"])
    return index


def test_parquet_has_lists_of_fixed_size_and_all_columns(index: SearchIndex, tmp_path: Path) -> None:
    assert export_index(index, tmp_path / "vectors.parquet") == 49
    table = parquet.read_table(tmp_path / "vectors.parquet")
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 8)
    assert table["id"].to_pylist() == [f"d{n}" for n in range(50) if n != 3]
    assert table["year"].to_pylist() == [1900 + n for n in range(50) if n != 3]
    assert table["document_vector"].to_pylist()[6] == "a column of the same name"
    written = np.stack(table["vector"].to_numpy(zero_copy_only=False))
    assert written == pytest.approx(np.delete(random_vectors(50, 8), 3, axis=0), abs=1e-6)


def test_what_cannot_be_exported(index: SearchIndex, fake: Path, tmp_path: Path) -> None:
    (tmp_path / "old.parquet").touch()
    with pytest.raises(FileExistsError, match=r"old\.parquet already exists"):
        export_index(index, tmp_path / "old.parquet")
    with pytest.raises(ValueError, match=r"vectors\.csv must end in one of \.parquet"):
        export_index(index, tmp_path / "vectors.csv")
    sparse = SearchIndex.build(tmp_path / "sparse", ["1 0"], sparse=fake)
    with pytest.raises(SearchIndexError, match="has no dense vectors to export"):
        export_index(sparse, tmp_path / "sparse.parquet")


@pytest.mark.slow
def test_lancedb_loads_the_file_and_finds_the_same_documents(index: SearchIndex, tmp_path: Path) -> None:
    lancedb = pytest.importorskip("lancedb")
    export_index(index, tmp_path / "vectors.parquet")
    table = lancedb.connect(tmp_path / "lance").create_table(
        "documents", parquet.read_table(tmp_path / "vectors.parquet")
    )
    for query in random_vectors(5, 8, seed=1):
        rows = table.search(query).metric("cosine").limit(10).to_list()
        ours = index.search(write(query), top_k=10)
        assert [row["id"] for row in rows] == [hit.id for hit in ours]
        assert [1 - row["_distance"] for row in rows] == pytest.approx([hit.score for hit in ours], abs=1e-5)
