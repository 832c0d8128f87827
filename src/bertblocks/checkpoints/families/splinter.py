"""Splinter (Ram et al., 2021): BERT without a pooler. Its head for questions is not read."""

from __future__ import annotations

from dataclasses import replace

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.bert_generation import BERT_GENERATION

SPLINTER = replace(
    BERT_GENERATION,
    name="splinter",
    config_class="SplinterConfig",
    model_classes={"base": "SplinterModel"},
    aliases={"SplinterForQuestionAnswering": "base", "SplinterForPreTraining": "base"},
    prefix="splinter",
    keys={**BERT.keys, "tie_word_embeddings": None},
    fixed={"pooler": False},
    required={},
)
