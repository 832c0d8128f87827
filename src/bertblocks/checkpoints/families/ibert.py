"""I-BERT (Kim et al., 2021) before it is quantized: RoBERTa with room for the ranges of its activations."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.roberta import ROBERTA, read_rest
from bertblocks.config import BertBlocksConfig

#: What integer arithmetic stores. It follows from the weights, except for ranges, which an unquantized model ignores.
QUANTIZED = (r"\.(weight_integer|bias_integer|\w*_scaling_factor|x_min|x_max|shift)$",)


def read_ibert(theirs: Any) -> dict[str, Any]:
    theirs = copy.copy(theirs)
    theirs.classifier_dropout = None  # it has no such key
    return read_rest(theirs)


def write_ibert(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": ours.embedding_dropout}


IBERT = replace(
    ROBERTA,
    name="ibert",
    config_class="IBertConfig",
    model_classes={task: name.replace("Roberta", "IBert") for task, name in ROBERTA.model_classes.items()},
    prefix="ibert",
    keys={ours: name for ours, name in BERT.keys.items() if ours != "hidden_act"},
    fixed={**ROBERTA.fixed, "hidden_act": "gelu"},
    required={"hidden_act": "gelu", "quant_mode": False},
    read_rest=read_ibert,
    write_rest=write_ibert,
    derived=QUANTIZED,
)
