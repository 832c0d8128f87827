"""All that a run is made of between two steps, into a checkpoint and back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from bertblocks.checkpoints.files import MAX_SHARD_BYTES, read_tensors, save_tensors, write_tensors
from bertblocks.core.storage import write_json
from bertblocks.training.checkpoints import STATE
from bertblocks.training.distributed import place_like, put, reshard, whole
from bertblocks.training.ema import RunningMean

OPTIMIZER, EMA = "optimizer.safetensors", "ema.safetensors"


@dataclass
class Best:
    """The best evaluation so far, and how many came after it."""

    step: int
    value: float
    evaluations_since: int = 0


@dataclass
class TrainState:
    """Numbers of a run between two steps."""

    #: Steps that are done.
    step: int = 0
    #: Where the next step's items are.
    position: dict[str, Any] = field(default_factory=dict)
    #: Real tokens that were trained on.
    tokens: int = 0
    #: Seconds spent in steps.
    seconds: float = 0.0
    #: Sums since the last line of metrics.
    window: dict[str, float] = field(default_factory=dict)
    best: Best | None = None
    #: The learning rate of the last step: schedules are functions of the step, and this is for the reader.
    learning_rate: float = 0.0
    #: The loss scale of fp16 and its growth.
    scaler: dict[str, Any] = field(default_factory=dict)
    #: Generators are seeded anew for every micro-batch from the seed, the step, the process and the micro-batch.
    random: dict[str, int] = field(default_factory=dict)
    precision: str = "fp32"

    @classmethod
    def read(cls, path: Path) -> TrainState:
        values = json.loads(path.read_text(encoding="utf-8"))
        best = values.pop("best")
        return cls(**values, best=None if best is None else Best(**best))


class Snapshot:
    """Whole tensors of everything that is trained. Every process takes it, the first one writes it.

    On a CPU these are the live tensors themselves: it is to be written before training goes on.
    """

    def __init__(self, model: nn.Module, optimizers: list[Optimizer], ema: RunningMean | None) -> None:
        reshard(model)  # weights that a forward pass has gathered are not the ones to read
        self.config: Any = model.config
        self.weights = {name: whole(one.detach()).cpu() for name, one in model.named_parameters()}
        self.weights |= {name: one.cpu() for name, one in model.state_dict().items() if _is_buffer(model, name)}
        self.moments = {
            f"{key}/{name}": whole(value).cpu()
            for name, one in model.named_parameters()
            for optimizer in optimizers
            for key, value in optimizer.state.get(one, {}).items()
        }
        self.means = {} if ema is None else {name: whole(one).cpu() for name, one in ema.means.items()}

    def write_model(self, folder: Path) -> None:
        """What `from_pretrained` opens."""
        self.config.save_pretrained(folder)
        write_tensors(self.weights, folder, MAX_SHARD_BYTES)

    def write(self, folder: Path, state: TrainState) -> None:
        self.write_model(folder)
        save_tensors(self.moments, folder / OPTIMIZER)
        if self.means:
            save_tensors(self.means, folder / EMA)
        write_json(folder / STATE, asdict(state))


def _is_buffer(model: nn.Module, name: str) -> bool:
    owner, _, last = name.rpartition(".")
    return last in dict(model.get_submodule(owner).named_buffers(recurse=False))


def restore(folder: Path, model: nn.Module, optimizers: list[Optimizer], ema: RunningMean | None) -> TrainState:
    """Puts a checkpoint into a model, its optimizers and its running mean, sharded or not."""
    weights = read_tensors(folder)
    targets = {name: one for name, one in model.state_dict().items() if name in weights}
    parameters = dict(model.named_parameters())
    missing = sorted(set(parameters) - set(targets))
    if missing or len(targets) != len(weights):
        strange = (missing or sorted(set(weights) - set(targets)))[0]
        raise ValueError(f"{folder} holds another model than the recipe's: {strange!r} is not in both.")
    for name, values in weights.items():
        put(values, targets[name])
    moments: dict[str, dict[str, Tensor]] = {}
    for name, values in load_file(folder / OPTIMIZER).items():
        key, _, owner = name.partition("/")
        moments.setdefault(owner, {})[key] = values
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for one in group["params"]:
                name = next(name for name, other in parameters.items() if other is one)
                optimizer.state[one] = {
                    key: _moment(values, one, optimizer) for key, values in moments.get(name, {}).items()
                }
    if ema is not None:
        for name, values in load_file(folder / EMA).items():
            put(values, ema.means[name])
    return TrainState.read(folder / STATE)


def _moment(values: Tensor, parameter: Tensor, optimizer: Optimizer) -> Tensor:
    if values.dim() == 0 and parameter.dim() > 0:
        # the count of steps, which fused kernels want beside the weights
        return values.to(parameter.device) if isinstance(optimizer, torch.optim.AdamW) else values
    return place_like(values.to(parameter.device), parameter, is_whole=True)
