"""The pretraining model with two heads, tested against transformers' BERT and against its parts."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, BertConfig, BertForPreTraining

import bertblocks
from bertblocks import BertBlocksForMaskedLM, BertBlocksForPreTraining, from_huggingface
from tests.helpers import expect_log, pad_ids, ragged_ids, tiny_config


def labelled(seed: int = 3) -> dict[str, torch.Tensor]:
    ids, mask = pad_ids(ragged_ids([9, 4, 6]))
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.rand(ids.shape, generator=generator) < 0.4) & (mask == 1)
    hidden[:, 1] = True
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "token_type_ids": ((torch.arange(9) > 2).long() * mask),
        "labels": ids.masked_fill(~hidden, -100),
        "order_labels": torch.tensor([0, 1, 1]),
    }


def test_two_steps_of_training_equal_transformers() -> None:
    """Loss and weights, with the next-sentence label of transformers as order label."""
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    theirs = BertForPreTraining(BertConfig(**sizes, **no_dropout, intermediate_size=24)).train()
    ours = from_huggingface(theirs).train()
    assert isinstance(ours, BertBlocksForPreTraining)
    batch = labelled()
    for _ in range(2):
        actual = ours(**batch).loss
        rest = {key: value for key, value in batch.items() if key != "order_labels"}
        expected = theirs(**rest, next_sentence_label=batch["order_labels"]).loss
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        for model, loss in ((ours, actual), (theirs, expected)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(ours.order.weight, theirs.cls.seq_relationship.weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.model.pooler.dense.weight, theirs.bert.pooler.dense.weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_totals_are_sums_over_labelled_tokens_and_sequences(training: Any) -> None:
    model = BertBlocksForPreTraining(tiny_config()).train(training)
    batch = labelled()
    batch["order_labels"][1] = -100
    out = model(**batch)
    full = model(batch["input_ids"], batch["attention_mask"], batch["token_type_ids"], return_logits=True)
    words = F.cross_entropy(
        full.prediction_logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum"
    )
    order = F.cross_entropy(full.seq_relationship_logits[[0, 2]], torch.tensor([0, 1]), reduction="sum")
    torch.testing.assert_close(out.masked_lm_total, words)
    torch.testing.assert_close(out.order_total, order)
    torch.testing.assert_close(out.loss, words / (batch["labels"] != -100).sum() + order / 2)
    assert (out.prediction_logits is None) == training


def test_each_loss_term_works_alone() -> None:
    model = BertBlocksForPreTraining(tiny_config()).train()
    batch = labelled()
    both = model(**batch)
    words = model(**{key: value for key, value in batch.items() if key != "order_labels"})
    order = model(**{key: value for key, value in batch.items() if key != "labels"}, return_logits=False)
    assert words.order_total is None
    assert order.masked_lm_total is None
    torch.testing.assert_close(words.loss + order.loss, both.loss)
    assert model(batch["input_ids"], batch["attention_mask"]).loss is None


def test_packed_batches_have_a_label_for_each_sequence() -> None:
    model = BertBlocksForPreTraining(tiny_config()).eval()
    batch = labelled()
    real = batch["attention_mask"] == 1
    flat = {key: batch[key][real] for key in ("input_ids", "token_type_ids", "labels")}
    bounds = torch.tensor([0, 9, 13, 19])
    packed = model(**flat, cu_seqlens=bounds, order_labels=batch["order_labels"])
    padded = model(**batch)
    for key in ("masked_lm_total", "order_total", "seq_relationship_logits"):
        torch.testing.assert_close(packed[key], padded[key], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"order_labels has shape \[2\]; it must be \[3\]"):
        model(**flat, cu_seqlens=bounds, order_labels=torch.tensor([0, 1]))


@pytest.mark.parametrize("options", [{}, {"pooler": False, "norm_pos": "pre", "tie_word_embeddings": False}], ids=str)
def test_the_checkpoint_loads_for_both_tasks(tmp_path: Path, options: Any) -> None:
    model = BertBlocksForPreTraining(tiny_config(**options)).eval()
    model.save_pretrained(tmp_path)
    batch = labelled()
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "token_type_ids")}
    expected = model(**inputs)
    again = AutoModelForPreTraining.from_pretrained(tmp_path)
    assert isinstance(again, BertBlocksForPreTraining)
    torch.testing.assert_close(again(**inputs).seq_relationship_logits, expected.seq_relationship_logits)
    masked_lm = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert isinstance(masked_lm, BertBlocksForMaskedLM)
    assert masked_lm.model.pooler is None
    torch.testing.assert_close(masked_lm(**inputs).logits, expected.prediction_logits)
    assert isinstance(bertblocks.load(tmp_path)[0], BertBlocksForPreTraining)


def test_a_masked_lm_checkpoint_gets_a_fresh_order_head(tmp_path: Path) -> None:
    model = BertBlocksForMaskedLM(tiny_config())
    model.save_pretrained(tmp_path)
    with expect_log("newly initialized, must be trained"):
        two_headed, _ = bertblocks.load(tmp_path, task="pretraining")
    assert torch.equal(two_headed.head.dense.weight, model.head.dense.weight)
    assert two_headed.order.weight.std() > 0
