"""`Predictor`: a model, its tokenizer, and every task on texts."""

from __future__ import annotations

import copy
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from bertblocks.checkpoints.files import find_checkpoint
from bertblocks.checkpoints.load import load_trained
from bertblocks.checkpoints.sentence_transformers import EmbeddingSettings, find_kind
from bertblocks.checkpoints.sentence_transformers.any_kind import read_settings_of_any
from bertblocks.checkpoints.sentence_transformers.multi_vector import MultiVectorSettings, add_markers
from bertblocks.checkpoints.sentence_transformers.sparse_encoder import find_encoder
from bertblocks.inference.engine import Engine, prepare_model
from bertblocks.inference.hardware import choose_device, choose_dtype
from bertblocks.inference.pipeline import Pipeline
from bertblocks.inference.progress import RunStats
from bertblocks.inference.splitting import Segment, TooLong, max_sequence_length
from bertblocks.models import (
    BertBlocksPreTrainedModel,
)
from bertblocks.nn.embedding_head import EmbeddingHead
from bertblocks.nn.token_head import TokenHead
from bertblocks.tasks.answer.predictions import Answers
from bertblocks.tasks.classify.predictions import Classification
from bertblocks.tasks.embed.vectors import fit_ranges, quantize
from bertblocks.tasks.fill_mask import Filling
from bertblocks.tasks.multi.sequences import RoleTokenizer
from bertblocks.tasks.pipelines import PipelineFactory
from bertblocks.tasks.rerank.predictions import Ranked
from bertblocks.tasks.sparse.vectors import SparseVector
from bertblocks.tasks.tag.predictions import Level, Tagged
from bertblocks.text.encoding import TextTokenizer
from bertblocks.text.lines import Lines
from bertblocks.text.tokenizers import load_tokenizer_if_any

Texts = Iterable[str] | Path


