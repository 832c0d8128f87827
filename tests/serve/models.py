"""Tiny models with each head, for the tests of the server."""

from __future__ import annotations

from typing import Any

import torch

from bertblocks import (
    BertBlocksForMaskedLM,
    BertBlocksForQuestionAnswering,
    BertBlocksForSequenceClassification,
    BertBlocksForTokenClassification,
    BertBlocksModel,
    Predictor,
)
from bertblocks.serve.models import ModelSet, ServedModel
from tests.helpers import tiny_config
from tests.small_tokenizers import wrap

TEXTS = ["the cat sat on the mat", "a dog", "", "who let the dogs out of the house last night"]


def make_predictor(kind: type = BertBlocksModel, seed: int = 0, int8: bool = False, **options: Any) -> Predictor:
    """A predictor with random weights."""
    torch.manual_seed(seed)
    tokenizer = wrap("wordpiece")
    config = tiny_config(vocab_size=len(tokenizer), **options)
    return Predictor(kind(config).eval(), tokenizer, int8=int8, threads=1)


def make_models() -> ModelSet:
    """One model for each head."""
    kinds = {
        "embedder": (BertBlocksModel, {}),
        "filler": (BertBlocksForMaskedLM, {}),
        "reranker": (BertBlocksForSequenceClassification, {"num_labels": 1}),
        "classifier": (BertBlocksForSequenceClassification, {"num_labels": 3}),
        "tagger": (BertBlocksForTokenClassification, {"num_labels": 3, "id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}),
        "reader": (BertBlocksForQuestionAnswering, {}),
    }
    return ModelSet([ServedModel(name, make_predictor(kind, **options)) for name, (kind, options) in kinds.items()])
