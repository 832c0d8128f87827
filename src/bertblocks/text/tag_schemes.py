"""Schemes of entity tags: detecting, checking and repairing them, and reading them as spans.

Inside the library tags are BIO. IOB1 and BIOES (also called BILOU) are converted without loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: BILOU's letters for the last word of an entity and for an entity of one word.
_LETTERS = {"L": "E", "U": "S"}


@dataclass(frozen=True)
class Entity:
    """An entity of some kind: the words from `start` up to `end`, which is exclusive."""

    start: int
    end: int
    kind: str


def split_tag(tag: str) -> tuple[str, str]:
    """Splits a tag into its letter and its kind.

    Example:
        >>> split_tag("B-LOC"), split_tag("L-LOC"), split_tag("O")
        (('B', 'LOC'), ('E', 'LOC'), ('O', ''))
    """
    letter, _, kind = tag.partition("-")
    return _LETTERS.get(letter, letter), kind


def find_scheme(sentences: Sequence[Sequence[str]]) -> str:
    """Detects the scheme of tags; "plain" means that they do not mark spans, as parts of speech do not.

    Example:
        >>> find_scheme([["I-PER", "I-PER", "O", "I-LOC", "B-LOC"]]), find_scheme([["NOUN", "VERB"]])
        ('iob1', 'plain')
    """
    tags = {tag for sentence in sentences for tag in sentence}
    letters = {split_tag(tag)[0] for tag in tags}
    if not all(tag == "O" or (split_tag(tag)[0] in "BIES" and split_tag(tag)[1]) for tag in tags) or letters <= {"O"}:
        return "plain"
    if letters & {"E", "S"}:
        return "bioes"
    begins_needed = all(
        index > 0 and split_tag(sentence[index - 1])[1] == split_tag(tag)[1]
        for sentence in sentences
        for index, tag in enumerate(sentence)
        if tag.startswith("B-")
    )
    return "iob1" if "I" in letters and begins_needed else "bio"


def to_bio(tags: Sequence[str], scheme: str) -> tuple[list[str], int]:
    """Converts the tags of a sentence to BIO and counts those that broke their own scheme and were repaired.

    Example:
        >>> to_bio(["O", "I-PER", "I-PER", "I-LOC"], "bio")
        (['O', 'B-PER', 'I-PER', 'B-LOC'], 2)
        >>> to_bio(["S-LOC", "B-PER", "E-PER"], "bioes")
        (['B-LOC', 'B-PER', 'I-PER'], 0)
    """
    if scheme == "plain":
        return list(tags), 0
    found = entities(tags)
    valid = write_tags(found, len(tags), scheme)
    repaired = sum(split_tag(tag) != split_tag(right) for tag, right in zip(tags, valid, strict=True))
    return write_tags(found, len(tags), "bio"), repaired


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities that tags of any scheme mark, also those without a proper beginning or end.

    Example:
        >>> entities(["B-LOC", "I-LOC", "O", "S-PER"])
        [Entity(start=0, end=2, kind='LOC'), Entity(start=3, end=4, kind='PER')]
    """
    found: list[Entity] = []
    start = 0
    open_kind: str | None = None
    for index, tag in enumerate([*tags, "O"]):
        letter, kind = split_tag(tag)
        if open_kind is not None and not (letter in "IE" and kind == open_kind):
            found.append(Entity(start, index, open_kind))
            open_kind = None
        if letter != "O" and open_kind is None:
            start, open_kind = index, kind
        if letter in "ES" and open_kind is not None:
            found.append(Entity(start, index + 1, open_kind))
            open_kind = None
    return found


def write_tags(found: Sequence[Entity], length: int, scheme: str) -> list[str]:
    """Tags for `length` words that mark these entities."""
    tags = ["O"] * length
    for index, entity in enumerate(found):
        tags[entity.start : entity.end] = [f"I-{entity.kind}"] * (entity.end - entity.start)
        follows = index > 0 and found[index - 1].end == entity.start and found[index - 1].kind == entity.kind
        if scheme != "iob1" or follows:
            tags[entity.start] = f"B-{entity.kind}"
        if scheme == "bioes":
            tags[entity.end - 1] = f"{'S' if entity.end - entity.start == 1 else 'E'}-{entity.kind}"
    return tags