class Predictor:
    """Runs a model on texts of any number and length: a list, an iterator, or a `Path`, whose lines are the texts.

    Texts are tokenized on all cores while the model runs, sorted by length and run in flat batches of `token_budget`
    tokens without padding; results come in the order of the texts. Device, threads, dtype and token budget default to
    what suits the machine: `dtype` is bfloat16 where the hardware has units for it. A model object, as opposed to a
    folder, keeps its own dtype. A text of more than `max_length` tokens is an "error", is "truncate"d, or is split into
    "window"s that share `overlap` tokens; by default it is split, and truncated by `rerank` and `encode_multi`. `task`
    names the head to load in place of the checkpoint's own.

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
        too_long: TooLong | None = None,
        max_length: int | None = None,
        overlap: int | None = None,
        pooling: str | None = None,
    ) -> None:
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
                "(bertblocks.from_huggingface converts models of transformers)."
            )
        elif task is not None:
            raise ValueError(f"task is {task!r}; it requires a folder or hub id, because a model already has its head.")
        elif int8 or dtype is not None:
            model = copy.deepcopy(model)  # the caller's model must not change
        if tokenizer is None:
            raise ValueError("The checkpoint does not have a tokenizer; pass one as tokenizer=.")
        self.model = prepare_model(model, device, dtype, int8)
        self.tokenizer = tokenizer
        #: What the checkpoint's files say about embeddings.
        self.embedding = settings
        self._head: Any = self.model.base_model.embedding_head
        if self._head is None:
            size = self.model.config.hidden_size
            head: EmbeddingHead | TokenHead
            if isinstance(settings, MultiVectorSettings):
                head = TokenHead(size, settings.layers)
            else:
                head = EmbeddingHead(pooling or settings.pooling, size, settings.layers)
            self._head = head.to(self.model.device)
        self.pooling = self._head.pooling
        self.max_length = max_length or max_sequence_length(self.model, tokenizer, settings.max_length)
        self._engine = Engine(self.model, threads, token_budget)
        self._text_tokenizer = TextTokenizer(tokenizer)
        self._too_long, self._overlap = too_long, overlap
        self._factory().splitter("window")  # raises if the settings do not fit

    # ------------------------------------------------------------------ tasks

    def encode(
        self,
        texts: Texts,
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
        precision: str = "float32",
        ranges: np.ndarray | None = None,
        progress: bool = False,
    ) -> np.ndarray:
        """Computes embeddings, `[texts, dimensions]`, by the modules of the checkpoint and scaled to length 1.

        `prompt` is put in front of every text. `prompt_name` is the name of one of the checkpoint's `prompts`; "query"
        and "document" always exist, and are empty unless the checkpoint defines them. `prompt` may be such a name too.
        `dimensions` keeps that many leading dimensions, for models trained for it (Matryoshka). `precision` is that of
        the result: float32, float16, int8 or binary (see `bertblocks.tasks.embed.vectors`). int8 takes `ranges`, by
        default those of the texts themselves.
        """
        fits_ranges = precision == "int8" and ranges is None
        options: dict[str, Any] = {
            "prompt": prompt,
            "prompt_name": prompt_name,
            "normalize": normalize,
            "dimensions": dimensions,
            "precision": "float32" if fits_ranges else precision,
            "ranges": ranges,
        }
        vectors = list(self.stream("encode", texts, progress=progress, **options))
        if not vectors:
            return quantize(np.zeros((0, dimensions or self.embedding_size), np.float32), options["precision"], ranges)
        found = np.stack(vectors)
        return quantize(found, precision, fit_ranges(found)) if fits_ranges else found

    def encode_tokens(
        self, texts: Texts, *, prompt: str | None = None, prompt_name: str | None = None, progress: bool = False
    ) -> list[np.ndarray]:
        """Computes the encoder's vector of every token, special tokens included: `[tokens, hidden]` for each text.

        Long texts are truncated, as sentence-transformers does, unless `too_long` says otherwise.
        """
        return list(self.stream("encode_tokens", texts, progress=progress, prompt=prompt, prompt_name=prompt_name))

    def encode_sparse(
        self, texts: Texts, *, role: str | None = None, top_k: int | None = None, progress: bool = False
    ) -> list[SparseVector]:
        """Computes sparse vectors over the vocabulary (SPLADE) with a sparse encoder, or any masked language model.

        `role` is "query" or "document", the default; it decides the prompt, and whether a query passes through the
        encoder. `top_k` keeps the largest entries, by default as many as the checkpoint says. Of the windows of a long
        text, each entry has its largest value; `too_long="truncate"` does what sentence-transformers does.
        """
        return list(self.stream("encode_sparse", texts, progress=progress, role=role, top_k=top_k))

    def encode_multi(
        self, texts: Texts, *, role: str | None = None, pool_factor: float | None = None, progress: bool = False
    ) -> list[np.ndarray]:
        """Computes the vectors of tokens, `[tokens, dimensions]` for each text, with a multi-vector model (ColBERT).

        `role` is "query" or "document", the default. It decides the prompt, the length, which tokens have vectors, and
        whether a query is filled up with mask tokens. `bertblocks.tasks.multi.score_multi` compares the two sides. Long
        texts are truncated as sentence-transformers does, unless `too_long` says otherwise. `pool_factor` merges the
        tokens of a document into a share of 1/factor, in place of the checkpoint's own factor.
        """
        return list(self.stream("encode_multi", texts, progress=progress, role=role, pool_factor=pool_factor))

    def fill_mask(self, texts: Texts, *, top_k: int = 5, progress: bool = False) -> list[list[list[Filling]]]:
        """Predicts the `top_k` most probable tokens for each mask of each text."""
        return list(self.stream("fill_mask", texts, progress=progress, top_k=top_k))

    def classify(
        self,
        texts: Iterable[str | tuple[str, str]] | Path,
        *,
        top_k: int | None = None,
        threshold: float = 0.5,
        raw_scores: bool = False,
        progress: bool = False,
    ) -> list[Classification]:
        """Predicts labels with scores for texts or pairs of texts; `threshold` applies to multi-label models.

        Scores are probabilities, or logits with `raw_scores`.
        """
        options: dict[str, Any] = {"top_k": top_k, "threshold": threshold, "raw_scores": raw_scores}
        return list(self.stream("classify", texts, progress=progress, **options))

    def tag(
        self, texts: Iterable[str | Sequence[str]] | Path, *, level: Level | None = None, progress: bool = False
    ) -> list[list[Tagged]]:
        """Labels the "entities", "words" or "tokens" of each text or list of words.

        The default level is entities if the model's labels mark them (B-, I-), and words otherwise.
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
        """Answers questions, given as pairs of a question and its context, with exact spans of the context.

        With a threshold, the answer is empty if the score of no answer exceeds the best answer's by more than that.
        """
        options: dict[str, Any] = {
            "n_best": n_best,
            "max_answer_tokens": max_answer_tokens,
            "no_answer_threshold": no_answer_threshold,
        }
        return list(self.stream("answer", questions, progress=progress, **options))

    @overload
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        progress: bool = False,
    ) -> list[Ranked]: ...

    @overload
    def rerank(
        self,
        query: list[str],
        documents: Sequence[Sequence[str]],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        progress: bool = False,
    ) -> list[list[Ranked]]: ...

    def rerank(
        self,
        query: str | list[str],
        documents: Sequence[str] | Sequence[Sequence[str]],
        *,
        top_k: int | None = None,
        raw_scores: bool = False,
        progress: bool = False,
    ) -> list[Ranked] | list[list[Ranked]]:
        """Orders the documents of a query, or those of each of several queries, by relevance, the best first.

        `top_k` keeps that many. Scores are those of sentence-transformers' `CrossEncoder`, or logits with `raw_scores`,
        or of MaxSim if the model is a multi-vector one. In a stream, an input is a pair of a query and its documents.
        """
        options: dict[str, Any] = {"top_k": top_k, "raw_scores": raw_scores}
        if isinstance(query, str):
            return next(self.stream("rerank", [(query, documents)], progress=progress, **options))
        if len(query) != len(documents):
            raise ValueError(f"There are {len(query)} queries and {len(documents)} lists of documents; each needs one.")
        return list(self.stream("rerank", list(zip(query, documents, strict=True)), progress=progress, **options))

    # ------------------------------------------------------------------ running

    def stream(
        self,
        method: str,
        inputs: Iterable[Any] | Path,
        *,
        progress: bool = False,
        total: int | None = None,
        return_exceptions: bool = False,
        window: int | None = None,
        **options: Any,
    ) -> Iterator[Any]:
        """Yields the results of one of the methods above, by its name and with its options, as they are computed.

        Inputs may be endless: a bounded number is read ahead. When they pause, those received so far are processed.
        `total` is their number, for the progress bar, if they do not have a length. A bad input raises an error after
        the results before it; with `return_exceptions`, the error takes the place of its result and the stream goes on.

        Inputs are sorted by length in chunks of up to 1,024. With a `window`, chunks have that many inputs even if
        inputs pause: the same inputs then always form the same batches, and results are equal to the last bit.
        """
        pipeline = self.pipeline(method, **options)
        if isinstance(inputs, (str, bytes)):
            raise TypeError(f"The texts are a single string, {reprlib.repr(inputs)}; pass a list of texts.")
        if isinstance(inputs, Path):
            inputs = Lines(inputs)
            total = inputs.count() if progress else None
        elif isinstance(inputs, (list, tuple)):
            total = len(inputs)
        return self._engine.run(pipeline, inputs, RunStats(total, is_shown=progress), return_exceptions, window)

    def pipeline(self, method: str, *, too_long: TooLong | None = None, **options: Any) -> Pipeline[Any]:
        """What one of the methods above runs, with its options: tokenizing, the forward pass, and the result.

        `too_long` takes the place of the predictor's own.
        """
        return self._factory(too_long).make(method, options)

    def forward(self, pipeline: Pipeline[Any], segments: Sequence[Segment]) -> Sequence[Any]:
        """Runs one batch of a pipeline. It may hold segments of pipelines with an equal `batch_key`."""
        return self._engine.forward(pipeline, segments)

    def role_tokenizer(self, role: str | None = None) -> RoleTokenizer:
        """What turns texts of a role into the tokens that `encode_multi` gives vectors to."""
        return self._factory().role_tokenizer(role)

    def _factory(self, too_long: TooLong | None = None) -> PipelineFactory:
        too_long = too_long or self._too_long
        return PipelineFactory(
            self.model, self._head, self.embedding, self._text_tokenizer, self.max_length, too_long, self._overlap
        )

    @property
    def text_tokenizer(self) -> TextTokenizer:
        """The tokenizer without padding and truncation."""
        return self._text_tokenizer

    @property
    def prompts(self) -> dict[str, str]:
        """The checkpoint's prompts, by name."""
        return self.embedding.prompts

    @property
    def embedding_size(self) -> int:
        """The number of dimensions of an embedding."""
        return self._head.size

    @property
    def threads(self) -> int | None:
        """The threads that the model runs on. None: as many as the caller of torch has set."""
        return self._engine.threads

    @threads.setter
    def threads(self, threads: int | None) -> None:
        self._engine.threads = threads

    @property
    def token_budget(self) -> int:
        """Tokens per batch."""
        return self._engine.token_budget

    @property
    def stats(self) -> RunStats:
        """Inputs, tokens and seconds of the latest run."""
        return self._engine.stats

    @property
    def precision(self) -> str:
        """The numbers that the model computes with: int8 or the name of its dtype."""
        return self._engine.precision

    def __repr__(self) -> str:
        return (
            f"Predictor({type(self.model).__name__}, {self.model.device.type}, {self.precision}, "
            f"threads={self.threads}, token_budget={self.token_budget}, max_length={self.max_length})"
        )


def _load(
    source: str | Path, task: str | None
) -> tuple[BertBlocksPreTrainedModel, PreTrainedTokenizerBase | None, EmbeddingSettings]:
    """Loads the model, tokenizer and settings of a checkpoint; a head that the checkpoint lacks is an error."""
    folder = find_checkpoint(source)
    encoder = find_encoder(folder)
    if task is None and find_kind(folder) == "multi-vector":
        task = "base"  # a projection among the weights is read with the settings
    model, report = load_trained(encoder, task)
    report.log(with_unread=task is None)
    settings = read_settings_of_any(folder)
    tokenizer = load_tokenizer_if_any(encoder)
    add_markers(tokenizer, settings)
    return model, tokenizer, settings
