"""A long-context test for encoders: a fact is hidden in a long text, and asked for at its end.

A masked language model must fill in the word of the fact. An encoder without such a head must embed the text closer to
the true fact than to a false one. Accuracy is given by the length of the text and by how deep the fact lies in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError

#: What the fact is about, and what it may say; words that nearly every vocabulary holds as one token.
PLACES = ("London", "Paris", "Berlin", "Rome", "Madrid", "Vienna", "Moscow", "Tokyo", "Chicago", "Boston")
WORDS = (
    *("river", "house", "stone", "music", "horse", "water", "light", "paper", "silver", "summer", "winter", "garden"),
    *("bridge", "window", "market", "forest", "island", "letter", "mother", "doctor"),
)
FACT = "The secret word of {place} is {word}."

#: Filler of everyday sentences, for when no text is given.
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
    """One text of exactly `length` tokens with its frame, and what is asked of it."""

    ids: list[int]
    types: list[int]
    #: The token to be filled in; None for embeddings.
    mask: int | None
    #: Which of the candidates is right: a word to fill in, or the fact that an embedding should be close to.
    answer: int
    #: The fact, and a false one.
    facts: list[str]


@dataclass(frozen=True)
class Needle:
    """Accuracy over `samples` texts for each length and depth, and what guessing would give."""

    lengths: list[int]
    depths: list[float]
    accuracy: np.ndarray  # [lengths, depths]
    chance: float


def find_words(tokenizer: TextTokenizer) -> dict[str, int]:
    """The words that are one token in the middle of a sentence, with that token."""
    before = tokenizer.tokenize(["is"])[0].ids
    found = {}
    for word, tokens in zip(WORDS, tokenizer.tokenize([f"is {word}" for word in WORDS]), strict=True):
        if tokens.ids[: len(before)] == before and len(tokens.ids) == len(before) + 1:
            found[word] = tokens.ids[-1]
    if len(found) < 2:
        raise DataError(
            f"The tokenizer holds {len(found)} of the test's {len(WORDS)} words as one token; 2 are needed."
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
    """Texts with a fact at `depth` (0: the start, 1: the end); with a `mask_id` the fact is asked for behind them."""
    generator = np.random.default_rng([seed, length, round(depth * 1000)])
    names = list(words)
    sentences = [tokens.ids for tokens in tokenizer.tokenize(list(filler))]
    for _ in range(count):
        place = PLACES[generator.integers(len(PLACES))]
        answer, other = (int(i) for i in generator.choice(len(names), 2, replace=False))
        truth, lie = (FACT.format(place=place, word=names[i]) for i in (answer, other))
        asked: list[int] = []
        if mask_id is not None:
            before = tokenizer.tokenize([FACT.format(place=place, word="").removesuffix(" .")])[0].ids
            asked = [*before, mask_id, *tokenizer.tokenize(["."])[0].ids]
        needle = tokenizer.tokenize([truth])[0].ids
        room = length - tokenizer.num_special() - len(needle) - len(asked)
        if room < 0:
            raise DataError(f"length is {length}; the fact and its question alone need {length - room} tokens.")
        text = _fill(sentences, room, generator)
        at = _boundary(sentences, text, round(depth * len(text)))
        framed = tokenizer.add_special_tokens([*text[:at], *needle, *text[at:], *asked])
        mask = framed.ids.index(mask_id, framed.start) if mask_id is not None else None
        yield Sample(framed.ids, framed.types, mask, 0 if mask is None else answer, [truth, lie])


def _fill(sentences: Sequence[Sequence[int]], room: int, generator: np.random.Generator) -> list[int]:
    """`room` tokens of sentences in random order; the last one is cut."""
    ids: list[int] = []
    while len(ids) < room:
        ids.extend(sentences[int(generator.integers(len(sentences)))])
    return ids[:room]


def _boundary(sentences: Sequence[Sequence[int]], text: Sequence[int], wanted: int) -> int:
    """The end of a sentence nearest to `wanted`; every sentence ends with the same token, a full stop."""
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
    """Accuracy of `score`, which chooses a candidate for each sample, over a grid of lengths and depths."""
    accuracy = np.zeros((len(lengths), len(depths)))
    for row, length in enumerate(lengths):
        for column, depth in enumerate(depths):
            samples = list(make(length, depth))
            right = np.array([sample.answer for sample in samples])
            accuracy[row, column] = float(np.mean(score(samples) == right))
    return Needle(list(lengths), list(depths), accuracy, chance)
