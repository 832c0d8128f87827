"""Runs batches in threads of this process, and lets short requests overtake between layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from bertblocks.core.log import logger
from bertblocks.inference.splitting import Segment
from bertblocks.models import BertBlocksPreTrainedModel
from bertblocks.nn.quantized import QuantizedBlock
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.lanes import Batch
from bertblocks.serve.models import ModelSet, PipelineKey, Pipelines

#: The share of a long batch's time that short ones may take, and the seconds of it that they may save up.
SHORT_SHARE, MAX_CREDIT = 0.25, 0.05
#: Batches that run at the same time in this process, if it has as many CPUs.
MAX_BATCHES = 4


class _State(threading.local):
    """What a thread does at the moment."""

    #: Whether it may run on several CPUs. Only one thread of a process does: OpenMP has a pool of threads for each that
    #: does, and once there are more of them than CPUs, all of them wait by sleeping, which takes twice the time.
    is_primary = False
    #: The threads that it has told torch.
    threads = 0
    #: Whether its batch lets others run in between, and the seconds that they may take, as of a time.
    is_interruptible = False
    credit, updated = MAX_CREDIT, 0.0
    #: Seconds of other batches during its own.
    nested = 0.0


class Forward:
    """Runs batches on the threads that call it, several at a time.

    Batches that run at the same time share `threads`: two of them on two CPUs have one each, which is more work in a
    second than one after the other on both. A forward pass keeps its state in local variables only, so `give_way`,
    which is called before parts of a long batch, may run another in between, even of the same model.
    """

    def __init__(self, models: ModelSet, threads: int, give_way: Callable[[], None]) -> None:
        self._models, self._pipelines, self._threads = models, Pipelines(models), threads
        self._give_way = give_way
        self._state = _State()
        #: Batches that run on threads that are not the primary one.
        self._others = 0
        self._lock = threading.Lock()
        for model in models:
            model.predictor.threads = None
            for module in _interruptible(model.predictor.model):
                module.register_forward_pre_hook(self._before_module)

    def use_all_threads(self) -> None:
        """Makes the calling thread the primary one."""
        self._state.is_primary = True

    def run(self, key: PipelineKey, segments: Sequence[Segment], is_short: bool) -> tuple[Sequence[Any], float]:
        """The outputs, and the seconds that they took without those of other batches in between."""
        state = self._state
        outer = state.is_interruptible, state.nested
        state.is_interruptible, state.nested = not is_short, 0.0
        started = time.perf_counter()
        self._count(1)
        try:
            self._share_threads()
            outputs = self._models[key.model].predictor.forward(self._pipelines[key], segments)
        finally:
            self._count(-1)
            seconds = time.perf_counter() - started
            own = seconds - state.nested
            state.is_interruptible, state.nested = outer[0], outer[1] + seconds
        return outputs, own

    def _count(self, change: int) -> None:
        if not self._state.is_primary:
            with self._lock:
                self._others += change

    def _share_threads(self) -> None:
        """Gives the primary thread the CPUs that others do not use."""
        state = self._state
        threads = max(1, self._threads - self._others) if state.is_primary else 1
        if threads != state.threads:
            state.threads = threads
            torch.set_num_threads(threads)

    def _before_module(self, *_: Any) -> None:
        state = self._state
        if not state.is_interruptible:
            return
        now = time.perf_counter()
        state.credit = min(state.credit + SHORT_SHARE * (now - state.updated), MAX_CREDIT)
        if state.credit > 0:
            self._give_way()
            state.credit -= time.perf_counter() - now
        state.updated = now
        self._share_threads()


def _interruptible(model: BertBlocksPreTrainedModel) -> Iterable[Any]:
    """The modules before which a batch may wait: sublayers, or int8 layers, which are one call without hooks inside."""
    for layer in model.base_model.encoder.layers:
        yield from [layer] if isinstance(layer, QuantizedBlock) else [layer.attention, layer.mlp]


class LocalRunner:
    """Runs batches of the queue in threads of this process until the queue is closed."""

    def __init__(self, models: ModelSet, queue: BatchQueue, threads: int) -> None:
        self._models, self._queue = models, queue
        self._forward = Forward(models, threads, self._give_way)

    def work(self, is_primary: bool) -> None:
        """The life of a thread."""
        if is_primary:
            self._forward.use_all_threads()
        while (batch := self._queue.take(is_primary)) is not None:
            self.run(batch)

    def run(self, batch: Batch) -> None:
        result: tuple[Sequence[Any], float] | Exception
        try:
            result = self._forward.run(batch.key, batch.segments, batch.is_short)
        except Exception as error:
            logger.exception("A batch failed")
            result = error
        self._queue.end(batch, result, self._models[batch.key.model].name)

    def _give_way(self) -> None:
        if self._queue.has_short and (batch := self._queue.take_short()) is not None:
            self.run(batch)


def make_threads(models: ModelSet, queue: BatchQueue, threads: int) -> list[threading.Thread]:
    """Threads that run the models together on a number of CPUs; a GPU runs one batch after the other."""
    runner = LocalRunner(models, queue, threads)
    is_on_cpu = all(model.predictor.model.device.type == "cpu" for model in models)
    count = min(threads, MAX_BATCHES) if is_on_cpu else 1
    return [
        threading.Thread(target=runner.work, args=(number == 0,), name="bertblocks-model", daemon=True)
        for number in range(count)
    ]
