"""Options of commands that run a model, and of those that read files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from bertblocks.text.inputs import Roles
    from bertblocks.text.records import ReadOptions

#: The files that every command reads.
FILES_HELP = "Lines of text, or csv, tsv, jsonl, json, parquet, arrow or xlsx tables, also with .gz or .zst"
Column = Annotated[
    list[str] | None,
    typer.Option(
        "--column", metavar="ROLE=NAME", help="The column of a role, if the guess is wrong; a.b is a nested key."
    ),
]
Read = Annotated[
    list[str] | None,
    typer.Option(
        "--read",
        metavar="KEY=VALUE",
        help="How to read files, if detection is wrong: format, delimiter, quote, encoding, header (yes or no).",
    ),
]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; by default a GPU if there is one.")]
DType = Annotated[
    Literal["float32", "bfloat16", "float16"] | None,
    typer.Option(help="The numbers to compute with; by default what suits the hardware."),
]
Int8 = Annotated[bool, typer.Option("--int8", help="Run linear layers in int8: faster, slightly less exact.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of the model; by default what suits the machine.")]
OnError = Annotated[
    Literal["stop", "skip"], typer.Option("--on-error", help="How to handle inputs that cannot be used.")
]


@dataclass(frozen=True)
class ModelOptions:
    """How a model runs."""

    device: Device = None
    dtype: DType = None
    int8: Int8 = False
    threads: Threads = None

    def for_predictor(self) -> dict[str, Any]:
        """The options of `Predictor`."""
        import torch
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        number_type = None if self.dtype is None else getattr(torch, self.dtype)
        return {
            "device": check_device(self.device),
            "dtype": number_type,
            "int8": self.int8,
            "threads": self.threads,
        }


@dataclass(frozen=True)
class TableOptions:
    """How files are read."""

    column: Column = None
    read: Read = None

    def columns(self, roles: Roles) -> dict[str, str]:
        return parse_columns(self.column or [], roles)

    @property
    def reading(self) -> ReadOptions:
        from bertblocks.text.records import ReadOptions

        return ReadOptions.parse(self.read or [])


def check_device(name: str | None) -> str | None:
    import torch

    if name is not None:
        try:
            torch.empty(0, device=name)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ValueError(f"--device is {name!r}, which is not available here ({reason}); cpu always is.") from error
    return name


def parse_columns(columns: list[str], roles: Roles) -> dict[str, str]:
    from bertblocks.core.registry import nearest

    given = {}
    for column in columns:
        role, _, name = column.partition("=")
        if role not in roles.names or not name:
            hint = nearest(role, roles.names)
            raise ValueError(
                f"--column is {column!r}; it must be ROLE=NAME, where the role is {' or '.join(roles.names)}{hint}."
            )
        given[role] = name
    return given
