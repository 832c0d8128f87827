"""Tagged texts: CoNLL files, words with tags, and texts with spans."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertblocks.core.registry import nearest
from bertblocks.text.alignment import Span, join_words, words_of
from bertblocks.text.columns import choose_columns
from bertblocks.text.conll import read_conll
from bertblocks.text.tables import DataError, Records, read_records
from bertblocks.text.tag_schemes import Entity, find_scheme, split_tag, to_bio, write_tags


@dataclass(frozen=True)
class TaggedExample:
    """A text with the span and the tag of each of its words."""

    text: str
    words: list[Span]
    tags: list[str]
    place: str
    #: The words, if the file has words rather than a text.
    given: list[str] | None = None


@dataclass(frozen=True)
class TaggedExamples:
    """Examples whose tags have been converted to BIO (or are plain), and the scheme of the file."""

    examples: list[TaggedExample]
    scheme: str
    repaired: int


def read_tagged(
    source: str | Path, column: str | None = None, given: Mapping[str, str] | None = None, scheme: str | None = None
) -> TaggedExamples:
    """Reads tagged texts from a CoNLL or CoNLL-U file, or from records with words and tags or a text and its spans.

    A span is `{"start", "end", "label"}` in characters. `scheme` is detected from the tags unless given.
    """
    path = Path(source)
    if path.suffix in (".conll", ".conllu") and path.is_file():
        examples = []
        for sentence in read_conll(path, column):
            text, words = join_words(sentence.words)
            place = f"{path} line {sentence.line}"
            examples.append(TaggedExample(text, words, sentence.tags, place, sentence.words))
    else:
        records = read_records(source)
        by_words = "words" in (given or {}) or any(name in records.columns for name in ("words", "tokens"))
        roles = ["words", "tags"] if by_words else ["text", "spans"]
        columns = choose_columns(records, roles, [], given or {})
        read = _read_words if by_words else _read_spans
        examples = [read(records, index, columns) for index in range(len(records))]
    found = scheme or find_scheme([example.tags for example in examples])
    repaired, result = 0, []
    for example in examples:
        tags, changes = to_bio(example.tags, found)
        repaired += changes
        result.append(replace(example, tags=tags))
    return TaggedExamples(result, found, repaired)


def _read_words(records: Records, index: int, columns: Mapping[str, str]) -> TaggedExample:
    place = records.place(index)
    words, tags = (records.rows[index][columns[role]] for role in ("words", "tags"))
    for name, value in (("words", words), ("tags", tags)):
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise DataError(f"{place}: {columns[name]!r} is {value!r}; it must be a list of strings.")
    if len(words) != len(tags):
        raise DataError(f"{place}: there are {len(words)} words and {len(tags)} tags; each word needs one tag.")
    text, spans = join_words(words)
    return TaggedExample(text, spans, tags, place, words)


def _read_spans(records: Records, index: int, columns: Mapping[str, str]) -> TaggedExample:
    """Converts spans of characters to tags of the words that they touch."""
    place = records.place(index)
    text, spans = (records.rows[index][columns[role]] for role in ("text", "spans"))
    if not isinstance(text, str):
        raise DataError(f"{place}: the text is {text!r}; it must be a string.")
    if not isinstance(spans, list):
        raise DataError(f"{place}: {columns['spans']!r} is {spans!r}; it must be a list of spans.")
    marked = sorted((_check_span(span, text, place) for span in spans), key=lambda span: span.start)
    words = _split_at(words_of(text), [edge for span in marked for edge in (span.start, span.end)])
    found: list[Entity] = []
    for span in marked:
        inside = [number for number, (start, end) in enumerate(words) if start < span.end and end > span.start]
        if found and inside and inside[0] < found[-1].end:
            raise DataError(f"{place}: the span {span.start}-{span.end} overlaps another; each word has one tag.")
        if inside:
            found.append(Entity(inside[0], inside[-1] + 1, span.kind))
    return TaggedExample(text, words, write_tags(found, len(words), "bio"), place)


def _check_span(span: Any, text: str, place: str) -> Entity:
    is_span = isinstance(span, dict) and isinstance(span.get("start"), int) and isinstance(span.get("end"), int)
    if not is_span or not isinstance(span.get("label"), str):
        raise DataError(f"{place}: the span {span!r} must have a start, an end and a label.")
    if not 0 <= span["start"] < span["end"] <= len(text):
        raise DataError(
            f"{place}: the span {span['start']}-{span['end']} is outside the text of {len(text)} characters."
        )
    return Entity(span["start"], span["end"], span["label"])


def _split_at(words: Sequence[Span], edges: Sequence[int]) -> list[Span]:
    """Splits words where a span begins or ends inside them."""
    parts: list[Span] = []
    for start, end in words:
        cuts = sorted({start, end, *(edge for edge in edges if start < edge < end)})
        parts.extend(itertools.pairwise(cuts))
    return parts


def find_tags(examples: Sequence[TaggedExample]) -> list[str]:
    """Returns the tags of the examples, O first and the others sorted."""
    counts = Counter(tag for example in examples for tag in example.tags)
    if len(counts) < 2:
        has = f"the only tag is {next(iter(counts))!r}" if counts else "there are no tags"
        raise DataError(f"{examples[0].place}: from here to the end, {has}; a tagger needs at least two.")
    return sorted(counts, key=lambda tag: (tag != "O", tag))


def check_tags(examples: Sequence[TaggedExample], names: Sequence[str]) -> None:
    """Rejects tags that the model does not know; for entities only the kind counts, not the scheme's prefix."""
    has_entities = find_scheme([names]) != "plain"
    kinds = {split_tag(name)[1] for name in names} if has_entities else set(names)
    for example in examples:
        for tag in example.tags:
            if (split_tag(tag)[1] if has_entities else tag) not in kinds:
                raise DataError(f"{example.place}: the tag {tag!r} is not one of the model's{nearest(tag, names)}.")
