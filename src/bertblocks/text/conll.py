"""Tagged sentences from CoNLL and CoNLL-U files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bertblocks.core.registry import nearest
from bertblocks.text.files import read_text
from bertblocks.text.records import DataError

#: The ten columns of CoNLL-U by the names of its definition; https://universaldependencies.org/format.html
CONLLU_COLUMNS = ("id", "form", "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


@dataclass(frozen=True)
class TaggedSentence:
    """The words of a sentence with a tag each."""

    words: list[str]
    tags: list[str]
    #: The line on which the sentence begins.
    line: int


def read_conll(path: Path, column: str | None = None) -> list[TaggedSentence]:
    """Reads the sentences of a .conll or .conllu file.

    `column` names the tags: in CoNLL-U one of its columns (by default upos), in CoNLL a number from 2 (by default the
    last). Comments are skipped, and so are lines of CoNLL-U for several words or for none (ids `1-2` and `1.1`).
    """
    universal = path.suffix.lower() == ".conllu"
    word_index, tag_index = (1, _universal_column(path, column)) if universal else (0, _plain_column(path, column))
    sentences: list[TaggedSentence] = []
    words: list[str] = []
    tags: list[str] = []
    begin, width = 1, len(CONLLU_COLUMNS) if universal else 0
    for number, line in enumerate([*read_text(path).split("\n"), ""], start=1):
        line = line.rstrip("\r")
        if not line.strip():
            if words:
                sentences.append(TaggedSentence(words, tags, begin))
            words, tags = [], []
            continue
        if (universal and line.startswith("#")) or line.startswith("-DOCSTART-"):
            continue
        cells = line.split("\t") if universal or "\t" in line else line.split()
        width = width or len(cells)
        if len(cells) != width:
            raise DataError(f"{path} line {number}: the row has {len(cells)} columns, not {width}: {line!r}.")
        if tag_index >= width or width < 2:
            raise DataError(f"{path} line {number}: the row has {width} columns and no column {tag_index + 1}.")
        if universal and not cells[0].isdigit():
            continue
        if not words:
            begin = number
        words.append(cells[word_index])
        tags.append(cells[tag_index])
    if not sentences:
        raise DataError(f"{path}: the file has no sentences.")
    return sentences


def _universal_column(path: Path, column: str | None) -> int:
    name = column or "upos"
    if name not in CONLLU_COLUMNS:
        raise DataError(
            f"{path}: column {name!r} is not one of CoNLL-U's: {', '.join(CONLLU_COLUMNS)}"
            f"{nearest(name, CONLLU_COLUMNS)}."
        )
    return CONLLU_COLUMNS.index(name)


def _plain_column(path: Path, column: str | None) -> int:
    if column is None:
        return -1
    if not column.isdigit() or int(column) < 2:
        raise DataError(f"{path}: column is {column!r}; it must be a number from 2 (1 is the word).")
    return int(column) - 1
