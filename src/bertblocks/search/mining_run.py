"""`mine`: from a file of pairs and a corpus to a file with hard negatives, continued after an interruption."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from bertblocks.core.storage import checksum, lock_folder, read_json, write_json
from bertblocks.search.adding import OnBad
from bertblocks.search.documents import Documents, make_document, read_documents
from bertblocks.search.index import SearchIndex
from bertblocks.search.manifest import MANIFEST
from bertblocks.search.mining import Mined, Miner, MiningError, MiningSettings
from bertblocks.search.models import identify
from bertblocks.search.writer import OnStep
from bertblocks.tasks.retrieval.examples import judge, read_retrieval_data
from bertblocks.text.files import find_files
from bertblocks.text.records import DataError, ReadOptions
from bertblocks.text.table_files import check_ending, write_table

#: How negatives are written: a column for each, a row for each, or a list in one column.
Layout = Literal["columns", "triplets", "lists"]
REQUEST, RESULTS, INDEX = "request.json", "mined.jsonl", "index"


@dataclass(frozen=True)
class MiningResult:
    """What a run of mining wrote: rows, queries, those without a negative, and why candidates were rejected."""

    output: Path
    rows: int
    queries: int
    without_negatives: int
    negatives: int
    rejected: dict[str, int]


def mine(
    pairs: str | Path,
    output: str | Path,
    *,
    model: str | Path | None = None,
    corpus: Sequence[str | Path] = (),
    settings: MiningSettings | None = None,
    reranker: str | Path | Any = None,
    layout: Layout = "columns",
    read: ReadOptions | None = None,
    columns: Mapping[str, str] | None = None,
    on_bad: OnBad | None = None,
    on_step: OnStep = lambda name, done, total: None,
    **options: Any,
) -> MiningResult:
    """Writes a file of training data: the queries and positives of `pairs` with hard negatives from `corpus`.

    `corpus` is files of documents, or the folder of an index, which brings its own model; without it, the positives of
    other queries are the corpus. `columns` names columns of `pairs`, `reranker` a model that sorts out documents which
    it finds relevant, and `options` are those of `Predictor`. The same call continues after an interruption.
    """
    output = Path(output)
    settings = settings or MiningSettings()
    check_ending(output)
    if output.exists():
        raise FileExistsError(f"{output} already exists; delete it, or choose another output.")
    if layout == "lists" and output.suffix.lower() == ".csv":
        raise MiningError(
            f"{output} cannot hold lists; use the layout columns or triplets, or a .jsonl or .parquet file."
        )
    data = read_retrieval_data(pairs, read, columns)
    queries = [
        (query, [text for text, gain in gains.items() if gain > 0]) for query, gains in judge(data.examples).items()
    ]
    queries = [(query, positives) for query, positives in queries if positives]
    if not queries:
        raise DataError(f"{pairs}: no query has a relevant document.")
    index_folder = _find_index(corpus)
    if (model is None) == (index_folder is None):
        raise MiningError("Give a model and a corpus of files, or an index as the corpus, which brings its own model.")
    request = {
        "pairs": checksum(Path(pairs)) if Path(pairs).is_file() else str(pairs),
        "corpus": _digests(corpus) if index_folder is None else checksum(index_folder / MANIFEST),
        "model": None if model is None else identify(model).sha256,
        "reranker": identify(reranker).sha256 if isinstance(reranker, (str, Path)) else None,
        "settings": asdict(settings),
    }
    work = output.with_name(output.name + ".partial")
    with _Work(work, request) as results:
        if index_folder is not None:
            index = SearchIndex.open(index_folder, **options)
        else:
            index = SearchIndex.create(work / INDEX, model=model, **options)
            index.add(_read_corpus(corpus, queries, on_bad), on_bad=on_bad, on_step=on_step)
        done = results.count
        miner = Miner(index, settings, reranker)
        for number, mined in enumerate(miner.mine(islice(queries, done, None)), start=done + 1):
            results.add(mined)
            on_step("queries", number, len(queries))
        return _finish(results, output, layout)


def _find_index(corpus: Sequence[str | Path]) -> Path | None:
    if len(corpus) == 1 and (Path(corpus[0]) / MANIFEST).is_file():
        return Path(corpus[0])
    return None


def _digests(corpus: Sequence[str | Path]) -> list[list[str]]:
    return [[path.name, checksum(path) if path.is_file() else ""] for path in find_files(corpus)]


def _read_corpus(
    corpus: Sequence[str | Path], queries: Sequence[tuple[str, list[str]]], on_bad: OnBad | None
) -> Documents:
    """The texts of the corpus; without their ids and other columns, equal texts are one document."""
    if not corpus:
        texts = dict.fromkeys(text for _, positives in queries for text in positives)
        return Documents(map(make_document, texts), len(texts), [])
    report = None if on_bad is None else lambda record: on_bad(str(record))
    documents = read_documents(corpus, on_bad=report)
    return Documents((make_document(document.text) for document in documents), documents.total, documents.notes)


class _Work:
    """The folder of an unfinished run: its settings, the index of its corpus, and a line for each finished query."""

    def __init__(self, folder: Path, request: dict[str, Any]) -> None:
        self.folder, self.request = folder, request
        self.count = 0

    def __enter__(self) -> _Work:
        try:
            self._lock = lock_folder(self.folder)
        except BlockingIOError as error:
            raise MiningError(f"Another process is writing {self.folder}; wait for it to end.") from error
        self._check_request()
        results = self.folder / RESULTS
        if results.is_file():
            with results.open("r+b") as file:
                end = 0
                for line in file:
                    if line.endswith(b"\n"):  # otherwise the run was killed while writing it
                        end, self.count = end + len(line), self.count + 1
                file.truncate(end)
        self._file = results.open("ab")
        return self

    def _check_request(self) -> None:
        """An index of the same corpus and model is used again; results of other pairs or settings are not."""
        path, now = self.folder / REQUEST, json.loads(json.dumps(self.request))
        before = read_json(path) if path.is_file() else now
        if any(before.get(key) != now[key] for key in ("corpus", "model")):
            os.close(self._lock)
            raise MiningError(
                f"{self.folder} belongs to a run with another corpus or model; delete it, or choose another output."
            )
        if before != now:
            (self.folder / RESULTS).unlink(missing_ok=True)
        write_json(path, now)

    def add(self, mined: Mined) -> None:
        self._file.write(json.dumps(asdict(mined), ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.count += 1

    def read(self) -> Iterator[Mined]:
        with (self.folder / RESULTS).open(encoding="utf-8") as file:
            for line in file:
                yield Mined(**json.loads(line))

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        self._file.close()
        if kind is None or (not self.count and not (self.folder / INDEX / MANIFEST).exists()):
            shutil.rmtree(self.folder)
        os.close(self._lock)


def _finish(results: _Work, output: Path, layout: Layout) -> MiningResult:
    rejected: Counter[str] = Counter()
    queries = without = negatives = 0
    for mined in results.read():
        rejected.update(mined.rejected)
        queries += 1
        without += not mined.negatives
        negatives += len(mined.negatives)
    if not negatives:
        raise MiningError("No query has a negative that the settings allow; widen the ranks, or lower the margins.")
    rows = write_table(output, lambda: (row for mined in results.read() for row in _rows(mined, layout)))
    return MiningResult(output, rows, queries, without, negatives, dict(rejected))


def _rows(mined: Mined, layout: Layout) -> Iterator[dict[str, Any]]:
    """The rows of a query: one for each positive, or with triplets for each positive and negative."""
    for positive in mined.positives if mined.negatives else []:
        start = {"query": mined.query, "positive": positive}
        if layout == "lists":
            yield {**start, "negatives": mined.negatives}
        elif layout == "triplets":
            yield from ({**start, "negative": text} for text in mined.negatives)
        else:
            yield {**start, **{f"negative_{n}": text for n, text in enumerate(mined.negatives, start=1)}}
