"""Tags of words, and the entities that they mark."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bertblocks.core.registry import nearest
from bertblocks.models.masked_lm import IGNORE
from bertblocks.tasks.base import WORST, Evaluated, FineTuneTask
from bertblocks.tasks.features import Feature, FeatureBatch
from bertblocks.tasks.metrics import tagging_scores
from bertblocks.tasks.settings import TagSettings
from bertblocks.text.alignment import Span, align, join_words, spread_labels, words_of
from bertblocks.text.columns import choose_columns
from bertblocks.text.conll import read_conll
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError, Records, read_records
from bertblocks.text.tag_schemes import Entity, entities, find_scheme, split_tag, to_bio, write_tags
from bertblocks.text.windows import cut_windows

if TYPE_CHECKING:
    from bertblocks.tasks.predictor import Predictor


@dataclass(frozen=True)
class TaggedExample:
    """A text with the place and the tag of each of its words."""

    text: str
    words: list[Span]
    tags: list[str]
    place: str
    #: The words as the file gives them; None where it gives the text.
    given: list[str] | None = None


class TagTask(FineTuneTask):
    """A tag for each word of a text: parts of speech, or BIO tags that mark entities."""

    settings_class = TagSettings
    model_task = "token-classification"

    def __init__(self, settings: TagSettings) -> None:
        super().__init__(settings)
        self.names: list[str] = []

    @property
    def metric(self) -> str:
        return "f1" if self._has_entities else "accuracy"

    @property
    def _has_entities(self) -> bool:
        return find_scheme([self.names]) != "plain"

    def adopt(self, config: Any) -> None:
        self.names = [config.id2label[index] for index in sorted(config.id2label)]

    def read(self, source: str | Path) -> list[TaggedExample]:
        settings = self.settings
        given = self.given_columns("words", "tags", "text", "spans")
        tagged = read_tagged(source, settings.column, given, settings.scheme)
        self.names = self.names or find_tags(tagged.examples)
        _refuse_unknown(tagged.examples, self.names)
        words = sum(len(example.words) for example in tagged.examples)
        note = f"{source}: {len(tagged.examples):,} texts, {words:,} words, {len(self.names)} tags"
        self.notes.append(note if tagged.scheme == "plain" else f"{note}, written as {tagged.scheme.upper()}")
        if tagged.repaired:
            self.notes.append(f"{source}: {tagged.repaired:,} tags broke their scheme and were repaired")
        return tagged.examples

    def config_changes(self) -> dict[str, Any]:
        return {
            "id2label": dict(enumerate(self.names)),
            "label2id": {name: index for index, name in enumerate(self.names)},
        }

    def features(self, examples: Sequence[TaggedExample], tokenizer: TextTokenizer, max_length: int) -> list[Feature]:
        """Sequences with a label for every token.

        Windows of a long text overlap, and a token is scored in one of them: where the most is seen around it.
        """
        index = {name: number for number, name in enumerate(self.names)}
        room = max_length - tokenizer.num_special()
        features, windowed = [], 0
        for example, tokens in zip(examples, tokenizer.tokenize([e.text for e in examples], offsets=True), strict=True):
            targets = [index[tag] for tag in example.tags]
            labels = spread_labels(align(example.words, tokens.offsets), targets, self.settings.every_piece)
            windows = cut_windows(len(tokens.ids), room, room // 4)
            windowed += len(windows) > 1
            for window in windows:
                framed = tokenizer.frame(tokens.ids[window.start : window.stop])
                target = [IGNORE] * len(framed.ids)
                begin = framed.start + window.core_start - window.start
                core = labels[window.core_start : window.core_stop]
                target[begin : begin + len(core)] = core
                features.append(Feature(framed.ids, framed.types, target))
        if windowed:
            self.notes.append(f"{windowed:,} texts are longer than {max_length} tokens and seen through windows")
        return features

    def batch(self, features: Sequence[Feature]) -> FeatureBatch:
        targets = torch.tensor([label for feature in features for label in feature.target])
        return FeatureBatch.of(features, targets, int((targets != IGNORE).sum()))

    def losses(self, model: nn.Module, batch: FeatureBatch) -> dict[str, Tensor]:
        return {"loss": model(**batch.inputs, labels=batch.targets, num_items_in_batch=1).loss}

    def evaluate(self, predictor: Predictor, examples: Sequence[TaggedExample]) -> Evaluated:
        gold = [example.tags for example in examples]
        predicted = self._predict(predictor, examples)
        if self._has_entities:  # a model may write them by another scheme
            predicted = [to_bio(tags, find_scheme([self.names]))[0] for tags in predicted]
        scores = tagging_scores(gold, predicted, self._has_entities)
        kinds = entities if self._has_entities else _single_words
        real, said = ([set(kinds(tags)) for tags in side] for side in (gold, predicted))
        counts = np.array([[len(a & b), len(a), len(b)] for a, b in zip(real, said, strict=True)])

        def resample(chosen: np.ndarray) -> float:
            hits, there, found = counts[chosen].sum(axis=0)
            return 2 * hits / max(there + found, 1)

        worst = np.argsort(counts[:, 0] * 2 - counts[:, 1] - counts[:, 2])[:WORST]
        rows = [[_write(examples[i], gold[i]), _write(examples[i], predicted[i])] for i in worst if real[i] != said[i]]
        tables = {
            "Labels": [["label", "precision", "recall", "F1", "examples"], *_by_kind(real, said)],
            "Worst examples": [["gold", "predicted"], *rows],
        }
        return Evaluated(scores, resample, tables)

    def _predict(self, predictor: Predictor, examples: Sequence[TaggedExample]) -> list[list[str]]:
        """Tags of the examples' own words; a text given without words is tagged as its users would."""
        given = [example.given for example in examples if example.given is not None]
        if len(given) == len(examples):
            return [[one.label for one in row] for row in predictor.tag(given, level="words")]
        said = predictor.tag([example.text for example in examples], level="entities")
        result = []
        for example, found in zip(examples, said, strict=True):
            touched = [
                [i for i, (start, end) in enumerate(example.words) if start < one.end and end > one.start]
                for one in found
            ]
            spans = [
                Entity(words[0], words[-1] + 1, one.label) for words, one in zip(touched, found, strict=True) if words
            ]
            result.append(write_tags(spans, len(example.words), "bio"))
        return result


