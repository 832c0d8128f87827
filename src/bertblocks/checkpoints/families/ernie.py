"""ERNIE 1.0 to 3.0 (Sun et al., 2019; 2020; 2021): BERT whose later versions add an embedding of the task."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.bert import BERT, read_bert
from bertblocks.checkpoints.families.bert import write_rest as write_bert
from bertblocks.checkpoints.families.family import rule
from bertblocks.config import BertBlocksConfig


def read_rest(theirs: Any) -> dict[str, Any]:
    return {**read_bert(theirs), "task_type_vocab_size": theirs.task_type_vocab_size if theirs.use_task_id else 0}


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    tasks = ours.task_type_vocab_size
    return {**write_bert(ours), "use_task_id": tasks > 0, **({"task_type_vocab_size": tasks} if tasks else {})}


ERNIE = replace(
    BERT,
    name="ernie",
    config_class="ErnieConfig",
    model_classes={task: name.replace("Bert", "Ernie") for task, name in BERT.model_classes.items()},
    aliases={"ErnieForMultipleChoice": "sequence-classification"},
    prefix="ernie",
    read_rest=read_rest,
    write_rest=write_rest,
    encoder_rules=(*BERT.encoder_rules, rule("embedding.task_type", "embeddings.task_type_embeddings")),
)
