"""Tags of words: examples from CoNLL files and records, features over windows, and the loss."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertblocks.models.masked_lm import IGNORE
from bertblocks.numerics import upcast
from bertblocks.registry import nearest
from bertblocks.tasks.alignment import Span, align, join_words, spread_labels, words_of
from bertblocks.tasks.columns import choose_columns
from bertblocks.tasks.conll import read_conll
from bertblocks.tasks.features import Feature, FeatureBatch
from bertblocks.tasks.records import DataError, Records, read_records
from bertblocks.tasks.schemes import Entity, find_scheme, to_bio, write_tags
from bertblocks.tasks.tokens import TextTokenizer
from bertblocks.tasks.windows import cut_windows


@dataclass(frozen=True)
class TaggedExample:
    """A text with the place and the tag of each of its words."""

    text: str
    words: list[Span]
    tags: list[str]
    place: str


@dataclass(frozen=True)
class TaggedExamples:
    """Examples whose tags are BIO (or plain), however the file writes them."""

    examples: list[TaggedExample]
    scheme: str
    repaired: int


def read_tagged(
    source: str | Path, column: str | None = None, given: Mapping[str, str] | None = None, scheme: str | None = None
) -> TaggedExamples:
    """Tagged texts of a CoNLL or CoNLL-U file, or of records with words and tags or with a text and its spans.

    A span is `{"start", "end", "label"}` in characters. `scheme` is found from the tags unless said.
    """
    path = Path(source)
    if path.suffix in (".conll", ".conllu") and path.is_file():
        examples = []
        for sentence in read_conll(path, column):
            text, words = join_words(sentence.words)
            examples.append(TaggedExample(text, words, sentence.tags, f"{path} line {sentence.line}"))
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
        result.append(TaggedExample(example.text, example.words, tags, example.place))
    return TaggedExamples(result, found, repaired)


def _read_words(records: Records, index: int, columns: Mapping[str, str]) -> TaggedExample:
    place = records.place(index)
    words, tags = (records.rows[index][columns[role]] for role in ("words", "tags"))
    for name, value in (("words", words), ("tags", tags)):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise DataError(f"{place}: {columns[name]!r} is {value!r}; it must be a list of strings.")
    if len(words) != len(tags):
        raise DataError(f"{place}: there are {len(words)} words and {len(tags)} tags; there must be one for each.")
    text, spans = join_words(words)
    return TaggedExample(text, spans, tags, place)


def _read_spans(records: Records, index: int, columns: Mapping[str, str]) -> TaggedExample:
    """Spans of characters become tags of the words that they touch."""
    place = records.place(index)
    text, spans = (records.rows[index][columns[role]] for role in ("text", "spans"))
    if not isinstance(text, str):
        raise DataError(f"{place}: the text is {text!r}; it must be a string.")
    if not isinstance(spans, list):
        raise DataError(f"{place}: {columns['spans']!r} is {spans!r}; it must be a list of spans.")
    marked = sorted((_check_span(span, text, place) for span in spans), key=lambda one: one.start)
    words = _split_at(words_of(text), [edge for one in marked for edge in (one.start, one.end)])
    entities: list[Entity] = []
    for one in marked:
        inside = [number for number, (start, end) in enumerate(words) if start < one.end and end > one.start]
        if entities and inside and inside[0] < entities[-1].end:
            raise DataError(f"{place}: the span {one.start}-{one.end} overlaps another; each word has one tag.")
        if inside:
            entities.append(Entity(inside[0], inside[-1] + 1, one.kind))
    return TaggedExample(text, words, write_tags(entities, len(words), "bio"), place)


def _check_span(span: Any, text: str, place: str) -> Entity:
    right = isinstance(span, dict) and isinstance(span.get("start"), int) and isinstance(span.get("end"), int)
    if not right or not isinstance(span.get("label"), str):
        raise DataError(f"{place}: the span {span!r} must have a start, an end and a label.")
    if not 0 <= span["start"] < span["end"] <= len(text):
        raise DataError(
            f"{place}: the span {span['start']}-{span['end']} is not in the text of {len(text)} characters."
        )
    return Entity(span["start"], span["end"], span["label"])


def _split_at(words: Sequence[Span], edges: Sequence[int]) -> list[Span]:
    """Words cut where a span begins or ends inside of them."""
    pieces: list[Span] = []
    for start, end in words:
        cuts = sorted({start, end, *(edge for edge in edges if start < edge < end)})
        pieces.extend(itertools.pairwise(cuts))
    return pieces


# ---------------------------------------------------------------------- training


def find_tags(examples: Sequence[TaggedExample]) -> list[str]:
    """The tags that a tagger learns, O first and the others sorted."""
    counts = Counter(tag for example in examples for tag in example.tags)
    if len(counts) < 2:
        has = f"the only tag is {next(iter(counts))!r}" if counts else "there are no tags"
        raise DataError(f"{examples[0].place.rsplit(' ', 2)[0]}: {has}; a tagger needs at least two.")
    return sorted(counts, key=lambda tag: (tag != "O", tag))


def make_features(
    examples: Sequence[TaggedExample],
    names: Sequence[str],
    tokenizer: TextTokenizer,
    max_length: int,
    every_piece: bool,
) -> tuple[list[Feature], int]:
    """Sequences with a label for every token, and how many texts needed more than one window.

    Windows overlap, and a token is scored in one of them: where the most is seen around it.
    """
    index = {name: number for number, name in enumerate(names)}
    room = max_length - tokenizer.num_special()
    features, windowed = [], 0
    for example, tokens in zip(examples, tokenizer.tokenize([e.text for e in examples], offsets=True), strict=True):
        for tag in example.tags:
            if tag not in index:
                raise DataError(f"{example.place}: the tag {tag!r} is not one of the model's{nearest(tag, names)}.")
        labels = spread_labels(align(example.words, tokens.offsets), [index[t] for t in example.tags], every_piece)
        windows = cut_windows(len(tokens.ids), room, room // 4)
        windowed += len(windows) > 1
        for window in windows:
            framed = tokenizer.frame(tokens.ids[window.start : window.stop])
            target = [IGNORE] * len(framed.ids)
            begin = framed.start + window.core_start - window.start
            core = labels[window.core_start : window.core_stop]
            target[begin : begin + len(core)] = core
            features.append(Feature(framed.ids, framed.types, target))
    return features, windowed


class TaggingLoss:
    """The summed cross-entropy over labelled tokens."""

    def batch(self, features: Sequence[Feature]) -> FeatureBatch:
        targets = torch.tensor([label for feature in features for label in feature.target])
        return FeatureBatch.of(features, targets, int((targets != IGNORE).sum()))

    def losses(self, model: nn.Module, batch: FeatureBatch) -> dict[str, Tensor]:
        logits = upcast(model(**batch.inputs).logits)
        return {"loss": F.cross_entropy(logits, batch.targets, ignore_index=IGNORE, reduction="sum")}
