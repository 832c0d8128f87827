"""Experiment trackers, imported only when a run asks for them: tensorboard, wandb, trackio, and a stream of events."""

from __future__ import annotations

import importlib
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertblocks.core.requirements import require_packages

PROJECT = "bertblocks"


class Tracker(ABC):
    """Receives metrics by step, in addition to metrics.jsonl."""

    #: The module that the tracker imports.
    module_name: str

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.module: Any = importlib.import_module(self.module_name)

    @abstractmethod
    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        """Starts a run, or continues it after `step`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of one step."""

    @abstractmethod
    def close(self) -> None:
        """Sends the remaining metrics."""


class TensorBoard(Tracker):
    """Writes event files into the run's folder `tensorboard`."""

    module_name = "torch.utils.tensorboard"

    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        # metrics logged after the last checkpoint will be logged again
        purge = {"purge_step": step + 1} if step else {}
        self.writer = self.module.SummaryWriter(str(self.folder / "tensorboard"), **purge)
        self.writer.add_text("recipe", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    """Logs to a Weights & Biases run, which a restart in the same folder continues."""

    module_name = "wandb"

    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        identity = f"{self.name}-{zlib.crc32(str(self.folder.resolve()).encode()):08x}"
        self.run = self.module.init(
            project=PROJECT, name=self.name, id=identity, dir=str(self.folder), config=dict(config), resume="allow"
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.run.log(dict(metrics), step=step)

    def close(self) -> None:
        self.run.finish()


class Trackio(WandB):
    """Logs to Trackio on this machine; `trackio show` displays it."""

    module_name = "trackio"

    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        self.run = self.module.init(project=PROJECT, name=self.name, config=dict(config), resume="allow", embed=False)


class EventStream(Tracker):
    """Passes what happens in a run to a function, as JSON values with the key `event`: start, step or evaluation."""

    def __init__(self, emit: Callable[[dict[str, Any]], None]) -> None:
        self.emit = emit

    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        self.emit({"event": "start", "step": step})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.emit({"event": "step" if "learning_rate" in metrics else "evaluation", "step": step, **metrics})

    def close(self) -> None:
        return


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def get_trackers(
    names: Sequence[str], folder: Path, name: str, on_event: Callable[[dict[str, Any]], None] | None = None
) -> list[Tracker]:
    """The trackers of a run, not yet started. A missing package raises an error before any work is done.

    Example:
        >>> get_trackers([], Path("runs/demo"), "demo")
        []
    """
    require_packages(names, "trackers")
    trackers: list[Tracker] = [TRACKERS[tracker](folder, name) for tracker in names]
    return trackers if on_event is None else [*trackers, EventStream(on_event)]
