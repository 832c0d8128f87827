"""Where metrics go beside metrics.jsonl: tensorboard, wandb and trackio, imported only when they are asked for."""

from __future__ import annotations

import importlib
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT = "bertblocks"


class Tracker(ABC):
    """A place that takes numbers by step."""

    #: The package that it needs, and the extra of ours that brings it.
    package: str
    extra: str

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        try:
            self.module: Any = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"run.trackers asks for {self.package.rpartition('.')[2]}, whose package {error.name} is not "
                f"installed; pip install 'bertblocks[{self.extra}]' brings it."
            ) from error

    @abstractmethod
    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        """Begins a run, or continues it behind `step`."""

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step."""

    @abstractmethod
    def close(self) -> None:
        """Sends what has not been sent."""


class TensorBoard(Tracker):
    """Event files in the folder `tensorboard` of the run."""

    package, extra = "torch.utils.tensorboard", "training"

    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        # what a stopped run has logged beyond its checkpoint is logged again
        purge = {"purge_step": step + 1} if step else {}
        self.writer = self.module.SummaryWriter(str(self.folder / "tensorboard"), **purge)
        self.writer.add_text("recipe", f"```\n{json.dumps(config, indent=2)}\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WandB(Tracker):
    """A run of Weights & Biases that a restart in the same folder continues."""

    package, extra = "wandb", "trackers"

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
    """Trackio, on this machine; `trackio show` opens it."""

    package = "trackio"

    def start(self, config: Mapping[str, Any], step: int = 0) -> None:
        self.run = self.module.init(project=PROJECT, name=self.name, config=dict(config), resume="allow", embed=False)


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "trackio": Trackio}


def get_trackers(names: Sequence[str], folder: Path, name: str) -> list[Tracker]:
    """The trackers of a recipe, not yet started; one whose package is missing is refused before any work is done.

    Example:
        >>> get_trackers([], Path("runs/demo"), "demo")
        []
    """
    return [TRACKERS[one](folder, name) for one in names]
