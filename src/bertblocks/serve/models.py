"""The models that a server has, and what each can do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bertblocks.core.registry import nearest
from bertblocks.inference.pipeline import Pipeline
from bertblocks.inference.splitting import TooLong
from bertblocks.serve.errors import ModelNotFound, TaskNotServed
from bertblocks.tasks.predictor import Predictor

#: By task, the method of `Predictor`.
METHODS = {
    "embed": "encode",
    "sparse": "encode_sparse",
    "multi": "encode_multi",
    "rerank": "rerank",
    "classify": "classify",
    "tag": "tag",
    "answer": "answer",
    "fill-mask": "fill_mask",
}


@dataclass(frozen=True)
class ServedModel:
    """A model and the name that clients use for it."""

    name: str
    predictor: Predictor

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that this model can do, by its head."""
        return tuple(task for task in METHODS if self._can_do(task))

    def _can_do(self, task: str) -> bool:
        try:
            self.predictor.pipeline(METHODS[task])
        except ValueError:
            return False
        return True


class ModelSet(Sequence[ServedModel]):
    """The models of a server, in the order in which they were given."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        names = [model.name for model in models]
        if not names:
            raise ValueError("There are no models; give at least one.")
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"Two models have the name {name!r}; write NAME=PATH to give one of them another.")
        self._models = list(models)

    def __getitem__(self, index: Any) -> Any:
        return self._models[index]

    def __len__(self) -> int:
        return len(self._models)

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._models)

    def find(self, name: str | None, task: str) -> ServedModel:
        """The model with a name, or the first that can do the task."""
        able = [model for model in self if task in model.tasks]
        if not name:
            if not able:
                raise TaskNotServed(f"No model here can do {task}; {self._describe()}.")
            return able[0]
        found = next((model for model in self if model.name == name), None)
        if found is None:
            names = [model.name for model in self]
            raise ModelNotFound(
                f"There is no model {name[:200]!r}; the models are {', '.join(names)}{nearest(name, names)}."
            )
        if found not in able:
            others = f" {', '.join(model.name for model in able)} can." if able else ""
            raise TaskNotServed(f"{found.name} cannot do {task}, only {', '.join(found.tasks)}.{others}")
        return found

    def _describe(self) -> str:
        return "; ".join(f"{model.name} can do {', '.join(model.tasks)}" for model in self)


@dataclass(frozen=True)
class PipelineKey:
    """What names a pipeline, in this process and in others that have the same models."""

    model: int
    method: str
    too_long: TooLong | None
    options: tuple[tuple[str, Any], ...]


class Pipelines:
    """The pipelines of a set of models, each made once."""

    #: Pipelines that are kept; they are cheap to make again.
    MAX_KEPT = 256

    def __init__(self, models: ModelSet) -> None:
        self._models = models
        self._kept: dict[PipelineKey, Pipeline[Any]] = {}

    def __getitem__(self, key: PipelineKey) -> Pipeline[Any]:
        found = self._kept.get(key)
        if found is None:
            predictor = self._models[key.model].predictor
            found = predictor.pipeline(key.method, too_long=key.too_long, **dict(key.options))
            if len(self._kept) >= self.MAX_KEPT:
                self._kept.clear()
            self._kept[key] = found
        return found
