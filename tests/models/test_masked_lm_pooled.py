"""Masked LM with terms on mean vectors, tested against loops over texts."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from bertblocks import BertBlocksForMaskedLM
from bertblocks.data.stream import DocumentChunk
from bertblocks.models import MaskedLMWithPooledTerms as Model
from bertblocks.objectives import MaskedLanguageModeling
from bertblocks.objectives import MaskedLMWithPooledTerms as Objective
from tests.helpers import tiny_config
from tests.training.helpers import VOCABULARY, make_vocabulary

TEXTS = [[10, 11, 10, 3, 12], [20, 20], [30, 31, 32, 10]]


def make_batch(objective: Objective) -> Any:
    rows = [[DocumentChunk(np.array(ids, dtype=np.int32), 0, index, 0, index)] for index, ids in enumerate(TEXTS)]
    return objective.batch([[*rows[0], *rows[1]], rows[2]], seed=1)


def test_both_terms_equal_sums_over_texts() -> None:
    torch.manual_seed(0)
    vocabulary = make_vocabulary()
    objective = Objective(MaskedLanguageModeling(vocabulary, 0.4, z_loss=0.01), bag_of_subwords=0.5, isotropy=2.0)
    model = Model(BertBlocksForMaskedLM(tiny_config(vocab_size=VOCABULARY)), predicts_bags=True).double().eval()
    torch.nn.init.normal_(model.bag_bias)
    batch = make_batch(objective)
    assert batch.counts == {"masked_lm": int((batch.labels != -100).sum()), "bag_of_subwords": 3, "isotropy": 6}
    losses = objective.losses(model, batch)

    parts = batch.input_ids.split([7, 4, 6])
    hidden = [model.encoder.model(part[None]).last_hidden_state[0] for part in parts]
    logits = model.encoder.logits(torch.cat(hidden))
    scored = batch.labels != -100
    masked = F.cross_entropy(logits[scored], batch.labels[scored], reduction="sum")
    masked = masked + 0.01 * logits[scored].logsumexp(dim=-1).square().sum()
    torch.testing.assert_close(losses["masked_lm"], masked)

    vectors = [states.mean(dim=0) for states in hidden]
    bag = torch.zeros((), dtype=torch.float64)
    for vector, text in zip(vectors, TEXTS, strict=True):
        target = torch.tensor([float(token in text and token >= 4) for token in range(VOCABULARY)]).double()
        scores = model.encoder.model.embedding.token.weight @ vector + model.bag_bias
        bag = bag + F.binary_cross_entropy_with_logits(scores, target)
    torch.testing.assert_close(losses["bag_of_subwords"], 0.5 * bag)

    pairs = itertools.permutations(vectors, 2)
    expected = sum(F.cosine_similarity(first, second, dim=0) ** 2 for first, second in pairs)
    torch.testing.assert_close(losses["isotropy"], 2.0 * expected)
    sum(losses.values()).backward()  # type: ignore[union-attr]
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize(("bag", "isotropy", "terms"), [(0.1, 0.0, ["bag_of_subwords"]), (0.0, 0.1, ["isotropy"])])
def test_a_term_without_weight_is_not_computed(bag: Any, isotropy: Any, terms: Any) -> None:
    objective = Objective(MaskedLanguageModeling(make_vocabulary(), 0.4), bag, isotropy)
    model = Model(BertBlocksForMaskedLM(tiny_config(vocab_size=VOCABULARY)), predicts_bags=bag > 0)
    batch = make_batch(objective)
    assert list(batch.counts) == list(objective.losses(model, batch)) == ["masked_lm", *terms]
    assert (model.bag_bias is None) == (bag == 0)


def test_a_single_text_has_no_pairs() -> None:
    objective = Objective(MaskedLanguageModeling(make_vocabulary(), 0.4), 0.0, 1.0)
    model = Model(BertBlocksForMaskedLM(tiny_config(vocab_size=VOCABULARY)), predicts_bags=False)
    batch = objective.batch([[DocumentChunk(np.array([5, 6], dtype=np.int32), 0, 0, 0, 0)]], seed=0)
    assert batch.counts["isotropy"] == 0
    assert objective.losses(model, batch)["isotropy"].item() == pytest.approx(0.0, abs=1e-6)


def test_bags_need_embeddings_as_wide_as_the_layers() -> None:
    encoder = BertBlocksForMaskedLM(tiny_config(embedding_size=16))
    with pytest.raises(ValueError, match="bag_of_subwords needs embeddings as wide as the layers, but embedding_size"):
        Model(encoder, predicts_bags=True)
