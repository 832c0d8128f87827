"""`bertblocks index`, `search` and `mine`: tables for people, JSON for programs, one sentence for what is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from bertblocks.cli.main import app
from bertblocks.text.tables import read_records
from tests.search.helpers import FakePredictor, make_model


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that reads vectors from texts, documents and pairs."""
    monkeypatch.setattr("bertblocks.search.models.Predictor", FakePredictor)
    monkeypatch.setattr("bertblocks.search.rerankers.Predictor", FakePredictor)
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    Path("documents.csv").write_text("nr,body,year\n1,1 0,1990\n2,0 1,1991\n3,1 1,1992\n")
    Path("pairs.csv").write_text("query,positive\n1 0,1 0\n0 1,0 1\n")


def run(line: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, shlex.split(line))
    assert result.exit_code == code, result.output
    return result


INDEX = "index documents.csv --model model -o found --column id=nr --column text=body"


def test_from_files_to_hits() -> None:
    made = json.loads(run(f"{INDEX} --sparse model --json").stdout)
    assert made["added"] == made["documents"] == 3
    Path("queries.txt").write_text("2 1\n1 2\n")
    lines = run("search found --file queries.txt --top-k 2 --json").stdout.splitlines()
    assert [[hit["id"] for hit in json.loads(line)["hits"]] for line in lines] == [["3", "1"], ["3", "2"]]
    hit = json.loads(lines[0])["hits"][0]
    assert hit == {"rank": 1, "id": "3", "score": 3.0, "text": "1 1", "columns": {"year": "1992"}}
    for option in ("--hybrid", "--only-sparse", "--rerank model", "--exact", "--model model --sparse model"):
        found = json.loads(run(f"search found '2 1' {option} --json").stdout)
        assert {hit["id"] for hit in found["hits"]} <= {"1", "2", "3"}
        assert found["hits"]
    changed = json.loads(run("index -o found --remove 3 --export vectors.parquet --json").stdout)
    assert (changed["removed"], changed["documents"], changed["exported"]) == (1, 2, 2)
    assert [row["year"] for row in read_records("vectors.parquet").rows] == ["1990", "1991"]
    assert "1 0" in run("search found '1 0'").stdout


def test_negatives_for_pairs() -> None:
    mined = json.loads(
        run("mine pairs.csv --corpus documents.csv --model model -o a.csv --ranks 1-2 --negatives 2 --json").stdout
    )
    assert (mined["rows"], mined["queries"], mined["negatives"]) == (2, 2, 4)
    rows = read_records("a.csv").rows
    assert rows[0] == {"query": "1 0", "positive": "1 0", "negative_1": "1 1", "negative_2": "0 1"}
    table = run("mine pairs.csv --model model -o b.jsonl --negatives 1 --ranks 1-9 --margin 0.5").stdout
    assert "b.jsonl: 2 rows, 2 queries, 0 without a negative" in table
    assert "is a positive of the query" in table


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("index -o found", "Give FILES to index, --remove ID or --export FILE.parquet."),
        ("index nothing.csv --model model -o found", "nothing.csv: no such file or folder"),
        ("index documents.csv -o found", "found is not an index yet; name an embedder, a sparse encoder, or both."),
        ("index documents.csv --model model -o found --column id=nummer", "there is no column 'nummer' for id"),
        ("index documents.csv --model model -o found --column ids=nr", "--column is 'ids=nr'; it must be ROLE=NAME"),
        ("index documents.csv --model nowhere/at/all -o found", "is not a checkpoint folder"),
        ("index pairs.csv --model model -o found --device cuda:99", "--device is 'cuda:99'"),
        ("search found query", "found is not an index: it has no index.json"),
        ("search found", "Give either queries or --file FILE."),
        ("search found query --hybrid --only-sparse", "--hybrid and --only-sparse exclude each other."),
        ("mine pairs.csv --model model -o out.csv --ranks few", "--ranks is 'few'; it must be FIRST-LAST"),
        ("mine pairs.csv -o out.csv", "Give a model and a corpus of files, or an index"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(command: str, message: str) -> None:
    before = sorted(Path().iterdir())
    result = run(command, code=1)
    assert message in result.stderr
    assert result.stderr.startswith("bertblocks: ")
    assert len(result.stderr.splitlines()) <= 2  # the columns that were chosen, and what is wrong
    assert sorted(Path().iterdir()) == before


def test_records_that_cannot_be_used_are_skipped_on_demand() -> None:
    Path("bad.jsonl").write_text('{"text": "1 0"}\n{"text": ""}\n{"text": "words"}\n{"name": 1}\n')
    result = run("index bad.jsonl --model model -o found --on-error skip --json")
    made = json.loads(result.stdout)
    assert (made["documents"], made["skipped"]) == (1, 3)
    for line in (2, 3, 4):
        assert f"bad.jsonl line {line}: " in result.stderr
    assert "is empty" in run("search found ''", code=1).stderr
