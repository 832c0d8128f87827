"""Runs batches in a thread of this process, and lets short requests overtake between layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bertblocks.core.log import logger
from bertblocks.inference.splitting import Segment
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.lanes import Batch
from bertblocks.serve.models import ModelSet, PipelineKey, Pipelines


class Forward:
    """Runs batches on the calling thread. During a long one, `give_way` is called before each sublayer.

    A forward pass keeps its state in local variables only, so another may run in between, even of the same model.
    """

    def __init__(self, models: ModelSet, give_way: Callable[[], None]) -> None:
        self._models, self._pipelines, self._give_way = models, Pipelines(models), give_way
        self._is_interruptible = False
        #: Seconds of other batches during the current one.
        self._nested = 0.0
        for model in models:
            for sublayer in _sublayers(model.predictor.model):
                sublayer.register_forward_pre_hook(self._before_sublayer)

    def run(self, key: PipelineKey, segments: Sequence[Segment], is_short: bool) -> tuple[Sequence[Any], float]:
        """The outputs, and the seconds that they took without those of other batches in between."""
        outer, nested = self._is_interruptible, self._nested
        self._is_interruptible, self._nested = not is_short, 0.0
        started = time.perf_counter()
        try:
            outputs = self._models[key.model].predictor.forward(self._pipelines[key], segments)
        finally:
            seconds = time.perf_counter() - started
            own = seconds - self._nested
            self._is_interruptible, self._nested = outer, nested + seconds
        return outputs, own

    def _before_sublayer(self, *_: Any) -> None:
        if self._is_interruptible:
            self._give_way()


def _sublayers(model: BertBlocksPreTrainedModel) -> Iterable[Any]:
    for layer in model.base_model.encoder.layers:
        yield layer.attention
        yield layer.mlp


class ThreadRunner(threading.Thread):
    """Runs batches of the queue in this process until the queue is closed."""

    def __init__(self, models: ModelSet, queue: BatchQueue) -> None:
        super().__init__(name="bertblocks-model", daemon=True)
        self._queue, self._models = queue, models
        self._forward = Forward(models, self._give_way)

    def run(self) -> None:
        while (batch := self._queue.take()) is not None:
            self._run(batch)

    def _run(self, batch: Batch) -> None:
        try:
            outputs, seconds = self._forward.run(batch.key, batch.segments, batch.is_short)
        except Exception as error:
            logger.exception("A batch failed")
            self._queue.fail(batch, error)
        else:
            self._queue.finish(batch, outputs, seconds, self._models[batch.key.model].name)

    def _give_way(self) -> None:
        if self._queue.has_short and (batch := self._queue.take_short()) is not None:
            self._run(batch)
