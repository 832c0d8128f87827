"""Words, tokens, windows and spans on difficult words, for WordPiece, BPE and SentencePiece."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EsmTokenizer, PreTrainedTokenizerFast

from bertblocks.text.alignment import align, join_words, spread_labels, trim, words_of
from bertblocks.text.answer_spans import ScoredSpan, best_answers, best_spans, tokens_of_span
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.windows import cut_windows, merge_windows
from tests.small_tokenizers import TOKENIZERS, wrap

DIFFICULT_WORDS = [
    "plain",
    "",
    "👩‍💻",
    "🙂🙂",
    "e\u0301te\u0301",  # combining accents
    "\u0301",  # a mark alone
    " leading",
    "trailing ",
    "two words",
    "北京",
    "東京タワー",
    "שלום",
    "العربية",
    "ภาษาไทย",
    "x" * 70,  # longer than the windows below
    "\u200b",
    "\u00a0",
    "don't",
    "U.S.",
    "ﬁ",  # one character that normalizes to two
    "İ",
    "\t",
    "[MASK]",
    "</s>",
    "\x00",
]


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return wrap(request.param)


words = st.lists(
    st.one_of(st.sampled_from(DIFFICULT_WORDS), st.text(max_size=6).filter(lambda word: word.isprintable()))
)


# ---------------------------------------------------------------------- words and tokens


def test_token_offsets_exclude_the_space_in_front(tokenizer: Any) -> None:
    text = "  plain   words\tare here "
    offsets = TextTokenizer(tokenizer).tokenize([text], offsets=True)[0].offsets
    parts = [text[start:end] for start, end in offsets if start < end]
    assert parts
    assert all(part == part.strip() for part in parts)
    assert "".join(parts) == text.replace(" ", "").replace("\t", "")


def test_each_word_is_aligned_with_its_first_token(tokenizer: Any) -> None:
    given_words = ["plain", "two", "words", "don't", "xxxxxxxxx", "北京", "שלום", "🙂"]
    text, spans = join_words(given_words)
    tokens = TextTokenizer(tokenizer).tokenize([text], offsets=True)[0]
    alignment = align(spans, tokens.offsets)
    for word, token in enumerate(alignment.word_tokens):
        assert tokens.offsets[token][0] == spans[word][0]
        assert alignment.token_words[token] == word
        assert alignment.token_words.index(word) == token
    # tokens of real words only, all in order
    owners = [word for word in alignment.token_words if word is not None]
    assert owners == sorted(owners)
    assert set(owners) == set(range(len(given_words)))


@pytest.mark.parametrize("name", ["wordpiece", "bpe with prefix space"])
def test_alignment_equals_transformers_word_ids(name: Any) -> None:
    """Compares with transformers' word ids of pre-split words, for tokenizers that compute them correctly."""
    tokenizer = wrap(name)
    given_words = ["plain", "words", "don't", "U.S.", "xxxxxxxxx", "北京", "שלום", "🙂", "été"]
    theirs = tokenizer(given_words, is_split_into_words=True, add_special_tokens=False)
    text, spans = join_words(given_words)
    tokens = TextTokenizer(tokenizer).tokenize([text], offsets=True)[0]
    assert tokens.ids == theirs["input_ids"]
    assert align(spans, tokens.offsets).token_words == theirs.word_ids()


@settings(max_examples=60, deadline=None)
@given(words=words, name=st.sampled_from(list(TOKENIZERS)))
def test_any_words_are_aligned_with_one_token_or_none(words: Any, name: Any) -> None:
    text, spans = join_words(words)
    assert [text[start:end] for start, end in spans] == words
    tokens = TextTokenizer(wrap(name)).tokenize([text], offsets=True)[0]
    alignment = align(spans, tokens.offsets)
    assert len(alignment.word_tokens) == len(words)
    assert len(alignment.token_words) == len(tokens.ids)
    for (start, end), word in zip(tokens.offsets, alignment.token_words, strict=True):
        end = max(end, start + 1)  # the space in front of a word can be a token
        touched = [other for other, span in enumerate(spans) if max(start, span[0]) < min(end, span[1])]
        assert word == (touched[0] if touched else None)
    for span, token in zip(spans, alignment.word_tokens, strict=True):
        touching = [
            token for token in tokens.offsets if max(token[0], span[0]) < min(max(token[1], token[0] + 1), span[1])
        ]
        assert (token is None) == (not touching)
        assert token is None or tokens.offsets[token] in touching


def test_every_difficult_word_is_aligned_among_others(tokenizer: Any) -> None:
    text, spans = join_words(list(itertools.chain.from_iterable(("plain", word) for word in DIFFICULT_WORDS)))
    tokens = TextTokenizer(tokenizer).tokenize([text], offsets=True)[0]
    alignment = align(spans, tokens.offsets)
    plain = [alignment.word_tokens[index] for index in range(0, len(spans), 2)]
    assert [tokens.offsets[token][0] for token in plain] == [start for start, _ in spans[::2]]
    assert alignment.word_tokens[spans.index(next(span for span in spans if span[0] == span[1]))] is None


