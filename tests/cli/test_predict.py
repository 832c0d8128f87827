"""The commands that apply a model to texts."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from typer.testing import CliRunner

from bertblocks import Predictor
from bertblocks.cli.main import app
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import LONG, TAGS, labelled, make_bert

KINDS = {
    "classify": ("BertForSequenceClassification", labelled("calm", "glad", "sad")),
    "tag": ("BertForTokenClassification", labelled(*TAGS)),
    "answer": ("BertForQuestionAnswering", {}),
    "embed": ("BertModel", {}),
    "fill-mask": ("BertForMaskedLM", {}),
}


@pytest.fixture(autouse=True)
def _same_verbosity() -> Iterator[Any]:
    before = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A small random checkpoint for every command."""
    torch.manual_seed(0)
    root, found = tmp_path_factory.mktemp("models"), {}
    for command, (kind, options) in KINDS.items():
        folder = root / command
        make_bert(kind, **options).save_pretrained(folder)
        wrap("wordpiece").save_pretrained(folder)
        found[command] = str(folder)
    return found


def run(*arguments: str, expect: int = 0, stdin: str | None = None) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)
    assert result.exit_code == expect, result.output
    return result


def run_json(*arguments: str) -> list[dict]:
    return [json.loads(line) for line in run(*arguments, "--json").stdout.splitlines()]


def test_classify_prints_labels_and_scores(folders: Any) -> None:
    texts = ["plain words", "two here"]
    expected = Predictor(folders["classify"]).classify(texts)
    found = run_json("classify", folders["classify"], *texts)
    assert [row["text"] for row in found] == texts
    assert [row["labels"] for row in found] == [result.labels for result in expected]
    assert [row["scores"] for row in found] == [pytest.approx(result.scores, abs=0.02) for result in expected]
    result = run("classify", folders["classify"], *texts)
    rows = [line.split(maxsplit=2) for line in result.stdout.splitlines()]
    assert rows[0] == ["score", "label", "text"]
    assert [row[1:] for row in rows[1:]] == [
        [result.labels[0], text] for result, text in zip(expected, texts, strict=True)
    ]
    assert "2 texts, 8 tokens in" in result.stderr
    assert "tokens/s" in result.stderr
    pair = run_json("classify", folders["classify"], "plain", "--pair", "here", "--top-k", "1")[0]
    assert pair["text"] == ["plain", "here"]
    assert len(pair["scores"]) == 1


def test_tag_prints_entities(folders: Any) -> None:
    found = run_json("tag", folders["tag"], LONG)[0]
    assert found["tags"]
    assert all(LONG[tag["start"] : tag["end"]] == tag["text"] for tag in found["tags"])
    lines = run("tag", folders["tag"], "plain words", "--level", "words").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["place", "0-5", "6-11"]
    assert [line.split()[-1] for line in lines] == ["text", "plain", "words"]


def test_answer_prints_spans(folders: Any) -> None:
    found = run_json("answer", folders["answer"], "two words are here", "-q", "plain?", "--n-best", "2")[0]
    assert found["question"] == "plain?"
    assert found["text"] == "two words are here"[found["start"] : found["end"]] != ""
    assert len(found["best"]) == 2
    none = run_json("answer", folders["answer"], "two", "-q", "plain?", "--no-answer-threshold", "-1000")[0]
    assert none["text"] == ""
    assert "The question is missing" in run("answer", folders["answer"], "two", expect=1).stderr


def test_embed_prints_vectors(folders: Any) -> None:
    found = run_json("embed", folders["embed"], "plain words", "", "--dimensions", "8")
    expected = Predictor(folders["embed"]).encode(["plain words", ""], dimensions=8)
    np.testing.assert_allclose([row["embedding"] for row in found], expected, atol=0.02)
    shown = run("embed", folders["embed"], "plain words", "--raw").stdout.splitlines()
    assert shown[1].split()[4:] == ["...", "plain", "words"]


def test_fill_mask_prints_tokens_and_probabilities(folders: Any) -> None:
    found = run_json("fill-mask", folders["fill-mask"], "plain [MASK] [MASK]", "--top-k", "2")[0]
    assert [len(mask) for mask in found["masks"]] == [2, 2]
    lines = run("fill-mask", folders["fill-mask"], "plain [MASK]", "--top-k", "3").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["mask", "1", "1", "1"]
    error = run("fill-mask", folders["fill-mask"], "plain", expect=1).stderr
    assert "bertblocks: Text 0 does not contain [MASK].\n" in error


def test_int8_and_threads_options_apply(folders: Any) -> None:
    result = run("embed", folders["embed"], "plain", "--int8", "--threads", "1", "--json")
    assert "int8, threads: 1" in result.stderr
    exact = Predictor(folders["embed"], dtype=torch.float32).encode(["plain"])[0]
    assert float(exact @ np.array(json.loads(result.stdout)["embedding"])) > 0.98


# ---------------------------------------------------------------------- files


