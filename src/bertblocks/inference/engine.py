"""The engine: runs one model on streams of inputs, with threads and a batch size that suit the machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from bertblocks.inference.hardware import choose_threads, choose_token_budget, limited_threads
from bertblocks.inference.pipeline import Pipeline, SegmentBatch
from bertblocks.inference.progress import RunStats
from bertblocks.inference.splitting import Segment
from bertblocks.inference.stream import run_stream
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.ops.cpu import flushed_denormals


class Engine:
    """Runs pipelines on a model.

    `threads` and `token_budget` (tokens per batch) default to what suits the machine.
    """

    def __init__(
        self, model: BertBlocksPreTrainedModel, threads: int | None = None, token_budget: int | None = None
    ) -> None:
        for name, value in (("threads", threads), ("token_budget", token_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        self.model = model
        #: None: those that the caller has set.
        self.threads: int | None = threads or choose_threads()
        self.token_budget = token_budget or choose_token_budget(model.device, self.threads)
        #: Inputs, tokens and seconds of the latest run.
        self.stats = RunStats()

    def run(
        self,
        pipeline: Pipeline[Any],
        inputs: Iterable[Any],
        stats: RunStats,
        return_exceptions: bool = False,
        window: int | None = None,
    ) -> Iterator[Any]:
        """Yields the results in the order of the inputs and counts them in `stats`.

        With `return_exceptions`, the error of an input that the pipeline rejects is yielded in place of its result.
        `window` is that of `run_stream`.
        """
        self.stats = stats
        with stats:
            results = run_stream(
                inputs,
                pipeline,
                lambda segments: self.forward(pipeline, segments),
                self.token_budget,
                on_batch=stats.add_tokens,
                on_items=stats.add_items,
                return_exceptions=return_exceptions,
                window=window,
            )
            with contextlib.closing(results):
                yield from results

    def forward(self, pipeline: Pipeline[Any], segments: Sequence[Segment]) -> Sequence[Any]:
        """Runs the model on one batch and returns its output for each segment."""
        # FSDP keeps the tensors that it gathers into, and training may not write to tensors of inference mode
        without_gradients = torch.no_grad() if hasattr(self.model, "reshard") else torch.inference_mode()
        with flushed_denormals(), without_gradients, limited_threads(self.threads):
            with_types = self.model.config.type_vocab_size > 1
            return pipeline.forward(SegmentBatch.from_segments(segments, self.model.device, with_types))

    @property
    def precision(self) -> str:
        """The numbers that the model computes with: int8 or the name of its dtype."""
        return self.model.config.quantization or str(self.model.dtype).removeprefix("torch.")


def prepare_model(
    model: BertBlocksPreTrainedModel, device: torch.device | str | None, dtype: torch.dtype | None, int8: bool
) -> BertBlocksPreTrainedModel:
    """Moves, casts or quantizes a model for inference and puts it in evaluation mode. None keeps what it has."""
    is_int8 = model.config.quantization is not None
    if (int8 or is_int8) and dtype not in (None, torch.float32):
        if int8:
            raise ValueError(f"dtype is {dtype}; int8 requires float32.")
        dtype = None
    if device is not None or dtype is not None:  # even a move that changes nothing would reshard FSDP's parameters
        model = model.to(device=device, dtype=None if is_int8 else dtype)
    if int8 and not is_int8:
        model = model.float().quantize("int8")
    return model.eval()