def test_labels_go_to_first_tokens_or_to_all() -> None:
    alignment = align([(0, 3), (3, 5), (6, 6), (7, 12)], [(0, 2), (2, 4), (4, 5), (7, 9), (9, 12), (12, 12)])
    assert alignment.word_tokens == [0, 2, None, 3]
    assert spread_labels(alignment, [5, 6, 7, 8]) == [5, -100, 6, 8, -100, -100]
    assert spread_labels(alignment, [5, 6, 7, 8], every_piece=True) == [5, 5, 6, 8, 8, -100]


def test_a_word_inside_another_words_token_shares_it_and_gets_no_label() -> None:
    alignment = align([(0, 2), (2, 5)], [(0, 5)])
    assert alignment.word_tokens == [0, 0]
    assert spread_labels(alignment, [1, 2]) == [1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("  \n", []),
        ("Hello, world!", ["Hello", ",", "world", "!"]),
        ("e\u0301te\u0301 x", ["e\u0301te\u0301", "x"]),
        ("हिन्दी में", ["हिन्दी", "में"]),
        ("a 👩‍💻b 🙂👍🏽 a^b", ["a", "👩‍💻", "b", "🙂", "👍🏽", "a", "^", "b"]),
        ("北京 is タワー", ["北", "京", "is", "タ", "ワ", "ー"]),
        ("שלום, العربية", ["שלום", ",", "العربية"]),
        ("ที่นี่", ["ที่", "นี่"]),
        ("snake_case 3.5%", ["snake_case", "3", ".", "5", "%"]),
        ("한국어 말", ["한국어", "말"]),
    ],
)
def test_words_of_a_text(text: Any, expected: Any) -> None:
    assert [text[start:end] for start, end in words_of(text)] == expected


@given(st.text())
def test_words_cover_everything_but_space(text: Any) -> None:
    spans = words_of(text)
    assert all(start < end for start, end in spans)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
    inside = {index for start, end in spans for index in range(start, end)}
    assert inside == {index for index, character in enumerate(text) if not character.isspace()}


@given(st.text(max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_trimming_equals_strip(text: Any, start: Any, end: Any) -> None:
    start, end = min(start, len(text)), min(end, len(text))
    low, high = trim(text, (start, max(start, end)))
    assert text[low:high] == text[start : max(start, end)].strip()


# ---------------------------------------------------------------------- frames


@pytest.mark.parametrize("pair", [False, True])
def test_special_tokens_equal_the_tokenizers_own(tokenizer: Any, pair: Any) -> None:
    texts = ("plain words", "two 北京") if pair else ("plain words",)
    ours = TextTokenizer(tokenizer)
    ids = [tokens.ids for tokens in ours.tokenize(texts)]
    encoded = ours.add_special_tokens(*ids)
    theirs = tokenizer(*texts, return_token_type_ids=True)
    assert encoded.ids == theirs["input_ids"]
    assert (
        encoded.types
        == (theirs["token_type_ids"] if "token_type_ids" in tokenizer.model_input_names else [0] * 99)[
            : len(encoded.ids)
        ]
    )
    assert encoded.ids[encoded.start : encoded.start + len(ids[-1])] == ids[-1]
    assert ours.num_special(pair) == len(encoded.ids) - sum(map(len, ids))


def test_a_slow_tokenizer_adds_special_tokens_but_has_no_offsets(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["<cls>", "<pad>", "<eos>", "<unk>", "L", "A", "G", "<mask>"]))
    theirs = EsmTokenizer(str(tmp_path / "vocab.txt"))
    ours = TextTokenizer(theirs)
    first, second = (tokens.ids for tokens in ours.tokenize(["LAG", "GA"]))
    assert ours.add_special_tokens(first).ids == theirs("LAG")["input_ids"]
    assert ours.add_special_tokens(first, second).ids == theirs("LAG", "GA")["input_ids"]
    with pytest.raises(ValueError, match="EsmTokenizer does not give the offsets of its tokens"):
        ours.tokenize(["LAG"], offsets=True)


def test_the_callers_tokenizer_keeps_its_truncation() -> None:
    theirs = wrap("wordpiece")
    theirs.backend_tokenizer.enable_truncation(4)
    ours = TextTokenizer(theirs)
    assert len(ours.tokenize(["plain words are here " * 5])[0].ids) > 4
    assert theirs.backend_tokenizer.truncation["max_length"] == 4


# ---------------------------------------------------------------------- windows


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_cover_everything_and_each_token_is_predicted_once(length: Any, size: Any, data: Any) -> None:
    overlap = data.draw(st.integers(0, size - 1))
    windows = cut_windows(length, size, overlap)
    assert windows[0].start == 0
    assert windows[-1].stop == length
    assert all(0 <= window.stop - window.start <= size for window in windows)
    assert all(first.stop - second.start == overlap for first, second in itertools.pairwise(windows))
    assert len(windows) == 1 or all(window.stop - window.start > overlap for window in windows)
    decided = [token for window in windows for token in range(window.core_start, window.core_stop)]
    assert decided == list(range(length))
    assert all(window.start <= window.core_start <= window.core_stop <= window.stop for window in windows)
    rows = [np.arange(window.start, window.stop) for window in windows]
    assert merge_windows(windows, rows).tolist() == list(range(length))


def test_a_token_is_predicted_in_the_window_with_most_context() -> None:
    windows = cut_windows(100, 16, 8)
    for window in windows:
        for token in range(window.core_start, window.core_stop):

            def context(other: Any, token: Any = token) -> Any:
                left = np.inf if other.start == 0 else token - other.start
                right = np.inf if other.stop == 100 else other.stop - 1 - token
                return min(left, right)

            seen = [context(other) for other in windows if other.start <= token < other.stop]
            assert context(window) >= max(seen) - 1  # an even overlap has no middle token


def test_an_overlap_as_long_as_the_window_raises() -> None:
    with pytest.raises(ValueError, match=r"overlap is 4; it must be at least 0 and less than the window size 4"):
        cut_windows(10, 4, 4)


# ---------------------------------------------------------------------- spans

scores = st.lists(st.integers(-5, 5).map(float), max_size=9)


@given(scores, st.data())
def test_best_spans_equal_brute_force(starts: Any, data: Any) -> None:
    ends = data.draw(st.lists(st.integers(-5, 5).map(float), min_size=len(starts), max_size=len(starts)))
    n_best, longest = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12))
    every = [(i, j, starts[i] + ends[j]) for i in range(len(starts)) for j in range(i, len(starts)) if j - i < longest]
    expected = sorted(every, key=lambda span: (-span[2], span[0], span[1]))[:n_best]
    assert best_spans(np.array(starts), np.array(ends), n_best, longest) == expected


