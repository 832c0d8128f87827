"""What the shell offers when somebody presses Tab."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bertblocks.cli.main import app
from bertblocks.config.presets import preset_names


def complete(line: str) -> list[str]:
    """The words that bash gets for a line."""
    position = str(len(line.split(" ")) - 1)
    environment = {"_BERTBLOCKS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": position}
    return CliRunner().invoke(app, [], prog_name="bertblocks", env=environment).stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bertblocks fin", ["finetune"]),
        ("bertblocks describe modernbert-l", ["modernbert-large"]),
        ("bertblocks compare bert-base roberta", ["roberta-base"]),
        ("bertblocks pretrain modern", ["modernbert-base"]),
        (
            "bertblocks pretrain demo run.checkpoints.",
            [f"run.checkpoints.{key}=" for key in ("every", "keep", "milestones", "average")],
        ),
        ("bertblocks finetune classify class_w", ["class_weights="]),
        ("bertblocks finetune tag class_w", []),
        ("bertblocks finetune cl", ["classify"]),
    ],
)
def test_bash_completes(line: str, expected: list[str]) -> None:
    assert complete(line) == expected


def test_every_preset_is_offered() -> None:
    assert complete("bertblocks describe ") == preset_names()


def test_completion_does_not_import_torch() -> None:
    """It runs at every press of Tab."""
    program = "import sys; from bertblocks.cli import completion as c; c.complete_preset(''); c.complete_recipe(''); "
    program += "sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
