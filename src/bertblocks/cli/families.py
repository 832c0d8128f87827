"""`bertblocks families` lists the checkpoints that can be read and written."""

from __future__ import annotations

from bertblocks.cli.options import AsJson
from bertblocks.cli.output import make_console, make_table, print_json, print_table


def families(as_json: AsJson = False) -> None:
    """List the checkpoint families that can be read and written, by task."""
    from bertblocks.checkpoints.families import FAMILIES
    from bertblocks.models import TASK_MODELS

    tasks = [task for task in TASK_MODELS if any(task in family.model_classes for family in FAMILIES.values())]
    if as_json:
        print_json({name: family.support() for name, family in FAMILIES.items()})
        return
    table = make_table(["family", *tasks, "opens in transformers"], text_columns=len(tasks) + 2)
    for name, family in FAMILIES.items():
        marks = ["in, out" if task in family.model_classes else "-" for task in tasks]
        table.add_row(name, *marks, "yes" if family.in_transformers else "-")
    print_table(make_console(), "Checkpoint families", table)
