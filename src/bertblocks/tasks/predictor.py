"""The predictor: a model, its tokenizer, and every way to use them on texts."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.load import load
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, read_settings
from bertblocks.core.registry import nearest
from bertblocks.inference.hardware import (
    choose_device,
    choose_dtype,
    choose_threads,
    choose_token_budget,
    limited_threads,
)
from bertblocks.inference.job import Job, SegmentBatch
from bertblocks.inference.progress import Meter
from bertblocks.inference.splitting import TOO_LONG, Segment, SequenceSplitter, TooLong
from bertblocks.inference.stream import run_stream
from bertblocks.models import (
    BertBlocksForQuestionAnswering,
    BertBlocksForSequenceClassification,
    BertBlocksForTokenClassification,
    BertBlocksPreTrainedModel,
)
from bertblocks.models.masked_lm import LanguageModel
from bertblocks.nn.ops.cpu import flushed_denormals
from bertblocks.tasks.answer.predictions import AnsweringJob
from bertblocks.tasks.classify.predictions import ClassificationJob
from bertblocks.tasks.embed.predictions import EmbeddingJob
from bertblocks.tasks.fill_mask import FillingJob
from bertblocks.tasks.results import Answers, Classification, Filling, Tagged
from bertblocks.tasks.tag.predictions import Level, TaggingJob
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.lines import Lines

Texts = Iterable[str] | Path


class Predictor:
    """Runs a model on texts of any number and length: a list, an iterator, or a `Path`, whose lines are the texts.

    Texts are tokenised on all cores beside the model, sorted by length and run in flat batches of `token_budget`
    tokens without padding; results come in the order of the texts. Device, threads, dtype and budget suit the machine
    unless given: `dtype` is bfloat16 where the hardware has units for it, and that of the model where a
    model is given rather than a folder. A text beyond `max_length` tokens is an "error", "truncate"d, or seen by
    "window"s that share `overlap` tokens. `task` names a head where a checkpoint should not be read as it says.

    Example:
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import PreTrainedTokenizerFast
        >>> from bertblocks import BertBlocksConfig, BertBlocksModel
        >>> words = Tokenizer(models.WordLevel({"[UNK]": 0, "to": 1, "be": 2, "or": 3, "not": 4}, unk_token="[UNK]"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
        >>> predictor = Predictor(BertBlocksModel(BertBlocksConfig.from_preset("mini")), tokenizer)
        >>> predictor.encode(["to be", "or not to be", ""]).shape
        (3, 64)
    """

    def __init__(
        self,
        model: BertBlocksPreTrainedModel | str | Path,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        task: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        threads: int | None = None,
        token_budget: int | None = None,
        int8: bool = False,
        too_long: TooLong = "window",
        max_length: int | None = None,
        overlap: int | None = None,
        pooling: str | None = None,
    ) -> None:
        for name, value in (("threads", threads), ("token_budget", token_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if too_long not in TOO_LONG:
            raise ValueError(f"too_long is {too_long!r}; it must be one of {', '.join(TOO_LONG)}.")
        settings = EmbeddingSettings()
        if isinstance(model, (str, Path)):
            device = torch.device(device or choose_device())
            if dtype is None and not int8:
                dtype = choose_dtype(device)
            model, own_tokenizer, settings = _load(model, task)
            tokenizer = tokenizer or own_tokenizer
        elif not isinstance(model, BertBlocksPreTrainedModel):
            raise TypeError(
                f"model is a {type(model).__name__}; it must be a BertBlocks model, a folder or a hub id "
                "(bertblocks.from_huggingface reads models of transformers)."
            )
        elif task is not None:
            raise ValueError("task goes with a folder or hub id; a model has its head already.")
        elif int8 or dtype is not None:
            model = copy.deepcopy(model)  # the caller's stays as it is
        if tokenizer is None:
            raise ValueError("There is no tokenizer beside the model; give one.")
        self.model = _prepare(model, device, dtype, int8)
        self.tokenizer = tokenizer
        self.threads = threads or choose_threads()
        self.token_budget = token_budget or choose_token_budget(self.model.device, self.threads)
        self.prompts = settings.prompts
        self.default_prompt = settings.default_prompt
        self.pooling = pooling or settings.pooling
        if self.pooling not in ("cls", "mean", "max"):
            raise ValueError(f"pooling is {pooling!r}; it must be one of cls, mean, max.")
        self.max_length = max_length or longest_sequence(self.model, tokenizer, settings)
        self._fitter = SequenceSplitter(TextTokenizer(tokenizer), self.max_length, too_long, overlap)
        #: Inputs, tokens and seconds of the latest run.
        self.meter = Meter()

    # ------------------------------------------------------------------ tasks

    def encode(
        self,
        texts: Texts,
        *,
        prompt: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        progress: bool = False,
    ) -> np.ndarray:
        """Embeddings, `[texts, dimensions]`, pooled as the checkpoint says and of length 1.

        `prompt` is put in front of every text; the name of one of the checkpoint's `prompts` stands for that prompt.
        `dimensions` keeps the first so many, for models that were trained for it.
        """
        options: dict[str, Any] = {"prompt": prompt, "normalize": normalize, "dimensions": dimensions}
        rows = list(self.stream("encode", texts, progress=progress, **options))
        return np.stack(rows) if rows else np.zeros((0, dimensions or self.model.config.hidden_size), np.float32)

    def fill_mask(self, texts: Texts, *, top_k: int = 5, progress: bool = False) -> list[list[list[Filling]]]:
        """For every text and each of its masks the `top_k` likeliest tokens."""
        return list(self.stream("fill_mask", texts, progress=progress, top_k=top_k))

    def classify(
        self,
        texts: Iterable[str | tuple[str, str]] | Path,
        *,
        top_k: int | None = None,
        threshold: float = 0.5,
        progress: bool = False,
    ) -> list[Classification]:
        """Labels with scores for texts or pairs of texts; `threshold` is for multi-label models."""
        return list(self.stream("classify", texts, progress=progress, top_k=top_k, threshold=threshold))

    def tag(
        self, texts: Iterable[str | Sequence[str]] | Path, *, level: Level | None = None, progress: bool = False
    ) -> list[list[Tagged]]:
        """ "entities", "words" or "tokens" of each text, or of each list of words, with their labels.

        The default is entities where the model's labels mark them (B-, I-), and words elsewhere.
        """
        return list(self.stream("tag", texts, progress=progress, level=level))

    def answer(
        self,
        questions: Iterable[tuple[str, str]],
        *,
        n_best: int = 5,
        max_answer_tokens: int = 30,
        no_answer_threshold: float | None = None,
        progress: bool = False,
    ) -> list[Answers]:
        """Answers to pairs of a question and its context, as exact spans of the context.

        With a threshold there is no answer where its score is higher than the best answer's by more than that.
        """
        options: dict[str, Any] = {
            "n_best": n_best,
            "max_answer_tokens": max_answer_tokens,
            "no_answer_threshold": no_answer_threshold,
        }
        return list(self.stream("answer", questions, progress=progress, **options))

    # ------------------------------------------------------------------ running

    def stream(
        self,
        method: str,
        inputs: Iterable[Any] | Path,
        *,
        progress: bool = False,
        total: int | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """The results of one of the methods above, by its name and with its options, one by one as they come.

        Inputs may be endless: only so many are read ahead as are sorted together. Where they pause, what has come is
        answered at once. `total` is their number, for progress, where it cannot be seen from them.
        """
        job = self._job(method, options)
        if isinstance(inputs, (str, bytes)):
            raise TypeError(f"The texts are one string, {inputs!r}; give a list of texts.")
        if isinstance(inputs, Path):
            inputs = Lines(inputs)
            total = inputs.count() if progress else None
        elif isinstance(inputs, (list, tuple)):
            total = len(inputs)
        return self._run(job, inputs, Meter(total, is_shown=progress))

    def _run(self, job: Job[Any], inputs: Iterable[Any], meter: Meter) -> Iterator[Any]:
        self.meter = meter
        with meter:
            results = run_stream(
                inputs,
                job,
                lambda pieces: self._run_pieces(job, pieces),
                self.token_budget,
                on_batch=meter.add_tokens,
                on_items=meter.add_items,
            )
            with contextlib.closing(results):
                yield from results

    def _run_pieces(self, job: Job[Any], pieces: list[Segment]) -> Sequence[Any]:
        with flushed_denormals(), torch.inference_mode(), limited_threads(self.threads):
            with_types = self.model.config.type_vocab_size > 1
            return job.run(SegmentBatch(pieces, self.model.device, with_types))

    def _job(self, method: str, options: dict[str, Any]) -> Job[Any]:
        if method == "encode":
            options = {**options, "prompt": self._prompt(options.get("prompt"))}
            return EmbeddingJob(self.model, self._fitter, self.pooling, **options)
        if method not in _HEADS:
            methods = ("encode", *_HEADS)
            raise ValueError(f"method is {method!r}; it must be one of {', '.join(methods)}{nearest(method, methods)}.")
        needed, head, job = _HEADS[method]
        if not isinstance(self.model, needed):
            raise ValueError(f"{method} needs a model with a {head} head; this one is a {type(self.model).__name__}.")
        return job(cast(Any, self.model), self._fitter, **options)

    def _prompt(self, prompt: str | None) -> str:
        if prompt is None:
            prompt = self.default_prompt
        return "" if prompt is None else self.prompts.get(prompt, prompt)

    @property
    def numbers(self) -> str:
        """What the model computes with: int8 or the name of its dtype."""
        return self.model.config.quantization or str(self.model.dtype).removeprefix("torch.")

    def __repr__(self) -> str:
        return (
            f"Predictor({type(self.model).__name__}, {self.model.device.type}, {self.numbers}, threads={self.threads}, "
            f"token_budget={self.token_budget}, max_length={self.max_length})"
        )


#: By method: the model it needs, what its head is called, and the job.
_HEADS: dict[str, tuple[type[BertBlocksPreTrainedModel], str, type[Job[Any]]]] = {
    "fill_mask": (LanguageModel, "masked-lm", FillingJob),
    "classify": (BertBlocksForSequenceClassification, "sequence-classification", ClassificationJob),
    "tag": (BertBlocksForTokenClassification, "token-classification", TaggingJob),
    "answer": (BertBlocksForQuestionAnswering, "question-answering", AnsweringJob),
}


def _load(
    source: str | Path, task: str | None
) -> tuple[BertBlocksPreTrainedModel, PreTrainedTokenizerBase | None, EmbeddingSettings]:
    """The model, tokenizer and settings of a checkpoint; a head that it lacks is not made up."""
    folder = find_checkpoint(source)
    with warnings.catch_warnings():
        if task is not None:
            warnings.filterwarnings("error", message=".*made fresh, to be trained", category=UserWarning)
        try:
            model, tokenizer = load(folder, task)
        except UserWarning as warning:
            raise ValueError(f"{source} has no trained {task} head: {warning}") from warning
    return model, tokenizer, read_settings(folder)


def _prepare(
    model: BertBlocksPreTrainedModel, device: torch.device | str | None, dtype: torch.dtype | None, int8: bool
) -> BertBlocksPreTrainedModel:
    """The model where and as it should run."""
    is_int8 = model.config.quantization is not None
    if (int8 or is_int8) and dtype not in (None, torch.float32):
        if int8:
            raise ValueError(f"dtype is {dtype}; int8 goes with float32.")
        dtype = None
    if device is not None or dtype is not None:  # a move that changes nothing would undo what FSDP has gathered
        model = model.to(device=device, dtype=None if is_int8 else dtype)  # type: ignore[call-overload]
    if int8 and not is_int8:
        model = model.float().quantize("int8")
    return model.eval()


def longest_sequence(
    model: BertBlocksPreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: EmbeddingSettings
) -> int:
    """The tokens that a model reads at once, special ones included, by what is known of it."""
    positions = model.config.max_position_embeddings - model.config.position_offset
    return min(positions, tokenizer.model_max_length, settings.max_length or positions)
