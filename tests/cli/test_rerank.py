"""`bertblocks rerank`: documents as arguments, lines of a file, tables and lists, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification
from typer.testing import CliRunner

from bertblocks import Predictor
from bertblocks.cli.main import app
from tests.small_tokenizers import wrap

DOCUMENTS = ["plain words are here", "two leading trailing", "here"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "initializer_range": 0.3, "max_position_embeddings": 40, "num_labels": 1}
    BertForSequenceClassification(BertConfig(vocab_size=120, **sizes)).save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return str(folder)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["rerank", *arguments])


def read(done: Any) -> list[tuple[str, list[str]]]:
    assert done.exit_code == 0, done.output
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [(line["query"], [document["text"] for document in line["documents"]]) for line in lines]


def test_documents_come_from_arguments_lines_and_tables(model: str, tmp_path: Path) -> None:
    predictor = Predictor(model, dtype=torch.float32)
    expected = {
        query: [ranked.text for ranked in predictor.rerank(query, DOCUMENTS)] for query in ("plain", "two words")
    }
    options = ("--dtype", "float32", "--json")
    one = [("plain", expected["plain"])]
    assert read(run(model, "plain", *DOCUMENTS, *options)) == one
    (tmp_path / "lines.txt").write_text("\n".join(DOCUMENTS))
    assert read(run(model, "plain", "--file", str(tmp_path / "lines.txt"), *options)) == one
    table = tmp_path / "pairs.csv"
    table.write_text("query,passage\n" + "".join(f"{query},{text}\n" for text in DOCUMENTS for query in expected))
    assert read(run(model, "--file", str(table), *options)) == list(expected.items())
    assert read(run(model, "plain", "--file", str(table), "--top-k", "1", *options))[0][1] == expected["plain"][:1]
    lists = tmp_path / "lists.jsonl"
    lists.write_text("".join(json.dumps({"query": query, "documents": DOCUMENTS}) + "\n" for query in expected))
    assert read(run(model, "--file", str(lists), *options)) == list(expected.items())
    done = run(model, "--file", str(lists), "--output", str(tmp_path / "out.jsonl"), "--top-k", "2", *options)
    assert done.exit_code == 0, done.output
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [[entry["text"] for entry in line["documents"]] for line in written] == [
        own[:2] for own in expected.values()
    ]


def test_the_table_has_the_best_document_first(model: str) -> None:
    done = run(model, "plain", *DOCUMENTS, "--dtype", "float32")
    lines = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
    assert lines[:2] == [["score", "document", "text"], ["query", "plain"]]
    assert {int(line[1]): line[2] for line in lines[2:]} == dict(enumerate(DOCUMENTS))
    scores = [float(line[0]) for line in lines[2:]]
    assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plain"], "Give a query and its documents"),
        ([], "Give a query and its documents"),
        (["", "here"], "Query 0 is empty"),
        (["plain", "here", "--file", "texts.txt"], "--file holds the documents; remove 'here'"),
        (["--file", "texts.txt"], "lines of text have no queries; give the query before --file"),
        (["--file", "other.csv"], "no column looks like query; the columns are name, price"),
        (["plain", "--file", "texts.txt", "--column", "text=a"], "--column is 'text=a'; it must be ROLE=NAME"),
    ],
)
def test_bad_input_is_one_sentence(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("here\nthere\n")
    Path("other.csv").write_text("name,price\na,2\nb,3\n")
    done = run(model, *arguments)
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.output
