"""Models of fewer layers: they compute what transformers' model computes without the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ModernBertConfig, ModernBertModel

from bertblocks import BertBlocksForMaskedLM, BertBlocksModel, from_huggingface
from bertblocks.checkpoints.cut import cut, kept_layers
from bertblocks.checkpoints.save import to_huggingface
from tests.helpers import tiny_config

IDS = torch.tensor([[2, 7, 9, 11, 3]])


def test_a_cut_bert_is_the_bert_of_transformers_without_the_other_layers() -> None:
    config = BertConfig(vocab_size=40, hidden_size=32, num_hidden_layers=6, num_attention_heads=2, intermediate_size=48)
    theirs = BertForMaskedLM(config).eval()
    ours = cut(from_huggingface(theirs), 3)
    theirs.bert.encoder.layer = nn.ModuleList(theirs.bert.encoder.layer[index] for index in (0, 2, 5))
    assert torch.allclose(ours(IDS).logits, theirs(IDS).logits, atol=1e-5)
    exported: Any = to_huggingface(ours, "bert")
    assert exported.config.num_hidden_layers == 3


@pytest.mark.parametrize("kept", [[0, 2, 4], [0, 1, 3, 4]], ids=["global layers", "both kinds"])
def test_a_kept_layer_keeps_its_kind(kept: list[int]) -> None:
    """ModernBERT's layers are global or local, and the first one lacks a norm."""
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48}
    tokens = {"pad_token_id": 0, **dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)}
    kinds = {"num_hidden_layers": 5, "global_attn_every_n_layers": 2, "local_attention": 4}
    config = ModernBertConfig(**sizes, **tokens, **kinds)
    theirs = ModernBertModel(config).eval()
    ours = from_huggingface(theirs)
    small = cut(ours, len(kept))
    assert kept_layers(5, len(kept)) == kept
    assert small.config.layer_types == [ours.config.layer_types[layer] for layer in kept]
    theirs.layers = nn.ModuleList(theirs.layers[layer] for layer in kept)
    theirs.config.layer_types = [theirs.config.layer_types[layer] for layer in kept]
    ids = torch.randint(2, 40, (1, 12))
    found = small(ids).last_hidden_state
    assert torch.allclose(found, theirs(ids).last_hidden_state, atol=1e-5)
    assert torch.allclose(found, to_huggingface(small, "modernbert")(ids).last_hidden_state, atol=1e-5)


def test_overrides_stay_with_their_layer() -> None:
    model = BertBlocksModel(tiny_config(num_hidden_layers=4, layer_overrides={3: {"intermediate_size": 40}}))
    small = cut(model, 2)
    assert small.config.layer_overrides == {1: {"intermediate_size": 40}}
    assert torch.equal(small.encoder.layers[1].mlp.down.weight, model.encoder.layers[3].mlp.down.weight)
    assert cut(model, 1).config.layer_overrides is None


def test_layers_that_share_weights_run_fewer_times() -> None:
    model = BertBlocksForMaskedLM(tiny_config(num_hidden_layers=4, num_hidden_groups=1)).eval()
    small = cut(model, 2)
    states = model(IDS, output_hidden_states=True).hidden_states
    assert torch.allclose(small(IDS, output_hidden_states=True).hidden_states[2], states[2], atol=1e-6)


@pytest.mark.parametrize("layers", [0, 4])
def test_a_number_of_layers_that_the_model_does_not_have_is_an_error(layers: int) -> None:
    with pytest.raises(ValueError, match=f"layers is {layers}; the model has 3 layers"):
        cut(BertBlocksModel(tiny_config()), layers)
