"""`bertblocks rerank`: the documents of a query, the most relevant first."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertblocks.bulk.tasks import TASKS
from bertblocks.cli.predict import BadInputs, Input, Prediction, PredictOptions, predict_command, read_files
from bertblocks.text.inputs import InputRecord, Roles

if TYPE_CHECKING:
    from bertblocks.tasks.rerank.predictions import Ranked

Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="QUERY [TEXT]", help="A query and its documents; - reads documents from the lines of standard input."
    ),
]


@functools.partial(predict_command, texts=Texts)
def rerank(
    top_k: Annotated[int | None, typer.Option(min=1, help="How many documents to keep; by default all.")] = None,
) -> Prediction:
    """Order the documents of a query by relevance, with a cross-encoder.

    With QUERY, --file holds documents. Without it, --file holds queries and documents: a query and a document per row,
    or a query and a list of documents.
    """
    return Prediction(
        "rerank",
        {"top_k": top_k},
        TASKS["rerank"].roles,
        header={"score": 10, "document": 8, "text": 0},
        to_rows=_to_rows,
        to_json=lambda item, ranked: {"query": item[0], **TASKS["rerank"].to_columns(ranked)},
        read=_read,
    )


def _to_rows(item: Any, ranked: list[Ranked]) -> Iterable[tuple[str, str, str]]:
    yield "query", "", item[0]
    for document in ranked:
        yield f"{document.score:.4f}", str(document.index), document.text


def _read(options: PredictOptions, roles: Roles, bad: BadInputs) -> Input:
    """One input for each query. The rows of a query need not follow each other, so files are read as a whole."""
    from bertblocks.text.lines import Lines

    texts = options.texts or []
    if options.file and len(texts) > 1:
        raise ValueError(f"--file holds the documents; remove {texts[1]!r} and other texts after the query.")
    if not options.file:
        if len(texts) < 2:
            raise ValueError("Give a query and its documents: texts after the query, --file FILE, or - for lines.")
        documents = list(Lines(None)) if texts[1:] == ["-"] else texts[1:]
        return [InputRecord((texts[0], documents), "")], 1
    if texts:
        records, _ = read_files(options, Roles([("document",)]), bad)
        found = [text for record in records for text in _as_list(record.value)]
        return [InputRecord((texts[0], found), ", ".join(options.file))], 1
    records, _ = read_files(options, roles, bad)
    groups: dict[str, InputRecord] = {}
    for record in records:
        if not isinstance(record.value, tuple):
            raise ValueError(f"{record.location}: lines of text have no queries; give the query before --file.")
        query, document = record.value
        if not isinstance(query, str):
            raise ValueError(f"{record.location}: the query is {query!r}; it must be a text.")
        groups.setdefault(query, InputRecord((query, []), record.location)).value[1].extend(_as_list(document))
    return list(groups.values()), len(groups)


def _as_list(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]
