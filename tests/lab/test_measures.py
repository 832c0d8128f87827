"""Measures of trained models, against a few lines of independent code."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from bertblocks import load
from bertblocks.core.settings import RecipeError
from bertblocks.evaluation.needle import find_words, make_samples
from bertblocks.lab.results import TRIALS
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.tables import DataError
from tests.lab.conftest import tiny_values
from tests.lab.helpers import Write, plan_of, run


def test_fine_tuning_is_a_measure(write_study: Write, tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [(f"the {noun} is near", noun) for noun in chance.choices(["river", "house"], k=40)]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    measure = {
        "kind": "finetune",
        "name": "nouns",
        "train": str(tmp_path / "rows.csv"),
        "eval": str(tmp_path / "rows.csv"),
        "settings": {"epochs": 1, "learning_rate": 1e-3, "batch_size": 8},
    }
    path = write_study(measures=[measure], seeds=1, variants={"rope": {}})
    _, results, _ = run(path, tmp_path / "study")
    (found,) = results.measurements
    assert found.measure == "nouns"
    assert 0 <= found.value <= 1
    if results.measurements[0].examples is not None:
        assert found.value == pytest.approx(found.examples.mean())
    assert not list((tmp_path / "study").rglob("work-*"))
    (tmp_path / "rows.csv").unlink()
    assert run(tmp_path / "study", tmp_path / "study")[2] == []


def test_speed_and_bits_per_byte(write_study: Write, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").unlink(missing_ok=True)
    (tmp_path / "two.txt").write_text("the river is near the house .\nthe stone .\n")
    measures = [
        {"kind": "pseudo_perplexity", "data": str(tmp_path / "two.txt")},
        {"kind": "speed", "length": 16, "batch": 2, "seconds": 0.01},
    ]
    _, results, names = run(write_study(measures=measures, seeds=1), tmp_path / "study")
    assert names == ["texts", "rope-seed0", "none-seed0", "rope-seed0", "none-seed0"]
    found = {value.measure: value for value in results.measurements if value.variant == "rope"}
    assert found["pseudo_bits_per_byte"].weights.tolist() == [29.0, 11.0]
    assert found["inference_speed"].value > 0
    assert found["training_speed"].value > 0


def test_needle_is_the_share_of_facts_that_the_model_fills_in(write_study: Write, tmp_path: Path) -> None:
    changes = {**tiny_values(tmp_path)["changes"], "model.config.max_position_embeddings": 128}
    measure = {"kind": "needle", "lengths": [96, 128], "depths": [0.0, 1.0], "samples": 6}
    path = write_study(changes=changes, measures=[measure], seeds=1, variants={"rope": {}})
    _, results, _ = run(path, tmp_path / "study")
    (found,) = results.measurements
    (place,) = (tmp_path / "study" / TRIALS).iterdir()
    model, tokenizer = load(place / "run" / "model", task="masked-lm")
    own = TextTokenizer(tokenizer)
    words = find_words(own)
    assert "river" in words
    expected = []
    for length in (96, 128):
        for depth in (0.0, 1.0):
            samples = list(make_samples(own, words, tokenizer.mask_token_id, length, depth, 6))
            logits = [
                model(torch.tensor([sample.ids])).logits[0, sample.mask, list(words.values())] for sample in samples
            ]
            hits = [int(row.argmax()) == sample.answer for row, sample in zip(logits, samples, strict=True)]
            assert all(len(sample.ids) == length for sample in samples)
            expected.append(np.mean(hits))
    assert found.examples.tolist() == expected
    assert found.value == pytest.approx(np.mean(expected))


def test_embeddings_are_scored_without_fine_tuning(write_study: Write, tmp_path: Path) -> None:
    pairs = [
        ("the river is near the house .", "the river is near the stone .", 4.0),
        ("the water is near the light .", "the music .", 1.0),
        ("the horse .", "the horse is near the paper .", 3.0),
        ("the paper is near the house .", "the paper is near the house .", 5.0),
        ("the light .", "the stone is near the stone .", 0.0),
    ]
    lines = [f"{first},{second},{score}" for first, second, score in pairs]
    (tmp_path / "pairs.csv").write_text("\n".join(["sentence1,sentence2,score", *lines]))
    measure = {"kind": "embeddings", "data": str(tmp_path / "pairs.csv")}
    _, results, _ = run(write_study(measures=[measure], seeds=1, variants={"rope": {}}), tmp_path / "study")
    (found,) = results.measurements
    (place,) = (tmp_path / "study" / TRIALS).iterdir()
    model, tokenizer = load(place / "run" / "model", task="base")
    assert tokenizer is not None

    def embed(text: str) -> torch.Tensor:
        return model(tokenizer(text, return_tensors="pt")["input_ids"]).last_hidden_state[0].mean(0)

    with torch.no_grad():
        cosines = [torch.cosine_similarity(embed(first), embed(second), dim=0).item() for first, second, _ in pairs]
    assert found.value == pytest.approx(stats.spearmanr(cosines, [score for *_, score in pairs]).statistic)
    assert results.measures["embeddings"].higher_is_better


def test_measures_that_cannot_run_are_rejected(write_study: Write, tmp_path: Path) -> None:
    for measure in ({"kind": "needle", "lengths": [16, 64]}, {"kind": "speed", "length": 64}):
        message = f"measures: {measure['kind']} reads 64 tokens, but rope reads at most 32"
        with pytest.raises(RecipeError, match=message):
            plan_of(write_study(measures=[measure]))
    (tmp_path / "pairs.csv").write_text("text\nonly one text\n")
    with pytest.raises(DataError, match=r"pairs.csv"):
        plan_of(write_study(measures=[{"kind": "embeddings", "data": str(tmp_path / "pairs.csv")}]))
