"""`bertblocks families` lists the checkpoints that can be read and written."""

from __future__ import annotations

from bertblocks.cli.options import AsJson
from bertblocks.cli.output import make_console, make_table, print_json, print_table

#: The commands of tasks, which make shorter columns.
SHORT_NAMES = {
    "replaced-token-detection": "detect",
    "sequence-classification": "classify",
    "token-classification": "tag",
    "question-answering": "answer",
}


def families(as_json: AsJson = False) -> None:
    """List the checkpoint families and their tasks."""
    from bertblocks.checkpoints.families import FAMILIES
    from bertblocks.models import TASK_MODELS

    tasks = [task for task in TASK_MODELS if any(task in family.model_classes for family in FAMILIES.values())]
    if as_json:
        print_json({name: family.support() for name, family in FAMILIES.items()})
        return
    table = make_table(["family", *(SHORT_NAMES.get(task, task) for task in tasks)], text_columns=len(tasks) + 1)
    for name, family in FAMILIES.items():
        table.add_row(name, *("yes" if task in family.model_classes else "-" for task in tasks))
    console = make_console()
    print_table(console, "Checkpoint families, and the tasks that are read and written", table)
    others = ", ".join(name for name, family in FAMILIES.items() if not family.in_transformers)
    meanings = ", ".join(f"{short}: {task}" for task, short in SHORT_NAMES.items())
    console.print(f"\n{meanings}.\nTransformers opens all of them without BertBlocks, except {others}.", style="dim")