def _single_words(tags: Sequence[str]) -> list[Entity]:
    return [Entity(index, index + 1, tag) for index, tag in enumerate(tags)]


def _by_kind(real: Sequence[set[Entity]], said: Sequence[set[Entity]]) -> list[list[Any]]:
    """Precision, recall and F1 of each kind of entity, or of each tag."""
    kinds = sorted({one.kind for side in (*real, *said) for one in side})
    hits, there, found = (
        Counter(one.kind for group in groups for one in group)
        for groups in ([a & b for a, b in zip(real, said, strict=True)], real, said)
    )
    rows = []
    for kind in kinds:
        precision, recall = hits[kind] / max(found[kind], 1), hits[kind] / max(there[kind], 1)
        f1 = 2 * hits[kind] / max(there[kind] + found[kind], 1)
        rows.append([kind, f"{precision:.3f}", f"{recall:.3f}", f"{f1:.3f}", there[kind]])
    return rows


def _write(example: TaggedExample, tags: Sequence[str]) -> str:
    words = [example.text[start:end] for start, end in example.words]
    return " ".join(word if tag == "O" else f"{word}/{tag}" for word, tag in zip(words, tags, strict=True))


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
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise DataError(f"{place}: {columns[name]!r} is {value!r}; it must be a list of strings.")
    if len(words) != len(tags):
        raise DataError(f"{place}: there are {len(words)} words and {len(tags)} tags; there must be one for each.")
    text, spans = join_words(words)
    return TaggedExample(text, spans, tags, place, words)


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
    found: list[Entity] = []
    for one in marked:
        inside = [number for number, (start, end) in enumerate(words) if start < one.end and end > one.start]
        if found and inside and inside[0] < found[-1].end:
            raise DataError(f"{place}: the span {one.start}-{one.end} overlaps another; each word has one tag.")
        if inside:
            found.append(Entity(inside[0], inside[-1] + 1, one.kind))
    return TaggedExample(text, words, write_tags(found, len(words), "bio"), place)


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


def find_tags(examples: Sequence[TaggedExample]) -> list[str]:
    """The tags that a tagger learns, O first and the others sorted."""
    counts = Counter(tag for example in examples for tag in example.tags)
    if len(counts) < 2:
        has = f"the only tag is {next(iter(counts))!r}" if counts else "there are no tags"
        raise DataError(f"{examples[0].place}: from here to the end {has}; a tagger needs at least two.")
    return sorted(counts, key=lambda tag: (tag != "O", tag))


def _refuse_unknown(examples: Sequence[TaggedExample], names: Sequence[str]) -> None:
    """Of entities the kind counts, not the letters of a scheme before it."""
    has_entities = find_scheme([names]) != "plain"
    kinds = {split_tag(name)[1] for name in names} if has_entities else set(names)
    for example in examples:
        for tag in example.tags:
            if (split_tag(tag)[1] if has_entities else tag) not in kinds:
                raise DataError(f"{example.place}: the tag {tag!r} is not one of the model's{nearest(tag, names)}.")
