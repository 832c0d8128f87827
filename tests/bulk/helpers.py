"""Small models, tables, and jobs over them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from bertblocks.bulk.job import BulkResult, run_bulk
from bertblocks.bulk.settings import BulkSettings
from tests.small_tokenizers import wrap
from tests.tasks.test_predictor import TAGS, labelled, make_bert

#: By task: the model of transformers that does it.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "embed": ("BertModel", {}),
    "sparse": ("BertForMaskedLM", {}),
    "fill-mask": ("BertForMaskedLM", {}),
    "classify": ("BertForSequenceClassification", labelled("calm", "glad", "sad")),
    "rerank": ("BertForSequenceClassification", labelled("relevant")),
    "tag": ("BertForTokenClassification", labelled(*TAGS)),
    "answer": ("BertForQuestionAnswering", {}),
}
WORDS = ["plain", "words", "two", "here", "leading", "are", "the", "and"]


def make_model(folder: Path, task: str = "embed") -> str:
    torch.manual_seed(0)
    kind, options = MODELS[task]
    make_bert(kind, **options).save_pretrained(folder)
    wrap("wordpiece").save_pretrained(folder)
    return str(folder)


def make_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    chance = random.Random(seed)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(1, 20))) for _ in range(count)]
    return [{"id": number, "text": text, "kind": "ab"[number % 2]} for number, text in enumerate(texts)]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(task: str, model: str, inputs: list[str], output: Path | str, **options: Any) -> BulkResult:
    """Runs a job in float32 on the CPU."""
    values = {"dtype": "float32", "device": "cpu", "threads": 1, "rows_per_shard": 8, "window": 5, **options}
    return run_bulk(BulkSettings(task, model, inputs, str(output), **values))


def read_files(folder: Path) -> dict[str, bytes]:
    """All files of a job, and what killed processes left of others."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def read_table(folder: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    return [row for path in sorted(folder.glob("part-*.parquet")) for row in parquet.read_table(path).to_pylist()]
