"""Retrieval on folders in the format of BEIR (Thakur et al., 2021)."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertblocks.core.settings import Count, Section, read_section
from bertblocks.evaluation.evaluate import Evaluation
from bertblocks.evaluation.retrievers import Retriever, first_documents, fuse_runs, open_model, rerank_run
from bertblocks.evaluation.run_files import Run, read_run, write_run
from bertblocks.tasks.retrieval.metrics import mean_scores, rank_documents, score_ranking
from bertblocks.text.headers import is_number
from bertblocks.text.records import ReadOptions
from bertblocks.text.tables import DataError, read_records

logger = logging.getLogger(__name__)

#: How many documents are ranked for a metric without @k, as in BEIR.
DEPTH = 1000
#: The grade of each judged document, by query.
Judgments = dict[str, dict[str, int]]


class BeirSettings(Section):
    split: str = "test"
    """The judgments are in qrels/SPLIT.tsv."""
    metrics: list[str] = ["ndcg@10", "mrr@10", "map@100", "recall@100"]
    """ndcg, mrr, map and recall, each at a rank. Models are compared by the first."""
    first: str | None = None
    """What rerankers rerank: a model, models joined by +, or a run file."""
    candidates: Count = 100
    """How many documents of each query are reranked or fused."""
    ignore_identical_ids: bool = False
    """Drop documents with the id of the query. ArguAna and Quora need it."""
    output: str | None = None
    """A folder for the rankings, as a TREC run file for each model."""


@dataclass(frozen=True)
class BeirFolder:
    """Documents, the queries that have judgments, and these."""

    documents: dict[str, str]
    queries: dict[str, str]
    judgments: Judgments


def read_beir(folder: str | Path, split: str = "test") -> BeirFolder:
    """Reads corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; a document is its title and its text.

    Queries without judgments are left out, as in BEIR.
    """
    root = Path(folder)
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; it must hold corpus.jsonl, queries.jsonl and qrels/{split}.tsv.")
    judgments = _read_judgments(_find(root, "qrels", f"{split}.tsv"))
    documents = _read_texts(_find(root, "corpus.jsonl"))
    queries = _read_texts(_find(root, "queries.jsonl"))
    missing = next((query for query in judgments if query not in queries), None)
    if missing is not None:
        raise DataError(f"{root / 'queries.jsonl'} does not have the query {missing!r} of qrels/{split}.tsv.")
    if not any(document in documents for judged in judgments.values() for document in judged):
        raise DataError(f"{root / 'corpus.jsonl'} has none of the documents of qrels/{split}.tsv; compare their ids.")
    return BeirFolder(documents, {query: queries[query] for query in judgments}, judgments)


def _find(root: Path, *parts: str) -> Path:
    """The file, or the same file compressed."""
    path = root.joinpath(*parts)
    for candidate in (path, path.with_name(f"{path.name}.gz")):
        if candidate.is_file():
            return candidate
    others = ""
    if parts[0] == "qrels":
        splits = sorted(re.sub(r"\.tsv(\.gz)?$", "", file.name) for file in root.glob("qrels/*.tsv*"))
        others = f"; split may be {', '.join(splits)}" if splits else ""
    raise DataError(f"{path} does not exist{others}; --data must be a folder in the format of BEIR.")


def _read_texts(path: Path) -> dict[str, str]:
    records = read_records(path, ReadOptions(format="jsonl"))
    for column in ("_id", "text"):
        if column not in records.columns:
            raise DataError(f"{path} has no column {column!r}; its columns are {', '.join(records.columns)}.")
    texts: dict[str, str] = {}
    for index, row in enumerate(records.rows):
        name, title, text = str(row["_id"]), row.get("title") or "", row["text"]
        if not isinstance(text, str) or not isinstance(title, str):
            raise DataError(f"{records.place(index)}: the text is {text!r}; it must be a string.")
        if name in texts:
            raise DataError(f"{records.place(index)}: the _id {name!r} occurs twice.")
        texts[name] = f"{title} {text}".strip()
    return texts


def _read_judgments(path: Path) -> Judgments:
    records = read_records(path, ReadOptions(format="tsv"), ["query-id"])
    if len(records.columns) != 3:
        raise DataError(f"{path} has {len(records.columns)} columns; it must have query-id, corpus-id and score.")
    judgments: Judgments = {}
    for index, row in enumerate(records.rows):
        query, document, grade = row.values()
        if not is_number(grade) or float(grade) != int(float(grade)):
            raise DataError(f"{records.place(index)}: the score is {grade!r}; it must be a whole number.")
        judgments.setdefault(query, {})[document] = int(float(grade))
    return judgments


# ---------------------------------------------------------------------- rankings


def evaluate_beir(
    models: Sequence[str | Path], data: str | Path, int8: bool = False, progress: bool = False, **settings: Any
) -> list[Evaluation]:
    """Scores rankings of the documents in a BEIR folder. Settings are the keys of `BeirSettings`.

    Each of `models` is an embedder, a sparse encoder, a multi-vector encoder, a reranker of what `first` finds, models
    joined by `+`, whose rankings are fused by reciprocal rank, or a run file.
    """
    given = {key: str(value) if isinstance(value, Path) else value for key, value in settings.items()}
    chosen = read_section(BeirSettings, given, "evaluate beir")
    for metric in chosen.metrics:
        score_ranking(["a"], {"a": 1}, [metric])  # before the models run
    folder = read_beir(data, chosen.split)
    shared = sum(query in folder.documents for query in folder.queries)
    if shared and not chosen.ignore_identical_ids:
        logger.warning(
            f"{data}: {shared:,} queries have the id of a document; if they are the same text, as in ArguAna and "
            "Quora, set ignore_identical_ids=true."
        )
    systems = _Systems(folder, chosen, int8, progress)
    return [systems.evaluate(str(model)) for model in models]


class _Systems:
    """The rankings of models for one folder; each model runs once."""

    def __init__(self, folder: BeirFolder, settings: BeirSettings, int8: bool, progress: bool) -> None:
        self.folder, self.settings, self.int8, self.progress = folder, settings, int8, progress
        depths = [int(metric.partition("@")[2] or DEPTH) for metric in settings.metrics]
        self.top_k = max(*depths, settings.candidates)
        self.runs: dict[str, Run] = {}

    def evaluate(self, name: str) -> Evaluation:
        run = first_documents(self.run(name), self.top_k)
        if self.settings.output is not None:
            file = name.removesuffix(".run").strip("/").replace("/", "-")
            write_run(Path(self.settings.output) / f"{file}.run", run, name)
        metrics = self.settings.metrics
        scores = [
            score_ranking(rank_documents(run.get(query, {})), gains, metrics)
            if max(gains.values()) > 0
            else dict.fromkeys(metrics, 0.0)
            for query, gains in self.folder.judgments.items()
        ]
        by_query = np.array([own[metrics[0]] for own in scores])
        return Evaluation(name, mean_scores(scores), metrics[0], len(scores), lambda i: float(by_query[i].mean()))

    def run(self, name: str) -> Run:
        """The documents that a system finds, without those that have the id of the query if the settings say so."""
        if name not in self.runs:
            run = self._run(name)
            if self.settings.ignore_identical_ids:
                run = {query: {k: v for k, v in scores.items() if k != query} for query, scores in run.items()}
            self.runs[name] = run
        return self.runs[name]

    def _run(self, name: str) -> Run:
        folder, candidates = self.folder, self.settings.candidates
        if Path(name).is_file():
            return read_run(Path(name))
        if "+" in name and not Path(name).exists():
            return fuse_runs([first_documents(self.run(part), candidates) for part in name.split("+")])
        predictor, kind = open_model(name, int8=self.int8, dtype=None if self.int8 else torch.float32)
        if kind == "cross-encoder":
            if self.settings.first is None:
                raise DataError(f"{name} is a reranker; first=MODEL or first=RUN_FILE must name what it reranks.")
            first = first_documents(self.run(self.settings.first), candidates)
            return rerank_run(predictor, folder.queries, folder.documents, first, self.progress)
        extra = int(self.settings.ignore_identical_ids)
        return Retriever(predictor, kind, self.progress).search(folder.queries, folder.documents, self.top_k + extra)
