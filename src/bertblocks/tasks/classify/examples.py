"""Labelled texts and pairs of texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bertblocks.tasks.labels import Labels
from bertblocks.text.tables import DataError, Records


@dataclass(frozen=True)
class TextExample:
    """A text or a pair of texts with its target."""

    text: str
    pair: str | None
    #: A class index, a number, or a 0 or 1 for each label.
    target: int | float | list[float]
    place: str


def read_examples(records: Records, columns: Mapping[str, str], labels: Labels) -> list[TextExample]:
    """Reads the examples of a table."""
    examples = []
    for index, row in enumerate(records.rows):
        place = records.place(index)
        texts = [row[columns[role]] for role in ("text", "text_pair") if role in columns]
        for text in texts:
            if not isinstance(text, str):
                raise DataError(f"{place}: the text is {text!r}; it must be a string.")
        target = labels.encode(row[columns["label"]], place)
        examples.append(TextExample(texts[0], texts[1] if len(texts) > 1 else None, target, place))
    return examples
