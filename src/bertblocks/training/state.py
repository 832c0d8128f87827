"""The complete state of a run between two steps, and how it is saved and restored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from bertblocks.checkpoints.files import MAX_SHARD_BYTES, read_tensors, write_tensors
from bertblocks.core.storage import read_json, write_json
from bertblocks.core.tensor_files import save_tensors
from bertblocks.training.checkpoints import STATE
from bertblocks.training.distributed import copy_full, reshard, to_full
from bertblocks.training.ema import WeightAverage
from bertblocks.training.optimizer_state import OptimizerState, restore_optimizers

EMA = "ema.safetensors"


@dataclass
class BestEvaluation:
    """The best evaluation so far, and how many evaluations followed it."""

    step: int
    value: float
    evaluations_since: int = 0


@dataclass
class TrainState:
    """The counters of a run between two steps."""

    #: Finished steps.
    step: int = 0
    #: The position of the next step in the data.
    position: dict[str, Any] = field(default_factory=dict)
    #: Tokens trained on, without padding.
    tokens: int = 0
    #: Seconds spent in training steps.
    seconds: float = 0.0
    #: Sums since the last line of metrics.
    window: dict[str, float] = field(default_factory=dict)
    best: BestEvaluation | None = None
    #: The learning rate of the last step. It is recorded for readers only: schedules are functions of the step.
    learning_rate: float = 0.0
    #: The state of the gradient scaler in fp16.
    scaler: dict[str, Any] = field(default_factory=dict)
    #: Recorded for readers only: generators are seeded for every micro-batch by seed, step, rank and index.
    random: dict[str, int] = field(default_factory=dict)
    precision: str = "fp32"

    @classmethod
    def read(cls, path: Path) -> TrainState:
        values = read_json(path)
        best = values.pop("best")
        return cls(**values, best=None if best is None else BestEvaluation(**best))


class Snapshot:
    """Full tensors of the trained state. Every process creates a snapshot, and the main process writes it.

    On a CPU these are the live tensors, so write the snapshot before the next step.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], ema: WeightAverage | None) -> None:
        reshard(model)  # full weights that a forward pass gathered may be out of date
        self.config: Any = model.config
        self.weights = {name: to_full(parameter.detach()).cpu() for name, parameter in model.named_parameters()}
        self.weights |= {name: value.cpu() for name, value in model.state_dict().items() if _is_buffer(model, name)}
        self.optimizers = OptimizerState(model, optimizers)
        averages = {} if ema is None else ema.averages
        self.averages = {name: to_full(average).cpu() for name, average in averages.items()}

    def write_model(self, folder: Path) -> None:
        """Writes a folder that `from_pretrained` loads."""
        self.config.save_pretrained(folder)
        write_tensors(self.weights, folder, MAX_SHARD_BYTES)

    def write(self, folder: Path, state: TrainState) -> None:
        self.write_model(folder)
        self.optimizers.write(folder)
        if self.averages:
            save_tensors(self.averages, folder / EMA)
        write_json(folder / STATE, asdict(state))


def _is_buffer(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last in dict(model.get_submodule(owner).named_buffers(recurse=False))


def restore(folder: Path, model: nn.Module, optimizers: list[Optimizer], ema: WeightAverage | None) -> TrainState:
    """Loads a checkpoint into a model, its optimizers and its weight average, sharded or not."""
    weights = read_tensors(folder)
    targets = {name: value for name, value in model.state_dict().items() if name in weights}
    parameters = dict(model.named_parameters())
    missing = sorted(set(parameters) - set(targets))
    if missing or len(targets) != len(weights):
        name = (missing or sorted(set(weights) - set(targets)))[0]
        raise ValueError(f"{folder} does not match the model of this run: only one of them has {name!r}.")
    copy_weights(weights, model)
    restore_optimizers(folder, model, optimizers)
    if ema is not None:
        for name, values in load_file(folder / EMA).items():
            copy_full(values, ema.averages[name])
    return TrainState.read(folder / STATE)


def copy_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copies full tensors into the weights of a model, sharded or not."""
    targets = model.state_dict()
    for name, values in weights.items():
        copy_full(values, targets[name])


def mean_weights(folders: Sequence[Path]) -> dict[str, Tensor]:
    """The mean of each floating-point tensor over checkpoints; others are those of the last one."""
    mean = read_tensors(folders[-1])
    sums = {name: value.double() for name, value in mean.items() if value.is_floating_point()}
    for folder in folders[:-1]:
        weights = read_tensors(folder)
        for name, total in sums.items():
            total += weights[name]
    return mean | {name: (total / len(folders)).to(mean[name].dtype) for name, total in sums.items()}
