"""Compares how long processes take for their own work, and names those that are regularly slower than the others."""

from __future__ import annotations

import socket
import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from bertblocks.core.log import logger
from bertblocks.nn.encoder import Encoder
from bertblocks.nn.moe import MixtureOfExperts
from bertblocks.training.distributed import World

#: A process is slow if its layers take this many times as long as the median, in this many lines of metrics in a row.
SLOW, LINES = 1.25, 5


class ProcessTimes:
    """How long this process waits for its data and computes its layers, compared at each line of metrics.

    Layers are timed in the forward pass, behind the hooks with which FSDP2 gathers their weights. Nothing is sent or
    received there, so a process that waits for a slow one is not slow itself. On a GPU, events take the times, and
    no step waits for them.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        self.model, self.world = model, world
        self._waited = self._computed = 0.0
        self._started: Any = None
        self._spans: deque[tuple[Any, Any]] = deque()
        self._slow_lines = [0] * world.size
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> ProcessTimes:
        encoders = (module for module in self.model.modules() if isinstance(module, Encoder))
        for layer in (layer for encoder in encoders for layer in encoder.layers if self.world.size > 1):
            # experts are gathered inside their layer
            timed: Any = layer.attention if isinstance(layer.mlp, MixtureOfExperts) else layer
            self._hooks += [
                timed.register_forward_pre_hook(self._begin),
                timed.register_forward_hook(self._end, prepend=True),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, layer: nn.Module, _: Any) -> None:
        self._started = self._now() if layer.training else None

    def _end(self, *_: Any) -> None:
        if self._started is not None:
            self._spans.append((self._started, self._now()))
            self._started = None

    def _now(self) -> Any:
        if self.world.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add_step(self, waited: float) -> None:
        """Adds the wait for the data of a step."""
        self._waited += waited
        self._read_spans()

    def _read_spans(self) -> None:
        """Adds the times of layers, on a GPU of those that it has finished by now."""
        while self._spans and (self.world.device.type != "cuda" or self._spans[0][1].query()):
            start, end = self._spans.popleft()
            self._computed += start.elapsed_time(end) / 1000 if self.world.device.type == "cuda" else end - start

    def compare(self, step: int, seconds: float) -> dict[str, float]:
        """What the line of metrics at a step says about the processes since the last one, `seconds` ago.

        `data_wait` is the share of time in which the process that waited longest for its data has waited. `slowdown` is
        how many times as long as the median process the slowest one computed. Every process must call it.
        """
        self._read_spans()
        own = (self._waited, self._computed, socket.gethostname())
        waits, computed, hosts = zip(*self.world.gather(own), strict=True)
        self._waited = self._computed = 0.0
        longest = max(range(self.world.size), key=waits.__getitem__)
        found: dict[str, float] = {"data_wait": min(waits[longest] / seconds, 1.0)}
        if self.world.size > 1:
            found["data_wait_process"] = longest
            if all(computed):
                slowdowns = compare_times(computed)
                found["slowdown"] = max(slowdowns)
                found["slowdown_process"] = slowdowns.index(max(slowdowns))
                self._warn(step, slowdowns, hosts)
        return found

    def _warn(self, step: int, slowdowns: Sequence[float], hosts: Sequence[str]) -> None:
        for process, (slowdown, host) in enumerate(zip(slowdowns, hosts, strict=True)):
            self._slow_lines[process] = self._slow_lines[process] + 1 if slowdown >= SLOW else 0
            if self._slow_lines[process] == LINES and self.world.is_main:
                logger.warning(
                    f"Process {process} on {host} is slow: at step {step}, its layers took {slowdown:.2f} times as "
                    f"long as those of the median process, and {SLOW} or more in {LINES} lines of metrics in a row."
                )


def compare_times(seconds: Sequence[float]) -> list[float]:
    """How many times as long as the median process each one took; the faster one is the median of two.

    Example:
        >>> compare_times([2.0, 2.0, 5.0, 1.0])
        [1.0, 1.0, 2.5, 0.5]
    """
    median = statistics.median_low(seconds)
    return [value / median for value in seconds]
