"""What a study measures of each trained model. A measure is a section of the study file with its own keys."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from bertblocks.core.settings import Count, RecipeError, Section, SectionRegistry, Share, read_section
from bertblocks.core.storage import why_unreadable
from bertblocks.lab.results import Found, MeasureInfo, TrialRecord

if TYPE_CHECKING:
    from bertblocks.training.held_out import HeldOutEvaluator

#: Measures by the name that `kind` can hold.
MEASURES = SectionRegistry("measures.kind", default="held_out")
register_measure = MEASURES.register


class StoppedError(Exception):
    """A signal stopped a trial, which can continue later."""

    def __init__(self, signal: int) -> None:
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


@dataclass(frozen=True)
class TrainedModel:
    """What a measure may look at: the model of a trial, what was recorded about it, and held-out texts."""

    model: Path
    #: A folder of the measure's own, for what it writes.
    folder: Path
    record: TrialRecord
    #: Opens a number of tokens of held-out texts, the same for all trials.
    held_out: Callable[[int], HeldOutEvaluator]


class MeasureSection(Section):
    """The keys that every measure has. Subclass it for one of your own, and register it with `register_measure`."""

    kind: str = ""  # the name under which a subclass is registered
    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] | None = None
    """What the measure is called in the report. Default: its kind."""

    #: Whether it needs the machine for itself.
    is_exclusive: ClassVar[bool] = False
    #: The keys that name files.
    file_keys: ClassVar[tuple[str, ...]] = ()

    @property
    def label(self) -> str:
        return self.name or self.kind

    @property
    def counts_tokens(self) -> bool:
        """Whether values depend on the tokenizer, so that models with different ones cannot be compared."""
        return False

    @property
    def longest(self) -> int:
        """The number of tokens in the longest text that its keys ask for."""
        return 0

    def infos(self) -> list[MeasureInfo]:
        """What the values mean, in the order in which `run` finds them."""
        raise NotImplementedError

    def run(self, trained: TrainedModel) -> list[Found]:
        raise NotImplementedError

    def check(self, origin: str) -> None:
        """Raises an error if the measure cannot run. `origin` names the study file."""

    def located(self, folder: Path, origin: str) -> MeasureSection:
        """The same measure with absolute paths. Relative ones start at the study file, else at the current folder."""
        changes = {}
        for key in self.file_keys:
            if (given := getattr(self, key)) is None:
                continue
            near = [path for path in (folder / given, Path(given)) if path.is_file()]
            if not near:
                raise RecipeError(f"{origin}: measures: {self.label}.{key}: {given} {why_unreadable(folder / given)}.")
            changes[key] = str(near[0].absolute())
        located = self.model_copy(update=changes)
        located.check(origin)
        return located


@register_measure("held_out")
class HeldOut(MeasureSection):
    """Loss and accuracy on masked tokens of held-out texts, with the same masks for all models."""

    tokens: Count = 40_000
    """The tokens of held-out texts, of which 15 % are masked."""

    @property
    def counts_tokens(self) -> bool:
        return True

    def infos(self) -> list[MeasureInfo]:
        prefix = "" if self.name is None else f"{self.name}_"
        return [
            MeasureInfo(f"{prefix}held_out_loss", "nats per token", False, "loss of masked tokens in held-out texts"),
            MeasureInfo(f"{prefix}held_out_accuracy", "share", True, "masked tokens predicted in held-out texts"),
        ]

    def run(self, trained: TrainedModel) -> list[Found]:
        scores = trained.held_out(self.tokens).score_documents(load_masked_lm(trained.model))
        sums = (scores.loss, scores.correct)
        return [
            Found(info.name, float(total.sum() / scores.tokens.sum()), total / scores.tokens, scores.tokens)
            for info, total in zip(self.infos(), sums, strict=True)
        ]


@register_measure("pseudo_perplexity")
class PseudoPerplexity(MeasureSection):
    """The loss of tokens that are masked one at a time (Salazar et al., 2020); its exponential is pseudo-perplexity."""

    tokens: Count = 1_000
    """The tokens of held-out texts to use, in whole documents."""
    data: str | None = None
    """A file of texts (.txt with one per line, or a table with the column text) in place of held-out texts. Its loss
    is counted in bits per byte, which models with different tokenizers can share."""
    file_keys: ClassVar[tuple[str, ...]] = ("data",)

    @property
    def counts_tokens(self) -> bool:
        return self.data is None

    def infos(self) -> list[MeasureInfo]:
        what = "loss of tokens masked one at a time"
        if self.data is None:
            return [MeasureInfo(self.name or "pseudo_loss", "nats per token", False, f"{what}, in held-out texts")]
        name = self.name or "pseudo_bits_per_byte"
        return [MeasureInfo(name, "bits per byte", False, f"{what}, in {Path(self.data).name}")]

    def run(self, trained: TrainedModel) -> list[Found]:
        losses, sizes = self._score_file(trained.model) if self.data else self._score_held_out(trained)
        return [Found(self.infos()[0].name, float(losses.sum() / sizes.sum()), losses / sizes, sizes)]

    def _score_file(self, model: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        from bertblocks.evaluation.evaluate import pseudo_losses_of_texts, read_texts

        assert self.data is not None
        texts = read_texts(self.data)
        losses, _ = pseudo_losses_of_texts(model, texts)
        return losses / math.log(2), np.array([float(len(text.encode())) for text in texts])

    def _score_held_out(self, trained: TrainedModel) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        found = trained.held_out(self.tokens).pseudo_scores(load_masked_lm(trained.model))
        return found.loss, found.tokens


@register_measure("finetune")
class FineTune(MeasureSection):
    """The score of a model that is fine-tuned on files of the user, as in GLUE."""

    task: str = "classify"
    """A task of `bertblocks finetune`: classify, tag, answer, embed, rerank, ..."""
    train: str
    eval: str
    settings: dict[str, Any] = {}
    """Settings of fine-tuning, such as `epochs: 3`."""
    metric: str | None = None
    """The score to report. Default: the one that selects checkpoints."""
    file_keys: ClassVar[tuple[str, ...]] = ("train", "eval")

    @property
    def label(self) -> str:
        return self.name or Path(self.train).stem

    def check(self, origin: str) -> None:
        from bertblocks.core.registry import nearest
        from bertblocks.training.finetune import TASKS

        if self.task not in TASKS:
            raise RecipeError(
                f"{origin}: measures: {self.label}.task is {self.task!r}; it must be one of "
                f"{', '.join(TASKS)}{nearest(self.task, TASKS)}."
            )
        read_section(TASKS[self.task].settings_class, self.settings, f"{origin}: measures: {self.label}.settings")

    def infos(self) -> list[MeasureInfo]:
        what = f"{self.metric or 'score'} after fine-tuning for {self.task} on {Path(self.train).name}"
        return [MeasureInfo(self.label, "score", True, what)]

    def run(self, trained: TrainedModel) -> list[Found]:
        from bertblocks.core.storage import read_json, read_json_lines
        from bertblocks.training.finetune import RESULTS, finetune

        if not (trained.folder / RESULTS).is_file():
            settings = {"seed": trained.record.seed, **self.settings}
            ended = finetune(self.task, trained.model, self.train, self.eval, trained.folder, **settings)
            if ended.signal is not None:
                raise StoppedError(ended.signal)
        results = read_json(trained.folder / RESULTS)
        metric, scores = self.metric or results["metric"], results["scores"]
        if metric not in scores:
            raise RecipeError(f"measures: {self.label}.metric is {metric!r}; {self.task} has {', '.join(scores)}.")
        predictions = read_json_lines(trained.folder / "predictions.jsonl")
        examples = None
        if metric == "accuracy" and predictions and all({"gold", "predicted"} <= {*line} for line in predictions):
            examples = np.array([float(line["gold"] == line["predicted"]) for line in predictions])
        return [Found(self.label, float(scores[metric]), examples)]


@register_measure("embeddings")
class Embeddings(MeasureSection):
    """The quality of embeddings without fine-tuning, on a file of the user, as `bertblocks evaluate embed` reads it."""

    data: str
    pooling: Literal["mean", "cls", "max"] = "mean"
    file_keys: ClassVar[tuple[str, ...]] = ("data",)

    def check(self, origin: str) -> None:
        from bertblocks.tasks.embed.task import EmbedTask
        from bertblocks.tasks.settings import EmbedSettings

        EmbedTask(EmbedSettings()).read_held_out(self.data)

    def infos(self) -> list[MeasureInfo]:
        return [MeasureInfo(self.label, "score", True, f"embeddings on {Path(self.data).name}, without fine-tuning")]

    def run(self, trained: TrainedModel) -> list[Found]:
        from bertblocks.evaluation.evaluate import evaluate

        found = evaluate("embed", trained.model, self.data, pooling=self.pooling)
        return [Found(self.label, found.scores[found.metric])]


@register_measure("needle")
class NeedleMeasure(MeasureSection):
    """Facts that are found in long texts (`bertblocks evaluate needle`)."""

    lengths: Annotated[list[Count], Field(min_length=1)] = [128]
    depths: Annotated[list[Share], Field(min_length=1)] = [0.0, 0.25, 0.5, 0.75, 1.0]
    samples: Count = 20
    """Texts for each length and depth."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def infos(self) -> list[MeasureInfo]:
        lengths = ", ".join(map(str, self.lengths))
        return [MeasureInfo(self.label, "share", True, f"facts found in texts of {lengths} tokens")]

    def run(self, trained: TrainedModel) -> list[Found]:
        from bertblocks.evaluation.evaluate import needle

        accuracy = needle(trained.model, self.lengths, self.depths, self.samples).accuracy
        return [Found(self.label, float(accuracy.mean()), accuracy.ravel())]