def test_a_named_column_does_not_change_the_order_of_a_pair(folders: Any, tmp_path: Path) -> None:
    table = tmp_path / "pairs.csv"
    table.write_text("text,second\nplain,words\n")
    found = run_json("classify", folders["classify"], "--file", table, "--column", "text_pair=second")
    assert [row["text"] for row in found] == [["plain", "words"]]
    questions = tmp_path / "questions.json"
    questions.write_text('[{"question": "plain?", "context": "two words"}]')
    assert run_json("answer", folders["answer"], "--file", questions)[0]["question"] == "plain?"


def test_predict_commands_read_files_of_every_format(folders: Any, tmp_path: Path) -> None:
    lines = tmp_path / "texts.txt"
    lines.write_text("plain words\n\ntwo\n")
    assert [row["text"] for row in run_json("embed", folders["embed"], "--file", lines)] == ["plain words", "", "two"]
    objects = tmp_path / "pairs.jsonl"
    objects.write_text('{"sentence1": "plain", "sentence2": "words"}\n"two"\n{"text": "here"}\n')
    found = run_json("classify", folders["classify"], "--file", objects)
    assert [row["text"] for row in found] == [["plain", "words"], "two", "here"]
    with open(tmp_path / "table.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text", "category"], ["plain words", "a"], ["two here", "b"]])
    result = run("classify", folders["classify"], "-f", tmp_path / "table.csv", "--json")
    assert [json.loads(line)["text"] for line in result.stdout.splitlines()] == ["plain words", "two here"]
    assert "table.csv: text=text" in result.stderr
    words = tmp_path / "words.jsonl"
    words.write_text('{"tokens": ["plain", "北京", ""]}\n')
    tags = run_json("tag", folders["tag"], "--file", words, "--level", "words")[0]["tags"]
    assert [tag["text"] for tag in tags] == ["plain", "北京", ""]
    named = tmp_path / "named.jsonl"
    named.write_text('{"body": "plain", "text": "two"}\n')
    assert run_json("embed", folders["embed"], "-f", named, "--column", "text=body")[0]["text"] == "plain"
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"question": "plain?", "context": "two words"}\n')
    assert run_json("answer", folders["answer"], "-f", asked)[0]["question"] == "plain?"


def test_answer_reads_squad_files(folders: Any, tmp_path: Path) -> None:
    paragraph = {
        "context": "two words are here",
        "qas": [{"id": "1", "question": "plain?", "answers": [{"text": "two", "answer_start": 0}]}],
    }
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": [paragraph]}]}))
    found = run_json("answer", folders["answer"], "--file", path)
    assert [row["question"] for row in found] == ["plain?"]


def test_each_line_of_a_pipe_gets_its_result_at_once(folders: Any, warm_python: list[str]) -> None:
    """The next line is sent only after the result of the last one: held-back output would hang the test."""
    arguments = ["embed", folders["embed"], "-", "--json", "--threads", "1"]
    with subprocess.Popen(
        [*warm_python, "-m", "bertblocks", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        for text in ("plain", "", "北京 words"):
            process.stdin.write(text + "\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["text"] == text
        process.stdin.close()
        assert process.wait(60) == 0


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Give either texts, or --file FILE, or - to read lines from standard input."),
        (["plain", "--file", "x.txt"], "Give either texts, or --file FILE"),
        (["--file", "missing.txt"], "missing.txt: no such file or folder, and no file matches it as a pattern."),
        (["plain", "--column", "text=a"], "--column requires --file."),
        (["--file", "x.jsonl", "--column", "txet=a"], "where the role is text (did you mean 'text'?)."),
        (["plain", "--dimensions", "99"], "dimensions is 99; it must be between 1 and 32."),
    ],
)
def test_bad_usage_gives_one_sentence(folders: Any, arguments: Any, message: Any) -> None:
    result = run("embed", folders["embed"], *arguments, expect=1)
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "plain"}\n{"body": "x"}\n',
            "a.jsonl line 2: the keys are body; text must be among",
        ),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl line 1: 3 is not a text."),
        ("a.jsonl", b"{oops\n", "a.jsonl line 1: the line is not JSON"),
        ("a.jsonl", b"[1]\n", "a.jsonl line 1: [1] is not an object or a string."),
        ("a.txt", "caf\u00e9\n".encode("latin-1"), "a.txt line 1: byte 0xe9 is not UTF-8"),
    ],
)
def test_bad_lines_give_one_sentence_that_names_them(
    folders: Any, tmp_path: Path, name: Any, content: Any, message: Any
) -> None:
    (tmp_path / name).write_bytes(content)
    assert message in run("embed", folders["embed"], "--file", tmp_path / name, expect=1).stderr


def test_wrong_models_and_long_texts_give_one_sentence(folders: Any, tmp_path: Path) -> None:
    error = run("classify", folders["embed"], "plain", expect=1).stderr
    assert "classify needs a model with a sequence-classification head; this model is a BertBlocksModel." in error
    assert "`bertblocks finetune classify` trains one." in error
    assert "is not a checkpoint folder" in run("embed", tmp_path / "none", "plain", expect=1).stderr
    error = run("embed", folders["embed"], "plain", LONG, "--too-long", "error", expect=1).stderr
    assert "Text 1 has 90 tokens; this model reads 30 plus special tokens." in error
