"""A tiny pretraining run on made-up documents; as a program, one process of a run that torchrun launches."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bertblocks import BertBlocksConfig, BertBlocksForMaskedLM
from bertblocks.nn.attention import Attention
from bertblocks.objectives import MaskedLanguageModeling
from bertblocks.text.vocabulary import Vocabulary
from bertblocks.training.distributed import World, join
from bertblocks.training.held_out import HeldOutEvaluator
from bertblocks.training.loop import ModelSelection, Outcome, Trainer
from bertblocks.training.prefetch import PreparedStep
from bertblocks.training.pretraining_task import PretrainingTask
from bertblocks.training.progress import Progress
from bertblocks.training.recipe import Recipe, read_recipe
from bertblocks.training.step_results import StepResult
from bertblocks.training.training_plan import TrainingPlan

VOCABULARY = 64
BASE = [
    "phases.0.duration=24",
    "phases.0.length=32",
    "phases.0.batch_tokens=256",
    "run.log_every=1",
    "run.evaluation.every=8",
    "run.checkpoints.every=4",
    "run.device=cpu",
    "run.precision=fp32",
]


class Documents:
    """Random walks through the vocabulary, so that there is something to learn."""

    def __init__(self, seed: int, count: int = 120) -> None:
        generator = np.random.default_rng(seed)
        steps = [generator.integers(1, 4, size=generator.integers(3, 60)) for _ in range(count)]
        self.documents = [(np.cumsum(walk) % (VOCABULARY - 4) + 4).astype(np.int32) for walk in steps]
        self.lengths = np.array([len(document) for document in self.documents])

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[index]


def make_vocabulary() -> Vocabulary:
    is_special = np.arange(VOCABULARY) < 4
    return Vocabulary(VOCABULARY, 1, 2, 3, is_special, None, np.zeros(VOCABULARY, dtype=bool))


def make_recipe(*overrides: str) -> Recipe:
    return read_recipe(None, [*BASE, *overrides])


def make_model(dropout: float = 0.0, **options: Any) -> BertBlocksForMaskedLM:
    torch.manual_seed(0)
    options = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, **options}
    return BertBlocksForMaskedLM(BertBlocksConfig.from_preset("mini", attention_output_dropout=dropout, **options))


def make_experts(folder: Path) -> BertBlocksForMaskedLM | None:
    """A mixture of experts if the folder is named after it; without the losses of routers, which see a part each."""
    if "experts" not in folder.name:
        return None
    return make_model(mlp_type="moe", num_experts=4, router_balance_weight=0.0, router_z_weight=0.0)


def make_task(recipe: Recipe) -> PretrainingTask:
    objectives = [MaskedLanguageModeling(make_vocabulary(), 0.3) for _ in recipe.phases]
    held_out = HeldOutEvaluator([Documents(1)], make_vocabulary(), 32, 400)
    return PretrainingTask(TrainingPlan(recipe), {"docstrings": Documents(0)}, objectives, held_out)


def make_trainer(
    folder: Path,
    *overrides: str,
    dropout: float = 0.0,
    selection: ModelSelection | None = None,
    model: Any = None,
    world: Any = None,
) -> Trainer:
    recipe = make_recipe(*overrides)
    return Trainer(
        model or make_model(dropout),
        make_task(recipe),
        recipe.optimizer.build,
        recipe.run,
        folder,
        world or World(0, 1, torch.device("cpu")),
        Progress(Console(quiet=True)),
        clip=recipe.optimizer.clip,
        selection=selection,
    )


def train(folder: Path, *overrides: str, **options: Any) -> Outcome:
    return make_trainer(folder, *overrides, **options).train()


def die_at_flush(number: int) -> None:
    """Kills this process at its n-th flush of a file to the disk, in the middle of a save."""
    flush, left = os.fsync, [number]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def die_when_flushing(pattern: str, seconds: float) -> None:
    """Kills this process some seconds after it wants to flush a path that matches; meanwhile it trains on."""
    flush = os.fsync

    def fsync(descriptor: int) -> None:
        if re.search(pattern, os.readlink(f"/proc/self/fd/{descriptor}")):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        flush(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


def die_at_step(number: int) -> None:
    """Kills this process when it reaches a step."""
    step = Trainer._step

    def run(self: Trainer, prepared: PreparedStep) -> Any:
        if prepared.step == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return step(self, prepared)

    Trainer._step = run  # type: ignore[method-assign]


def delay_steps(seconds: float) -> None:
    """Makes every step take longer, so that events from outside find the process in one."""
    step = Trainer._step

    def run(self: Trainer, prepared: PreparedStep) -> StepResult:
        time.sleep(seconds)
        return step(self, prepared)

    Trainer._step = run  # type: ignore[method-assign]


def delay_layers(seconds: float) -> None:
    """Makes the layers of this process take longer."""
    forward = Attention.forward

    def run(self: Attention, *arguments: Any) -> Any:
        time.sleep(seconds)
        return forward(self, *arguments)

    Attention.forward = run  # type: ignore[assignment, method-assign]


def launch_forked(work: Callable[..., None], *arguments: Any, processes: int, restarts: int) -> None:
    """Runs `work` in processes of torchrun's agent, which starts all again when one dies, without importing torch."""
    config = LaunchConfig(
        1, 1, processes, run_id="forked", rdzv_backend="c10d", rdzv_endpoint="localhost:0", local_addr="127.0.0.1",
        max_restarts=restarts, monitor_interval=0.2, start_method="fork",
    )  # fmt: skip
    elastic_launch(config, work)(*arguments)


def main() -> None:
    """`FOLDER OVERRIDE... -- FOLDER OVERRIDE...`: trains one run after the other in the processes of torchrun.

    With DIE_AT_STEP the second process is killed there, unless torchrun has started it again. Every step takes
    STEP_SECONDS longer, and every layer of the second process LAYER_SECONDS.
    """
    delay_steps(float(os.environ.get("STEP_SECONDS", "0")))
    torch.set_num_threads(1)
    world = join("cpu")
    if "DIE_AT_STEP" in os.environ and world.rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        die_at_step(int(os.environ["DIE_AT_STEP"]))
    if world.rank == 1:
        delay_layers(float(os.environ.get("LAYER_SECONDS", "0")))
    for run in " ".join(sys.argv[1:]).split(" -- "):
        folder, *overrides = run.split()
        train(Path(folder), *overrides, world=world, model=make_experts(Path(folder)))


if __name__ == "__main__":
    main()
