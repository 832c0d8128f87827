"""The complete state of a run between two steps, and how it is saved and restored."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from bertblocks.checkpoints.files import MAX_SHARD_BYTES, WEIGHTS, read_tensors, write_tensors
from bertblocks.core.storage import read_json, write_json
from bertblocks.core.tensor_files import PARTS, save_tensors
from bertblocks.training.checkpoints import STATE
from bertblocks.training.distributed import copy_full, reshard, to_full
from bertblocks.training.ema import WeightAverage
from bertblocks.training.optimizer_state import (
    OPTIMIZER_VALUES,
    OptimizerState,
    empty_tensors,
    restore_optimizers,
    set_optimizers,
)
from bertblocks.training.sharded import copy_to_host, read_kinds, read_parts

EMA = "ema.safetensors"
#: What names begin with among the parts of a checkpoint, next to the weights.
OPTIMIZERS, AVERAGES = "optimizer/", "ema/"


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
    #: The mean of recent losses, of how many steps it is, and how many steps were skipped as anomalies.
    loss_mean: float = 0.0
    loss_steps: int = 0
    skipped: int = 0

    @classmethod
    def read(cls, path: Path) -> TrainState:
        values = read_json(path)
        best = values.pop("best")
        return cls(**values, best=None if best is None else BestEvaluation(**best))


class Snapshot:
    """Copies of the trained state in the memory of the host, which the next steps do not change.

    Every process creates a snapshot. It has full tensors, which the main process writes, or with `is_sharded` the parts
    of this process, of which each writes its own.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], ema: WeightAverage | None, is_sharded: bool = False
    ) -> None:
        reshard(model)  # full weights that a forward pass gathered may be out of date
        gather = (lambda tensor: tensor) if is_sharded else _to_host
        self.config: Any = copy.deepcopy(model.config)
        self.weights = {name: gather(parameter.detach()) for name, parameter in model.named_parameters()}
        self.weights |= {name: gather(value) for name, value in model.state_dict().items() if _is_buffer(model, name)}
        self.optimizers = OptimizerState(model, optimizers, gather)
        self.averages = {} if ema is None else {name: gather(average) for name, average in ema.averages.items()}
        self.parts: dict[str, Tensor] = {}
        if is_sharded:
            tensors = _name_parts(self.weights, self.optimizers.tensors, self.averages)
            self.parts = copy_to_host({name: tensor.detach() for name, tensor in tensors.items()})

    def write_model(self, folder: Path) -> None:
        """Writes a folder that `from_pretrained` loads."""
        self.config.save_pretrained(folder)
        write_tensors(self.weights, folder, MAX_SHARD_BYTES)

    def write(self, folder: Path, state: dict[str, Any]) -> None:
        if self.parts:
            self.config.save_pretrained(folder)
            self.optimizers.write_values(folder)
        else:
            self.write_model(folder)
            self.optimizers.write(folder)
            if self.averages:
                save_tensors(self.averages, folder / EMA)
        write_json(folder / STATE, state)


def _to_host(tensor: Tensor) -> Tensor:
    return to_full(tensor).to("cpu", copy=True)


def _name_parts(
    weights: Mapping[str, Tensor], optimizers: Mapping[str, Tensor], averages: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    kinds = {WEIGHTS: weights, OPTIMIZERS: optimizers, AVERAGES: averages}
    return {f"{kind}{name}": tensor for kind, tensors in kinds.items() for name, tensor in tensors.items()}


def _is_buffer(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last in dict(model.get_submodule(owner).named_buffers(recurse=False))


def restore(folder: Path, model: nn.Module, optimizers: list[Optimizer], ema: WeightAverage | None) -> TrainState:
    """Loads a checkpoint into a model, its optimizers and its weight average, sharded or not."""
    if (folder / PARTS).is_dir():
        _restore_parts(folder, model, optimizers, ema)
        return TrainState.read(folder / STATE)
    weights = read_tensors(folder)
    _check_names(folder, model, weights)
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


def _check_names(folder: Path, model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The tensors of a model that a checkpoint has; an error if either lacks one of the other."""
    names = set(names)
    targets = {name: value for name, value in model.state_dict().items() if name in names}
    missing = sorted(set(dict(model.named_parameters())) - set(targets))
    if missing or len(targets) != len(names):
        name = (missing or sorted(names - set(targets)))[0]
        raise ValueError(f"{folder} does not match the model of this run: only one of them has {name!r}.")
    return targets


def _restore_parts(folder: Path, model: nn.Module, optimizers: list[Optimizer], ema: WeightAverage | None) -> None:
    """Every process reads what it needs of the parts that as many or other processes wrote."""
    kinds = read_kinds(folder / PARTS)
    own = {kind: _strip(kinds, kind) for kind in (WEIGHTS, OPTIMIZERS, AVERAGES)}
    weights = {name: value.detach() for name, value in _check_names(folder, model, own[WEIGHTS]).items()}
    states = empty_tensors(folder, model, own[OPTIMIZERS]) if optimizers else {}
    read_parts(_name_parts(weights, states, {} if ema is None else ema.averages), folder / PARTS)
    if optimizers:
        set_optimizers(read_json(folder / OPTIMIZER_VALUES), states, model, optimizers)


def _strip(kinds: Mapping[str, Any], kind: str) -> dict[str, Any]:
    return {name.removeprefix(kind): value for name, value in kinds.items() if name.startswith(kind)}
