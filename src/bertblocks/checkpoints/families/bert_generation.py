"""The encoder of BERT for sequence generation (Rothe et al., 2020): BERT without token types and pooler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.config import BertBlocksConfig

DROPOUTS = ("embedding_dropout", "attention_output_dropout", "mlp_output_dropout", "classifier_dropout")


def read_rest(theirs: Any) -> dict[str, Any]:
    return dict.fromkeys(DROPOUTS, theirs.hidden_dropout_prob)


def write_rest(ours: BertBlocksConfig) -> dict[str, Any]:
    return {"hidden_dropout_prob": ours.embedding_dropout}


BERT_GENERATION = replace(
    BERT,
    name="bert-generation",
    config_class="BertGenerationConfig",
    model_classes={"base": "BertGenerationEncoder"},
    aliases={},
    pooler_option=None,
    keys={ours: name for ours, name in BERT.keys.items() if ours != "type_vocab_size"},
    fixed={"type_vocab_size": 0, "pooler": False},
    read_rest=read_rest,
    write_rest=write_rest,
    head_rules={"base": ()},
)
