"""The gradients of one step of a tiny model; as a program, in the processes that torchrun launches."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings
from bertblocks.core.environment import peak_memory
from bertblocks.data.flat_batch import FlatBatch
from bertblocks.models import BertBlocksForMaskedLM, BertBlocksModel
from bertblocks.tasks.base import FineTuneTask
from bertblocks.tasks.embed.examples import EmbeddingExample
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.features import Feature
from bertblocks.tasks.multi.task import MultiTask
from bertblocks.tasks.retrieval.examples import RetrievalExample
from bertblocks.tasks.settings import EmbedSettings, MultiSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.training.backward import BackwardPass
from bertblocks.training.distributed import World, join, parallelize, to_full
from bertblocks.training.prefetch import split_micro_batches
from tests.helpers import tiny_config

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["plain", "words", "are", "here", "two", "leading", "trailing", "dots"]
EXAMPLES = 12


@dataclass(frozen=True)
class Case:
    """A step: settings of the task, what the examples are, and the number of the step."""

    settings: dict[str, Any] = field(default_factory=dict)
    kind: str = "negatives"
    parallel: str = "ddp"
    step: int = 0
    rates: dict[str, float] = field(default_factory=dict)
    #: The task whose loss compares the examples.
    task: str = "embed"


CASES = {
    "contrast": Case(),
    "negatives with a weight and a margin": Case({"negative_weight": 3.0, "false_negative_margin": 0.02}),
    "matryoshka": Case({"dimensions": [8, 16]}),
    "cosent": Case(kind="scores"),
    "cosine": Case({"loss": "cosine"}, kind="scores"),
    "masked": Case({"mlm_every": 2}, step=1),
    "between masked": Case({"mlm_every": 2}),
    "sharded": Case(parallel="fsdp"),
    "tokens": Case({"query_length": 9}, task="multi"),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Whole words, with the same ids in every process."""
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate([*SPECIAL, ".", *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIAL}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_examples(kind: str) -> list[EmbeddingExample]:
    """Texts of different lengths; with negatives, example n has n % 3 of them."""
    texts = [" ".join((WORDS * 2)[n % 8 : n % 8 + 1 + n % 6]) + " ." * (n // 8) for n in range(4 * EXAMPLES)]
    examples = []
    for n in range(EXAMPLES):
        own = [texts[n], texts[EXAMPLES + n]]
        if kind == "negatives":
            own += texts[2 * EXAMPLES + 2 * n :][: n % 3]
        examples.append(
            EmbeddingExample(own[:1] if kind == "single" else own, n / 9 if kind == "scores" else None, "x")
        )
    return examples


def make(case: Case) -> tuple[Any, Any, list[Any]]:
    """The task, its model in training mode, and the features of its examples."""
    torch.manual_seed(0)
    if case.task == "multi":
        return make_multi(case)
    task = EmbedTask(EmbedSettings(**case.settings))
    language_model = BertBlocksForMaskedLM(tiny_config(vocab_size=20, num_hidden_layers=2, **case.rates))
    start = language_model if case.settings.get("mlm_every") else language_model.model
    task.use_model(start, EmbeddingSettings())
    model = task.add_parts(start)
    features = task.features(make_examples(case.kind), TextTokenizer(make_tokenizer()), 32)
    return task, model.train(), features


def make_multi(case: Case) -> tuple[MultiTask, Any, list[Any]]:
    """The same with a vector per token; queries are filled up with tokens that are not attended to."""
    task, tokenizer = MultiTask(MultiSettings(loss="contrast", **case.settings)), make_tokenizer()
    task._loss = "contrast"
    model = BertBlocksModel(tiny_config(vocab_size=20, num_hidden_layers=2, pooler=False, **case.rates))
    task.use_tokenizer(tokenizer, EmbeddingSettings())
    task.use_model(model, EmbeddingSettings())
    examples = []
    for example in make_examples(case.kind):
        query, *documents = example.texts
        gains = (1.0, *[0.0] * (len(documents) - 1))
        examples.append(RetrievalExample(query, tuple(documents), gains, gains, "x"))
    return task, model.train(), task.features(examples, TextTokenizer(tokenizer), 32)


class OneStep:
    """What the loop's task does, for a task without a loop around it."""

    def __init__(self, task: FineTuneTask) -> None:
        self.losses, self.compares, self.encode, self.compare = task.losses, task.compares, task.encode, task.compare


def compute(
    case: Case, world: World, micro_batch_size: int | None, precision: str = "fp32"
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """This process's part of the mean losses, and the gradient of every weight."""
    task, model, features = make(case)
    parallel = parallelize(model, world, case.parallel, task.has_unused_weights)
    parts = split_micro_batches(features, world, micro_batch_size)
    batches: list[FlatBatch] = [task.collate(case.step, part) for part in parts]
    (term,) = batches[0].counts
    counts = {term: int(world.sum([sum(batch.counts[term] for batch in batches)])[0])}
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=precision == "fp16")
    step: Any = OneStep(task)
    sums = BackwardPass(step, parallel, world, precision, scaler, 0, case.step, counts).run(batches)
    losses = dict(zip(counts, sums.tolist(), strict=True))
    scale = scaler.get_scale()
    named = model.named_parameters()
    return losses, {name: to_full(weight.grad) / scale for name, weight in named if weight.grad is not None}


def measure(pairs: int, micro_batch_size: int | None) -> int:
    """The most bytes that one step of an encoder with 128 hidden units adds to the memory of this process."""
    torch.manual_seed(0)
    task = EmbedTask(EmbedSettings())
    model = BertBlocksModel(tiny_config(hidden_size=128, intermediate_size=512, num_hidden_layers=3))
    task.use_model(model, EmbeddingSettings())
    ids = torch.randint(5, 60, (pairs, 2, 16)).tolist()
    features = [[Feature(first, [0] * 16), Feature(second, [0] * 16)] for first, second in ids]
    world = World(0, 1, torch.device("cpu"))
    batches = [task.batch(part) for part in split_micro_batches(features, world, micro_batch_size)]
    before = peak_memory(world.device) or 0
    step: Any = OneStep(task)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    BackwardPass(step, model.train(), world, "fp32", scaler, 0, 0, {"loss": pairs}).run(batches)
    return (peak_memory(world.device) or 0) - before


def main() -> None:
    """`FOLDER`: writes the gradients of every case as two processes compute them, in micro-batches of 2.

    `memory PAIRS [MICRO_BATCH_SIZE]`: prints the memory of a step.
    """
    torch.set_num_threads(1)
    if sys.argv[1] == "memory":
        pairs, *size = map(int, sys.argv[2:])
        print(measure(pairs, size[0] if size else None))
        return
    world = join("cpu")
    for name, case in CASES.items():
        losses, gradients = compute(case, world, micro_batch_size=2)
        (loss,) = world.sum(list(losses.values()))
        if world.is_main:
            save_file({"loss": torch.tensor(loss), **gradients}, Path(sys.argv[1]) / f"{name}.safetensors")


if __name__ == "__main__":
    main()
