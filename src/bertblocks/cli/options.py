"""Arguments and options that several commands share."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal

import typer

SOURCE_HELP = (
    "A preset (see `bertblocks presets`), a folder with a config.json of BertBlocks or of a transformers family that "
    "BertBlocks reads, or a .json config file, or a training file of NeoBERT (.yaml). Weights are not needed."
)

TaskName = Literal[
    "base",
    "masked-lm",
    "pretraining",
    "replaced-token-detection",
    "sequence-classification",
    "token-classification",
    "question-answering",
    "masked-diffusion",
]
Task = Annotated[TaskName, typer.Option("--task", help="The head on the encoder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only JSON.")]
Events = Annotated[
    bool,
    typer.Option("--json", help="Print only JSON, a line for each event: start, step, evaluation and, last, result."),
]


def field_parameters(options: type[Any]) -> list[inspect.Parameter]:
    """A keyword parameter for each field of a dataclass of options."""
    types = typing.get_type_hints(options, include_extras=True)
    return [
        inspect.Parameter(
            entry.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if entry.default is MISSING else entry.default,
            annotation=types[entry.name],
        )
        for entry in fields(options)
    ]


def set_parameters(command: Callable[..., None], parameters: list[inspect.Parameter]) -> None:
    """Gives a command that takes any keywords a signature, from which typer builds its options."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {entry.name: entry.annotation for entry in parameters}


def take_fields(options: type[Any], values: dict[str, Any]) -> Any:
    """Moves the values of a dataclass's fields into an instance of it."""
    return options(**{entry.name: values.pop(entry.name) for entry in fields(options)})


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command an option for each field of its parameters that are dataclasses."""
    parameters = inspect.signature(command, eval_str=True).parameters
    types: dict[str, Any] = {name: entry.annotation for name, entry in parameters.items()}
    groups = {name: types[name] for name in types if is_dataclass(types[name])}

    @functools.wraps(command)
    def run(**values: Any) -> None:
        command(**{name: take_fields(group, values) for name, group in groups.items()}, **values)

    expanded: list[inspect.Parameter] = []
    for name, entry in parameters.items():
        expanded += (
            field_parameters(groups[name]) if name in groups else [entry.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        )
    set_parameters(run, expanded)
    return run


def parse_shard(text: str) -> tuple[int, int]:
    """The I and N of `--shard I/N`.

    Example:
        >>> parse_shard("1/2")
        (1, 2)
    """
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and int(number) < int(count)):
        raise ValueError(f"--shard is {text!r}; it must be I/N, such as 0/2 and 1/2 for two workers.")
    return int(number), int(count)
