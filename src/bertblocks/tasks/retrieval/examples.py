"""Queries with documents, in the forms in which people have them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bertblocks.text.columns import choose_columns, write_columns
from bertblocks.text.headers import is_number
from bertblocks.text.records import ReadOptions
from bertblocks.text.tables import DataError, Records, read_records

#: What the rows of a file are: a query and a relevant document; a query with relevant and other documents; a query, a
#: document and whether it is relevant; the same with a number for the relevance; or documents with a teacher's scores.
Shape = Literal["pairs", "lists", "labels", "scores", "teacher"]
#: The names of columns of documents that are not relevant, such as negative, negatives, negative_2 and neg.
NEGATIVE = re.compile(r"(hard_)?neg(ative)?s?(_?\d+)?", re.IGNORECASE)
#: The columns of a teacher's scores in FlagEmbedding's files.
POSITIVE_SCORES, NEGATIVE_SCORES = "pos_scores", "neg_scores"


@dataclass(frozen=True)
class RetrievalExample:
    """A query and documents, relevant ones first."""

    query: str
    documents: tuple[str, ...]
    #: What a model learns of each document: 1 or 0, a graded relevance, or a teacher's score.
    targets: tuple[float, ...]
    #: The gain of each document in a ranking, 0 if it is not relevant.
    gains: tuple[float, ...]
    place: str


@dataclass(frozen=True)
class RetrievalData:
    """The examples of a file, what they are, and how the file was read."""

    examples: list[RetrievalExample]
    shape: Shape
    note: str


def read_retrieval_data(
    source: str | Path, options: ReadOptions | None = None, given: Mapping[str, str] | None = None
) -> RetrievalData:
    """Reads a table of queries and documents.

    `given` names the columns of the roles query, document, negative and label where their names do not tell. Documents
    and negatives are texts or lists of texts. Without labels, documents are relevant and negatives are not. A label is
    that of the row's document; a list of labels has a teacher's score for every document and negative; a number in a
    row with one document and one negative is the teacher's margin between them.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     path = Path(folder) / "train.csv"
        ...     _ = path.write_text("query,positive,negative_1\\nwarm?,a warm day,a cold day\\n")
        ...     data = read_retrieval_data(path)
        >>> data.shape, data.examples[0].documents, data.examples[0].gains
        ('lists', ('a warm day', 'a cold day'), (1.0, 0.0))
    """
    given = dict(given or {})
    records = read_records(source, options, given.values())
    negatives = find_negatives(records, given.pop("negative", None))
    known = [POSITIVE_SCORES, NEGATIVE_SCORES]
    others = [column for column in records.columns if column not in (*negatives, *known)]
    columns = choose_columns(records.only(others), ["query", "document"], ["negative", "label"], given)
    if "negative" in columns:  # the third text of a table without a header
        negatives = [columns.pop("negative")]
    examples = [_read_row(records, index, columns, negatives) for index in range(len(records))]
    shape = _find_shape(records, columns, negatives)
    described = write_columns(columns | {f"negative {n}": name for n, name in enumerate(negatives, 1)}, records)
    return RetrievalData(examples, shape, f"{source}: {len(records):,} rows, {described}, read as {shape}")


def judge(examples: Sequence[RetrievalExample]) -> dict[str, dict[str, float]]:
    """Returns the gain of every document that some example has for a query, by query.

    Example:
        >>> row = RetrievalExample("warm?", ("a warm day", "snow"), (1, 0), (1, 0), "line 2")
        >>> judge([row, RetrievalExample("warm?", ("summer",), (1,), (1,), "line 3")])
        {'warm?': {'a warm day': 1, 'snow': 0, 'summer': 1}}
    """
    gains: dict[str, dict[str, float]] = {}
    for example in examples:
        own = gains.setdefault(example.query, {})
        for document, gain in zip(example.documents, example.gains, strict=True):
            own[document] = max(gain, own.get(document, gain))
    return gains


def find_negatives(records: Records, given: str | None) -> list[str]:
    """Finds the columns of documents that are not relevant: the given one, or those with a known name, in order."""
    if given is not None:
        columns = choose_columns(records, [], [], {"negative": given})
        return list(columns.values())
    found = [column for column in records.columns if NEGATIVE.fullmatch(column)]
    return sorted(found, key=lambda column: (int(re.sub(r"\D", "", column) or 0), column))


def _read_row(records: Records, index: int, columns: Mapping[str, str], negatives: Sequence[str]) -> RetrievalExample:
    row, place = records.rows[index], records.place(index)
    query = read_texts(row[columns["query"]], "query", place)
    if len(query) != 1 or not query[0].strip():
        raise DataError(f"{place}: the query is {row[columns['query']]!r}; it must be a text that is not empty.")
    documents = read_texts(row[columns["document"]], "document", place)
    others = [text for column in negatives for text in read_texts(row[column], column, place, is_needed=False)]
    label = _read_label(row, columns.get("label"), len(documents), len(others), place)
    gains = [1.0] * len(documents) + [0.0] * len(others)
    if label is None:
        targets = gains
    elif len(label) == len(gains):
        targets = label
        if not others and columns.get("label") is not None:
            gains = [max(target, 0.0) for target in targets]
    else:
        raise DataError(f"{place}: there are {len(label)} scores for {len(gains)} documents; each document needs one.")
    return RetrievalExample(query[0], (*documents, *others), tuple(targets), tuple(gains), place)


def read_texts(cell: Any, role: str, place: str, is_needed: bool = True) -> list[str]:
    """Reads a cell that holds a text or a list of texts; without `is_needed`, it may be empty."""
    texts = cell if isinstance(cell, (list, tuple)) else [] if cell in (None, "") and not is_needed else [cell]
    for text in texts:
        if not isinstance(text, str):
            raise DataError(f"{place}: the {role} is {text!r}; it must be a text or a list of texts.")
    if is_needed and not texts:
        raise DataError(f"{place}: the {role} is an empty list; it must have at least one text.")
    return list(texts)


def _read_label(
    row: Mapping[str, Any], column: str | None, documents: int, negatives: int, place: str
) -> list[float] | None:
    """The scores of a row's documents and negatives, if the row has any."""
    if row.get(POSITIVE_SCORES) is not None:
        positive, negative = row[POSITIVE_SCORES], row.get(NEGATIVE_SCORES)
        cells = [*_as_list(positive), *_as_list([] if negative is None else negative)]
    elif column is None:
        return None
    else:
        cells = _as_list(row[column])
        if len(cells) == 1 and documents == negatives == 1:
            cells = [*cells, 0.0]  # the margin of the document over the negative
    for cell in cells:
        if not is_number(cell):
            raise DataError(f"{place}: the label is {cell!r}; it must be a number, such as 1 for a relevant document.")
    return [float(cell) for cell in cells]


def _as_list(cell: Any) -> list[Any]:
    return list(cell) if isinstance(cell, (list, tuple)) else [cell]


def _find_shape(records: Records, columns: Mapping[str, str], negatives: Sequence[str]) -> Shape:
    label = columns.get("label")
    if POSITIVE_SCORES in records.columns or (label is not None and negatives):
        return "teacher"
    if label is None:
        return "lists" if negatives else "pairs"
    if any(isinstance(row[label], (list, tuple)) for row in records.rows):
        return "teacher"
    values = {float(row[label]) for row in records.rows}
    return "labels" if values <= {0.0, 1.0} else "scores"
