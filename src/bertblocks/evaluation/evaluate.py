"""Evaluates models on files and tests, and compares several models on the same examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.core.requirements import require_packages
from bertblocks.core.settings import read_section
from bertblocks.evaluation.language_models import load_language_model, mask_id
from bertblocks.evaluation.needle import FILLER, Needle, Sample, find_words, make_samples, run_needle
from bertblocks.evaluation.significance import paired_bootstrap
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.tasks.base import Evaluated, Scores
from bertblocks.tasks.embed.task import EmbedTask
from bertblocks.tasks.predictor import Predictor
from bertblocks.tasks.settings import EmbedSettings
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.files import read_text
from bertblocks.text.tables import DataError, read_records
from bertblocks.training.finetune import TASKS
from bertblocks.training.held_out import pseudo_losses

#: Bootstrap resamples per comparison.
RESAMPLES = 1000


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model."""

    model: str
    scores: Scores
    #: The score by which models are compared.
    metric: str
    examples: int
    #: Computes that score on a subset of the examples, given by index.
    resample: Callable[[np.ndarray], float]
    #: The prediction for each example, as `bertblocks.tasks.base.Evaluated` has them.
    predictions: list[dict[str, Any]] = field(default_factory=list)
    #: For embeddings, if asked for: the scores of vectors that are stored in each precision.
    precisions: dict[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """The difference between a model and the first one, with the 95% interval of a paired bootstrap."""

    model: str
    difference: float
    low: float
    high: float


def evaluate(
    task: str, model: str | Path, data: str | Path, int8: bool = False, precisions: bool = False, **settings: Any
) -> Evaluation:
    """Scores a fine-tuned model on a file. `task` is one of fine-tuning, or pppl.

    `settings` are the fine-tuning settings that define how the file is read. `precisions` also scores embeddings that
    are stored as float16, int8 and bits.
    """
    if precisions and task != "embed":
        raise ValueError(f"Precisions are those of embeddings; {task} has none.")
    if task == "pppl":
        if settings:
            raise DataError(f"pppl does not take settings; remove {next(iter(settings))!r}.")
        return pseudo_perplexity(model, data, int8)
    kind = TASKS[task]
    require_packages(kind.packages, f"evaluate {task}")
    chosen = read_section(kind.settings_class, settings, f"evaluate {task}")
    pooling = chosen.pooling if isinstance(chosen, EmbedSettings) else None
    reader = kind(chosen)
    head = reader.head_of(find_checkpoint(model))
    predictor = Predictor(
        model, task=head, int8=int8, dtype=torch.float32, max_length=chosen.max_length, pooling=pooling
    )
    reader.adopt(predictor.model.config)
    examples = reader.read_held_out(data)
    by_precision: dict[Any, Evaluated] = {}
    if precisions and isinstance(reader, EmbedTask):
        by_precision = reader.evaluate_precisions(predictor, examples)
    evaluated = by_precision["float32"] if by_precision else reader.evaluate(predictor, examples)
    return Evaluation(
        str(model),
        evaluated.scores,
        reader.metric,
        len(examples),
        evaluated.resample,
        evaluated.predictions,
        {precision: own.scores for precision, own in by_precision.items()},
    )


def compare(evaluations: Sequence[Evaluation]) -> list[Comparison]:
    """Compares every later model with the first one on the same examples."""
    first = evaluations[0]
    comparisons = []
    for other in evaluations[1:]:

        def both(chosen: np.ndarray, other: Evaluation = other) -> tuple[float, float]:
            return first.resample(chosen), other.resample(chosen)

        low, high = paired_bootstrap(both, first.examples, RESAMPLES)
        difference = other.scores[first.metric] - first.scores[first.metric]
        comparisons.append(Comparison(other.model, difference, low, high))
    return comparisons


# ---------------------------------------------------------------------- language models


@flushed_denormals()
def pseudo_perplexity(model: str | Path, data: str | Path, int8: bool = False) -> Evaluation:
    """exp of the mean loss of tokens that are masked one at a time (Salazar et al., 2020). Lower is better.

    Texts are the lines of a .txt file or the text column of a table. Long texts are split, not truncated.
    """
    losses, sizes = pseudo_losses_of_texts(model, read_texts(data), int8)
    if not sizes.sum():
        raise DataError(f"{data}: the texts have no tokens.")

    def score(chosen: np.ndarray) -> float:
        return math.exp(losses[chosen].sum() / max(sizes[chosen].sum(), 1))

    everything = np.arange(len(sizes))
    scores = {"pseudo_perplexity": score(everything), "loss": math.log(score(everything)), "tokens": float(sizes.sum())}
    return Evaluation(str(model), scores, "pseudo_perplexity", len(sizes), score)


def pseudo_losses_of_texts(
    model: str | Path, texts: Sequence[str], int8: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The summed loss and the number of tokens of each text, whose tokens are masked one at a time."""
    predictor = load_language_model(model, int8)
    tokenizer = TextTokenizer(predictor.tokenizer)
    capacity = predictor.max_length - tokenizer.num_special()
    mask = mask_id(predictor)
    sums, counts = [], []
    for tokens in tokenizer.tokenize(list(texts)):
        total = 0.0
        for start in range(0, len(tokens.ids), capacity):
            part = tokens.ids[start : start + capacity]
            sequence = tokenizer.add_special_tokens(part)
            positions = range(sequence.start, sequence.start + len(part))
            ids = torch.tensor(sequence.ids)
            total += float(pseudo_losses(predictor.model, ids, torch.tensor(positions), mask).sum())
        sums.append(total)
        counts.append(len(tokens.ids))
    return np.array(sums), np.array(counts)


def read_texts(data: str | Path) -> list[str]:
    """The lines of a .txt file that are not empty, or the text column of a table."""
    path = Path(data)
    if path.suffix == ".txt" and path.is_file():
        return [line for line in read_text(path).splitlines() if line.strip()]
    records = read_records(data)
    if "text" not in records.columns:
        raise DataError(f"{data} has no column 'text'; its columns are {', '.join(records.columns)}.")
    return [str(text) for text in records.column("text")]


@flushed_denormals()
def needle(
    model: str | Path,
    lengths: Sequence[int],
    depths: Sequence[float],
    samples: int = 20,
    data: str | Path | None = None,
) -> Needle:
    """Runs the test of `bertblocks.evaluation.needle`: by filling a mask, or by embeddings without a masked-LM head."""
    predictor = Predictor(model, dtype=torch.float32)
    tokenizer = TextTokenizer(predictor.tokenizer)
    for length in lengths:
        if length > predictor.max_length:
            raise DataError(f"lengths has {length}; {model} reads at most {predictor.max_length} tokens.")
    filler = FILLER if data is None else [f"{text.rstrip('.')}." for text in read_texts(data)]
    words = find_words(tokenizer)
    fills = isinstance(predictor.model, LanguageModel)
    mask = mask_id(predictor) if fills else None

    def score(chosen: list[Sample]) -> np.ndarray:
        if fills:
            return np.array([_fill(predictor.model, sample, list(words.values())) for sample in chosen])
        facts = predictor.encode([fact for sample in chosen for fact in sample.facts]).reshape(len(chosen), 2, -1)
        texts = predictor.encode(
            [str(predictor.tokenizer.decode(sample.ids, skip_special_tokens=True)) for sample in chosen]
        )
        return (facts * texts[:, None]).sum(-1).argmax(1)

    def make(length: int, depth: float) -> Iterator[Sample]:
        return make_samples(tokenizer, words, mask, length, depth, samples, filler)

    return run_needle(score, make, lengths, depths, 1 / len(words) if fills else 0.5)


@torch.inference_mode()
def _fill(model: Any, sample: Sample, candidates: list[int]) -> int:
    """The index of the candidate token with the highest logit at the mask."""
    inputs = {
        "input_ids": torch.tensor(sample.ids),
        "cu_seqlens": torch.tensor([0, len(sample.ids)], dtype=torch.int32),
    }
    hidden = model.model(**inputs).last_hidden_state[[sample.mask]]
    return int(model.logits(hidden)[0, candidates].argmax())
