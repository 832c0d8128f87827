"""Loads the models that a command line names."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bertblocks.core.cpu import allowed_cpus
from bertblocks.core.log import logger
from bertblocks.inference.hardware import choose_token_budget
from bertblocks.serve.app import make_app
from bertblocks.serve.batch_queue import BatchQueue
from bertblocks.serve.front import Service
from bertblocks.serve.metrics import Metrics
from bertblocks.serve.models import ModelSet, ServedModel
from bertblocks.serve.processes import ProcessRunner, WorkerFactory, can_fork
from bertblocks.serve.runner import make_threads
from bertblocks.serve.scheduler import Scheduler
from bertblocks.serve.settings import ServeSettings
from bertblocks.tasks.predictor import Predictor


def load_models(sources: Sequence[str], settings: ServeSettings, options: Mapping[str, Any]) -> ModelSet:
    """Loads checkpoints, each given as PATH or NAME=PATH, with options of `Predictor`."""
    if settings.workers and not can_fork():
        raise ValueError(f"workers is {settings.workers}; worker processes require Linux, use 0 here.")
    torch.set_num_threads(1)  # OpenMP's threads would not survive a fork, and compete with those that run the model
    models = []
    for name, path in [parse_source(source) for source in sources]:
        began = time.perf_counter()
        models.append(ServedModel(name, Predictor(path, **options)))
        logger.info(f"loaded {name} in {time.perf_counter() - began:.1f} s")
    return ModelSet(models)


def parse_source(source: str) -> tuple[str, str]:
    """The name and the path of a model. A model without a name has that of its folder.

    Example:
        >>> parse_source("models/minilm/"), parse_source("small=models/minilm")
        (('minilm', 'models/minilm/'), ('small', 'models/minilm'))
    """
    name, equals, path = source.partition("=")
    if not equals or Path(source).exists():
        return Path(source).resolve().name, source
    if not name or not path:
        raise ValueError(f"{source!r} is not a model; write PATH or NAME=PATH.")
    return name, path


def make_service(models: ModelSet, settings: ServeSettings, metrics: Metrics, threads: int | None) -> Service:
    """The routes of models, and what runs them: threads, or processes of some threads each."""
    threads = threads or max(1, allowed_cpus() // max(settings.workers, 1))
    if settings.workers:
        factory = WorkerFactory(models, threads)

    def make_runners(queue: BatchQueue) -> list[threading.Thread]:
        if settings.workers:
            return [ProcessRunner(models, queue, factory) for _ in range(settings.workers)]
        return make_threads(models, queue, threads)

    scheduler = Scheduler(
        models,
        make_runners,
        queue_tokens=settings.queue_tokens,
        queue_seconds=settings.queue_seconds,
        timeout=settings.timeout,
        batch_tokens=settings.batch_tokens or choose_token_budget(models[0].predictor.model.device, threads) // 4,
        max_text_tokens=settings.max_text_tokens,
        observer=metrics,
    )
    return Service(make_app(models, scheduler, settings), scheduler)
