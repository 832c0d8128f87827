"""What optimizers remember, as named tensors and JSON values: any optimizer of torch's interface can be resumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bertblocks.core.storage import read_json, write_json
from bertblocks.core.tensor_files import save_tensors
from bertblocks.training.distributed import shard_like, to_full, to_local

#: The tensors; and the numbers, and how lists and mappings hold tensors.
OPTIMIZER, OPTIMIZER_VALUES = "optimizer.safetensors", "optimizer.json"
#: Marks the name of a tensor among other values.
TENSOR = "tensor"


class OptimizerState:
    """The states of all parameters and the numbers of all parameter groups.

    `gather` turns a tensor that may be sharded into the one to write.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[Optimizer], gather: Callable[[Tensor], Tensor] = to_full
    ) -> None:
        self._gather = gather
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[int, torch.Size], str] = {}
        self.values = {
            "parameters": {
                name: {key: self._pack(value, key, name) for key, value in state.items()}
                for name, parameter in model.named_parameters()
                for optimizer in optimizers
                if (state := optimizer.state.get(parameter))
            },
            "groups": [
                [{key: value for key, value in group.items() if _is_number(value)} for group in optimizer.param_groups]
                for optimizer in optimizers
            ],
        }

    def write(self, folder: Path) -> None:
        save_tensors({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, folder / OPTIMIZER)
        self.write_values(folder)

    def write_values(self, folder: Path) -> None:
        write_json(folder / OPTIMIZER_VALUES, self.values)

    def _pack(self, value: Any, key: str, owner: str) -> Any:
        """A value with the names of tensors in their place. A tensor that several parameters share has one name."""
        if isinstance(value, Tensor):
            local = to_local(value)
            identity = (local.data_ptr(), value.shape) if local.numel() else (-len(self.tensors), value.shape)
            name = self._names.setdefault(identity, f"{key}/{owner}")
            if name not in self.tensors:
                self.tensors[name] = self._gather(value)
            return {TENSOR: name}
        if isinstance(value, (list, tuple)):
            return [self._pack(part, f"{key}.{index}", owner) for index, part in enumerate(value)]
        if isinstance(value, dict):
            return {inner: self._pack(part, f"{key}.{inner}", owner) for inner, part in value.items()}
        return value


def restore_optimizers(folder: Path, model: nn.Module, optimizers: list[Optimizer]) -> None:
    """Loads the state that a checkpoint holds into optimizers of a model, sharded or not."""
    tensors, file = load_file(folder / OPTIMIZER), folder / OPTIMIZER_VALUES
    values = read_json(file) if file.is_file() else _former_values(tensors)
    set_optimizers(values, tensors, model, optimizers)


def empty_tensors(
    folder: Path, model: nn.Module, kinds: Mapping[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, Tensor]:
    """Tensors to read the state of a checkpoint into, sharded as the parameters to which they belong."""
    parameters = dict(model.named_parameters())
    tensors: dict[str, Tensor] = {}
    for owner, state in read_json(folder / OPTIMIZER_VALUES)["parameters"].items():
        for name in _names_in(state):
            shape, kind = kinds[name]
            like = parameters[owner]
            is_alike = shape == like.shape
            tensors[name] = torch.empty_like(like, dtype=kind) if is_alike else torch.empty(shape, dtype=kind)
    return tensors


def _names_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [value[TENSOR]] if TENSOR in value else [name for part in value.values() for name in _names_in(part)]
    return [name for part in value for name in _names_in(part)] if isinstance(value, list) else []


def set_optimizers(
    values: dict[str, Any], tensors: dict[str, Tensor], model: nn.Module, optimizers: list[Optimizer]
) -> None:
    """Gives optimizers of a model the values and tensors of a checkpoint. The tensors are full, or sharded alike."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer, groups in zip(optimizers, values["groups"], strict=False):  # former checkpoints have no groups
        for group, numbers in zip(optimizer.param_groups, groups, strict=True):
            group.update(numbers)
    for optimizer in optimizers:
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            own = values["parameters"].get(names[id(parameter)], {})
            place = _Placement(parameter, optimizer)
            optimizer.state[parameter] = {key: _unpack(value, tensors, place) for key, value in own.items()}


class _Placement:
    """Puts a full tensor on the device of a parameter, and shards it as the parameter is if it has its shape."""

    def __init__(self, parameter: Tensor, optimizer: Optimizer) -> None:
        self.parameter, self.optimizer = parameter, optimizer

    def __call__(self, full: Tensor) -> Tensor:
        parameter = self.parameter
        if full.dim() == 0 and parameter.dim() > 0:
            # the step count, which fused kernels expect on the device of the weights
            return full.to(parameter.device) if isinstance(self.optimizer, torch.optim.AdamW) else full
        full = full.to(parameter.device)
        is_sharded = isinstance(full, DTensor)
        return shard_like(full, parameter) if full.shape == parameter.shape and not is_sharded else full


def _unpack(value: Any, tensors: dict[str, Tensor], place: Callable[[Tensor], Tensor]) -> Any:
    """The value with tensors in place of their names."""
    if isinstance(value, list):
        return [_unpack(part, tensors, place) for part in value]
    if isinstance(value, dict):
        if TENSOR in value:
            return place(tensors[value[TENSOR]])
        return {key: _unpack(part, tensors, place) for key, part in value.items()}
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _former_values(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """The values of checkpoints without a file of them, in which every state is a tensor."""
    parameters: dict[str, dict[str, Any]] = {}
    for name in tensors:
        key, _, owner = name.partition("/")
        parameters.setdefault(owner, {})[key] = {TENSOR: name}
    return {"parameters": parameters, "groups": []}
