"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated, Literal

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