@register_measure("speed")
class Speed(MeasureSection):
    """Tokens per second on this machine, in inference and in training steps, while no other trial runs."""

    length: Count = 128
    batch: Count = 16
    seconds: Annotated[float, Field(gt=0)] = 2.0
    """How long each of the two is measured, after a warm-up."""
    is_exclusive: ClassVar[bool] = True

    @property
    def longest(self) -> int:
        return self.length

    def infos(self) -> list[MeasureInfo]:
        what = f"at {self.batch} x {self.length} tokens on this machine"
        prefix = "" if self.name is None else f"{self.name}_"
        return [
            MeasureInfo(f"{prefix}inference_speed", "tokens per second", True, f"inference {what}"),
            MeasureInfo(f"{prefix}training_speed", "tokens per second", True, f"forward and backward pass {what}"),
        ]

    def run(self, trained: TrainedModel) -> list[Found]:
        model = load_masked_lm(trained.model)
        ids = torch.randint(0, model.config.vocab_size, (self.batch * self.length,), device=model.device)
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=model.device) * self.length
        labels = torch.where(torch.arange(len(ids), device=model.device) % 3 == 0, ids, -100)

        def infer() -> None:
            with torch.inference_mode():
                model.model(input_ids=ids, cu_seqlens=starts)

        def step() -> None:
            model(input_ids=ids, cu_seqlens=starts, labels=labels).loss.backward()

        speeds = [len(ids) / self._median_time(infer)]
        model.train()
        speeds.append(len(ids) / self._median_time(step))
        return [Found(info.name, speed) for info, speed in zip(self.infos(), speeds, strict=True)]

    def _median_time(self, work: Callable[[], None]) -> float:
        def times() -> Iterator[float]:
            end = time.perf_counter() + self.seconds
            while (before := time.perf_counter()) < end:
                work()
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                yield time.perf_counter() - before

        work()
        return float(np.median(list(times())))


@register_measure("memory")
class MemoryUse(MeasureSection):
    """The most memory that training took: of tensors on a GPU, of the whole process on a CPU."""

    def infos(self) -> list[MeasureInfo]:
        return [MeasureInfo(self.label, "bytes", False, "peak memory of training")]

    def run(self, trained: TrainedModel) -> list[Found]:
        return [Found(self.label, float(trained.record.peak_memory))]


def load_masked_lm(folder: Path) -> Any:
    """The masked language model of a trial, for evaluation."""
    from bertblocks.checkpoints.load import load

    model, _ = load(str(folder), task="masked-lm", dtype=torch.float32)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
