"""Baselines of classification: against scikit-learn, counts and formulas."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge

from bertblocks import BertBlocksConfig, BertBlocksForSequenceClassification
from bertblocks.tasks.answer.task import AnswerTask
from bertblocks.tasks.classify.few_shot import FewShotTask, contrast_labels
from bertblocks.tasks.classify.methods import AnyMethodTask
from bertblocks.tasks.classify.probe import STRENGTHS, choose_strength, fit_probe, head_vectors, set_head
from bertblocks.tasks.classify.task import ClassifyTask, TextExample
from bertblocks.tasks.features import Feature
from bertblocks.tasks.labels import Labels
from bertblocks.tasks.settings import AnswerSettings, ClassifySettings, TagSettings
from bertblocks.tasks.tag.examples import TaggedExample
from bertblocks.tasks.tag.task import TagTask
from bertblocks.text.records import DataError
from bertblocks.text.squad import GoldAnswer, Question

SINGLE: Literal["single_label_classification"] = "single_label_classification"


def clusters(classes: int, count: int = 90, size: int = 6) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    targets = np.arange(count) % classes
    return rng.normal(size=(classes, size))[targets] * 2 + rng.normal(size=(count, size)), targets


def standardize(x: np.ndarray) -> np.ndarray:
    centered = x - x.mean(axis=0)
    return centered / centered.std()


@pytest.mark.parametrize("classes", [2, 3])
def test_a_probe_predicts_as_logistic_regression_does(classes: int) -> None:
    x, y = clusters(classes)
    probe = fit_probe(x, y, Labels(SINGLE, list("abc")[:classes]), strength=0.1)
    theirs = LogisticRegression(C=0.1, max_iter=1000).fit(standardize(x), y)
    logits = torch.from_numpy(probe.logits(x))
    np.testing.assert_allclose(logits.softmax(1), theirs.predict_proba(standardize(x)), atol=1e-8)


def test_a_mean_that_all_vectors_share_changes_nothing() -> None:
    x, y = clusters(3)
    labels = Labels(SINGLE, list("abc"))
    probe, shifted = (fit_probe(vectors, y, labels, strength=0.1).logits(vectors) for vectors in (x, x + 100.0))
    np.testing.assert_allclose(shifted, probe, atol=1e-8)


def test_a_label_without_examples_is_never_predicted() -> None:
    x, y = clusters(2)
    probe = fit_probe(x, 2 * y, Labels(SINGLE, ["a", "b", "c"]))
    assert set(probe.logits(x).argmax(1)) == {0, 2}


def test_other_problems_have_probes_too() -> None:
    x, y = clusters(3)
    numbers = x @ np.arange(6.0) + 3
    probe = fit_probe(x, numbers, Labels("regression", []))
    strengths = [Ridge(1 / strength).fit(standardize(x), numbers).predict(standardize(x)) for strength in STRENGTHS]
    assert min(np.abs(probe.logits(x)[:, 0] - found).max() for found in strengths) < 1e-8
    both = np.stack([y == 0, np.zeros(len(y))], axis=1)
    logits = fit_probe(x, both, Labels("multi_label_classification", ["first", "never"])).logits(x)
    theirs = LogisticRegression(C=1.0, max_iter=1000).fit(standardize(x), y == 0)
    np.testing.assert_allclose(logits[:, 0], theirs.decision_function(standardize(x)), atol=1e-8)
    assert (logits[:, 1] < 0).all()


def test_noise_gets_the_strongest_regularization() -> None:
    rng = np.random.default_rng(0)
    assert choose_strength(rng.normal(size=(60, 40)), np.arange(60) % 3 // 2) == STRENGTHS[0]
    assert choose_strength(np.eye(2), np.arange(2)) == 1.0  # too few for cross-validation


def test_the_head_computes_what_the_probe_does() -> None:
    torch.manual_seed(0)
    model = BertBlocksForSequenceClassification(BertBlocksConfig.from_preset("mini", num_labels=3)).eval()
    features = [Feature([5 + i, 6, 7 + i % 3][: 1 + i % 3], [0, 0, 0][: 1 + i % 3], i % 3) for i in range(70)]
    vectors = head_vectors(model, features)
    probe = fit_probe(vectors, np.array([feature.target for feature in features]), Labels(SINGLE, list("abc")))
    set_head(model, probe)
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([feature.ids])).logits for feature in features])
    np.testing.assert_allclose(logits, probe.logits(vectors), atol=1e-4)


class Encoder:
    """Vectors that are known: the numbers in the text."""

    def encode(self, texts: list[str], normalize: bool = True) -> np.ndarray:
        vectors = np.array([[float(number) for number in text.split()] for text in texts])
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True) if normalize else vectors


def task_of(examples: list[TextExample], names: list[str], **settings: Any) -> ClassifyTask:
    task = AnyMethodTask(ClassifySettings(**settings))
    task.labels = Labels(SINGLE, names)
    return task


def test_baselines_are_the_majority_and_logistic_regression() -> None:
    x, y = clusters(3)
    examples = [TextExample(" ".join(map(str, v)), None, int(t), "") for v, t in zip(x, y, strict=True)]
    train, held_out = examples[:61], examples[61:]
    found = task_of(examples, list("abc")).baselines(Encoder(), train, held_out)  # type: ignore[arg-type]
    assert found["majority"]["accuracy"] == pytest.approx(np.mean(y[61:] == 0))
    scaled = x / x[:61].std()
    model = LogisticRegression(C=choose_strength(scaled[:61], y[:61]), max_iter=1000).fit(scaled[:61], y[:61])
    assert found["linear probe"]["accuracy"] == pytest.approx(model.score(scaled[61:], y[61:]))


def test_the_probe_of_pairs_reads_their_difference_and_product() -> None:
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 80, 4))
    second[::2] = first[::2] + 0.1 * second[::2]
    y = (np.arange(80) % 2 == 0).astype(int)
    examples = [
        TextExample(" ".join(map(str, a)), " ".join(map(str, b)), int(t), "")
        for a, b, t in zip(first, second, y, strict=True)
    ]
    found = task_of(examples, ["no", "yes"]).baselines(Encoder(), examples, examples)  # type: ignore[arg-type]
    u, v = (side / np.linalg.norm(side, axis=1, keepdims=True) for side in (first, second))
    x = np.concatenate((np.abs(u - v), u * v), axis=1)
    x /= x.std()
    model = LogisticRegression(C=choose_strength(x, y), max_iter=1000).fit(x, y)
    assert found["linear probe"]["accuracy"] == pytest.approx(model.score(x, y))


def test_baselines_of_tags_are_counts() -> None:
    def example(words: str, tags: str) -> TaggedExample:
        starts = [0]
        for word in words.split():
            starts.append(starts[-1] + len(word) + 1)
        spans = [(start, start + len(word)) for start, word in zip(starts, words.split(), strict=False)]
        return TaggedExample(words, spans, tags.split(), words.split(), "")

    task = TagTask(TagSettings())
    task.names = ["N", "V"]
    train = [example("fish swim", "N V"), example("we fish fish", "N V N"), example("they sleep", "N V")]
    found = task.baselines(Encoder(), train, [example("fish swim fast", "N V V")])  # type: ignore[arg-type]
    assert found["majority"]["accuracy"] == pytest.approx(1 / 3)  # N N N
    assert found["by word"]["accuracy"] == pytest.approx(2 / 3)  # N V N


def test_baselines_of_answers_are_a_sentence_and_none() -> None:
    context = "It rained. Ann saw a fox. Nobody was there."
    questions = [
        Question("1", "Who saw a fox?", context, [GoldAnswer("Ann saw a fox", 11)], ""),
        Question("2", "Why?", context, [], ""),
    ]
    task = AnswerTask(AnswerSettings())
    found = task.baselines(Encoder(), [], questions)  # type: ignore[arg-type]
    assert found["best sentence"]["exact_match"] == 50.0
    assert found["no answer"]["exact_match"] == 50.0
    assert list(task.baselines(Encoder(), [], questions[:1])) == ["best sentence"]  # type: ignore[arg-type]


# ---------------------------------------------------------------------- few-shot


def test_the_contrastive_loss_sums_over_all_positive_and_negative_pairs() -> None:
    torch.manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(7, 5, dtype=torch.float64), dim=-1)
    labels = torch.tensor([0, 1, 0, 2, 1, 0, 2])
    pairs = [(i, j) for i in range(7) for j in range(i)]
    positive = [vectors[i] @ vectors[j] for i, j in pairs if labels[i] == labels[j]]
    negative = [vectors[i] @ vectors[j] for i, j in pairs if labels[i] != labels[j]]
    expected = torch.log(1 + sum(torch.exp(20 * (n - p)) for p in positive for n in negative))
    torch.testing.assert_close(contrast_labels(vectors, labels), expected)
    assert contrast_labels(vectors, torch.zeros(7)) == 0
    assert contrast_labels(vectors, torch.arange(7)) == 0


def few_shot(targets: list[int]) -> FewShotTask:
    task = FewShotTask(ClassifySettings())
    task.remember(np.array(targets))
    return task


def test_partners_have_the_same_label_and_depend_on_the_key_alone() -> None:
    targets = [0, 0, 0, 1, 1, 2]
    task = few_shot(targets)
    chosen, keys = np.array([0, 3, 5, 1]), np.arange(4, dtype=np.uint64) << np.uint64(62)
    items = task.add_partners(chosen, keys)
    assert items[::2].tolist() == chosen.tolist()
    assert [targets[i] for i in items[1::2]] == [targets[i] for i in items[::2]]
    assert items[3] == 4  # the only other one
    assert items[5] == 5  # a label with one example
    np.testing.assert_array_equal(task.add_partners(chosen[1:], keys[1:]), items[2:])
    many = task.add_partners(np.zeros(200, dtype=int), np.arange(200, dtype=np.uint64) * np.uint64(2**64 // 200))
    assert set(many[1::2]) == {1, 2}


@pytest.mark.parametrize(
    ("settings", "pair", "is_encoder", "count", "method"),
    [
        ({}, None, True, 20, "few-shot"),
        ({}, None, False, 20, "full"),
        ({}, "b", True, 20, "full"),
        ({}, None, True, 65, "full"),
        ({"method": "full"}, None, True, 20, "full"),
        ({"head": "random"}, None, True, 20, "full"),
        ({"method": "few-shot"}, None, False, 65, "few-shot"),
    ],
)
def test_the_method_follows_from_the_examples(
    settings: Any, pair: Any, is_encoder: bool, count: int, method: str
) -> None:
    examples = [TextExample("a", pair, i % 2, "") for i in range(count)]
    assert task_of(examples, ["x", "y"], **settings).for_examples(examples, is_encoder, "mean").method == method


@pytest.mark.parametrize(
    ("settings", "pair", "message"),
    [
        ({}, "b", "it needs single texts, not pairs; use method=full"),
        ({"parallel": "fsdp"}, None, "it does not work with parallel=fsdp"),
    ],
)
def test_unsupported_few_shot_settings_give_one_sentence(settings: Any, pair: Any, message: str) -> None:
    examples = [TextExample("a", pair, i % 2, "") for i in range(4)]
    with pytest.raises(DataError, match=message):
        task_of(examples, ["x", "y"], method="few-shot", **settings).for_examples(examples, True, "mean")
