"""Run folders with every file that a page reads, written without training."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

EVIL = "<script>alert('&')</script>"
HEBREW = "שלום עולם, זה טקסט מימין לשמאל"


def write_lines(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")


def metric_lines(metric: str, evaluations: int, steps: int = 200) -> list[dict[str, Any]]:
    """A loss that falls, and a score (or a loss, by its name) that improves from step 0."""
    rng = random.Random(0)
    every = steps // evaluations

    def score(step: int) -> dict[str, Any]:
        share = 1 - 0.9 * 2 ** (-4 * step / steps) + rng.gauss(0, 0.01)
        return {"step": step, metric: 8 - 4 * share if "loss" in metric else min(share, 1.0), "other": share / 2}

    lines = [score(0)]
    for step in range(1, steps + 1):
        common = {"step": step, "tokens": 500 * step, "loss": 4 * 2 ** (-3 * step / steps) * rng.uniform(0.7, 1.3)}
        machine = {"tokens_per_second": 9000 * rng.uniform(0.8, 1.2), "memory": 600_000_000 + 10_000 * step}
        training = {"learning_rate": 1e-3 * (1 - step / steps), "gradient_norm": rng.uniform(0.5, 3), "packing": 0.99}
        lines.append({**common, **training, **machine, "seconds": 0.06 * step})
        if step % every == 0:
            lines.append(score(step))
    return lines


def write_facts(folder: Path, **values: Any) -> None:
    facts = {
        "name": folder.name,
        "started": "2026-11-18T01:02:03+00:00",
        "command": "bertblocks finetune classify --model minilm --train 'a b.csv' epochs=3",
        "parameters": 22_713_216,
        "versions": {"python": "3.12.1", "torch": "2.13.0"},
        "machine": {"processor": "a CPU", "cores": 2},
        "data": {"train.csv": "ab" * 32},
    }
    (folder / "run.json").write_text(json.dumps({**facts, **values}), encoding="utf-8")


def write_finetuning(
    folder: Path,
    task: str,
    records: list[dict[str, Any]],
    metric: str = "accuracy",
    evaluations: int = 10,
    **options: Any,
) -> Path:
    """A finished fine-tuning run, or a stopped one with `is_finished=False`."""
    folder.mkdir(parents=True)
    settings = {"task": task, "model": "models/minilm", "train": "train.csv", "learning_rate": None, "seed": 0}
    settings |= options.get("settings", {})
    (folder / "finetune.json").write_text(json.dumps(settings), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", metric_lines(metric, evaluations))
    write_lines(folder / "predictions.jsonl", records)
    write_facts(folder)
    if options.get("is_finished", True):
        results = {
            "metric": metric,
            "scores": {metric: options.get("score", 0.93), "f1_macro": 0.9},
            "intervals": {},
            "confidence": [0.9, 0.96],
            "chosen": {"learning_rate": 2.5e-4, "steps": 200, "best_step": 200, "precision": "bf16", "threads": 2},
            "baselines": {"majority": {metric: 0.3, "f1_macro": 0.1}, "linear probe": {metric: 0.8, "f1_macro": 0.7}},
            "test": {metric: 0.91, "f1_macro": 0.88},
            "remarks": [],
        }
        (folder / "results.json").write_text(json.dumps(results), encoding="utf-8")
    return folder


def class_records(labels: int, count: int = 300) -> list[dict[str, Any]]:
    rng = random.Random(1)
    names = [f"label_number_{number}_of_many" for number in range(labels)]
    names[0] = EVIL
    records = []
    for number in range(count):
        gold = rng.choice(names)
        predicted = gold if rng.random() < 0.8 else rng.choice(names)
        share = rng.uniform(0.3, 1)
        text = f"{EVIL} text {number} " + "word " * rng.randrange(40) if number % 7 else HEBREW
        own = share if gold == predicted else (1 - share) / 2
        records.append(
            {"text": text, "gold": gold, "predicted": predicted, "probability": share, "gold_probability": own}
        )
    return records


def tag_records() -> list[dict[str, Any]]:
    text = f"Anna Berg lives in Oslo and likes {EVIL}"
    words = [[0, 4], [5, 9], [10, 15], [16, 18], [19, 23], [24, 27], [28, 33], [34, len(text)]]
    gold = ["B-PER", "I-PER", "O", "O", "B-LOC", "O", "O", "O"]
    wrong = ["B-PER", "O", "O", "O", "B-ORG", "O", "O", "B-LOC"]
    hebrew = [[0, 4], [5, 9]]
    return [
        {"text": text, "words": words, "gold": gold, "predicted": wrong},
        {"text": text, "words": words, "gold": gold, "predicted": gold},
        {"text": HEBREW[:9], "words": hebrew, "gold": ["B-PER", "O"], "predicted": ["O", "B-PER"]},
    ] * 5


def answer_records() -> list[dict[str, Any]]:
    context = f"Anna lives in Oslo {EVIL}. " + "The weather was fine. " * 40
    gold = [{"text": "in Oslo", "start": 11, "end": 18}]
    found = {"text": "Oslo", "start": 14, "end": 18}
    common = {"question": f"Where? {EVIL}", "context": context, "score": 3.0, "no_answer_score": 1.0}
    none = {"text": "", "start": 0, "end": 0}
    return [
        {**common, "gold": gold, "predicted": found, "f1": 2 / 3},
        {**common, "gold": gold, "predicted": gold[0], "f1": 1.0},
        {**common, "gold": [], "predicted": found, "f1": 0.0},
        {**common, "gold": gold, "predicted": none, "f1": 0.0},
    ] * 4


def pair_records() -> list[dict[str, Any]]:
    rng = random.Random(2)
    scores = [rng.uniform(0, 5) for _ in range(200)]
    return [
        {"texts": [f"first {n} {EVIL}", HEBREW], "gold": score, "cosine": score / 6 + rng.uniform(-0.2, 0.2)}
        for n, score in enumerate(scores)
    ]


def retrieval_records() -> list[dict[str, Any]]:
    rng = random.Random(3)
    records = []
    for number in range(80):
        rank = 1 if rng.random() < 0.7 else rng.randrange(2, 300)
        near = rng.uniform(0.5, 1)
        texts = {"query": f"{EVIL} {number}", "gold": f"document {number}", "nearest": HEBREW}
        records.append({**texts, "rank": rank, "gold_cosine": near / rank**0.1, "nearest_cosine": near})
    return records


def multi_records() -> list[dict[str, Any]]:
    records = []
    for number in range(60):
        gold = ["a", EVIL][: number % 3]
        found = ["a", EVIL][: (number * 7) % 3]
        shares = {"a": 0.4 + 0.01 * number, EVIL: 0.5}
        records.append({"text": f"text {number}", "gold": gold, "predicted": found, "probabilities": shares})
    return records


def number_records() -> list[dict[str, Any]]:
    rng = random.Random(4)
    return [{"text": f"{EVIL} {n}", "gold": n / 10, "predicted": n / 10 + rng.gauss(0, 0.5)} for n in range(60)]


def write_pretraining(folder: Path, evaluations: int = 10, is_finished: bool = True) -> Path:
    """A pretraining run."""
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps({"name": folder.name, "optimizer": {"lr": 1e-3}}), encoding="utf-8")
    write_lines(folder / "metrics.jsonl", metric_lines("held_out_loss", evaluations))
    write_facts(folder, command="bertblocks pretrain demo")
    guesses = [[EVIL, 0.75], ["dog", 0.2]]
    groups = [{"from": 0, "to": 1, "tokens": 9, "loss": 7.5}, {"from": 1, "to": 10, "tokens": 90, "loss": 4.25}]
    results = {
        "metrics": {"held_out_loss": 3.25, "held_out_accuracy": 0.42, "unigram_loss": 7.5, "unigram_accuracy": 0.05},
        "filled": [{"text": f"a [MASK] {EVIL}", "answer": "cat", "guesses": guesses}],
        "summary": "A small encoder.",
        "facts": {"tokens": 4_096_000, "corpus <x>": "docstrings"},
        "by_frequency": groups,
        "by_position": groups,
        "config": {"hidden_size": 64},
    }
    if is_finished:
        (folder / "result.json").write_text(json.dumps(results), encoding="utf-8")
    return folder
