"""Splinter (Ram et al., 2021): BERT without a pooler, with a head that reads answers off the vector of a question."""

from __future__ import annotations

from dataclasses import replace

from bertblocks.checkpoints.families.bert import BERT
from bertblocks.checkpoints.families.bert_generation import BERT_GENERATION
from bertblocks.checkpoints.families.family import rule

#: Our names for the layers of the head, and theirs.
LAYERS = {
    "question_start": "query_start_transform",
    "question_end": "query_end_transform",
    "start": "start_transform",
    "end": "end_transform",
}

SPLINTER = replace(
    BERT_GENERATION,
    name="splinter",
    config_class="SplinterConfig",
    model_classes={"base": "SplinterModel", "question-answering": "SplinterForQuestionAnswering"},
    # the same weights
    aliases={"SplinterForPreTraining": "question-answering"},
    prefix="splinter",
    keys={**BERT.keys, "tie_word_embeddings": None, "question_token_id": "question_token_id"},
    fixed={"pooler": False, "qa_head": "question_aware"},
    required={},
    head_rules={
        "base": (),
        "question-answering": (
            *(rule(f"spans.{ours}.dense", f"splinter_qass.{theirs}.dense") for ours, theirs in LAYERS.items()),
            *(rule(f"spans.{ours}.norm", f"splinter_qass.{theirs}.LayerNorm") for ours, theirs in LAYERS.items()),
            rule("spans.start_form", "splinter_qass.start_classifier"),
            rule("spans.end_form", "splinter_qass.end_classifier"),
        ),
    },
)
