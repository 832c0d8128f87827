"""Pretraining with the demo recipe and with transformers' Trainer in turns: the same weights, texts and tokens.

Run with `make bench`, or alone with `python -m benchmarks --only pretraining`. Both train on documents split at
the recipe's length and mask 30 % of the tokens. transformers pads each batch to its longest text
(DataCollatorForLanguageModeling); BertBlocks packs. Both use the precision that BertBlocks chooses on this machine. A
round of each has about the same number of real tokens, and rates count only real tokens.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from rich.console import Console
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from benchmarks.races import OURS, race
from bertblocks import to_huggingface
from bertblocks.training import loop
from bertblocks.training.build import build_model, build_objectives
from bertblocks.training.corpora import TokenizedCorpus, prepare_corpus
from bertblocks.training.distributed import World, join
from bertblocks.training.objective_sections import MaskedLM
from bertblocks.training.optimizer_sections import AdamW
from bertblocks.training.precision import choose_precision
from bertblocks.training.pretraining_task import PretrainingTask
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe, read_recipe
from bertblocks.training.training_plan import TrainingPlan

GOAL = 4.5
#: Steps of BertBlocks per round. The first step does not count on either side.
STEPS = 13
PEER = "transformers Trainer"


class Setting:
    """What both sides share: the recipe, its texts, and the initial weights."""

    def __init__(self, folder: Path) -> None:
        shown = [f"run.folder={folder}", f"phases.0.duration={STEPS}", "run.evaluation.every=null", "run.log_every=1"]
        self.recipe: Recipe = read_recipe("demo", shown)
        self.world: World = join(self.recipe.run.device)
        self.precision = choose_precision(self.recipe.run.precision, self.world.device)
        self.quiet = Progress(Console(quiet=True), is_shown=False)
        self.texts: TokenizedCorpus = prepare_corpus(self.recipe, self.world, Progress(Console(stderr=True)))
        torch.manual_seed(0)
        self.weights = build_model(TrainingPlan(self.recipe), self.texts.tokenizer).state_dict()
        self.length = self.recipe.phases[0].length or 128
        self.rows = (self.recipe.phases[0].batch_tokens or 4096) // self.length

    def model(self) -> Any:
        model = build_model(TrainingPlan(self.recipe), self.texts.tokenizer)
        model.load_state_dict(self.weights)
        return model


def train_ours(setting: Setting, folder: Path) -> tuple[float, int]:
    """Seconds and real tokens of all steps except the first."""
    recipe = setting.recipe
    model = setting.model()
    plan = TrainingPlan(recipe)
    task = PretrainingTask(plan, setting.texts.train, build_objectives(plan, setting.texts.tokenizer, model.config))
    trainer = loop.Trainer(
        model,
        task,
        recipe.optimizer.build,
        recipe.run,
        folder,
        setting.world,
        setting.quiet,
        clip=recipe.optimizer.clip,
    )
    trainer.train()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines[-1]["seconds"] - lines[0]["seconds"], lines[-1]["tokens"] - lines[0]["tokens"]


class Chunks(torch.utils.data.Dataset):
    """Documents split as BertBlocks splits them, with special tokens around each chunk."""

    def __init__(self, setting: Setting) -> None:
        tokenizer = setting.texts.tokenizer
        documents = next(iter(setting.texts.train.values()))
        size = setting.length - 2
        self.places = [
            (index, start)
            for index, length in enumerate(documents.lengths[:20_000].tolist())
            for start in range(0, length, size)
        ]
        self.documents, self.size = documents, size
        self.first, self.last = tokenizer.cls_token_id, tokenizer.sep_token_id

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        document, start = self.places[index]
        ids = self.documents[document][start : start + self.size].tolist()
        return {"input_ids": [self.first, *ids, self.last]}


class Watch(TrainerCallback):
    """The time from the end of the first step to the end of the last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.started = time.perf_counter()
        self.seconds = time.perf_counter() - self.started


class CountingCollator:
    """transformers' collator, which also counts the real tokens in each batch."""

    def __init__(self, tokenizer: Any, rate: float) -> None:
        self.collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=rate)
        self.tokens: list[int] = []

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.tokens.append(sum(len(example["input_ids"]) for example in examples))
        return self.collate(examples)


def train_theirs(setting: Setting, chunks: Chunks, folder: Path, tokens: int) -> tuple[float, int]:
    """The same for transformers' Trainer with its own ModernBERT, on about as many tokens."""
    recipe = setting.recipe
    mean = sum(len(chunks[index]["input_ids"]) for index in range(0, len(chunks), 50)) / len(range(0, len(chunks), 50))
    steps = 1 + round(tokens / (mean * setting.rows))
    optimizer = cast(AdamW, recipe.optimizer)
    rate = cast(float, cast(MaskedLM, recipe.objective).rate)  # the demo recipe has one
    collator, watch = CountingCollator(setting.texts.tokenizer, rate), Watch()
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=setting.rows,
        learning_rate=optimizer.lr,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.clip or 0.0,
        logging_steps=steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=setting.precision == "bf16",
    )
    model = to_huggingface(setting.model()).train()
    trainer = Trainer(model, arguments, collator, chunks, callbacks=[watch])
    trainer.pop_callback(transformers.trainer_callback.PrinterCallback)
    trainer.train()
    return watch.seconds, sum(collator.tokens[1:steps])


def compare(rounds: int) -> list[dict[str, Any]]:
    """Tokens per second in each round; the first round is a warm-up."""
    rates: dict[str, list[float]] = {PEER: [], OURS: []}
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(Path(scratch) / "run")
        chunks = Chunks(setting)
        for number in range(rounds + 1):
            seconds, tokens = train_ours(setting, Path(scratch) / f"ours-{number}")
            peer_seconds, peer_tokens = train_theirs(setting, chunks, Path(scratch) / f"theirs-{number}", tokens)
            if number:
                rates[OURS].append(tokens / seconds)
                rates[PEER].append(peer_tokens / peer_seconds)
        parameters = sum(parameter.numel() for parameter in setting.model().parameters())
    step = f"{setting.rows} rows of {setting.length} tokens a step, {setting.precision}"
    title = f"Pretraining, {parameters:,} parameters, {step}"
    return [race(title, "real tokens/s", (PEER, rates[PEER]), rates[OURS], GOAL)]
