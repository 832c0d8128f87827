"""XTREME: files per language, zero-shot transfer from English, and its metrics against independent code."""

from __future__ import annotations

import json
import re
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from seqeval.metrics import f1_score
from typer.testing import CliRunner

from bertblocks import (
    BertBlocksForMaskedLM,
    BertBlocksForQuestionAnswering,
    BertBlocksForTokenClassification,
    Predictor,
)
from bertblocks.cli.main import app
from bertblocks.evaluation.mlqa import answer_scores, answer_words
from bertblocks.evaluation.xtreme import TASKS, plain_tag_scores, read_tags, run_xtreme
from bertblocks.text.tables import DataError
from tests.evaluation.helpers import label_config, save_model

WORDS = "Anna saw Berlin and Rom in der Stadt . who went to the red river ?"
NER = [[("Anna", "B-PER"), ("saw", "O"), ("Berlin", "B-LOC")], [("Rom", "B-LOC"), ("Stadt", "I-LOC"), (".", "O")]]
POS = [[("Anna", "PROPN"), ("saw", "VERB"), ("Berlin", "PROPN")], [("the", "DET"), ("red", "ADJ"), ("river", "NOUN")]]


def write_tags(path: Path, sentences: list[list[tuple[str, str]]], prefix: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("".join(f"{prefix}{word}\t{tag}\n" for word, tag in rows) for rows in sentences))


def write_questions(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    qas = [
        {"id": str(i), "question": "who went ?", "answers": [{"text": text, "answer_start": start}]}
        for i, (text, start) in enumerate([("Anna", 0), ("the river", 13)])
    ]
    paragraph = {"context": "Anna went to the river .", "qas": qas}
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "x", "paragraphs": [paragraph]}]}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xtreme")
    for split in ("train", "dev", "test"):
        write_tags(folder / "panx" / "en" / split, NER, "en:")
        write_tags(folder / "udpos" / f"{split}-en.tsv", POS)
    write_tags(folder / "panx" / "de" / "test.tsv", NER[::-1])
    write_tags(folder / "udpos" / "test-de.tsv", POS[:1])
    write_questions(folder / "xquad" / "xquad.en.json")
    write_questions(folder / "xquad.de.json")
    for language in ("en", "zh"):
        write_questions(folder / "mlqa" / "MLQA_V1" / "test" / f"test-context-{language}-question-{language}.json")
    write_questions(folder / "mlqa" / "MLQA_V1" / "test" / "test-context-en-question-zh.json")
    return folder


def test_files_are_found_by_language(data: Path) -> None:
    found = {name: list(task.find_languages(data, "test")) for name, task in TASKS.items()}
    assert found == {"panx": ["de", "en"], "udpos": ["de", "en"], "xquad": ["de", "en"], "mlqa": ["en", "zh"]}
    assert read_tags(data / "panx" / "en" / "test", "en")[0].words == ["Anna", "saw", "Berlin"]


def test_tagging_is_trained_on_english_and_scored_by_language(data: Path, tmp_path: Path) -> None:
    start = save_model(tmp_path / "lm", BertBlocksForMaskedLM, [WORDS])
    result = run_xtreme(start, data, tmp_path / "out", ["panx"], epochs=1)[0]
    predictor = Predictor(tmp_path / "out" / "panx")
    for language, sentences in (("en", NER), ("de", NER[::-1])):
        found = predictor.tag([[word for word, _ in rows] for rows in sentences], level="words")
        predicted = [[word.label for word in words] for words in found]
        gold = [[tag for _, tag in rows] for rows in sentences]
        assert result.parts[language]["f1"] == pytest.approx(f1_score(gold, predicted))
    assert result.score == pytest.approx(100 * np.mean([scores["f1"] for scores in result.parts.values()]))


def chunks(tags: list[str]) -> set[tuple[int, int, str]]:
    """Runs of equal tags; tags with S stand alone."""
    found, start = set(), 0
    for tag, run in groupby(tags):
        size = len(list(run))
        step = 1 if tag.startswith("S") else size
        found |= {(i, i + step, tag) for i in range(start, start + size, step)}
        start += size
    return found


