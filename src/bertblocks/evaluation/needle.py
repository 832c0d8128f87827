"""A needle-in-a-haystack test for encoders: a long text contains a fact and asks for it at the end.

A masked language model must fill in the missing word of the fact. An encoder without that head must embed the text
closer to the true fact than to a false one. The result is the accuracy by text length and by the depth of the fact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError

#: The subjects and the answers of facts. The answers are single tokens in nearly every vocabulary.
PLACES = ("London", "Paris", "Berlin", "Rome", "Madrid", "Vienna", "Moscow", "Tokyo", "Chicago", "Boston")
WORDS = (
    *("river", "house", "stone", "music", "horse", "water", "light", "paper", "silver", "summer", "winter", "garden"),
    *("bridge", "window", "market", "forest", "island", "letter", "mother", "doctor"),
)
FACT = "The secret word of {place} is {word}."

#: Default filler sentences.
FILLER = (
    "The morning was quiet and the streets were still empty.",
    "A train left the station a few minutes late.",
    "They talked about the weather for a long time.",
    "He closed the door and walked slowly down the road.",
    "The shop on the corner sells bread and fresh fruit.",
    "Nobody could remember when the old clock had stopped.",
    "She wrote down every number and added them twice.",
    "Children were playing near the wall behind the school.",
)


@dataclass(frozen=True)
class Sample:
    """A text of exactly `length` tokens, including special tokens, and its answer."""

    ids: list[int]
    types: list[int]
    #: The position of the mask token; None for embeddings.
    mask: int | None
    #: The index of the correct candidate: a word for the mask, or the fact that the embedding should be close to.
    answer: int
    #: The true fact and a false one.
    facts: list[str]


@dataclass(frozen=True)
class Needle:
    """The accuracy for each length and depth, and the accuracy of random guessing."""

    lengths: list[int]
    depths: list[float]
    accuracy: np.ndarray  # [lengths, depths]
    chance: float


def find_words(tokenizer: TextTokenizer) -> dict[str, int]:
    """The words that are a single token in the middle of a sentence, with their token ids."""
    before = tokenizer.tokenize(["is"])[0].ids
    found = {}
    for word, tokens in zip(WORDS, tokenizer.tokenize([f"is {word}" for word in WORDS]), strict=True):
        if tokens.ids[: len(before)] == before and len(tokens.ids) == len(before) + 1:
            found[word] = tokens.ids[-1]
    if len(found) < 2:
        raise DataError(
            f"Only {len(found)} of the {len(WORDS)} test words are single tokens in this vocabulary; the test needs 2."
        )
    return found


def make_samples(
    tokenizer: TextTokenizer,
    words: dict[str, int],
    mask_id: int | None,
    length: int,
    depth: float,
    count: int,
    filler: Sequence[str] = FILLER,
    seed: int = 0,
) -> Iterator[Sample]:
    """Texts with a fact at `depth` (0: start, 1: end). With `mask_id`, a cloze question follows the text."""
    generator = np.random.default_rng([seed, length, round(depth * 1000)])
    names = list(words)
    sentences = [tokens.ids for tokens in tokenizer.tokenize(list(filler))]
    for _ in range(count):
        place = PLACES[generator.integers(len(PLACES))]
        answer, other = (int(i) for i in generator.choice(len(names), 2, replace=False))
        truth, lie = (FACT.format(place=place, word=names[i]) for i in (answer, other))
        question: list[int] = []
        if mask_id is not None:
            before = tokenizer.tokenize([FACT.format(place=place, word="").removesuffix(" .")])[0].ids
            question = [*before, mask_id, *tokenizer.tokenize(["."])[0].ids]
        needle = tokenizer.tokenize([truth])[0].ids
        room = length - tokenizer.num_special() - len(needle) - len(question)
        if room < 0:
            raise DataError(f"length is {length}; the fact and its question need at least {length - room} tokens.")
        text = _fill(sentences, room, generator)
        at = _boundary(sentences, text, round(depth * len(text)))
        sequence = tokenizer.add_special_tokens([*text[:at], *needle, *text[at:], *question])
        mask = sequence.ids.index(mask_id, sequence.start) if mask_id is not None else None
        yield Sample(sequence.ids, sequence.types, mask, 0 if mask is None else answer, [truth, lie])


def _fill(sentences: Sequence[Sequence[int]], room: int, generator: np.random.Generator) -> list[int]:
    """`room` tokens of sentences in random order. The last sentence is truncated."""
    ids: list[int] = []
    while len(ids) < room:
        ids.extend(sentences[int(generator.integers(len(sentences)))])
    return ids[:room]


def _boundary(sentences: Sequence[Sequence[int]], text: Sequence[int], wanted: int) -> int:
    """The sentence end nearest to `wanted`. Every sentence ends with the same token, a full stop."""
    stop = sentences[0][-1]
    ends = np.array([0, *(i + 1 for i, token in enumerate(text) if token == stop), len(text)])
    return int(ends[np.abs(ends - wanted).argmin()])


def run_needle(
    score: Callable[[list[Sample]], np.ndarray],
    make: Callable[[int, float], Iterator[Sample]],
    lengths: Sequence[int],
    depths: Sequence[float],
    chance: float,
) -> Needle:
    """The accuracy of `score`, which selects a candidate for each sample, over a grid of lengths and depths."""
    accuracy = np.zeros((len(lengths), len(depths)))
    for row, length in enumerate(lengths):
        for column, depth in enumerate(depths):
            samples = list(make(length, depth))
            answers = np.array([sample.answer for sample in samples])
            accuracy[row, column] = float(np.mean(score(samples) == answers))
    return Needle(list(lengths), list(depths), accuracy, chance)