def test_best_spans_exclude_positions_of_minus_infinity() -> None:
    barred = np.array([-np.inf, 1.0, -np.inf])
    assert best_spans(barred, barred, 5, 3) == [(1, 1, 2.0)]
    assert best_spans(np.full(3, -np.inf), np.zeros(3), 5, 3) == []


@given(st.data())
@settings(max_examples=60)
def test_answers_over_windows_equal_brute_force(data: Any) -> None:
    """Compares with every span of every window; some tokens are single characters."""
    offsets = [(0, 0), (0, 1), (0, 1), (0, 1), (2, 4), (5, 6), (6, 9), (9, 9)]
    windows = []
    for window in cut_windows(len(offsets), 5, 2):
        size = window.stop - window.start
        numbers = [data.draw(st.lists(st.integers(-9, 9).map(float), min_size=size, max_size=size)) for _ in "se"]
        windows.append((np.array(numbers[0]), np.array(numbers[1]), offsets[window.start : window.stop]))
    best: dict[tuple[int, int], float] = {}
    for starts, ends, places in windows:
        for i, j in itertools.combinations_with_replacement(range(len(places)), 2):
            if j - i < 3 and all(places[k][0] < places[k][1] for k in (i, j)):
                span = (places[i][0], places[j][1])
                best[span] = max(best.get(span, -np.inf), starts[i] + ends[j])
    expected = sorted(best.items(), key=lambda item: (-item[1], item[0]))[:3]
    assert best_answers(windows, n_best=3, max_tokens=3) == [ScoredSpan(*span, score) for span, score in expected]


@settings(max_examples=60, deadline=None)
@given(words=words, name=st.sampled_from(list(TOKENIZERS)), data=st.data())
def test_answer_spans_cover_the_tokens_of_the_answer(words: Any, name: Any, data: Any) -> None:
    text, spans = join_words(["plain", *words])
    tokens = TextTokenizer(wrap(name)).tokenize([text], offsets=True)[0]
    start, end = data.draw(st.sampled_from(spans))
    found = tokens_of_span(tokens.offsets, start, end)
    if found is None:
        assert not any(a < b and a <= start and b >= end > start for a, b in tokens.offsets)
    else:
        first, last = tokens.offsets[found[0]], tokens.offsets[found[1]]
        assert first[0] <= start < first[1]
        assert last[0] < end <= last[1]


def test_a_window_that_cuts_an_answer_does_not_contain_it() -> None:
    offsets = [(0, 2), (3, 5), (6, 8)]
    assert tokens_of_span(offsets, 3, 8) == (1, 2)
    assert tokens_of_span(offsets[:2], 3, 8) is None
    assert tokens_of_span(offsets, 4, 5) == (1, 1)
    assert tokens_of_span([], 0, 1) is None