def test_plain_tags_are_scored_by_runs() -> None:
    generator = np.random.default_rng(0)
    gold, predicted = (
        [generator.choice(["NOUN", "VERB", "SCONJ", "CCONJ", "INTJ"], 9).tolist() for _ in range(20)] for _ in range(2)
    )
    hits = sum(len(chunks(a) & chunks(b)) for a, b in zip(gold, predicted, strict=True))
    total = sum(len(chunks(tags)) for tags in [*gold, *predicted])
    scores = plain_tag_scores(gold, predicted)
    assert scores["f1"] == pytest.approx(2 * hits / total)
    assert scores["accuracy"] == pytest.approx(np.mean(np.array(gold) == np.array(predicted)))
    assert hits > 0


def test_mlqa_knows_articles_and_chinese() -> None:
    assert answer_words("¿El río, rojo?", "es") == ["río", "rojo"]
    assert answer_words("النهر", "ar") == ["نهر"]
    assert answer_words("《红河》 red river", "zh") == ["红", "河", "red", "river"]
    assert answer_words("the der", "de") == ["the"]
    # two of three characters are shared: 2 * 2 / (3 + 2)
    assert answer_scores(["红河水"], "红河", "zh") == (0.0, pytest.approx(0.8))
    assert answer_scores(["sea", "The River"], "river", "en") == (1.0, 1.0)
    assert answer_scores(["sea"], "river", "en") == (0.0, 0.0)


def test_answers_are_scored_by_language_and_shown(data: Path, tmp_path: Path) -> None:
    model = save_model(tmp_path / "qa", BertBlocksForQuestionAnswering, [WORDS])
    results = {result.task: result for result in run_xtreme(model, data, tasks=["xquad", "mlqa"], train=False)}
    context = "Anna went to the river ."
    answers = [found.text for found in Predictor(model, dtype=torch.float32).answer([("who went ?", context)] * 2)]
    pairs = []
    for said, gold in zip(answers, ("anna", "river"), strict=True):
        words = [word for word in re.findall(r"\w+", said.lower()) if word != "the"]
        pairs.append((words == [gold], 2 * (gold in words) / (len(words) + 1)))
    exact, f1 = 100 * np.mean(pairs, axis=0)
    for task, languages in (("xquad", ("de", "en")), ("mlqa", ("en",))):
        for language in languages:
            assert results[task].parts[language] == {"exact_match": pytest.approx(exact), "f1": pytest.approx(f1)}
    assert results["xquad"].score == pytest.approx((exact + f1) / 2)
    arguments = ["evaluate", str(model), "--task", "xtreme", "--data", str(data), "tasks=[xquad,mlqa]", "train=false"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"XTREME, mean over languages\s.*xquad\s+mlqa\s+mean", shown.output)
    assert "zh" in shown.output


def test_parts_of_speech_are_scored_as_they_are(data: Path, tmp_path: Path) -> None:
    labels = label_config("PROPN", "VERB", "DET", "ADJ", "NOUN")
    model = save_model(tmp_path, BertBlocksForTokenClassification, [WORDS], **labels)
    result = run_xtreme(model, data, tasks=["udpos"], languages=["en"], train=False)[0]
    found = Predictor(model, dtype=torch.float32).tag([[word for word, _ in rows] for rows in POS], level="words")
    right = [
        w.label == tag for words, rows in zip(found, POS, strict=True) for w, (_, tag) in zip(words, rows, strict=True)
    ]
    assert result.parts["en"]["accuracy"] == pytest.approx(np.mean(right))


def test_bad_files_are_named(data: Path, tmp_path: Path) -> None:
    (tmp_path / "panx" / "de").mkdir(parents=True)
    path = tmp_path / "panx" / "de" / "test"
    path.write_text("Anna\tB-PER\nsaw\n")
    with pytest.raises(DataError, match=r"panx.de.test line 2: 'saw' is not a word, a tab and a tag"):
        run_xtreme("none", tmp_path, tasks=["panx"])
    with pytest.raises(DataError, match=r"has no files of udpos; they are named udpos/xx/test, "):
        run_xtreme("none", tmp_path, tasks=["udpos"])
    with pytest.raises(DataError, match=r"'fr' is not a language of panx; there are de, en"):
        run_xtreme("none", data, tasks=["panx"], languages=["fr"])
    path.write_text("Anna\tB-PER\n")
    with pytest.raises(DataError, match=r"panx.en.train does not exist \(nor does .*train-en\.tsv\)"):
        run_xtreme("none", tmp_path, tmp_path / "out", ["panx"])
